"""Describe a run, a sweep or a cross-validation in words, for its page, a line and a terminal."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

from nbtoolkit.config.directions import direction_of
from nbtoolkit.run.failure import with_cells
from nbtoolkit.search.study.table import ENDED, SweepTable
from nbtoolkit.text_table import (
    counted,
    duration,
    metric_column,
    moment,
    number,
    one_line,
    param,
)
from nbtoolkit.views.chart import Points, drawable
from nbtoolkit.views.runs import plain_name
from nbtoolkit.views.state import State
from nbtoolkit.views.trial_rows import value_of
from nbtoolkit.views.workers import JobSpan
from nbtoolkit.wire.serialization import one_line as exception_line

_LINE = 400  # characters of a line of text

# What nb.fit logs and returns beside the metrics; these are no learning curves.
_EPOCHS = ("epoch", "best_epoch")
_SHARES = ("data_share", "compute_share", "communication_share")
_NO_CURVES = ("samples_per_second", "memory_gb_rank", "lr", "grad_norm", *_SHARES)


def name_of(state: State) -> str:
    """Return the name of a run and 4 hex digits: its id without the time."""
    return plain_name(state.paths)


def status_of(state: State) -> str:
    """Return the status in a word."""
    return "interrupted" if state.status == "cut off" else state.status


def explanation(state: State) -> str:
    """Say what the status means, and what can be done; empty where it is plain."""
    return " ".join(part for part in (_restarts(state), _meaning(state)) if part)


def _restarts(state: State) -> str:
    if not state.restarts:
        return ""
    count = len(state.restarts)
    times = "once" if count == 1 else f"{count} times"
    return f"Restarted {times} after {' and '.join(dict.fromkeys(state.restarts))}."


def _meaning(state: State) -> str:
    if state.live and state.stopping:
        return f"Stopping: waiting for each worker's next report ({state.stopping})."
    if state.status == "paused":
        return _paused(state)
    left = _left_to_do(state)
    sentences = {
        "cut off": f"Interrupted: its process died.{left} Resume continues it.",
        "stopped": f"Stopped.{left} Resume continues it.",
        "deadline": f"Its time was up.{left} Resume continues it.",
        "submitted": "Its job on the cluster has not begun. nb.attach(folder).status asks for it.",
        "gone": "Its folder was deleted.",
        "unreadable": state.unreadable,
    }
    return sentences.get(state.status, "")


def _paused(state: State) -> str:
    done, total = state.counts()
    busy = len(state.table.running) if isinstance(state.table, SweepTable) else 0
    left = f", {total - done - busy} left" if total else ""
    if busy:
        return f"Pausing: {counted(busy, 'trial')} still finishing, then paused{left}."
    return f"Paused{left}. Resume starts the rest."


def _left_to_do(state: State) -> str:
    done, total = state.counts()
    noun = "trials are" if state.kind == "sweep" else "folds are"
    return f" {done} of {total} {noun} done and kept." if total else " What it has saved is kept."


def error_of(state: State) -> str:
    """Return the error of a failed run, or of the trials that failed; empty without."""
    if state.ended is not None and state.ended.error:
        return with_cells(state.ended.error)
    if isinstance(state.table, SweepTable) and (count := state.table.count("failed")):
        failed = next(trial for trial in state.table.last(10**9) if trial.state == "failed")
        reason = with_cells(one_line(failed.reason or "no reason was given"))
        return f"{counted(count, 'trial')} failed, the last one is trial {failed.number}: {reason}"
    return ""


def progress(state: State) -> str:
    """Say how far it is: ``"12/20 trials"``, ``"epoch 7/12"``; empty before the first report."""
    if state.kind == "run":
        name, value = next(iter(state.speed().items()), ("", ""))
        return f"{name} {value}" if name in ("epoch", "step") else ""
    done, total = state.counts()
    return f"{done}/{total or '?'} {'folds' if state.kind == 'cv' else 'trials'}"


def trial_counts(state: State) -> str:
    """Count the trials by state; empty if it is no sweep."""
    if not isinstance(state.table, SweepTable):
        return ""
    always = ("complete", "pruned", "running", "failed") if state.live else ("complete", "failed")
    counts = {name: state.table.count(name) for name in (*ENDED, "running", "waiting")}
    shown = (f"{count} {name}" for name, count in counts.items() if count or name in always)
    return " · ".join(shown)


def times(state: State, now: float) -> str:
    """Say how long it took, and how long it still takes."""
    if state.began is None:
        return ""
    left = state.seconds_left(now)
    parts = [duration(state.elapsed(now))]
    parts += [f"about {duration(left)} left"] if left is not None else []
    return ", ".join(parts)


def ended_at(state: State) -> str:
    """Say when it ended; empty while it runs.

    A saved page is read days later, so it is not said how long ago that was.
    """
    return f"ended {moment(state.ended.t)} UTC" if state.over and state.ended else ""


def curves_of(state: State) -> dict[str, Points]:
    """Return the curves of a run's metrics: those of validations first.

    What :func:`nbtoolkit.fit` returns beside the metrics is left out: epochs and best values.
    """
    points = state.points()
    known = {
        name: line
        for name, line in points.items()
        if line and not name.startswith(_NO_CURVES)
        if name not in _EPOCHS and not (name[:5] == "best_" and name[5:] in points)
    }
    return dict(sorted(known.items(), key=lambda pair: pair[0].startswith("train_")))


def quantity_of(metric: str) -> str:
    """Return what a metric measures: ``"loss"`` for ``"train_loss"`` and ``"val_loss"``."""
    return metric.removeprefix("train_").removeprefix("val_")


def devices_of(plan: Mapping[str, object]) -> str:
    """Return the devices and the precision of a launch plan: ``"2 x Tesla T4, fp16"``."""
    if not plan:
        return ""
    listed = plan.get("device_names")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    devices = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    ranks = plan.get("processes", 1)
    devices = devices or ("CPU" if ranks == 1 else f"CPU, {ranks} processes")
    return f"{devices}, {plan.get('precision', '?')}"


def direction(state: State, metric: str) -> str | None:
    """Return ``"minimize"`` or ``"maximize"``, by the configuration or a metric's name."""
    checkpoint = _checkpoint(state)
    if checkpoint.get("monitor") == metric and checkpoint.get("mode") in ("min", "max"):
        return "minimize" if checkpoint["mode"] == "min" else "maximize"
    return direction_of(metric)


def best_point(state: State, metric: str, points: Points) -> tuple[float, float] | None:
    """Return step and value of a metric's best report; None: its direction is unknown."""
    known = [point for point in points if drawable(point[1])]
    way = direction(state, metric)
    if not known or way is None:
        return None
    return (max if way == "maximize" else min)(known, key=lambda point: point[1])


def main_metric(state: State) -> str:
    """Return the metric of a run that matters: ``checkpoint.monitor``, else the first one."""
    curves = curves_of(state)
    monitor = str(_checkpoint(state).get("monitor"))
    return monitor if monitor in curves else next(iter(curves), "")


def _checkpoint(state: State) -> Mapping[str, object]:
    checkpoint = state.config.get("checkpoint")
    return checkpoint if isinstance(checkpoint, Mapping) else {}


def fold_values(folds: Sequence[JobSpan]) -> dict[str, list[float]]:
    """Return the values of each metric in the complete folds, validation first."""
    values: dict[str, list[float]] = {}
    for fold in folds:
        for name, value in fold.metrics.items() if fold.state == "complete" else ():
            values.setdefault(name, []).append(value)
    return dict(sorted(values.items(), key=lambda pair: pair[0].startswith("train_")))


def spread(values: Sequence[float]) -> str:
    """Format mean and deviation: ``"0.3700 ± 0.0100"``."""
    if len(values) < 2:
        return number(values[0])
    both = [*values, statistics.fmean(values), statistics.stdev(values)]
    return " ± ".join(metric_column(both)[-2:])


def final_values(state: State) -> dict[str, float]:
    """Return the metrics: the last reported ones; of a sweep the best, of folds their mean."""
    if isinstance(state.table, SweepTable):
        best = [value_of(trial) for trial in state.table.best]
        values = {state.metric: best[0]} if best and len(state.table.metrics) == 1 else {}
        return {name: value for name, value in values.items() if value is not None}
    if state.kind == "cv":
        values_of_folds = fold_values(state.folds())
        return {name: statistics.fmean(values) for name, values in values_of_folds.items()}
    return {name: points[-1][1] for name, points in curves_of(state).items()}


def fixed(value: float | None) -> str:
    """Format a value as a column of the trials' table does: with all of its digits."""
    return metric_column([value])[0]


def step_name(state: State) -> str:
    """Return what a run's steps are: ``"epoch"`` or ``"step"``."""
    return "epoch" if "epoch" in state.speed() else "step"


def best(state: State) -> tuple[str, str, str]:
    """Return the name of what is best so far, its value, and where it was; empty: nothing yet."""
    if isinstance(state.table, SweepTable):
        trials = state.table.best
        if len(state.table.metrics) > 1 and trials:
            return "front", counted(len(trials), "trial"), ""
        if not trials:
            return "", "", ""
        return f"best {state.metric}", fixed(value_of(trials[0])), f"trial {trials[0].number}"
    if state.kind == "cv":
        name, values = next(iter(fold_values(state.folds()).items()), ("", []))
        where = f"mean of {counted(state.counts()[0], 'fold')}"
        return name, spread(values) if values else "", where
    name = main_metric(state)
    points = curves_of(state).get(name, [])
    if point := best_point(state, name, points):
        return f"best {name}", fixed(point[1]), f"at {step_name(state)} {number(point[0])}"
    return name, fixed(points[-1][1]) if points else "", ""


def differing(settings: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Tabulate the settings that are not equal in all: a row of name and values for each."""
    absent = object()
    rows = []
    for name in dict.fromkeys(name for mapping in settings for name in mapping):
        values = [mapping.get(name, absent) for mapping in settings]
        if any(value != values[0] for value in values):
            rows.append([name, *("" if value is absent else param(value) for value in values)])
    return rows


def summary_line(state: State, now: float | None = None) -> str:
    """Summarise a state in one line of at most 400 characters, without control characters."""
    now = time.time() if now is None else now
    name, value, where = best(state)
    parts = [
        f"{name_of(state)}: {status_of(state)}",
        progress(state) or state.activity(now),
        trial_counts(state).replace(" · ", ", "),
        times(state, now),
        f"{name} {value}" + (f" ({where})" if where else "") if value else "",
        *(f"{device.name}: {device.text}" for device in state.devices() if state.live),
        _first_line(error_of(state)),
    ]
    line = one_line(", ".join(part for part in parts if part))
    return line if len(line) <= _LINE else f"{line[: _LINE - 1]}…"


def _first_line(error: str) -> str:
    """Shorten ``module.Type: text`` to the type and what happened."""
    kind, _, text = error.partition(": ")
    return exception_line(kind, text) if text else error
