"""Show a folder's progress in a cell or a terminal, drawn by the thread that waits for its end."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nbtoolkit.views.markup import grid
from nbtoolkit.views.page import page_html, regions
from nbtoolkit.views.state import State
from nbtoolkit.views.text import summary_line

if TYPE_CHECKING:
    from tqdm import tqdm

SECONDS = 1.0
"""Between two looks at a folder."""

MINUTE = 60.0
"""Seconds between two lines where nobody watches."""

_BAR_SECONDS = 0.5
_CPU_SHARE = 0.01  # of one core
_LONGEST = 30.0  # seconds between two drawings, however large a sweep is


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


def mime_bundle(state: State, *, quick: bool = False) -> dict[str, str]:
    """Render a state for a cell: as HTML, and as text for front ends that show none.

    Args:
        state: of the folder.
        quick: without the importance of parameters, unless that is known.
    """
    page = grid(*regions(state).values()) if quick else page_html(state)
    return {"text/plain": summary_line(state), "text/html": page}


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
            self._put(mime_bundle(self._state))

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

        tqdm.write(text, file=sys.stdout, end="")


def _make_bar() -> tqdm:
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc] # not annotated
        monitor_interval = 0  # no thread that redraws bars which nobody updates

    bar_format = "{percentage:3.0f}%|{bar:20}| {desc}"
    return Bar(total=1.0, bar_format=bar_format, dynamic_ncols=True, leave=False, file=sys.stderr)
