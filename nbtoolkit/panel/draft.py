"""Draft: what stands in the form, right or wrong; the configuration and the sweep it makes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from yaml import YAMLError

from nbtoolkit.config import Config
from nbtoolkit.errors import ConfigError, NbtoolkitError
from nbtoolkit.panel.fields import config_fields, texts_of
from nbtoolkit.search.wishes import Wishes, load_wishes
from nbtoolkit.yaml_lines import parse_value

_DIGITS, _SHOWN = 9, 40


@dataclass(frozen=True)
class Checked:
    """What a draft makes.

    Attributes:
        config: the configuration; None: something is wrong with it.
        errors: setting -> what is wrong with it.
        together: what is wrong between settings that are right one by one; empty: nothing.
        wishes: the sweep; None: there is no space, or something is wrong with it.
        space_error: what is wrong with the space; empty: nothing.
    """

    config: Config | None = None
    errors: Mapping[str, str] = field(default_factory=dict)
    together: str = ""
    wishes: Wishes | None = None
    space_error: str = ""


class Draft:
    """Texts by setting, and the space to search as YAML text.

    Args:
        config: where the texts come from.
        space: the space as YAML text; empty: there is none.
    """

    def __init__(self, config: Config, space: str = "") -> None:
        self.texts = texts_of(config)
        self.space, self.trials = space, ""
        self._defaults = texts_of(Config())

    def copy(self) -> Draft:
        """What stands in it now, whatever is typed meanwhile in another thread."""
        other = copy(self)
        other.texts = dict(self.texts)
        return other

    def overrides(self) -> dict[str, Any]:
        """The settings that are not at their default, by dotted name.

        Raises:
            ConfigError: a text is no value of its setting.
        """
        return {name: config_fields()[name].value(self.texts[name]) for name in self._changed()}

    def searched(self) -> Any:
        """The space as YAML reads it, in a file too: ``1e-4`` is a number.

        Raises:
            YAMLError: it is not YAML.
        """
        return parse_value(self.space)

    def count(self) -> int | None:
        """How many trials; None: as the space says.

        Raises:
            ConfigError: it is no such number.
        """
        text = self.trials.strip()
        if not text:
            return None
        if not text.isdecimal() or len(text) > _DIGITS or int(text) < 1:
            raise ConfigError(f"trials: {text[:_SHOWN]!r}", allowed=f"1 to {10**_DIGITS - 1}")
        return int(text)

    def check(self) -> Checked:
        """Make the configuration and the sweep, or say what is wrong, setting by setting."""
        errors = self._errors()
        if errors:
            return Checked(errors=errors)
        try:
            config = Config().with_overrides(self.overrides())
        except ConfigError as error:
            return Checked(together=str(error))
        try:
            return Checked(config=config, wishes=self._wishes(config))
        except NbtoolkitError as error:
            return Checked(config=config, space_error=str(error))

    def _errors(self) -> dict[str, str]:
        """What is wrong with each setting by itself."""
        errors = {}
        for name in self._changed():
            try:
                config_fields()[name].value(self.texts[name])
            except ConfigError as error:
                errors[name] = f"{error.what}; allowed: {error.allowed}"
        return errors

    def _changed(self) -> list[str]:
        return [name for name, text in self.texts.items() if text != self._defaults[name]]

    def _wishes(self, config: Config) -> Wishes | None:
        if not self.space.strip():
            return None
        try:
            source = self.searched()
        except YAMLError as error:
            raise ConfigError(f"the space is not YAML: {error}") from error
        if not isinstance(source, dict):
            raise ConfigError("the space is no section", allowed="names, each with its limits")
        try:
            return load_wishes(source, config, n_trials=self.count())
        except RecursionError as error:
            raise ConfigError("the space has no end: it contains itself") from error


@dataclass(frozen=True)
class Entered:
    """What stood in the widgets when a button was pressed: its task may wait for another's."""

    draft: Draft
    more: int
    number: int
