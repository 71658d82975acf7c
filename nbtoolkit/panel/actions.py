"""Do what the panel's buttons request, by public functions; show the same as shell and cell."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, TypedDict

from nbtoolkit.config.schema import Config, load_config
from nbtoolkit.crossval.cross_validation import CVHandle, cross_validate
from nbtoolkit.errors import LaunchError
from nbtoolkit.folds.folds import Folds
from nbtoolkit.launcher.arguments import task_name
from nbtoolkit.launcher.handle import RunHandle
from nbtoolkit.launcher.launch import launch
from nbtoolkit.notebooks.background import start_search, start_training
from nbtoolkit.notebooks.handle import NotebookHandle
from nbtoolkit.panel.board import enabled_buttons
from nbtoolkit.panel.form import FormState, Validation, text_of
from nbtoolkit.search.sweep import FOLDS_FILE, sweep
from nbtoolkit.search.sweep_result import SearchHandle, SweepHandle, SweepResult
from nbtoolkit.study.table import SweepTable
from nbtoolkit.tasks.find import find_task
from nbtoolkit.text_table import setting
from nbtoolkit.views.markup import alert, code_block, data_table, paragraph, view
from nbtoolkit.views.state import State

# --- start and resume ---

Train = Callable[..., object]
Started = RunHandle | NotebookHandle
"""What runs in the background: a run, or a notebook that is going to start one."""


def start_run(train: Train | None, config: Config, name: str | None = None) -> Started:
    """Launch a run, as :func:`nbtoolkit.launch` does.

    Args:
        train: the function; None: the one that ``config.task`` names, in a shipped notebook.
        config: its settings.
        name: a part of the run's id; None: the function's name.
    """
    if train is None:
        task = find_task(config.task)  # a wrong name fails here, not in the notebook
        return start_training(config, name=name or str(getattr(task, "__name__", "run")))
    return launch(train, config, name=name, wait=False, detach=True, display="off")


def start_sweep(
    train: Train | None, config: Config, space: Mapping[str, object], trials: int | None
) -> Started:
    """Start a sweep, as :func:`nbtoolkit.sweep` does; ``train`` as for :func:`start_run`."""
    if train is None:
        find_task(config.task)
        return start_search(config, space, n_trials=trials)
    return sweep(train, config, space, n_trials=trials, wait=False, detach=True, display="off")


class _ResumeOptions(TypedDict):
    resume: Path
    wait: Literal[False]
    detach: bool
    display: Literal["off"]


def resume_unfinished(state: State, train: Train | None) -> RunHandle:
    """Resume an unfinished run or search, with its folder's own settings.

    It needs no notebook, even where one had started it, since the folder is known.

    Raises:
        ResumeError: ``train`` is another function than the folder's.
        FoldError: it is a cross-validation that was cut off before its folds were written.
    """
    config, folder = load_config(state.paths.config, env=None), state.paths.folder
    function = train if train is not None else find_task(config.task)
    options: _ResumeOptions = {"resume": folder, "wait": False, "detach": True, "display": "off"}
    if state.kind == "run":
        return launch(function, config, **options)
    folds_file = folder / FOLDS_FILE
    if state.kind == "cv":
        return cross_validate(function, config, Folds.load(folds_file), **options)
    folds = Folds.load(folds_file) if folds_file.exists() else None
    return sweep(function, config, folder / "sweep.yaml", folds=folds, **options)


def train_best(state: State, train: Train | None) -> Started:
    """Launch a run with the best settings of a sweep that has ended.

    Raises:
        SweepError: no trial is complete.
    """
    return start_run(train, SweepResult(state.paths).best_config, "best")


# --- control what runs ---


def stop(state: State) -> None:
    """Stop all ranks at their next report; does nothing where it has ended."""
    if state.live:  # nobody would read a request in the folder of an ended run
        RunHandle(state.paths).stop("the panel asked")


def stop_trial(state: State, number: int) -> None:
    """Stop one trial at its next report.

    Raises:
        LaunchError: it does not run; the sweep would ignore the request.
    """
    running = state.table.running if isinstance(state.table, SweepTable) else []
    numbers = [trial.number for trial in running]
    if number not in numbers:
        raise LaunchError(
            f"trial {number} does not run",
            allowed=", ".join(map(str, numbers)) or "none: no trial runs now",
            do="look at the page Trials",
        )
    sweep_handle(state).stop_trial(number)


def search_handle(state: State) -> SearchHandle:
    """Return a handle on a sweep or cross-validation that shows nothing in any cell."""
    return sweep_handle(state) if state.kind == "sweep" else CVHandle(state.paths)


def sweep_handle(state: State) -> SweepHandle:
    """Return a handle on a sweep that shows nothing in any cell."""
    return SweepHandle(state.paths, SweepResult)


_SHELL_BUTTONS = {"pause", "stop", "add_trials", "stop_trial", "go_on", "train_best"}


def press(button: str, state: State) -> Path:
    """Press a button without a panel, on a folder, as the command line does.

    Args:
        button: its name, as in :meth:`nbtoolkit.panel.panel.Panel.press`; those that need a number
            with one: ``"add_trials=5"``, ``"stop_trial=3"``.
        state: of the folder, just read.

    Returns:
        The folder to be watched then: of the new run if one was started, else the same.

    Raises:
        LaunchError: it cannot be pressed now, or its number is missing or wrong.
    """
    name, _, number = button.partition("=")
    enabled = sorted(enabled_buttons(state, Validation()) & _SHELL_BUTTONS)
    if name not in enabled:
        raise LaunchError(
            f"{name} cannot be pressed: {state.paths.run_id} is {state.status}",
            allowed=", ".join(enabled) or "nothing",
            do="look at the run first",
        )
    match name:
        case "pause":
            search_handle(state).pause()
        case "stop":
            stop(state)
        case "add_trials":
            sweep_handle(state).add_trials(_number(name, number))
        case "stop_trial":
            stop_trial(state, _number(name, number))
        case "go_on" if state.status == "paused":
            search_handle(state).resume()
        case "go_on":
            return resume_unfinished(state, None).paths.folder
        case "train_best":
            # By the fork server, as `nbtoolkit train` does, without a notebook.
            config = SweepResult(state.paths).best_config
            task = find_task(config.task)
            return launch(
                task, config, name="best", wait=False, detach=True, display="off"
            ).paths.folder
    return state.paths.folder


def _number(button: str, text: str) -> int:
    if not text.isdecimal():
        raise LaunchError(
            f"{button} was given {text!r}",
            allowed="a whole number",
            do=f"for example {button}=3",
        )
    return int(text)


# --- the same as shell and cell ---

SPACE_FILE = "space.yaml"

_SHORT = 60  # characters of a dict on one line


def command_line(
    overrides: Mapping[str, object], space: str = "", trials: str = "", *, task: str | None = None
) -> str:
    """Return the shell commands that start the same.

    Args:
        overrides: the settings that are not at their default.
        space: the space as YAML text; empty: a single run.
        trials: the number of trials; empty: the space's own.
        task: the function, as from :func:`nbtoolkit.launcher.arguments.task_name`; None: the one of
            the settings. A cell's function has no command line.
    """
    if task is not None and task.startswith("__main__:"):
        return "# a function of a cell: put it into a module and name it: task=module:function"
    if task is not None and task != Config().task:
        overrides = {**overrides, "task": task}
    options = "".join(
        f" -o {shlex.quote(f'{name}={_flow_yaml(value)}')}" for name, value in overrides.items()
    )
    if not space.strip():
        return f"nbtoolkit train{options}"
    count = f" --trials {trials.strip()}" if trials.strip() else ""
    file = f"cat > {SPACE_FILE} <<'END'\n{space.strip()}\nEND\n"
    return f"{file}nbtoolkit sweep {SPACE_FILE}{options}{count}"


def python_cell(
    overrides: Mapping[str, object],
    space: Mapping[str, object] | None = None,
    trials: str = "",
    *,
    train: str = "",
) -> str:
    """Return the code of a cell that starts the same.

    Args:
        overrides: the settings that are not at their default.
        space: what is searched; None: a single run.
        trials: the number of trials; empty: the space's own.
        train: the function's name in the notebook; empty: the one that ``task`` names.
    """
    given = f"overrides={_literal(overrides)}" if overrides else ""
    lines = ["import nbtoolkit as nb", "", f"config = nb.load_config({given})"]
    if not train:
        module, _, name = str(overrides.get("task", Config().task)).partition(":")
        lines.insert(1, f"from {module} import {name}")
        train = name
    if space is None:
        return "\n".join([*lines, f"result = nb.launch({train}, config)"])
    count = f", n_trials={trials.strip()}" if trials.strip() else ""
    searched = f"space = {_literal(space)}"
    return "\n".join([*lines, searched, f"result = nb.sweep({train}, config, space{count})"])


def equivalent_code(form: FormState, validation: Validation, train: Train | None) -> str:
    """Render the changed settings, and the commands and the cell that start the same, as HTML.

    Args:
        form: the form's contents.
        validation: of the form.
        train: the panel's function; None: the one that ``task`` names.
    """
    if validation.config is None:
        return view(alert("something in the settings is wrong"))
    text, space = "", None
    if validation.sweep_config is not None:
        text, space = form.space, form.parsed_space()
    name = "" if train is None else getattr(train, "__name__", "train")
    task = None if train is None else task_name(train)
    shell = command_line(form.overrides(), text, form.trials, task=task)
    cell = python_cell(form.overrides(), space, form.trials, train=name)
    return _differences(validation.config) + view(
        paragraph("The same from a shell", strong=True),
        code_block(shell),
        paragraph("The same in a cell", strong=True),
        code_block(cell),
    )


def _differences(config: Config) -> str:
    """Render the settings that are not at their default."""
    changed = config.differences(Config())
    if not changed:
        return view(paragraph("All settings are at their default."))
    rows = [[name, setting(here), setting(default)] for name, (here, default) in changed.items()]
    return view(data_table(["setting", "here", "default"], rows))


def _literal(values: Mapping[str, object], margin: str = "") -> str:
    """Format a dict as it is written by hand; a short one on one line."""
    short = repr(dict(values))
    if len(short) <= _SHORT:
        return short
    inner = f"{margin}    "
    lines = [
        f"{inner}{key!r}: {_literal(value, inner) if isinstance(value, dict) else repr(value)},\n"
        for key, value in values.items()
    ]
    return f"{{\n{''.join(lines)}{margin}}}"


def _flow_yaml(value: object) -> str:
    """Format a value in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow_yaml(item)}" for key, item in value.items()) + "}"
    return text_of(value)
