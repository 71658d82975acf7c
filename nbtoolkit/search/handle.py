"""Follow a search that is still going, and print its progress in lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from nbtoolkit.errors import LaunchError
from nbtoolkit.launcher.failures import raise_failure
from nbtoolkit.launcher.handle import RunHandle
from nbtoolkit.run.display import Shape
from nbtoolkit.run.events import Event, NoteAdded, StopRequested
from nbtoolkit.run.messages import SearchCommand
from nbtoolkit.run.output import MAX_BYTES, to_stdout
from nbtoolkit.run.paths import RunPaths, write_json

# --- live ---
# What a sweep or a cross-validation says in lines: notes, and each trial or fold.


class Table(Protocol):
    """What is told: SweepTable or FoldTable."""

    def take(self, event: Event) -> None:
        """Take one event."""

    def summary(self) -> str:
        """How far it is, in one line."""

    def line(self, event: Event) -> str | None:
        """What there is to say about an event; None: nothing."""


class TableLines:
    """Shows lines while somebody waits; called by the thread that waits.

    Args:
        table: is handed the events here.
        shape: how it is shown. With ``"lines"`` and ``"bar"`` each trial or fold that ends is a
            line, with ``"lines"`` the end one, too; ``"off"``: nothing is; else notes only.
        since: unix seconds. Events before are those of earlier sessions, whose lines were shown.
    """

    def __init__(self, table: Table, shape: Shape, *, since: float = 0.0) -> None:
        self.table, self._on, self._since = table, shape != "off", since
        self._each, self._sums_up = shape in ("lines", "bar"), shape == "lines"
        self._written = 0
        self._write: Callable[[str], object] | None = None

    def through(self, write: Callable[[str], object]) -> None:
        """Write lines by this from now on: a bar of ours is on the terminal's last line."""
        self._write = write

    def open(self, *, waits: bool) -> None:
        """Nothing: lines come as things happen."""

    def event(self, event: Event) -> None:
        """Show what an event says."""
        self.table.take(event)
        if event.t < self._since:
            return
        if isinstance(event, NoteAdded):
            self.say(("warning: " if event.level == "warning" else "") + event.text)
        elif isinstance(event, StopRequested):
            self.say(f"stopping: {event.reason}")
        elif self._each and (line := self.table.line(event)):
            self.say(line)

    def say(self, text: str) -> None:
        """Show a line of our own."""
        if self._on and self._written <= MAX_BYTES:
            self._written += len(text)
            self._print(text)

    def pump(self) -> None:
        """Nothing: lines come as things happen."""

    def close(self) -> None:
        """Say how it ended."""
        if self._sums_up:
            self._print(self.table.summary())
            self._sums_up = False
        if self._on:
            print(end="", flush=True)

    def _print(self, text: str) -> None:
        (self._write or to_stdout)(text + "\n")


# --- handle ---


class SearchHandle(RunHandle):
    """A search that goes on.

    Args:
        paths: its folder.
        make_result: reads its result from the folder.
        options: as :class:`~nbtoolkit.launcher.handle.RunHandle`'s.
    """

    def __init__(
        self, paths: RunPaths, make_result: Callable[[RunPaths], Any], **options: Any
    ) -> None:
        super().__init__(paths, **options)
        self._make_result = make_result

    def pause(self) -> None:
        """Finish what runs, and start nothing more until :meth:`resume`."""
        self._command(SearchCommand(op="pause"))

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._command(SearchCommand(op="resume"))

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the search's end and return its result, as :meth:`RunHandle.result` does.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Returns:
            The ``SweepResult`` or ``CVResult``.

        Raises:
            TimeoutError: it has not ended yet (it goes on).
            KeyboardInterrupt: the wait was interrupted; what ran has left.
            NbtoolkitError: the search failed.
        """
        __tracebackhide__ = True
        return super().result(timeout)

    def _command(self, command: SearchCommand) -> None:
        if self._line is None or not self._line.send(command):
            self._refuse_if_over(command.op)
            file = self.paths.commands / f"{time.time_ns()}.json"
            write_json(file, vars(command), durable=False)

    def _refuse_if_over(self, op: str) -> None:
        if self.done():
            raise LaunchError(
                f"{op} was asked of {self.paths.run_id}, which goes on no more",
                allowed="a search that is running",
                do="start it again with resume=<its folder>",
            )

    def _outcome(self) -> Any:
        __tracebackhide__ = True
        if self._lost is None and self.paths.error.exists():
            raise_failure(self.paths)
        if self._lost is None and self.paths.result.exists():
            return self._make_result(self.paths)
        return super()._outcome()


class SweepHandle(SearchHandle):
    """A sweep that goes on, from ``nb.sweep(wait=False)`` or ``nb.attach(folder)``."""

    def stop_trial(self, number: int) -> None:
        """Let trial ``number`` end at its next report; the sweep goes on."""
        self._command(SearchCommand(op="stop_trial", n=int(number)))

    def add_trials(self, count: int) -> None:
        """Run ``count`` more trials than were asked for."""
        self._command(SearchCommand(op="add_trials", n=int(count)))
