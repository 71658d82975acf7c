"""Folders of sweeps, runs and cross-validations, written with the classes of their events."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path

from nbtoolkit.cards import Card, ColouredCell, Part, html
from nbtoolkit.config.schema import Config
from nbtoolkit.run.events import (
    DevicesSampled,
    Event,
    EventLog,
    FoldChanged,
    IntermediateReported,
    MetricsLogged,
    MetricsReported,
    NoteAdded,
    RankPhaseChanged,
    RunEnded,
    RunStarted,
    TrialChanged,
)
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.search.study.sweep_config import load_sweep_config
from nbtoolkit.views.page import cards_of
from nbtoolkit.views.state import State
from nbtoolkit.views.trial_rows import EVERYTHING, View, trial_page

NOON = 1767225600.0
"""2026-01-01 00:00 UTC, the start of every folder here."""

PLAN = {"processes": 1, "device_names": [], "device_type": "cpu", "precision": "fp32"}

SPACE = {
    "optim.lr": {"type": "float", "low": 0.0001, "high": 0.3, "log": True},
    "optim.weight_decay": {"type": "float", "low": 0.00001, "high": 0.1, "log": True},
    "model.hidden": [8, 16, 32, 64, 128],
    "model.dropout": {"type": "float", "low": 0.0, "high": 0.5},
}


def folder(parent: Path, name: str, events: Iterable[Event], **files: object) -> RunPaths:
    """Write a folder with its events; ``files``: JSON files by name."""
    paths = RunPaths(parent / name)
    paths.folder.mkdir(parents=True)
    for file, content in files.items():
        (paths.folder / f"{file}.json").write_text(json.dumps(content))
    log = EventLog(paths.events)
    for event in events:
        log.write(event)
    log.close(durable=False)
    return paths


def started(config: dict[str, object] | None = None, **more: object) -> RunStarted:
    """The first event, with the settings that differ from the defaults."""
    settings = Config().with_overrides(config or {}).to_dict()
    return RunStarted(t=NOON, config=settings, plan=PLAN, **more)  # type: ignore[arg-type]


# --- sweeps ---


def sweep(
    parent: Path,
    *,
    ended: int = 20,
    planned: int = 20,
    slots: int = 2,
    epochs: int = 12,
    status: str | None = "completed",
    name: str = "20260101T000000-friedman-843e",
    more: Iterable[Event] = (),
    direction: str = "minimize",
    seed: int = 2,
) -> RunPaths:
    """Write a sweep of a regression by four parameters, with a median pruner.

    Args:
        parent: where the folder is made.
        ended: the number of trials that have ended; with ``status=None`` one more runs per slot.
        planned: the number of trials of its budget.
        slots: the number of trials at the same time.
        epochs: reports of a whole trial, one every two seconds.
        status: how it ended; None: it has not.
        name: of the folder.
        more: events before the last one.
        direction: ``"maximize"``: the values are negative.
        seed: decides parameters and values.
    """
    trials = _Trials(random.Random(seed), epochs, -1.0 if direction == "maximize" else 1.0)
    free = [NOON + 0.5 + 0.1 * slot for slot in range(slots)]
    for number in range(ended):
        slot = min(range(slots), key=free.__getitem__)
        free[slot] = trials.train(number, free[slot])
    begun = [started({"train.epochs": epochs}, search="sweep")]
    begun += [NoteAdded(t=NOON, text=f"{slots} slots (cpu 0, cpu 1), device_per_trial: 2 CPUs")]
    if status is None:
        now = max(free) + 3.0
        for number in range(ended, min(ended + slots, planned)):
            slot = min(range(slots), key=free.__getitem__)
            trials.train(number, free[slot], until=now)
            free[slot] = now
    events: list[Event] = sorted([*begun, *trials.events], key=lambda event: event.t)
    events += more
    if status is not None:
        seconds = max(free) - NOON
        events.append(RunEnded(t=NOON + seconds, status=status, seconds=seconds))
    paths = folder(parent, name, events)
    study = {"name": "friedman", "metric": "val_rmse", "direction": direction}
    source = {"study": study, "budget": {"n_trials": planned}, "space": SPACE}
    config = load_sweep_config(source, Config())
    (paths.folder / "sweep.yaml").write_text(config.to_yaml())
    return paths


class _Trials:
    """Simulates trials and collects their events."""

    def __init__(self, draw: random.Random, epochs: int, sign: float) -> None:
        self._draw, self._epochs, self._sign = draw, epochs, sign
        self._curves: list[list[float]] = []
        self._best = math.inf
        self.events: list[Event] = []

    def train(self, number: int, begin: float, until: float = math.inf) -> float:
        """Train a trial, at most until a time; returns when it ended."""
        draw = self._draw
        params = {
            "optim.lr": math.exp(draw.uniform(math.log(1e-4), math.log(0.3))),
            "optim.weight_decay": math.exp(draw.uniform(math.log(1e-5), math.log(0.1))),
            "model.hidden": draw.choice([8, 16, 32, 64, 128]),
            "model.dropout": draw.uniform(0.0, 0.5),
        }
        if number % 3 and number > 3:  # the sampler exploits
            params["optim.lr"] = math.exp(draw.gauss(math.log(0.015), 0.7))
            params["model.hidden"] = draw.choice([64, 128, 128])
        end = 0.34 + 0.05 * abs(math.log(params["optim.lr"] / 0.015)) ** 1.5
        end += (
            0.2 * (1 - math.log2(params["model.hidden"] / 8) / 4) + 0.12 * params["model.dropout"]
        )
        self._add(begin, number, "running", params)
        curve: list[float] = []
        at = begin
        for step in range(1, self._epochs + 1):
            at += 2.0 + draw.uniform(-0.1, 0.1)
            if at > until:
                return until
            value = end + 0.6 * math.exp(-step / 2.5) + draw.gauss(0, 0.012)
            curve.append(value)
            self.events.append(
                IntermediateReported(t=at, number=number, step=step, value=self._sign * value)
            )
            others = sorted(other[step - 1] for other in self._curves if len(other) >= step)
            pruned = until == math.inf and len(self._curves) >= 5
            if pruned and len(others) >= 3 and value > others[len(others) // 2]:
                reason = f"at step {step}, with val_rmse {value:g}"
                self._add(at, number, "pruned", params, seconds=at - begin, reason=reason)
                self._curves.append(curve)
                return at
        self._curves.append(curve)
        best = curve[-1] < self._best
        self._best = min(curve[-1], self._best)
        value = self._sign * curve[-1]
        self._add(at, number, "complete", params, seconds=at - begin, value=value, best=best)
        return at

    def _add(self, at: float, number: int, state: str, params: object, **more: object) -> None:
        self.events.append(
            TrialChanged(t=at, number=number, state=state, params=params, **more)  # type: ignore
        )


# --- single runs ---


def run(
    parent: Path,
    *,
    reported: int = 7,
    epochs: int = 12,
    status: str | None = None,
    error: str | None = None,
    traceback: str = "",
    name: str = "20260101T000000-train-1a2b",
) -> RunPaths:
    """Write a run that has reported some of its epochs, one every three seconds."""
    draw = random.Random(0)
    events: list[Event] = [started({"train.epochs": epochs, "optim.lr": 0.02, "model.hidden": 64})]
    for phase in ("started", "group", "ready"):
        events.append(RankPhaseChanged(t=NOON + 1, rank=0, phase=phase))
    at = NOON + 1
    for step in range(1, reported + 1):
        at += 3.0
        loss = 0.3 + 0.9 * math.exp(-step / 3) + draw.gauss(0, 0.01)
        logged = {"loss": loss, "samples_per_second": 5100.0 + step, "lr": 0.01}
        events.append(MetricsLogged(t=at, values=logged, step=step * 40))
        values = {"train_rmse": loss, "val_rmse": loss * 1.1, "val_r2": 1 - loss / 2}
        events.append(MetricsReported(t=at, values=values, step=step))
        use = {"rank": 0, "cpu": 0.8 + 0.02 * step, "memory": 0.4e9}
        events.append(DevicesSampled(t=at, readings=[use, _gpu(step)]))
    if status is not None:
        events.append(
            RunEnded(
                t=at + 1, status=status, seconds=at + 1 - NOON, error=error, traceback=traceback
            )
        )
    return folder(parent, name, events)


def _gpu(step: int) -> dict[str, float | str]:
    return {"index": 0, "utilization": 70.0 + 3 * step, "memory_used": 11.2e9}


# --- cross-validations ---


def cross_validation(
    parent: Path, *, done: int = 3, folds: int = 5, name: str = "20260101T000000-cv-77aa"
) -> RunPaths:
    """Write a cross-validation with some complete folds and one that runs."""
    events: list[Event] = [started({"train.epochs": 6}, search="cv")]
    for fold in range(min(done + 1, folds)):
        begin = NOON + 12 * fold
        events.append(FoldChanged(t=begin, fold=fold, state="running"))
        if fold < done:
            metrics = {"val_rmse": 0.36 + 0.01 * fold, "val_r2": 0.8 - 0.01 * fold}
            ended = {"state": "complete", "metrics": metrics, "seconds": 12.0}
            events.append(FoldChanged(t=begin + 12, fold=fold, **ended))  # type: ignore[arg-type]
    paths = folder(parent, name, events, folds={"k": folds, "repeats": 1})
    for fold in range(min(done + 1, folds)):
        steps = 6 if fold < done else 3
        reports = [
            MetricsReported(
                t=NOON + 12 * fold + 2 * step,
                values={"val_rmse": 0.36 + 0.01 * fold + 0.5 * math.exp(-step / 2)},
                step=step,
            )
            for step in range(1, steps + 1)
        ]
        folder(paths.folder / "folds", str(fold), [started({"train.epochs": 6}), *reports])
    return paths


def write_log(paths: RunPaths, text: str, rank: int = 0) -> None:
    """Write the output of a rank."""
    paths.log(rank).parent.mkdir(parents=True, exist_ok=True)
    paths.log(rank).write_text(text)


# --- what a page shows ---


def regions(
    state: State | None, chosen: View = EVERYTHING, now: float | None = None
) -> dict[str, str]:
    """Each card of a page as HTML, by name."""
    return {name: html([card], images=False) for name, card in cards_of(state, chosen, now).items()}


def part_html(part: Part) -> str:
    """A part of a card as a widget shows it."""
    return html([Card("", [part])], images=False)


def cell_text(cell: str | ColouredCell) -> str:
    """What a cell says."""
    return cell if isinstance(cell, str) else cell.text


def row_texts(state: State, chosen: View = EVERYTHING, now: float | None = None) -> list[list[str]]:
    """What the cells of a page of the trials' table say."""
    return [[*map(cell_text, row)] for row in trial_page(state, chosen, now).table.rows]


def row_numbers(state: State, chosen: View = EVERYTHING, now: float | None = None) -> list[int]:
    """The numbers of the trials on a page of the table."""
    return [int(row[0].lstrip("★ ")) for row in row_texts(state, chosen, now)]
