"""Render a folder's progress for a cell or a terminal, at most once a second."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from nbtoolkit.crossval.cv_result import FoldTable
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.study.table import SweepTable
from nbtoolkit.views.state import State
from nbtoolkit.views.summary import summary, summary_line

# --- how often ---
# How often a view is drawn: about once a second, and never for above 1% of a core.


SECONDS = 1.0
"""Between two looks at a folder."""

_SHARE = 0.01  # of one core
_LONGEST = 30.0  # seconds: however large a sweep becomes


class Throttle:
    """When to draw next, by what drawing costs.

    Args:
        seconds: the shortest time between two.
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
        """Whether it is time."""
        return self._clock() >= self._next

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Around each drawing."""
        before = self._cost()
        try:
            yield
        finally:
            dear = (self._cost() - before) / _SHARE
            self.seconds = max(self._shortest, min(dear, _LONGEST))
            self._next = self._clock() + self.seconds


# --- display place ---
# An output of a cell that is written anew, from any thread; front ends find it by its id.
#
# Since ipykernel 7 what a thread prints or displays goes to whatever cell runs; an update of an
# output that has an id goes to where that output is.


class DisplayPlace:
    """One output of the running cell."""

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._there = False

    def put(self, bundle: Mapping[str, Any]) -> None:
        """Show this here; the first time in the cell that runs, hence from its thread.

        Args:
            bundle: mime type -> content.
        """
        from IPython.display import display

        display(  # type: ignore[no-untyped-call] # not annotated
            dict(bundle), raw=True, display_id=self._id, update=self._there
        )
        self._there = True


def running_cell() -> int | None:
    """The number of the cell that runs; None: there is no kernel."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    return int(shell.execution_count) if hasattr(shell, "kernel") else None


# --- picture ---


MINUTE = 60.0
"""Seconds between two lines where nobody looks."""

_BAR_SECONDS = 0.5


class ProgressPicture(Protocol):
    """How far something is, drawn again and again until it has ended."""

    def open(self, *, waits: bool) -> None:
        """Begin; called once by the thread of the cell.

        Args:
            waits: whether a thread waits, and calls :meth:`pump`.
        """

    def pump(self) -> None:
        """Draw it if it is time; called ten times a second by the thread that waits."""

    def close(self) -> None:
        """Draw how it ended."""


def bundle_of(state: State) -> dict[str, Any]:
    """A state for a cell: HTML, and text for who shows none."""
    return {"text/plain": summary_line(state), "text/html": summary(state)}


class CellPicture:
    """HTML that is written anew by the thread that waits.

    Args:
        make_state: what is known of the folder, when it is first looked at.
    """

    def __init__(self, make_state: Callable[[], State]) -> None:
        self._make_state = make_state
        self._pace = Throttle()

    def open(self, *, waits: bool) -> None:
        """Show it in this cell."""
        self._state, self._place = self._make_state(), DisplayPlace()
        self._draw()

    def pump(self) -> None:
        """Draw it anew, about once a second."""
        if self._pace.due:
            with self._pace.drawing():
                self._draw()

    def close(self) -> None:
        """Draw how it ended."""
        self._draw()

    def _draw(self) -> None:
        self._state.look()
        self._place.put(bundle_of(self._state))


class Minutes:
    """A line a minute, and one at the end; there a saved notebook gets a picture, too.

    Args:
        make_state: as for :class:`CellPicture`.
        say: shows a line.
        leave: puts the picture where it is to stay; None: there is no such place.
        seconds: between two lines.
    """

    def __init__(
        self,
        make_state: Callable[[], State],
        say: Callable[[str], None],
        leave: Callable[[dict[str, Any]], None] | None = None,
        *,
        seconds: float = MINUTE,
    ) -> None:
        self._make_state, self._say, self._leave = make_state, say, leave
        self._pace = Throttle(seconds)

    def open(self, *, waits: bool) -> None:
        """Look at the folder, of which nothing is said yet."""
        self._state = self._make_state()

    def pump(self) -> None:
        """Say how far it is, once a minute."""
        if self._pace.due:
            with self._pace.drawing():
                self._tell()

    def close(self) -> None:
        """Say how it ended, and leave the picture if there is more in it than that."""
        self._tell()
        if self._leave is not None and (self._state.table is not None or self._state.points()):
            self._leave(bundle_of(self._state))

    def _tell(self) -> None:
        self._state.look()
        self._say(summary_line(self._state))


class TerminalBar:
    """A bar on the last line of a terminal, with the time left and the newest metrics.

    Args:
        make_state: as for :class:`CellPicture`.
    """

    def __init__(self, make_state: Callable[[], State]) -> None:
        self._make_state = make_state
        self._pace = Throttle(_BAR_SECONDS)

    def open(self, *, waits: bool) -> None:
        """Draw the bar, from what was done in earlier sessions."""
        self._state, self._bar = self._make_state(), _make_bar()
        self._draw()

    def pump(self) -> None:
        """Draw it anew, about twice a second."""
        if not self._pace.due:
            return
        with self._pace.drawing():
            self._draw()

    def close(self) -> None:
        """Take it away, and say how it ended."""
        self._bar.close()
        self._state.look()
        self.write(summary_line(self._state) + "\n")

    def _draw(self) -> None:
        self._state.look()
        share = self._state.share()
        self._bar.n, self._bar.total = share or 0.0, None if share is None else 1.0
        self._bar.set_description_str(summary_line(self._state))

    @staticmethod
    def write(text: str) -> None:
        """Write above the bar."""
        from tqdm import tqdm

        tqdm.write(text, file=sys.stdout, end="")


def _make_bar() -> Any:
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc] # not annotated
        monitor_interval = 0  # a thread that would draw bars which nobody updates

    words = "{percentage:3.0f}%|{bar:20}| {desc}"
    return Bar(total=1.0, bar_format=words, dynamic_ncols=True, leave=False, file=sys.stderr)


def state_of(paths: RunPaths, *, deadline: float | None, folds: int | None) -> State:
    """What a folder says, with what only its starter knows.

    Args:
        paths: the folder.
        deadline: unix seconds at which a sweep ends at the latest; None: no limit.
        folds: how many a cross-validation has; None: not known.
    """
    state = State(paths)
    if isinstance(state.table, SweepTable):
        state.table.deadline = deadline
    if isinstance(state.table, FoldTable):
        state.table.folds = folds
    return state
