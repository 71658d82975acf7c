"""Render the overview and the table of trials, and all views as one page."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nbtoolkit.report.run_summary import KIND_NAMES
from nbtoolkit.study.table import SweepTable, Trial
from nbtoolkit.text_table import duration, number, setting, text_columns
from nbtoolkit.views.markup import alert, data_table, paragraph, progress_bar, property_table, view
from nbtoolkit.views.state import State
from nbtoolkit.views.tabs import curves, devices, devices_text, history

# --- overview ---

_EXPLANATIONS = {
    "cut off": "its process died (killed, or out of memory): Go on resumes it",
    "gone": "its folder was deleted",
    "stopped": "Go on resumes it",
    "deadline": "its time was up: Go on resumes it",
    "paused": "running jobs finish, no more start: Go on starts the rest",
}


def overview(state: State | None, now: float | None = None) -> str:
    """Render the overview as HTML.

    Args:
        state: of the folder; None: no run is selected.
        now: unix seconds; None: the clock's.
    """
    if state is None:
        return view(paragraph("Nothing is watched: press Launch or Sweep, or choose a run."))
    parts = [paragraph(headline(state), strong=True)]
    parts += [progress_bar(state.share(), progress(state, now)), property_table(_facts(state, now))]
    if state.status == "failed":
        parts.append(alert(_error(state)))
    return view(*parts)


def overview_text(state: State | None, now: float | None = None) -> str:
    """Format the overview as lines of text."""
    if state is None:
        return "nothing is watched"
    lines = [headline(state), progress(state, now)]
    lines += [f"{name}: {text}" for name, text in _facts(state, now).items()]
    if state.status == "failed":
        lines.append(_error(state))
    return "\n".join(lines)


def headline(state: State) -> str:
    """Format what it is, and its status."""
    explanation = _EXPLANATIONS.get(state.status) or state.unreadable
    status = f"{state.status} ({explanation})" if explanation else state.status
    return f"{KIND_NAMES[state.kind]} {state.paths.run_id}: {status}"


def progress(state: State, now: float | None = None) -> str:
    """Format the progress and the time left."""
    if state.table is not None:
        done, total = state.counts()
        noun = "folds" if state.kind == "cv" else "trials"
        text = f"{done} of {total} {noun}" if total else f"{done} {noun}"
    elif state.last_report is not None:
        of = f" of {total}" if (total := state.total_steps()) else ""
        text = f"step {number(state.last_report[1])}{of}"
    else:
        text = "nothing is reported yet" if state.live else "nothing was reported"
    left = state.seconds_left(now)
    return text if left is None else f"{text}, about {duration(left)} left"


def best(state: State) -> str:
    """Format the best trials; of a single run the last values. Empty where there are none."""
    if isinstance(state.table, SweepTable):
        metrics = state.table.metrics
        return "; ".join(
            f"trial {trial.number}: {_named_numbers(zip(metrics, trial.values, strict=False))}"
            for trial in state.table.best[:3]
        )
    series = state.points().items()
    return _named_numbers((name, points[-1][1]) for name, points in series if points)


def _named_numbers(values: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in values)


def _facts(state: State, now: float | None) -> dict[str, str]:
    facts = {
        "best" if isinstance(state.table, SweepTable) else "last": best(state),
        "parameters": _best_params(state),
        "states": _states(state, now),
        "time": _time(state, now),
        "notes": "\n".join(state.notes),
        "folder": str(state.paths.folder),
    }
    return {name: text for name, text in facts.items() if text}


def _best_params(state: State) -> str:
    if not isinstance(state.table, SweepTable) or not state.table.best:
        return ""
    params = state.table.best[0].params
    return ", ".join(
        f"{name}={number(value) if isinstance(value, float) else value}"
        for name, value in params.items()
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
    return f"{error}\nThe whole traceback is in {state.paths.error}"


# --- trials ---

PAGE = 20
"""Rows per page; a browser is slow with 1,000 rows."""


@dataclass(frozen=True)
class SortOrder:
    """How the table of trials is sorted, and which page of it is shown.

    Attributes:
        by: a column's name; an unknown one counts as ``"trial"``.
        down: whether the largest comes first.
        page: from 1; one beyond the last counts as the last.
    """

    by: str = "trial"
    down: bool = True
    page: int = 1


def column_names(state: State | None) -> list[str]:
    """Return the columns by which the table of trials can be sorted."""
    if state is None or not isinstance(state.table, SweepTable):
        return ["trial"]
    params = dict.fromkeys(name for trial in state.table.trials.values() for name in trial.params)
    first = ["trial", "state", *state.table.metrics, "seconds"]
    return [*first, *(name for name in params if name not in first), "reason"]


def largest_first(state: State | None, by: str) -> bool:
    """Whether a table sorted by a column starts with its largest; by a metric, with the best."""
    table = state.table if state is not None else None
    if not isinstance(table, SweepTable) or by not in table.metrics:
        return True
    return table.directions[table.metrics.index(by)] == "maximize"


def pages(state: State | None) -> int:
    """Return the number of pages of the table, at least 1."""
    count = len(state.table.trials) if state and isinstance(state.table, SweepTable) else 0
    return max(math.ceil(count / PAGE), 1)


def trials(state: State | None, order: SortOrder | None = None) -> str:
    """Render a page of the table as HTML; of a cross-validation, its folds."""
    order = order or SortOrder()
    if state is None or state.table is None:
        return ""
    if not isinstance(state.table, SweepTable):
        return view(state.table.html())
    header, rows = _page(state, state.table, order)
    if not rows:
        return view(paragraph("No trial has started yet."))
    caption = (
        f"{len(state.table.trials)} trials, page {_page_number(state, order)} of {pages(state)}"
    )
    arrow = "▾" if order.down else "▴"
    marked = [f"{name} {arrow}" if name == order.by else name for name in header]
    return view(data_table(marked, rows, caption))


def trials_text(state: State | None, order: SortOrder | None = None) -> str:
    """Format a page of the table as lines of text; of a cross-validation, its folds."""
    if state is None or state.table is None:
        return ""
    if not isinstance(state.table, SweepTable):
        return state.table.text()
    header, rows = _page(state, state.table, order or SortOrder())
    return text_columns(header, rows) if rows else "no trial has started yet"


def _page(state: State, table: SweepTable, order: SortOrder) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a page."""
    names = column_names(state)
    by = order.by if order.by in names else "trial"
    ordered = _sorted(list(table.trials.values()), table.metrics, by, down=order.down)
    first = (_page_number(state, order) - 1) * PAGE
    rows = []
    for trial in ordered[first : first + PAGE]:
        cells = _cells(trial, table.metrics)
        mark = "★" if trial in table.best else ""
        rows.append([mark, *(_cell_text(cells.get(name)) for name in names)])
    return ["best", *names], rows


def _page_number(state: State, order: SortOrder) -> int:
    return min(max(order.page, 1), pages(state))


def _sorted(trials: list[Trial], metrics: Sequence[str], by: str, *, down: bool) -> list[Trial]:
    """Sort numbers by size before texts; trials without a value come last either way."""
    keyed = [(_sort_key(_cells(trial, metrics).get(by)), trial) for trial in trials]
    with_value = [(key, trial) for key, trial in keyed if key]
    with_value.sort(key=lambda pair: pair[0], reverse=down)
    return [trial for _, trial in with_value] + [trial for key, trial in keyed if not key]


def _sort_key(value: object) -> tuple[int, float, str] | tuple[()]:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return 0, value, ""
    return 1, 0, str(value)


def _cells(trial: Trial, metrics: Sequence[str]) -> dict[str, object]:
    """Return a trial's values by column; a metric without a final value has the latest."""
    values = dict(zip(metrics, trial.values, strict=False))
    return {
        **trial.params,
        "trial": trial.number,
        "state": trial.state,
        "seconds": trial.seconds,
        "reason": trial.reason,
        **dict.fromkeys(metrics, trial.latest),
        **values,
    }


def _cell_text(value: object) -> str:
    if value is None:
        return ""
    return number(value) if isinstance(value, float) else setting(value)


# --- page ---


def page_text(state: State | None) -> str:
    """Format status, trials or folds, and devices as lines of text; None: no run is selected."""
    parts = [overview_text(state), trials_text(state), devices_text(state)]
    return "\n\n".join(part for part in parts if part)


def page_html(state: State | None) -> str:
    """Render all views below each other as HTML."""
    return "".join(render(state) for render in (overview, trials, history, curves, devices))
