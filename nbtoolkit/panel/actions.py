"""Actions: what the buttons do, by the public functions; what is started outlives the kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

from nbtoolkit.config import Config, load_config
from nbtoolkit.errors import LaunchError
from nbtoolkit.notebooks.handle import NotebookHandle
from nbtoolkit.notebooks.task import start_search, start_training
from nbtoolkit.runtime.launch import launch
from nbtoolkit.runtime.result import RunHandle
from nbtoolkit.search.cross_validation import cross_validate
from nbtoolkit.search.cv_handle import CVHandle
from nbtoolkit.search.folds import Folds
from nbtoolkit.search.handle import SweepHandle
from nbtoolkit.search.sweep import FOLDS_FILE, sweep
from nbtoolkit.search.sweep_result import SweepResult
from nbtoolkit.search.table import SweepTable
from nbtoolkit.tasks.find import find_task
from nbtoolkit.views.state import State

Train = Callable[..., Any]
Started = RunHandle | NotebookHandle
"""What goes on in the background: a run, or a notebook that is going to start one."""


class _Going(TypedDict):
    """How a folder is gone on with."""

    resume: Path
    wait: Literal[False]
    detach: bool
    display: Literal["off"]


def start_run(train: Train | None, config: Config, name: str | None = None) -> Started:
    """Launch; see :func:`nbtoolkit.launch` for what it raises.

    Args:
        train: the function; None: the one that ``config.task`` names, by a notebook that ships.
        config: its settings.
        name: a part of the run's id; None: the function's name.
    """
    if train is None:
        task = find_task(config.task)  # a name that is wrong is told here, not in the notebook
        return start_training(config, name=name or str(getattr(task, "__name__", "run")))
    return launch(train, config, name=name, wait=False, detach=True, display="off")


def start_sweep(
    train: Train | None, config: Config, space: Mapping[str, Any], trials: int | None
) -> Started:
    """Sweep; see :func:`nbtoolkit.sweep` for what it raises."""
    if train is None:
        find_task(config.task)
        return start_search(config, space, n_trials=trials)
    return sweep(train, config, space, n_trials=trials, wait=False, detach=True, display="off")


def go_on(state: State, train: Train | None) -> RunHandle:
    """Start what is unfinished where it was, with the folder's own settings.

    No notebook is needed for that, also where one had started it: which folder it is, is known.

    Raises:
        ResumeError: ``train`` is another function than the folder's.
        FoldError: it is a cross-validation that was cut off before its folds were written.
    """
    config, folder = load_config(state.paths.config, env=None), state.paths.folder
    function = train if train is not None else find_task(config.task)
    going: _Going = {"resume": folder, "wait": False, "detach": True, "display": "off"}
    if state.kind == "run":
        return launch(function, config, **going)
    if state.kind == "cv":
        return cross_validate(function, config, Folds.load(folder / FOLDS_FILE), **going)
    folds = Folds.load(folder / FOLDS_FILE) if (folder / FOLDS_FILE).exists() else None
    return sweep(function, config, folder / "sweep.yaml", folds=folds, **going)


def train_best(state: State, train: Train | None) -> Started:
    """Launch with the best settings of a sweep that has ended.

    Raises:
        SweepError: no trial is complete.
    """
    return start_run(train, SweepResult(state.paths).best_config, "best")


def launch_best(state: State) -> RunHandle:
    """The same for a shell: by the launchpad, as ``nbtoolkit train`` does.

    Raises:
        SweepError: no trial is complete.
    """
    config = SweepResult(state.paths).best_config
    task = find_task(config.task)
    return launch(task, config, name="best", wait=False, detach=True, display="off")


def resume(state: State) -> None:
    """Let a paused search start trials again."""
    handle_on(state).resume()


def pause(state: State) -> None:
    """Let a search finish what runs and start nothing more."""
    handle_on(state).pause()


def stop(state: State) -> None:
    """Let all ranks leave at their next report; nothing where it has ended."""
    if state.live:  # a request left in the folder of an ended run would be nobody's
        handle_on(state).stop("the panel asked")


def stop_trial(state: State, number: int) -> None:
    """Let one trial end at its next report.

    Raises:
        LaunchError: it does not run; a sweep would take no notice of the wish.
    """
    table = state.table
    running = [one.number for one in table.running] if isinstance(table, SweepTable) else []
    if number not in running:
        raise LaunchError(
            f"trial {number} does not run",
            allowed=", ".join(map(str, running)) or "none: no trial runs now",
            do="look at the page Trials",
        )
    handle_on(state).stop_trial(number)


def add_trials(state: State, count: int) -> None:
    """Run more trials than were asked for."""
    handle_on(state).add_trials(count)


def handle_on(state: State) -> Any:
    """A handle on a folder that shows nothing in any cell: panels of all kernels have the same."""
    if state.kind == "sweep":
        return SweepHandle(state.paths, SweepResult)
    return CVHandle(state.paths) if state.kind == "cv" else RunHandle(state.paths)
