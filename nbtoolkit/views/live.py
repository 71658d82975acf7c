"""Show a run or a search while it runs, as lines of text and as a progress view."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from nbtoolkit.launcher.run_handle import RunHandle
from nbtoolkit.run.events import Event
from nbtoolkit.run.output import (
    CellOutput,
    RunDisplay,
    Screen,
    choose_screen,
    find_display,
    to_stdout,
)
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.search.sweep_result import TableLines
from nbtoolkit.views.chart import as_images
from nbtoolkit.views.markup import grid, in_widget
from nbtoolkit.views.page import page_html, regions
from nbtoolkit.views.state import State, read_state
from nbtoolkit.views.sweep_cards import IMPORTANCES
from nbtoolkit.views.text import summary_line

if TYPE_CHECKING:
    import ipywidgets
    from tqdm import tqdm

SECONDS = 1.0
"""Between two looks at a folder."""

MINUTE = 60.0
"""Seconds between two lines where nobody watches."""

_BAR_SECONDS = 0.5
_CPU_SHARE = 0.01  # of one core
_LONGEST = 30.0  # seconds between two drawings, however large a sweep is
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
            if isinstance(lines, CellOutput):
                lines.leave_log()
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
    return as_images(page_html(read_state(paths.folder)))


# --- lines and progress ---


class LiveView:
    """Shows lines and progress; an error in one of them ends this one alone.

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
        self._lines: RunDisplay | None = lines
        self._display, self._needs_wait = display, needs_wait
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
        self._print(lambda lines: lines.event(event))

    def say(self, text: str) -> None:
        """Show a line of the toolkit's own."""
        self._print(lambda lines: lines.say(text))

    def pump(self) -> None:
        """Show what is new."""
        self._print(lambda lines: lines.pump())
        self._draw(lambda display: display.pump())

    def close(self) -> None:
        """Show the rest; the run has ended."""
        self._print(lambda lines: lines.close())
        self._draw(lambda display: display.close())
        self._display = None

    def _print(self, act: Callable[[RunDisplay], None]) -> None:
        if self._lines is None:
            return
        try:
            act(self._lines)
        except Exception as error:
            self._lines = None
            to_stdout(f"{_failure(error)}\n")

    def _draw(self, draw: Callable[[ProgressDisplay], None]) -> None:
        if self._display is None or not self._open:
            return
        try:
            draw(self._display)
        except Exception as error:
            self._display = None
            self.say(_failure(error))


def _failure(error: Exception) -> str:
    return f"the live view ended ({type(error).__name__}: {error})"


# --- what is drawn, how often and where ---


class Throttle:
    """Limits how often a view is drawn: once per ``seconds``, and at most 1 % of a core.

    Args:
        seconds: the shortest time between two drawings.
        clock: monotonic seconds.
        cost: seconds of CPU that this thread has used.
    """

    def __init__(
        self,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
        cost: Callable[[], float] = time.thread_time,
    ) -> None:
        self._shortest, self._clock, self._cost = seconds, clock, cost
        self._next = clock() + seconds
        self.seconds = seconds
        """Between the last drawing and the next."""

    @property
    def due(self) -> bool:
        """Whether it is time for the next drawing."""
        return self._clock() >= self._next

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Measure a drawing; a more expensive one delays the next."""
        before = self._cost()
        try:
            yield
        finally:
            pause = (self._cost() - before) / _CPU_SHARE
            self.seconds = max(self._shortest, min(pause, _LONGEST))
            self._next = self._clock() + self.seconds


class DisplayPlace:
    """One output of the running cell, which any thread can replace.

    Since ipykernel 7, what a thread displays goes to whatever cell runs then; an update of an
    output that has an id goes to that output.
    """

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._shown: Mapping[str, object] | None = None

    def put(self, bundle: Mapping[str, object]) -> None:
        """Show a MIME bundle here, if it is new; the cell's own thread makes the first call."""
        from IPython.display import display

        update = self._shown is not None
        if bundle != self._shown:
            self._shown = bundle
            display(dict(bundle), raw=True, display_id=self._id, update=update)  # type: ignore[no-untyped-call] # not annotated


def running_cell() -> int | None:
    """Return the number of the running cell; None: there is no kernel."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    return int(shell.execution_count) if hasattr(shell, "kernel") else None


def mime_bundle(state: State, page: str) -> dict[str, str]:
    """Return what a cell stores: the page, and text for front ends that show no HTML."""
    return {"text/plain": summary_line(state), "text/html": as_images(page)}


def quick_page(state: State) -> str:
    """Render the page without the importance of parameters, unless that is known."""
    return grid(*regions(state).values())


class ProgressDisplay:
    """Shows the progress of something until it has ended; the waiting thread draws it.

    Args:
        make_state: reads the folder for the first time.
        seconds: the shortest time between two drawings.
    """

    def __init__(self, make_state: Callable[[], State], seconds: float = SECONDS) -> None:
        self._make_state = make_state
        self._throttle = Throttle(seconds)

    def open(self, *, waits: bool) -> None:
        """Start to show it; called once, by the cell's thread.

        Args:
            waits: whether a thread waits for the end and calls :meth:`pump`.
        """
        self._state = self._make_state()

    def pump(self) -> None:
        """Draw if it is time; called ten times a second by the thread that waits."""
        if self._throttle.due:
            with self._throttle.drawing():
                self._refresh()

    def close(self) -> None:
        """Draw how it ended."""
        self._refresh()

    def _refresh(self) -> None:
        self._state.refresh()
        self._draw()

    def _draw(self) -> None:
        raise NotImplementedError


# --- drawn by the thread that waits ---


class LineDisplay(ProgressDisplay):
    """A line per minute and one at the end, where a saved notebook gets an HTML output, too.

    Args:
        make_state: reads the folder for the first time.
        say: shows a line.
        put: shows the MIME bundle of the last state; None: there is no notebook.
        seconds: between two lines.
    """

    def __init__(
        self,
        make_state: Callable[[], State],
        say: Callable[[str], None],
        put: Callable[[Mapping[str, object]], None] | None = None,
        *,
        seconds: float = MINUTE,
    ) -> None:
        super().__init__(make_state, seconds)
        self._say, self._put = say, put

    def close(self) -> None:
        """Show how it ended; as HTML, too, where that has more than the line."""
        self._refresh()
        if self._put is not None and (self._state.table is not None or self._state.points()):
            self._put(mime_bundle(self._state, page_html(self._state)))

    def _draw(self) -> None:
        self._say(summary_line(self._state))


class TerminalBar(ProgressDisplay):
    """A bar on the last line of a terminal, with the time left and the newest metrics.

    Args:
        make_state: reads the folder for the first time.
    """

    def __init__(self, make_state: Callable[[], State]) -> None:
        super().__init__(make_state, _BAR_SECONDS)

    def open(self, *, waits: bool) -> None:
        """Draw the bar, with what earlier sessions have done."""
        super().open(waits=waits)
        self._bar = _make_bar()
        self._refresh()

    def close(self) -> None:
        """Remove the bar, and write how it ended."""
        self._bar.close()
        self._state.refresh()
        self.write(summary_line(self._state) + "\n")

    def _draw(self) -> None:
        share = self._state.share()
        self._bar.n = share or 0.0
        self._bar.total = None if share is None else 1.0
        self._bar.set_description_str(summary_line(self._state))

    @staticmethod
    def write(text: str) -> None:
        """Write above the bar."""
        from tqdm import tqdm

        with tqdm.external_write_mode(file=sys.stdout):
            to_stdout(text)


def _make_bar() -> tqdm:
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc] # not annotated
        monitor_interval = 0  # no thread that redraws bars which nobody updates

    bar_format = "{percentage:3.0f}%|{bar:20}| {desc}"
    return Bar(total=1.0, bar_format=bar_format, dynamic_ncols=True, leave=False, file=sys.stderr)


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
        self._place.put(mime_bundle(self._state, quick_page(self._state)))
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
            page = quick_page(self._state)
            # A front end may keep the output of a past cell; its widget then shows the end.
            self._show(page)
            self._place.put(mime_bundle(self._state, page))
            for widget in () if self._box is None else (*self._box.children, self._box):
                if hasattr(widget, "style"):
                    widget.style.close()
                widget.layout.close()
                widget.close()
        IMPORTANCES.compute_later(self._state, self._put_whole)

    def _put_whole(self) -> None:
        with contextlib.suppress(Exception):  # the kernel is exiting, or the output is gone
            self._place.put(mime_bundle(self._state, page_html(self._state)))

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
                page = quick_page(self._state)
                self._show(page)
            if not self._widgets:
                self._place.put(mime_bundle(self._state, page))
            elif self._box is None and self._state.live:
                self._box = self._make_box(page)
                model = {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}
                self._place.put({**mime_bundle(self._state, page), _WIDGET_VIEW: model})
            return not self._state.over

    def _make_box(self, html: str) -> ipywidgets.VBox:
        import ipywidgets

        page, tooltip = ipywidgets.HTML(in_widget(html)), "All ranks stop at their next report"
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
        page.value = in_widget(html)  # ipywidgets sends it only if it has changed
        for button in buttons:
            button.layout.display = None if self._state.live else "none"

    def _stop(self, button: ipywidgets.Button) -> None:
        """Request the stop; called in the kernel's main thread or in a subshell's."""
        button.disabled, button.description = True, "Stopping"
        with contextlib.suppress(FileNotFoundError):  # the folder was deleted: the view shows it
            RunHandle(self._state.paths).stop("the Stop button of the live view")
