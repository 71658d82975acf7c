"""Background: a notebook run by a process of its own, which outlives the one that starts it.

That process gets the checked job on stdin. Its stdout is the log, by which it holds the lock on the
run's files from the start to its end.
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
from nbtoolkit.notebooks.files import not_written
from nbtoolkit.notebooks.handle import NotebookHandle
from nbtoolkit.runtime.paths import write_json

if TYPE_CHECKING:
    from nbformat import NotebookNode

    from nbtoolkit.notebooks.execution import Limits
    from nbtoolkit.notebooks.job import Job

# Nothing from the working directory: a file named random.py there is the kernel's business. Until
# all is imported an interrupt ends the process at once: Python would raise it in the middle of an
# import, some of whose callbacks lose it.
_BOOT = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "import sys; sys.path[:] = [p for p in sys.path if p]; sys.path.append({home!r}); "
    "from nbtoolkit.notebooks.background import main; main()"
)

_started: list[subprocess.Popen[bytes]] = []
"""Of this process, to be reaped."""


def start(
    job: Job, notebook: NotebookNode, log: TextIO, limits: Limits, environ: Mapping[str, str]
) -> NotebookHandle:
    """Start a notebook in the background.

    Args:
        job: what is run.
        notebook: as it was read, and checked.
        log: of :meth:`NotebookFiles.open`; its lock goes over to the new process.
        limits: what it may take.
        environ: the kernel's variables, all of them.

    Raises:
        NotebookError: the disk is full.
        OSError: no process could be started.
    """
    _started[:] = [one for one in _started if one.poll() is None]
    home = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT.format(home=home), str(job.files.copy)],  # the last for ps
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        start_new_session=True,  # neither Jupyter's interrupt nor a terminal's end reaches it
        cwd="/",
        # ipykernel 6.17 (Kaggle's) writes of its debugger into the log from Python 3.11 on
        env={"PYDEVD_DISABLE_FILE_VALIDATION": "1", **environ},
    )
    _started.append(process)
    assert process.stdin is not None
    try:
        # Broken: it is gone already, and its log says why.
        with contextlib.suppress(BrokenPipeError), process.stdin as line:
            # By whom it can be stopped, until it says itself how it ended.
            write_json(job.files.record, {"status": "running", "pid": process.pid}, durable=False)
            pickle.dump((job, notebook, limits), line)
    except OSError as error:
        raise not_written(job.files.copy, error, NotebookError) from error
    return NotebookHandle(job.files.copy, process)


def main() -> None:
    """Run the job that comes on stdin."""
    from nbtoolkit.notebooks.slow_import import skip_slow_imports

    skip_slow_imports()
    import nbtoolkit.notebooks.client  # noqa: F401  # with it papermill, which the job would import

    job, notebook, limits = pickle.load(sys.stdin.buffer)
    ended = contextlib.suppress(NotebookFailed, KeyboardInterrupt)  # how stands in the record
    with open(os.dup(1), "a", encoding="utf-8") as log, ended:
        for number in (signal.SIGINT, signal.SIGTERM):  # a shell may have had them ignored
            signal.signal(number, signal.default_int_handler)
        job.run(notebook, log, limits, "off")
