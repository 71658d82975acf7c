"""Watch a folder in a thread, and show it in a cell: as a page that is replaced, or as lines."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nbtoolkit.cards import Card, Text, html
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
from nbtoolkit.views.page import page_html
from nbtoolkit.views.state import State, read_state
from nbtoolkit.views.text import summary_line

T = TypeVar("T")

SECONDS = 1.0
"""Between two looks at a folder."""

MINUTE = 60.0
"""Seconds between two lines where nobody watches."""

LONGEST = 30.0
"""Seconds between two looks, however large a sweep is."""

_VIEW_SHARE = 0.01  # of a core, which the ranks need


class Watcher:
    """A thread that looks at a folder again and again, and runs tasks between two looks.

    Callbacks of widgets arrive in the kernel's main thread or in a subshell's, depending on
    ipykernel's version; they only submit a task here and return. So no two tasks run at once, an
    interrupt of the kernel, which goes to its main thread, does not end the view, and a busy cell
    does not stop it.

    Args:
        look: called every second, and after each task.
        on_error: called with what ``look`` or a task raised.
        share: of a core, which the looks use at most.
        closed: the error of a task that is submitted after :meth:`close`.
    """

    def __init__(
        self,
        look: Callable[[], None],
        on_error: Callable[[BaseException], None],
        *,
        share: float,
        closed: Exception,
    ) -> None:
        self._look = look
        self._on_error = on_error
        self._share = share
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._closed = False
        self._lock = threading.Lock()
        self._error = closed
        # A daemon: the kernel's exit does not wait for it.
        self._thread = threading.Thread(target=self._loop, name="nbtoolkit-view", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether this thread calls."""
        return threading.current_thread() is self._thread

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Queue a task and return at once; after :meth:`close` it is refused."""
        future: Future[T] = Future()
        with self._lock:  # nothing would run a task that is queued behind the end
            if not self._closed:
                self._tasks.put(partial(self._run, task, future))
                return future
        future.set_exception(self._error)
        return future

    def call(self, task: Callable[[], T]) -> T:
        """Run a task between the others, or here after :meth:`close`; return its result."""
        if self.is_current or self._closed:
            return task()
        return self.submit(task).result()

    def close(self, *, wait: bool = True) -> None:
        """End the thread after the queued tasks; ``wait``: until it has ended."""
        with self._lock:
            self._closed = True
            self._tasks.put(None)
        if wait and not self.is_current:
            self._thread.join()

    def _loop(self) -> None:
        next_look = time.monotonic()
        while True:
            try:
                task = self._tasks.get(timeout=max(next_look - time.monotonic(), 0.0))
            except queue.Empty:
                before = time.thread_time()
                self._run(self._look, Future())
                pause = min((time.thread_time() - before) / self._share, LONGEST)
                next_look = time.monotonic() + max(SECONDS, pause)
                continue
            if task is None:
                return
            task()
            next_look = time.monotonic()

    def _run(self, task: Callable[[], T], future: Future[T]) -> None:
        """Run a task; any error, of a user's module or a full disk, is reported."""
        try:
            value = task()
        except BaseException as error:
            self._on_error(error)
            future.set_exception(error)
        else:
            future.set_result(value)


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


_shown_in: dict[Path, int | None] = {}
"""The cell that shows the page of a folder."""


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
        lines: shows rank 0's lines, or the notes of a search; where no page is shown, also each
            trial or fold that ends.
        paths: the folder.
        screen: where and how it is shown.
        deadline: unix seconds at which a sweep ends at the latest; None: no limit.
        folds: the number of folds of a cross-validation; None: unknown.
    """
    make_state = partial(State, paths, deadline=deadline, folds=folds)
    progress: PageDisplay | LineDisplay | None = None
    if screen.shape == "html":
        progress = PageDisplay(make_state)
        if isinstance(lines, CellOutput):
            lines.leave_log()
    elif screen.shape == "lines":
        progress = LineDisplay(make_state, lines.say, in_notebook=screen.in_notebook)
    return LiveView(lines, progress)


def show_handle(paths: RunPaths, shown: RunDisplay | None) -> None:
    """Show a handle that is a cell's value, live where a person watches.

    Args:
        paths: its folder.
        shown: its own view; nothing is shown twice in one cell.

    Raises:
        NotImplementedError: nobody watches; IPython then shows the page of now.
    """
    screen = choose_screen("auto", find_display())
    if screen.shape != "html":
        raise NotImplementedError(screen.reason)
    if isinstance(shown, LiveView) and shown.cell == running_cell():
        return
    PageDisplay(partial(State, paths)).open(waits=False)


def static(paths: RunPaths) -> str:
    """Return the page of a folder as it is now; a line where this cell shows the page already."""
    cell = running_cell()
    if cell is not None and _shown_in.get(paths.folder) == cell:
        state = read_state(paths.folder)
        return html([Card("", [Text(summary_line(state)), Text(str(paths.folder))], span=4)])
    return page_html(read_state(paths.folder))


def running_cell() -> int | None:
    """Return the number of the running cell; None: there is no kernel."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    return int(shell.execution_count) if hasattr(shell, "kernel") else None


class LiveView:
    """Shows lines and progress; an error in one of them ends this one alone.

    Args:
        lines: shows the lines.
        progress: shows the progress; None: nothing does.

    Attributes:
        cell: the number of the cell that shows it; None: none does yet.
    """

    def __init__(self, lines: RunDisplay, progress: PageDisplay | LineDisplay | None) -> None:
        self._lines: RunDisplay | None = lines
        self._progress = progress
        self._open = False
        self.cell: int | None = None

    def open(self, *, waits: bool) -> None:
        """Start to show; does nothing when called again."""
        # Only a thread that waits writes lines.
        if self._open or not (waits or isinstance(self._progress, PageDisplay)):
            return
        self._open = True
        self.cell = running_cell()
        self._draw(lambda progress: progress.open(waits=waits))

    def event(self, event: Event) -> None:
        """Show what an event says to the user."""
        self._print(lambda lines: lines.event(event))

    def say(self, text: str) -> None:
        """Show a line of the toolkit's own."""
        self._print(lambda lines: lines.say(text))

    def pump(self) -> None:
        """Show what is new."""
        self._print(lambda lines: lines.pump())
        self._draw(lambda progress: progress.pump())

    def close(self) -> None:
        """Show the rest; the run has ended."""
        self._print(lambda lines: lines.close())
        self._draw(lambda progress: progress.close())
        self._progress = None

    def _print(self, act: Callable[[RunDisplay], None]) -> None:
        if self._lines is None:
            return
        try:
            act(self._lines)
        except Exception as error:
            self._lines = None
            to_stdout(f"{_failure(error)}\n")

    def _draw(self, draw: Callable[[PageDisplay | LineDisplay], None]) -> None:
        if self._progress is None or not self._open:
            return
        try:
            draw(self._progress)
        except Exception as error:
            self._progress = None
            self.say(_failure(error))


def _failure(error: BaseException) -> str:
    return f"the live view ended ({type(error).__name__}: {error})"


class LineDisplay:
    """A line per minute and one at the end, where a notebook gets the page, too.

    Args:
        make_state: reads the folder for the first time.
        say: shows a line.
        in_notebook: whether this is a kernel, although nobody watches it.
        seconds: between two lines.
    """

    def __init__(
        self,
        make_state: Callable[[], State],
        say: Callable[[str], None],
        *,
        in_notebook: bool,
        seconds: float = MINUTE,
    ) -> None:
        self._make_state = make_state
        self._say = say
        self._seconds = seconds
        self._in_notebook = in_notebook

    def open(self, *, waits: bool) -> None:
        """Start to show it; the thread that waits calls :meth:`pump`."""
        self._state = self._make_state()
        self._next = time.monotonic() + self._seconds

    def pump(self) -> None:
        """Write a line if it is time."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._seconds
            self._write()

    def close(self) -> None:
        """Show how it ended."""
        self._write()
        # The page of a run without metrics has no more than the line.
        if self._in_notebook and (self._state.table is not None or self._state.points()):
            DisplayPlace().put(_bundle(self._state))
            _shown_in[self._state.paths.folder] = running_cell()

    def _write(self) -> None:
        self._state.refresh()
        self._say(summary_line(self._state))


class PageDisplay:
    """The page of a folder in an output of the cell, which a thread replaces.

    The thread only reads the folder. So the page is live while the cell waits, after it has ended,
    and while other cells run.

    Args:
        make_state: reads the folder for the first time.
    """

    def __init__(self, make_state: Callable[[], State]) -> None:
        self._make_state = make_state
        self._ended = threading.Event()

    def open(self, *, waits: bool) -> None:
        """Show it in this cell, and start the thread."""
        self._state = self._make_state()
        self._state.refresh()
        self._place = DisplayPlace()
        self._place.put(_bundle(self._state, without=["importance"]))
        _shown_in[self._state.paths.folder] = running_cell()
        closed = RuntimeError("the live view has ended")
        self._watcher = Watcher(self._look, self._fail, share=_VIEW_SHARE, closed=closed)

    def pump(self) -> None:
        """Do nothing: the thread draws."""

    def close(self) -> None:
        """Show how it ended, before the cell ends; the importance of parameters comes later."""
        self._watcher.call(self._draw)
        self._finish()

    def _look(self) -> None:
        self._draw()
        if self._state.over:
            self._finish()

    def _draw(self) -> None:
        if not self._ended.is_set():
            self._state.refresh()
            self._place.put(_bundle(self._state, without=["importance"]))

    def _finish(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        if self._state.kind == "sweep":
            self._watcher.submit(lambda: self._place.put(_bundle(self._state)))
        self._watcher.close(wait=False)

    def _fail(self, error: BaseException) -> None:
        """Show an error, which does not affect the run."""
        self._ended.set()
        with contextlib.suppress(Exception):  # the kernel is exiting, or the output is gone
            self._place.put({"text/plain": _failure(error)})
        self._watcher.close(wait=False)


def _bundle(state: State, *, without: Sequence[str] = ()) -> dict[str, str]:
    """Return what a cell stores: the page, and text for front ends that show no HTML."""
    page = page_html(state, without=without)
    return {"text/plain": summary_line(state), "text/html": page}
