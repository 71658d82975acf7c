"""Count the device-hours of the runs of an output folder, by host and week, from their events."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.config.schema import load_config
from nbtoolkit.errors import RunFileError, TuningError, some_names
from nbtoolkit.extras.tuning.answer import MeasuredTable
from nbtoolkit.host import COUNTS_SESSIONS
from nbtoolkit.run.events import EventReader, RunStarted
from nbtoolkit.run.paths import reading
from nbtoolkit.text_table import counted

if TYPE_CHECKING:
    pass

WEEK_BEGINS = {"kaggle": 5}
"""Weekday (0: Monday) on which a host's week begins, at 00:00 UTC. Kaggle's quota is renewed on
Saturday; other hosts have the weeks of ISO 8601."""

# Folders that hold no run.
_NO_RUNS = ("checkpoints", "values", "ranks", "mlartifacts", "tensorboard", "wandb")

_HEADER = ("host", "week from", "device", "runs", "device-hours", "used", "of", "left")


@dataclass(frozen=True, kw_only=True)
class QuotaRow:
    """What the runs of a host and a week used of one kind of device."""

    host: str
    week: str
    """The day on which the week begins, at 00:00 UTC: a Saturday on Kaggle, else a Monday."""
    device: str
    runs: int
    """Runs, trials and folds; attempts of one run count once."""
    device_hours: float
    """GPUs times hours, summed over the runs; 0 on the CPU."""
    used: float
    """Hours of the host's quota: on Kaggle those in which at least one run was there, since the
    quota counts the session and not its GPUs; else :attr:`device_hours`."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Quota(MeasuredTable):
    """The device-hours of the runs of an output folder, from :func:`quota`."""

    rows: tuple[QuotaRow, ...]
    """One row for each host, week and kind of device, the newest week first."""
    hours: float | None
    """The GPU hours of the weekly quota; None if they are not known."""
    folder: Path
    """The output folder."""
    skipped: tuple[str, ...] = ()
    """The folders that do not count because their events cannot be read."""

    @property
    def used(self) -> float:
        """The hours of the quota that the runs have used in the present week, on all hosts."""
        now = time.time()
        rows = (row for row in self.rows if row.week == f"{week_of(row.host, now):%Y-%m-%d}")
        return sum(row.used for row in rows)

    @property
    def left(self) -> float | None:
        """The hours of the quota that are left in the present week; None if it is not known."""
        return None if self.hours is None else max(0.0, self.hours - self.used)

    @property
    def why(self) -> str:
        """The number of runs, the folder and the skipped folders, as a line of text."""
        runs = sum(row.runs for row in self.rows)
        text = f"{counted(runs, 'run') if runs else 'no runs'} in {self.folder}"
        if not self.skipped:
            return text
        unreadable = f"{counted(len(self.skipped), 'folder')} with unreadable events"
        return f"{text}; not counted: {unreadable}: {some_names(self.skipped)}"

    def columns(self) -> tuple[Sequence[str], list[list[str]]]:
        """Return the names of the columns, and the texts of each row."""
        lines = []
        for row in self.rows:
            line = [row.host, row.week, row.device, str(row.runs)]
            line += [f"{row.device_hours:.2f}", f"{row.used:.2f}", "", ""]
            if self.hours is not None and row.device != "CPU":
                same = [other for other in self.rows if other.host == row.host]
                used = sum(other.used for other in same if other.week == row.week)
                line[-2:] = f"{self.hours:g}", f"{max(0.0, self.hours - used):.2f}"
            lines.append(line)
        return _HEADER, lines


def quota(output_dir: str | os.PathLike[str] | None = None, *, hours: float | None = None) -> Quota:
    """Count the device-hours that the runs of an output folder used, by host and week.

    The time of each attempt of a run counts, from its first event to its last one, even if the
    attempt was killed; runs whose folders are gone do not count. A folder whose events cannot be
    read does not count, and the result names it. The time between the runs of a notebook is not
    counted here, although Kaggle's own quota counts it.

    Args:
        output_dir: the output folder; None: ``runtime.output_dir`` of the default configuration.
        hours: the GPU hours of a week's quota (Kaggle: 30); None: ``runtime.quota_hours``.

    Raises:
        TuningError: there is no such folder, or ``hours`` is not positive.
    """
    runtime = load_config().runtime
    folder = Path(runtime.output_dir if output_dir is None else output_dir).expanduser().absolute()
    if not folder.is_dir() or (hours is not None and not hours > 0):
        raise TuningError(
            f"the quota is {hours!r} hours" if folder.is_dir() else f"there is no folder {folder}",
            allowed="an output folder with runs, and hours above 0",
            do='nb.quota("outputs", hours=30)',
        )
    spans, skipped = _read_all(folder)
    groups: dict[tuple[str, str, str], list[AttemptSpan]] = {}
    for span in spans:
        groups.setdefault((span.week, span.host, span.device), []).append(span)
    rows = [
        QuotaRow(
            host=host,
            week=week,
            device=device,
            runs=len({span.run for span in group}),
            device_hours=quota_hours("", group),
            used=quota_hours(host, group),
        )
        for (week, host, device), group in sorted(groups.items(), reverse=True)
    ]
    limit = runtime.quota_hours if hours is None else hours
    return Quota(rows=tuple(rows), hours=limit, folder=folder, skipped=tuple(skipped))


@dataclass(frozen=True, kw_only=True)
class AttemptSpan:
    """The time of an attempt of a run that lies in one week.

    Attributes:
        run: the run's folder, below the output folder.
        attempt: unix seconds at which the attempt began.
        week: the day on which the week begins.
        begin: unix seconds.
        end: unix seconds; for an attempt that was killed, those of its last event.
        host: the kind of host.
        devices: the number of GPUs; 0: it ran on the CPU.
        device: the name of the devices.
    """

    run: str
    attempt: float
    week: str
    begin: float
    end: float
    host: str
    devices: int
    device: str


def _read_all(folder: Path) -> tuple[list[AttemptSpan], list[str]]:
    """Read the spans of all runs below a folder, and the folders that cannot be read."""
    spans: list[AttemptSpan] = []
    skipped: list[str] = []

    def skip(error: OSError) -> None:
        skipped.append(os.path.relpath(error.filename, folder))

    for parent, folders, files in os.walk(folder, onerror=skip):
        folders[:] = [name for name in folders if _may_hold_runs(name)]
        if "events.jsonl" not in files:
            continue
        run = str(Path(parent).relative_to(folder))
        try:
            spans += _read_run(Path(parent) / "events.jsonl", run)
        except RunFileError:
            skipped.append(run)
    return spans, sorted(skipped)


def _may_hold_runs(name: str) -> bool:
    return not (name in _NO_RUNS or name.startswith("."))


def _read_run(events: Path, run: str) -> list[AttemptSpan]:
    """Read the spans of a run; a search has none, because its trials or folds have them.

    Raises:
        RunFileError: the file is damaged, or another user's.
    """
    attempts: list[tuple[RunStarted, float]] = []
    with reading(events):
        if not events.is_file():
            raise OSError("it is not a regular file")
        for event in EventReader(events).read():
            if isinstance(event, RunStarted):
                attempts.append((event, event.t))
            elif attempts:
                started, last = attempts[-1]
                attempts[-1] = started, max(last, event.t)
        if not attempts:
            raise ValueError("it has no event of a run")
        jobs = [attempt for attempt in attempts if attempt[0].search is None]
        return [span for started, last in jobs for span in _spans(run, started, last)]


def _spans(run: str, started: RunStarted, last: float) -> Iterator[AttemptSpan]:
    """Yield the parts of an attempt in each of its weeks."""
    devices = len(started.plan.get("devices") or ())
    names = sorted(set(started.plan.get("device_names") or ())) if devices else []
    begin = started.t
    while True:
        week = week_of(started.host, begin)
        border = (week + timedelta(days=7)).timestamp()
        yield AttemptSpan(
            run=run,
            attempt=started.t,
            week=f"{week:%Y-%m-%d}",
            begin=begin,
            end=min(last, border),
            host=started.host,
            devices=devices,
            device=", ".join(names) or "CPU",
        )
        if last <= border:
            return
        begin = border


def week_of(host: str, moment: float) -> datetime:
    """When the week of a host began, at a moment in unix seconds."""
    day = datetime.fromtimestamp(moment, timezone.utc)
    begin = day - timedelta(days=(day.weekday() - WEEK_BEGINS.get(host, 0)) % 7)
    return begin.replace(hour=0, minute=0, second=0, microsecond=0)


def quota_hours(host: str, spans: Sequence[AttemptSpan]) -> float:
    """Return the hours of a quota that spans use; those on the CPU use nothing.

    Args:
        host: the kind of host; see :data:`nbtoolkit.host.COUNTS_SESSIONS`.
        spans: the spans.
    """
    if host not in COUNTS_SESSIONS:
        return sum((span.end - span.begin) * span.devices for span in spans) / 3600
    total = 0.0
    until = -sys.float_info.max
    for span in sorted(spans, key=lambda span: span.begin):
        if span.devices:
            total += max(0.0, span.end - max(span.begin, until))
            until = max(until, span.end)
    return total / 3600
