"""Show a run's notes and rank 0's lines in the cell, and choose its display."""

from __future__ import annotations

import codecs
import contextlib
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, cast

from nbtoolkit.errors import LaunchError
from nbtoolkit.host import front_end, in_kernel
from nbtoolkit.run.events import Event, NoteAdded, RunStarted, StopRequested
from nbtoolkit.run.paths import RunPaths

if TYPE_CHECKING:
    from nbtoolkit.environment.launch_plan import LaunchPlan
    from nbtoolkit.run.resume import ChosenRun
    from nbtoolkit.search.study.importance import Importance
    from nbtoolkit.views.figure import Chart


Display = Literal["auto", "html", "text", "off"]

# Characters shown per run: browsers can still scroll it, and papermill can still save it.
MAX_BYTES = 200_000
MAX_REST = 1 << 20  # characters kept of an unfinished line
MAX_LINE = 2_000  # characters shown per line
# Around a rank's exception in its log. The cell does not show these lines: it raises the exception.
_ERROR_BEGINS = "--- the exception that ended this rank ---"
_ERROR_ENDS = "--- end of the exception ---"
_BAR_SECONDS = 1.0  # between two states of a progress bar that overwrites its line


def error_lines(printed: str) -> str:
    """Return a printed exception, as a rank's log has it."""
    return f"{_ERROR_BEGINS}\n{printed.rstrip()}\n{_ERROR_ENDS}\n"


class RunDisplay(Protocol):
    """Shows a run in the cell while a caller waits for it."""

    def open(self, *, waits: bool) -> None:
        """Start to show; may be called twice.

        Args:
            waits: whether the caller waits, and calls :meth:`pump`.
        """

    def event(self, event: Event) -> None:
        """Show an event, if it concerns the user."""

    def say(self, text: str) -> None:
        """Show a line of nbtoolkit's own."""

    def pump(self) -> None:
        """Show what is new."""

    def close(self) -> None:
        """Show the rest: the run has ended."""


class CellOutput:
    """Prints rank 0's log, in the waiting thread (ipykernel 7 loses other threads' output)."""

    def __init__(self, paths: RunPaths, display: Display, *, offset: int = 0) -> None:
        self._paths = paths
        self._on = display != "off"
        self._shows_log = self._on
        self._offset = offset
        self._tag = ""
        self._shown = 0
        self._hidden = 0
        # A character of several bytes (a bar's blocks) may be incomplete when the file is read.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._in_error = False
        self._bar = False
        self._bar_at = 0.0

    def open(self, *, waits: bool) -> None:
        """Do nothing: :meth:`pump` prints."""

    def leave_log(self) -> None:
        """Print no line of rank 0 from now on: the page in the cell has a card for them."""
        self._shows_log = False

    def begin(self, plan: LaunchPlan, run: ChosenRun, tracking_place: str) -> None:
        """Show the plan, the run's folder and where else the run is tracked."""
        self.say(f"{plan.explain().splitlines()[0]} -> {run.paths.folder}{tracking_place}")
        if run.resumed:
            self.say(
                f"resuming the unfinished run {run.paths.run_id} (attempt {run.attempt}"
                f"{_changed_ranks(plan, run)}; resume='never' starts a new run)"
            )

    def event(self, event: Event) -> None:
        """Show an event, if it concerns the user."""
        match event:
            case RunStarted():
                self._tag = "[rank 0] " if event.plan.get("processes", 1) > 1 else ""
            case NoteAdded():
                self.say(("warning: " if event.level == "warning" else "") + event.text)
            case StopRequested():
                self.say(f"stopping: {event.reason}")

    def say(self, text: str) -> None:
        """Show a line of nbtoolkit's own, below an unfinished progress bar."""
        start = "\n" if self._bar else ""
        self._bar = False
        self._print(f"{start}{text}\n")

    def pump(self) -> None:
        """Show rank 0's new lines."""
        if not self._shows_log:
            return
        while chunk := self._read():
            *lines, rest = (self._rest + self._decoder.decode(chunk)).split("\n")
            for line in lines:
                self._line(line)
            self._rest = _last_state(rest)[-MAX_REST:]
        self._show_bar()

    def close(self) -> None:
        """Show the rest of rank 0's lines, and the number of hidden ones."""
        self.pump()
        if self._rest:
            self._line(self._rest)
            self._rest = ""
        if self._hidden:
            text = f"... {self._hidden} more lines of rank 0 are in {self._paths.log(0)}\n"
            self._shown = 0
            self._print(text)
        if self._on:
            to_stdout("", flush=True)

    def _read(self) -> bytes:
        try:
            with self._paths.log(0).open("rb") as file:
                file.seek(self._offset)
                data = file.read(1 << 20)
        except OSError:  # there is no log yet, or its disk does not answer now
            return b""
        self._offset += len(data)
        return data

    def _line(self, line: str) -> None:
        if self._in_error:
            self._in_error = line != _ERROR_ENDS
            return
        # A progress bar may stand before it.
        line, begins, _ = line.partition(_ERROR_BEGINS)
        self._in_error = bool(begins)
        if begins and not line:
            return
        text = _last_state(line).strip("\r")
        if len(text) > MAX_LINE:
            text = f"{text[:MAX_LINE]}... ({len(text)} characters)"
        if self._shown > MAX_BYTES:
            self._hidden += 1
            return
        start = "\r" if self._bar else ""
        self._bar = False
        self._print(f"{start}{self._tag}{text}\n")

    def _show_bar(self) -> None:
        """Show the last state of an unfinished progress bar, at most once a second."""
        now = time.monotonic()
        if (
            not self._rest.startswith("\r")
            or now - self._bar_at < _BAR_SECONDS
            or self._shown > MAX_BYTES
        ):
            return
        self._bar_at = now
        self._bar = True
        self._print("\r" + self._tag + self._rest.strip("\r")[:MAX_LINE])

    def _print(self, text: str) -> None:
        if self._on:
            self._shown += len(text)
            to_stdout(text)


def to_stdout(text: str, *, flush: bool = False) -> None:
    """Write to stdout, with a question mark for each character that it cannot encode.

    What cannot be shown ends no run: stdout may be None, closed, or a pipe that nobody reads.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError, ValueError):
        print(text.encode(encoding, "replace").decode(encoding), end="", flush=flush)


def _changed_ranks(plan: LaunchPlan, run: ChosenRun) -> str:
    before = run.processes_before
    if before in (None, plan.processes):
        return ""
    return f"; {before} {'process' if before == 1 else 'processes'} before, {plan.processes} now"


def _last_state(text: str) -> str:
    """Return the visible part of a line that a progress bar overwrites: from its last return on."""
    start = text.rstrip("\r").rfind("\r")
    return text[max(start, 0) :]


@dataclass(frozen=True)
class DisplayFacts:
    """What this process can display on.

    Attributes:
        kernel: whether this is a Jupyter kernel.
        front_end: whether an interactive front end sent the cell; None: unknown.
    """

    kernel: bool = False
    front_end: bool | None = None


@dataclass(frozen=True)
class Screen:
    """The chosen display.

    Attributes:
        shape: a page in the cell, lines of text, or nothing.
        reason: for the choice.
        in_notebook: whether there is a cell that can store a page.
    """

    shape: Literal["html", "lines", "off"]
    reason: str
    in_notebook: bool = False


def choose_screen(display: Display, facts: DisplayFacts) -> Screen:
    """Choose how a run is shown; a pure function.

    Args:
        display: the user's choice.
        facts: what is available.

    Raises:
        LaunchError: a page outside a notebook.
    """
    if display == "off":
        return Screen("off", 'display="off"')
    if display == "text":
        return Screen("lines", 'display="text"', facts.kernel)
    if display == "html":
        if not facts.kernel:
            raise LaunchError(
                'display="html" was asked for outside a notebook',
                allowed='"auto", "text", "off"',
                do='omit display: "auto" shows lines here',
            )
        return Screen("html", 'display="html"', in_notebook=True)
    if not facts.kernel:
        return Screen("lines", "no notebook")
    if facts.front_end is False:
        reason = "a notebook run in the background (papermill, nbclient, nbval)"
        return Screen("lines", reason, in_notebook=True)
    return Screen("html", "a notebook", in_notebook=True)


def find_display() -> DisplayFacts:
    """Find out what this process can display on; imports nothing."""
    kernel = in_kernel(sys.modules)
    return DisplayFacts(kernel=kernel, front_end=front_end(sys.modules) if kernel else None)


class Displays(Protocol):
    """The functions of ``nbtoolkit.views.watcher``."""

    def show(
        self,
        lines: RunDisplay,
        paths: RunPaths,
        screen: Screen,
        *,
        deadline: float | None = None,
        folds: int | None = None,
    ) -> RunDisplay:
        """Show lines and progress of a run, a sweep or a cross-validation."""

    def show_handle(self, paths: RunPaths, shown: RunDisplay | None) -> None:
        """Show a handle that is a cell's value."""

    def static(self, paths: RunPaths) -> str:
        """Return a run's progress now, as HTML."""


def displays() -> Displays:
    """``nbtoolkit.views.watcher``, imported by name: imports point from views to run."""
    return cast("Displays", import_module("nbtoolkit.views.watcher"))


Curves: TypeAlias = Mapping[tuple[str, str], Mapping[str, list[tuple[float, float]]]]
"""Names of the two axes of a picture -> the name of each of its curves -> its points."""


class Charts(Protocol):
    """The functions of ``nbtoolkit.views.figure``."""

    def result_chart(self, paths: RunPaths, region: str) -> Chart:
        """Draw one region of a result's page."""

    def importance_chart(self, importance: Importance, metric: str) -> Chart:
        """Draw the importance of each parameter of a sweep."""

    def curves_chart(self, title: str, curves: Curves) -> Chart:
        """Draw curves below each other."""


def charts() -> Charts:
    """``nbtoolkit.views.figure``, imported by name: imports point from views to run."""
    return cast("Charts", import_module("nbtoolkit.views.figure"))
