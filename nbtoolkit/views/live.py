"""Show a run or a search while it goes on, as lines of text and a progress view."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from nbtoolkit.launcher.handle import RunHandle
from nbtoolkit.run.events import Event
from nbtoolkit.run.output import CellOutput, RunDisplay, Screen, choose_screen, find_display
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.search.sweep_result import TableLines
from nbtoolkit.views.picture import (
    CellPicture,
    DisplayPlace,
    Minutes,
    ProgressPicture,
    TerminalBar,
    Throttle,
    bundle_of,
    running_cell,
    state_of,
)
from nbtoolkit.views.state import State, read_state
from nbtoolkit.views.summary import summary

if TYPE_CHECKING:
    import ipywidgets


# The thread only reads the folder, so that the view is live while the cell waits, when it does not,
# and while other cells run. What a widget shows is changed by messages to the widget, which arrive
# where it is whatever thread sends them.


_PATIENCE = 0.5  # seconds: what is over by then needs no widgets
_VIEW = "application/vnd.jupyter.widget-view+json"


class WidgetPicture:
    """A live view in a cell.

    Args:
        make_state: what is known of the folder, when it is first looked at.
        patience: seconds until there are widgets.
    """

    def __init__(self, make_state: Callable[[], State], *, patience: float = _PATIENCE) -> None:
        self._make_state, self._patience = make_state, patience
        self._pace = Throttle()
        self._drawing = threading.Lock()  # who waits and the thread both see the end
        self._over = threading.Event()
        self._widgets: _Widgets | None = None

    def open(self, *, waits: bool) -> None:
        """Show it in this cell, and start the thread.

        Args:
            waits: whether the cell waits. A click would then mostly be heard when it is too late,
                by version of ipykernel, and an interrupt of the kernel does the same: no button.
        """
        self._state, self._place = self._make_state(), DisplayPlace()
        self._state.look()
        self._stoppable = not waits
        self._place.put(bundle_of(self._state))
        # A daemon: a kernel that ends waits for no view.
        threading.Thread(target=self._run, name="nbtoolkit-view", daemon=True).start()

    def pump(self) -> None:
        """Nothing: the thread draws."""

    def close(self) -> None:
        """Leave static HTML in the cell: it needs no widgets, no kernel and no trust."""
        with self._drawing:
            if self._over.is_set():
                return
            self._over.set()
            self._state.look()
            if self._widgets is not None:
                self._widgets.show(self._state)  # where an output of a past cell stays as it was
            self._place.put(bundle_of(self._state))
            if self._widgets is not None:
                self._widgets.close()

    def _run(self) -> None:
        """Draw until it has ended; what goes wrong is shown, and whatever runs goes on."""
        try:
            if self._over.wait(self._patience):
                return
            while self._draw():
                self._over.wait(self._pace.seconds)
            self.close()
        except Exception as error:
            with self._drawing:
                self._over.set()
                with contextlib.suppress(Exception):  # the kernel is going, or has no output left
                    told = f"the live view ended ({type(error).__name__}: {error})"
                    self._place.put({"text/plain": told, "text/html": f"<p>{escape(told)}</p>"})

    def _draw(self) -> bool:
        """Whether there will be something to draw again."""
        with self._drawing:
            if self._over.is_set():
                return False
            with self._pace.drawing():
                self._state.look()
                if self._widgets is not None:
                    self._widgets.show(self._state)
            if self._widgets is None and self._state.live:
                self._widgets = _Widgets(self._state, stoppable=self._stoppable)
                self._place.put({**bundle_of(self._state), _VIEW: self._widgets.view})
            return self._state.live


class _Widgets:
    """The picture as HTML, and a button that stops what runs."""

    def __init__(self, state: State, *, stoppable: bool) -> None:
        import ipywidgets

        self._paths = state.paths
        self._html = ipywidgets.HTML(summary(state))
        self._buttons: list[ipywidgets.Button] = []
        if stoppable:
            tip = "All leave at their next report"
            button = ipywidgets.Button(description="Stop", icon="stop", tooltip=tip)
            button.on_click(self._stop)
            self._buttons.append(button)
        self._box = ipywidgets.VBox([self._html, *self._buttons])

    @property
    def view(self) -> dict[str, Any]:
        """What a front end finds the widgets by."""
        return {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}

    def show(self, state: State) -> None:
        """Draw; where nothing runs there is nothing to stop."""
        self._html.value = summary(state)
        if not state.live:
            self._box.children = [self._html]

    def close(self) -> None:
        """End all widgets, in kernel and front end."""
        styled = [self._html, *self._buttons]
        for one in [self._box, *styled]:
            one.layout.close()
            one.close()
        for one in styled:
            one.style.close()

    def _stop(self, button: ipywidgets.Button) -> None:
        """Runs in the kernel's main thread or in a subshell's: it only leaves a file."""
        button.disabled, button.description = True, "Stopping"
        with contextlib.suppress(FileNotFoundError):  # the folder was deleted: the view says so
            RunHandle(self._paths).stop("the Stop button of the live view")


class Live:
    """Lines and a picture; a picture that cannot be drawn ends nothing but itself.

    Args:
        lines: what is written.
        picture: how far it is; None: nothing is drawn.
        needs_wait: whether only who waits can draw it.
    """

    def __init__(
        self, lines: RunDisplay, picture: ProgressPicture | None, *, needs_wait: bool
    ) -> None:
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
        cell.redirect(picture.write)
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
        lines.redirect(picture.write)
    return Live(lines, picture, needs_wait=screen.shape != "widgets")


def show_handle(paths: RunPaths, shown: RunDisplay | None) -> None:
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
