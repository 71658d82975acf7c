"""Summarise progress and quality in the few lines that fit the cell."""

from __future__ import annotations

import unicodedata
from html import escape
from itertools import accumulate

from nbtoolkit.report.run_summary import Points, duration
from nbtoolkit.study.table import SweepTable
from nbtoolkit.views.markup import bar, boxed, said, sparks, wrong
from nbtoolkit.views.state import State
from nbtoolkit.views.tabs import devices_text
from nbtoolkit.views.trials import best, progress

_LINE = 400  # characters of a line of text
_ERROR = 400  # of an error's own words: the cell shows the rest below
_DEVICES = 8  # lines

_NOUNS = {"run": "run", "sweep": "sweep", "cv": "cross-validation"}
_MEANS = {
    "cut off": "its process is gone; started again, it goes on where it was",
    "gone": "its folder was deleted",
}


def summary(state: State, now: float | None = None) -> str:
    """What a cell shows of a run, a sweep or a cross-validation, as HTML; all names escaped.

    Args:
        state: of the folder.
        now: unix seconds.
    """
    parts = [said(_headline(state), strong=True), bar(state.share(), progress(state, now))]
    if state.kind == "run":
        parts.append(sparks(state.points()))
    elif isinstance(state.table, SweepTable):
        parts += [sparks(_history(state)), state.table.html(now)]
    elif state.table is not None:
        parts.append(state.table.html())
    if state.live:
        parts += [_small(line) for line in devices_text(state).splitlines()[:_DEVICES]]
    if state.ended is not None and state.ended.error:
        parts.append(wrong(state.ended.error[:_ERROR]))
    return boxed(*parts)


def summary_line(state: State, now: float | None = None) -> str:
    """The same as one line of text: no control characters, and not longer than 400."""
    if isinstance(state.table, SweepTable):
        words = [state.table.summary(now)]
    elif state.table is not None:
        words = [state.table.summary()]
    else:
        words = [progress(state, now), best(state)]
    if state.live:
        words += devices_text(state).splitlines()
    elif state.table is None or state.ended is None:  # else the table has said it
        words.append(_how_it_is(state))
    return plain(", ".join(filter(None, words)))


def plain(text: str) -> str:
    """A text whose control characters (a terminal would obey them) are spaces, cut to a line."""
    clean = "".join(" " if unicodedata.category(one)[0] == "C" else one for one in text)
    return clean if len(clean) <= _LINE else f"{clean[: _LINE - 3]}..."


def _headline(state: State) -> str:
    means = f" ({_MEANS[state.status]})" if state.status in _MEANS else ""
    return f"{_NOUNS[state.kind]} {state.paths.run_id}: {_how_it_is(state)}{means}"


def _history(state: State) -> dict[str, Points]:
    """The best so far and each trial's value, by trial; empty where none has ended well."""
    ended = [(float(number), value) for number, value in sorted(state.values.items())]
    best_of = max if state.direction == "maximize" else min
    values = accumulate((value for _, value in ended), best_of)
    so_far = [(at, value) for (at, _), value in zip(ended, values, strict=True)]
    return {f"best {state.metric}": so_far, f"{state.metric} of each trial": ended}


def _small(text: str) -> str:
    return f'<div style="font-size:12px;opacity:0.85">{escape(text)}</div>'


def _how_it_is(state: State) -> str:
    """The status; of what has ended with the time it took."""
    seconds = None if state.gone or state.ended is None else state.ended.seconds
    took = f" after {duration(seconds)}" if seconds is not None else ""
    return state.status + took
