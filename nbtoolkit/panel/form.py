"""Hold and validate what is typed into the panel: a text for each setting, and the space."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import time
import types
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError
from yaml import YAMLError

from nbtoolkit.config.fields import Free, FreeSection, Section, allowed_values
from nbtoolkit.config.loading import Layer, dump, parse_settings, parse_value
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import ConfigError, NbtoolkitError
from nbtoolkit.run.paths import atomic_file
from nbtoolkit.study.space import translate_names
from nbtoolkit.study.sweep_config import SweepConfig, load_sweep_config

# --- fields ---

GENERAL = "general"
"""The section of settings that stand in none."""


@dataclass(frozen=True)
class Field:
    """One setting of the configuration.

    Attributes:
        name: its dotted name.
        help: its documentation.
        allowed: its allowed values, in words.
        choices: its allowed values as texts, where they are few; else empty.
        free: whether it is a section of the user's own: YAML of several lines.
        hint: its type, which validates a value.
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
    def nullable(self) -> bool:
        """Whether ``null`` is allowed; its widget shows an empty field then."""
        return types.NoneType in get_args(self.hint)

    @property
    def tooltip(self) -> str:
        """Its documentation and allowed values."""
        return f"{self.help} Allowed: {self.allowed}."

    def value(self, text: str) -> object:
        """Parse and validate a text.

        Raises:
            ConfigError: the text is not YAML, or the setting does not allow the value.
        """
        try:
            value = parse_settings(text, self.name) if self.free else parse_value(text)
            _validator(self.name).validate_python(value)
        except (YAMLError, ValidationError, RecursionError) as error:  # `&a {b: *a}` has no end
            raise ConfigError(self._mistake(text)) from error
        return value

    def error(self, text: str) -> str:
        """Say what a text must be; empty: it is right."""
        try:
            self.value(text)
        except ConfigError as error:
            return error.what
        return ""

    def _mistake(self, text: str) -> str:
        meant, example = text.strip().replace(",", ".", 1), default_texts()[self.name]
        if re.fullmatch(r"-?\d*,\d+", text.strip()) and not self.error(meant):
            example = f"{meant} (decimal point)"
        shows = example != "null" and example not in self.allowed
        return f"Must be {self.allowed}{f', e.g. {example}' if shows else ''}"


@functools.cache
def config_fields() -> dict[str, Field]:
    """Return every setting by its dotted name, in the order of the schema."""
    return {field.name: field for field in _fields(Config, "")}


@functools.cache
def default_texts() -> dict[str, str]:
    """Return the default of every setting as text, by dotted name."""
    return texts_of(Config())


@functools.cache
def _validator(name: str) -> TypeAdapter[object]:
    return TypeAdapter(config_fields()[name].hint, config=Section.model_config)


def _fields(model: type[BaseModel], prefix: str) -> list[Field]:
    allowed, hints = allowed_values(Config), get_type_hints(model, include_extras=True)
    fields: list[Field] = []
    for key, info in model.model_fields.items():
        name, hint = f"{prefix}{key}", hints[key]
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            fields += _fields(hint, f"{name}.")
            continue
        free = hint == Free
        words = allowed.get(name, "settings of your own, as YAML")
        fields.append(
            Field(
                name,
                help=info.description or "",
                allowed=words if free else re.sub(r"\bnull\b", "empty", words),
                choices=() if free else tuple(_choices(hint) or ()),
                free=free,
                hint=hint,
            )
        )
    return fields


def _choices(hint: Any) -> list[str] | None:
    """Return all values that a type allows; None: there are too many to list."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _choices(args[0])
    if origin is Literal:
        return [str(arg) for arg in args]
    if origin in (Union, types.UnionType):
        parts = [_choices(arg) for arg in args]
        return None if None in parts else [text for part in parts for text in part or ()]
    return {bool: ["true", "false"], types.NoneType: ["null"]}.get(hint)


def text_of(value: object) -> str:
    """Format a setting's value as it is typed into a form, so that YAML reads the same value."""
    if isinstance(value, FreeSection):
        value = value.to_dict()
    if isinstance(value, dict):
        return dump(value).rstrip("\n") if value else ""
    text = str(value)
    if isinstance(value, (list, tuple)):
        value, text = [*value], f"[{', '.join(map(text_of, value))}]"
    elif not isinstance(value, str):
        return json.dumps(value)
    with contextlib.suppress(YAMLError):
        if parse_value(text) == value:
            return text
    return json.dumps(value, ensure_ascii=False)


def texts_of(config: Config) -> dict[str, str]:
    """Return every setting of a configuration as text, by dotted name."""
    return {name: text_of(attrgetter(name)(config)) for name in config_fields()}


# --- the form's contents ---

TRIALS = 20
"""The trials of a sweep if neither the form nor its space says when it ends."""


@dataclass(frozen=True)
class Validation:
    """The result of validating a form.

    Attributes:
        form: its contents; None: there is no form.
        config: the configuration; None: something in it is wrong.
        errors: what is wrong with each setting by itself.
        together: how settings contradict each other; empty: they do not.
        sweep_config: the sweep; None: there is no space, or something in it is wrong.
        space_error: what is wrong with the space; empty: nothing.
    """

    form: FormState | None = None
    config: Config | None = None
    errors: Mapping[str, str] = field(default_factory=dict)
    together: str = ""
    sweep_config: SweepConfig | None = None
    space_error: str = ""

    @property
    def mistakes(self) -> dict[str, str]:
        """All that is wrong, by setting; ``"settings"``: together."""
        together = {"settings": self.together, "space": self.space_error}
        return {name: text for name, text in {**self.errors, **together}.items() if text}


class FormState:
    """What stands in the form, right or wrong: a text for each setting, and the space as YAML.

    Args:
        config: where the texts come from.
        space: the space as YAML text; empty: there is none.
    """

    def __init__(self, config: Config, space: str = "") -> None:
        self.texts = texts_of(config)
        self.space, self.trials = space, ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FormState) and vars(self) == vars(other)

    def changed(self) -> list[str]:
        """Return the names of the settings that are not at their default."""
        return [name for name, text in self.texts.items() if text != default_texts()[name]]

    def overrides(self) -> dict[str, object]:
        """Return the settings that are not at their default, by dotted name.

        Raises:
            ConfigError: a text is not a value of its setting.
        """
        return {name: config_fields()[name].value(self.texts[name]) for name in self.changed()}

    def parsed_space(self) -> dict[str, object]:
        """Parse the space as a YAML file is parsed: ``1e-4`` is a number.

        Raises:
            ConfigError: it is not YAML, or not a mapping.
        """
        return parse_settings(self.space, "space")

    def n_trials(self) -> int | None:
        """Parse the number of trials; empty: 20 if the space sets no end, else None.

        Raises:
            ConfigError: it is not a positive whole number, or the space is not a mapping.
        """
        text = self.trials.strip()
        if text and not re.fullmatch(r"0*[1-9]\d{0,8}", text):
            raise ConfigError("Number of trials must be a whole number from 1 to 999999999")
        if text:
            return int(text)
        return None if _has_end(self.parsed_space()) else TRIALS

    def validate(self) -> Validation:
        """Make the configuration and the sweep; collect what is wrong, setting by setting."""
        form = deepcopy(self)  # another thread may change this one while that is used
        errors = {name: config_fields()[name].error(form.texts[name]) for name in form.changed()}
        if errors := {name: error for name, error in errors.items() if error}:
            return Validation(form, errors=errors)
        try:
            config = Config().with_overrides(form.overrides())
        except ConfigError as error:
            return Validation(form, together=str(error))
        try:
            return Validation(form, config, sweep_config=form._sweep_config(config))
        except NbtoolkitError as error:
            return Validation(form, config, space_error=str(error))

    def _sweep_config(self, config: Config) -> SweepConfig | None:
        if not self.space.strip():
            return None
        return load_sweep_config(self.parsed_space(), config, n_trials=self.n_trials())


def _has_end(settings: Mapping[str, object]) -> bool:
    """Whether the settings of a sweep limit its trials or its time; a bare space does not."""
    values = translate_names(Layer(values=dict(settings), places={})).values
    budget, study = values.get("budget"), values.get("study")
    if isinstance(budget, Mapping) and (budget.get("n_trials") or budget.get("timeout")):
        return True
    return isinstance(study, Mapping) and study.get("sampler") == "grid"


# --- edits that survive the kernel ---

EDITS_FILE = ".panel.json"
"""The file of the edits, in the output folder."""

_SECONDS = 1.0  # between two writes


def keep_edits(output_dir: str | os.PathLike[str], state: FormState) -> bool:
    """Write a form's contents, readable by this user alone; at most once a second.

    Args:
        output_dir: the folder of the runs, as it was when the panel was opened: the one in the form
            may be half typed, and would be created.
        state: the contents.

    Returns:
        Whether they are written; False: the last write is too recent, or the folder cannot be
        written.
    """
    path = _edits_file(output_dir)
    contents = {**vars(state), "texts": {name: state.texts[name] for name in state.changed()}}
    try:
        if path.exists() and abs(time.time() - path.stat().st_mtime) < _SECONDS:
            return False
        with atomic_file(path, durable=False) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(json.dumps(contents).encode())
    except OSError:  # a launch reports that
        return False
    return True


def kept_edits(output_dir: str | os.PathLike[str]) -> tuple[FormState, float] | None:
    """Read what :func:`keep_edits` wrote.

    Returns:
        The contents, and when they were written in unix seconds; None: there is no such file, or a
        damaged one.
    """
    path = _edits_file(output_dir)
    try:
        contents, saved = json.loads(path.read_bytes()), path.stat().st_mtime
        state = FormState(Config(), str(contents["space"]))
        state.trials, texts = str(contents["trials"]), dict(contents["texts"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    for name, setting in config_fields().items():
        text = texts.get(name)
        if isinstance(text, str) and (not setting.choices or text in setting.choices):
            state.texts[name] = text
    return state, saved


def drop_edits(output_dir: str | os.PathLike[str]) -> None:
    """Delete what :func:`keep_edits` wrote."""
    with contextlib.suppress(OSError):
        _edits_file(output_dir).unlink(missing_ok=True)


def _edits_file(output_dir: str | os.PathLike[str]) -> Path:
    # Unlike Path.expanduser, this accepts the name of a user that does not exist.
    return Path(os.path.expanduser(output_dir)) / EDITS_FILE
