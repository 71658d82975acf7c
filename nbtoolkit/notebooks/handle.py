"""NotebookHandle: a notebook that runs in the background, ours or another kernel's."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from nbtoolkit.errors import NotebookDied, NotebookError, NotebookFailed
from nbtoolkit.notebooks.files import NotebookFiles
from nbtoolkit.notebooks.outcome import last_lines, outcome
from nbtoolkit.notebooks.result import NotebookResult
from nbtoolkit.runtime.made import read_made
from nbtoolkit.runtime.paths import read_json

_POLL = 0.1  # seconds between two looks of who waits


class NotebookHandle:
    """A notebook that runs in the background, from ``nb.run_notebook(wait=False)``.

    All of it is in files: in another kernel, ``nb.NotebookHandle(output)`` is a handle on the same.

    Args:
        output: the executed copy, a path ending in ``.ipynb``; it need not be written yet.
        process: who runs it, where this process has started it.

    Raises:
        NotebookError: no notebook was ever run to there.
    """

    def __init__(
        self, output: str | os.PathLike[str], process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self._process, self._asked = process, False
        self._files = NotebookFiles(Path(output).expanduser().absolute())
        if not self._files.log.exists():
            raise NotebookError(
                f"no notebook is run to {output}",
                allowed="the executed copy of a notebook that runs, or has run",
                do="nb.run_notebook(path, output, wait=False) starts one",
            )

    @property
    def output(self) -> Path:
        """The executed copy; it is written after each cell."""
        return self._files.copy

    @property
    def log(self) -> Path:
        """Everything its cells have written so far."""
        return self._files.log

    @property
    def runs(self) -> list[Path]:
        """The folders of the runs, sweeps and cross-validations started so far, oldest first."""
        return read_made(self._files.runs)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        if self._process is not None and self._process.poll() is None:
            return False
        return not self._files.running()

    def stop(self) -> None:
        """End its kernel, and with it what its cells run; nothing where it has ended."""
        record = read_json(self._files.record) or {}
        if not self.done() and record.get("status") == "running":
            self._asked = True
            os.kill(record["pid"], signal.SIGINT)

    def result(self, timeout: float | None = None) -> NotebookResult:
        """Wait for its end. An interrupt ends the wait; the notebook goes on.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            TimeoutError: it has not ended yet (it goes on).
            NotebookFailed: as :func:`nbtoolkit.run_notebook` says; it was stopped.
            NotebookDied: its kernel died, or the process that ran it.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            if limit is not None and time.monotonic() >= limit:
                raise TimeoutError(f"{self.output} is not done after {timeout:g} s; it goes on")
            time.sleep(_POLL)
        record = read_json(self._files.record) or {}
        if record.get("status", "running") == "running":
            raise self._lost()
        return outcome(self._files, record)

    def _lost(self) -> NotebookFailed:
        """Nobody was left to write down how it ended, or nobody yet."""
        if self._asked:
            return NotebookFailed(f"the notebook {self.output} was stopped before it began")
        error = NotebookDied(
            "\n".join([f"the process that ran {self.output} is gone", *last_lines(self.log)]),
            allowed="what its cells had launched goes on from its checkpoint",
            do="run it again; the usual cause is memory",
        )
        error.output = self.output
        return error

    def __repr__(self) -> str:
        return f"NotebookHandle({'ended' if self.done() else 'running'}, {self.output})"
