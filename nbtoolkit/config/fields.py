"""Define the types of settings, which validate values and describe what they allow."""

from __future__ import annotations

import math
import os
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, ValidationInfo

from nbtoolkit.config.reads import add_asked, mark_asked, names_asked


@dataclass(frozen=True)
class Allowed:
    """Annotation that describes the allowed values for people."""

    text: str


class FreeSection(Mapping[str, Any]):
    """A section for the user's own settings: a frozen mapping with attribute access.

    ``config.model.hidden``, ``config.model["hidden"]``, ``config.model.get("hidden", 64)`` and
    ``"hidden" in config.model`` all work. Nested mappings become FreeSections, lists become tuples.
    The names of a mapping's own methods (``get``, ``items``, ``keys``, ``values``) need ``[...]``.

    It notes the names that are asked for (:mod:`nbtoolkit.config.reads`).

    Args:
        values: plain values, as a YAML file can hold them.
        name: the section's dotted name.

    Raises:
        ValueError: a value cannot be written to a YAML file.
    """

    __slots__ = ("_name", "_values")
    _values: dict[str, object]
    _name: str

    def __init__(self, values: Mapping[str, object] | None = None, name: str = "") -> None:
        prefix = f"{name}." if name else ""
        frozen = {key: _frozen(value, key, prefix) for key, value in (values or {}).items()}
        object.__setattr__(self, "_values", frozen)
        object.__setattr__(self, "_name", name)

    def __getitem__(self, key: str) -> Any:
        mark_asked(self._name, key)
        return self._values[key]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            mark_asked(self._name, name)
            if name in self._values:
                return self._values[name]
        names = ", ".join(self._values) or "nothing"
        raise AttributeError(f"no setting {name!r} in this section; it has: {names}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"a configuration is frozen: use config.with_overrides to set {name!r}"
        )

    def __iter__(self) -> Iterator[str]:
        mark_asked(self._name, "*")
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FreeSection):
            return self._values == other._values
        return self._values == other

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return f"FreeSection({self.to_dict()!r})"

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._values})

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (self.to_dict(), self._name, names_asked())

    def to_dict(self) -> dict[str, object]:
        """Convert the section to plain dicts, lists and values."""
        mark_asked(self._name, "*", only_recorded=True)
        return {key: _thawed(value) for key, value in self._values.items()}


def _unpickled(values: dict[str, object], name: str, asked: frozenset[str]) -> FreeSection:
    """A section, with what the process that pickled it has asked for."""
    add_asked(asked)
    return FreeSection(values, name)


def _frozen(value: object, name: object, prefix: str) -> object:
    if not isinstance(name, str):
        raise ValueError(f"the name {name!r} is not a string")
    if isinstance(value, Mapping):
        values = value._values if isinstance(value, FreeSection) else value
        return FreeSection(values, f"{prefix}{name}")
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item, f"{name}.{i}", prefix) for i, item in enumerate(value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    full = f"{prefix}{name}"
    raise ValueError(f"{full!r} is a {type(value).__name__}, which YAML cannot hold")


def _thawed(value: object) -> object:
    if isinstance(value, FreeSection):
        return value.to_dict()
    return [_thawed(item) for item in value] if isinstance(value, tuple) else value


def describe(hint: object) -> str:
    """Describe what an annotation allows: ``auto, or a whole number of at least 1``."""
    choices = list(_choices(hint))
    if len(choices) < 2:
        return "".join(choices)
    last = ", or " if " " in "".join(choices) else " or "
    return ", ".join(choices[:-1]) + last + choices[-1]


def _choices(hint: object) -> Iterator[str]:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        # Python flattens nested annotations: the last text describes the narrowest type.
        texts = [mark.text for mark in args[1:] if isinstance(mark, Allowed)]
        yield from texts[-1:] or _choices(args[0])
    elif origin in (Union, types.UnionType):
        for arg in args:
            yield from _choices(arg)
    elif origin is Literal:
        yield from map(str, args)
    elif hint is bool:
        yield from ("true", "false")
    else:
        yield {types.NoneType: "null", str: "a string"}[hint]


def _free_section(value: object, info: ValidationInfo) -> FreeSection:
    return _named_section(value, info.field_name or "")


def _named_section(value: object, name: str) -> FreeSection:
    # None: `options:` with nothing under it.
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is not a section")
    values = value._values if isinstance(value, FreeSection) else value
    return FreeSection(values, name)


def _number(value: object) -> object:
    """Reject booleans, which Python counts as 0 and 1."""
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    return value


_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(value: object) -> object:
    """Convert ``90``, ``"90s"``, ``"30m"`` or ``"1h30m"`` to seconds."""
    if not isinstance(value, str):
        return _number(value)
    text = value.replace(" ", "").lower()
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{value!r} is not a duration")
    return math.fsum(float(number) * _UNITS[unit] for number, unit in parts)


def _expand_scratch(value: str) -> str:
    """Replace ``{scratch}`` by the host's large temporary folder."""
    if "{scratch}" not in value:
        return value
    from nbtoolkit.host import detect_host

    return value.replace("{scratch}", str(detect_host().scratch))


def _distinct_numbers(value: object) -> tuple[object, ...]:
    if not isinstance(value, (list, tuple)) or not value or len(set(map(str, value))) < len(value):
        raise ValueError("not a list of distinct numbers")
    return tuple(_number(item) for item in value)


def _path(value: object) -> object:
    """A path as text: a setting is what a YAML file can hold."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


Number = Annotated[float, BeforeValidator(_number), Allowed("a number")]
Whole = Annotated[int, BeforeValidator(_number), Allowed("a whole number")]
Count = Annotated[Whole, Field(ge=1), Allowed("a whole number of at least 1")]
CountFrom0 = Annotated[Whole, Field(ge=0), Allowed("a whole number of at least 0")]
# What numpy.random.seed takes.
Seed = Annotated[Whole, Field(ge=0, lt=2**32), Allowed("a whole number from 0 to 4294967295")]
Port = Annotated[Whole, Field(ge=1024, le=65535), Allowed("a whole number from 1024 to 65535")]
Positive = Annotated[Number, Field(gt=0), Allowed("a number above 0")]
NotNegative = Annotated[Number, Field(ge=0), Allowed("a number of at least 0")]
Above1 = Annotated[Number, Field(gt=1), Allowed("a number above 1")]
Below1 = Annotated[Number, Field(gt=0, lt=1), Allowed("a number above 0 and below 1")]
Share = Annotated[Number, Field(ge=0, le=1), Allowed("a number from 0 to 1")]
Seconds = Annotated[
    float,
    BeforeValidator(_seconds),
    Field(gt=0),
    Allowed("seconds above 0, or a string such as 90s, 30m or 1h30m"),
]
Text = Annotated[str, BeforeValidator(_path), Field(min_length=1), Allowed("a string")]
OutputFolder = Annotated[
    str,
    BeforeValidator(_path),
    Field(min_length=1),
    AfterValidator(_expand_scratch),
    Allowed("a string: a folder, or '{scratch}/folder'"),
]
OptimizerName = Annotated[
    str,
    Field(pattern=r"^(adamw|adam|sgd|rmsprop|[A-Za-z_]\w*(\.[A-Za-z_]\w*)+)$"),
    Allowed("adamw, adam, sgd, rmsprop, or package.module.Class"),
]
TaskName = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$"), Allowed("package.module:function")]
Devices = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    BeforeValidator(_distinct_numbers),
    PlainSerializer(list),
    Allowed("a list of distinct device numbers, such as [0, 2]"),
]
Texts = Annotated[
    tuple[Annotated[str, BeforeValidator(_path), Field(min_length=1)], ...],
    PlainSerializer(list),
    Allowed("a list of strings"),
]
Free = Annotated[
    FreeSection,
    BeforeValidator(_free_section),
    PlainSerializer(FreeSection.to_dict),
    Allowed(
        "names that you choose; values: strings, numbers, booleans, null, lists, or more names"
    ),
]


def _param_groups(value: object) -> tuple[FreeSection, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError("not a list of groups")
    groups = tuple(_named_section(group, "") for group in value)
    for group in groups:
        match = group.get("match")
        patterns = match if isinstance(match, tuple) else (match,)
        if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise ValueError("a group has no match: a pattern of parameter names")
        if "lr" in group and "lr_scale" in group:
            raise ValueError(f"the group {match!r} has both lr and lr_scale")
        for name in ("lr", "lr_scale", "weight_decay"):
            number = group.get(name, 1.0)
            if isinstance(number, bool) or not isinstance(number, (int, float)) or number < 0:
                raise ValueError(f"{name} of the group {match!r} is not a number of at least 0")
    return groups


ParamGroups = Annotated[
    tuple[FreeSection, ...],
    BeforeValidator(_param_groups),
    PlainSerializer(lambda groups: [group.to_dict() for group in groups]),
    Allowed("a list of groups {match: 'pattern of names', lr or lr_scale, weight_decay, ...}"),
]
