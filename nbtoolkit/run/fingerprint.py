"""Hash the settings and the code that decide the result of a run: its fingerprint."""

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
from typing import Any, cast

from nbtoolkit.config.schema import flat_settings
from nbtoolkit.environment.installed import installed_roots
from nbtoolkit.run.payload import closure_values, global_names

# Settings that do not change what a run computes (up to the order of sums), and so are not part of
# its fingerprint. The number of ranks is among them, since the batch of a step is global.
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
    "distributed.local_sgd_steps",
    "checkpoint.monitor",  # early stopping and the plateau schedule depend on the best value
    "checkpoint.mode",
    "checkpoint.weights",  # which weights predict at the end
)
_STANDARD_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
# Attributes of a class that say where it is defined; a line added above it moves the first.
_OF_EVERY_CLASS = ("__firstlineno__", "__module__", "__doc__", "__qualname__")
_STEP_SIZE = ("distributed.world_size", "train.gradient_accumulation_steps")


def function_source(function: Callable[..., Any]) -> str:
    """A function as text: its code, the plain values bound to it, and the code that it calls.

    Bound values are the arguments of a partial, defaults, closure variables and the attributes of
    an object. Of the code that it calls, the functions and classes count that it names (and those
    that they name), if they are defined in a notebook, a script or a module that is not installed.
    """
    texts: list[str] = []
    seen: set[int] = set()
    todo: list[object] = [function]
    while todo:
        one = todo.pop(0)
        if id(one) not in seen:
            seen.add(id(one))
            texts.append(_own_text(one))
            # What a partial calls counts wherever it is defined: nothing else says what runs.
            if isinstance(one, functools.partial):
                todo.append(one.func)
            todo += [named for named in _named_by(one) if _is_users(named)]
    return " ".join(texts)


def _own_text(function: object) -> str:
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
    """The numbers and texts in which two functions with the same source may differ, by name."""
    owner = getattr(function, "__self__", function)
    bound = [*getattr(owner, "__dict__", {}).items(), *closure_values(function)]
    bound += [("default", value) for value in getattr(function, "__defaults__", None) or ()]
    plain = [(name, value) for name, value in bound if isinstance(value, (int, float, str))]
    return [one for one in plain if one[0] not in _OF_EVERY_CLASS]


def _named_by(function: object) -> Iterator[object]:
    """What a function, class or object refers to by name, in an order that does not change."""
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


def fingerprint(config: Mapping[str, object], function: Callable[..., Any]) -> str:
    """Hash what decides the result of a run, to 16 hex digits.

    Args:
        config: the resolved configuration as plain Python; output and tracking keys do not count.
        function: the training function; its code counts (:func:`function_source`), the name of its
            module does not.
    """
    return _hash(f"{_settings_text(config)}\n{function_source(function)}")


def settings_hash(config: Mapping[str, object]) -> str:
    """Hash the settings that decide the result of a run, to 16 hex digits."""
    return _hash(_settings_text(config))


def source_hash(train: Callable[..., Any]) -> str:
    """Hash the function's code (:func:`function_source`), to 16 hex digits."""
    return _hash(function_source(train))


def code_hash(train: Callable[..., Any]) -> str:
    """Hash the function's own source, without what is bound to it or what it calls."""
    while isinstance(train, functools.partial):
        train = train.func
    return _hash(_code_text(train if inspect.isroutine(train) else type(train)))


def function_name(train: Callable[..., Any]) -> str:
    """The name of a training function as a run records it: with its module."""
    while isinstance(train, functools.partial):
        train = train.func
    named = train if hasattr(train, "__qualname__") else type(train)
    return f"{train.__module__}.{named.__qualname__}"


def _settings_text(config: Mapping[str, object]) -> str:
    settings = flat_settings(config)
    kept = {key: value for key, value in settings.items() if decides_result(key, config)}
    return json.dumps(kept, sort_keys=True, default=str)


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
