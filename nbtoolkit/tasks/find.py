"""Import the training function that a configuration's ``task`` names, and its data set."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from nbtoolkit.environment.installed import EXTRAS
from nbtoolkit.errors import ConfigError


def find_task(name: str) -> Callable[..., object]:
    """Import a training function.

    Args:
        name: ``"package.module:function"``, as in ``config.task``.

    Raises:
        ConfigError: there is no such module, or no such function in it.
        Exception: an error of the module itself.
    """
    path, _, function = name.partition(":")
    module = _import(path, name)
    task: object = getattr(module, function, None)
    if not callable(task):
        functions = _public_functions(module)
        close = difflib.get_close_matches(function, functions, n=1)
        raise ConfigError(
            f"task is {name!r}, and {path} has no function {function!r}",
            allowed=", ".join(functions) or "a module with a function train(config, ctx)",
            do=f'did you mean "{path}:{close[0]}"?' if close else "check the name",
        )
    return task


def find_data(name: str) -> Any:
    """Load a task's data set, for :func:`nbtoolkit.make_folds`, by ``load()`` of its module.

    Args:
        name: as for :func:`find_task`. Its module must have a function ``load()`` that returns
            ``(inputs, targets)`` or ``(inputs, targets, groups)``, as those of ``nbtoolkit.tasks``.

    Raises:
        ConfigError: it has none.
    """
    path = name.partition(":")[0]
    load = getattr(_import(path, name), "load", None)
    if not callable(load) or not _has_no_arguments(load):
        lacks = "has no function load()" if not callable(load) else "has a load() with arguments"
        raise ConfigError(
            f"folds are to be made for task {name!r}, and {path} {lacks}",
            allowed="a module whose load() returns (inputs, targets)",
            do="make the folds in Python, nb.make_folds(y).save('folds.json'), and pass this file",
        )
    return load()


def _has_no_arguments(function: Callable[..., Any]) -> bool:
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
            raise  # the module exists, but not one that it imports
        do = "call from the folder with the module, or install its package"
        if path in EXTRAS.values():
            do = "install the whole of nbtoolkit: this copy is without its extras"
        raise ConfigError(
            f"task is {name!r}, and there is no module {error.name!r}",
            allowed='"package.module:function", importable from the working directory or installed',
            do=do,
        ) from error


def _public_functions(module: ModuleType) -> list[str]:
    """Return the names of the module's own public functions."""
    functions = inspect.getmembers(module, inspect.isfunction)
    defined = (name for name, function in functions if function.__module__ == module.__name__)
    return [name for name in defined if name[0] != "_"]
