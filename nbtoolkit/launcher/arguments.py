"""Check the arguments of a launch before anything starts."""

from __future__ import annotations

import functools
import inspect
import os
import re
import reprlib
import sys
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

from nbtoolkit.environment.variables import RANK_MARK
from nbtoolkit.errors import LaunchError, NestedLaunch

CHOICES = {
    "start": ("forkserver", "fork", "inline"),
    "where": ("local",),
    "display": ("auto", "widgets", "text", "off"),
}


def check_call(train: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Validate the arguments of :func:`nbtoolkit.launch`.

    Args:
        train: the training function.
        arguments: the other arguments, by name.

    Raises:
        NestedLaunch: this process is a rank itself.
        LaunchError: an argument has an invalid value.
    """
    if RANK_MARK in os.environ:
        raise NestedLaunch(
            f"nb.launch was called inside a rank of the run {os.environ[RANK_MARK]}",
            allowed="launches from a notebook, a script or the command line",
            do="move the launch out of the training function, or behind `if __name__ == ...`",
        )
    _check_function(train)
    _check_arguments(arguments)
    if arguments["start"] != "forkserver" and (arguments["detach"] or not arguments["wait"]):
        raise LaunchError(
            f'start="{arguments["start"]}" ties the run to this process: '
            "it cannot be detached or run in the background",
            allowed='wait=False and detach=True with start="forkserver"',
            do='use start="forkserver"',
        )


def task_name(train: Callable[..., Any]) -> str:
    """Return the name of a training function for the setting ``task``.

    Returns:
        ``"package.module:function"``, or ``"__main__:function"`` if no other process can import it:
        a function of a cell, a script, or inside another function.
    """
    module, name = getattr(train, "__module__", None), getattr(train, "__qualname__", None)
    found: Any = sys.modules.get(module or "")
    for part in (name or "").split("."):
        found = getattr(found, part, None)
    if found is train and module not in ("__main__", "__mp_main__"):
        return f"{module}:{name}"
    plain = getattr(train, "__name__", type(train).__name__)
    return f"__main__:{re.sub(r'[^a-zA-Z0-9_]', '', plain) or 'function'}"


def _check_function(train: Callable[..., Any]) -> None:
    if not callable(train):
        raise LaunchError(
            f"launch got {reprlib.repr(train)}, which is not a function",
            allowed="a function train(config, ctx)",
            do="pass the function itself: nb.launch(train, config), not nb.launch(train(...))",
        )
    name, code = _name(train), _called(train)
    if inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code):
        raise LaunchError(
            f"{name} is an async function: a rank calls it, and nothing would await it",
            allowed="a plain function train(config, ctx)",
            do=f"launch a plain function: def train(config, ctx): return asyncio.run({name}(...))",
        )
    if inspect.isgeneratorfunction(code):
        raise LaunchError(
            f"{name} is a generator function (there is a `yield` in it): calling it runs nothing",
            allowed="a plain function train(config, ctx) that returns its result",
            do="return a list, and use ctx.log or ctx.report for values of each step",
        )
    try:
        signature = inspect.signature(train)
    except (TypeError, ValueError):  # built-in functions may have none
        return
    try:
        signature.bind("config", "ctx")
    except TypeError as error:
        raise LaunchError(
            f"{name}{signature} cannot be called as {name}(config, ctx): {error}",
            allowed="a function train(config, ctx)",
            do="accept both arguments; pass further ones with functools.partial(train, lr=0.1)",
        ) from None


def _called(train: Callable[..., Any]) -> Any:
    """Return the function whose body a call runs."""
    while isinstance(train, functools.partial):
        train = train.func
    plain = inspect.isroutine(train) or inspect.isclass(train)
    return train if plain else type(train).__call__


def _name(train: Callable[..., Any]) -> str:
    while isinstance(train, functools.partial):
        train = train.func
    return str(getattr(train, "__name__", type(train).__name__))


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    for argument in CHOICES:
        check_choice(argument, arguments[argument])
    processes, name = arguments["processes"], arguments["name"]
    whole = isinstance(processes, Integral) and not isinstance(processes, bool)
    count = processes is None or (whole and processes >= 1)
    _check("processes", arguments, count, "a whole number of at least 1, or None")
    _check("name", arguments, name is None or isinstance(name, str), "a string, or None")
    resume = isinstance(arguments["resume"], (str, os.PathLike)) and arguments["resume"] != ""
    _check("resume", arguments, resume, '"auto" | "never" | a run\'s id or folder')
    listener = arguments["on_event"] is None or callable(arguments["on_event"])
    _check("on_event", arguments, listener, "a function of one event, or None")


def check_choice(argument: str, value: object) -> None:
    """Validate an argument that has a fixed set of values.

    Args:
        argument: one of ``CHOICES``.
        value: its value.

    Raises:
        LaunchError: the value is none of the allowed ones.
    """
    known = CHOICES[argument]
    _check(argument, {argument: value}, value in known, " | ".join(map(repr, known)))


def _check(argument: str, arguments: Mapping[str, Any], good: bool, allowed: str) -> None:
    if not good:
        raise LaunchError(
            f"{argument}={reprlib.repr(arguments[argument])} is not valid",
            allowed=allowed,
            do=f"choose one of these, or leave {argument} out",
        )
