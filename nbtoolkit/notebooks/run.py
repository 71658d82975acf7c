"""Run a notebook as a program (``nb.run_notebook``), here or in a background process.

The background process outlives the one that starts it. It reads the checked job from stdin. Its
stdout is the log, so that it holds the lock on the run's files until it ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO, overload

from nbtoolkit.errors import NotebookError, NotebookFailed
from nbtoolkit.notebooks.execution import MAX_OUTPUT, Display, Limits
from nbtoolkit.notebooks.handle import NotebookHandle, NotebookResult, not_written
from nbtoolkit.notebooks.job import NotebookJob, prepare_job, skip_slow_imports
from nbtoolkit.notebooks.parameters import given_layer
from nbtoolkit.run.paths import write_json

if TYPE_CHECKING:
    from nbformat import NotebookNode


@overload
def run_notebook(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    parameters: Mapping[str, object] | None = None,
    *,
    parameters_file: str | os.PathLike[str] | None = None,
    kernel: str | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    cell_timeout: float | None = None,
    max_output: int = MAX_OUTPUT,
    html: bool = True,
    display: Display = "auto",
    wait: Literal[True] = True,
) -> NotebookResult: ...


@overload
def run_notebook(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    parameters: Mapping[str, object] | None = None,
    *,
    parameters_file: str | os.PathLike[str] | None = None,
    kernel: str | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    cell_timeout: float | None = None,
    max_output: int = MAX_OUTPUT,
    html: bool = True,
    display: Display = "auto",
    wait: Literal[False],
) -> NotebookHandle: ...


def run_notebook(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    parameters: Mapping[str, object] | None = None,
    *,
    parameters_file: str | os.PathLike[str] | None = None,
    kernel: str | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    cell_timeout: float | None = None,
    max_output: int = MAX_OUTPUT,
    html: bool = True,
    display: Display = "auto",
    wait: bool = True,
) -> NotebookResult | NotebookHandle:
    """Run a notebook from its first cell to its last, in a kernel of its own.

    Before the kernel starts, the function checks the parameters against the notebook's cell
    ``parameters``, and the syntax of all cells. It adds a last cell to detect the end: a run that
    reaches this cell has succeeded, whatever the outputs in the executed copy say. The function is
    built on papermill (https://papermill.readthedocs.io).

    Args:
        path: the notebook; it is not changed.
        output: the path of the executed copy, ending in ``.ipynb``. The HTML page, the record and
            the log are written beside it. Default: ``outputs/<UTC time>-<name>-<4 hex>.ipynb``.
        parameters: a dict of values by name. The names are those of the variables in the notebook's
            ``parameters`` cell.
        parameters_file: a YAML or JSON file with parameters; the argument ``parameters`` overrides
            them.
        kernel: the name of the kernel spec; default: the one that the notebook names, or
            ``python3``.
        cwd: the kernel's working directory; default: that of this process.
        timeout: seconds for the whole notebook, including the kernel's start; None: no limit.
        cell_timeout: seconds for each cell; None: no limit.
        max_output: how many characters of each cell's output the executed copy keeps. The log keeps
            the whole output.
        html: whether to write the executed copy as an HTML page, too.
        display: how to show the progress. ``"auto"``: one line per cell, which is updated in a
            terminal. ``"text"``: one line per finished cell. ``"off"``: nothing.
        wait: False returns a handle at once. The notebook then runs in a process of its own, which
            outlives this one and shows nothing.

    Returns:
        A :class:`~nbtoolkit.notebooks.handle.NotebookResult` with the published values and the
        files; with ``wait=False`` a :class:`NotebookHandle`.

    Raises:
        ParameterError: a parameter is unknown, missing or of another type.
        NotebookError: the notebook cannot be run: it is unreadable or not Python, there is no such
            kernel, or the output is in use.
        NotebookFailed: a cell raised an exception or ended the notebook early.
        NotebookDied: the kernel died (a subclass of NotebookFailed).
        NotebookTimeout: a time limit was exceeded (a subclass of NotebookFailed).
        MissingExtra: papermill, or nbconvert for the page, is not installed.
    """
    for name, seconds in {"cell_timeout": cell_timeout, "timeout": timeout}.items():
        if seconds is not None and not seconds > 0:
            raise NotebookError(
                f"{name} is {seconds}", allowed="seconds above 0, or None: no limit"
            )
    limits = Limits(cell_timeout=cell_timeout, timeout=timeout, max_output=max_output)
    given = given_layer(parameters, parameters_file)
    job, notebook = prepare_job(path, output, given, kernel=kernel, cwd=cwd, html=html)
    with contextlib.closing(job.files.open()) as log:
        if wait:
            return job.run(notebook, log, limits, display)
        return start_notebook(job, notebook, log, limits, os.environ)


# --- in the background ---

# The working directory is not on the path: a file named random.py there belongs to the kernel. An
# interrupt during the imports ends the process at once: Python would raise KeyboardInterrupt in the
# middle of an import, some of whose callbacks lose it.
_BOOT = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "import sys; sys.path[:] = [p for p in sys.path if p]; sys.path.append({home!r}); "
    "from nbtoolkit.notebooks.run import main; main()"
)

# Processes that this process has started and must reap.
_processes: list[subprocess.Popen[bytes]] = []


def start_notebook(
    job: NotebookJob,
    notebook: NotebookNode,
    log: TextIO,
    limits: Limits,
    environ: Mapping[str, str],
) -> NotebookHandle:
    """Start a notebook in the background.

    Args:
        job: the checked job.
        notebook: its source, read and checked.
        log: from :meth:`NotebookFiles.open`; the new process inherits its lock.
        limits: limits of time and output.
        environ: all environment variables of the kernel.

    Raises:
        NotebookError: the disk is full.
        OSError: the process could not be started.
    """
    _processes[:] = [process for process in _processes if process.poll() is None]
    home = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT.format(home=home), str(job.files.copy)],  # the copy is for ps
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        # Neither Jupyter's interrupt nor a terminal's hangup reaches the process.
        start_new_session=True,
        cwd="/",
        # ipykernel 6.17 (Kaggle's) prints lines about its debugger from Python 3.11 on.
        env={"PYDEVD_DISABLE_FILE_VALIDATION": "1", **environ},
    )
    _processes.append(process)
    assert process.stdin is not None
    try:
        # A broken pipe: the process has ended already, and its log says why.
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            # NotebookHandle.stop reads the pid; the process replaces this record when it ends.
            write_json(job.files.record, {"status": "running", "pid": process.pid}, durable=False)
            pickle.dump((job, notebook, limits), pipe)
    except OSError as error:
        raise not_written(job.files.copy, error, NotebookError) from error
    return NotebookHandle(job.files.copy, process)


def main() -> None:
    """Run the job that arrives on stdin."""
    skip_slow_imports()
    import nbtoolkit.notebooks.engine  # noqa: F401  # loads papermill before signals are handled

    job, notebook, limits = pickle.load(sys.stdin.buffer)
    # The record says how the run ended.
    recorded = contextlib.suppress(NotebookFailed, KeyboardInterrupt)
    with open(os.dup(1), "a", encoding="utf-8") as log, recorded:
        for number in (signal.SIGINT, signal.SIGTERM):  # a shell may have set them to be ignored
            signal.signal(number, signal.default_int_handler)
        job.run(notebook, log, limits, "off")
