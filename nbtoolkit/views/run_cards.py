"""Render the cards of a run or a cross-validation, and those that all kinds share."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path

from pydantic import ValidationError

from nbtoolkit.cards import (
    BEST,
    ENDED,
    FAILED,
    RUNNING,
    Card,
    Line,
    Part,
    Properties,
    Table,
    Text,
    Tiles,
)
from nbtoolkit.config.schema import Config
from nbtoolkit.search.study.table import SweepTable
from nbtoolkit.text_table import duration, metric_column, number, setting, shortened
from nbtoolkit.views.chart import (
    PALETTE,
    Axis,
    Points,
    Series,
    Span,
    chart,
    drawable,
    sparkline,
    timeline,
)
from nbtoolkit.views.state import State
from nbtoolkit.views.text import (
    best,
    best_point,
    curves_of,
    devices_of,
    fold_values,
    quantity_of,
    spread,
    step_name,
    times,
)
from nbtoolkit.views.workers import DeviceUse, JobSpan, read_tail

_CHARTS = 6
_SPANS = 40  # of a row of the timeline
_LOG_RATIO = 20.0  # largest to smallest value, above which a loss has a logarithmic scale
_TRACEBACK = 8  # lines
_LOG_LINES = 200
_ENDED_LOGS = 5  # of trials that ended last
_LOG_TAIL = 16_000  # bytes read from the end
_LOG_WIDTH = 300  # characters of a line
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_FILES = ("config.yaml", "sweep.yaml", "events.jsonl", "study.jsonl", "error.pkl")


def metrics_card(state: State, now: float) -> Card:
    """Show a run's best and last values, its speed and the time left."""
    curves = curves_of(state)
    if not curves:
        text = state.activity(now) or "Nothing was reported."
        return Card("Metrics", [Text(text, "faint")], span=2)
    name, value, where = best(state)
    rows = []
    for metric, points in curves.items():
        at = best_point(state, metric, points)
        last, top = metric_column([points[-1][1], at[1] if at else None])
        rows.append([metric, last, top, number(at[0]) if at else ""])
    parts: list[Part] = [
        Text(value, "headline"),
        Text(where, "faint"),
        Table(["", "last", "best", f"at {step_name(state)}"], rows),
        Properties({**state.speed(), "time": times(state, now)}),
    ]
    return Card(name[0].upper() + name[1:], parts, span=2)


def run_curves_card(state: State) -> Card | None:
    """Draw a run's metrics by step: training and validation of one quantity in one chart."""
    curves = curves_of(state)
    lines = run_lines("", curves, RUNNING)
    for name, points in curves.items():
        if not name.startswith("train_") and (at := best_point(state, name, points)):
            lines.append((quantity_of(name), Series("best", [at], "ring", BEST, [number(at[1])])))
    pictures = metric_charts(lines, step_name(state))
    return Card("Curves", [Tiles(pictures, 240)], span=3) if pictures else None


def run_lines(label: str, curves: Mapping[str, Points], colour: str) -> list[tuple[str, Series]]:
    """Return the quantity and the line of each curve; training is dashed.

    Args:
        label: of the run; empty: the metrics' names.
        curves: the run's metrics by step.
        colour: of the run.
    """
    lines = []
    for name, points in curves.items():
        training = name.startswith("train_") or f"val_{name}" in curves
        text = f"{label}, training" if label and training else label or name
        if len(points) > 1:
            line = Series(text, points, "dashed" if training else "line", colour)
            lines.append((quantity_of(name), line))
    return lines


def metric_charts(lines: Iterable[tuple[str, Series]], step: str) -> list[list[Part]]:
    """Draw a chart for each quantity, below its name.

    Args:
        lines: quantities and their lines, of one run or of several, as from :func:`run_lines`.
        step: the name of the horizontal axis.
    """
    groups: dict[str, list[Series]] = {}
    for quantity, line in lines:
        groups.setdefault(quantity, []).append(line)
    shown = [
        (name, group)
        for name, group in groups.items()
        if any(line.mark in ("line", "dashed") for line in group)
    ]
    x = Axis(step, integer=True)
    return [
        [Text(shortened(name, 40)), chart(group, x=x, y=_quantity_axis(name, group), legend=True)]
        for name, group in shown[:_CHARTS]
    ]


def _quantity_axis(name: str, lines: Sequence[Series]) -> Axis:
    """Return the axis of a quantity: logarithmic for a loss that fell a lot."""
    values = [value for line in lines for _, value in line.points if drawable(value)]
    log = bool(values) and "loss" in name and 0 < min(values) * _LOG_RATIO < max(values)
    return Axis(name, low=min(values), high=max(values), log=True) if log else Axis(name)


def folds_card(state: State, trial: int | None = None) -> Card | None:
    """Show folds as columns, with mean and deviation.

    Args:
        state: of a cross-validation, or of a sweep.
        trial: the trial whose folds they are; None: the cross-validation's.
    """
    folds = state.folds(trial)
    if not folds:
        return None
    seconds = [fold.seconds for fold in folds]
    lines = [
        ["state", *(fold.state for fold in folds), ""],
        *(
            [name, *metric_column([f.metrics.get(name) for f in folds]), spread(values)]
            for name, values in fold_values(folds).items()
        ),
        ["time", *("" if s is None else duration(s) for s in seconds), ""],
    ]
    table = Table(["", *(f"fold {fold.fold}" for fold in folds), "mean ± sd"], lines)
    if trial is not None:
        return Card(f"Folds of trial {trial}", [table], span=3)
    name, value, where = best(state)
    top = [Text(value, "headline"), Text(where, "faint")] if value else []
    return Card(name or "Folds", [*top, table], span=3)


def fold_curves_card(state: State) -> Card | None:
    """Draw a line for each fold, in one chart per quantity."""
    folds = zip(state.fold_runs().items(), cycle(PALETTE), strict=False)
    lines = [
        line
        for (number, fold), colour in folds
        for line in run_lines(f"fold {number}", curves_of(fold), colour)
    ]
    pictures = metric_charts(lines, "step")
    return Card("Curves", [Tiles(pictures, 240)], span=2) if pictures else None


def workers_card(state: State, now: float) -> Card | None:
    """Draw what each slot did over time; say what each does now, and how busy the devices are."""
    rows = [] if state.kind == "run" else [row[-_SPANS:] for row in state.workers(now)]
    slots = {f"slot {index}": row for index, row in enumerate(rows)}
    begin = max((row[0].begin for row in rows), default=now)
    end = now if state.live else max((row[-1].end or now for row in rows), default=now)
    parts: list[Part] = []
    if drawn := timeline({name: _bars(state, r, begin) for name, r in slots.items()}, begin, end):
        parts.append(drawn)
    if state.live and slots:
        parts.append(Properties({name: _doing(state, row[-1]) for name, row in slots.items()}))
    devices = state.devices()
    parts += map(_device, devices)
    if state.live and not devices:
        parts.append(Text("Device readings appear after 5 s.", "faint"))
    if pace := _pace(state, now):
        parts.append(Text(pace, "faint"))
    title = "Devices" if state.kind == "run" else "Workers"
    return Card(title, parts, span=2) if parts else None


def _device(device: DeviceUse) -> Line:
    use = sparkline(device.history, f"use of {device.name}")
    return Line([Text(device.name), *([use] if use else []), Text(device.text)])


def _bars(state: State, row: Sequence[JobSpan], begin: float) -> list[Span]:
    best_trials = state.table.best if isinstance(state.table, SweepTable) else []
    bars = []
    for span in row:
        end = span.begin if span.end is None else span.end
        colour = {"running": RUNNING, "failed": FAILED}.get(span.state, ENDED)
        if any(trial.number == span.number for trial in best_trials):
            colour = BEST
        title = f"{span.name}: {span.state}, {duration(end - span.begin)}"
        label = span.fold if span.number is None else span.number
        if end > begin:
            bars.append(Span(max(span.begin, begin), end, str(label), title, colour))
    return bars


def _doing(state: State, span: JobSpan) -> str:
    """Return what a slot does now."""
    if span.state != "running":
        return "idle"
    trials = state.table.trials if isinstance(state.table, SweepTable) else {}
    trial = None if span.number is None else trials.get(span.number)
    if trial is None or trial.latest is None:
        return f"{span.name}, no report yet" if trial is not None else span.name
    of = f"/{state.epochs}" if state.epochs and (trial.step or 0) <= state.epochs else ""
    return f"{span.name}, step {trial.step}{of}, {number(trial.latest)}"


def _pace(state: State, now: float) -> str:
    """How many trials end per minute, and what pruning saved."""
    if not isinstance(state.table, SweepTable) or not state.table.ended:
        return ""
    parts = [f"{60 * state.table.ended / max(state.elapsed(now), 1e-3):.1f} trials/min"]
    saved = state.saved_by_pruning()
    parts += [f"pruning saved {100 * saved:.0f} % of the steps"] if saved else []
    return " · ".join(parts)


def log_card(state: State, chosen: str) -> Card | None:
    """Show the end of the chosen log, else of the newest running one."""
    logs = log_names(state)
    name = chosen if chosen in logs else next(iter(logs), "")
    if not name:
        return None
    text = log_text(logs[name])
    shown = Text(text, "code") if text else Text("Nothing was written yet.", "faint")
    return Card("Log", [shown], span=2, note=name)


def log_names(state: State | None) -> dict[str, Path]:
    """Return the logs by name: ``"rank 0"`` or ``"trial 7, rank 0"``.

    The first one is the most interesting: of a sweep the newest running trial's, else that of the
    trial that ended last; of a cross-validation the newest fold's.
    """
    if state is None:
        return {}
    logs: dict[str, Path] = {}
    if isinstance(state.table, SweepTable):
        table = state.table
        for trial in [*table.running[::-1], *table.waiting, *table.last(_ENDED_LOGS)]:
            logs |= _rank_logs(state.trial(trial.number).folder, f"trial {trial.number}, ")
    if state.kind == "cv":
        folders = (path for path in state.paths.folder.glob("folds/*") if path.name.isdecimal())
        for folder in sorted(folders, key=lambda folder: int(folder.name), reverse=True):
            logs |= _rank_logs(folder, f"fold {folder.name}, ")
    return logs | _rank_logs(state.paths.folder, "")


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


def files_card(state: State) -> Card:
    """Show where everything is, what differs from the default settings, notes and the error."""
    best_trials = state.table.best[:1] if isinstance(state.table, SweepTable) else []
    facts = {
        "best settings": "\n".join(f"{k}: {v!r}" for t in best_trials for k, v in t.params.items()),
        "changed settings": changed_settings(state.config),
        "devices": devices_of(state.plan),
        "folder": str(state.paths.folder),
        "files": ", ".join(name for name in _FILES if (state.paths.folder / name).exists()),
        "notes": "\n".join(state.notes),
    }
    parts: list[Part] = [Properties({name: text for name, text in facts.items() if text})]
    if state.ended is not None and state.ended.traceback:
        lines = state.ended.traceback.rstrip().splitlines()[-_TRACEBACK:]
        told = [f"The end of the traceback in {state.paths.events}:", *lines]
        parts.append(Text("\n".join(told), "alert"))
    return Card("Settings and files", parts, span=2)


def changed_settings(config: Mapping[str, object]) -> str:
    """List the settings that differ from the defaults; empty where they cannot be read."""
    with contextlib.suppress(ValidationError, TypeError):  # of an older version
        changed = Config.model_validate(config).differences(Config())
        return ", ".join(f"{name} {setting(value)}" for name, (value, _) in changed.items())
    return ""
