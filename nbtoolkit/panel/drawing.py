"""Update the panel's widgets from a folder's state and the form, changed parts only."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import NbtoolkitError
from nbtoolkit.host import detect_host
from nbtoolkit.launcher.launch import Train
from nbtoolkit.panel import actions
from nbtoolkit.panel.board import Board
from nbtoolkit.panel.form import Validation
from nbtoolkit.panel.setup import cost_text
from nbtoolkit.panel.widgets import set_html, set_trait, show
from nbtoolkit.search.slots import Placement, make_slots
from nbtoolkit.study.table import SweepTable
from nbtoolkit.text_table import counted, gib
from nbtoolkit.views.log import log_names
from nbtoolkit.views.markup import card, paragraph
from nbtoolkit.views.page import regions
from nbtoolkit.views.progress_display import DisplayPlace
from nbtoolkit.views.runs import list_runs, plain_name
from nbtoolkit.views.state import WORKED, State
from nbtoolkit.views.sweep_cards import IMPORTANCES
from nbtoolkit.views.trial_rows import View, trial_page

if TYPE_CHECKING:
    from nbtoolkit.folds.folds import Folds

_SAVED_SECONDS = 10.0  # between two updates of the page for saved notebooks
_CLIPPED = "white-space:nowrap;overflow:hidden;text-overflow:ellipsis;line-height:28px"


def place_text(validation: Validation) -> str:
    """Say on what a launch and a sweep will run; for a refused plan, the reason."""
    if validation.config is None:
        return "plan: something in Set up is wrong"
    hardware, slots = detect_hardware(), ""
    if validation.sweep_config is not None:
        slots = f" · sweep: {counted(_slots(validation)[0], 'slot')}"
    try:
        plan = make_plan(validation.config, detect_host(), hardware).explain().splitlines()[0]
    except NbtoolkitError as error:
        return f"plan: refused: {error}"
    machine = f"{counted(hardware.cpu_count, 'CPU')}, {gib(hardware.memory)}"
    return f"{plan.partition(', batch')[0]}{slots} · {machine}"


def _slots(validation: Validation) -> tuple[int, int]:
    """Count the trainings of a search that run at a time, and the GPUs of each of them."""
    config, sweep = validation.config, validation.sweep_config
    if config is None:
        return 1, 0
    placement: Placement = "auto" if sweep is None else sweep.placement
    per_device = 1 if sweep is None else sweep.trials_per_device
    slots = make_slots(config, detect_hardware(), placement, per_device=per_device).slots
    return len(slots), len(slots[0].hardware.usable)


def _training_seconds(state: State | None) -> list[float]:
    """Return how long each complete training of the watched run took."""
    if state is None:
        return []
    if state.kind == "run":
        return [state.elapsed()] if state.status == "completed" else []
    spans = [span for span in state.spans(WORKED) if span.state == "complete"]
    return [span.end - span.begin for span in spans if span.end is not None]


class Drawing:
    """What a panel shows, and how it is drawn; used by the panel's thread alone.

    Args:
        board: the widgets.
        train: the panel's function; None: the one that ``task`` names.
        folds: the panel's folds.

    Attributes:
        board: the widgets.
        state: of the watched run; None: none is watched.
        chosen: what the person chose to see.
        output_dir: the folder of the runs: the form's when the panel was opened, later that of what
            was started.
    """

    def __init__(self, board: Board, train: Train | None, folds: Folds | None) -> None:
        self.board, self._train, self._folds = board, train, folds
        self.state: State | None = None
        self.chosen, self.output_dir = View(), "outputs"
        self._pressed: dict[str, Future[None]] = {}  # the buttons whose task is not done yet
        self._stale = True
        self._planned: object = None
        self._cost = ""
        self._listed: list[tuple[str, str, str]] = []
        self._importance = threading.Thread()

    def validate(self) -> Validation:
        """Validate what stands in the form now."""
        return self.board.setup.state.validate()

    def draw(self) -> None:
        """Draw everything but the list of runs."""
        board, state, validation = self.board, self.state, self.validate()
        self._draw_buttons(validation)
        parts = regions(state, self.chosen, only=board.cards)
        for name, widget in board.cards.items():
            set_html(widget, parts.get(name, ""))
        self._draw_trials()
        self._draw_setup(validation)
        logs = ["", *log_names(state)]
        set_trait(board.log, "options", tuple((name or "newest running", name) for name in logs))
        set_trait(board.log, "value", self.chosen.log if self.chosen.log in logs else "")
        if state is not None and IMPORTANCES.due(state) and not self._importance.is_alive():
            compute = self._compute_importance
            self._importance = threading.Thread(target=compute, args=(state,), daemon=True)
            self._importance.start()

    def clear(self, text: str) -> None:
        """Show a sentence instead of a run."""
        for name, widget in self.board.cards.items():
            set_html(widget, card("", paragraph(text)) if name == "strip" else "")
        show(self.board.trials, False)

    def list_runs(self) -> None:
        """List the newest runs of the output folder, with the watched one selected.

        The list is rewritten only when a run appears, ends or is renamed: a rewrite closes it while
        a person chooses.
        """
        runs = list_runs(self.output_dir)
        watched = "" if self.state is None else str(self.state.paths.folder)
        listed = [(str(entry.folder), entry.status, entry.name) for entry in runs]
        options = [("(none)", "")]
        for entry in runs:  # the strip shows the progress of a live one
            text = f"{entry.name} · {entry.status}" if entry.live else entry.text
            options.append((text, str(entry.folder)))
        if watched not in [folder for _, folder in options]:
            options.append((Path(watched).name, watched))
            listed.append((watched, "", ""))
        if listed != self._listed:
            self.board.run.options, self._listed = options, listed
        set_trait(self.board.run, "value", watched)

    def _draw_buttons(self, validation: Validation) -> None:
        board, wrong = self.board, [*validation.mistakes]
        offered = actions.offered_buttons(self.state, validation, self._folds)
        enabled = actions.enabled_buttons(offered, validation) - set(self._pressed)
        for name, button in board.buttons.items():
            show(button, name in offered)
            set_trait(button, "disabled", name not in enabled)
        set_trait(board.buttons["add_trials"], "description", f"+{board.more.value} trials")
        show(board.errors, bool(wrong))
        text = f"{counted(len(wrong), 'error')}: {''.join(wrong[:1])}"
        set_trait(board.errors, "description", text)

    def _draw_trials(self) -> None:
        board, state, chosen = self.board, self.state, self.chosen
        is_sweep = state is not None and isinstance(state.table, SweepTable)
        show(board.trials, is_sweep)
        show(board.sections.headings["Compare"], is_sweep)
        if state is None or not is_sweep:
            return
        page = trial_page(state, chosen)
        board.table.fill(page.columns, page.rows, chosen)
        set_html(board.count, f"<b>Trials</b> {escape(page.text)}")
        set_trait(board.previous, "disabled", chosen.page <= 0)
        set_trait(board.next, "disabled", chosen.page >= page.pages - 1)

    def _draw_setup(self, validation: Validation) -> None:
        """Draw what depends on the form; the plan reads the hardware, which takes time."""
        board, state = self.board, self.state
        best, seconds = actions.best_trial(state), _training_seconds(state)
        status = None if state is None else (state.paths.folder, state.status, state.resumable)
        key = (validation.form, status, best, len(seconds), [*self._listed])
        if key != self._planned:
            self._planned = key
            each = sum(seconds) / len(seconds) if seconds else None
            folds = None if self._folds is None else len(self._folds)
            slots, gpus = _slots(validation)
            cost, unfinished = cost_text(validation, each, slots, folds, gpus), None
            with contextlib.suppress(NbtoolkitError):  # there is no such task: a press says so
                unfinished = actions.continued_sweep(self._train, validation, self._folds)
            tooltip = actions.BUTTONS["sweep"][1]
            if unfinished is not None:
                tooltip = f"Continue {plain_name(unfinished)}, which has these settings"
                cost = f"{cost}\nSweep: {tooltip}".lstrip()
            self._cost = cost
            set_trait(board.buttons["sweep"], "tooltip", tooltip)
            text = escape(place_text(validation))
            html = f'<div title="{text}" style="{_CLIPPED};font-size:12px">{text}</div>'
            set_html(board.place, html)
            set_trait(board.code, "value", actions.code_of_form(validation, self._train))
            code = ""
            with contextlib.suppress(NbtoolkitError):  # deleted, or of another version
                code = actions.code_of_best(state, self._train)
            set_trait(board.best_code, "value", code)
            show(board.best_code, bool(code))
        board.setup.show(validation, self._cost)

    def _compute_importance(self, state: State) -> None:
        """Compute it, which takes up to 2.4 s of CPU."""
        with contextlib.suppress(RuntimeError):  # a trial ended meanwhile: the next one is drawn
            IMPORTANCES.compute(state)
            self._stale = True  # the next poll draws it


class SavedPage:
    """The page in an output of its own, for saved notebooks; see :meth:`Panel._ipython_display_`.

    Args:
        css_class: by which the widgets hide it while they are alive.
        render: returns the page.
    """

    def __init__(self, css_class: str, render: Callable[[], str]) -> None:
        self._class, self._render = css_class, render
        self._place: DisplayPlace | None = None
        self._next, self._changed = 0.0, False

    def show(self, html: str) -> None:
        """Show it in the running cell; called by the cell's own thread."""
        self._place = self._place or DisplayPlace()
        self._next = time.monotonic() + _SAVED_SECONDS
        html = f'<div class="{self._class}">{html}</div>'
        self._place.put({"text/html": html, "text/plain": ""})

    def update(self, *, changed: bool, now: bool) -> None:
        """Replace it if something has changed, at most every ten seconds.

        Args:
            changed: whether something has changed since the last call.
            now: whether it is replaced at once, since the run has ended.
        """
        self._changed = self._changed or changed
        if self._place is not None and self._changed and (now or time.monotonic() > self._next):
            self._changed = False
            self.show(self._render())
