"""Update the panel's widgets from a folder's state and the form, changed parts only."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import NbtoolkitError
from nbtoolkit.host import detect_host
from nbtoolkit.panel import actions
from nbtoolkit.panel.board import Board, set_html, show
from nbtoolkit.panel.form import FormState, Validation, set_trait
from nbtoolkit.panel.setup import cost_text
from nbtoolkit.search.slots import make_slots
from nbtoolkit.study.table import SweepTable
from nbtoolkit.text_table import counted, gib
from nbtoolkit.views.log import log_names
from nbtoolkit.views.markup import card, paragraph
from nbtoolkit.views.page import regions
from nbtoolkit.views.progress_display import DisplayPlace
from nbtoolkit.views.runs import list_runs
from nbtoolkit.views.state import State
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
        slots = f" · sweep: {counted(_slots(validation), 'slot')}"
    try:
        plan = make_plan(validation.config, detect_host(), hardware).explain().splitlines()[0]
    except NbtoolkitError as error:
        return f"plan: refused: {error}"
    machine = f"{counted(hardware.cpu_count, 'CPU')}, {gib(hardware.memory)}"
    return f"{plan.partition(', batch')[0]}{slots} · {machine}"


def _slots(validation: Validation) -> int:
    """Count the trainings of a sweep or a cross-validation that run at a time."""
    config, sweep_config = validation.config, validation.sweep_config
    if config is None:
        return 1
    if sweep_config is None:
        return len(make_slots(config, detect_hardware()).slots)
    placement, per_device = sweep_config.placement, sweep_config.trials_per_device
    return len(make_slots(config, detect_hardware(), placement, per_device=per_device).slots)


def _training_seconds(state: State | None) -> list[float]:
    """Return how long each complete training of the watched run took."""
    if state is None:
        return []
    if state.kind == "run":
        return [state.elapsed()] if state.status == "completed" else []
    spans = [span for span in state.spans() if span.state == "complete"]
    return [span.end - span.begin for span in spans if span.end is not None]


class Drawing:
    """Draws on a board; used by the panel's thread alone.

    Args:
        board: the widgets.
        train: the panel's function; None: the one that ``task`` names.
        folds: the panel's folds.
        redraw: called by another thread when there is something new to draw.
    """

    def __init__(
        self,
        board: Board,
        train: actions.Train | None,
        folds: Folds | None,
        redraw: Callable[[], object],
    ) -> None:
        self._board, self._train, self._folds, self._redraw = board, train, folds, redraw
        self._planned: object = None
        self._cost = ""
        self._listed: list[tuple[str, str, str]] = []
        self._importance = threading.Thread()

    def draw(
        self,
        state: State | None,
        form: FormState,
        validation: Validation,
        chosen: View,
        pressed: Collection[str],
    ) -> None:
        """Draw everything but the list of runs.

        Args:
            state: of the watched run; None: none is watched.
            form: the form's contents.
            validation: of the form.
            chosen: what the person chose to see.
            pressed: the buttons whose task is not done yet.
        """
        board = self._board
        self._draw_buttons(state, form, validation, pressed)
        parts = regions(state, chosen, only=("strip", *board.cards))
        set_html(board.strip, parts.get("strip", ""))
        for name, widget in board.cards.items():
            set_html(widget, parts.get(name, ""))
        self._draw_trials(state, chosen)
        self._draw_setup(state, form, validation)
        logs = ["", *log_names(state)]
        set_trait(board.log, "options", tuple((name or "newest running", name) for name in logs))
        set_trait(board.log, "value", chosen.log if chosen.log in logs else "")
        if state is not None and IMPORTANCES.due(state) and not self._importance.is_alive():
            compute = partial(self._compute_importance, state)
            self._importance = threading.Thread(target=compute, daemon=True)
            self._importance.start()

    def clear(self, text: str) -> None:
        """Show a sentence instead of a run."""
        set_html(self._board.strip, card("", paragraph(text)))
        for widget in self._board.cards.values():
            set_html(widget, "")
        show(self._board.trials, False)

    def list_runs(self, state: State | None, output_dir: str) -> None:
        """List the newest runs of a folder, with the watched one selected.

        The list is rewritten only when a run appears, ends or is renamed: a rewrite closes it while
        a person chooses.
        """
        runs = list_runs(output_dir)
        watched = "" if state is None else str(state.paths.folder)
        listed = [(str(entry.folder), entry.status, entry.name) for entry in runs]
        options = [("(none)", "")]
        for entry in runs:  # the strip shows the progress of a live one
            text = f"{entry.name} · {entry.status}" if entry.live else entry.text
            options.append((text, str(entry.folder)))
        if watched not in [folder for _, folder in options]:
            options.append((Path(watched).name, watched))
            listed.append((watched, "", ""))
        if listed != self._listed:
            self._board.run.options, self._listed = options, listed
        set_trait(self._board.run, "value", watched)

    def _draw_buttons(
        self,
        state: State | None,
        form: FormState,
        validation: Validation,
        pressed: Collection[str],
    ) -> None:
        board = self._board
        offered = actions.offered_buttons(state, form, self._folds)
        enabled = actions.enabled_buttons(offered, validation) - set(pressed)
        for name, button in board.buttons.items():
            show(button, name in offered)
            set_trait(button, "disabled", name not in enabled)
        set_trait(board.buttons["add_trials"], "description", f"+{board.more.value} trials")
        count = board.setup.error_count(validation)
        first = next(iter(validation.errors), "space" if validation.space_error else "settings")
        show(board.errors, count > 0)
        set_trait(board.errors, "description", f"{counted(count, 'error')}: {first}")

    def _draw_trials(self, state: State | None, chosen: View) -> None:
        board = self._board
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

    def _draw_setup(self, state: State | None, form: FormState, validation: Validation) -> None:
        """Draw what depends on the form; the plan reads the hardware, which takes time."""
        board, best = self._board, None if state is None else actions.best_trial(state)
        seconds = _training_seconds(state)
        key = (
            form.texts,
            form.space,
            form.trials,
            state and state.paths.folder,
            best,
            len(seconds),
        )
        if key != self._planned:
            self._planned = key
            each = sum(seconds) / len(seconds) if seconds else None
            folds = None if self._folds is None else len(self._folds)
            self._cost = cost_text(validation, each, _slots(validation), folds)
            text = escape(place_text(validation))
            html = f'<div title="{text}" style="{_CLIPPED};font-size:12px">{text}</div>'
            set_html(board.place, html)
            set_trait(board.code, "value", actions.code_of_form(form, validation, self._train))
            code = ""
            with contextlib.suppress(NbtoolkitError):  # deleted, or of another version
                code = actions.code_of_best(state, self._train)
            set_trait(board.best_code, "value", code)
            show(board.best_code, bool(code))
        board.setup.show(validation, self._cost)

    def _compute_importance(self, state: State) -> None:
        """Compute it, which takes up to 2.4 s of CPU, and draw it."""
        with contextlib.suppress(RuntimeError):  # a trial ended meanwhile: the next one is drawn
            IMPORTANCES.compute(state)
            self._redraw()


class SavedPage:
    """The page in an output of its own, for saved notebooks; see :meth:`Panel._ipython_display_`.

    Args:
        css_class: by which the widgets hide it while they are alive.
        render: returns the page.
    """

    def __init__(self, css_class: str, render: Callable[[], str]) -> None:
        self._class, self._render = css_class, render
        self._place: DisplayPlace | None = None
        self._html, self._next, self._changed = "", 0.0, False

    def show(self, html: str) -> None:
        """Show it in the running cell; called by the cell's own thread."""
        self._place, self._html = DisplayPlace(), html
        self._put()

    def update(self, *, changed: bool, now: bool) -> None:
        """Replace it if something has changed, at most every ten seconds.

        Args:
            changed: whether something has changed since the last call.
            now: whether it is replaced at once, since the run has ended.
        """
        self._changed = self._changed or changed
        if self._place is None or not self._changed or not (now or time.monotonic() > self._next):
            return
        self._changed, html = False, self._render()
        if html != self._html:
            self._html = html
            self._put()

    def _put(self) -> None:
        assert self._place is not None
        self._next = time.monotonic() + _SAVED_SECONDS
        html = f'<div class="{self._class}">{self._html}</div>'
        self._place.put({"text/html": html, "text/plain": ""})
