"""Build the widgets in which the settings of a run and of a sweep are edited."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ipywidgets as w

from nbtoolkit.config.schema import Config
from nbtoolkit.panel.form import FIELDS, FormState, Validation
from nbtoolkit.panel.space_table import SpaceTable
from nbtoolkit.panel.widgets import (
    column,
    html_widget,
    labelled,
    row_of,
    set_error,
    set_text,
    set_trait,
)

_SUGGESTED = ("optim", "train")  # sections whose settings a space names
_EXAMPLE = """\
model: {hidden: 64}
study: {metric: val_accuracy}
space:
  optim.lr: {type: float, low: 1.0e-4, high: 1.0e-1, log: true}"""


class Setup:
    """The widgets of the settings; what is typed is in :attr:`state` at once, right or wrong.

    Callbacks of widgets arrive in the kernel's threads, while the panel's thread loads and shows
    errors.

    Args:
        state: what is edited.
        on_edit: called after each edit, in the thread of the edit.

    Attributes:
        root: the widget.
        fields: the widget of each field, by the name of its setting.
        yaml: the widget of everything else.
        errors: the widget of the error of each field, and of ``"YAML"``.
        code: the cell that starts the same.
    """

    def __init__(self, state: FormState, on_edit: Callable[[], None]) -> None:
        self.state = state
        self._on_edit = on_edit
        self._lock = threading.RLock()
        self._loading = False
        self.fields: dict[str, w.Text | w.Dropdown] = {}
        self.errors = {name: html_widget() for name in (*(f.name for f in FIELDS), "YAML")}
        for field in FIELDS:
            self.fields[field.name] = self._make_field(field.name, field.label, field.choices)
        self.yaml = labelled(
            w.Textarea, "YAML", {"width": "99%", "height": "240px"}, placeholder=_EXAMPLE
        )
        self.yaml.observe(lambda change: self._store("YAML", change["new"]), "value")
        self.table = SpaceTable(lambda text: set_trait(self.yaml, "value", text))
        self.cost = html_widget()
        large = {"width": "99%", "height": "140px"}
        self.code = labelled(w.Textarea, "the same as a cell", large, disabled=True)
        fields = row_of(*(column(self.fields[f.name], self.errors[f.name]) for f in FIELDS))
        self.root = column(
            *(fields, self.table.root, self.yaml, self.errors["YAML"], self.cost, self.code)
        )
        self.load(state)

    def _make_field(self, name: str, label: str, choices: tuple[str, ...]) -> w.Text | w.Dropdown:
        shared: dict[str, Any] = {"description": label, "tooltip": name}
        shared["layout"] = {"width": "220px"}
        shared["style"] = {"description_width": "90px"}
        widget: w.Text | w.Dropdown
        if choices:
            options = [("default", ""), *((choice, choice) for choice in choices)]
            widget = w.Dropdown(options=options, **shared)
        else:
            widget = w.Text(placeholder="default", **shared)
        widget.observe(lambda change: self._store(name, change["new"]), "value")
        return widget

    def load(self, state: FormState) -> None:
        """Replace the contents."""
        with self._lock:
            self.state = state
            self._loading = True
            try:
                for name, widget in self.fields.items():
                    text = state.texts[name]
                    # A list refuses a value that it does not have; the field's error is below it.
                    if isinstance(widget, w.Text) or text in [value for _, value in widget.options]:
                        set_trait(widget, "value", text)
                set_trait(self.yaml, "value", state.yaml)
                self.table.load(state.yaml)
            finally:
                self._loading = False
        self._on_edit()

    def show(self, validation: Validation, cost: str, code: str) -> None:
        """Show each error beside its field, the cost, and the same as code."""
        for name, widget in self.errors.items():
            set_error(widget, validation.errors.get(name, ""))
        set_text(self.cost, cost)
        set_trait(self.code, "value", code)
        config = validation.config or Config()
        user_settings = [f"model.{key}" for key in config.model]
        user_settings += [f"data.{key}" for key in config.data]
        names = [name for section in _SUGGESTED for name in _settings(section)]
        self.table.suggest([*user_settings, *names])

    def _store(self, name: str, text: str) -> None:
        with self._lock:
            if self._loading:
                return
            if name == "YAML":
                self.state.yaml = text
                self.table.load(text)
            else:
                self.state.texts[name] = text
        self._on_edit()


def _settings(section: str) -> list[str]:
    hint = Config.model_fields[section].annotation
    return [f"{section}.{key}" for key in getattr(hint, "model_fields", ())]
