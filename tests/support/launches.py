"""Launches for tests, and what the record of one says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbtoolkit as nb
from nbtoolkit.run.events import EventReader, NoteAdded


def settings_in(folder: Path, **more: Any) -> dict[str, Any]:
    """Settings of a run in ``folder`` that is not tracked."""
    return {"tracking.mlflow": False, "runtime.output_dir": str(folder), **more}


def quiet(train: Any, config: Any, processes: int = 2, **options: Any) -> nb.RunResult:
    """Launch, show nothing and resume nothing."""
    options = {"display": "off", "resume": "never", **options}
    return nb.launch(train, config, processes=processes, **options)


def begin(train: Any, config: Any, processes: int = 2, **options: Any) -> nb.RunHandle:
    """Launch as ``quiet`` does, without waiting for the end."""
    options = {"display": "off", "resume": "never", "wait": False, **options}
    return nb.launch(train, config, processes=processes, **options)


def inline(train: Any, config: Any, **options: Any) -> nb.RunResult:
    """Launch as ``quiet`` does, in this process."""
    options = {"display": "off", "resume": "never", **options}
    return nb.launch(train, config, start="inline", **options)


def types(run: nb.RunHandle | nb.RunResult) -> list[str]:
    """The types of a run's events, without those of its ranks and devices."""
    events = EventReader(run.paths.events).read()
    return [event.type for event in events if event.type not in ("rank", "device")]


def notes(run: nb.RunHandle | nb.RunResult, level: str = "") -> list[str]:
    """The texts that a run's record tells, all or those of one level."""
    events = [e for e in EventReader(run.paths.events).read() if isinstance(e, NoteAdded)]
    return [event.text for event in events if level in ("", event.level)]


def line_of(function: Callable[..., Any], text: str) -> int:
    """The number of the first line of ``function`` that contains ``text``."""
    lines, start = inspect.getsourcelines(function)
    return start + next(number for number, line in enumerate(lines) if text in line)
