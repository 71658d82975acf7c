"""Print what a user can name: public names, methods, settings, commands and event types.

Compare two versions:

    git worktree add ../before v0.2.0
    diff <(cd ../before && python tests/public_surface.py) <(python tests/public_surface.py)
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

import nbtoolkit as nb
from nbtoolkit.__main__ import command_line
from nbtoolkit.run import events
from nbtoolkit.search.study.sweep_config import SweepConfig


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of nested settings."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def sweep_settings(section: Any, prefix: str = "") -> Iterator[str]:
    """The dotted names of a sweep file's settings."""
    for name, field in section.model_fields.items():
        inner = [one for one in _types(field.annotation) if hasattr(one, "model_fields")]
        if inner:
            yield from sweep_settings(inner[0], f"{prefix}{name}.")
        else:
            yield prefix + name


def _types(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__args__", (annotation,))


def surface() -> Iterator[str]:
    """One line per name."""
    for name in nb.__all__:
        public = getattr(nb, name)
        yield f"name nb.{name}"
        if callable(public) and not inspect.isclass(public):
            arguments = inspect.signature(public).parameters
            yield from (f"argument nb.{name}({argument})" for argument in arguments)
        elif inspect.isclass(public):
            yield from (f"member nb.{name}.{one}" for one in dir(public) if not one.startswith("_"))
    yield from (f"setting {name}" for name in flat(nb.load_config(env=None).to_dict()))
    yield from (f"sweep setting {name}" for name in sweep_settings(SweepConfig))
    for name, command in typer.main.get_command(command_line()).commands.items():  # type: ignore[attr-defined]
        yield f"command {name}"
        yield from (f"option {name} {option}" for one in command.params for option in one.opts)
    for kind in vars(events).values():
        if dataclasses.is_dataclass(kind) and getattr(kind, "type", None):
            yield from (f"event {kind.type}.{field.name}" for field in dataclasses.fields(kind))


if __name__ == "__main__":
    print(*sorted(set(surface())), sep="\n")
