"""Summarise progress and results in the few lines that fit below a cell."""

from __future__ import annotations

from html import escape

from nbtoolkit.report.run_summary import KIND_NAMES
from nbtoolkit.study.table import SweepTable
from nbtoolkit.text_table import duration, one_line
from nbtoolkit.views.markup import alert, paragraph, progress_bar, sparklines, view
from nbtoolkit.views.state import State
from nbtoolkit.views.tabs import devices_text
from nbtoolkit.views.trials import best, progress

_LINE = 400  # characters of a line of text
_ERROR = 400  # characters of an error; the cell shows the rest below
_DEVICES = 8  # lines

_EXPLANATIONS = {
    "cut off": "its process died; launched again, it resumes",
    "gone": "its folder was deleted",
}


def summary(state: State, now: float | None = None) -> str:
    """Render what a cell shows of a run, a sweep or a cross-validation as HTML.

    Args:
        state: of the folder.
        now: unix seconds; None: the clock's.
    """
    explanation = _EXPLANATIONS.get(state.status)
    heading = f"{KIND_NAMES[state.kind]} {state.paths.run_id}: {_status(state)}"
    heading += f" ({explanation})" if explanation else ""
    parts = [paragraph(heading, strong=True), progress_bar(state.share(), progress(state, now))]
    if state.kind == "run":
        parts.append(sparklines(state.points()))
    elif isinstance(state.table, SweepTable):
        best_name, name = f"best {state.metric}", f"{state.metric} of each trial"
        history = {best_name: state.best_values(), name: state.trial_values()}
        parts += [sparklines(history), state.table.html(now)]
    elif state.table is not None:
        parts.append(state.table.html())
    if state.live:
        for line in devices_text(state).splitlines()[:_DEVICES]:
            parts.append(f'<div style="font-size:12px;opacity:0.85">{escape(line)}</div>')
    if state.unreadable:
        parts.append(alert(state.unreadable[:_ERROR]))
    elif state.ended is not None and state.ended.error:
        parts.append(alert(state.ended.error[:_ERROR]))
    return view(*parts)


def summary_line(state: State, now: float | None = None) -> str:
    """Summarise a state in one line of at most 400 characters, without control characters."""
    if isinstance(state.table, SweepTable):
        parts = [state.table.summary(now)]
    elif state.table is not None:
        parts = [state.table.summary()]
    else:
        parts = [progress(state, now), best(state)]
    if state.live:
        parts += devices_text(state).splitlines()
    elif state.table is None or state.ended is None:  # else the table's summary has the status
        parts.append(_status(state))
    line = one_line(", ".join(filter(None, parts)))
    return line if len(line) <= _LINE else f"{line[: _LINE - 3]}..."


def _status(state: State) -> str:
    """Return the status, and the time it took once it has ended."""
    seconds = None if state.gone or state.ended is None else state.ended.seconds
    return state.status + (f" after {duration(seconds)}" if seconds is not None else "")
