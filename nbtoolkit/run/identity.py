"""Hash the settings and the code that decide the result of a run: its identity."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from nbtoolkit.config.fields import flat_settings
from nbtoolkit.environment.installed import installed_roots
from nbtoolkit.wire.payload import closure_values, global_names

# Settings that do not change what a run computes (up to the order of sums), and so are not part of
# its identity. The number of ranks is among them, since the batch of a step is global.
_NOT_IDENTITY = (
    "task",
    "tracking.",
    "runtime.",
    "checkpoint.",
    "cluster.",
    "distributed.",
    "train.num_workers",
    "train.profile",
)
_IDENTITY = (
    "distributed.sync_batchnorm",
    "distributed.compression",
    "distributed.powersgd_rank",
    "checkpoint.monitor",  # early stopping and the plateau schedule depend on the best value
    "checkpoint.mode",
    "checkpoint.weights",  # which weights predict at the end
)
_STANDARD_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
# Attributes of a class that say where it is defined; a line added above it moves the first.
_OF_EVERY_CLASS = ("__firstlineno__", "__module__", "__doc__", "__qualname__")
_STEP_SIZE = ("distributed.world_size", "train.gradient_accumulation_steps")


def code_of(function: Callable[..., Any]) -> dict[str, str]:
    """Return the hash of each of the user's functions that decide what a function does, by name.

    These are its own code, the plain values bound to it, and the code that it calls. Bound values
    are the arguments of a partial, defaults, closure variables and the attributes of an object. Of
    the code that it calls, the functions and classes count that it names (and those that they
    name), if they are defined in a notebook, a script or a module that is not installed.
    """
    texts: dict[str, list[str]] = {}
    seen: set[int] = set()
    todo: list[object] = [function]
    while todo:
        named = todo.pop(0)
        if id(named) not in seen:
            seen.add(id(named))
            texts.setdefault(_name_of(named), []).append(_text(named))
            # What a partial calls counts wherever it is defined: nothing else says what runs.
            if isinstance(named, functools.partial):
                todo.append(named.func)
            todo += [other for other in _named_by(named) if _is_users(other)]
    return {name: _hash(" ".join(of_name)) for name, of_name in texts.items()}


def _name_of(function: object) -> str:
    if isinstance(function, functools.partial):
        return "the arguments of a partial"
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _text(function: object) -> str:
    if isinstance(function, functools.partial):
        bound = f"{function.args!r} {sorted(function.keywords.items())!r}"
        return re.sub(r" at 0x[0-9a-f]+", "", bound)  # another one in each session
    routine = inspect.isroutine(function) or inspect.isclass(function)
    text = _code_text(function if routine else type(function))
    return " ".join([text, *map(repr, _bound_values(function))])


def _code_text(function: object) -> str:
    if inspect.isclass(function):  # its methods are texts of their own
        return function.__qualname__
    try:
        return inspect.getsource(cast("types.FunctionType", function))
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        if code is None:
            return repr(getattr(function, "__qualname__", type(function)))
        constants = [value for value in code.co_consts if isinstance(value, (int, float, str))]
        return f"{code.co_code.hex()} {code.co_names} {constants}"


def _bound_values(function: object) -> list[tuple[str, int | float | str]]:
    """Return the numbers and texts, by name, that functions with one source may differ in."""
    owner = getattr(function, "__self__", function)
    bound = [*getattr(owner, "__dict__", {}).items(), *closure_values(function)]
    bound += [("default", value) for value in getattr(function, "__defaults__", None) or ()]
    plain = [(name, value) for name, value in bound if isinstance(value, (int, float, str))]
    return [item for item in plain if item[0] not in _OF_EVERY_CLASS]


def _named_by(function: object) -> Iterator[object]:
    """Yield what a function, class or object refers to by name, in a fixed order."""
    if isinstance(function, functools.partial):
        yield from (function.func, *function.args, *function.keywords.values())
    elif inspect.isclass(function):
        yield from function.__bases__
        for _, value in sorted(vars(function).items()):
            yield value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    elif inspect.ismethod(function):
        yield type(function.__self__)
    elif isinstance(function, types.FunctionType):
        yield from (value for _, value in closure_values(function))
        for name in sorted(global_names(function.__code__)):
            yield function.__globals__.get(name)
    else:
        yield type(function)


def _is_users(value: object) -> bool:
    """Whether this is a function or class of a notebook, a script or a module not installed."""
    if isinstance(value, functools.partial):
        return True
    module = getattr(value, "__module__", None)
    if not isinstance(value, (type, types.FunctionType)) or not module:
        return False
    if module == "__main__":
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    ours = module.partition(".")[0] == __name__.partition(".")[0]
    return file != "" and not ours and not file.startswith((_STANDARD_LIBRARY, *installed_roots()))


@dataclass(frozen=True)
class Identity:
    """What decides the result of a run.

    Attributes:
        function: the name of the training function, with its module.
        settings: the settings that decide, as text; output and tracking settings do not.
        code: the hashes of the user's functions, as :func:`code_of` returns them.
    """

    function: str
    settings: str
    code: dict[str, str]

    @classmethod
    def of(cls, settings: Mapping[str, object], train: Callable[..., Any]) -> Identity:
        """Return the identity of a run of ``train`` with the resolved configuration, as a dict."""
        return cls.of_parts(function_name(train), settings, code_of(train))

    @classmethod
    def of_parts(
        cls, function: str, settings: Mapping[str, object], code: dict[str, str]
    ) -> Identity:
        """Return the identity of a run whose function is known by its name and its code only."""
        flat = flat_settings(settings)
        kept = {key: value for key, value in flat.items() if decides_result(key, settings)}
        return cls(function, json.dumps(kept, sort_keys=True, default=str), code)

    @property
    def hash(self) -> str:
        """The hash of settings and code, 16 hex digits."""
        return self.hash_with(self.code)

    def hash_with(self, code: Mapping[str, str]) -> str:
        """Return the hash that these settings have with other code."""
        return _hash(f"{self.settings}\n{json.dumps(code, sort_keys=True)}")


def changed_functions(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the names of the functions that differ, as text; empty if none does."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(names)


def own_source(train: Callable[..., Any]) -> str:
    """Return the function's own source, without what is bound to it or what it calls."""
    while isinstance(train, functools.partial):
        train = train.func
    return _code_text(train if inspect.isroutine(train) else type(train))


def function_name(train: Callable[..., Any]) -> str:
    """Return the name of a training function as a run records it: with its module."""
    while isinstance(train, functools.partial):
        train = train.func
    named = train if hasattr(train, "__qualname__") else type(train)
    return f"{train.__module__}.{named.__qualname__}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def decides_result(key: str, config: Mapping[str, Any]) -> bool:
    """Whether a setting changes what a run computes.

    Args:
        key: its dotted name.
        config: the resolved configuration as plain Python: with ``train.batch_size_per_device`` the
            number of ranks and accumulation steps decides the batch size of a step.
    """
    if key in _STEP_SIZE:
        return (config.get("train") or {}).get("batch_size_per_device") is not None
    return key in _IDENTITY or not key.startswith(_NOT_IDENTITY)
