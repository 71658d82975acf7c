"""Update the panel's widgets from a folder's state, changed parts only."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import NbtoolkitError
from nbtoolkit.host import detect_host
from nbtoolkit.panel.actions import Train, equivalent_code
from nbtoolkit.panel.board import Board, Links, enabled_buttons
from nbtoolkit.panel.form import FormState, Validation, set_trait
from nbtoolkit.run.paths import runs_in
from nbtoolkit.views.markup import paragraph, side_by_side, view
from nbtoolkit.views.state import State
from nbtoolkit.views.tabs import ImportanceCache, curves, devices, history, log, log_names
from nbtoolkit.views.trials import SortOrder, column_names, overview, pages, trials

if TYPE_CHECKING:
    import ipywidgets

    from nbtoolkit.config.schema import Config

_RUNS = 50  # the newest runs that can be chosen


def plan_text(validation: Validation) -> str:
    """Format host, devices and launch plan; for a refused plan, the reason."""
    host, hardware = detect_host(), detect_hardware()
    lines = [f"host: {host.kind}", f"devices: {hardware.explain()}"]
    if validation.config is None:
        names = ", ".join(validation.errors)
        which = f": {names}" if names else ""
        return "\n".join([*lines, f"plan: something in the settings is wrong{which}"])
    try:
        plan = make_plan(validation.config, host, hardware).explain().splitlines()[0]
    except NbtoolkitError as error:
        plan = f"refused: {error}"
    return "\n".join([*lines, plan])


class Drawing:
    """Draws on a board; used by the panel's thread alone.

    Args:
        board: the widgets.
        train: the panel's function; None: the one that ``task`` names.
        links: its dashboards.
    """

    def __init__(self, board: Board, train: Train | None, links: Links) -> None:
        self._board, self._train, self._links = board, train, links
        self._importances = ImportanceCache()
        self._planned: Config | None = None

    def draw(
        self,
        state: State | None,
        form: FormState,
        validation: Validation,
        pressed: Collection[str],
        starting: bool,
    ) -> None:
        """Draw errors, plan, buttons and the page that is shown.

        Args:
            state: of the watched run; None: none is watched.
            form: the form's contents.
            validation: of the form.
            pressed: the buttons whose task is not done yet.
            starting: whether a notebook was started whose run does not exist yet.
        """
        board = self._board
        board.form.show(validation)
        self._draw_plan(validation)
        enabled = enabled_buttons(state, validation, starting)
        for name, button in board.buttons.items():
            set_trait(button, "disabled", name not in enabled or name in pressed)
        self._draw_controls(state, validation)
        page = self._page(board.page, state, form, validation)
        set_trait(board.pages[board.page], "value", page)

    def list_runs(self, state: State | None, output_dir: str) -> None:
        """List the newest runs of a folder, with the watched one selected."""
        runs: list[tuple[str, str]] = []
        with contextlib.suppress(OSError):  # another user's folder; a launch reports that
            runs = [(paths.run_id, str(paths.folder)) for paths in runs_in(output_dir)[:_RUNS]]
        watched = "" if state is None else str(state.paths.folder)
        if watched and watched not in [folder for _, folder in runs]:
            runs.insert(0, (Path(watched).name, watched))
        set_trait(self._board.run, "options", (("(none)", ""), *runs))
        set_trait(self._board.run, "value", watched)

    def _draw_plan(self, validation: Validation) -> None:
        """Draw the plan for a changed configuration; it reads the hardware, which takes time."""
        if self._planned is None or self._planned != validation.config:
            set_trait(self._board.plan, "value", view(paragraph(plan_text(validation))))
            self._planned = validation.config

    def _page(self, page: str, state: State | None, form: FormState, validation: Validation) -> str:
        board = self._board
        match page:
            case "Overview":
                return overview(state)
            case "Trials":
                return trials(
                    state, SortOrder(board.sort.value, board.down.value, board.part.value)
                )
            case "Curves":
                bars = self._importances.html(state)
                return side_by_side(history(state), curves(state), bars)
            case "Devices":
                return devices(state)
            case "Log":
                return log(log_names(state).get(board.log.value))
            case "Files":
                return equivalent_code(form, validation, self._train)
            case "Links":
                return self._links.html(state, validation)
            case _:  # widgets alone
                return ""

    def _draw_controls(self, state: State | None, validation: Validation) -> None:
        """Update the controls above the views; those of logs and links while they are shown."""
        board = self._board
        _set_options(board.sort, column_names(state))
        set_trait(board.part, "max", pages(state))
        if board.page == "Log":
            _set_options(board.log, list(log_names(state)))
        elif board.page == "Links":
            for name, button in board.links.items():
                reason = self._links.unavailable(name, state, validation)
                set_trait(button, "disabled", bool(reason))


def _set_options(dropdown: ipywidgets.Dropdown, names: list[str]) -> None:
    """Replace the options of a list; the selected one stays if it is among the new ones."""
    if list(dropdown.options) != names:
        selected = dropdown.value
        dropdown.options = names
        dropdown.value = selected if selected in names else next(iter(names), None)
