"""Build the widgets in which the settings and the space of a sweep are edited."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import ConfigError
from nbtoolkit.panel.form import (
    Field,
    FormState,
    Validation,
    config_fields,
    default_texts,
    drop_edits,
    keep_edits,
    kept_edits,
    set_trait,
)
from nbtoolkit.panel.space_table import SpaceTable
from nbtoolkit.text_table import counted
from nbtoolkit.views.markup import alert, paragraph, view

if TYPE_CHECKING:
    import ipywidgets

_COMMON = ("train.epochs", "train.batch_size", "optim.lr", "model", "seed")
_COMMON += ("distributed.world_size",)
_CHANGED, _ALL = "common and changed", "all"
_MOST = 15  # rows of a search; to make all 75 would take the browser a second
_BOOL = ("true", "false")
_SUGGESTED = ("optim", "train", "model", "data")  # sections whose settings are searched


def cost_text(
    validation: Validation,
    seconds_per_training: float | None = None,
    slots: int = 1,
    folds: int | None = None,
) -> str:
    """Describe what a sweep or a cross-validation costs.

    Args:
        validation: of the form.
        seconds_per_training: how long one training takes; None: unknown.
        slots: how many trainings run at a time.
        folds: the number of folds; None: as the sweep says.

    Returns:
        Such as ``"20 trials x 3 folds = 60 trainings, about 9 min on 2 slots"``; empty: the number
        of trials is unknown, or there is one training alone.
    """
    sweep, trials = validation.sweep_config, None
    if sweep is not None:
        trials = sweep.budget.n_trials
        folds = folds or (sweep.folds.k or 0) * sweep.folds.repeats
        if trials is None:
            return ""
    parts = [(trials, "trial"), (folds, "fold")]
    counts = [(count, noun) for count, noun in parts if count]
    if not counts:
        return ""
    trainings = math.prod(count for count, _ in counts)
    text = " x ".join(counted(count, noun) for count, noun in counts)
    if folds:
        text += f" = {counted(trainings, 'training')}"
    if seconds_per_training is not None:
        seconds = seconds_per_training * math.ceil(trainings / slots)
        text += f", about {_rounded(seconds)} on {counted(slots, 'slot')}"
    return text


def _rounded(seconds: float) -> str:
    """Format a length of time that is not known exactly."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


class Setup:
    """The widgets of the settings; what is typed is in :attr:`state` at once, right or wrong.

    The widgets of a setting are made when it is first shown. Callbacks of widgets arrive in the
    kernel's threads, while the panel's thread shows errors and loads.

    Args:
        state: what is edited.
        on_edit: called after each edit, in the thread of the edit, and after other settings are
            shown, which have no errors beside them yet.
        task: whether ``task`` is a common setting, as in a panel without a function.

    Attributes:
        root: the widget.
        errors: the HTML widgets beside the settings, by dotted name, as far as they are made.
        edited: whether something was typed that :meth:`keep` has not written.
    """

    def __init__(
        self, state: FormState, on_edit: Callable[[], None], *, task: bool = False
    ) -> None:
        import ipywidgets as w

        self.state, self._on_edit, self.edited = state, on_edit, False
        self._common = (*_COMMON, "task") if task else _COMMON
        self._fields = config_fields()
        self._inputs: dict[str, ipywidgets.Widget] = {}
        self._resets: dict[str, ipywidgets.Button] = {}
        self._rows: dict[str, ipywidgets.HBox] = {}
        self.errors: dict[str, ipywidgets.HTML] = {}
        self._lock, self._loading = threading.RLock(), False
        auto: dict[str, Any] = {"style": {"description_width": "initial"}}
        sections = dict.fromkeys(field.section for field in self._fields.values())
        self.search = w.Text(
            description="search", placeholder="a name, or a word of its description", **auto
        )
        self.section = w.Dropdown(options=[_CHANGED, *sections, _ALL], description="show", **auto)
        self.together, self._matches, self._shown = w.HTML(), w.HTML(), w.VBox()
        self.trials = w.Text(
            value=state.trials, description="trials", placeholder="as the space says", **auto
        )
        self.space = w.Textarea(
            value=state.space,
            description="space",
            placeholder="optim.lr: {type: float, low: 1.0e-4, high: 1.0e-1, log: true}",
            rows=12,
            layout={"width": "99%"},
            **auto,
        )
        self.table = SpaceTable(self._write_space, self._suggestions)
        self.table.load(state.space)
        self.cost, self.space_error, self.offered = w.HTML(), w.HTML(), w.HBox()
        yaml = w.Accordion([self.space], titles=("YAML",), selected_index=None)
        left = [w.HBox([self.search, self.section]), self.together, self._matches, self._shown]
        right = [self.table.root, self.space_error, w.HBox([self.trials, self.cost]), yaml]
        side: dict[str, Any] = {"flex": "1 1 480px", "min_width": "0"}
        columns = [w.VBox(left, layout=side), w.VBox(right, layout=side)]
        self.root = w.VBox([self.offered, w.HBox(columns, layout={"flex_flow": "row wrap"})])
        self.search.observe(lambda _: self._show_rows(), "value")
        self.section.observe(lambda _: self._show_section(), "value")
        for name, widget in (("space", self.space), ("trials", self.trials)):
            widget.observe(lambda change, name=name: self._store(name, change["new"]), "value")
        self._show_rows()

    # --- what the panel calls ---

    def load(self, state: FormState) -> None:
        """Replace the contents."""
        with self._lock:
            self.state, self._loading = state, True
            try:
                for name, widget in self._inputs.items():
                    widget.value = self._shown_value(self._fields[name])
                    self._mark(name)
                self.space.value, self.trials.value = state.space, state.trials
                self.table.load(state.space)
            finally:
                self._loading = False
        self._show_rows()

    def show(self, validation: Validation, cost: str = "") -> None:
        """Show each error beside its field, or above all if the field is not shown; and the cost.

        Args:
            validation: of the form.
            cost: as from :func:`cost_text`.
        """
        with self._lock:
            errors = dict(self.errors)
            hidden = [name for name in validation.errors if not self._is_shown(name)]
        for name, widget in errors.items():
            _show_error(widget, validation.errors.get(name, ""))
        elsewhere = "\n".join(f"{name}: {validation.errors[name]}" for name in hidden)
        _show_error(self.together, elsewhere or validation.together)
        _show_error(self.space_error, validation.space_error)
        set_trait(self.cost, "value", view(paragraph(cost)) if cost else "")

    def error_count(self, validation: Validation) -> int:
        """Count what is wrong."""
        return len(validation.errors) + bool(validation.together) + bool(validation.space_error)

    def input(self, name: str) -> Any:
        """Make a setting visible and return its widget; also ``"space"`` and ``"trials"``."""
        if name not in self._fields:
            return {"space": self.space, "trials": self.trials}[name]
        if not self._is_shown(name):
            self.search.value = ""
            self._show_rows()
        if not self._is_shown(name):
            self.section.value = self._fields[name].section
        return self._inputs[name]

    def open_at(self, name: str) -> None:
        """Make a setting visible and set the focus on it."""
        self.input(name).focus()

    @property
    def rows(self) -> list[ipywidgets.Widget]:
        """Every row made so far, also those that are not shown."""
        return [*self._rows.values(), *self.table.boxes]

    def keep(self, output_dir: str | os.PathLike[str]) -> None:
        """Write what was typed to a file that a later kernel offers; see :func:`keep_edits`."""
        if self.edited and keep_edits(output_dir, self.state.copy()):
            self.edited = False

    def offer(self, output_dir: str | os.PathLike[str]) -> None:
        """Offer what an earlier kernel kept, if it differs from what stands in the form."""
        import ipywidgets as w

        edits = kept_edits(output_dir)
        if edits is None or vars(edits.state) == vars(self.state):
            return
        age = _rounded(max(time.time() - edits.saved, 0.0))
        restore = w.Button(description="Restore", tooltip="Put them into the form")
        discard = w.Button(description="Discard", tooltip="Delete them")
        restore.on_click(lambda _: self.load(edits.state))
        discard.on_click(lambda _: drop_edits(output_dir))
        text = w.HTML(view(paragraph(f"Unsaved edits from {age} ago:")))
        self.offered.children = [text, restore, discard]
        for button in (restore, discard):
            button.on_click(lambda _: set_trait(self.offered.layout, "display", "none"))

    # --- which settings are shown ---

    def _names(self) -> list[str]:
        fields, words = self._fields.values(), self.search.value.lower().split()
        if words:
            texts = {field.name: f"{field.name} {field.help}".lower() for field in fields}
            found = [name for name, text in texts.items() if all(word in text for word in words)]
            return sorted(found, key=lambda name: words[0] not in name)  # names first
        if self.section.value == _CHANGED:
            return list(dict.fromkeys([*self._common, *self.state.changed()]))
        return [field.name for field in fields if self.section.value in (_ALL, field.section)]

    def _is_shown(self, name: str) -> bool:
        return self._rows.get(name) in self._shown.children

    def _show_section(self) -> None:
        self.search.value = ""
        self._show_rows()

    def _show_rows(self) -> None:
        """Show the settings that are chosen now; what is typed moves no row."""
        with self._lock:
            names, note = self._names(), ""
            if self.search.value.strip():
                note = f"{len(names)} settings match" if len(names) != 1 else ""
                names = names[:_MOST]
            for name in names:
                if name not in self._rows:
                    self._rows[name] = self._make_row(self._fields[name])
            self._shown.children = [self._rows[name] for name in names]
            set_trait(self._matches, "value", view(paragraph(note)) if note else "")
        self._on_edit()  # shows the errors of the new rows

    # --- one setting ---

    def _make_row(self, field: Field) -> ipywidgets.HBox:
        import ipywidgets as w

        common: dict[str, Any] = {
            "value": self._shown_value(field),
            "description_allow_html": True,
            "tooltip": field.tooltip,
            "style": {"description_width": "240px"},
            "layout": {"width": "420px", "max_width": "90%"},
        }
        hint = "default" if field.nullable else field.allowed
        if field.free:
            widget = w.Textarea(**common, rows=4, placeholder="name: value")
        elif field.choices == _BOOL:
            widget = w.Checkbox(**common)
        elif field.choices:
            widget = w.Dropdown(**common, options=field.choices)
        else:
            widget = w.Text(**common, placeholder=hint)
        default = default_texts()[field.name]
        reset = w.Button(
            description="↺", tooltip=f"Reset {field.name} to {default}", layout={"width": "34px"}
        )
        error = w.HTML(layout={"min_width": "200px", "flex": "1 1 0"})
        name = field.name
        self._inputs[name], self._resets[name], self.errors[name] = widget, reset, error
        self._mark(name)
        widget.observe(lambda change: self._store(name, self._typed(field, change["new"])), "value")
        reset.on_click(lambda _: self._reset(field))
        return w.HBox([widget, reset, error], layout={"flex_flow": "row wrap"})

    def _shown_value(self, field: Field) -> object:
        """Convert a setting's text to its widget's value."""
        text = self.state.texts[field.name]
        if field.choices == _BOOL:
            return text == "true"
        return "" if text == "null" and not field.choices else text

    def _typed(self, field: Field, value: bool | str) -> str:
        """Convert a widget's value to the setting's text."""
        if isinstance(value, bool):
            return "true" if value else "false"
        return "null" if field.nullable and not value.strip() else value

    def _reset(self, field: Field) -> None:
        self._store(field.name, default_texts()[field.name])
        set_trait(self._inputs[field.name], "value", self._shown_value(field))

    def _mark(self, name: str) -> None:
        """Show whether a setting is at its default."""
        changed = self.state.texts[name] != default_texts()[name]
        set_trait(self._inputs[name], "description", f"<b>{name}</b>" if changed else name)
        set_trait(self._resets[name].layout, "visibility", "visible" if changed else "hidden")

    def _store(self, name: str, text: str) -> None:
        """Store what was typed into a setting, ``"space"`` or ``"trials"``."""
        with self._lock:
            if self._loading:
                return
            if name in self._fields:
                self.state.texts[name] = text
                self._mark(name)
            else:
                setattr(self.state, name, text)
            if name == "space":
                self.table.load(text)
            self.edited = True
        self._on_edit()

    # --- the space ---

    def _write_space(self, text: str) -> None:
        self.space.value = text

    def _suggestions(self) -> list[str]:
        """Suggest names for a parameter: settings of the training, and those of the model."""
        names = [name for name, field in self._fields.items() if not field.free]
        for section in ("model", "data"):
            try:
                own = self._fields[section].value(self.state.texts[section])
            except ConfigError:
                continue
            names += [f"{section}.{key}" for key in own]
        return [name for name in names if name.partition(".")[0] in _SUGGESTED]


def _show_error(widget: ipywidgets.HTML, text: str) -> None:
    set_trait(widget, "value", view(alert(text)) if text else "")
