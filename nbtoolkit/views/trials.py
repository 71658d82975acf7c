"""Trials: the table of a sweep's trials, sorted by any column, a page at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nbtoolkit.report.words import number, setting
from nbtoolkit.runtime.table import text_columns
from nbtoolkit.search.table import SweepTable
from nbtoolkit.search.trial import Trial
from nbtoolkit.views.markup import boxed, columns, said
from nbtoolkit.views.state import State

PAGE = 20
"""Rows of a page: 1,000 rows at once would cost the browser more than they tell."""

_FIXED = ("trial", "state", "seconds", "reason")


@dataclass(frozen=True)
class Order:
    """What a table is sorted by, and which page of it is seen.

    Attributes:
        by: a column's name; one that is not there counts as ``"trial"``.
        down: whether the largest comes first.
        page: from 1; one beyond the last is the last.
    """

    by: str = "trial"
    down: bool = True
    page: int = 1


def column_names(state: State | None) -> list[str]:
    """The columns of the trials' table, which are what it can be sorted by."""
    if state is None or not isinstance(state.table, SweepTable):
        return ["trial"]
    params = dict.fromkeys(name for one in state.table.trials.values() for name in one.params)
    first = ["trial", "state", *state.table.metrics, "seconds"]
    return [*first, *(name for name in params if name not in first), "reason"]


def largest_first(state: State | None, by: str) -> bool:
    """Whether a table sorted by a column begins with its largest; by a metric with the best."""
    table = state.table if state is not None else None
    if not isinstance(table, SweepTable) or by not in table.metrics:
        return True
    return table.directions[table.metrics.index(by)] == "maximize"


def pages(state: State | None) -> int:
    """How many pages the table has; 1 at least."""
    count = len(state.table.trials) if state and isinstance(state.table, SweepTable) else 0
    return max(math.ceil(count / PAGE), 1)


def trials(state: State | None, order: Order | None = None) -> str:
    """A page of the table as HTML; of a cross-validation its folds."""
    order = order or Order()
    if state is None or state.table is None:
        return ""
    if not isinstance(state.table, SweepTable):
        return boxed(state.table.html())
    header, lines = _page(state, state.table, order)
    if not lines:
        return boxed(said("No trial has begun yet."))
    page = min(max(order.page, 1), pages(state))
    caption = f"{len(state.table.trials)} trials, page {page} of {pages(state)}"
    signs = [
        f"{name} {'▾' if order.down else '▴'}" if name == order.by else name for name in header
    ]
    return boxed(columns(signs, lines, caption))


def trials_text(state: State | None, order: Order | None = None) -> str:
    """The same as lines of text."""
    if state is None or state.table is None:
        return ""
    if not isinstance(state.table, SweepTable):
        return state.table.text()
    header, lines = _page(state, state.table, order or Order())
    return text_columns(header, lines) if lines else "no trial has begun yet"


def _page(state: State, table: SweepTable, order: Order) -> tuple[list[str], list[list[str]]]:
    names = column_names(state)
    by = order.by if order.by in names else "trial"
    ordered = _sorted(list(table.trials.values()), table.metrics, by, down=order.down)
    first = (min(max(order.page, 1), pages(state)) - 1) * PAGE
    shown = ordered[first : first + PAGE]
    header = ["best", *names]
    best = {one.number for one in table.best}
    lines = [
        ["★" if one.number in best else "", *(_told(_value(one, table.metrics, n)) for n in names)]
        for one in shown
    ]
    return header, lines


def _sorted(found: list[Trial], metrics: Sequence[str], by: str, *, down: bool) -> list[Trial]:
    """Numbers by size, then texts; trials without a value come last either way."""
    keyed = [(_key(_value(one, metrics, by)), one) for one in found]
    there = sorted((pair for pair in keyed if pair[0]), key=lambda pair: pair[0], reverse=down)
    return [one for _, one in there] + [one for key, one in keyed if not key]


def _key(value: Any) -> tuple[Any, ...]:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ()
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (0, value, "") if is_number else (1, 0, str(value))


def _value(trial: Trial, metrics: Sequence[str], name: str) -> Any:
    """What stands in a column of a trial."""
    if name in metrics:
        at = list(metrics).index(name)
        return trial.values[at] if at < len(trial.values) else trial.latest
    if name in _FIXED:
        return trial.number if name == "trial" else getattr(trial, name)
    return trial.params.get(name)


def _told(value: Any) -> str:
    if value is None:
        return ""
    return number(value) if isinstance(value, float) else setting(value)
