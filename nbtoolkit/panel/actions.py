"""Do what the panel's buttons ask through the public functions."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict

from nbtoolkit.config.schema import Config, load_config
from nbtoolkit.config.yaml_source import dump
from nbtoolkit.crossval.cross_validation import CVHandle, cross_validate
from nbtoolkit.errors import LaunchError
from nbtoolkit.folds.folds import Folds
from nbtoolkit.launcher.arguments import task_name
from nbtoolkit.launcher.handle import RunHandle
from nbtoolkit.launcher.launch import launch
from nbtoolkit.notebooks.background import start_search, start_training
from nbtoolkit.notebooks.handle import NotebookHandle
from nbtoolkit.panel.board import pressable
from nbtoolkit.panel.form import Checked, Draft, text_of
from nbtoolkit.report.run_summary import setting
from nbtoolkit.search.sweep import FOLDS_FILE, sweep
from nbtoolkit.search.sweep_result import SweepHandle, SweepResult
from nbtoolkit.study.table import SweepTable
from nbtoolkit.tasks.find import find_task
from nbtoolkit.views.markup import boxed, columns, preformatted, said, wrong
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


SPACE_FILE = "space.yaml"

_SHORT = 60  # characters


def command_line(
    overrides: Mapping[str, Any], space: str = "", trials: str = "", *, task: str | None = None
) -> str:
    """What to type in a shell.

    Args:
        overrides: the settings that are not at their default.
        space: the space as YAML text; empty: a single run.
        trials: how many trials; empty: as the space says.
        task: the function, see :func:`nbtoolkit.launcher.arguments.task_name`; None: the one of the
            settings. A cell's has no command line.
    """
    if task is not None and task.startswith("__main__:"):
        return "# a function of a cell: put it into a module and name it: task=module:function"
    if task is not None and task != Config().task:
        overrides = {**overrides, "task": task}
    sweep_config = "".join(
        f" -o {shlex.quote(f'{n}={_one_line(v)}')}" for n, v in overrides.items()
    )
    if not space.strip():
        return f"nbtoolkit train{sweep_config}"
    count = f" --trials {trials.strip()}" if trials.strip() else ""
    file = f"cat > {SPACE_FILE} <<'END'\n{space.strip()}\nEND\n"
    return f"{file}nbtoolkit sweep {SPACE_FILE}{sweep_config}{count}"


def python_cell(
    overrides: Mapping[str, Any],
    space: Mapping[str, Any] | None = None,
    trials: str = "",
    *,
    train: str = "",
) -> str:
    """What to write in a cell.

    Args:
        overrides: the settings that are not at their default.
        space: what is searched; None: a single run.
        trials: how many trials; empty: as the space says.
        train: the function's name in the notebook; empty: the one that ``task`` names.
    """
    given = f"overrides={_literal(overrides)}" if overrides else ""
    lines = ["import nbtoolkit as nb", "", f"config = nb.load_config({given})"]
    if not train:
        module, _, name = str(overrides.get("task", Config().task)).partition(":")
        lines[1:1] = [f"from {module} import {name}"]
        train = name
    if space is None:
        return "\n".join([*lines, f"result = nb.launch({train}, config)"])
    count = f", n_trials={trials.strip()}" if trials.strip() else ""
    searched = f"space = {_literal(space)}"
    return "\n".join([*lines, searched, f"result = nb.sweep({train}, config, space{count})"])


def equal(draft: Draft, checked: Checked, train: Callable[..., Any] | None) -> str:
    """Differences, command line and cell, as HTML.

    Args:
        draft: what stands in the form.
        checked: what it makes.
        train: the panel's function; None: the one that ``task`` names.
    """
    if checked.config is None:
        return boxed(wrong("something in the settings is wrong"))
    searched = checked.sweep_config is not None
    text, space = (draft.space, draft.searched()) if searched else ("", None)
    name = "" if train is None else getattr(train, "__name__", "train")
    task = None if train is None else task_name(train)
    shell = command_line(draft.overrides(), text, draft.trials, task=task)
    cell = python_cell(draft.overrides(), space, draft.trials, train=name)
    parts = [said("The same from a shell", strong=True), preformatted(shell)]
    parts += [said("The same in a cell", strong=True), preformatted(cell)]
    return differences(checked.config) + boxed(*parts)


def differences(config: Config) -> str:
    """The settings that are not at their default, as HTML."""
    changed = config.differences(Config())
    if not changed:
        return boxed(said("All settings are at their default."))
    lines = [[name, setting(mine), setting(default)] for name, (mine, default) in changed.items()]
    return boxed(columns(["setting", "here", "default"], lines))


def _literal(values: Mapping[str, Any], margin: str = "") -> str:
    """A dict as it is written by hand; what is short stands on one line."""
    short = repr(dict(values))
    if len(short) <= _SHORT:
        return short
    lines = [f"{margin}    {key!r}: {_member(one, margin)},\n" for key, one in values.items()]
    return f"{{\n{''.join(lines)}{margin}}}"


def _member(value: Any, margin: str) -> str:
    return _literal(value, f"{margin}    ") if isinstance(value, dict) else repr(value)


def _one_line(value: Any) -> str:
    """A value in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_one_line(one)}" for key, one in value.items()) + "}"
    return text_of(value)


def space_text(space: Mapping[str, Any]) -> str:
    """A space as YAML text."""
    return dump(space)
