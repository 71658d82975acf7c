"""Render the curves, devices, parameter importance and log of a run or a search."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.errors import MissingExtra, RunFileError, SweepError
from nbtoolkit.report.charts import group
from nbtoolkit.run.events import Reading
from nbtoolkit.search.sweep_result import read_sweep_config
from nbtoolkit.study.importance import LEAST, importance
from nbtoolkit.study.plots import COLOURS
from nbtoolkit.study.table import SweepTable
from nbtoolkit.text_table import gib
from nbtoolkit.views.markup import Mark, Series, alert, chart, paragraph, progress_bar, view
from nbtoolkit.views.state import State, read_tail

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


# --- curves ---

_CHARTS = 6
_LINES = len(COLOURS) - 2  # the last two are too similar to the third and the second


def curves(state: State | None) -> str:
    """Draw a run's metrics, or the reports of a sweep's newest and best trials, by step."""
    if state is None or state.kind == "cv":
        return ""
    if isinstance(state.table, SweepTable):
        return view(chart(f"{state.metric} while training", _trial_lines(state, state.table)))
    groups: dict[str, list[Series]] = {}
    for name, points in state.points().items():
        mark: Mark = "dashed" if name.startswith("train_") else "line"
        groups.setdefault(group(name), []).append(Series(name, points, mark))
    return view(*(chart(name, lines) for name, lines in list(groups.items())[:_CHARTS]))


def history(state: State | None) -> str:
    """Draw each trial's value by its number, with the best value so far."""
    if state is None or not isinstance(state.table, SweepTable):
        return ""
    pruned = [
        (float(number), points[-1][1])
        for number, points in sorted(state.trials.items())
        if points and state.table.trials[number].state == "pruned"
    ]
    lines = [
        Series("complete", state.trial_values(), "dots", COLOURS[0]),
        Series("pruned, as last reported", pruned, "crosses", COLOURS[4]),
        Series("best so far", state.best_values(), "steps", COLOURS[1]),
    ]
    return view(chart(f"{state.metric} of each trial", lines, along="trial"))


def _trial_lines(state: State, table: SweepTable) -> list[Series]:
    """Select the best trial, the running ones, and those that ended last."""
    trials = [*table.best[:1], *table.running, *table.last(_LINES)]
    numbers = dict.fromkeys(trial.number for trial in trials if state.trials.get(trial.number))
    return [Series(f"trial {n}", list(state.trials[n])) for n in list(numbers)[:_LINES]]


# --- devices ---


def devices(state: State | None) -> str:
    """Render the newest use and memory of each rank and GPU, which are read every 5 s."""
    if state is None:
        return ""
    lines = list(_device_lines(state))
    if not lines:
        return view(paragraph("No device was read yet (every 5 s, tracking.device_metrics)."))
    return view(*(progress_bar(share, text) for share, text in lines))


def devices_text(state: State | None) -> str:
    """Format the newest use and memory of each rank and GPU as lines of text."""
    return "" if state is None else "\n".join(text for _, text in _device_lines(state))


def _device_lines(state: State) -> Iterator[tuple[float | None, str]]:
    """Yield the used share of each rank and GPU (None: unknown), and its line."""
    for name, readings in state.readings().items():
        for reading in readings:
            share, text = _gpu_line(reading) if "index" in reading else _rank_line(reading)
            yield share, f"{name}: {text}" if name else text


def _gpu_line(reading: Reading) -> tuple[float | None, str]:
    memory, percent = reading.get("memory_used"), reading.get("utilization")
    parts = [f"GPU {reading['index']}"]
    share = None
    if isinstance(percent, (int, float)):
        share = percent / 100
        parts.append(f"{percent:.0f} % used")
    if isinstance(memory, (int, float)):
        parts.append(f"{gib(int(memory))} in use")
    return share, ", ".join(parts)


def _rank_line(reading: Reading) -> tuple[float, str]:
    cores = float(reading.get("cpu", 0.0))
    memory = gib(int(reading.get("memory", 0)))
    return cores, f"rank {reading.get('rank')}: {cores:.2f} cores of CPU, {memory} of memory"


# --- importance of parameters ---

_GROWTH = 1.25  # recomputed when there are so many times the trials of the last time


class ImportanceCache:
    """Renders :func:`importances`; recomputes at a quarter more trials and at the sweep's end."""

    def __init__(self) -> None:
        self._computed_for: tuple[Path, bool, int] | None = None
        self._html = ""

    def html(self, state: State | None) -> str:
        """Render the bars; empty where there are none."""
        if state is None or not isinstance(state.table, SweepTable):
            return ""
        now, last = (state.paths.folder, state.live, len(state.values)), self._computed_for
        if last is None or last[:2] != now[:2] or now[2] >= last[2] * _GROWTH:
            self._html, self._computed_for = importances(state), now
        return self._html


def importances(state: State) -> str:
    """Render how much of the values' variance each parameter of a sweep explains, as bars.

    Empty below ten complete trials and without Optuna, which it imports.
    """
    if len(state.values) < LEAST or find_spec("optuna") is None:
        return ""
    try:
        computed = importance(_optuna_trials(state), maximize=state.direction == "maximize")
    except (SweepError, ValueError):  # all values are equal, or sweep.yaml was changed
        return ""
    except MissingExtra as error:
        return view(alert(str(error)))
    bars = [progress_bar(share.value, f"{share.name}: {share.text}") for share in computed.shares]
    heading = paragraph(f"Importance for {state.metric}", strong=True)
    return view(heading, *bars, *map(paragraph, computed.notes()))


def _optuna_trials(state: State) -> list[FrozenTrial]:
    """Make the complete trials, and one for each that was pruned."""
    from optuna.trial import TrialState, create_trial

    assert isinstance(state.table, SweepTable)
    try:
        space = read_sweep_config(state.paths.folder).make_space()
    except RunFileError:  # deleted, or damaged
        return []
    known = space.distributions()
    trials = [create_trial(state=TrialState.PRUNED)] * state.table.count("pruned")
    for number, value in sorted(state.values.items()):
        params = space.encode(state.table.trials[number].params)
        distributions = {name: known[name] for name in params}
        trials.append(create_trial(params=params, distributions=distributions, value=value))
    return trials


# --- log ---

_LOG_LINES = 20
_LOG_TAIL = 16_000  # bytes read from the end
_LOG_WIDTH = 300  # characters of a line
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def log_names(state: State | None) -> dict[str, Path]:
    """Return the logs by name: ``"rank 0"`` or ``"trial 7, rank 0"``.

    Of a sweep: running trials first, then those that ended last.
    """
    if state is None:
        return {}
    logs = _rank_logs(state.paths.folder, "")
    if isinstance(state.table, SweepTable):
        for trial in [*state.table.running, *state.table.waiting, *state.table.last()]:
            logs |= _rank_logs(state.trial(trial.number).folder, f"trial {trial.number}, ")
    if state.kind == "cv":
        for folder in sorted((state.paths.folder / "folds").glob("*")):
            logs |= _rank_logs(folder, f"fold {folder.name}, ")
    return logs


def log(file: Path | None) -> str:
    """Render the end of a log; empty for None."""
    if file is None:
        return ""
    style = "margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px"
    if text := log_text(file):
        return view(f'<pre style="{style}">{escape(text)}</pre>')
    return view(paragraph("nothing written"))


def log_text(file: Path, lines: int = _LOG_LINES) -> str:
    """Return the last lines of a log without colours, progress bars in their last state."""
    last = read_tail(file, _LOG_TAIL).rstrip("\n").split("\n")[-lines:]
    return "\n".join(map(_visible, last))


def _visible(line: str) -> str:
    """Return what is left of a line that a progress bar has overwritten."""
    text = _ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2])
    return text if len(text) <= _LOG_WIDTH else f"{text[:_LOG_WIDTH]}…"


def _rank_logs(folder: Path, prefix: str) -> dict[str, Path]:
    files = {int(path.parent.name): path for path in folder.glob("ranks/[0-9]*/log.txt")}
    return {f"{prefix}rank {rank}": files[rank] for rank in sorted(files)}
