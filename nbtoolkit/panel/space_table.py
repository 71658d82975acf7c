"""Edit the space of a sweep as a table that reads and writes its YAML."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from yaml import YAMLError

from nbtoolkit.config.yaml_source import dump, parse_value
from nbtoolkit.panel.form import set_trait, text_of
from nbtoolkit.study.parameter import KINDS, expand
from nbtoolkit.study.sweep_config import SweepConfig
from nbtoolkit.text_table import shortened
from nbtoolkit.views.markup import paragraph, view

if TYPE_CHECKING:
    import ipywidgets

_SHOWN = {
    "float": ("low", "high", "log"),
    "int": ("low", "high", "log"),
    "categorical": ("choices",),
    "constant": ("value",),
}
"""The keys of each kind of parameter that the table shows."""


@dataclass(frozen=True)
class Row:
    """A parameter as texts.

    Attributes:
        name: the setting that is searched.
        kind: a key of :data:`~nbtoolkit.study.parameter.KINDS`.
        low: the lower limit of a range.
        high: the upper limit of a range.
        log: whether the range is logarithmic.
        choices: the choices with commas between them, or a constant's value.
        more: keys that the table does not show, such as ``step`` and ``when``.
    """

    name: str
    kind: str = "float"
    low: str = ""
    high: str = ""
    log: bool = False
    choices: str = ""
    more: Mapping[str, object] = field(default_factory=dict)

    def spec(self) -> dict[str, object]:
        """Return the parameter as the YAML holds it; a text that is no YAML stays a text."""
        values: dict[str, object] = {"type": self.kind}
        if self.kind == "categorical":
            values["choices"] = _parsed(f"[{self.choices}]", self.choices)
        elif self.kind == "constant":
            values["value"] = _parsed(self.choices, self.choices)
        else:
            limits = {"low": self.low, "high": self.high}
            values |= {key: _parsed(text, text) for key, text in limits.items() if text.strip()}
            values |= {"log": True} if self.log else {}
        return values | dict(self.more)


def read_rows(text: str) -> tuple[list[Row], list[str]]:
    """Read the parameters of a space.

    Args:
        text: its YAML; sections beside ``space`` are ignored.

    Returns:
        The parameters as rows, and the names of those that have no row.

    Raises:
        ValueError: the text is not YAML, or not a mapping.
    """
    parameters = _parameters(_document(text))
    rows = [_row(name, value) for name, value in parameters.items()]
    without = [str(name) for name, row in zip(parameters, rows, strict=True) if row is None]
    return [row for row in rows if row is not None], without


def write_rows(text: str, rows: Sequence[Row]) -> str:
    """Replace the parameters of a space that have a row; the others stay, comments are lost.

    Args:
        text: the YAML that :func:`read_rows` has read.
        rows: the parameters; rows without a name are left out.
    """
    document = _document(text)
    old = _parameters(document)
    before = {name: row for name, value in old.items() if (row := _row(name, value))}
    # An unchanged parameter keeps its notation: [a, b] instead of {type: categorical, ...}.
    new = {row.name: old[row.name] if row == before.get(row.name) else row.spec() for row in rows}
    new = {name: value for name, value in new.items() if name}
    new |= {name: value for name, value in old.items() if name not in before}
    document = {**document, "space": new} if _is_sectioned(document) else new
    return dump(document) if document else ""


def _document(text: str) -> dict[str, object]:
    try:
        document = parse_value(text)
    except YAMLError as error:
        raise ValueError("not YAML") from error
    if document is not None and not isinstance(document, dict):
        raise ValueError("not a mapping")
    return document or {}


def _is_sectioned(document: Mapping[str, object]) -> bool:
    """Whether the space is a section of a sweep's settings, not the whole text."""
    return bool(set(document) & set(SweepConfig.model_fields))


def _parameters(document: Mapping[str, object]) -> Mapping[str, object]:
    parameters = document.get("space") if _is_sectioned(document) else document
    return parameters if isinstance(parameters, Mapping) else {}


def _row(name: object, value: object) -> Row | None:
    """Convert a parameter to a row; None: the table cannot show it."""
    spec = dict(expand(value))
    kind, log = str(spec.pop("type", "")), spec.get("log", False)
    if not isinstance(name, str) or kind not in KINDS or not isinstance(log, bool):
        return None
    try:
        texts = {key: _flow(spec.pop(key)) for key in _SHOWN[kind] if key in spec}
    except (TypeError, ValueError):  # bytes and dates; a number of 5,000 digits
        return None
    choices = texts.get("choices", "").removeprefix("[").removesuffix("]")
    low, high = texts.get("low", ""), texts.get("high", "")
    return Row(name, kind, low, high, log, choices or texts.get("value", ""), spec)


def _flow(value: object) -> str:
    """Format a value on one line."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else text_of(value)


def _parsed(text: str, otherwise: object) -> object:
    try:
        return parse_value(text)
    except YAMLError:
        return otherwise


class _RowWidgets:
    """The widgets of one row.

    Args:
        on_edit: called after each edit.
        on_remove: called with this row when its button is pressed.
    """

    def __init__(self, on_edit: Callable[[], None], on_remove: Callable[[_RowWidgets], None]):
        import ipywidgets as w

        auto = {"style": {"description_width": "initial"}}
        self.name = w.Combobox(description="name", placeholder="optim.lr", **auto)
        self.kind = w.Dropdown(options=list(KINDS), description="kind", **auto)
        self.low = w.Text(description="low", placeholder="1e-4", **auto)
        self.high = w.Text(description="high", placeholder="0.1", **auto)
        self.log = w.Checkbox(description="log", indent=False)
        self.choices = w.Text(description="values", placeholder="adamw, sgd", **auto)
        self.remove = w.Button(description="✕", tooltip="Remove this parameter")
        widths = {"name": "230px", "kind": "140px", "low": "120px", "high": "120px", "log": "60px"}
        for key, width in {**widths, "choices": "312px", "remove": "34px"}.items():
            getattr(self, key).layout.width = width
        self.more: Mapping[str, object] = {}
        self.box = w.HBox(layout={"flex_flow": "row wrap"})
        self._arrange()
        self.remove.on_click(lambda _: on_remove(self))
        self.kind.observe(lambda _: self._arrange(), "value")
        for widget in (self.name, self.kind, self.low, self.high, self.log, self.choices):
            widget.observe(lambda _: on_edit(), "value")

    @property
    def row(self) -> Row:
        """What stands in the widgets."""
        texts = (self.name.value.strip(), self.kind.value, self.low.value, self.high.value)
        return Row(*texts, self.log.value, self.choices.value, self.more)

    @row.setter
    def row(self, row: Row) -> None:
        for key in ("name", "kind", "low", "high", "log", "choices"):
            set_trait(getattr(self, key), "value", getattr(row, key))
        self.more = row.more

    def _arrange(self) -> None:
        ranges = [self.low, self.high, self.log]
        middle = ranges if "low" in _SHOWN[self.kind.value] else [self.choices]
        self.box.children = [self.name, self.kind, *middle, self.remove]


class SpaceTable:
    """A table of the parameters of a space, with buttons to add and remove rows.

    Args:
        on_change: called with the new YAML after each edit in the table.
        suggestions: returns the names that are suggested for a parameter.

    Attributes:
        root: the widget.
        rows: the rows that are shown.
    """

    def __init__(
        self, on_change: Callable[[str], None], suggestions: Callable[[], Sequence[str]]
    ) -> None:
        import ipywidgets as w

        self._on_change, self._suggestions = on_change, suggestions
        self._text, self._loading = "", False
        self._made: list[_RowWidgets] = []
        self.rows: list[_RowWidgets] = []
        self.add = w.Button(description="Add parameter", layout={"width": "auto"})
        self.add.on_click(lambda _: self._show([*(row.row for row in self.rows), Row("")]))
        self._body, self._note = w.VBox(), w.HTML()
        self.root = w.VBox([self._body, self.add, self._note])

    @property
    def boxes(self) -> list[ipywidgets.HBox]:
        """The widgets of every row made so far, also of rows that are not shown."""
        return [part for row in self._made for part in (row.box, row.low, row.high, row.choices)]

    def load(self, text: str) -> None:
        """Show another YAML text."""
        if text == self._text:  # this table wrote it; reading it back would change what is typed
            return
        self._text = text
        try:
            rows, without = read_rows(text)
        except ValueError:
            self.add.disabled = True
            self._show([], "The table appears when the YAML below is right.")
            return
        self.add.disabled = False
        partly = [f"{row.name} ({', '.join(row.more)})" for row in rows if row.more]
        names = shortened(", ".join([*without, *partly]), 200)
        self._show(rows, f"Only in the YAML below: {names}" if names else "")

    def _show(self, rows: Sequence[Row], note: str = "") -> None:
        names, self._loading = list(self._suggestions()), True
        try:
            while len(self._made) < len(rows):
                self._made.append(_RowWidgets(self._write, self._remove))
            self.rows = self._made[: len(rows)]
            for widgets, row in zip(self.rows, rows, strict=True):
                set_trait(widgets.name, "options", tuple(names))
                widgets.row = row
            self._body.children = [widgets.box for widgets in self.rows]
            set_trait(self._note, "value", view(paragraph(note)) if note else "")
        finally:
            self._loading = False

    def _remove(self, removed: _RowWidgets) -> None:
        self._show([row.row for row in self.rows if row is not removed])
        self._write()

    def _write(self) -> None:
        if not self._loading:
            self._text = write_rows(self._text, [row.row for row in self.rows])
            self._on_change(self._text)
