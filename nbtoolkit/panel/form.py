"""Build the form with a widget and an error line for each setting of the schema."""

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
from nbtoolkit.views.markup import alert, view

if TYPE_CHECKING:
    import ipywidgets

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
    def tooltip(self) -> str:
        """Its documentation and allowed values."""
        return f"{self.help} Allowed: {self.allowed}."

    def value(self, text: str) -> object:
        """Parse and validate a text.

        Raises:
            ConfigError: the text is not YAML, or the setting does not allow the value.
        """
        try:
            value = parse_value(text)
        except YAMLError as error:
            raise ConfigError(f"{text!r} is not YAML", allowed=self.allowed) from error
        value = {} if self.free and value is None else value
        try:
            _validator(self.name).validate_python(value)
        except (ValidationError, RecursionError) as error:  # `&a {b: *a}` has no end
            raise ConfigError(f"{text!r} is not allowed", allowed=self.allowed) from error
        return value


@functools.cache
def config_fields() -> dict[str, Field]:
    """Return every setting by its dotted name, in the order of the schema."""
    return {field.name: field for field in _fields(Config, "")}


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
        free = get_origin(hint) is Annotated and get_args(hint)[0] is FreeSection
        fields.append(
            Field(
                name,
                help=info.description or "",
                allowed=allowed.get(name, "settings of your own, as YAML"),
                choices=() if free else tuple(_choices(hint) or ()),
                free=free,
                hint=hint,
            )
        )
    return fields


def _choices(hint: Any) -> list[str] | None:
    """Return all values that a type allows; None: there are too many to list."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return [str(arg) for arg in args]
    if origin in (Union, types.UnionType):
        parts = [_choices(arg) for arg in args]
        return None if None in parts else [text for part in parts for text in part or ()]
    return {bool: ["true", "false"], types.NoneType: ["null"]}.get(hint)


def text_of(value: object) -> str:
    """Format a value as it is typed into a form, so that YAML reads the same value.

    Args:
        value: plain values, as from ``Config.to_dict``.
    """
    if isinstance(value, dict):
        return dump(value).rstrip("\n") if value else ""
    if isinstance(value, str):
        return value if _reads_as(value, value) else f'"{value}"'
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(text_of, value))}]"
    return repr(value)


def texts_of(config: Config) -> dict[str, str]:
    """Return every setting of a configuration as text, by dotted name."""
    values, default = config.to_dict(), Config().to_dict()
    return {name: text_of(_get(values, name, _get(default, name))) for name in config_fields()}


def _reads_as(text: str, value: object) -> bool:
    try:
        return bool(parse_value(text) == value)
    except YAMLError:
        return False


def _get(values: dict[str, Any], name: str, default: object = None) -> object:
    section, dot, key = name.partition(".")
    return values[section].get(key, default) if dot else values.get(section, default)


# --- the form's contents ---

_DIGITS = 9  # of the number of trials
_SHOWN = 40  # characters of a wrong one


@dataclass(frozen=True)
class Validation:
    """The result of validating a form.

    Attributes:
        config: the configuration; None: something in it is wrong.
        errors: what is wrong with each setting by itself.
        together: how settings contradict each other; empty: they do not.
        sweep_config: the sweep; None: there is no space, or something in it is wrong.
        space_error: what is wrong with the space; empty: nothing.
    """

    config: Config | None = None
    errors: Mapping[str, str] = field(default_factory=dict)
    together: str = ""
    sweep_config: SweepConfig | None = None
    space_error: str = ""


class FormState:
    """What stands in the form, right or wrong: a text for each setting, and the space as YAML.

    Args:
        config: where the texts come from.
        space: the space as YAML text; empty: there is none.
    """

    def __init__(self, config: Config, space: str = "") -> None:
        self.texts = texts_of(config)
        self.space, self.trials = space, ""
        self._defaults = texts_of(Config())

    def copy(self) -> FormState:
        """Copy it, since another thread may change it while it is used."""
        other = copy(self)
        other.texts = dict(self.texts)
        return other

    def overrides(self) -> dict[str, object]:
        """Return the settings that are not at their default, by dotted name.

        Raises:
            ConfigError: a text is not a value of its setting.
        """
        return {name: config_fields()[name].value(self.texts[name]) for name in self._changed()}

    def parsed_space(self) -> dict[str, object]:
        """Parse the space as a YAML file is parsed: ``1e-4`` is a number.

        Raises:
            ConfigError: it is not YAML, or not a mapping.
        """
        try:
            space = parse_value(self.space)
        except YAMLError as error:
            raise ConfigError(f"the space is not YAML: {error}") from error
        if not isinstance(space, dict):
            raise ConfigError("the space is not a mapping", allowed="names, each with its limits")
        return space

    def n_trials(self) -> int | None:
        """Parse the number of trials; None: the space's own.

        Raises:
            ConfigError: it is not a positive whole number.
        """
        text = self.trials.strip()
        if not text:
            return None
        if not text.isdecimal() or len(text) > _DIGITS or int(text) < 1:
            raise ConfigError(f"trials: {text[:_SHOWN]!r}", allowed=f"1 to {10**_DIGITS - 1}")
        return int(text)

    def validate(self) -> Validation:
        """Make the configuration and the sweep; collect what is wrong, setting by setting."""
        if errors := self._errors():
            return Validation(errors=errors)
        try:
            config = Config().with_overrides(self.overrides())
        except ConfigError as error:
            return Validation(together=str(error))
        try:
            return Validation(config=config, sweep_config=self._sweep_config(config))
        except NbtoolkitError as error:
            return Validation(config=config, space_error=str(error))

    def _errors(self) -> dict[str, str]:
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
            return load_sweep_config(self.parsed_space(), config, n_trials=self.n_trials())
        except RecursionError as error:
            raise ConfigError("the space has no end: it contains itself") from error


@dataclass(frozen=True)
class FormSnapshot:
    """What stood in the widgets when a button was pressed; its task may have to wait.

    Attributes:
        state: the form's contents.
        more: the number beside *Add trials*.
        number: the number beside *Stop trial*.
    """

    state: FormState
    more: int
    number: int


# --- widgets ---

_FIRST_SECTION = "train"  # its settings are changed most often
_NARROW_LABEL = {"description_width": "50px"}
_WIDE_LABEL = {"description_width": "210px"}


class Form:
    """The widgets of a form; what is typed is in :attr:`state` at once, right or wrong.

    A section's widgets are made when it is first shown: 75 settings at once would take the browser
    a second.

    Args:
        state: what is edited.
        on_edit: called after each edit, in the thread of the edit.

    Attributes:
        errors: the HTML widgets beside the settings, by dotted name, as far as they are made.
    """

    def __init__(self, state: FormState, on_edit: Callable[[], None]) -> None:
        import ipywidgets as w

        self.state, self._on_edit = state, on_edit
        self._fields = config_fields()
        self._inputs: dict[str, ipywidgets.Widget] = {}
        self.errors: dict[str, ipywidgets.HTML] = {}
        self._rows: dict[str, list[ipywidgets.HBox]] = {}
        fixed = {"max_width": "99%", "flex": "0 0 auto"}  # an error beside takes no room away
        self._narrow = w.Layout(width="420px", **fixed)
        self._wide = w.Layout(width="640px", **fixed)
        self._beside = w.Layout(min_width="200px", flex="1 1 0")
        # The kernel's thread makes a section while the panel's shows errors or loads a file.
        self._lock, self._loading = threading.RLock(), False
        self.together = w.HTML()
        sections = list(dict.fromkeys(field.section for field in self._fields.values()))
        sections.remove(GENERAL)
        self.section = w.Dropdown(
            options=[*sections, GENERAL],
            value=_FIRST_SECTION,
            description="section",
            tooltip="Which settings are shown",
            style=_WIDE_LABEL,
            layout=self._narrow,
        )
        self.section.observe(lambda _: self._show_section(), "value")
        self._shown = w.VBox()
        self.space = w.Textarea(
            value=state.space,
            description="space",
            tooltip="What is searched, as YAML: names of settings, each with its limits",
            placeholder="optim.lr: {type: float, low: 1.0e-4, high: 1.0e-1, log: true}",
            rows=14,
            style=_NARROW_LABEL,
            layout=self._wide,
        )
        self.trials = w.Text(
            value=state.trials,
            description="trials",
            tooltip="How many in all; empty: as the space says",
            style=_NARROW_LABEL,
            layout=self._narrow,
        )
        self.space_error = w.HTML()
        self.space.observe(lambda change: self._store("space", change["new"]), "value")
        self.trials.observe(lambda change: self._store("trials", change["new"]), "value")
        self.settings = w.VBox([self.section, self.together, self._shown])
        self.search = w.VBox([self.trials, self.space, self.space_error])
        self._show_section()

    def load(self, state: FormState) -> None:
        """Replace the form's contents."""
        with self._lock:
            self.state, self._loading = state, True
            try:
                for name, widget in self._inputs.items():
                    widget.value = state.texts[name]
                self.space.value, self.trials.value = state.space, state.trials
            finally:
                self._loading = False

    def show(self, validation: Validation) -> None:
        """Show errors, each beside its field; those of other sections above the fields."""
        with self._lock:
            widgets, section = dict(self.errors), self.section.value
        for name, widget in widgets.items():
            _show_error(widget, validation.errors.get(name, ""))
        hidden = [
            f"{name} (section {self._fields[name].section}): {error}"
            for name, error in validation.errors.items()
            if self._fields[name].section != section
        ]
        _show_error(self.together, "\n".join(hidden) or validation.together)
        _show_error(self.space_error, validation.space_error)

    @property
    def rows(self) -> list[ipywidgets.HBox]:
        """Every row made so far, also of sections that are not shown."""
        return [row for rows in self._rows.values() for row in rows]

    def input(self, name: str) -> Any:
        """Show the section of a setting and return its widget."""
        self.section.value = self._fields[name].section
        return self._inputs[name]

    def _show_section(self) -> None:
        with self._lock:
            section = self.section.value
            if section not in self._rows:
                fields = [field for field in self._fields.values() if field.section == section]
                self._rows[section] = [self._row(field) for field in fields]
            self._shown.children = self._rows[section]
        self._on_edit()  # shows the errors of the new fields

    def _row(self, field: Field) -> ipywidgets.HBox:
        import ipywidgets as w

        self._inputs[field.name] = widget = self._input(field)
        self.errors[field.name] = error = w.HTML(layout=self._beside)
        widget.observe(lambda change: self._store(field.name, change["new"]), "value")
        return w.HBox([widget, error], layout={"flex_flow": "row wrap"})  # narrow: below it

    def _input(self, field: Field) -> ipywidgets.Widget:
        import ipywidgets as w

        text = self.state.texts[field.name]
        common: dict[str, Any] = {
            "value": text,
            "description": field.name.removeprefix(f"{field.section}."),
            "tooltip": field.tooltip,
            "style": _WIDE_LABEL,
        }
        if field.free:
            return w.Textarea(**common, rows=5, layout=self._wide, placeholder="name: value")
        if field.choices:
            options = field.choices if text in field.choices else (text, *field.choices)
            return w.Dropdown(**common, options=options, layout=self._narrow)
        return w.Text(**common, layout=self._narrow, placeholder=field.allowed)

    def _store(self, name: str, text: str) -> None:
        """Store what was typed.

        Args:
            name: a setting's, ``"space"`` or ``"trials"``.
            text: what the field holds now.
        """
        with self._lock:
            if self._loading:
                return
            match name:
                case "space":
                    self.state.space = text
                case "trials":
                    self.state.trials = text
                case _:
                    self.state.texts[name] = text
        self._on_edit()


def _show_error(widget: ipywidgets.HTML, text: str) -> None:
    set_trait(widget, "value", view(alert(text)) if text else "")


def set_trait(widget: ipywidgets.Widget, name: str, value: object) -> None:
    """Set a widget's trait if it differs, since each change is a message to the browser."""
    if getattr(widget, name) != value:
        setattr(widget, name, value)


def close_widget(widget: ipywidgets.Widget) -> None:
    """Close a widget with its children, layout and style; ipywidgets keeps a list of them all."""
    parts = [*getattr(widget, "children", ())]
    parts += [getattr(widget, name) for name in ("layout", "style") if widget.has_trait(name)]
    for part in parts:
        if part is not None:
            close_widget(part)
    widget.close()
