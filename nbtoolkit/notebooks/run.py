"""Run a notebook as a program (``nb.run_notebook``): check it, and start a process for it.

The process reads the checked job from stdin (job.py). Its stdout is the log, so that it holds the
lock on the run's files until it ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, get_args, overload

from nbtoolkit.environment.installed import install_line
from nbtoolkit.errors import MissingExtra, NotebookError, NotebookFailed
from nbtoolkit.host import in_kernel
from nbtoolkit.notebooks.document import (
    declared_parameters,
    read_notebook,
    refuse_syntax_errors,
)
from nbtoolkit.notebooks.handle import NotebookHandle, NotebookResult, files_for, not_written
from nbtoolkit.notebooks.job import NotebookJob
from nbtoolkit.notebooks.parameters import check_parameters, given_layer
from nbtoolkit.run.paths import write_json

if TYPE_CHECKING:
    from nbformat import NotebookNode
    from typing_extensions import Unpack

Display = Literal["auto", "text", "off"]
"""How a run shows its cells: live on a terminal, one line per finished cell, or not at all."""

MAX_OUTPUT = 1_000_000
"""Default limit on the output of one cell, in characters; a browser still opens ten such cells."""


class NotebookRunOptions(TypedDict, total=False):
    """The options of :func:`run_notebook`, for type checkers and editors (PEP 692)."""

    parameters_file: str | os.PathLike[str] | None
    kernel: str | None
    cwd: str | os.PathLike[str] | None
    timeout: float | None
    cell_timeout: float | None
    max_output: int
    html: bool
    display: Display


@overload
def run_notebook(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    parameters: Mapping[str, object] | None = None,
    *,
    wait: Literal[True] = True,
    **options: Unpack[NotebookRunOptions],
) -> NotebookResult: ...


@overload
def run_notebook(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    parameters: Mapping[str, object] | None = None,
    *,
    wait: Literal[False],
    **options: Unpack[NotebookRunOptions],
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
    _check_options(timeout, cell_timeout, display)
    require_packages(html)
    source = Path(path).expanduser().absolute()
    notebook = read_notebook(source)
    refuse_syntax_errors(notebook, source.name)
    declared = declared_parameters(notebook, source.name)
    given = given_layer(parameters, parameters_file)
    job = NotebookJob(
        source=source,
        notebook=notebook,
        values=check_parameters(given, declared, source.name),
        kernel=_find_kernel(notebook, kernel, source.name),
        files=files_for(source, output),
        html=html,
        cwd=Path(cwd or "").absolute(),
        cell_timeout=cell_timeout,
        timeout=timeout,
        max_output=max_output,
    )
    return _run_here(job, display) if wait else _start(job)


def _check_options(timeout: float | None, cell_timeout: float | None, display: str) -> None:
    for name, seconds in {"cell_timeout": cell_timeout, "timeout": timeout}.items():
        if seconds is not None and not seconds > 0:
            allowed = "seconds above 0, or None: no limit"
            raise NotebookError(f"{name} is {seconds}", allowed=allowed)
    if display not in get_args(Display):
        allowed = ", ".join(map(repr, get_args(Display)))
        raise NotebookError(f"display is {display!r}", allowed=allowed)


def require_packages(html: bool) -> None:
    """Check that the packages which a run needs are installed.

    Raises:
        MissingExtra: a package is missing.
    """
    needed = ["papermill", "nbclient", "ipykernel", *(["nbconvert"] if html else [])]
    if missing := [name for name in needed if find_spec(name) is None]:
        raise MissingExtra(
            f"running a notebook needs {', '.join(missing)}",
            allowed="html=False does not need nbconvert" if missing == ["nbconvert"] else "",
            do=install_line("notebooks"),
        )


def _find_kernel(notebook: NotebookNode, name: str | None, title: str) -> str:
    """Return the name of the kernel spec to run a notebook with.

    Args:
        notebook: its metadata names a kernel spec; default: ``python3``.
        name: a kernel spec that overrides the notebook's own.
        title: the notebook's name, for messages.

    Raises:
        NotebookError: the kernel is not installed here.
    """
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    kernel = str(name or notebook.metadata.get("kernelspec", {}).get("name") or "python3")
    specs = KernelSpecManager()
    try:
        specs.get_kernel_spec(kernel)
    except NoSuchKernel as error:
        raise NotebookError(
            f"{title} needs the kernel {kernel!r}, which is not installed here",
            allowed=", ".join(sorted(specs.find_kernel_specs())) or "none: no kernel is installed",
            do='choose one of these: kernel="python3", or --kernel python3 in a shell',
        ) from error
    return kernel


# The working directory is not on the path: a file named random.py there belongs to the kernel. An
# interrupt during the imports ends the process at once: Python would raise KeyboardInterrupt in the
# middle of an import, some of whose callbacks lose it.
_BOOT = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "import sys; sys.path[:] = [p for p in sys.path if p]; sys.path.append({home!r}); "
    "from nbtoolkit.notebooks.job import main; main()"
)

# Processes that this process has started and must reap.
_processes: list[subprocess.Popen[bytes]] = []


def _run_here(job: NotebookJob, display: Display) -> NotebookResult:
    """Run a notebook, show its cells, and return its result. An interrupt stops it."""
    stream = sys.stdout if in_kernel(sys.modules) else sys.stderr
    width = shutil.get_terminal_size().columns if display == "auto" and stream.isatty() else 0
    read_end, write_end = os.pipe()
    with open(read_end, "rb", buffering=0) as lines:
        with open(write_end, "wb"):
            job = replace(job, progress=write_end, parent=os.getpid(), width=width)
            handle = _start(job)
        try:
            while text := lines.read(65_536):
                if display != "off":
                    print(text.decode(errors="replace"), end="", file=stream, flush=True)
            return handle.result()
        except KeyboardInterrupt:
            handle.stop()
            with contextlib.suppress(NotebookFailed):
                handle.result()
            raise


def _start(job: NotebookJob) -> NotebookHandle:
    """Start the process of a run.

    Raises:
        NotebookError: the disk is full, or another run writes to these files.
        OSError: the process could not be started.
    """
    _processes[:] = [process for process in _processes if process.poll() is None]
    home = str(Path(__file__).resolve().parents[2])
    with job.files.open() as log:  # the new process inherits its lock
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT.format(home=home), str(job.files.copy)],  # copy: for ps
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=() if job.progress is None else (job.progress,),
            # Neither Jupyter's interrupt nor a terminal's hangup reaches the process.
            start_new_session=True,
            cwd="/",
            # ipykernel 6.17 (Kaggle's) prints lines about its debugger from Python 3.11 on.
            env={"PYDEVD_DISABLE_FILE_VALIDATION": "1", **os.environ},
        )
    _processes.append(process)
    assert process.stdin is not None
    try:
        # A broken pipe: the process has ended already, and its log says why.
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            # NotebookHandle.stop reads the pid; the process replaces this record when it ends.
            write_json(job.files.record, {"status": "running", "pid": process.pid}, durable=False)
            pickle.dump(job, pipe)
    except OSError as error:
        raise not_written(job.files.copy, error) from error
    return NotebookHandle(job.files.copy, process)
