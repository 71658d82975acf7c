"""Render the curves, devices, importances and log of a run or a search."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.errors import MissingExtra, RunFileError, SweepError
from nbtoolkit.report.charts import group
from nbtoolkit.report.run_summary import Points
from nbtoolkit.run.events import Reading
from nbtoolkit.search.sweep_result import read_sweep_config
from nbtoolkit.study.importance import LEAST, importance
from nbtoolkit.study.plots import COLOURS
from nbtoolkit.study.table import SweepTable
from nbtoolkit.text_table import gib
from nbtoolkit.views.markup import Mark, Series, bar, boxed, chart, said, wrong
from nbtoolkit.views.state import State

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


# --- curves ---
# What was reported by step, and the values of trials by their number.


_PANELS, _LINES = 6, len(COLOURS) - 2  # the last two are too near to the third and the second


def curves(state: State | None) -> str:
    """A run's metrics, or the reports of a sweep's newest and best trials, as HTML with SVG."""
    if state is None or state.kind == "cv":
        return ""
    if isinstance(state.table, SweepTable):
        return boxed(chart(f"{state.metric} while training", _trial_lines(state, state.table)))
    groups: dict[str, list[Series]] = {}
    for name, points in state.points().items():
        mark: Mark = "dashed" if name.startswith("train_") else "line"
        groups.setdefault(group(name), []).append(Series(name, points, mark))
    shown = list(groups.items())[:_PANELS]
    return boxed(*(chart(name, lines) for name, lines in shown))


def history(state: State | None) -> str:
    """Each trial's value by its number, with the best so far, as HTML with SVG."""
    if state is None or not isinstance(state.table, SweepTable):
        return ""
    pruned = [
        (float(number), points[-1][1])
        for number, points in sorted(state.trials.items())
        if points and state.table.trials[number].state == "pruned"
    ]
    values = sorted((float(number), value) for number, value in state.values.items())
    lines = [
        Series("complete", values, "dots", COLOURS[0]),
        Series("pruned, as last reported", pruned, "crosses", COLOURS[4]),
        Series("best so far", _best_so_far(values, state.direction), "steps", COLOURS[1]),
    ]
    return boxed(chart(f"{state.metric} of each trial", lines, along="trial"))


def _best_so_far(values: Points, direction: str) -> Points:
    best = accumulate((value for _, value in values), max if direction == "maximize" else min)
    return list(zip((number for number, _ in values), best, strict=True))


def _trial_lines(state: State, table: SweepTable) -> list[Series]:
    """The best trial, those that run, and those that ended last."""
    wanted = [*table.best[:1], *table.running, *table.last(_LINES)]
    numbers = dict.fromkeys(one.number for one in wanted if state.trials.get(one.number))
    return [Series(f"trial {n}", list(state.trials[n])) for n in list(numbers)[:_LINES]]


# --- devices ---
# What each rank and each GPU was last seen to use.


def devices(state: State | None) -> str:
    """Use and memory of each as HTML; it is read every 5 s while something runs."""
    if state is None:
        return ""
    lines = list(_lines(state))
    if not lines:
        return boxed(said("No device was looked at yet (every 5 s, tracking.device_metrics)."))
    return boxed(*(bar(share, text) for share, text in lines))


def devices_text(state: State | None) -> str:
    """The same as lines of text."""
    return "\n".join(text for _, text in _lines(state)) if state is not None else ""


def _lines(state: State) -> Iterator[tuple[float | None, str]]:
    for name, readings in state.readings().items():
        for reading in readings:
            share, text = _reading(reading)
            yield share, f"{name}: {text}" if name else text


def _reading(reading: Reading) -> tuple[float | None, str]:
    """How much of it is used, and the same in words."""
    if "index" in reading:
        used, use = reading.get("memory_used"), reading.get("utilization")
        words = [f"GPU {reading['index']}"]
        words += [f"{use:.0f} % used"] if isinstance(use, (int, float)) else []
        words += [f"{gib(int(used))} in use"] if isinstance(used, (int, float)) else []
        return (use / 100 if isinstance(use, (int, float)) else None), ", ".join(words)
    cores = float(reading.get("cpu", 0.0))
    memory = gib(int(reading.get("memory", 0)))
    return cores, f"rank {reading.get('rank')}: {cores:.2f} cores of CPU, {memory} of memory"


# --- importances ---
# How much of the values' variance each parameter explains, as bars.


_GROWN = 1.25  # times as many trials as when it was last computed


class Importances:
    """The bars of a sweep, computed anew when there are a quarter more trials, and at its end."""

    def __init__(self) -> None:
        self._of: tuple[Path, bool, int] | None = None
        self._html = ""

    def html(self, state: State | None) -> str:
        """The bars as HTML; empty where there are none to show."""
        if state is None or not isinstance(state.table, SweepTable):
            return ""
        here = (state.paths.folder, state.live, len(state.values))
        if self._of is None or self._of[:2] != here[:2] or here[2] >= self._of[2] * _GROWN:
            self._html, self._of = importances(state), here
        return self._html


def importances(state: State) -> str:
    """The bars of a sweep as HTML; Optuna is imported for it. Empty below ten complete trials."""
    if len(state.values) < LEAST or find_spec("optuna") is None:
        return ""
    try:
        found = importance(_trials(state), maximize=state.direction == "maximize")
    except (SweepError, ValueError):  # equally good trials; sweep.yaml was changed
        return ""
    except MissingExtra as error:
        return boxed(wrong(str(error)))
    lines = [bar(one.value, f"{one.name}: {one.text}") for one in found.shares]
    heading = said(f"Importance for {state.metric}", strong=True)
    return boxed(heading, *lines, *(said(note) for note in found.notes()))


def _trials(state: State) -> list[FrozenTrial]:
    """The trials that have ended well, and one for each that was pruned."""
    from optuna.trial import TrialState, create_trial

    assert isinstance(state.table, SweepTable)
    try:
        space = read_sweep_config(state.paths.folder).make_space()
    except RunFileError:  # gone, or damaged
        return []
    known = space.distributions()
    found = [create_trial(state=TrialState.PRUNED)] * state.table.count("pruned")
    for number, value in sorted(state.values.items()):
        params = space.encode(state.table.trials[number].params)
        kinds = {name: known[name] for name in params}
        found.append(create_trial(params=params, distributions=kinds, value=value))
    return found


# --- log ---


LINES = 20
"""Lines that are shown."""

_BYTES, _WIDTH = 16_000, 300  # read from the end; characters of a line
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def log_names(state: State | None) -> dict[str, Path]:
    """The logs that can be looked at: ``"rank 0"`` or ``"trial 7, rank 0"`` -> file.

    Of a sweep those of trials that run, then of the ones that ended last.
    """
    if state is None:
        return {}
    found = _logs(state.paths.folder, "")
    if isinstance(state.table, SweepTable):
        for trial in [*state.table.running, *state.table.waiting, *state.table.last()]:
            found |= _logs(state.trial(trial.number).folder, f"trial {trial.number}, ")
    if state.kind == "cv":
        for folder in sorted((state.paths.folder / "folds").glob("*")):
            found |= _logs(folder, f"fold {folder.name}, ")
    return found


def log(file: Path | None, lines: int = LINES) -> str:
    """The end of a log as HTML.

    Args:
        file: the log; None: none is chosen.
        lines: how many of its last lines.
    """
    if file is None:
        return ""
    text = log_text(file, lines)
    style = "margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px"
    return boxed(f'<pre style="{style}">{escape(text)}</pre>' if text else said("nothing written"))


def log_text(file: Path, lines: int = LINES) -> str:
    """The same as text: bars in their last state, no colours; empty where there is nothing."""
    try:
        with file.open("rb") as raw:
            raw.seek(max(raw.seek(0, 2) - _BYTES, 0))
            text = raw.read(_BYTES).decode(errors="replace")
    except OSError:
        return ""
    last = text.rstrip("\n").split("\n")[-lines:]
    return "\n".join(_line(line) for line in last)


def _line(line: str) -> str:
    """What is left of a line that a progress bar has overwritten."""
    seen = _ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2])
    return seen if len(seen) <= _WIDTH else f"{seen[:_WIDTH]}…"


def _logs(folder: Path, prefix: str) -> dict[str, Path]:
    files = {int(p.parent.name): p for p in folder.glob("ranks/[0-9]*/log.txt")}
    return {f"{prefix}rank {rank}": files[rank] for rank in sorted(files)}
