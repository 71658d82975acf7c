"""SweepHandle: a search that goes on, ours or another kernel's; it reads the search's folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nbtoolkit.errors import LaunchError
from nbtoolkit.runtime.failure import raise_failure
from nbtoolkit.runtime.paths import RunPaths, write_json
from nbtoolkit.runtime.result import RunHandle
from nbtoolkit.search.conductor import COMMANDS


class SearchHandle(RunHandle):
    """A search that goes on.

    Args:
        paths: its folder.
        make_result: reads its result from the folder.
        options: as :class:`~nbtoolkit.runtime.result.RunHandle`'s.
    """

    def __init__(
        self, paths: RunPaths, make_result: Callable[[RunPaths], Any], **options: Any
    ) -> None:
        super().__init__(paths, **options)
        self._make_result = make_result

    def pause(self) -> None:
        """Finish what runs, and start nothing more until :meth:`resume`."""
        self._command("pause")

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._command("resume")

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

    def _command(self, op: str, **fields: Any) -> None:
        command = {"op": op, **fields}
        if self._line is None or not self._line.send({"type": "command", **command}):
            self._refuse_if_over(op)
            file = self.paths.folder / COMMANDS / f"{time.time_ns()}.json"
            write_json(file, command, durable=False)

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
        self._command("stop_trial", n=int(number))

    def add_trials(self, count: int) -> None:
        """Run ``count`` more trials than were asked for."""
        self._command("add_trials", n=int(count))
