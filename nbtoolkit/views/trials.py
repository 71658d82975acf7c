"""Render the table of trials and the overview, and all views as one page."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbtoolkit.report.run_summary import duration, number, setting
from nbtoolkit.study.table import SweepTable, Trial
from nbtoolkit.text_table import text_columns
from nbtoolkit.views.markup import bar, boxed, columns, rows, said, wrong
from nbtoolkit.views.state import State, seconds_left
from nbtoolkit.views.tabs import curves, devices, devices_text, history

# --- overview ---
# What runs, how far it is, when it ends, what is best, what was said last.


_MEANS = {
    "cut off": "its process is gone (killed, or out of memory): Go on takes it up where it was",
    "gone": "its folder was deleted",
    "stopped": "Go on takes it up where it was",
    "deadline": "its time was up: Go on takes it up where it was",
    "paused": "what runs is finished, nothing more is started: Go on starts the rest",
}


def overview(state: State | None, now: float | None = None) -> str:
    """The overview as HTML.

    Args:
        state: of the folder; None: nothing is watched.
        now: unix seconds.
    """
    if state is None:
        return boxed(said("Nothing is watched: press Launch or Sweep, or choose a run."))
    facts = {name: text for name, text in _facts(state, now).items() if text}
    parts = [said(headline(state), strong=True), bar(state.share(), progress(state, now))]
    parts += [rows(facts)]
    if state.status == "failed":
        parts.append(wrong(_error(state)))
    return boxed(*parts)


def overview_text(state: State | None, now: float | None = None) -> str:
    """The same as lines of text."""
    if state is None:
        return "nothing is watched"
    facts = {name: text for name, text in _facts(state, now).items() if text}
    lines = [headline(state), progress(state, now)]
    lines += [f"{name}: {text}" for name, text in facts.items()]
    return "\n".join([*lines, *([_error(state)] if state.status == "failed" else [])])


def headline(state: State) -> str:
    """What it is, and how it is."""
    words = {"run": "run", "sweep": "sweep", "cv": "cross-validation"}
    means = _MEANS.get(state.status) or state.unreadable
    told = f"{state.status} ({means})" if means else state.status
    return f"{words[state.kind]} {state.paths.run_id}: {told}"


def progress(state: State, now: float | None = None) -> str:
    """How far it is, and the time left, in words."""
    if state.table is not None:
        done, total = state.counts()
        noun = "folds" if state.kind == "cv" else "trials"
        text = f"{done} of {total} {noun}" if total else f"{done} {noun}"
    elif state.last_report is not None:
        of = f" of {total}" if (total := state.total_steps()) else ""
        text = f"step {number(state.last_report[1])}{of}"
    else:
        text = "nothing is reported yet" if state.live else "nothing was reported"
    left = seconds_left(state, now)
    return text if left is None else f"{text}, about {duration(left)} left"


def best(state: State) -> str:
    """The best so far in words; empty where there is none."""
    if isinstance(state.table, SweepTable):
        return "; ".join(
            f"trial {one.number}: "
            + ", ".join(
                f"{name} {number(value)}"
                for name, value in zip(state.table.metrics, one.values, strict=False)
            )
            for one in state.table.best[:3]
        )
    last = {name: points[-1][1] for name, points in state.points().items() if points}
    return ", ".join(f"{name} {number(value)}" for name, value in last.items())


def _facts(state: State, now: float | None) -> dict[str, str]:
    sweep = isinstance(state.table, SweepTable)
    return {
        "best" if sweep else "last": best(state),
        "parameters": _params(state),
        "states": _states(state, now),
        "time": _time(state, now),
        "notes": "\n".join(state.notes),
        "folder": str(state.paths.folder),
    }


def _params(state: State) -> str:
    if not isinstance(state.table, SweepTable) or not state.table.best:
        return ""
    chosen = state.table.best[0].params
    return ", ".join(
        f"{name}={number(value) if isinstance(value, float) else value}"
        for name, value in chosen.items()
    )


def _states(state: State, now: float | None) -> str:
    if isinstance(state.table, SweepTable):
        return state.table.summary(now)
    if state.table is not None:
        return state.table.summary()
    return ", ".join(f"rank {rank} {phase}" for rank, phase in sorted(state.phases.items()))


def _time(state: State, now: float | None) -> str:
    if state.began is None:
        return ""
    if state.ended is not None:
        return duration(state.ended.seconds or 0.0)
    if not state.live:
        return ""
    return duration(max((time.time() if now is None else now) - state.began, 0.0))


def _error(state: State) -> str:
    error = state.ended.error if state.ended is not None else None
    return f"{error}\nThe whole traceback is in {Path(state.paths.folder) / 'error.json'}"


# --- trials ---


PAGE = 20
"""Rows of a page: 1,000 rows at once would cost the browser more than they tell."""

_FIXED = ("trial", "state", "seconds", "reason")


@dataclass(frozen=True)
class SortOrder:
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


def trials(state: State | None, order: SortOrder | None = None) -> str:
    """A page of the table as HTML; of a cross-validation its folds."""
    order = order or SortOrder()
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


def trials_text(state: State | None, order: SortOrder | None = None) -> str:
    """The same as lines of text."""
    if state is None or state.table is None:
        return ""
    if not isinstance(state.table, SweepTable):
        return state.table.text()
    header, lines = _page(state, state.table, order or SortOrder())
    return text_columns(header, lines) if lines else "no trial has begun yet"


def _page(state: State, table: SweepTable, order: SortOrder) -> tuple[list[str], list[list[str]]]:
    names = column_names(state)
    by = order.by if order.by in names else "trial"
    ordered = _sorted(list(table.trials.values()), table.metrics, by, down=order.down)
    first = (min(max(order.page, 1), pages(state)) - 1) * PAGE
    shown = ordered[first : first + PAGE]
    header = ["best", *names]
    best = {one.number for one in table.best}
    lines = [
        [
            "★" if one.number in best else "",
            *(_cell_text(_value(one, table.metrics, n)) for n in names),
        ]
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


def _cell_text(value: Any) -> str:
    if value is None:
        return ""
    return number(value) if isinstance(value, float) else setting(value)


# --- page ---
# All that is told of a folder, one view below the other, as text and as HTML.


def page_text(state: State | None) -> str:
    """How it is, its trials or folds and its devices, as lines of text.

    Args:
        state: of the folder; None: nothing is watched.
    """
    parts = [overview_text(state), trials_text(state), devices_text(state)]
    return "\n\n".join(part for part in parts if part)


def page_html(state: State | None) -> str:
    """The same as HTML, with curves."""
    return "".join(view(state) for view in (overview, trials, history, curves, devices))
