"""Build the form, with a widget for each setting of the schema, with its error beside it."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, TypeAdapter, ValidationError
from yaml import YAMLError

from nbtoolkit.config.fields import FreeSection
from nbtoolkit.config.schema import Config, Section
from nbtoolkit.config.validation import fields as allowed_values
from nbtoolkit.config.yaml_source import dump, parse_value
from nbtoolkit.errors import ConfigError, NbtoolkitError
from nbtoolkit.study.sweep_config import SweepConfig, load_sweep_config
from nbtoolkit.views.markup import boxed, wrong

if TYPE_CHECKING:
    from ipywidgets import Widget


# --- fields ---
# Every setting of a configuration as a form needs it, made from the schema alone.


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


# --- draft ---
# What stands in the form, right or wrong; the configuration and the sweep it makes.


_DIGITS, _SHOWN = 9, 40


@dataclass(frozen=True)
class Checked:
    """What a draft makes.

    Attributes:
        config: the configuration; None: something is wrong with it.
        errors: setting -> what is wrong with it.
        together: what is wrong between settings that are right one by one; empty: nothing.
        sweep_config: the sweep; None: there is no space, or something is wrong with it.
        space_error: what is wrong with the space; empty: nothing.
    """

    config: Config | None = None
    errors: Mapping[str, str] = field(default_factory=dict)
    together: str = ""
    sweep_config: SweepConfig | None = None
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
            return Checked(config=config, sweep_config=self._sweep_config(config))
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

    def _sweep_config(self, config: Config) -> SweepConfig | None:
        if not self.space.strip():
            return None
        try:
            source = self.searched()
        except YAMLError as error:
            raise ConfigError(f"the space is not YAML: {error}") from error
        if not isinstance(source, dict):
            raise ConfigError("the space is no section", allowed="names, each with its limits")
        try:
            return load_sweep_config(source, config, n_trials=self.count())
        except RecursionError as error:
            raise ConfigError("the space has no end: it contains itself") from error


@dataclass(frozen=True)
class Entered:
    """What stood in the widgets when a button was pressed: its task may wait for another's."""

    draft: Draft
    more: int
    number: int


# --- form ---


_FIRST = "train"  # what is changed most often
_SHORT = {"description_width": "50px"}  # for labels of one word


class Form:
    """Widgets over a draft; what is typed stands in the draft at once, right or wrong.

    A section's widgets are made when it is first looked at: 75 settings at once would take the
    browser a second.

    Args:
        draft: what is edited.
        changed: called, in whatever thread, when something was typed.
    """

    def __init__(self, draft: Draft, changed: Callable[[], None]) -> None:
        import ipywidgets as w

        self.draft, self._changed = draft, changed
        self._fields = config_fields()
        self._inputs: dict[str, Any] = {}
        self._errors: dict[str, Any] = {}
        self._rows: dict[str, list[Widget]] = {}
        self._style = {"description_width": "210px"}
        firm = {"max_width": "99%", "flex": "0 0 auto"}  # an error beside takes no room away
        self._narrow, self._wide = w.Layout(width="420px", **firm), w.Layout(width="640px", **firm)
        self._beside = w.Layout(min_width="200px", flex="1 1 0")
        # A section is made in the kernel's thread while the panel's shows errors or loads a file.
        self._lock, self._loading = threading.RLock(), False
        self.together = w.HTML()
        sections = list(dict.fromkeys(field.section for field in self._fields.values()))
        sections.remove(GENERAL)
        self.section = w.Dropdown(
            options=[*sections, GENERAL],
            value=_FIRST,
            description="section",
            tooltip="Which settings are shown",
            style=self._style,
            layout=self._narrow,
        )
        self.section.observe(lambda _: self._show(), "value")
        self._shown = w.VBox()
        self.space = w.Textarea(
            value=draft.space,
            description="space",
            tooltip="What is searched, as YAML: names of settings, each with its limits",
            placeholder="optim.lr: {type: float, low: 1.0e-4, high: 1.0e-1, log: true}",
            rows=14,
            style=_SHORT,
            layout=self._wide,
        )
        self.trials = w.Text(
            value=draft.trials,
            description="trials",
            tooltip="How many in all; empty: as the space says",
            style=_SHORT,
            layout=self._narrow,
        )
        self.space_error = w.HTML()
        self.space.observe(lambda change: self._type_space(change["new"], None), "value")
        self.trials.observe(lambda change: self._type_space(None, change["new"]), "value")
        self.settings = w.VBox([self.section, self.together, self._shown])
        self.search = w.VBox([self.trials, self.space, self.space_error])
        self._show()

    def load(self, draft: Draft) -> None:
        """Put another draft in place of this one."""
        with self._lock:
            self.draft, self._loading = draft, True
            try:
                for name, widget in self._inputs.items():
                    widget.value = draft.texts[name]
                self.space.value, self.trials.value = draft.space, draft.trials
            finally:
                self._loading = False

    def show(self, checked: Checked) -> None:
        """Show what is wrong, each beside its field."""
        with self._lock:
            beside, shown = dict(self._errors), self.section.value
        for name, html in beside.items():
            _put(html, boxed(wrong(checked.errors[name])) if name in checked.errors else "")
        # A field of a section that was left has its error beside it, where nobody sees it.
        unseen = [name for name in checked.errors if self._fields[name].section != shown]
        told = checked.together
        if unseen:
            told = "\n".join(
                f"{name} (section {self._fields[name].section}): {checked.errors[name]}"
                for name in unseen
            )
        _put(self.together, boxed(wrong(told)) if told else "")
        _put(self.space_error, boxed(wrong(checked.space_error)) if checked.space_error else "")

    @property
    def rows(self) -> list[Widget]:
        """Every row made so far, of sections that are not shown too."""
        return [row for rows in self._rows.values() for row in rows]

    def input(self, name: str) -> Any:
        """The widget of a setting; its section is shown."""
        self.section.value = self._fields[name].section
        return self._inputs[name]

    def error(self, name: str) -> str:
        """What stands beside a setting, as HTML."""
        return str(self._errors[name].value)

    def _show(self) -> None:
        with self._lock:
            section = self.section.value
            if section not in self._rows:
                fields = [one for one in self._fields.values() if one.section == section]
                self._rows[section] = [self._row(one) for one in fields]
            self._shown.children = self._rows[section]
        self._changed()  # errors of fields that were not there yet

    def _row(self, field: Field) -> Widget:
        import ipywidgets as w

        self._inputs[field.name] = widget = self._input(field)
        self._errors[field.name] = error = w.HTML(layout=self._beside)
        widget.observe(lambda change: self._type(field.name, change["new"]), "value")
        return w.HBox([widget, error], layout={"flex_flow": "row wrap"})  # narrow: below it

    def _input(self, field: Field) -> Any:
        import ipywidgets as w

        text = self.draft.texts[field.name]
        common: dict[str, Any] = {
            "value": text,
            "description": field.name.removeprefix(f"{field.section}."),
            "tooltip": field.tooltip,
            "style": self._style,
        }
        if field.free:
            return w.Textarea(**common, rows=5, layout=self._wide, placeholder="name: value")
        if field.choices:
            known = text in field.choices
            options = field.choices if known else (text, *field.choices)
            return w.Dropdown(**common, options=options, layout=self._narrow)
        return w.Text(**common, layout=self._narrow, placeholder=field.allowed)

    def _type(self, name: str, text: str) -> None:
        with self._lock:
            if self._loading:
                return
            self.draft.texts[name] = text
        self._changed()

    def _type_space(self, space: str | None, trials: str | None) -> None:
        with self._lock:
            if self._loading:
                return
            self.draft.space = self.draft.space if space is None else space
            self.draft.trials = self.draft.trials if trials is None else trials
        self._changed()


def _put(html: Any, text: str) -> None:
    """Give a widget a text if it is another one: each change is a message to the browser."""
    if html.value != text:
        html.value = text
