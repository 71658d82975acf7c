"""find_task: the training function that a configuration's ``task`` names."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from nbtoolkit.errors import ConfigError


def find_task(name: str) -> Callable[..., Any]:
    """Import a training function.

    Args:
        name: ``"package.module:function"``, as in ``config.task``.

    Raises:
        ConfigError: there is no such module, or no such function in it.
        Exception: what the module itself raises when it is imported.
    """
    path, _, function = name.partition(":")
    module = _import(path, name)
    found = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(
            f"task is {name!r}, and {path} has no function {function!r}",
            allowed=_functions(module) or "a module with a function train(config, ctx)",
            do=_similar(function, module, path),
        )
    task: Callable[..., Any] = found
    return task


def _import(path: str, name: str) -> ModuleType:
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise  # the module is there; what it imports is not
        raise ConfigError(
            f"task is {name!r}, and there is no module {error.name!r}",
            allowed='"package.module:function", importable from the working directory or installed',
            do="call from the folder that holds the module, or install its package",
        ) from error


def _functions(module: ModuleType) -> str:
    """The module's own public functions, in words."""
    found = inspect.getmembers(module, inspect.isfunction)
    return ", ".join(
        name for name, one in found if one.__module__ == module.__name__ and name[0] != "_"
    )


def _similar(function: str, module: ModuleType, path: str) -> str:
    close = difflib.get_close_matches(function, _functions(module).split(", "), n=1)
    return f'did you mean "{path}:{close[0]}"?' if close and close[0] else "check the name"
