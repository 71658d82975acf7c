"""Equal: the command line and the Python cell that do the same as a button, and what differs."""

from __future__ import annotations

import pprint
import shlex
from collections.abc import Mapping
from typing import Any

from nbtoolkit.config import Config
from nbtoolkit.panel.fields import text_of
from nbtoolkit.panel.markup import boxed, columns, said
from nbtoolkit.report.words import setting
from nbtoolkit.yaml_lines import dump

SPACE_FILE = "space.yaml"


def command_line(
    overrides: Mapping[str, Any], space: str = "", trials: str = "", *, task: bool = True
) -> str:
    """What to type in a shell.

    Args:
        overrides: the settings that are not at their default.
        space: the space as YAML text; empty: a single run.
        trials: how many trials; empty: as the space says.
        task: whether the function is one that ``task`` names; one of a cell has no command line.
    """
    if not task:
        return (
            "# a function of a cell: put it into a module, and set task to package.module:function"
        )
    wishes = "".join(f" -o {shlex.quote(f'{n}={_one_line(v)}')}" for n, v in overrides.items())
    if not space.strip():
        return f"nbtoolkit train{wishes}"
    count = f" --trials {trials.strip()}" if trials.strip() else ""
    file = f"cat > {SPACE_FILE} <<'END'\n{space.strip()}\nEND\n"
    return f"{file}nbtoolkit sweep {SPACE_FILE}{wishes}{count}"


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
    given = f"overrides={pprint.pformat(dict(overrides), sort_dicts=False)}" if overrides else ""
    lines = ["import nbtoolkit as nb", "", f"config = nb.load_config({given})"]
    if not train:
        module, _, name = str(overrides.get("task", Config().task)).partition(":")
        lines[1:1] = [f"from {module} import {name}"]
        train = name
    if space is None:
        return "\n".join([*lines, f"result = nb.launch({train}, config)"])
    count = f", n_trials={trials.strip()}" if trials.strip() else ""
    searched = f"space = {pprint.pformat(dict(space), sort_dicts=False)}"
    return "\n".join([*lines, searched, f"result = nb.sweep({train}, config, space{count})"])


def differences(config: Config) -> str:
    """The settings that are not at their default, as HTML."""
    changed = config.differences(Config())
    if not changed:
        return boxed(said("All settings are at their default."))
    lines = [[name, setting(mine), setting(default)] for name, (mine, default) in changed.items()]
    return boxed(columns(["setting", "here", "default"], lines))


def _one_line(value: Any) -> str:
    """A value in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_one_line(one)}" for key, one in value.items()) + "}"
    return text_of(value)


def space_text(space: Mapping[str, Any]) -> str:
    """A space as YAML text."""
    return dump(space)
