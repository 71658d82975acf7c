"""Run a notebook as a program (``nb.run_notebook``), here or in a background process."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, overload

from nbtoolkit.config.yaml_source import Layer
from nbtoolkit.errors import MissingExtra, NotebookError, NotebookFailed
from nbtoolkit.notebooks.document import declared_parameters, read_notebook, refuse_syntax_errors
from nbtoolkit.notebooks.engine import Limits
from nbtoolkit.notebooks.handle import NotebookHandle, NotebookResult, files_for, not_written
from nbtoolkit.notebooks.job import NotebookJob, find_kernel
from nbtoolkit.notebooks.parameters import check_parameters, given_layer
from nbtoolkit.notebooks.progress import Display
from nbtoolkit.run.paths import write_json

if TYPE_CHECKING:
    from nbformat import NotebookNode


# --- background ---
# A notebook run by a process of its own, which outlives the one that starts it.
#
# That process gets the checked job on stdin. Its stdout is the log, by which it holds the lock on
# the run's files from the start to its end.


# Nothing from the working directory: a file named random.py there is the kernel's business. Until
# all is imported an interrupt ends the process at once: Python would raise it in the middle of an
# import, some of whose callbacks lose it.
_BOOT = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "import sys; sys.path[:] = [p for p in sys.path if p]; sys.path.append({home!r}); "
    "from nbtoolkit.notebooks.run import main; main()"
)

_started: list[subprocess.Popen[bytes]] = []
"""Of this process, to be reaped."""


def start(
    job: NotebookJob,
    notebook: NotebookNode,
    log: TextIO,
    limits: Limits,
    environ: Mapping[str, str],
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
    from nbtoolkit.notebooks.progress import skip_slow_imports

    skip_slow_imports()
    import nbtoolkit.notebooks.engine  # noqa: F401  # with it papermill, which the job would import

    job, notebook, limits = pickle.load(sys.stdin.buffer)
    ended = contextlib.suppress(NotebookFailed, KeyboardInterrupt)  # how stands in the record
    with open(os.dup(1), "a", encoding="utf-8") as log, ended:
        for number in (signal.SIGINT, signal.SIGTERM):  # a shell may have had them ignored
            signal.signal(number, signal.default_int_handler)
        job.run(notebook, log, limits, "off")


# --- run ---


MAX_OUTPUT = 1_000_000
"""Characters kept of one cell's output; a browser still opens a notebook with ten such cells."""


@overload
def run_notebook(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    parameters: Mapping[str, Any] | None = None,
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
    parameters: Mapping[str, Any] | None = None,
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


@overload
def run_notebook(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    parameters: Mapping[str, Any] | None = None,
    *,
    parameters_file: str | os.PathLike[str] | None = None,
    kernel: str | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    cell_timeout: float | None = None,
    max_output: int = MAX_OUTPUT,
    html: bool = True,
    display: Display = "auto",
    wait: bool,
) -> NotebookResult | NotebookHandle: ...


def run_notebook(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    parameters: Mapping[str, Any] | None = None,
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

    Its parameters are checked against its ``parameters`` cell, and its cells parsed, before a
    kernel starts. It has succeeded when a last cell, added for that, was reached; what is written
    in the executed copy decides nothing. Built on papermill (https://papermill.readthedocs.io).

    Args:
        path: the notebook; it is not changed.
        output: the executed copy, a path ending in ``.ipynb``; HTML, record and log are put beside
            it. Default: ``outputs/<UTC time>-<name>-<4 hex>.ipynb``.
        parameters: name -> value, for names that the ``parameters`` cell assigns.
        parameters_file: a YAML or JSON file of the same; ``parameters`` go before it.
        kernel: the kernel spec's name; default: the notebook's own, else ``python3``.
        cwd: the kernel's working directory; default: this process's.
        timeout: seconds for the whole notebook, kernel start included; None: no limit.
        cell_timeout: seconds for each cell; None: no limit.
        max_output: characters of output kept of one cell; the log has all of it.
        html: whether to write the executed copy as a page too.
        display: one line a cell: ``"auto"`` (live on a terminal), ``"text"``, ``"off"``.
        wait: False returns a handle at once; the notebook runs in a process of its own, which
            goes on when this one ends, and shows nothing.

    Returns:
        What the notebook published, and its files (a :class:`NotebookHandle` with ``wait=False``).

    Raises:
        ParameterError: a parameter is unknown, of another type or missing.
        NotebookError: it cannot be run: unreadable, not Python, no such kernel, output in use.
        NotebookFailed: a cell raised, or ended the notebook early.
        NotebookDied: its kernel died (a kind of NotebookFailed).
        NotebookTimeout: it took too long (a kind of NotebookFailed).
        MissingExtra: papermill, or nbconvert for the page, is not installed.
    """
    limits = _limits(cell_timeout=cell_timeout, timeout=timeout, max_output=max_output)
    given = given_layer(parameters, parameters_file)
    job, notebook = checked(path, output, given, kernel=kernel, cwd=cwd, html=html)
    with contextlib.closing(job.files.open()) as log:
        if wait:
            return job.run(notebook, log, limits, display)
        return start(job, notebook, log, limits, os.environ)


def checked(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    given: Layer,
    *,
    kernel: str | None = None,
    cwd: str | os.PathLike[str] | None = None,
    html: bool = True,
) -> tuple[NotebookJob, NotebookNode]:
    """A call of :func:`run_notebook`, checked: what is run, and the notebook as it was read.

    Raises:
        ParameterError: a parameter is unknown, of another type or missing.
        NotebookError: it cannot be run: unreadable, not Python, no such kernel.
        MissingExtra: papermill, or nbconvert for the page, is not installed.
    """
    require_extras(html)
    source = Path(path).expanduser().absolute()
    notebook = read_notebook(source)
    refuse_syntax_errors(notebook, source.name)
    job = NotebookJob(
        source=source,
        values=check_parameters(given, declared_parameters(notebook, source.name), source.name),
        kernel=find_kernel(notebook, kernel, source.name),
        files=files_for(source, output),
        html=html,
        cwd=Path(cwd or "").absolute(),
    )
    return job, notebook


def require_extras(html: bool) -> None:
    """Refuse at once where something that a run needs is not installed.

    Raises:
        MissingExtra: a package is missing.
    """
    from importlib.util import find_spec

    needed = ["papermill", "nbclient", "ipykernel", *(["nbconvert"] if html else [])]
    if missing := [name for name in needed if find_spec(name) is None]:
        raise MissingExtra(
            f"running a notebook needs {', '.join(missing)}",
            allowed="html=False does without nbconvert" if missing == ["nbconvert"] else "",
            do="pip install 'nbtoolkit-torch[notebooks]'",
        )


def _limits(*, max_output: int, **times: float | None) -> Limits:
    for name, seconds in times.items():
        if seconds is not None and not seconds > 0:
            raise NotebookError(
                f"{name} is {seconds}", allowed="seconds above 0, or None: no limit"
            )
    return Limits(max_output=max_output, **times)
