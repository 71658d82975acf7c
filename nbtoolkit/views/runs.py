"""List the runs of an output folder, a line each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from nbtoolkit.errors import RunFileError
from nbtoolkit.run.attempts import readable_last_event
from nbtoolkit.run.events import number_values
from nbtoolkit.run.paths import RunPaths, runs_in
from nbtoolkit.text_table import counted, moment, number, one_line, shortened

_TITLE = 80  # characters
_CACHED = 500  # runs


@dataclass(frozen=True)
class RunEntry:
    """A run in a list.

    Attributes:
        folder: its folder.
        name: its id without the time.
        status: the status it ended with, ``"failed"``, ``"running"`` (also while it is paused) or
            ``"interrupted"``: it has neither ended nor a supervisor.
        text: name and status; of one that does not run also its result and when
            it was last written: the list in a panel stands for hours, so it has no ages.
    """

    folder: Path
    name: str
    status: str
    text: str


def list_runs(output_dir: str | Path, most: int = 50) -> list[RunEntry]:
    """List the newest runs of a folder, newest first.

    Args:
        output_dir: the folder.
        most: the number of runs.
    """
    return [_entry(paths) for paths in runs_in(output_dir)[:most]]


def newest(output_dir: str | Path) -> Path | None:
    """Return the folder of the newest run that is live, else of the newest one; None: no run."""
    runs = runs_in(output_dir)
    live = (paths for paths in runs if readable_last_event(paths) is None and _is_owned(paths))
    chosen = next(live, runs[0] if runs else None)
    return None if chosen is None else chosen.folder


def _entry(paths: RunPaths) -> RunEntry:
    """Describe a run by its result; its events, which may be many, are not read."""
    title = shortened(plain_name(paths), _TITLE)
    written = _written(paths.events)
    status, facts = _result(paths.folder, written)
    if status == "interrupted" and _is_owned(paths):
        status = "running"
    else:
        facts = [*facts, f"{moment(written)} UTC" if written else "nothing written yet"]
    text = " · ".join([title, status, *facts])
    return RunEntry(paths.folder, title, status, one_line(text))


def _is_owned(paths: RunPaths) -> bool:
    try:
        return paths.owned()
    except RunFileError:  # something else has the name of its lock
        return False


def plain_name(paths: RunPaths) -> str:
    """Return a run's name and 4 hex digits: its id without the time."""
    return re.sub(r"^\d{8}T\d{6}-(?=.)", "", paths.run_id)


def _written(file: Path) -> float:
    """Return the unix seconds at which a file was written; 0: it does not exist."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


@lru_cache(_CACHED)
def _result(folder: Path, written: float) -> tuple[str, list[str]]:
    """Return status, progress and best value of a run; ``written``: when its events were."""
    ended = readable_last_event(RunPaths(folder))
    if ended is None:
        return "interrupted", []
    if ended.error is not None:
        return "failed", [shortened(ended.error, _TITLE)]
    summary = ended.summary
    values = number_values(ended.metrics)
    progress = []
    if isinstance(scores := summary.get("scores"), dict):
        progress = [f"{summary.get('complete')}/{summary.get('folds')} folds"]
        means = {name: number_values(score).get("mean") for name, score in scores.items()}
        values = number_values(means)
    elif summary:
        progress = [counted(int(sum(number_values(summary.get("counts")).values())), "trial")]
        values = number_values({"best": summary.get("best_value")})
    best = [f"{name} {number(value)}" for name, value in values.items()]
    return ended.status, [*progress, *best[:1]]
