"""Keep how long each run has used which devices, in ``<output_dir>/quota.json``.

The file outlives the folders of the runs, and ``nb.pack`` carries it. It is one JSON object, with
an entry for each attempt of a run; the key is the run and the time at which the attempt began, so
that two sessions that resumed the same run both count, and two copies of one attempt count once.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.run.events import EventReader, RunEnded, RunStarted
from nbtoolkit.run.paths import TRASH, exclusive, read_record, reading, write_json

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config

LEDGER = "quota.json"

WEEK_BEGINS = {"kaggle": 5}
"""Weekday (0: Monday) on which a host's week begins, at 00:00 UTC. Kaggle's quota is renewed on
Saturday; other hosts have the weeks of ISO 8601."""

COUNTS_SESSIONS = ("kaggle",)
"""Hosts whose quota counts the time of a session, however many of its GPUs are in use."""

# Folders that hold no run.
_NO_RUNS = ("checkpoints", "values", "ranks", "samples", "mlartifacts", "tensorboard", "wandb")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """An attempt of a run.

    Attributes:
        run: its folder, from that of the uppermost run on.
        began: unix seconds.
        seconds: until its end; of one that was killed, until its last event.
        host: the kind of host.
        devices: the number of GPUs; 0: it ran on the CPU.
        device: the name of the devices.
        function: module and name of the training function.
        epochs: ``train.epochs``.
        completed: whether it ended as completed.
    """

    run: str
    began: float
    seconds: float
    host: str = ""
    devices: int = 0
    device: str = "CPU"
    function: str = ""
    epochs: int = 0
    completed: bool = False

    @property
    def key(self) -> str:
        """The same for all copies of an attempt."""
        return f"{self.run} {self.began:.6f}"


def read_ledger(folder: Path) -> dict[str, Usage]:
    """The entries of an output folder's ledger, by key.

    Raises:
        RunFileError: the file is damaged.
    """
    known: dict[str, Any] = read_record(folder / LEDGER) or {}
    with reading(folder / LEDGER):
        return {key: Usage(**entry) for key, entry in known.items()}


def update_ledger(folder: Path, below: Path | None = None) -> list[Usage]:
    """Add the runs of an output folder to its ledger; returns all entries, oldest first.

    Args:
        folder: the output folder.
        below: look only for runs in this folder; None: in all, also in those in the trash.

    Raises:
        RunFileError: the ledger, or the events of a run, cannot be read.
        OSError: the ledger cannot be written.
    """
    with exclusive(folder / LEDGER):
        known = read_ledger(folder)
        found = {usage.key: usage for usage in _scan(folder, below or folder)}
        return _write(folder, known, found)


def merge_ledger(folder: Path, other: Path) -> None:
    """Add the entries of another folder's ledger; of two copies of an attempt the longer counts."""
    if (other / LEDGER).is_file():
        with exclusive(folder / LEDGER):
            _write(folder, read_ledger(folder), read_ledger(other))


def _write(folder: Path, known: dict[str, Usage], more: Mapping[str, Usage]) -> list[Usage]:
    merged = dict(known)
    for key, usage in more.items():
        if key not in merged or usage.seconds > merged[key].seconds:
            merged[key] = usage
    entries = sorted(merged.values(), key=lambda usage: usage.began)
    if merged != known:
        write_json(folder / LEDGER, {usage.key: asdict(usage) for usage in entries})
    return entries


def _scan(folder: Path, below: Path) -> Iterator[Usage]:
    """The attempts of all runs below a folder; a search counts by its trials or folds."""
    for parent, folders, files in os.walk(below):
        folders[:] = [
            name
            for name in folders
            if name not in _NO_RUNS and (not name.startswith(".") or name == TRASH)
        ]
        if "events.jsonl" in files and "versions.json" in files:
            yield from _attempts(Path(parent), _run_name(Path(parent), folder))


def _run_name(run: Path, folder: Path) -> str:
    """The path of a run from the uppermost run's folder on, which is the same wherever it lies."""
    parents = [run, *run.parents]
    inside = [one for one in parents if one != folder and one.is_relative_to(folder)]
    top = next(one for one in reversed(inside) if (one / "versions.json").is_file())
    return run.relative_to(top.parent).as_posix()


def _attempts(run: Path, name: str) -> Iterator[Usage]:
    started: RunStarted | None = None
    last, completed = 0.0, False
    for event in EventReader(run / "events.jsonl").read():
        if isinstance(event, RunStarted):
            if started is not None and started.search is None:
                yield _usage(name, started, last, completed)
            started, completed = event, False
        completed = completed or (isinstance(event, RunEnded) and event.status == "completed")
        last = max(last, event.t)
    if started is not None and started.search is None:
        yield _usage(name, started, last, completed)


def _usage(run: str, started: RunStarted, last: float, completed: bool) -> Usage:
    plan, train = started.plan, started.config.get("train", {})
    names = sorted(set(plan.get("device_names") or ())) if plan.get("devices") else []
    return Usage(
        run=run,
        began=started.t,
        seconds=max(0.0, last - started.t),
        host=started.host,
        devices=len(plan.get("devices") or ()),
        device=", ".join(names) or "CPU",
        function=started.function,
        epochs=int(train.get("epochs", 0)),
        completed=completed,
    )


# --- weeks and costs ---


def week_of(host: str, moment: float) -> datetime:
    """When the week of a host began, at a moment in unix seconds."""
    day = datetime.fromtimestamp(moment, timezone.utc)
    begin = day - timedelta(days=(day.weekday() - WEEK_BEGINS.get(host, 0)) % 7)
    return begin.replace(hour=0, minute=0, second=0, microsecond=0)


def spans_by_week(usage: Usage) -> Iterator[tuple[datetime, float, float]]:
    """The weeks of an attempt, each with the begin and the end of its part."""
    begin, end = usage.began, usage.began + usage.seconds
    while True:
        week = week_of(usage.host, begin)
        border = (week + timedelta(days=7)).timestamp()
        yield week, begin, min(end, border)
        if end <= border:
            return
        begin = border


def quota_hours(host: str, spans: list[tuple[float, float, int]]) -> float:
    """Hours of a quota that spans (begin, end, GPUs) use.

    Args:
        host: its kind; see :data:`COUNTS_SESSIONS`.
        spans: on GPUs; those on the CPU use nothing.
    """
    spans = sorted(span for span in spans if span[2])
    if host not in COUNTS_SESSIONS:
        return sum((end - begin) * devices for begin, end, devices in spans) / 3600
    total, until = 0.0, -sys.float_info.max
    for begin, end, _ in spans:
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total / 3600


def cost_text(
    config: Config, host: str, *, jobs: int, seconds: float, slots: int, devices: int
) -> str:
    """Say what a search costs of a quota; empty without ``runtime.quota_hours``.

    Args:
        config: the configuration.
        host: the kind of host.
        jobs: trainings.
        seconds: of one training.
        slots: trainings at a time.
        devices: GPUs of each training.
    """
    limit = config.runtime.quota_hours
    if limit is None:
        return ""
    one = (0.0, seconds, devices)
    turns = -(-jobs // slots) if host in COUNTS_SESSIONS else jobs
    return f"about {quota_hours(host, [one]) * turns:.3g} of your {limit:.3g} GPU hours"


def usual_seconds(config: Config, function: str) -> float | None:
    """The median time of completed trainings of a function with as many epochs; None: none yet."""
    folder = Path(config.runtime.output_dir).expanduser().absolute()
    entries = update_ledger(folder) if folder.is_dir() else []
    alike = [
        usage.seconds
        for usage in entries
        if usage.completed and usage.function == function and usage.epochs == config.train.epochs
    ]
    return statistics.median(alike) if alike else None
