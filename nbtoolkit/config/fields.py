"""Define the types of settings, which validate values and describe what they allow."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import types
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    model_validator,
)

from nbtoolkit.config import reads
from nbtoolkit.config.aliases import MEANINGS, REFUSALS
from nbtoolkit.errors import ConfigError


class Section(BaseModel):
    """Base of all sections: frozen, without unknown names; a field's docstring is its help."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, values: object) -> object:
        """Accept ``train:`` with nothing under it."""
        return {} if values is None else values

    def __setattr__(self, name: str, value: object) -> None:
        # A section of Config has the name of its class.
        section = type(self).__name__.lower()
        key = name if section == "config" else f"{section}.{name}"
        raise ConfigError(
            f"a configuration is frozen: {key} cannot be set",
            allowed="a new configuration with another value",
            do=f"config = config.with_overrides({{{key!r}: {value!r}}})",
        )

    def __iter__(self) -> Generator[tuple[str, Any], None, None]:
        """Yield the settings with their values, as for ``dict(config.optim)``."""
        reads.note_dump(f"{type(self).__name__.lower()}.*")
        return super().__iter__()


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
        given = values._values if isinstance(values, FreeSection) else values or {}
        frozen = {key: _frozen(value, key, name) for key, value in given.items()}
        object.__setattr__(self, "_values", frozen)
        object.__setattr__(self, "_name", name)

    def __getitem__(self, key: str) -> Any:
        reads.note(f"{self._name}.{key}")
        return self._values[key]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            reads.note(f"{self._name}.{name}")
            if name in self._values:
                return self._values[name]
        names = ", ".join(self._values) or "nothing"
        raise AttributeError(f"no setting {name!r} in this section; it has: {names}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"a configuration is frozen: use config.with_overrides to set {name!r}"
        )

    def __iter__(self) -> Iterator[str]:
        reads.note(f"{self._name}.*")
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
        return _unpickled, (self.to_dict(), self._name, reads.names())

    def to_dict(self) -> dict[str, object]:
        """Convert the section to plain dicts, lists and values."""
        reads.note_dump(f"{self._name}.*")
        return {key: _thawed(value) for key, value in self._values.items()}


def _unpickled(values: dict[str, object], name: str, read: frozenset[str]) -> FreeSection:
    """Return a section, and note what the process that pickled it has asked for."""
    reads.note(*read)
    return FreeSection(values, name)


def _frozen(value: object, key: object, section: str) -> object:
    if not isinstance(key, str):
        raise ValueError(f"the name {key!r} is not a string")
    name = f"{section}.{key}" if section else key
    if isinstance(value, Mapping):
        return FreeSection(value, name)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item, str(i), name) for i, item in enumerate(value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise ValueError(f"{name!r} is a {type(value).__name__}, which YAML cannot hold")


def _thawed(value: object) -> object:
    if isinstance(value, FreeSection):
        return value.to_dict()
    return [_thawed(item) for item in value] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Allowed:
    """Annotation that describes the allowed values for people."""

    text: str


FREE = ("model", "data")
"""Sections for the user's own settings: names in them are neither renamed nor checked."""


@functools.cache
def allowed_values(model: type[BaseModel]) -> dict[str, str]:
    """Describe every checked setting of a model: dotted name -> allowed values."""
    described = {}
    for name, hint in get_type_hints(model, include_extras=True).items():
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            described.update({f"{name}.{key}": text for key, text in allowed_values(hint).items()})
        elif name in model.model_fields and name not in FREE:
            described[name] = describe(hint)
    return described


def describe(hint: object) -> str:
    """Describe what an annotation allows: ``auto, or a whole number of at least 1``."""
    choices = list(_choices(hint))
    if len(choices) < 2:
        return "".join(choices)
    last = ", or " if " " in "".join(choices) else " or "
    return ", ".join(choices[:-1]) + last + choices[-1]


def _choices(hint: object) -> Iterator[str]:
    origin = get_origin(hint)
    args = get_args(hint)
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


def as_yaml(value: object) -> str:
    """Format a setting's value as YAML writes it."""
    return value if isinstance(value, str) else json.dumps(value, default=dict)


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted name."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flat_settings(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


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
        raise ValueError("not a duration")
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
    """Return a path as text: a setting is what a YAML file can hold."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _choice(value: object, info: ValidationInfo) -> object:
    """Convert a name to lower case, and another launcher's name to ours."""
    if not isinstance(value, str):
        return value
    name = f"{info.field_name}: {value.lower()}"
    if name in REFUSALS:
        raise ValueError(REFUSALS[name])
    return MEANINGS.get(name, value.lower())


def _section(value: object, info: ValidationInfo) -> FreeSection:
    # None: `options:` with nothing under it.
    if value is not None and not isinstance(value, Mapping):
        raise ValueError("not a section")
    return FreeSection(value, info.field_name or "")


def _groups(value: object) -> tuple[FreeSection, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, Mapping) for v in value):
        raise ValueError("not a list of groups")
    groups = tuple(FreeSection(group) for group in value)
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


Auto: TypeAlias = Literal["auto"]
Choice = BeforeValidator(_choice)
"""Annotation of names that other launchers write in other ways."""
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
    Text, AfterValidator(_expand_scratch), Allowed("a string: a folder, or '{scratch}/folder'")
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
Texts = Annotated[tuple[Text, ...], PlainSerializer(list), Allowed("a list of strings")]
Free = Annotated[
    FreeSection,
    BeforeValidator(_section),
    PlainSerializer(FreeSection.to_dict),
    Allowed(
        "names that you choose; values: strings, numbers, booleans, null, lists, or more names"
    ),
]
ParamGroups = Annotated[
    tuple[FreeSection, ...],
    BeforeValidator(_groups),
    PlainSerializer(lambda groups: [group.to_dict() for group in groups]),
    Allowed("a list of groups {match: 'pattern of names', lr or lr_scale, weight_decay, ...}"),
]
