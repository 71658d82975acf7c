"""Do what the panel's buttons ask through the public functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict

from nbtoolkit.config.schema import Config, load_config
from nbtoolkit.crossval.cross_validation import CVHandle, cross_validate
from nbtoolkit.errors import LaunchError
from nbtoolkit.folds.folds import Folds
from nbtoolkit.launcher.handle import RunHandle
from nbtoolkit.launcher.launch import launch
from nbtoolkit.notebooks.handle import NotebookHandle
from nbtoolkit.notebooks.task import start_search, start_training
from nbtoolkit.panel.board import pressable
from nbtoolkit.panel.form import Checked
from nbtoolkit.search.handle import SweepHandle
from nbtoolkit.search.sweep import FOLDS_FILE, sweep
from nbtoolkit.search.sweep_result import SweepResult
from nbtoolkit.study.table import SweepTable
from nbtoolkit.tasks.find import find_task
from nbtoolkit.views.state import State

# --- actions ---


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
    """The same for a shell: by the fork server, as ``nbtoolkit train`` does.

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


# --- press ---
# A panel's button pressed without a panel, on a folder: what the command line does.


_COUNTED = {"add_trials": add_trials, "stop_trial": stop_trial}
_PLAIN = {"pause": pause, "stop": stop}
_STARTING: dict[str, Callable[[State], RunHandle]] = {
    "go_on": partial(go_on, train=None),
    "train_best": launch_best,
}


def press(wish: str, state: State) -> Path:
    """Press a button.

    Args:
        wish: its name, as in :meth:`nbtoolkit.panel.panel.Panel.press`; those that need a number
            with one: ``"add_trials=5"``, ``"stop_trial=3"``.
        state: of the folder, just looked at.

    Returns:
        The folder to be watched then: of what was started, else the same.

    Raises:
        LaunchError: it cannot be pressed now, or its number is missing or none.
    """
    button, _, number = wish.partition("=")
    can = sorted(pressable(state, Checked()) & {*_COUNTED, *_PLAIN, *_STARTING})
    if button not in can:
        raise LaunchError(
            f"{button} cannot be pressed: {state.paths.run_id} is {state.status}",
            allowed=", ".join(can) or "nothing",
            do="look at the run first",
        )
    if button in _COUNTED:
        _COUNTED[button](state, _number(button, number))
    elif button in _PLAIN:
        _PLAIN[button](state)
    elif button == "go_on" and state.status == "paused":
        resume(state)
    else:
        return _STARTING[button](state).paths.folder
    return state.paths.folder


def _number(button: str, text: str) -> int:
    if not text.isdecimal():
        raise LaunchError(
            f"{button} was given {text!r}",
            allowed="a whole number",
            do=f"for example {button}=3",
        )
    return int(text)
