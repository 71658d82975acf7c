"""Edit the space of a sweep as a table that reads and writes its YAML."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import ipywidgets as w
from yaml import YAMLError

from nbtoolkit.config.loading import parse_settings, parse_value
from nbtoolkit.errors import ConfigError
from nbtoolkit.panel.form import FILE, replace_section
from nbtoolkit.panel.widgets import (
    button,
    close_widget,
    column,
    html_widget,
    labelled,
    row_of,
    set_text,
    set_trait,
    show,
)
from nbtoolkit.search.study.notation import expand
from nbtoolkit.text_table import shortened

_RANGE = ("low", "high", "log")
_KEYS = {"float": _RANGE, "int": _RANGE, "categorical": ("choices",), "constant": ("value",)}
"""The keys of each kind of parameter that the table shows."""


@dataclass(frozen=True)
class ParameterRow:
    """A parameter as texts.

    Attributes:
        name: the setting that is searched.
        kind: ``"float"``, ``"int"``, ``"categorical"`` or ``"constant"``.
        low: the lower limit of a range.
        high: the upper limit of a range.
        log: whether the range is logarithmic.
        values: the choices with commas between them, or a constant's value.
        more: keys that the table does not show, such as ``step`` and ``when``.
    """

    name: str
    kind: str = "float"
    low: str = ""
    high: str = ""
    log: bool = False
    values: str = ""
    more: Mapping[str, object] = field(default_factory=dict)

    def spec(self) -> dict[str, object]:
        """Return the parameter as YAML holds it."""
        limits = {"low": self.low, "high": self.high}
        shown: dict[str, object] = {key: _parsed(text) for key, text in limits.items() if text}
        if self.kind == "categorical":
            shown = {"choices": _parsed(f"[{self.values}]")}
        elif self.kind == "constant":
            shown = {"value": _parsed(self.values)}
        elif self.log:
            shown["log"] = True
        return {"type": self.kind, **shown, **self.more}


def read_rows(text: str) -> tuple[list[ParameterRow], list[str]]:
    """Read the parameters of a space.

    Args:
        text: the YAML of the form; sections beside ``space`` are ignored.

    Returns:
        The parameters as rows, and the names of those that the table cannot show.

    Raises:
        ConfigError: the text is not YAML, or not a mapping.
    """
    rows = {name: _row(name, value) for name, value in _parameters(text).items()}
    without = [str(name) for name, row in rows.items() if row is None]
    return [row for row in rows.values() if row is not None], without


def write_rows(text: str, rows: Sequence[ParameterRow]) -> str:
    """Replace the parameters of a space that have a row; comments in the space are lost.

    Args:
        text: the YAML that :func:`read_rows` has read.
        rows: the parameters; rows without a name are left out.
    """
    old = _parameters(text)
    before = {name: _row(name, value) for name, value in old.items()}
    # An unchanged parameter keeps its notation: [a, b] instead of {type: categorical, ...}.
    new: dict[str, object] = {
        row.name: old[row.name] if row == before.get(row.name) else row.spec()
        for row in rows
        if row.name
    }
    new |= {name: old[name] for name, row in before.items() if row is None}
    return replace_section(text, "space", new)


def _parameters(text: str) -> Mapping[str, object]:
    space = parse_settings(text, FILE).get("space")
    return space if isinstance(space, Mapping) else {}


def _row(name: object, value: object) -> ParameterRow | None:
    """Convert a parameter to a row; None: the table cannot show it."""
    spec = dict(expand(value))
    kind = str(spec.pop("type", ""))
    log = spec.get("log", False)
    if not isinstance(name, str) or kind not in _KEYS or not isinstance(log, bool):
        return None
    try:
        texts = {key: _flow(spec.pop(key)) for key in _KEYS[kind] if key in spec}
    except (TypeError, ValueError, RecursionError):  # bytes; 5,000 digits; `&a [*a]`
        return None
    values = texts.get("choices", "").removeprefix("[").removesuffix("]") or texts.get("value", "")
    return ParameterRow(name, kind, texts.get("low", ""), texts.get("high", ""), log, values, spec)


def _flow(value: object) -> str:
    """Format a value on one line, so that YAML reads the same value."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_flow, value))}]"
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    with contextlib.suppress(YAMLError):
        if parse_value(value) == value and not set(value) & set(",[]{}"):
            return value
    return json.dumps(value, ensure_ascii=False)


def _parsed(text: str) -> object:
    """Parse a value; what is no YAML stays a text, and is reported as a wrong value."""
    try:
        return parse_value(text)
    except YAMLError:
        return text


class _RowWidgets:
    """The widgets of one row.

    Args:
        on_edit: called after each edit.
        on_remove: called with this row when its button is pressed.
    """

    def __init__(
        self, on_edit: Callable[[], None], on_remove: Callable[[_RowWidgets], None]
    ) -> None:
        kinds = [("choices" if kind == "categorical" else kind, kind) for kind in _KEYS]
        wide = {"width": "160px", "flex": "auto"}
        self.inputs: dict[str, w.Widget] = {
            "name": labelled(w.Combobox, "name", wide, placeholder="optim.lr"),
            "kind": labelled(w.Dropdown, "kind", {"width": "116px"}, options=kinds),
            "low": labelled(w.Text, "low", {"width": "100px"}, placeholder="1e-4"),
            "high": labelled(w.Text, "high", {"width": "94px"}, placeholder="0.1"),
            "log": labelled(w.Checkbox, "log", {"width": "48px"}, indent=False),
            "values": labelled(w.Text, "values", {"width": "246px"}, placeholder="adamw, sgd"),
        }
        self.more: Mapping[str, object] = {}
        remove = button("Remove", "Remove this parameter", lambda: on_remove(self))
        self.box = row_of(*self.inputs.values(), remove)
        for widget in self.inputs.values():
            widget.observe(lambda _: on_edit(), "value")
        self.inputs["kind"].observe(lambda _: self._arrange(), "value")

    @property
    def row(self) -> ParameterRow:
        """What stands in the widgets."""
        values = {key: widget.value for key, widget in self.inputs.items()}
        return ParameterRow(**{**values, "name": values["name"].strip()}, more=self.more)

    def show(self, row: ParameterRow) -> None:
        """Put a parameter into the widgets."""
        self.more = row.more
        for key, widget in self.inputs.items():
            set_trait(widget, "value", getattr(row, key))
        self._arrange()

    def _arrange(self) -> None:
        """Hide what the kind of the parameter does not have."""
        is_range = self.inputs["kind"].value in ("float", "int")
        for key in (*_RANGE, "values"):
            show(self.inputs[key], is_range == (key in _RANGE))


class SpaceTable:
    """A table of the parameters of a space, with buttons to add and remove rows.

    Args:
        on_change: called with the new YAML after each edit in the table.

    Attributes:
        root: the widget.
        rows: the rows that are shown.
        made: every row made so far.
    """

    def __init__(self, on_change: Callable[[str], None]) -> None:
        self._on_change = on_change
        self._text = ""
        self._loading = False
        self._names: tuple[str, ...] = ()
        self.made: list[_RowWidgets] = []
        self.rows: list[_RowWidgets] = []
        self.add = button("Add parameter", "A row for another parameter", self._add)
        self._body = column()
        self._note = html_widget()
        self.root = column(self._body, self.add, self._note)

    def load(self, text: str) -> None:
        """Show another YAML text."""
        if text == self._text:  # this table wrote it; reading it back would change what is typed
            return
        self._text = text
        try:
            rows, without = read_rows(text)
            without += [f"{row.name} ({', '.join(row.more)})" for row in rows if row.more]
            names = shortened(", ".join(without), 200)
            note = f"Only in the YAML below: {names}" if without else ""
            self.add.disabled = False
        except ConfigError:
            rows = []
            note = "The table appears when the YAML below is right."
            self.add.disabled = True
        set_text(self._note, note)
        self._show(rows)

    def close(self) -> None:
        """Close every row made so far."""
        for widgets in self.made:
            close_widget(widgets.box)

    def suggest(self, names: Sequence[str]) -> None:
        """Suggest names for the parameters."""
        self._names = tuple(names)
        for row in self.made:
            set_trait(row.inputs["name"], "options", self._names)

    def _show(self, rows: Sequence[ParameterRow]) -> None:
        self._loading = True
        while len(self.made) < len(rows):
            self.made.append(_RowWidgets(self._write, self._remove))
        self.suggest(self._names)
        self.rows = self.made[: len(rows)]
        for widgets, row in zip(self.rows, rows, strict=True):
            widgets.show(row)
        self._body.children = [widgets.box for widgets in self.rows]
        self._loading = False

    def _add(self) -> None:
        self._show([*(widgets.row for widgets in self.rows), ParameterRow("")])

    def _remove(self, removed: _RowWidgets) -> None:
        self._show([row.row for row in self.rows if row is not removed])
        self._write()

    def _write(self) -> None:
        if not self._loading:
            self._text = write_rows(self._text, [row.row for row in self.rows])
            self._on_change(self._text)
