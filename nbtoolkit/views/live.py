"""Show a run or a search while it goes on, as lines of text and a progress view."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nbtoolkit.run.display import Screen, choose_screen, find_display
from nbtoolkit.run.events import Event
from nbtoolkit.run.output import CellOutput, Shown
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.search.handle import TableLines
from nbtoolkit.views.picture import (
    CellPicture,
    DisplayPlace,
    Minutes,
    ProgressPicture,
    TerminalBar,
    running_cell,
    state_of,
)
from nbtoolkit.views.state import State, read_state
from nbtoolkit.views.summary import summary
from nbtoolkit.views.widget import WidgetPicture


class Live:
    """Lines and a picture; a picture that cannot be drawn ends nothing but itself.

    Args:
        lines: what is written.
        picture: how far it is; None: nothing is drawn.
        needs_wait: whether only who waits can draw it.
    """

    def __init__(self, lines: Shown, picture: ProgressPicture | None, *, needs_wait: bool) -> None:
        self._lines, self._picture, self._needs_wait = lines, picture, needs_wait
        self._open = False
        self.cell: int | None = None
        """The cell that it is shown in; None: it is not yet."""

    def open(self, *, waits: bool) -> None:
        """Begin to show; twice does no harm."""
        if self._open or (self._needs_wait and not waits):
            return
        self._open, self.cell = True, running_cell()
        self._draw(lambda picture: picture.open(waits=waits))

    def event(self, event: Event) -> None:
        """Show what an event says to the user."""
        self._lines.event(event)

    def say(self, text: str) -> None:
        """Show a line of our own."""
        self._lines.say(text)

    def pump(self) -> None:
        """Show what is new."""
        self._lines.pump()
        self._draw(lambda picture: picture.pump())

    def close(self) -> None:
        """Show what is left, once: the run has ended."""
        self._lines.close()
        self._draw(lambda picture: picture.close())
        self._picture = None

    def _draw(self, draw: Callable[[ProgressPicture], None]) -> None:
        if self._picture is None or not self._open:
            return
        try:
            draw(self._picture)
        except Exception as error:
            self._picture = None
            self._lines.say(f"the live view ended ({type(error).__name__}: {error})")


def show_run(cell: CellOutput, paths: RunPaths, screen: Screen) -> Live:
    """What is shown of a run: rank 0's lines, and how far it is.

    Args:
        cell: shows the lines.
        paths: the run's folder.
        screen: what there is to show it on.
    """
    picture = _picture(screen, partial(State, paths), cell.say)
    if isinstance(picture, TerminalBar):
        cell.through(picture.write)
    return Live(cell, picture, needs_wait=screen.shape != "widgets")


def show_search(
    lines: TableLines,
    paths: RunPaths,
    screen: Screen,
    *,
    deadline: float | None = None,
    folds: int | None = None,
) -> Live:
    """What is shown of a sweep or of folds: notes, and how far it is.

    Args:
        lines: shows notes; where nothing else is drawn, each trial or fold that ends, too.
        paths: the search's folder.
        screen: what there is to show it on.
        deadline: unix seconds at which a sweep ends at the latest; None: no limit.
        folds: how many a cross-validation has; None: not known.
    """
    make_state = partial(state_of, paths, deadline=deadline, folds=folds)
    picture = None if screen.shape == "lines" else _picture(screen, make_state, lines.say)
    if isinstance(picture, TerminalBar):
        lines.through(picture.write)
    return Live(lines, picture, needs_wait=screen.shape != "widgets")


def show_handle(paths: RunPaths, shown: Shown | None) -> None:
    """Show a handle that is a cell's value: live where there are widgets.

    Args:
        paths: its folder.
        shown: what it shows anyway; nothing is shown twice in one cell.

    Raises:
        NotImplementedError: there are no widgets; IPython then takes the static picture.
    """
    screen = choose_screen("auto", find_display())
    if screen.shape != "widgets":
        raise NotImplementedError(screen.reason)
    if isinstance(shown, Live) and shown.cell == running_cell():
        return
    WidgetPicture(partial(read_state, paths.folder)).open(waits=False)


def static(paths: RunPaths) -> str:
    """How far something is now, as HTML."""
    return summary(read_state(paths.folder))


def _picture(
    screen: Screen, make_state: Callable[[], State], say: Callable[[str], None]
) -> ProgressPicture | None:
    if screen.shape == "widgets":
        return WidgetPicture(make_state)
    if screen.shape == "html":
        return CellPicture(make_state)
    if screen.shape == "bar":
        return TerminalBar(make_state)
    if screen.shape == "minutes":
        return Minutes(make_state, say, DisplayPlace().put)
    return Minutes(make_state, say) if screen.shape == "lines" else None
