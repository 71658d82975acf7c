"""Name and check the training function of a launch."""

from __future__ import annotations

import inspect
import re
import reprlib
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from nbtoolkit.config.schema import Config
from nbtoolkit.errors import LaunchError

if TYPE_CHECKING:
    from nbtoolkit.worker.context import RunContext

Train = Callable[[Config, "RunContext"], Any]


def task_name(train: Callable[..., Any]) -> str:
    """Return the name of a training function for the setting ``task``.

    Returns:
        ``"package.module:function"``, or ``"__main__:function"`` if no other process can import it:
        a function of a cell, a script, or inside another function.
    """
    module = getattr(train, "__module__", None)
    name = getattr(train, "__qualname__", None)
    resolved: Any = sys.modules.get(module or "")
    for part in (name or "").split("."):
        resolved = getattr(resolved, part, None)
    if resolved is train and module not in ("__main__", "__mp_main__"):
        return f"{module}:{name}"
    plain = getattr(train, "__name__", type(train).__name__)
    return f"__main__:{re.sub(r'[^a-zA-Z0-9_]', '', plain) or 'function'}"


def check_function(train: Callable[..., Any]) -> None:
    """Raise a LaunchError for what cannot be called as ``train(config, ctx)``."""
    if not callable(train):
        raise LaunchError(
            f"launch got {reprlib.repr(train)}, which is not a function",
            allowed="a function train(config, ctx)",
            do="pass the function itself: nb.launch(train, config), not nb.launch(train(...))",
        )
    called = train
    while isinstance(called, partial):
        called = called.func
    name = str(getattr(called, "__name__", type(called).__name__))
    plain = inspect.isroutine(called) or inspect.isclass(called)
    code = called if plain else type(called).__call__  # whose body a call runs
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
