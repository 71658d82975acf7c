"""Update the panel's widgets from a folder's state, changed parts only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import NbtoolkitError
from nbtoolkit.host import detect_host
from nbtoolkit.panel.actions import equal
from nbtoolkit.panel.board import Board, Links, pressable
from nbtoolkit.panel.form import Checked, Draft
from nbtoolkit.run.paths import runs_in
from nbtoolkit.views.markup import beside, boxed, said
from nbtoolkit.views.state import State
from nbtoolkit.views.tabs import Importances, curves, devices, history, log, log_names
from nbtoolkit.views.trials import SortOrder, column_names, overview, pages, trials

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config


# --- the plan here ---
# What is here and what a launch would do, in words.


def plan_text(checked: Checked) -> str:
    """Host, devices and plan; where it is refused, the reason.

    Args:
        checked: of the form.
    """
    host, hardware = detect_host(), detect_hardware()
    lines = [f"host: {host.kind}", f"devices: {hardware.explain()}"]
    if checked.config is None:
        names = ", ".join(checked.errors)
        which = f": {names}" if names else ""
        return "\n".join([*lines, f"plan: something in the settings is wrong{which}"])
    try:
        plan = make_plan(checked.config, host, hardware).explain().splitlines()[0]
    except NbtoolkitError as error:
        plan = f"refused: {error}"
    return "\n".join([*lines, plan])


# --- drawing ---


_RUNS = 50  # of the newest that can be chosen


class Drawing:
    """Draws on a board; called by the clock's thread alone.

    Args:
        board: the widgets.
        train: the panel's function; None: the one that ``task`` names.
        links: its dashboards.
    """

    def __init__(self, board: Board, train: Callable[..., Any] | None, links: Links) -> None:
        self._board, self._train, self._links = board, train, links
        self._bars = Importances()
        self._planned: Config | None = None

    def draw(
        self,
        state: State | None,
        draft: Draft,
        checked: Checked,
        pressed: Collection[str],
        starting: bool,
    ) -> None:
        """Draw errors, plan, buttons and the page that is seen.

        Args:
            state: of what is watched; None: nothing is.
            draft: what stood in the form.
            checked: what it makes.
            pressed: the buttons whose task is not done yet.
            starting: whether a notebook is at work whose run is not there yet.
        """
        board = self._board
        board.form.show(checked)
        self._draw_plan(checked)
        can = pressable(state, checked, starting)
        for name, button in board.buttons.items():
            _set(button, "disabled", name not in can or name in pressed)
        self._offer_orders(state)
        self._offer_links(state, checked)
        _set(board.pages[board.page], "value", self._view(board.page, state, draft, checked))

    def offer_runs(self, state: State | None, output_dir: str) -> None:
        """List the newest runs of a folder, and show which one is watched."""
        found: list[tuple[str, str]] = []
        with contextlib.suppress(OSError):  # another user's folder; a launch would say so
            found = [(paths.run_id, str(paths.folder)) for paths in runs_in(output_dir)[:_RUNS]]
        here = "" if state is None else str(state.paths.folder)
        if here and here not in [folder for _, folder in found]:
            found.insert(0, (Path(here).name, here))
        options = (("(none)", ""), *found)
        if tuple(self._board.run.options) != options:
            self._board.run.options = options
        _set(self._board.run, "value", here)

    def _draw_plan(self, checked: Checked) -> None:
        """Only when the configuration is another: the hardware is asked for it."""
        if self._planned is None or self._planned != checked.config:
            _set(self._board.plan, "value", boxed(said(plan_text(checked))))
            self._planned = checked.config

    def _view(self, page: str, state: State | None, draft: Draft, checked: Checked) -> str:
        board = self._board
        order = SortOrder(board.sort.value, board.down.value, board.part.value)
        views: dict[str, Callable[[], str]] = {
            "Overview": lambda: overview(state),
            "Trials": lambda: trials(state, order),
            "Curves": lambda: beside(history(state), curves(state), self._bars.html(state)),
            "Devices": lambda: devices(state),
            "Log": lambda: log(log_names(state).get(board.log.value)),
            "Files": lambda: equal(draft, checked, self._train),
            "Links": lambda: self._links.html(state, checked),
        }
        return views[page]() if page in views else ""

    def _offer_orders(self, state: State | None) -> None:
        board = self._board
        _offer(board.sort, column_names(state))
        _set(board.part, "max", pages(state))
        if board.page == "Log":  # else nobody sees which there are
            _offer(board.log, list(log_names(state)))

    def _offer_links(self, state: State | None, checked: Checked) -> None:
        if self._board.page == "Links":  # else nobody can press them
            for name, button in self._board.links.items():
                _set(button, "disabled", bool(self._links.refused(name, state, checked)))


def _offer(choice: Any, names: list[str]) -> None:
    """Give a list other entries; what is chosen stays so where it is still among them."""
    if list(choice.options) != names:
        kept = choice.value
        choice.options = names
        choice.value = kept if kept in names else next(iter(names), None)


def _set(widget: Any, name: str, value: Any) -> None:
    """Set a widget's trait if it is another: each change is a message to the browser."""
    if getattr(widget, name) != value:
        setattr(widget, name, value)
