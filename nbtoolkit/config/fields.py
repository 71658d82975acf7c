"""Define the kinds of values a setting can have; each validates itself and describes itself."""

from __future__ import annotations

import math
import os
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer


@dataclass(frozen=True)
class Says:
    """What an annotated kind of value allows, in words."""

    text: str


class FreeSection(Mapping[str, Any]):
    """A section that is the user's own: a frozen mapping whose values are attributes too.

    ``config.model.hidden``, ``config.model["hidden"]``, ``config.model.get("hidden", 64)`` and
    ``"hidden" in config.model`` all work. Mappings inside are such sections too, lists are tuples.
    A name that a mapping itself has (``get``, ``items``, ``keys``, ``values``) needs ``[...]``.

    Args:
        values: plain values as a YAML file can hold them.

    Raises:
        ValueError: a value cannot stand in a file.
    """

    __slots__ = ("_values",)
    _values: dict[str, Any]

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        frozen = {key: _frozen(value, key) for key, value in (values or {}).items()}
        object.__setattr__(self, "_values", frozen)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._values:
            return self._values[name]
        there = ", ".join(self._values) or "nothing"
        raise AttributeError(f"no setting {name!r} in this section; it has: {there}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"a configuration is frozen: use config.with_overrides to set {name!r}"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return f"FreeSection({self.to_dict()!r})"

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._values})

    def __reduce__(self) -> tuple[object, ...]:
        return FreeSection, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """The section as plain dicts, lists and values."""
        return {key: _thawed(value) for key, value in self._values.items()}


def _frozen(value: Any, name: object) -> Any:
    if not isinstance(name, str):
        raise ValueError(f"the name {name!r} is not a text")
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, FreeSection):
        return value
    if isinstance(value, Mapping):
        inner = {key: f"{name}.{key}" if isinstance(key, str) else key for key in value}
        return FreeSection({key: _frozen(value[key], full) for key, full in inner.items()})
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item, f"{name}.{i}") for i, item in enumerate(value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise ValueError(f"{name!r} is a {type(value).__name__}: no file of settings can hold one")


def _thawed(value: Any) -> Any:
    if isinstance(value, FreeSection):
        return value.to_dict()
    return [_thawed(item) for item in value] if isinstance(value, tuple) else value


def describe(hint: Any) -> str:
    """What an annotation allows, in words: ``auto, or a whole number of at least 1``."""
    choices = list(_choices(hint))
    if len(choices) < 2:
        return "".join(choices)
    last = ", or " if " " in "".join(choices) else " or "
    return ", ".join(choices[:-1]) + last + choices[-1]


def _choices(hint: Any) -> Iterator[str]:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        says = [mark.text for mark in args[1:] if isinstance(mark, Says)]
        yield from says or _choices(args[0])
    elif origin in (Union, types.UnionType):
        for arg in args:
            yield from _choices(arg)
    elif origin is Literal:
        yield from map(str, args)
    else:
        yield from {bool: ["true", "false"], types.NoneType: ["null"], str: ["a text"]}[hint]


def _free(value: Any) -> Any:
    if value is None:
        return FreeSection()  # `options:` with nothing under it
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is no section")
    return value if isinstance(value, FreeSection) else FreeSection(value)


def _number(value: Any) -> Any:
    """Python counts true as 1; a configuration does not."""
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(value: Any) -> Any:
    """Seconds out of ``90``, ``"90s"``, ``"30m"``, ``"1h30m"``."""
    if not isinstance(value, str):
        return _number(value)
    text = value.replace(" ", "").lower()
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{value!r} is no length of time")
    return math.fsum(float(number) * _UNITS[unit] for number, unit in parts)


def _placed(value: str) -> str:
    """``{scratch}`` stands for the host's large disk that is not kept."""
    if "{scratch}" not in value:
        return value
    from nbtoolkit.host import detect_host  # later in the data's way, and only for this

    return value.replace("{scratch}", str(detect_host().scratch))


def _different(value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or not value or len(set(map(str, value))) < len(value):
        raise ValueError("not a list of different numbers")
    return tuple(_number(item) for item in value)


Number = Annotated[float, BeforeValidator(_number), Says("a number")]
Whole = Annotated[int, BeforeValidator(_number), Says("a whole number")]
Count = Annotated[int, BeforeValidator(_number), Field(ge=1), Says("a whole number of at least 1")]
CountFrom0 = Annotated[
    int, BeforeValidator(_number), Field(ge=0), Says("a whole number of at least 0")
]
Seed = Annotated[
    int,
    BeforeValidator(_number),
    Field(ge=0, lt=2**32),  # what numpy.random.seed takes
    Says("a whole number from 0 to 4294967295"),
]
Port = Annotated[
    int,
    BeforeValidator(_number),
    Field(ge=1024, le=65535),
    Says("a whole number from 1024 to 65535"),
]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0), Says("a number above 0")]
NotNegative = Annotated[
    float, BeforeValidator(_number), Field(ge=0), Says("a number of at least 0")
]
Above1 = Annotated[float, BeforeValidator(_number), Field(gt=1), Says("a number above 1")]
Below1 = Annotated[
    float, BeforeValidator(_number), Field(gt=0, lt=1), Says("a number above 0 and below 1")
]
Share = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1), Says("a number from 0 to 1")]
Seconds = Annotated[
    float,
    BeforeValidator(_seconds),
    Field(gt=0),
    Says("seconds above 0, or a text such as 90s, 30m or 1h30m"),
]
Text = Annotated[str, Field(min_length=1), Says("a text")]
OutputFolder = Annotated[
    str,
    Field(min_length=1),
    AfterValidator(_placed),
    Says("a text: a folder, or '{scratch}/folder'"),
]
OptimizerName = Annotated[
    str,
    Field(pattern=r"^(adamw|adam|sgd|rmsprop|[A-Za-z_]\w*(\.[A-Za-z_]\w*)+)$"),
    Says("adamw, adam, sgd, rmsprop, or package.module.Class"),
]
TaskName = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$"), Says("package.module:function")]
Devices = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    BeforeValidator(_different),
    PlainSerializer(list),
    Says("a list of different device numbers, such as [0, 2]"),
]
Free = Annotated[
    FreeSection,
    BeforeValidator(_free),
    PlainSerializer(FreeSection.to_dict),
    Says("settings of your own: texts, numbers, true, false, null, lists, and sections of these"),
]
