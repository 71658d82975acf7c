"""The training function that a configuration's ``task`` names, and its data set's targets."""

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


def find_data(name: str) -> Any:
    """A task's data set, for :func:`nbtoolkit.make_folds`: what ``load()`` of its module returns.

    Args:
        name: as for :func:`find_task`. Its module must have a function ``load()`` that returns
            ``(inputs, targets)``, as those of ``nbtoolkit.tasks`` have, perhaps with groups.

    Raises:
        ConfigError: it has none.
    """
    path = name.partition(":")[0]
    load = getattr(_import(path, name), "load", None)
    if not callable(load) or not _needs_nothing(load):
        lacks = "has no function load()" if not callable(load) else "has a load() with arguments"
        raise ConfigError(
            f"folds are to be made for task {name!r}, and {path} {lacks}",
            allowed="a module whose load() returns (inputs, targets)",
            do="write the folds in Python, nb.make_folds(y).save('folds.json'), and give that file",
        )
    return load()


def _needs_nothing(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True


def _import(path: str, name: str) -> ModuleType:
    if path == "__main__":
        function = name.partition(":")[2]
        raise ConfigError(
            f"task is {name!r}: a function of a cell, of a script, or inside another function, "
            "which no file can name",
            allowed='"package.module:function", importable from the working directory or installed',
            do=f"pass the function itself, nb.launch({function}, config), or put it into a module",
        )
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
