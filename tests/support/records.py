"""What the record of a run says: its owner, and the first and last event of its newest attempt."""

from __future__ import annotations

from pathlib import Path

from nbtoolkit.run.attempts import first_event, last_event
from nbtoolkit.run.events import RunEnded, RunStarted
from nbtoolkit.run.paths import RunPaths


def owner_pid(folder: Path) -> int:
    """The pid of the process that owns a run."""
    return int((folder / "owner.lock").read_text())


def owned_runs(output_dir: Path) -> list[Path]:
    """The folders of the runs that have or had an owner."""
    return [lock.parent for lock in output_dir.glob("*/owner.lock") if lock.read_text()]


def first_of(folder: Path) -> RunStarted:
    """The first event of a run's newest attempt."""
    event = first_event(RunPaths(folder))
    assert isinstance(event, RunStarted)
    return event


def last_of(folder: Path) -> RunEnded:
    """The last event of a run's newest attempt, which has ended."""
    event = last_event(RunPaths(folder))
    assert event is not None
    return event


def ended_runs(output_dir: Path, name: str = "*") -> list[Path]:
    """The folders of the runs that have ended."""
    folders = [events.parent for events in output_dir.glob(f"{name}/events.jsonl")]
    return [folder for folder in folders if last_event(RunPaths(folder)) is not None]
