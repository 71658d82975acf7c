"""Sort, filter and format a sweep's trials as a page of a table."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from nbtoolkit.cards import BEST, ENDED, FAILED, RUNNING, ColouredCell, Table
from nbtoolkit.search.study.table import SweepTable, Trial
from nbtoolkit.text_table import duration, metric_column, number, one_line, param, shortened
from nbtoolkit.views.state import State

ROWS = 10
"""Rows per page."""

SHOWS = ("all", "running", "complete", "pruned", "failed")
"""What :attr:`View.show` can be."""

_PARAMS = 8  # columns; a row's title has all parameters
_WIDTH = 24  # characters of a cell
_HEADING = 14  # characters of a heading
_BAR = 0.12  # share of the worst value's bar
_STATES = {"complete": "complete", "pruned": "pruned", "stopped": "pruned", "running": "running"}


@dataclass(frozen=True)
class View:
    """What a person chose to see; the same for panel and static page.

    Attributes:
        sort: the name of a column of the trials' table; empty: best first.
        reverse: whether the sorted trials are in reverse order.
        page: page of that table, from 0; one beyond the last counts as the last.
        show: one of :data:`SHOWS`.
        log: name of the log that is shown; empty: the newest running one.
    """

    sort: str = ""
    reverse: bool = False
    page: int = 0
    show: str = "all"
    log: str = ""


EVERYTHING = View()
"""The view before anything was chosen."""


def columns(state: State | None) -> dict[str, str]:
    """Return the headings of the table by the names for :attr:`View.sort`; empty: no sweep."""
    if state is None or not isinstance(state.table, SweepTable):
        return {}
    metrics = {name: shortened(name, _HEADING) for name in state.table.metrics}
    delta = {"#delta": "Δ best"} if len(metrics) == 1 else {}
    names = dict.fromkeys(name for trial in state.table.trials.values() for name in trial.params)
    params = {
        name: shortened(label, _HEADING)
        for name, label in short_names(list(names)[:_PARAMS]).items()
    }
    return {"#": "#", "#state": "state", **metrics, **delta, "#time": "time", **params}


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return settings by dotted name, without their sections where that is unambiguous."""
    last = [name.rpartition(".")[2] for name in names]
    pairs = zip(names, last, strict=True)
    return {name: short if last.count(short) == 1 else name for name, short in pairs}


def value_of(trial: Trial, index: int = 0) -> float | None:
    """Return a trial's objective; of one that has none the value it reported last."""
    value = trial.values[index] if index < len(trial.values) else None
    value = trial.latest if value is None and index == 0 else value
    return value if value is None or math.isfinite(value) else None


def ordered(state: State, chosen: View = EVERYTHING) -> list[Trial]:
    """Return the trials that are shown, in order.

    By default the best complete ones come first. Running ones follow, at the latest at the end of
    the first page, where they can be stopped. Pruned and failed ones come last.
    """
    assert isinstance(state.table, SweepTable)
    table = state.table
    trials = _shown(table, chosen)
    if chosen.sort and chosen.sort in columns(state):
        result = _sorted(state, table, trials, chosen.sort)
    else:
        best = _sorted(state, table, [t for t in trials if t.state == "complete"], "#delta")
        best.sort(key=lambda trial: trial not in table.best)  # which knows of constraints
        running = [t for t in trials if t.state == "running"]
        rest = [t for t in trials if t.state not in ("complete", "running")]
        first = max(ROWS - len(running), ROWS // 2)
        result = [*best[:first], *running, *best[first:]]
        result += sorted(rest, key=lambda t: (t.state == "failed", -t.number))
    return result[::-1] if chosen.reverse else result


def page_count(table: SweepTable, chosen: View) -> int:
    """Return the number of pages of the trials that are shown, at least 1."""
    return max(len(_shown(table, chosen)) - 1, 0) // ROWS + 1


def _shown(table: SweepTable, chosen: View) -> list[Trial]:
    trials = list(table.trials.values())
    if chosen.show == "all":
        return trials
    return [trial for trial in trials if _STATES.get(trial.state, "failed") == chosen.show]


def _sorted(state: State, table: SweepTable, trials: list[Trial], by: str) -> list[Trial]:
    """Sort by a column: by a metric the best first, else the largest; without a value last."""
    by = table.metrics[0] if by == "#delta" else by
    largest = by not in table.metrics or table.directions[table.metrics.index(by)] == "maximize"
    keyed = [(_key(_sort_value(state, table, trial, by)), trial) for trial in trials]
    known = sorted((pair for pair in keyed if pair[0]), key=lambda pair: pair[0], reverse=largest)
    return [trial for _, trial in known] + [trial for key, trial in keyed if not key]


def _sort_value(state: State, table: SweepTable, trial: Trial, by: str) -> object:
    if by in table.metrics:
        return value_of(trial, table.metrics.index(by))
    if by == "#time":
        return trial.seconds
    if by == "#state":
        return trial.label
    return trial.number if by == "#" else trial.params.get(by)


def _key(value: object) -> tuple[int, float, str] | tuple[()]:
    """Sort numbers by size, before texts."""
    if value is None:
        return ()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return 0, value, ""
    return 1, 0, str(value)


@dataclass(frozen=True)
class TrialPage:
    """A page of the table.

    Attributes:
        table: the trials of the page.
        text: which trials are shown: ``"1 to 10 of 20, best first"``.
    """

    table: Table
    text: str


def trial_page(state: State, chosen: View = EVERYTHING, now: float | None = None) -> TrialPage:
    """Return the page of a sweep's table that was chosen; ``now``: unix seconds."""
    trials = ordered(state, chosen)
    count = len(trials)
    first = min(max(chosen.page, 0), max(count - 1, 0) // ROWS) * ROWS
    shown = trials[first : first + ROWS]
    text = f"{first + 1} to {min(first + ROWS, count)} of {count}" if count else "none"
    text += "" if chosen.show == "all" else f" {chosen.show}"
    text += "" if chosen.sort or chosen.reverse else ", best first"
    headings = columns(state)
    now = time.time() if now is None else now
    rows = _rows(state, shown, [name for name in headings if name[0] != "#"], now)
    return TrialPage(Table([*headings.values()], rows, [*map(title_of, shown)]), text)


def _rows(
    state: State, trials: Sequence[Trial], names: Sequence[str], now: float
) -> list[list[str | ColouredCell]]:
    """Return the cells of trials; ``names``: of the metrics and parameters."""
    table = state.table
    assert isinstance(table, SweepTable)
    params = names[len(table.metrics) :]
    metrics = [[value_of(trial, i) for trial in trials] for i in range(len(table.metrics))]
    texts = list(zip(*map(metric_column, metrics), strict=True))
    bars = list(zip(*map(_bars, metrics, table.directions), strict=True))
    deltas = [_deltas(table, metrics[0])] if len(metrics) == 1 else []
    rows = []
    for index, trial in enumerate(trials):
        colour = colour_of(table, trial)
        seconds = max(now - trial.began, 0.0) if trial.state == "running" else trial.seconds
        star = "★ " if trial in table.best else ""
        row: list[str | ColouredCell] = [
            f"{star}{trial.number}",
            ColouredCell(state_text(state, trial), colour),
            *map(_value_cell, texts[index], bars[index], [colour] * len(metrics)),
            *(column[index] for column in deltas),
            "" if seconds is None else duration(seconds),
        ]
        values = [param(trial.params[name]) if name in trial.params else "" for name in params]
        rows.append([*row, *(shortened(text, _WIDTH) for text in values)])
    return rows


def _value_cell(text: str, bar: float | None, colour: str) -> str | ColouredCell:
    return text if bar is None else ColouredCell(text, colour, bar)


def _bars(values: Sequence[float | None], direction: str) -> list[float | None]:
    """Return the share of each value's bar among those shown: the best one fills its cell."""
    known = [value for value in values if value is not None]
    if len(known) < 2 or min(known) == max(known):
        return [None] * len(values)
    best, worst = (max, min) if direction == "maximize" else (min, max)
    far = worst(known)
    near = best(known)
    return [v if v is None else _BAR + (1 - _BAR) * (v - far) / (near - far) for v in values]


def _deltas(table: SweepTable, values: Sequence[float | None]) -> list[str]:
    """Each value's difference to the best trial's, with its sign."""
    best = value_of(table.best[0]) if table.best else None
    away = [None if v is None or best is None or v == best else v - best for v in values]
    return [
        f"+{text}" if (v or 0) > 0 else text
        for v, text in zip(away, metric_column(away), strict=True)
    ]


def state_text(state: State, trial: Trial) -> str:
    """Return a trial's state with what it did: ``"● 7/12"``, ``"pruned at 3"``."""
    word = trial.label
    if trial.state == "running" and trial.folds:
        return f"● running, {sum(s == 'complete' for s in trial.folds.values())} folds done"
    if trial.state == "running":
        of = f"/{state.epochs}" if state.epochs and (trial.step or 0) <= state.epochs else ""
        return "● running" if trial.step is None else f"● {trial.step}{of}"
    if trial.state == "pruned" and trial.step is not None:
        return f"{word} at {trial.step}"
    return f"✕ {word}" if trial.state in ("failed", "infeasible") else word


def colour_of(table: SweepTable, trial: Trial) -> str:
    """Return the colour of a trial's state."""
    if trial in table.best:
        return BEST
    return {"running": RUNNING, "failed": FAILED, "infeasible": FAILED}.get(trial.state, ENDED)


def title_of(trial: Trial) -> str:
    """Describe a trial in a few lines, for a pointer."""
    lines = [f"trial {trial.number}: {trial.state}"]
    lines += [one_line(trial.reason)] if trial.reason else []
    values = trial.values or ([] if trial.latest is None else [trial.latest])
    lines += ["value " + ", ".join(map(number, values))] if values else []
    return "\n".join(lines + [f"{name} = {param(value)}" for name, value in trial.params.items()])
