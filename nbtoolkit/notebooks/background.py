"""Run a notebook in a background process, which outlives the process that starts it.

The process reads the checked job from stdin. Its stdout is the log, so that it holds the lock on
the run's files until it ends.
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
from typing import TYPE_CHECKING, TextIO

from nbtoolkit.errors import NotebookError, NotebookFailed
from nbtoolkit.notebooks.execution import Limits
from nbtoolkit.notebooks.handle import NotebookHandle, not_written
from nbtoolkit.notebooks.job import NotebookJob, skip_slow_imports
from nbtoolkit.run.paths import write_json

if TYPE_CHECKING:
    from nbformat import NotebookNode

# The working directory is not on the path: a file named random.py there belongs to the kernel. An
# interrupt during the imports ends the process at once: Python would raise KeyboardInterrupt in the
# middle of an import, some of whose callbacks lose it.
_BOOT = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "import sys; sys.path[:] = [p for p in sys.path if p]; sys.path.append({home!r}); "
    "from nbtoolkit.notebooks.background import main; main()"
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
