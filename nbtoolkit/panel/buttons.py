"""Decide which buttons can be pressed, do what they request, and write the same as code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pprint import pformat
from typing import Literal, TypedDict

from nbtoolkit.config.schema import Config
from nbtoolkit.errors import LaunchError
from nbtoolkit.launcher.launch import launch
from nbtoolkit.launcher.run_handle import RunHandle
from nbtoolkit.launcher.train_function import Train
from nbtoolkit.panel.form import Validation
from nbtoolkit.run.attempts import run_config
from nbtoolkit.search.crossval.cross_validation import cross_validate
from nbtoolkit.search.folds.folds import Folds
from nbtoolkit.search.study.sweep_config import SweepConfig
from nbtoolkit.search.study.table import SweepTable, Trial
from nbtoolkit.search.sweep import FOLDS_FILE, sweep, sweep_to_resume
from nbtoolkit.search.sweep_result import SweepHandle, SweepResult, read_sweep_config
from nbtoolkit.tasks.find import find_task
from nbtoolkit.views.state import State

_NO_FORM = Validation()


BUTTONS = {
    "resume": ("Resume", "Continue what is paused or unfinished, with its own settings"),
    "pause": ("Pause", "Finish what runs and start nothing more"),
    "stop": ("Stop", "Stop everything at its next report; Resume continues it"),
    "train_best": ("Train best settings", "Train once with the best settings of the sweep"),
    "add_trials": ("+ trials", "Run as many more trials as the number beside it says"),
    "launch": ("Launch", "Train once with these settings, on every device"),
    "sweep": ("Sweep", "Search for the best settings; continues when the kernel ends"),
    "cross_validate": ("Cross-validate", "Train once per fold with these settings"),
}
"""Label and tooltip of each button, in the order in which they stand."""

STARTS = ("launch", "sweep", "cross_validate")
"""Those that start something new."""


def offered_buttons(
    state: State | None, validation: Validation = _NO_FORM, folds: Folds | None = None
) -> set[str]:
    """Return the names of the buttons that do something in a state, if the form is right.

    A panel starts one thing at a time, so that a second press, however fast, starts nothing.

    Args:
        state: of the watched run; None: none is watched.
        validation: of the form; without a form nothing new can be started.
        folds: of the panel.
    """
    form = validation.form
    idle = form is not None and (state is None or not state.live)
    names = {"launch": idle, "cross_validate": idle and folds is not None}
    names["sweep"] = form is not None and idle and form.is_sweep
    if state is not None:
        ended = state.over and not state.gone
        sweep_ended = ended and state.ended is not None and not state.paths.owned()
        names |= {
            "resume": state.status == "paused" or state.resumable,
            "pause": state.kind != "run" and state.status == "running",
            "stop": state.live,
            "train_best": ended and best_trial(state) is not None,
            "add_trials": state.kind == "sweep" and (state.live or sweep_ended),
            "stop_trial": state.kind == "sweep" and state.live,
        }
    return {name for name, is_offered in names.items() if is_offered}


def enabled_buttons(offered: set[str], validation: Validation) -> set[str]:
    """Return those of the offered buttons for which nothing in the form is wrong."""
    wrong = set() if validation.sweep_config is not None else {"sweep"}
    return offered - (wrong if validation.config is not None else set(STARTS))


def refusal(
    name: str, state: State | None, validation: Validation, enabled: set[str]
) -> LaunchError:
    """Return the error for a button that cannot be pressed, with the reason."""
    reason = ""
    do = "look at the run and at the errors in the form"
    if state is not None and (state.live or name not in STARTS):
        reason = f": {state.paths.run_id} is {state.status}"
        if name in STARTS and validation.form is not None:
            do = "panel.watch(None), or (none) in the list of runs; it leaves that run running"
    elif name in STARTS:
        nothing = f"there {'are no folds' if name == 'cross_validate' else 'is no space'}"
        wrong = [f"{setting}: {text}" for setting, text in validation.errors.items()]
        reason = f": {[*wrong, nothing][0]}"
    return LaunchError(
        f"{BUTTONS[name][0] if name in BUTTONS else name} cannot be pressed now{reason}",
        allowed=", ".join(sorted(enabled)) or "nothing",
        do=do,
    )


def parsed_button(button: str, default: int | None = None) -> tuple[str, int]:
    """Split ``"add_trials=5"`` into name and number; the number is 0 for other buttons.

    Args:
        button: a name, with a number or without.
        default: the number of trials that are added if the text names none.

    Raises:
        LaunchError: the number is missing or wrong.
    """
    name, _, text = button.partition("=")
    if name not in ("add_trials", "stop_trial"):
        return button, 0
    if name == "add_trials" and not text and default is not None:
        text = str(default)
    least = 1 if name == "add_trials" else 0
    if not text.isdecimal() or int(text) < least:
        raise LaunchError(
            f"{name} was given {text!r}",
            allowed=f"a whole number, {least} or more",
            do=f"for example {name}=3",
        )
    return name, int(text)


class _Options(TypedDict):
    wait: Literal[False]
    detach: bool
    display: Literal["off"]


_BACKGROUND: _Options = {"wait": False, "detach": True, "display": "off"}


def start(name: str, train: Train | None, validation: Validation, folds: Folds | None) -> RunHandle:
    """Start a run, a sweep or a cross-validation with the form's settings.

    Args:
        name: one of :data:`STARTS`.
        train: the function; None: the one that ``task`` names.
        validation: of the form, without errors.
        folds: of the panel; a sweep uses them if its space asks for folds.
    """
    config = validation.config
    sweep_config = validation.sweep_config
    assert config is not None  # else the button is disabled
    function = train if train is not None else find_task(config.task)
    if name == "launch":
        return launch(function, config, **_BACKGROUND)
    if name == "cross_validate":
        assert folds is not None
        return cross_validate(function, config, folds, **_BACKGROUND)
    assert sweep_config is not None
    used = folds if sweep_config.folds.k else None
    space = sweep_config.to_dict()
    resume = "auto"
    if _knows_folds(sweep_config, folds):
        # A press begins a sweep even if a complete one has these settings: the call would show it.
        resume = "auto" if sweep_to_resume(function, config, space, used) else "never"
    return sweep(function, config, space, folds=used, resume=resume, **_BACKGROUND)


def _knows_folds(sweep_config: SweepConfig, folds: Folds | None) -> bool:
    """Whether the folds of a sweep are known without a file and the targets of a task."""
    asked = sweep_config.folds
    return not asked.file and (folds is not None or not asked.k)


def control(name: str, state: State, train: Train | None, number: int = 0) -> RunHandle | None:
    """Do what a button of a watched run requests.

    Args:
        name: a button that is offered in this state.
        state: of the watched run.
        train: the function; None: the one that the run's ``task`` names.
        number: of trials for ``"add_trials"``, of the trial for ``"stop_trial"``.

    Returns:
        A handle on what was started or resumed; None: nothing was.

    Raises:
        ResumeError: ``train`` is another function than the run's.
        FoldError: a cross-validation was cut off before its folds were written.
        LaunchError: the trial does not run: the sweep would ignore the request.
    """
    handle = SweepHandle(state.paths, SweepResult)
    match name:
        case "pause":
            handle.pause()
        case "stop" if state.live:  # nobody would read a request in the folder of an ended run
            handle.stop("stopped from the panel")
        case "resume" if state.status == "paused":
            handle.resume()
        case "resume":
            return _resume(state, train)
        case "add_trials" if state.live:
            handle.add_trials(number)
        case "add_trials" if isinstance(state.table, SweepTable):
            # The scheduler itself remembers trials that were added while it ran.
            planned = read_sweep_config(state.paths.folder).budget.n_trials
            return _resume(state, train, (planned or len(state.table.trials)) + number)
        case "stop_trial" if isinstance(state.table, SweepTable):
            running = [trial.number for trial in state.table.running]
            if number not in running:
                raise LaunchError(
                    f"trial {number} has already finished",
                    allowed=", ".join(map(str, running)) or "none: no trial runs now",
                    do="stop a trial that runs",
                )
            handle.stop_trial(number)
        case "train_best" if (best := best_config(state)) is not None:
            function = train if train is not None else find_task(best.task)
            return launch(function, best, name="best", **_BACKGROUND)
    return None


def press(button: str, state: State) -> Path:
    """Press a button without a panel, as the command line does; returns the folder to watch then.

    Raises:
        LaunchError: it cannot be pressed now, or its number is missing or wrong.
    """
    name, number = parsed_button(button)
    enabled = offered_buttons(state)
    if name not in enabled:
        raise refusal(name, state, _NO_FORM, enabled)
    handle = control(name, state, None, number)
    return state.paths.folder if handle is None else handle.paths.folder


def best_trial(state: State | None) -> Trial | None:
    """Return a sweep's best trial; None without one, and for several objectives."""
    best = state.table.best if state is not None and isinstance(state.table, SweepTable) else []
    return best[0] if len(best) == 1 else None


def best_config(state: State | None) -> Config | None:
    """Return the settings of a sweep's best trial; None as for :func:`best_trial`."""
    best = best_trial(state)
    if best is None or state is None or state.gone:
        return None
    return run_config(state.paths).with_overrides(dict(best.params))


def _resume(state: State, train: Train | None, trials: int | None = None) -> RunHandle:
    """Resume a run or a search with its folder's settings; a sweep with more trials if asked."""
    config = run_config(state.paths)
    folder = state.paths.folder
    function = train if train is not None else find_task(config.task)
    if state.kind == "run":
        return launch(function, config, resume=folder, **_BACKGROUND)
    file = folder / FOLDS_FILE
    space = folder / "sweep.yaml"
    if state.kind == "cv":
        return cross_validate(function, config, Folds.load(file), resume=folder, **_BACKGROUND)
    folds = Folds.load(file) if file.exists() else None
    return sweep(
        function, config, space, n_trials=trials, folds=folds, resume=folder, **_BACKGROUND
    )


_WIDTH = 80  # characters of a line of a dict


def code_of_form(validation: Validation, train: Train | None) -> str:
    """Return the cell that starts the same as the form.

    Args:
        validation: of the form.
        train: the panel's function; None: the one that ``task`` names.
    """
    form = validation.form
    if form is None or validation.config is None:
        return "# something in Set up is wrong"
    changed = validation.config.differences(Config())
    overrides = {name: new for name, (new, _) in changed.items()}
    sweep_config = validation.sweep_config
    search = None if sweep_config is None else _without_defaults(sweep_config)
    return python_cell(overrides, search, train=_name(train))


def _without_defaults(sweep_config: SweepConfig) -> dict[str, object]:
    settings = sweep_config.model_dump(exclude_defaults=True)
    return {name: value for name, value in settings.items() if value}


def _name(train: Train | None) -> str:
    return "" if train is None else getattr(train, "__name__", "train")


def python_cell(
    overrides: Mapping[str, object],
    search: Mapping[str, object] | None = None,
    *,
    train: str = "",
) -> str:
    """Return the code of a cell that starts the same.

    Args:
        overrides: the settings that are not at their default.
        search: the settings of a sweep; None: a single run.
        train: the function's name in the notebook; empty: the one that ``task`` names.
    """
    if train:  # the function itself is passed
        overrides = {name: value for name, value in overrides.items() if name != "task"}
    load = "config = nb.load_config("
    load = _assigned(f"{load}overrides=", dict(overrides)) if overrides else load
    lines = ["import nbtoolkit as nb", "", f"{load})"]
    if not train:
        module, _, name = str(overrides.get("task", Config().task)).partition(":")
        lines.insert(1, f"from {module} import {name}")
        train = name
    if search is None:
        return "\n".join([*lines, f"result = nb.launch({train}, config)"])
    searched = _assigned("search = ", search)
    return "\n".join([*lines, searched, f"result = nb.sweep({train}, config, search)"])


def _assigned(begin: str, values: Mapping[str, object]) -> str:
    """Write a dict behind the beginning of a statement, its lines below each other."""
    lines = pformat(values, width=_WIDTH, sort_dicts=False)
    return begin + lines.replace("\n", "\n" + " " * len(begin))
