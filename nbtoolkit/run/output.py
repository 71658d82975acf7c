"""Show a run's notes and rank 0's lines in the cell, as whole lines, tagged, limited in number."""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from nbtoolkit.errors import LaunchError, MissingExtra
from nbtoolkit.host import in_kernel
from nbtoolkit.run.events import Event, NoteAdded, RunStarted, StopRequested
from nbtoolkit.run.paths import RunPaths

if TYPE_CHECKING:
    from nbtoolkit.environment.launch_plan import LaunchPlan
    from nbtoolkit.run.resume import ChosenRun


Display = Literal["auto", "widgets", "text", "off"]

# Shown of one run; a browser still scrolls through that, and papermill still saves it.
MAX_BYTES = 200_000
MAX_REST = 1 << 20  # characters kept of a line that does not end
MAX_LINE = 2_000  # characters shown of one line
_BAR_SECONDS = 1.0  # between two states of a progress bar that overwrites its line


class Shown(Protocol):
    """What a wait shows in the cell."""

    def open(self, *, waits: bool) -> None:
        """Begin to show; twice does no harm.

        Args:
            waits: whether somebody waits, and calls :meth:`pump`.
        """

    def event(self, event: Event) -> None:
        """Show what an event says to the user."""

    def say(self, text: str) -> None:
        """Show a line of our own."""

    def pump(self) -> None:
        """Show what is new."""

    def close(self) -> None:
        """Show what is left: the run has ended."""


class CellOutput:
    """Follows rank 0's log; prints in the thread that waits (ipykernel 7 loses other threads')."""

    def __init__(self, paths: RunPaths, display: Display, *, offset: int = 0) -> None:
        self._paths, self._on = paths, display != "off"
        self._offset, self._tag = offset, ""
        self._shown = 0
        self._hidden = 0
        # Characters of several bytes (a bar's blocks) may be half written when the file is read.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._bar = False
        self._bar_at = 0.0
        self._write: Callable[[str], object] | None = None

    def open(self, *, waits: bool) -> None:
        """Nothing: lines come as they are written."""

    def through(self, write: Callable[[str], object]) -> None:
        """Write lines by this from now on: a bar of ours is on the terminal's last line.

        Bars of rank 0 then come as lines, too, in their last state.
        """
        self._write = write

    def begin(self, plan: LaunchPlan, run: ChosenRun) -> None:
        """Show what is launched, and where."""
        self.say(f"{plan.explain().splitlines()[0]} -> {run.paths.folder}")
        if run.resumed:
            self.say(
                f"going on with the unfinished run {run.paths.run_id} (attempt {run.attempt}"
                f"{_other_ranks(plan, run)}; resume='never' starts anew)"
            )

    def event(self, event: Event) -> None:
        """Show what an event says to the user."""
        match event:
            case RunStarted():
                self._tag = "[rank 0] " if event.plan.get("processes", 1) > 1 else ""
            case NoteAdded():
                self.say(("warning: " if event.level == "warning" else "") + event.text)
            case StopRequested():
                self.say(f"stopping: {event.reason}")

    def say(self, text: str) -> None:
        """Show a line of our own, below a bar that has not ended its line."""
        start = "\n" if self._bar else ""
        self._bar = False
        self._print(f"{start}{text}\n")

    def pump(self) -> None:
        """Show what rank 0 has written since."""
        if not self._on:
            return
        while chunk := self._read():
            *lines, rest = (self._rest + self._decoder.decode(chunk)).split("\n")
            for line in lines:
                self._line(line)
            self._rest = _last_state(rest)[-MAX_REST:]
        self._show_bar()

    def close(self) -> None:
        """Show what is left, and say what was not shown."""
        self.pump()
        if self._rest:
            self._line(self._rest)
            self._rest = ""
        if self._hidden:
            text = f"... {self._hidden} more lines of rank 0 are in {self._paths.log(0)}\n"
            self._shown = 0
            self._print(text)
        if self._on:
            print(end="", flush=True)

    def _read(self) -> bytes:
        try:
            with self._paths.log(0).open("rb") as file:
                file.seek(self._offset)
                data = file.read(1 << 20)
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data

    def _line(self, line: str) -> None:
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
        """A bar that has not ended its line: show its last state now and then."""
        now = time.monotonic()
        if (
            self._write is not None
            or not self._rest.startswith("\r")
            or now - self._bar_at < _BAR_SECONDS
            or self._shown > MAX_BYTES
        ):
            return
        self._bar_at, self._bar = now, True
        self._print("\r" + self._tag + self._rest.strip("\r")[:MAX_LINE])

    def _print(self, text: str) -> None:
        if self._on:
            self._shown += len(text)
            (self._write or to_stdout)(text)


def to_stdout(text: str) -> None:
    """Write to stdout; nothing where a process without a console has none (it is None then)."""
    print(text, end="")


def _other_ranks(plan: LaunchPlan, run: ChosenRun) -> str:
    before = run.processes_before
    if before in (None, plan.processes):
        return ""
    made = "1 process" if before == 1 else f"{before} processes"
    return f"; made with {made}, going on with {plan.processes}"


def _last_state(text: str) -> str:
    """What is seen of a line that a progress bar has overwritten: from its last return on."""
    start = text.rstrip("\r").rfind("\r")
    return text[max(start, 0) :]


# Imports point one way: what draws imports what runs. What runs asks for the module by its name.


# --- screen ---
# How a run is shown where it was started, and why: widgets, a bar in a terminal, lines.


Shape = Literal["widgets", "html", "minutes", "bar", "lines", "off"]
"""``"html"``: a picture that the waiting cell writes anew; ``"minutes"``: a line a minute."""


@dataclass(frozen=True)
class DisplayFacts:
    """What there is to show something on.

    Attributes:
        kernel: whether this is a Jupyter kernel.
        front_end: whether a person's front end sent the cell; None: the kernel does not say.
        widgets: whether ipywidgets is installed.
        terminal: whether stderr is a terminal.
    """

    kernel: bool = False
    front_end: bool | None = None
    widgets: bool = False
    terminal: bool = False


@dataclass(frozen=True)
class Screen:
    """What was chosen, and why."""

    shape: Shape
    reason: str


def choose_screen(display: Display, around: DisplayFacts) -> Screen:
    """Choose how a run is shown; a pure function.

    Args:
        display: what the user asked for.
        around: what there is.

    Raises:
        LaunchError: widgets are asked for outside a notebook.
        MissingExtra: widgets are asked for, and ipywidgets is not installed.
    """
    if display == "off":
        return Screen("off", 'display="off"')
    if display == "text":
        return Screen("lines", 'display="text"')
    if display == "widgets":
        _check_widgets(around)
        return Screen("widgets", 'display="widgets"')
    if not around.kernel:
        if around.terminal:
            return Screen("bar", "a terminal")
        return Screen("lines", "neither a notebook nor a terminal")
    if around.front_end is False:
        return Screen("minutes", "a notebook that nobody looks at (papermill, nbclient, nbval)")
    if around.widgets:
        return Screen("widgets", "a notebook, and ipywidgets is installed")
    return Screen("html", "a notebook without ipywidgets (pip install 'nbtoolkit-torch[panel]')")


def _check_widgets(around: DisplayFacts) -> None:
    if not around.kernel:
        raise LaunchError(
            'display="widgets" was asked for outside a notebook',
            allowed='"auto", "text", "off"',
            do='leave display out: "auto" shows a bar in a terminal, and lines elsewhere',
        )
    if not around.widgets:
        raise MissingExtra(
            'display="widgets" needs ipywidgets', do="pip install 'nbtoolkit-torch[panel]'"
        )


def find_display() -> DisplayFacts:
    """What there is to show something on, here and now; imports nothing."""
    kernel = in_kernel(sys.modules)
    return DisplayFacts(
        kernel=kernel,
        front_end=_front_end() if kernel else None,
        widgets=find_spec("ipywidgets") is not None,
        terminal=sys.stderr is not None and sys.stderr.isatty(),
    )


def _front_end() -> bool | None:
    """Whether the running cell was sent by who could answer an ``input()``.

    nbclient (and so papermill and nbconvert) and nbval say in each request that they cannot;
    JupyterLab, Notebook, VS Code, Colab and Kaggle's editor say that they can.
    """
    kernel: Any = sys.modules["IPython"].get_ipython().kernel
    request = kernel.get_parent("shell") or {}
    answer = request.get("content", {}).get("allow_stdin")
    return answer if isinstance(answer, bool) else None


# --- displays ---


_MODULE = "nbtoolkit.views.live"


class Displays(Protocol):
    """The functions of the module that draws."""

    def show_run(self, cell: CellOutput, paths: RunPaths, screen: Screen) -> Shown:
        """What is shown of a run: rank 0's lines, and how far it is."""

    def show_search(
        self,
        lines: Shown,
        paths: RunPaths,
        screen: Screen,
        *,
        deadline: float | None = None,
        folds: int | None = None,
    ) -> Shown:
        """What is shown of a sweep or of folds: notes, and how far it is."""

    def show_handle(self, paths: RunPaths, shown: Shown | None) -> None:
        """Show a handle that is a cell's value."""

    def static(self, paths: RunPaths) -> str:
        """How far a run is now, as HTML."""


def displays() -> Displays:
    """The module that draws, imported when something is to be shown."""
    return cast("Displays", import_module(_MODULE))
