"""Sort, filter and format a sweep's trials as rows of a table.

A row is a grid of its own, so that a panel can place controls beside it. Rows of the same columns
and the same width are aligned with each other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from nbtoolkit.study.table import SweepTable, Trial
from nbtoolkit.text_table import duration, metric_column, number, one_line, param, shortened
from nbtoolkit.views.chart import BEST, ENDED, FAILED, RUNNING
from nbtoolkit.views.markup import RULE, chip
from nbtoolkit.views.runs import read_annotations
from nbtoolkit.views.state import State

ROWS = 10
"""Rows per page."""

SHOWS = ("all", "running", "complete", "pruned", "failed")
"""What :attr:`View.show` can be."""

_PARAMS = 8  # columns; a row's title has all parameters
_UNIT, _GAP = 7.0, 8  # pixels of a character and between columns, for the least width of a row
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
        ticked: numbers of the trials to compare, in the order in which they were chosen.
        log: name of the log that is shown; empty: the newest running one.
    """

    sort: str = ""
    reverse: bool = False
    page: int = 0
    show: str = "all"
    ticked: tuple[int, ...] = ()
    log: str = ""


EVERYTHING = View()
"""The view before anything was chosen."""


@dataclass(frozen=True)
class Column:
    """A column: ``name`` for :attr:`View.sort`, its heading, and its width in characters."""

    name: str
    label: str
    right: bool = True
    width: float = 7.0


@dataclass(frozen=True)
class TrialRow:
    """A row of the table.

    Attributes:
        number: the trial's number.
        running: whether the trial runs, so that it can be stopped.
        texts: the cells' texts.
        bars: for each cell the share of it that a bar fills; None: it has no bar.
        colour: of the trial's state.
        title: all parameters and the reason for its end, for a pointer.
    """

    number: int
    running: bool
    texts: tuple[str, ...]
    bars: tuple[float | None, ...]
    colour: str
    title: str


def columns(state: State | None) -> list[Column]:
    """Return the columns of the table; empty if it is no sweep."""
    if state is None or not isinstance(state.table, SweepTable):
        return []
    metrics = [_column(name, name, least=8) for name in state.table.metrics]
    delta = [Column("#delta", "Δ best", width=8)] if len(metrics) == 1 else []
    names = dict.fromkeys(name for trial in state.table.trials.values() for name in trial.params)
    labels = short_names(list(names)[:_PARAMS])
    return [
        Column("#", "#", width=6),
        Column("#state", "state", right=False, width=13),
        *metrics,
        *delta,
        Column("#time", "time", width=7),
        *(_column(name, label, least=8) for name, label in labels.items()),
    ]


def _column(name: str, label: str, least: int) -> Column:
    label = shortened(label, 14)
    return Column(name, label, width=max(len(label) + 2, least))


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return settings by dotted name, without their sections where that is unambiguous."""
    last = [name.rpartition(".")[2] for name in names]
    pairs = zip(names, last, strict=True)
    return {name: short if last.count(short) == 1 else name for name, short in pairs}


# --- order ---


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
    trials = list(table.trials.values())
    if chosen.show != "all":
        trials = [t for t in trials if _STATES.get(t.state, "failed") == chosen.show]
    if chosen.sort and chosen.sort in [column.name for column in columns(state)]:
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


# --- rows ---


@dataclass(frozen=True)
class TrialPage:
    """A page of the table.

    Attributes:
        columns: of the table.
        rows: those of the page.
        pages: the number of pages, at least 1.
        text: which trials are shown: ``"1 to 10 of 20, best first"``.
    """

    columns: list[Column]
    rows: list[TrialRow]
    pages: int
    text: str


def trial_page(state: State, chosen: View = EVERYTHING, now: float | None = None) -> TrialPage:
    """Return the page of a sweep's table that was chosen; ``now``: unix seconds."""
    trials = ordered(state, chosen)
    count, pages = len(trials), max(-(-len(trials) // ROWS), 1)
    first = min(max(chosen.page, 0), pages - 1) * ROWS
    text = f"{first + 1} to {min(first + ROWS, count)} of {count}" if count else "none"
    text += "" if chosen.show == "all" else f" {chosen.show}"
    text += "" if chosen.sort or chosen.reverse else ", best first"
    shown = columns(state)
    lines = _rows(state, trials[first : first + ROWS], shown, time.time() if now is None else now)
    return TrialPage(shown, lines, pages, text)


def _rows(
    state: State, trials: Sequence[Trial], shown: Sequence[Column], now: float
) -> list[TrialRow]:
    table = state.table
    assert isinstance(table, SweepTable)
    params = [column.name for column in shown if column.name[0] != "#"]
    params = params[len(table.metrics) :]
    metrics = [[value_of(trial, i) for trial in trials] for i in range(len(table.metrics))]
    values = list(zip(*map(metric_column, metrics), strict=True))
    bars = list(zip(*map(_bars, metrics, table.directions), strict=True))
    deltas = [_deltas(table, metrics[0])] if len(metrics) == 1 else []
    notes = read_annotations(state.paths.folder).notes
    result = []
    for index, trial in enumerate(trials):
        note = notes.get(str(trial.number), "")
        seconds = max(now - trial.began, 0.0) if trial.state == "running" else trial.seconds
        texts = (
            ("★ " if trial in table.best else "✎ " if note else "") + str(trial.number),
            state_text(state, trial),
            *values[index],
            *(column[index] for column in deltas),
            "" if seconds is None else duration(seconds),
            *(param(trial.params[name]) if name in trial.params else "" for name in params),
        )
        filled = (None, None, *bars[index], *[None] * (len(texts) - 2 - len(metrics)))
        colour = colour_of(table, trial)
        title = title_of(trial) + (f"\n{note}" if note else "")
        result.append(
            TrialRow(trial.number, trial.state == "running", texts, filled, colour, title)
        )
    return result


def _bars(values: Sequence[float | None], direction: str) -> list[float | None]:
    """The share of each value's bar among those shown: the best one fills its cell."""
    known = [value for value in values if value is not None]
    if len(known) < 2 or min(known) == max(known):
        return [None] * len(values)
    best, worst = (max, min) if direction == "maximize" else (min, max)
    far, near = worst(known), best(known)
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


# --- HTML ---


def template(shown: Sequence[Column]) -> str:
    """Return the ``grid-template-columns`` of each row."""
    return " ".join(f"minmax(0,{column.width:g}fr)" for column in shown)


def table_html(page: TrialPage, chosen: View = EVERYTHING) -> str:
    """Render a page with its headings as a table."""
    rows = [_row_html(row, page.columns) for row in page.rows]
    return _table("Trials", "".join([header_html(page.columns, chosen), *rows]))


def row_html(row: TrialRow, shown: Sequence[Column]) -> str:
    """Render a row as a table of its own, beside which there may be controls."""
    return _table(f"trial {row.number}", _row_html(row, shown))


def _table(name: str, rows: str) -> str:
    """Rows as a table for screen readers."""
    return f'<div role="table" aria-label="{name}">{rows}</div>'


def _row_html(row: TrialRow, shown: Sequence[Column]) -> str:
    cells = []
    for column, text, bar in zip(shown, row.texts, row.bars, strict=True):
        text = shortened(text, max(round(column.width), 4))
        inside = chip(text, row.colour) if column.name == "#state" else escape(text)
        fill = ""
        if bar is not None:
            stops = f"{row.colour}3d {bar:.0%},transparent {bar:.0%}"
            fill = f"background:linear-gradient(to left,{stops});"
        cells.append(_cell("cell", inside, column, fill))
    weight = "font-weight:600;" if row.colour == BEST else ""
    title = escape(row.title, quote=True)
    style = f"{weight}{_line(shown)}"
    return f'<div role="row" title="{title}" style="{style}">{"".join(cells)}</div>'


def header_html(shown: Sequence[Column], chosen: View = EVERYTHING) -> str:
    """Render the row of headings; an arrow marks the column that sorts."""
    arrow = {chosen.sort: " ▴" if chosen.reverse else " ▾"}
    cells = "".join(
        _cell("columnheader", escape(column.label + arrow.get(column.name, "")), column)
        for column in shown
    )
    return f'<div role="row" style="font-weight:600;{_line(shown)}">{cells}</div>'


def _cell(role: str, inside: str, column: Column, fill: str = "") -> str:
    style = fill + ("" if column.right else "text-align:left")
    return f'<span role="{role}" style="{style}">{inside}</span>'


def _line(shown: Sequence[Column]) -> str:
    least = round(_UNIT * sum(column.width for column in shown) + _GAP * len(shown))
    return (
        f"display:grid;grid-template-columns:{template(shown)};column-gap:{_GAP}px;"
        f"min-width:{least}px;line-height:24px;text-align:right;white-space:nowrap;"
        f"border-bottom:1px solid {RULE}"
    )
