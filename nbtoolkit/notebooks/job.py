"""Run one notebook through papermill in this process, and record how it ended.

The process is started for the notebook (run.py). So the notebook has the process's environment
variables, working directory, event loop and log, and several notebooks do not disturb each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import pickle
import secrets
import shlex
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.notebooks.document import executed_copy, numbered, with_parameters
from nbtoolkit.notebooks.handle import (
    LAST_LINES,
    FailureRecord,
    NotebookFiles,
    NotebookRecord,
    indented,
    last_lines,
)
from nbtoolkit.notebooks.publish import TARGET as PUBLISHED
from nbtoolkit.run.paths import RUNS_FILE, read_json, write_json, write_whole

if TYPE_CHECKING:
    from nbformat import NotebookNode

    from nbtoolkit.notebooks.engine import CellFailure, Execution

# Maximum length in bytes of a Unix socket's path, see man 7 unix.
_SOCKET_LENGTH = 107

# Seconds to wait for the rest of a cell's output; after that it counts as lost. The output of a
# loop that prints takes some seconds to arrive.
_LOST_OUTPUT_SECONDS = 60

# Seconds for a live kernel to answer; a dead one is noticed at once. ipykernel takes 1 s to start,
# and a minute from a cold disk beside other work.
_START_SECONDS = 600

_PR_SET_PDEATHSIG = 1

_ADVICE = {
    "exit": "cells after it have not run: put what must not run under an `if`",
    "timeout": "increase cell_timeout or timeout, or look where the cell waits",
    "disk": "a folder on a disk with free space that you may write to",
}


@dataclass(frozen=True, kw_only=True)
class NotebookJob:
    """A checked notebook run: what to run, with which values, and where the results go."""

    source: Path
    notebook: NotebookNode
    """The source, read and checked."""
    kernel: str
    """Name of the kernel spec."""
    files: NotebookFiles
    values: dict[str, Any]
    """Checked values of parameters."""
    html: bool
    cwd: Path
    """The kernel's working directory."""
    cell_timeout: float | None
    timeout: float | None
    max_output: int
    progress: int | None = None
    """Descriptor of a pipe to the process that waits for the run; None: nobody waits."""
    parent: int = 0
    """Pid of the process that waits."""
    width: int = 0
    """Columns of its terminal, where a cell's line is updated; 0: only finished cells."""


def main() -> None:
    """Run the job that arrives on stdin."""
    import nbtoolkit.notebooks.engine  # noqa: F401  # loads papermill before signals are handled

    job: NotebookJob = pickle.load(sys.stdin.buffer)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell may have set them to be ignored
        signal.signal(number, signal.default_int_handler)
    if job.progress is not None:
        # The run ends with the process that waits for it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
        if os.getppid() != job.parent:
            return  # it has ended before that
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    logging.disable()  # the error that is raised says more than the logs of nbclient and papermill
    try:
        run(job)
    except OSError:
        sys.exit(os.EX_IOERR)  # the record could not be written


def run(job: NotebookJob) -> None:
    """Run the notebook to its end, and write the executed copy, its page and the record.

    Raises:
        OSError: the record cannot be written.
    """
    from nbtoolkit.notebooks.engine import CellProgress, Execution

    cells = len([*numbered(job.notebook)])
    progress = CellProgress(job.progress, cells, job.width)
    execution = Execution(job=job, progress=progress, notebook=job.notebook)
    with tempfile.TemporaryDirectory(
        prefix="nbtoolkit-", dir=_short_tmp(), ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        token = secrets.token_hex(8)
        published = folder / "published.json"
        reached = folder / "reached"
        os.environ["IPYTHONDIR"] = str(folder / "ipython")
        os.environ[PUBLISHED] = str(published)
        os.environ[RUNS_FILE] = str(job.files.runs)
        try:
            _run_papermill(job, execution, folder, _sentinel(reached, token))
        except KeyboardInterrupt:
            execution.fail("interrupt", "was interrupted")
        if not (reached.exists() and reached.read_text() == token):
            execution.fail("exit", "ended before its last cell")
        _record(job, execution, read_json(published) or {})


def _run_papermill(job: NotebookJob, execution: Execution, folder: Path, sentinel: str) -> None:
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError
    from papermill.execute import execute_notebook
    from traitlets.config import Config

    from nbtoolkit.notebooks.engine import ENGINE

    if job.html:  # the imports for the page take 0.5 s, while the kernel starts
        threading.Thread(target=import_module, args=["nbconvert.exporters.html"]).start()
    # Sockets instead of ports: two kernels cannot choose the same port, and no other user of the
    # machine can connect.
    kernel = {
        "transport": "ipc",
        "ip": str(folder / "kernel"),
        "connection_file": str(folder / "kernel.json"),
    }
    try:
        execute_notebook(
            with_parameters(job.notebook, job.values, sentinel=sentinel),
            None,  # the client saves the executed copy, complete and without the sentinel
            engine_name=ENGINE,
            kernel_name=job.kernel,
            language="python",
            cwd=str(job.cwd),
            progress_bar=False,
            execution=execution,
            client_options={
                "config": Config({"KernelManager": kernel}),
                "startup_timeout": min(_START_SECONDS, max(60, int(job.timeout or _START_SECONDS))),
                "timeout_func": execution.time_left,
                "iopub_timeout": _LOST_OUTPUT_SECONDS,
                "raise_on_iopub_timeout": False,
            },
        )
    except (PapermillExecutionError, DeadKernelError, TimeoutError):
        # The client has recorded it. Or a cell tagged raises-exception raised, which is no failure,
        # or the kernel died after the last cell: the sentinel tells whether the run reached it.
        pass
    except (RuntimeError, OSError) as error:
        if not execution.started:
            # The kernel died before it answered, or its program does not exist.
            execution.fail("kernel", f"could not start its kernel {job.kernel!r}: {error}")
        elif isinstance(error, OSError):
            reason = error.strerror or error
            execution.fail("disk", f"was not saved: {job.files.copy} cannot be written: {reason}")
        else:
            raise


def _record(job: NotebookJob, execution: Execution, values: dict[str, Any]) -> None:
    """Write the executed copy, its page and the record."""
    failure = execution.failure
    note = f"{_sentence(job, failure)}\n{failure.traceback}" if failure else ""
    copy = executed_copy(execution.notebook, note)
    record: NotebookRecord = {
        "status": "failed" if failure else "completed",
        "notebook": str(job.source),
        "kernel": job.kernel,
        "parameters": job.values,
        "values": values,
        "html": job.html and _write_page(job.files, copy),
        "seconds": round(time.monotonic() - execution.started_at, 3),
        "failure": _failure_record(job, failure) if failure else None,
    }
    # A disk that was full may have room for the record, which is small.
    with contextlib.suppress(OSError) if failure else contextlib.nullcontext():
        write_whole(job.files.copy, copy)
    write_json(job.files.record, record)


def _write_page(files: NotebookFiles, notebook: str) -> bool:
    """Write the page of an executed notebook; return whether that worked.

    A page that cannot be written does not fail a completed run.
    """
    import nbformat

    try:
        from nbconvert.exporters.html import HTMLExporter

        page, _ = HTMLExporter().from_notebook_node(nbformat.reads(notebook, as_version=4))
        write_whole(files.html, page, durable=False)
    except (
        Exception
    ) as error:  # of nbconvert, of its templates, of an output in a cell, of the disk
        print(f"nbtoolkit: the page {files.html} was not written: {type(error).__name__}: {error}")
        return False
    return True


def _sentence(job: NotebookJob, failure: CellFailure) -> str:
    place = f"code cell {failure.cell} of " if failure.cell else ""
    return f"{place}{job.source.name} {failure.what}"


def _failure_record(job: NotebookJob, failure: CellFailure) -> FailureRecord:
    """Return the parts of the error that describes a failure."""
    lines = [_sentence(job, failure)]
    cell = dict(numbered(job.notebook)).get(failure.cell)
    if cell is not None and failure.kind != "error":  # a traceback shows the line itself
        lines += ["  The cell:", *indented(cell.source, LAST_LINES)]
    if failure.traceback:
        lines += indented(failure.traceback, 4 * LAST_LINES)
    elif failure.kind != "interrupt":
        lines += last_lines(job.files.log)
    words = ["nbtoolkit", "run", str(job.source), "--output", str(job.files.copy)]
    for name, value in job.values.items():
        words += ["-p", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return {
        "kind": failure.kind,
        "cell": failure.cell,
        "what": "\n".join(lines),
        "allowed": _ADVICE.get(failure.kind, ""),
        "do": f"look at {job.files.copy}, correct the cause, and run: {shlex.join(words)} "
        "(an unfinished launch or sweep in it resumes from its checkpoint)",
    }


def _short_tmp() -> str:
    """Return the folder for temporary folders; /tmp where paths of sockets would be too long."""
    folder = tempfile.gettempdir()
    longest = len(os.fsencode(folder)) + len("/nbtoolkit-12345678/kernel-5")
    return folder if longest <= _SOCKET_LENGTH else "/tmp"


def _sentinel(reached: Path, token: str) -> str:
    """Return the code of the last cell: it writes a token, unless an earlier cell called exit."""
    write = f"__import__('pathlib').Path({str(reached)!r}).write_text({token!r})"
    return f"get_ipython().exit_now or {write};"
