"""Build the widgets in which settings and a space are edited; say where and how long it runs."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from statistics import fmean
from typing import Any

import ipywidgets as w

from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import NbtoolkitError
from nbtoolkit.host import detect_host
from nbtoolkit.panel import form
from nbtoolkit.panel.form import TRIALS, Field, FormState, Validation, default_texts
from nbtoolkit.panel.space_table import SpaceTable
from nbtoolkit.panel.widgets import (
    INVISIBLE,
    Sections,
    close_widget,
    column,
    html,
    labelled,
    make,
    set_text,
    set_trait,
    show,
    sign_button,
    wrapped_row,
)
from nbtoolkit.search.slots import Placement, make_slots
from nbtoolkit.text_table import counted, gib
from nbtoolkit.tuning.quota import cost_text as quota_text
from nbtoolkit.views.markup import alert
from nbtoolkit.views.state import WORKED, State

_COMMON = ("train.epochs", "train.batch_size", "optim.lr", "model", "seed")
_CHANGED, _ALL = "common and changed", "all"
_MOST = 15  # rows of a search; to make all 75 would take the browser a second
_SEARCHED = ("optim", "train")  # sections whose settings a space names

# --- where it runs, and what it costs ---


def place_text(validation: Validation) -> str:
    """Say on what a launch and a sweep will run; for a refused plan, the reason."""
    if validation.config is None:
        return "plan: something in Set up is wrong"
    hardware, slots = detect_hardware(), ""
    if validation.sweep_config is not None:
        slots = f" · sweep: {counted(count_slots(validation)[0], 'slot')}"
    try:
        plan = make_plan(validation.config, detect_host(), hardware).explain().splitlines()[0]
    except NbtoolkitError as error:
        return f"plan: refused: {error}"
    machine = f"{counted(hardware.cpu_count, 'CPU')}, {gib(hardware.memory)}"
    return f"{plan.partition(', batch')[0]}{slots} · {machine}"


def count_slots(validation: Validation) -> tuple[int, int]:
    """Count the trainings of a search that run at a time, and the GPUs of each of them."""
    config, sweep = validation.config, validation.sweep_config
    if config is None:
        return 1, 0
    placement: Placement = "auto" if sweep is None else sweep.placement
    per_device = 1 if sweep is None else sweep.trials_per_device
    slots = make_slots(config, detect_hardware(), placement, per_device=per_device).slots
    return len(slots), len(slots[0].hardware.usable)


def training_seconds(state: State | None) -> float | None:
    """Return how long a training of the watched run takes, on average; None: unknown."""
    if state is None:
        return None
    if state.kind == "run":
        return state.elapsed() if state.status == "completed" else None
    spans = [span for span in state.spans(WORKED) if span.state == "complete"]
    seconds = [span.end - span.begin for span in spans if span.end is not None]
    return fmean(seconds) if seconds else None


def cost_text(
    validation: Validation,
    seconds_per_training: float | None = None,
    slots: int = 1,
    folds: int | None = None,
    devices: int = 0,
) -> str:
    """Describe what a sweep or a cross-validation costs.

    Args:
        validation: of the form.
        seconds_per_training: how long one training takes; None: unknown.
        slots: how many trainings run at a time.
        folds: the number of folds; None: as the sweep says.
        devices: the number of GPUs of one training.

    Returns:
        Such as ``"20 trials x 3 folds = 60 trainings, about 9 min on 2 slots"``, and with
        ``runtime.quota_hours`` the share of the quota; empty: it is one training, or the number of
        trials is unknown.
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
    text += f", about {_rounded(seconds)} on {counted(slots, 'slot')}"
    if validation.config is None:
        return text
    quota = quota_text(
        validation.config,
        detect_host().kind,
        jobs=trainings,
        seconds=seconds_per_training,
        slots=slots,
        devices=devices,
    )
    return f"{text}: {quota}" if quota else text


def _rounded(seconds: float) -> str:
    """Format a length of time that is not known exactly."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


# --- widgets ---


class Setup:
    """The widgets of the settings; what is typed is in :attr:`state` at once, right or wrong.

    :meth:`build` makes the widgets; most panels show a run, and need none. Those of a setting are
    made when it is first shown. Callbacks of widgets arrive in the kernel's threads, while the
    panel's thread loads and shows errors.

    Args:
        state: what is edited.
        on_edit: called after each edit, in the thread of the edit; also after other settings are
            shown, which have no errors beside them yet.
        task: whether ``task`` is a common setting, as in a panel without a function.

    Attributes:
        root: the widget; empty until :meth:`build`.
        built: whether the widgets are made.
        errors: the HTML widgets beside the settings, by dotted name, as far as they are made.
        edited: whether something was typed that :meth:`keep` has not written.
    """

    search: w.Text
    section: w.Dropdown
    trials: w.Text
    space: w.Textarea
    table: SpaceTable
    together: w.HTML
    cost: w.HTML
    space_error: w.HTML

    def __init__(
        self, state: FormState, on_edit: Callable[[], None], *, task: bool = False
    ) -> None:
        self.state, self._on_edit, self.edited = state, on_edit, False
        self._common = [*_COMMON, "distributed.world_size", *(["task"] if task else [])]
        self._fields = form.config_fields()
        self._inputs: dict[str, w.Widget] = {}
        self._resets: dict[str, w.Button] = {}
        self._rows: dict[str, w.HBox] = {}
        self.errors: dict[str, w.HTML] = {}
        self._lock, self._loading, self.built = threading.RLock(), False, False
        self.root = wrapped_row(align="flex-start")

    def build(self) -> None:
        """Make the widgets, unless they are made."""
        with self._lock:
            if not self.built:
                self._build()
                self.built = True
                self.load(self.state)

    def _build(self) -> None:
        self.search = labelled(w.Text, "search", placeholder="name or word")
        sections = dict.fromkeys(field.section for field in self._fields.values())
        self.section = labelled(w.Dropdown, "show", options=[_CHANGED, *sections, _ALL])
        self.trials = labelled(w.Text, "trials", placeholder=f"the space's, or {TRIALS}")
        example = "optim.lr: {type: float, low: 1.0e-4, high: 1.0e-1, log: true}"
        wide = {"width": "99%"}
        self.space = labelled(w.Textarea, "space", wide, placeholder=example, rows=12)
        self.table = SpaceTable(lambda text: set_trait(self.space, "value", text))
        self.together, self._matches = html(), html()
        self.cost, self.space_error, self._shown = html(), html(), column()
        self._yaml = Sections({"YAML": [self.space]})
        choice = wrapped_row(self.search, self.section)
        left = [choice, self.together, self._matches, self._shown]
        right = [self.table.root, self.space_error, self.trials, self.cost, self._yaml.root]
        self.root.children = (
            column(*left, flex="0 1 462px", min_width="0"),
            column(*right, flex="1 1 575px", min_width="0"),
        )
        self.search.observe(lambda _: self._show_rows(), "value")
        self.section.observe(lambda _: self._show_section(), "value")
        self.space.observe(lambda change: self._store("space", change["new"]), "value")
        self.trials.observe(lambda change: self._store("trials", change["new"]), "value")

    def load(self, state: FormState) -> None:
        """Replace the contents."""
        with self._lock:
            self.state = state
            if not self.built:
                return
            self._loading = True
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
        if not self.built:
            return
        with self._lock:
            errors = dict(self.errors)
            hidden = [name for name in validation.errors if not self._is_shown(name)]
        for name, widget in errors.items():
            set_text(widget, validation.errors.get(name, ""), alert)
        elsewhere = "\n".join(f"{name}: {validation.errors[name]}" for name in hidden)
        set_text(self.together, elsewhere or validation.together, alert)
        set_text(self.space_error, validation.space_error, alert)
        set_text(self.cost, cost)
        if (config := validation.config) is not None:
            names = [name for name, field in self._fields.items() if field.section in _SEARCHED]
            own = [f"model.{key}" for key in config.model] + [f"data.{key}" for key in config.data]
            self.table.suggest([*own, *names])

    def input(self, name: str) -> Any:
        """Make a setting visible and return its widget; also ``"space"`` and ``"trials"``."""
        self.build()
        if name not in self._fields:
            return {"space": self.space, "trials": self.trials}[name]
        if not self._is_shown(name):
            self.search.value = ""
            self.section.value = self._fields[name].section
        return self._inputs[name]

    def open_at(self, name: str) -> None:
        """Set the focus on a setting; ``"settings"`` are wrong together, and have no field."""
        if name != "settings":
            self.input(name).focus()

    @property
    def rows(self) -> list[w.Widget]:
        """The row of every setting made so far, also those that are not shown."""
        return [*self._rows.values()]

    def close(self) -> None:
        """Close all widgets."""
        if self.built:
            self._yaml.close()
            for widget in (*self.rows, *(row.box for row in self.table.made)):
                close_widget(widget)
        close_widget(self.root)

    def keep(self, output_dir: str | os.PathLike[str]) -> None:
        """Write what was typed to a file, which a later kernel offers."""
        if self.edited and form.keep_edits(output_dir, self.state):
            self.edited = False

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
            set_text(self._matches, note)
        self._on_edit()  # shows the errors of the new rows

    # --- one setting ---

    def _make_row(self, field: Field) -> w.HBox:
        name, default = field.name, default_texts()[field.name]
        common: dict[str, Any] = {
            "tooltip": field.tooltip,
            "description_allow_html": True,
            "style": {"description_width": "240px"},
            "layout": {"width": "420px", "max_width": "90%"},
        }
        if field.free:
            widget = make(w.Textarea, rows=4, placeholder="name: value", **common)
        elif field.choices:
            widget = make(w.Dropdown, options=field.choices, **common)
        else:
            hint = "default" if field.nullable else field.allowed
            widget = make(w.Text, placeholder=hint, **common)
        reset = sign_button("reset", f"Reset {name} to {default or 'empty'}")
        error = html(min_width="200px", flex="1 1 0")
        self._inputs[name], self._resets[name], self.errors[name] = widget, reset, error
        self._refresh(name)
        widget.observe(lambda change: self._on_input(field, change["new"]), "value")
        reset.on_click(lambda _: self._reset(name))
        return wrapped_row(widget, reset, error, gap="0")

    def _refresh(self, name: str) -> None:
        """Put a setting's text into its widget, and mark whether it is at its default."""
        text, field, widget = self.state.texts[name], self._fields[name], self._inputs[name]
        is_empty = field.nullable and not field.choices and text == "null"
        set_trait(widget, "value", "" if is_empty else text)
        self._mark(name)

    def _reset(self, name: str) -> None:
        self._store(name, default_texts()[name])
        self._refresh(name)

    def _mark(self, name: str) -> None:
        changed = self.state.texts[name] != default_texts()[name]
        set_trait(self._inputs[name], "description", f"<b>{name}</b>" if changed else name)
        show(self._resets[name], changed, INVISIBLE)

    def _on_input(self, field: Field, text: str) -> None:
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
