"""List the runs of an output folder in a line each, name and annotate them, and delete them."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from nbtoolkit.errors import RunFileError, RunFolderError
from nbtoolkit.run.device_ledger import update_ledger
from nbtoolkit.run.events import number_values
from nbtoolkit.run.paths import TRASH, RunPaths, folder_error, read_or_empty, runs_in, write_json
from nbtoolkit.study.table import SweepTable
from nbtoolkit.text_table import ago, number, one_line, shortened
from nbtoolkit.views.state import State

_TITLE, _NOTE = 80, 1000  # characters
_ANNOTATIONS = "annotations.json"
_CACHED = 500  # runs


# --- annotations ---


@dataclass(frozen=True)
class Annotations:
    """What a user wrote about a run: a title, and a note for each of some trials, by number."""

    title: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)


def read_annotations(folder: Path) -> Annotations:
    """Read the annotations of a run; empty where there are none, or the file is damaged."""
    content = read_or_empty(folder / _ANNOTATIONS)
    title, notes = content.get("title"), content.get("notes")
    return Annotations(
        title if isinstance(title, str) else "",
        {k: v for k, v in notes.items() if isinstance(v, str)} if isinstance(notes, dict) else {},
    )


def rename(folder: Path, title: str) -> None:
    """Give a run a title, which is shown instead of its name; an empty one removes it.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    title = shortened(title.strip(), _TITLE)
    _write(folder, replace(read_annotations(folder), title=title))


def set_note(folder: Path, number: int, text: str) -> None:
    """Write a note on a trial; an empty one removes it.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    before = read_annotations(folder)
    notes = {**before.notes, str(number): one_line(text.strip())[:_NOTE]}
    _write(folder, replace(before, notes={key: note for key, note in notes.items() if note}))


def _write(folder: Path, annotations: Annotations) -> None:
    try:
        write_json(folder / _ANNOTATIONS, vars(annotations))
    except OSError as error:
        raise folder_error(folder, error) from error


def move_to_trash(folder: Path) -> Path:
    """Move a run to the folder ``.trash`` beside it, and return where it is then.

    Raises:
        RunFolderError: the run is live, there is no run, or the folder cannot be written.
    """
    paths = RunPaths(folder)
    if not paths.versions.is_file():
        raise RunFolderError(f"there is no run in {folder}", do="choose a run of the list")
    if paths.owned():
        raise RunFolderError(
            f"{plain_name(paths)} is running",
            allowed="a run that has ended",
            do="stop it, and delete it when it has ended",
        )
    target = folder.parent / TRASH / folder.name
    try:
        with contextlib.suppress(RunFileError):  # a damaged run can be deleted, too
            update_ledger(folder.parent, folder)  # its time counts also when the trash is emptied
        target.parent.mkdir(mode=0o700, exist_ok=True)
        return folder.rename(target)
    except OSError as error:
        raise folder_error(folder.parent, error) from error


# --- list ---


@dataclass(frozen=True)
class RunEntry:
    """A run in a list.

    Attributes:
        folder: its folder.
        name: its title, or its id without the time.
        status: as :attr:`~nbtoolkit.views.state.State.status`.
        live: whether it is running or paused.
        text: name, status, progress, best value and age in one line.
    """

    folder: Path
    name: str
    status: str
    live: bool
    text: str


def list_runs(output_dir: str | Path, most: int = 50, now: float | None = None) -> list[RunEntry]:
    """List the newest runs of a folder, newest first.

    Args:
        output_dir: the folder.
        most: the number of runs.
        now: unix seconds; None: the clock's.
    """
    now = time.time() if now is None else now
    return [_entry(paths, now) for paths in runs_in(output_dir)[:most]]


def newest(output_dir: str | Path) -> Path | None:
    """Return the folder of the newest run that is live, else of the newest one; None: no run."""
    runs = runs_in(output_dir)
    live = (paths for paths in runs if not paths.ended() and paths.owned())
    chosen = next(live, runs[0] if runs else None)
    return None if chosen is None else chosen.folder


def _entry(paths: RunPaths, now: float) -> RunEntry:
    title = read_annotations(paths.folder).title or shortened(plain_name(paths), _TITLE)
    ended, live = _written(paths.result) or _written(paths.error), False
    written = ended or _written(paths.events)
    when = ago(now - written) if written else "nothing written yet"
    if ended:
        status, facts = _result(paths.folder, ended)
    else:
        state = _state(paths.folder)
        state.refresh()
        status, facts, live = state.status, _facts(state), state.live
        when = f"started {ago(now - state.began)}" if live and state.began else when
    word = "interrupted" if status == "cut off" else status
    text = " · ".join([title, f"{word} {facts[0]}".strip(), *facts[1:], when])
    return RunEntry(paths.folder, title, status, live, one_line(text))


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
def _state(folder: Path) -> State:
    """Return the state of a run that has not ended; a refresh reads only what is new."""
    return State(RunPaths(folder))


def _facts(state: State) -> list[str]:
    """Return the progress, which may be empty, and the best or the last value."""
    done, total = state.counts()
    values = []
    if state.kind == "run":
        last, total = state.last_report, state.total_steps()
        done = int(last[1]) if last else 0
        values = [f"{name} {number(points[-1][1])}" for name, points in state.curves.items()]
    elif isinstance(state.table, SweepTable) and len(state.table.metrics) == 1:
        values = [f"best {number(trial.values[0])}" for trial in state.table.best]
    return [f"{done}/{total}" if total else f"{done}" if done else "", *values[:1]]


@lru_cache(_CACHED)
def _result(folder: Path, written: float) -> tuple[str, list[str]]:
    """Return the status and the facts of a run that has ended; ``written``: when that was."""
    paths = RunPaths(folder)
    result = read_or_empty(paths.result)
    if not result:
        error = read_or_empty(paths.error)
        kind = str(error.get("type", "?")).removeprefix("builtins.")
        return "failed", ["", shortened(f"{kind}: {error.get('text', '')}", _TITLE)]
    status, summary = str(result.get("status", "?")), result.get("summary")
    values = [f"{name} {number(one)}" for name, one in number_values(result.get("metrics")).items()]
    if not isinstance(summary, dict):
        return status, ["", *values[:1]]
    if isinstance(scores := summary.get("scores"), dict):  # a cross-validation
        means = {name: number_values(one).get("mean") for name, one in scores.items()}
        values = [f"{name} {number(mean)}" for name, mean in means.items()]
        return status, [f"{summary.get('complete')}/{summary.get('folds')}", *values[:1]]
    done = int(sum(number_values(summary.get("counts")).values()))
    total = done if status == "completed" else State(paths).counts()[1]
    best = number_values({"best": summary.get("best_value")})
    values = [f"best {number(value)}" for value in best.values()]
    return status, [f"{done}/{total}" if total else f"{done}", *values]
