"""Update the panel's widgets from a folder's state and the form, changed parts only."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import NbtoolkitError
from nbtoolkit.folds.folds import Folds
from nbtoolkit.host import detect_host
from nbtoolkit.launcher.arguments import task_name
from nbtoolkit.panel.actions import (
    Train,
    best_config,
    command_line,
    enabled_buttons,
    offered_buttons,
    python_cell,
)
from nbtoolkit.panel.board import Board, set_html, show
from nbtoolkit.panel.form import FormState, Validation, set_trait
from nbtoolkit.search.slots import make_slots
from nbtoolkit.study.table import SweepTable
from nbtoolkit.text_table import counted, gib
from nbtoolkit.views.page import View, regions
from nbtoolkit.views.runs import list_runs
from nbtoolkit.views.state import State
from nbtoolkit.views.text import log_names
from nbtoolkit.views.trial_rows import columns, count_text, pages, rows

if TYPE_CHECKING:
    import ipywidgets

    from nbtoolkit.config.schema import Config


def place_text(validation: Validation) -> str:
    """Say on what a launch and a sweep will run; for a refused plan, the reason."""
    if validation.config is None:
        return "plan: something in Set up is wrong"
    config, hardware = validation.config, detect_hardware()
    parts = [f"{hardware.cpu_count} CPUs, {gib(hardware.memory)}"]
    if validation.sweep_config is not None:
        parts.insert(0, f"sweep: {counted(_slots(validation), 'slot')}")
    try:
        plan = make_plan(config, detect_host(), hardware).explain().splitlines()[0]
    except NbtoolkitError as error:
        return f"plan: refused: {error}"
    return " · ".join([plan.partition(", batch")[0], *parts])


def _slots(validation: Validation) -> int:
    assert validation.config is not None
    hardware, sweep_config = detect_hardware(), validation.sweep_config
    if sweep_config is None:
        return len(make_slots(validation.config, hardware).slots)
    placement, per_device = sweep_config.placement, sweep_config.trials_per_device
    return len(make_slots(validation.config, hardware, placement, per_device=per_device).slots)


class Drawing:
    """Draws on a board; used by the panel's thread alone.

    Args:
        board: the widgets.
        train: the panel's function; None: the one that ``task`` names.
        folds: the panel's folds.
        redraw: called by another thread when there is something new to draw.
    """

    def __init__(
        self, board: Board, train: Train | None, folds: Folds | None, redraw: Callable[[], object]
    ) -> None:
        self._board, self._train, self._folds, self._redraw = board, train, folds, redraw
        self._importance = ImportanceCache()
        self._planned: tuple[object, ...] = ()
        self._best_code: tuple[tuple[Path, int] | None, str] = (None, "")
        self._listed: list[tuple[Path, str]] = []

    def draw(
        self,
        state: State | None,
        form: FormState,
        validation: Validation,
        chosen: View,
        pressed: Collection[str],
    ) -> None:
        """Draw everything.

        Args:
            state: of the watched run; None: none is watched.
            form: the form's contents.
            validation: of the form.
            chosen: what the person chose to see.
            pressed: the buttons whose task is not done yet.
        """
        board = self._board
        self._draw_buttons(state, form, validation, pressed)
        parts = regions(state, chosen)
        set_html(board.strip, parts.get("strip", ""))
        for name, card in board.cards.items():
            set_html(card, parts.get(name, ""))
        self._draw_trials(state, chosen)
        self._draw_setup(state, form, validation)
        names = [("newest running", ""), *((name, name) for name in log_names(state))]
        _set_options(board.log, names, chosen.log)
        set_trait(board.best_code, "value", self._code_of_best(state))

    def list_runs(self, state: State | None, output_dir: str) -> None:
        """List the newest runs of a folder, with the watched one selected.

        The list is rewritten only when a run appears, ends or is renamed: a rewrite closes it while
        a person chooses.
        """
        runs = list_runs(output_dir)
        watched = "" if state is None else str(state.paths.folder)
        listed = [(entry.folder, entry.status + entry.name) for entry in runs]
        options = [("(none)", ""), *((entry.text, str(entry.folder)) for entry in runs)]
        if watched and watched not in [folder for _, folder in options]:
            options.insert(1, (Path(watched).name, watched))
            listed.append((Path(watched), ""))
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
        space, folds = bool(form.space.strip()), self._folds is not None
        offered = offered_buttons(state, space=space, folds=folds)
        enabled = enabled_buttons(offered, validation) - set(pressed)
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
        show(board.lower, is_sweep or bool(board.cards["workers"].value))
        if state is None or not is_sweep:
            return
        shown = columns(state)
        board.table.fill(shown, rows(state, chosen), chosen)
        set_html(board.count, f"<b>Trials</b> {escape(count_text(state, chosen))}")
        last = pages(state, chosen) - 1
        set_trait(board.previous, "disabled", chosen.page <= 0)
        set_trait(board.next, "disabled", chosen.page >= last)

    def _draw_setup(self, state: State | None, form: FormState, validation: Validation) -> None:
        """Draw what depends on the form; the plan reads the hardware, which takes time."""
        board, wanted = self._board, (validation.config, validation.sweep_config, state)
        board.setup.show(validation)
        if self._planned == wanted:
            return
        self._planned = wanted
        text = escape(place_text(validation))
        clip = "white-space:nowrap;overflow:hidden;text-overflow:ellipsis;line-height:28px"
        set_html(board.place, f'<div title="{text}" style="{clip};font-size:12px">{text}</div>')
        set_trait(board.code, "value", self._code_of_form(form, validation))

    def _code_of_form(self, form: FormState, validation: Validation) -> str:
        """Return the cell and the command line that start the same as the form."""
        if validation.config is None:
            return "# something in Set up is wrong"
        text, space = "", None
        if validation.sweep_config is not None:
            text, space = form.space, form.parsed_space()
        name = "" if self._train is None else getattr(self._train, "__name__", "train")
        task = None if self._train is None else task_name(self._train)
        cell = python_cell(form.overrides(), space, form.trials, train=name)
        shell = command_line(form.overrides(), text, form.trials, task=task)
        return f"{cell}\n\n# the same from a shell:\n{shell}"

    def _code_of_best(self, state: State | None) -> str:
        """Return a cell that trains once with the best settings, in full digits."""
        best = state.table.best if state and isinstance(state.table, SweepTable) else []
        key = (state.paths.folder, best[0].number) if state and len(best) == 1 else None
        if key != self._best_code[0]:
            text = ""
            with contextlib.suppress(NbtoolkitError):  # deleted, or of another version
                config = None if state is None else best_config(state)
                name = getattr(self._train, "__name__", "")
                text = "" if config is None else python_cell(_changes(config), train=name)
            self._best_code = key, text
        return self._best_code[1]


def _changes(config: Config) -> dict[str, object]:
    return FormState(config).overrides()


def _set_options(
    dropdown: ipywidgets.Dropdown, options: list[tuple[str, str]], chosen: str
) -> None:
    """Replace the options of a list, if they differ, and select one."""
    if list(dropdown.options) != options:
        dropdown.options = options
    set_trait(dropdown, "value", chosen if chosen in [value for _, value in options] else "")
