"""Show a run or a search while it runs, as lines of text and as a progress view."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from html import escape
from typing import TYPE_CHECKING

from nbtoolkit.launcher.handle import RunHandle
from nbtoolkit.run.events import Event
from nbtoolkit.run.output import CellOutput, RunDisplay, Screen, choose_screen, find_display
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.search.sweep_result import TableLines
from nbtoolkit.views.page import page_html
from nbtoolkit.views.progress_display import (
    DisplayPlace,
    LineDisplay,
    ProgressDisplay,
    TerminalBar,
    mime_bundle,
    running_cell,
)
from nbtoolkit.views.state import State, read_state
from nbtoolkit.views.sweep_cards import IMPORTANCES

if TYPE_CHECKING:
    import ipywidgets

_WIDGET_DELAY = 0.5  # seconds: what has ended by then needs no widgets
_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

# --- the functions that nbtoolkit.run.output.displays() finds here ---


def show(
    lines: CellOutput | TableLines,
    paths: RunPaths,
    screen: Screen,
    *,
    deadline: float | None = None,
    folds: int | None = None,
) -> LiveView:
    """Show lines and progress of a run, a sweep or a cross-validation.

    Args:
        lines: shows rank 0's lines, or the notes of a search; where nothing else is drawn, also
            each trial or fold that ends.
        paths: the folder.
        screen: where and how it is shown.
        deadline: unix seconds at which a sweep ends at the latest; None: no limit.
        folds: the number of folds of a cross-validation; None: unknown.
    """
    make_state = partial(State, paths, deadline=deadline, folds=folds)
    display: ProgressDisplay | None = None
    match screen.shape:
        case "widgets" | "html" as shape:
            display = ThreadDisplay(make_state, widgets=shape == "widgets")
        case "bar":
            display = TerminalBar(make_state)
            lines.redirect(display.write)
        case "minutes":
            display = LineDisplay(make_state, lines.say, DisplayPlace().put)
        case "lines" if isinstance(lines, CellOutput):
            display = LineDisplay(make_state, lines.say)
    return LiveView(lines, display, needs_wait=not isinstance(display, ThreadDisplay))


def show_handle(paths: RunPaths, shown: RunDisplay | None) -> None:
    """Show a handle that is a cell's value, live where there are widgets.

    Args:
        paths: its folder.
        shown: its own view; nothing is shown twice in one cell.

    Raises:
        NotImplementedError: there are no widgets; IPython then shows the static HTML.
    """
    screen = choose_screen("auto", find_display())
    if screen.shape != "widgets":
        raise NotImplementedError(screen.reason)
    if isinstance(shown, LiveView) and shown.cell == running_cell():
        return
    ThreadDisplay(partial(State, paths), widgets=True).open(waits=False)


def static(paths: RunPaths) -> str:
    """Render the current state of a folder as HTML."""
    return page_html(read_state(paths.folder))


# --- lines and progress ---


class LiveView:
    """Shows lines and progress; an error in the progress display ends only that display.

    Args:
        lines: shows the lines.
        display: shows the progress; None: nothing is drawn.
        needs_wait: whether only a thread that waits can draw it.

    Attributes:
        cell: the number of the cell that shows it; None: none does yet.
    """

    def __init__(
        self, lines: RunDisplay, display: ProgressDisplay | None, *, needs_wait: bool
    ) -> None:
        self._lines, self._display, self._needs_wait = lines, display, needs_wait
        self._open = False
        self.cell: int | None = None

    def open(self, *, waits: bool) -> None:
        """Start to show; does nothing when called again."""
        if self._open or (self._needs_wait and not waits):
            return
        self._open = True
        self.cell = running_cell()
        self._draw(lambda display: display.open(waits=waits))

    def event(self, event: Event) -> None:
        """Show what an event says to the user."""
        self._lines.event(event)

    def say(self, text: str) -> None:
        """Show a line of the toolkit's own."""
        self._lines.say(text)

    def pump(self) -> None:
        """Show what is new."""
        self._lines.pump()
        self._draw(lambda display: display.pump())

    def close(self) -> None:
        """Show the rest; the run has ended."""
        self._lines.close()
        self._draw(lambda display: display.close())
        self._display = None

    def _draw(self, draw: Callable[[ProgressDisplay], None]) -> None:
        if self._display is None or not self._open:
            return
        try:
            draw(self._display)
        except Exception as error:
            self._display = None
            self._lines.say(_failure(error))


def _failure(error: Exception) -> str:
    return f"the live view ended ({type(error).__name__}: {error})"


# --- a thread that draws ---


class ThreadDisplay(ProgressDisplay):
    """A live view in a cell, drawn by a thread of its own: the page, and a button that stops.

    The thread only reads the folder. So the view is live while the cell waits, after it has ended,
    and while other cells run. Updates of a widget, and of an output that has an id, reach it from
    any thread.

    Args:
        make_state: reads the folder for the first time.
        widgets: whether there are widgets; without, the output is replaced, and has no button.
    """

    def __init__(self, make_state: Callable[[], State], *, widgets: bool) -> None:
        super().__init__(make_state)
        self._widgets = widgets
        self._drawing = threading.Lock()  # the waiting thread and ours both see the end
        self._closed = threading.Event()
        self._box: ipywidgets.VBox | None = None

    def open(self, *, waits: bool) -> None:
        """Show it in this cell, and start the thread.

        Args:
            waits: whether the cell waits. There is no stop button then: depending on ipykernel's
                version, a click arrives only after the cell; an interrupt of the kernel also stops.
        """
        super().open(waits=waits)
        self._state.refresh()
        self._stoppable = not waits
        self._place = DisplayPlace()
        self._place.put(mime_bundle(self._state, quick=True))
        # A daemon: the kernel's exit does not wait for a view.
        threading.Thread(target=self._run, name="nbtoolkit-view", daemon=True).start()

    def pump(self) -> None:
        """Do nothing: the thread draws."""

    def close(self) -> None:
        """Leave static HTML in the cell, which needs no widgets, no kernel and no trust."""
        with self._drawing:
            if self._closed.is_set():
                return
            self._closed.set()
            self._state.refresh()
            bundle = mime_bundle(self._state, quick=True)
            # A front end may keep the output of a past cell; its widget then shows the end.
            self._show(bundle["text/html"])
            self._place.put(bundle)
            for widget in () if self._box is None else (*self._box.children, self._box):
                if hasattr(widget, "style"):
                    widget.style.close()
                widget.layout.close()
                widget.close()
        if IMPORTANCES.due(self._state):  # takes seconds, for which the cell does not wait
            whole = threading.Thread(target=self._put_whole, name="nbtoolkit-view", daemon=True)
            whole.start()

    def _put_whole(self) -> None:
        with contextlib.suppress(Exception):  # the kernel is exiting, or the output is gone
            self._place.put(mime_bundle(self._state))

    def _run(self) -> None:
        """Draw until it has ended; an error is shown and does not affect the run."""
        try:
            if self._closed.wait(_WIDGET_DELAY):
                return
            while self._draw_next():
                self._closed.wait(self._throttle.seconds)
            self.close()
        except Exception as error:
            with self._drawing:
                self._closed.set()
                with contextlib.suppress(Exception):  # the kernel is exiting, or the output is gone
                    text = _failure(error)
                    self._place.put({"text/plain": text, "text/html": f"<p>{escape(text)}</p>"})

    def _draw_next(self) -> bool:
        """Draw; returns whether there will be something to draw again."""
        with self._drawing:
            if self._closed.is_set():
                return False
            with self._throttle.drawing():
                self._state.refresh()
                bundle = mime_bundle(self._state, quick=True)
                self._show(bundle["text/html"])
            if not self._widgets:
                self._place.put(bundle)
            elif self._box is None and self._state.live:
                self._box = self._make_box(bundle["text/html"])
                model = {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}
                self._place.put({**bundle, _WIDGET_VIEW: model})
            return not self._state.over

    def _make_box(self, html: str) -> ipywidgets.VBox:
        import ipywidgets

        page, tooltip = ipywidgets.HTML(html), "All ranks stop at their next report"
        if not self._stoppable:
            return ipywidgets.VBox([page])
        button = ipywidgets.Button(description="Stop", icon="stop", tooltip=tooltip)
        button.on_click(self._stop)
        return ipywidgets.VBox([page, button])

    def _show(self, html: str) -> None:
        """Draw, if there are widgets; the button is there while the run is live."""
        if self._box is None:
            return
        page, *buttons = self._box.children
        page.value = html  # ipywidgets sends it only if it has changed
        for button in buttons:
            button.layout.display = None if self._state.live else "none"

    def _stop(self, button: ipywidgets.Button) -> None:
        """Request the stop; called in the kernel's main thread or in a subshell's."""
        button.disabled, button.description = True, "Stopping"
        with contextlib.suppress(FileNotFoundError):  # the folder was deleted: the view shows it
            RunHandle(self._state.paths).stop("the Stop button of the live view")
