"""Show the command line and the Python cell that do the same as a button."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from nbtoolkit.config.schema import Config
from nbtoolkit.config.yaml_source import dump
from nbtoolkit.launcher.arguments import task_name
from nbtoolkit.panel.form import Checked, Draft, text_of
from nbtoolkit.report.run_summary import setting
from nbtoolkit.views.markup import boxed, columns, preformatted, said, wrong

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
