"""Build the widgets in which the settings and the space of a sweep are edited."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from nbtoolkit.panel import form
from nbtoolkit.panel.form import Field, FormState, Sections, Validation, default_texts, set_trait
from nbtoolkit.panel.space_table import SpaceTable
from nbtoolkit.text_table import ago, counted
from nbtoolkit.views.markup import alert, paragraph, view

if TYPE_CHECKING:
    import ipywidgets

_COMMON = ("train.epochs", "train.batch_size", "optim.lr", "model", "seed")
_CHANGED, _ALL = "common and changed", "all"
_MOST = 15  # rows of a search; to make all 75 would take the browser a second
_BOOL = ("true", "false")
_SEARCHED = ("optim", "train")  # sections whose settings a space names

# --- what it costs ---


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
        Such as ``"20 trials x 3 folds = 60 trainings, about 9 min on 2 slots"``; empty: it is one
        training, or the number of trials is unknown.
    """
    sweep, counts = validation.sweep_config, []
    if sweep is not None:
        folds = folds or (sweep.folds.k or 0) * sweep.folds.repeats
        counts.append((sweep.budget.n_trials or 0, "trial"))
    if folds:
        counts.append((folds, "fold"))
    trainings = math.prod(count for count, _ in counts) if counts else 0
    if not trainings:
        return ""
    text = " x ".join(counted(count, noun) for count, noun in counts)
    text += f" = {counted(trainings, 'training')}" if folds else ""
    if seconds_per_training is None:
        return text
    seconds = seconds_per_training * math.ceil(trainings / slots)
    return f"{text}, about {_rounded(seconds)} on {counted(slots, 'slot')}"


def _rounded(seconds: float) -> str:
    """Format a length of time that is not known exactly."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


# --- widgets ---


class Setup:
    """The widgets of the settings; what is typed is in :attr:`state` at once, right or wrong.

    The widgets of a setting are made when it is first shown. Callbacks of widgets arrive in the
    kernel's threads, while the panel's thread loads and shows errors.

    Args:
        state: what is edited.
        on_edit: called after each edit, in the thread of the edit; also after other settings are
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
        self._common = [*_COMMON, "distributed.world_size", *(["task"] if task else [])]
        self._fields = form.config_fields()
        self._inputs: dict[str, ipywidgets.Widget] = {}
        self._resets: dict[str, ipywidgets.Button] = {}
        self._rows: dict[str, ipywidgets.HBox] = {}
        self.errors: dict[str, ipywidgets.HTML] = {}
        self._lock, self._loading = threading.RLock(), False
        self.search = w.Text(description="search", placeholder="name or word")
        sections = dict.fromkeys(field.section for field in self._fields.values())
        self.section = w.Dropdown(description="show", options=[_CHANGED, *sections, _ALL])
        self.trials = w.Text(description="trials", placeholder="as the space says")
        example = "optim.lr: {type: float, low: 1.0e-4, high: 1.0e-1, log: true}"
        self.space = w.Textarea(description="space", placeholder=example, rows=12)
        self.space.layout.width = "99%"
        for widget in (self.search, self.section, self.trials, self.space):
            widget.style.description_width = "initial"
        self.table = SpaceTable(lambda text: set_trait(self.space, "value", text))
        self.offered, self.together, self._matches = w.HBox(), w.HTML(), w.HTML()
        self.cost, self.space_error, self._shown = w.HTML(), w.HTML(), w.VBox()
        yaml = Sections({"YAML": self.space}).root
        choice = w.HBox([self.search, self.section], layout={"flex_flow": "row wrap"})
        left = w.VBox([choice, self.together, self._matches, self._shown])
        right = w.VBox([self.table.root, self.space_error, self.trials, self.cost, yaml])
        left.layout.flex, right.layout.flex = "0 1 462px", "1 1 575px"
        left.layout.min_width = right.layout.min_width = "0"
        columns = w.HBox([left, right], layout={"flex_flow": "row wrap"})
        self.root = w.VBox([self.offered, columns])
        self.search.observe(lambda _: self._show_rows(), "value")
        self.section.observe(lambda _: self._show_section(), "value")
        self.space.observe(lambda change: self._store("space", change["new"]), "value")
        self.trials.observe(lambda change: self._store("trials", change["new"]), "value")
        self.load(state)

    def load(self, state: FormState) -> None:
        """Replace the contents."""
        with self._lock:
            self.state, self._loading = state, True
            try:
                for name in self._inputs:
                    self._refresh(name)
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
        if (config := validation.config) is not None:
            names = [name for name, field in self._fields.items() if field.section in _SEARCHED]
            own = [f"model.{key}" for key in config.model] + [f"data.{key}" for key in config.data]
            self.table.suggest([*own, *names])

    def error_count(self, validation: Validation) -> int:
        """Count what is wrong."""
        return len(validation.errors) + bool(validation.together) + bool(validation.space_error)

    def input(self, name: str) -> Any:
        """Make a setting visible and return its widget; also ``"space"`` and ``"trials"``."""
        if name not in self._fields:
            return {"space": self.space, "trials": self.trials}[name]
        if not self._is_shown(name):
            self.search.value = ""
            self.section.value = self._fields[name].section
        return self._inputs[name]

    def open_at(self, name: str) -> None:
        """Make a setting visible and set the focus on it."""
        self.input(name).focus()

    @property
    def rows(self) -> list[ipywidgets.Widget]:
        """Every row made so far, also those that are not shown."""
        return [*self._rows.values(), *(row.box for row in self.table.made)]

    def keep(self, output_dir: str | os.PathLike[str]) -> None:
        """Write what was typed to a file, which :meth:`offer` reads in a later kernel."""
        if self.edited and form.keep_edits(output_dir, self.state.copy()):
            self.edited = False

    def offer(self, output_dir: str | os.PathLike[str]) -> None:
        """Offer what an earlier kernel kept, if it differs from what stands in the form."""
        import ipywidgets as w

        kept, saved = form.kept_edits(output_dir) or (self.state, 0.0)
        if vars(kept) == vars(self.state):
            return

        def decide(chosen: FormState | None) -> None:
            if chosen is None:
                form.drop_edits(output_dir)
            else:
                self.load(chosen)
            widgets, self.offered.children = self.offered.children, ()
            for widget in widgets:
                form.close_widget(widget)

        text = f"Unsaved edits from {ago(max(time.time() - saved, 0.0))}:"
        restore, discard = w.Button(description="Restore"), w.Button(description="Discard")
        restore.on_click(lambda _: decide(kept))
        discard.on_click(lambda _: decide(None))
        self.offered.children = [w.HTML(view(paragraph(text))), restore, discard]

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
        """Show the settings that are chosen now; while one types, no row moves."""
        with self._lock:
            names, note = self._names(), ""
            if self.search.value.strip():
                note = f"{counted(len(names), 'setting')} found"
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

        name, default = field.name, default_texts()[field.name]
        common: dict[str, Any] = {
            "tooltip": field.tooltip,
            "description_allow_html": True,
            "style": {"description_width": "240px"},
            "layout": {"width": "420px", "max_width": "90%"},
        }
        if field.free:
            widget = w.Textarea(rows=4, placeholder="name: value", **common)
        elif field.choices == _BOOL:
            widget = w.Checkbox(**{**common, "style": {"description_width": "60px"}})
        elif field.choices:
            widget = w.Dropdown(options=field.choices, **common)
        else:
            hint = "default" if field.nullable else field.allowed
            widget = w.Text(placeholder=hint, **common)
        reset = w.Button(description="↺", tooltip=f"Reset {name} to {default or 'empty'}")
        reset.layout.width = "34px"
        error = w.HTML(layout={"min_width": "200px", "flex": "1 1 0"})
        self._inputs[name], self._resets[name], self.errors[name] = widget, reset, error
        self._refresh(name)
        widget.observe(partial(self._on_input, field), "value")
        reset.on_click(lambda _: self._reset(name))
        return w.HBox([widget, reset, error], layout={"flex_flow": "row wrap"})

    def _refresh(self, name: str) -> None:
        """Put a setting's text into its widget, and mark whether it is at its default."""
        text, field, widget = self.state.texts[name], self._fields[name], self._inputs[name]
        is_empty = field.nullable and not field.choices and text == "null"
        value = text == "true" if field.choices == _BOOL else "" if is_empty else text
        set_trait(widget, "value", value)
        self._mark(name)

    def _reset(self, name: str) -> None:
        self._store(name, default_texts()[name])
        self._refresh(name)

    def _mark(self, name: str) -> None:
        changed = self.state.texts[name] != default_texts()[name]
        set_trait(self._inputs[name], "description", f"<b>{name}</b>" if changed else name)
        set_trait(self._resets[name].layout, "visibility", "visible" if changed else "hidden")

    def _on_input(self, field: Field, change: dict[str, Any]) -> None:
        text = form.text_of(change["new"]) if field.choices == _BOOL else change["new"]
        self._store(field.name, text if text.strip() or not field.nullable else "null")

    def _store(self, name: str, text: str) -> None:
        """Store a setting, ``"space"`` or ``"trials"``."""
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


def _show_error(widget: ipywidgets.HTML, text: str) -> None:
    set_trait(widget, "value", view(alert(text)) if text else "")
