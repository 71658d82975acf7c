"""Fields: every setting of a configuration as a form needs it, made from the schema alone."""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError
from yaml import YAMLError

from nbtoolkit.config import Config, Section
from nbtoolkit.config_checks import fields as allowed_values
from nbtoolkit.config_values import FreeSection
from nbtoolkit.errors import ConfigError
from nbtoolkit.yaml_lines import dump, parse_value

GENERAL = "general"
"""The section of settings that stand in none."""


@dataclass(frozen=True)
class Field:
    """One setting.

    Attributes:
        name: its dotted name.
        help: its documentation.
        allowed: what it may be, in words.
        choices: all its values as texts, where it is one of a few; else empty.
        free: whether it is a section of the user's own: YAML of several lines.
        hint: its type, which checks a value by itself.
    """

    name: str
    help: str
    allowed: str
    choices: tuple[str, ...] = ()
    free: bool = False
    hint: Any = None

    @property
    def section(self) -> str:
        """The section it stands in."""
        head, dot, _ = self.name.partition(".")
        return head if dot or self.free else GENERAL

    @property
    def tooltip(self) -> str:
        """Documentation and values in one."""
        return f"{self.help} Allowed: {self.allowed}."

    def value(self, text: str) -> Any:
        """The value that a text stands for.

        Raises:
            ConfigError: the text is not YAML, or the setting does not take the value.
        """
        try:
            value = parse_value(text)
        except YAMLError as error:
            raise ConfigError(f"{text!r} is not YAML", allowed=self.allowed) from error
        value = {} if self.free and value is None else value
        try:
            _checker(self.name).validate_python(value)
        except (ValidationError, RecursionError) as error:  # `&a {b: *a}` has no end
            raise ConfigError(f"{text!r} is not allowed", allowed=self.allowed) from error
        return value


@functools.cache
def config_fields() -> dict[str, Field]:
    """Every setting by its dotted name, in the order of the configuration."""
    return {field.name: field for field in _fields(Config, "")}


@functools.cache
def _checker(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(config_fields()[name].hint, config=Section.model_config)


def _fields(model: type[BaseModel], prefix: str) -> list[Field]:
    words, hints = allowed_values(Config), get_type_hints(model, include_extras=True)
    found: list[Field] = []
    for key, info in model.model_fields.items():
        name, hint = f"{prefix}{key}", hints[key]
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            found += _fields(hint, f"{name}.")
            continue
        free = _is_free(hint)
        allowed = words.get(name, "settings of your own, as YAML")
        choices = () if free else tuple(_choices(hint) or ())
        found.append(Field(name, info.description or "", allowed, choices, free, hint))
    return found


def text_of(value: Any) -> str:
    """A value as it is typed into a form: what YAML reads as the same value.

    Args:
        value: plain values, as ``Config.to_dict`` gives them.
    """
    if isinstance(value, dict):
        return dump(value).rstrip("\n") if value else ""
    if isinstance(value, str):
        return value if _reads_as(value, value) else f'"{value}"'
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(text_of, value))}]"
    return repr(value)


def texts_of(config: Config) -> dict[str, str]:
    """Every setting of a configuration as text, by dotted name."""
    values, default = config.to_dict(), Config().to_dict()
    return {name: text_of(_get(values, name, _get(default, name))) for name in config_fields()}


def _reads_as(text: str, value: object) -> bool:
    try:
        return bool(parse_value(text) == value)
    except YAMLError:
        return False


def _get(values: dict[str, Any], name: str, otherwise: Any = None) -> Any:
    section, dot, key = name.partition(".")
    if dot:
        return values[section].get(key, otherwise)
    return values.get(section, otherwise)


def _is_free(hint: Any) -> bool:
    return get_origin(hint) is Annotated and get_args(hint)[0] is FreeSection


def _choices(hint: Any) -> list[str] | None:
    """All values that a hint allows; None: there are too many to list."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return [str(arg) for arg in args]
    if origin in (Union, types.UnionType):
        parts = [_choices(arg) for arg in args]
        return None if None in parts else [text for part in parts for text in part or ()]
    return {bool: ["true", "false"], types.NoneType: ["null"]}.get(hint)
