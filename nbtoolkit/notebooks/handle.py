"""Define a notebook run's result, and the handle of one that runs in the background."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from nbtoolkit.config.yaml_source import dump
from nbtoolkit.environment.deadline import span
from nbtoolkit.errors import (
    NbtoolkitError,
    NotebookDied,
    NotebookError,
    NotebookFailed,
    NotebookTimeout,
)
from nbtoolkit.run.paths import announced_runs, read_json, write_whole
from nbtoolkit.text_table import html_table

# <name>.ipynb        the executed copy, whole after every cell
# <name>.html         the same to look at
# <name>.run.json     parameters, published values, how it ended; who runs it, in the background
# <name>.run.log      everything the cells wrote, without limit; locked while the notebook runs
# <name>.runs.txt     the folders of the runs it has started, a line each; none: it has started none


_LOCK_TRIES = 3


@dataclass(frozen=True)
class NotebookFiles:
    """The files of one notebook's run, around the path of its executed copy."""

    copy: Path

    @property
    def html(self) -> Path:
        """The executed copy as a page."""
        return self.copy.with_suffix(".html")

    @property
    def record(self) -> Path:
        """How it ended (JSON)."""
        return self.copy.with_suffix(".run.json")

    @property
    def log(self) -> Path:
        """All output."""
        return self.copy.with_suffix(".run.log")

    @property
    def runs(self) -> Path:
        """Which runs it has started."""
        return self.copy.with_suffix(".runs.txt")

    def running(self) -> bool:
        """Whether somebody runs a notebook to here: its log is locked."""
        try:
            with open(self.log, "rb") as log:
                fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True

    def open(self) -> TextIO:
        """Lock and empty the log, and take away what an earlier run left.

        Returns:
            The log, open for appending; closing it opens the lock.

        Raises:
            NotebookError: the folder cannot be written, or another run has these files.
        """
        try:
            self.copy.parent.mkdir(parents=True, exist_ok=True)
            log = open(self.log, "a", encoding="utf-8")  # noqa: SIM115 - as long as the run
        except OSError as error:
            raise not_written(self.copy, error, NotebookError) from error
        if not _locked(log):
            log.close()
            raise NotebookError(
                f"another run writes to {self.copy}",
                allowed="one run for each executed copy at a time",
                do="wait for it, or choose another output",
            )
        os.truncate(log.fileno(), 0)
        for old in (self.copy, self.html, self.record, self.runs):
            old.unlink(missing_ok=True)
        return log

    def write_html(self, notebook: str) -> None:
        """Write the page of an executed notebook.

        Args:
            notebook: its JSON text.
        """
        import nbformat
        from nbconvert.exporters.html import HTMLExporter

        page, _ = HTMLExporter().from_notebook_node(nbformat.reads(notebook, as_version=4))
        write_whole(self.html, page, durable=False)


def _locked(log: TextIO) -> bool:
    """Lock an open log; False: a run holds it. Who asks whether one does holds it for a moment."""
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.01)
    return False


def not_written(copy: Path, error: OSError, kind: type[NbtoolkitError]) -> NbtoolkitError:
    """An OSError met while writing a run's files, as an error that says what to do."""
    return kind(
        f"the executed copy {copy} cannot be written: {error.strerror or error}",
        allowed="a folder on a disk with free space that you may write to",
        do='free some space, or choose another place: output="...", or --output in a shell',
    )


def files_for(notebook: Path, output: str | os.PathLike[str] | None) -> NotebookFiles:
    """The files of a run.

    Args:
        notebook: the notebook that is run.
        output: where its executed copy goes; None: ``outputs/<UTC time>-<name>-<4 hex>.ipynb``.

    Raises:
        NotebookError: ``output`` is no ``.ipynb``, or the notebook itself.
    """
    if output is None:
        return NotebookFiles(Path("outputs").absolute() / fresh_name(notebook.stem))
    path = Path(output).expanduser().absolute()
    if path.suffix != ".ipynb":
        raise NotebookError(
            f"the output {path} is no notebook's name",
            allowed="a path that ends in .ipynb; HTML, record and log are put beside it",
            do=f"output={str(path / notebook.name)!r}",
        )
    if path.resolve() == notebook.resolve():
        raise NotebookError(
            f"the output {path} is the notebook itself",
            allowed="another path: the notebook is not changed by running it",
            do="leave output out, and it goes to outputs/",
        )
    return NotebookFiles(path)


def fresh_name(name: str) -> str:
    """A new name for an executed copy: ``<UTC time>-<name>-<4 hex>.ipynb``."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
    return f"{stamp}-{name}-{secrets.token_hex(2)}.ipynb"


# --- result ---
# How a notebook's run ended.


@dataclass(frozen=True, kw_only=True, repr=False)
class NotebookResult:
    """What a notebook published, and where its executed copy is.

    A notebook that fails has no result: :func:`nbtoolkit.run_notebook` raises.
    """

    values: dict[str, Any]
    """What the notebook published with ``nb.publish``, as plain values."""
    parameters: dict[str, Any]
    """The values it was given; the others are its defaults."""
    output: Path
    """The executed copy."""
    html: Path | None
    """The same as a page; None where none was wanted."""
    log: Path
    """Everything its cells wrote."""
    runs: list[Path]
    """The folders of the runs, sweeps and cross-validations that it has started, oldest first."""
    seconds: float
    """From the kernel's start to the last cell's end."""

    def values_as_yaml(self) -> str:
        """The published values as YAML text; empty where nothing was published."""
        return dump(self.values) if self.values else ""

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={_short(value)}" for name, value in self.values.items())
        return (
            f"NotebookResult({values or 'nothing published'}, {span(self.seconds)}, {self.output})"
        )

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object]] = [*self.values.items()]
        rows += [("run", folder) for folder in self.runs]
        rows += [("executed copy", self.output), ("time", span(self.seconds))]
        return html_table("notebook: completed", rows)


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- from the record ---
# How a notebook's run ended, by its record: a result, or the error that was its end.


LAST_LINES = 12
"""Of a log or a cell, in an error's text."""

_LAST_BYTES = 4_000

_ERRORS = {"timeout": NotebookTimeout, "death": NotebookDied, "kernel": NotebookDied}


def outcome(files: NotebookFiles, record: Mapping[str, Any]) -> NotebookResult:
    """The result of a notebook that has come to its end.

    Args:
        files: of its run.
        record: what was written when it had ended.

    Raises:
        NotebookFailed: it has not come to its end; or a kind of that, as ``nb.run_notebook`` says.
    """
    if failure := record["failure"]:
        error = _ERRORS.get(failure["kind"], NotebookFailed)(**record["error"])
        error.cell, error.output = failure["cell"], files.copy
        raise error
    return NotebookResult(
        values=record["values"],
        parameters=record["parameters"],
        output=files.copy,
        html=files.html if record["html"] else None,
        log=files.log,
        runs=announced_runs(files.runs),
        seconds=record["seconds"],
    )


def last_lines(log: Path) -> list[str]:
    """The end of a log, as lines of an error's text; none of one that is empty, or gone."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        last = file.read().decode(errors="replace").strip()
    return ["  The last lines:", *indented(last, LAST_LINES)] if last else []


def indented(text: str, lines: int) -> list[str]:
    """The last lines of a text, indented."""
    return [f"    {line}" for line in text.strip().splitlines()[-lines:]]


# --- handle ---


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
        return announced_runs(self._files.runs)

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
