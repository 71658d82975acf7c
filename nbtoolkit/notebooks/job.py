"""Check a notebook run, run it through papermill in its own kernel, and record how it ends."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from nbtoolkit.config.loading import Layer
from nbtoolkit.environment.installed import install_line
from nbtoolkit.errors import MissingExtra, NotebookError, NotebookFailed
from nbtoolkit.notebooks.document import (
    declared_parameters,
    executed_copy,
    numbered,
    read_notebook,
    refuse_syntax_errors,
    with_parameters,
)
from nbtoolkit.notebooks.execution import CellProgress, Display, Execution, Limits
from nbtoolkit.notebooks.handle import (
    LAST_LINES,
    CellFailure,
    NotebookFiles,
    NotebookRecord,
    NotebookResult,
    files_for,
    indented,
    last_lines,
    not_written,
    result_of,
)
from nbtoolkit.notebooks.parameters import check_parameters
from nbtoolkit.notebooks.publish import TARGET as PUBLISHED
from nbtoolkit.run.paths import RUNS_FILE, read_json, write_json, write_whole

if TYPE_CHECKING:
    from nbformat import NotebookNode

# Maximum length in bytes of a Unix socket's path, see man 7 unix.
_SOCKET_LENGTH = 107

_ADVICE = {
    "exit": "cells after it have not run: put what must not run under an `if`",
    "timeout": "increase cell_timeout or timeout, or look where the cell waits",
}


@dataclass(frozen=True, kw_only=True)
class NotebookJob:
    """A checked notebook run: what to run, with which values, and where the results go."""

    source: Path
    kernel: str
    """Name of the kernel spec."""
    files: NotebookFiles
    values: dict[str, Any]
    """Checked values of parameters."""
    html: bool
    cwd: Path
    """The kernel's working directory."""

    def run(
        self, notebook: NotebookNode, log: TextIO, limits: Limits, display: Display
    ) -> NotebookResult:
        """Run the notebook to its end.

        Args:
            notebook: the source, read and checked.
            log: from :meth:`NotebookFiles.open`.
            limits: limits of time and output.
            display: how the run shows its cells.

        Raises:
            NotebookFailed: the notebook did not reach its end.
        """
        with _private_folder() as folder:
            execution = Execution(
                copy=self.files.copy,
                log=log,
                environ={
                    **os.environ,
                    "IPYTHONDIR": str(folder / "ipython"),
                    PUBLISHED: str(_published_file(folder)),
                    RUNS_FILE: str(self.files.runs),
                },
                cwd=self.cwd,
                folder=folder,
                progress=CellProgress(display, len(list(numbered(notebook)))),
                limits=limits,
            )
            return self._execute(notebook, execution)

    def _execute(self, notebook: NotebookNode, execution: Execution) -> NotebookResult:
        from nbtoolkit.notebooks.engine import run_with_own_loop

        started_at = time.monotonic()
        token, reached = secrets.token_hex(8), execution.folder / "reached"
        prepared = with_parameters(notebook, self.values, sentinel=_sentinel(reached, token))
        try:
            run_with_own_loop(partial(self._run_papermill, prepared, execution))
        except KeyboardInterrupt:
            execution.fail("interrupt", "was interrupted")
            self._record(notebook, prepared, execution, time.monotonic() - started_at)
            raise
        if not execution.failure and not (reached.exists() and reached.read_text() == token):
            execution.fail("exit", "ended before its last cell")
        record = self._record(notebook, prepared, execution, time.monotonic() - started_at)
        return result_of(self.files, record)

    def _run_papermill(self, prepared: NotebookNode, execution: Execution) -> None:
        from nbclient.exceptions import DeadKernelError
        from papermill.exceptions import PapermillExecutionError
        from papermill.execute import execute_notebook

        from nbtoolkit.notebooks.engine import ENGINE

        if self.html:
            threading.Thread(target=_import_for_page).start()
        try:
            execute_notebook(
                prepared,
                None,  # the client saves the executed copy, complete and without the sentinel
                engine_name=ENGINE,
                kernel_name=self.kernel,
                language="python",
                progress_bar=False,
                execution=execution,
            )
        except PapermillExecutionError:
            pass  # the client has recorded it; a cell tagged raises-exception is no failure
        except DeadKernelError:
            pass  # after the last cell: the sentinel tells whether the run reached it
        except (RuntimeError, OSError) as error:
            if execution.started and isinstance(error, OSError):
                raise not_written(self.files.copy, error, NotebookFailed) from error
            if execution.started:
                raise
            # The kernel died before it answered, or its program does not exist.
            execution.fail("kernel", f"could not start its kernel {self.kernel!r}: {error}")

    def _record(
        self, notebook: NotebookNode, prepared: NotebookNode, execution: Execution, seconds: float
    ) -> NotebookRecord:
        """Write the executed copy, its page and the record; return the record.

        Raises:
            NotebookFailed: the disk is full, or the folder is gone.
        """
        failure = execution.failure
        record: NotebookRecord = {
            "status": "failed" if failure else "completed",
            "notebook": str(self.source),
            "kernel": self.kernel,
            "parameters": self.values,
            "values": read_json(_published_file(execution.folder)) or {},
            "html": self.html,
            "seconds": round(seconds, 3),
            "failure": failure,
            "error": self._error(notebook, failure) if failure else None,
        }
        note = "\n".join([self._sentence(failure), failure["traceback"]]) if failure else ""
        copy = executed_copy(execution.notebook or prepared, note)
        try:
            write_whole(self.files.copy, copy)
            if self.html and (reason := self._write_page(copy)):
                record["html"] = False
                line = f"nbtoolkit: the page {self.files.html} was not written: {reason}\n"
                execution.log.write(line)
            write_json(self.files.record, record)
        except OSError as error:
            raise not_written(self.files.copy, error, NotebookFailed) from error
        return record

    def _write_page(self, copy: str) -> str:
        """Write the page; return why that failed, which does not fail a completed run."""
        try:
            self.files.write_html(copy)
        except OSError:
            raise
        except Exception as error:  # of nbconvert, of its templates, of an output in a cell
            return f"{type(error).__name__}: {error}"
        return ""

    def _sentence(self, failure: CellFailure) -> str:
        number, what = failure["cell"], failure["what"]
        return f"{f'code cell {number} of ' if number else ''}{self.source.name} {what}"

    def _error(self, notebook: NotebookNode, failure: CellFailure) -> dict[str, str]:
        """Return the parts of the error that describes a failure."""
        lines = [self._sentence(failure)]
        cell = dict(numbered(notebook)).get(failure["cell"])
        if cell is not None and failure["kind"] != "error":  # a traceback shows the line itself
            lines += ["  The cell:", *indented(cell.source, LAST_LINES)]
        if failure["traceback"]:
            lines += indented(failure["traceback"], 4 * LAST_LINES)
        elif failure["kind"] != "interrupt":
            lines += last_lines(self.files.log)
        return {
            "what": "\n".join(lines),
            "allowed": _ADVICE.get(failure["kind"], ""),
            "do": f"look at {self.files.copy}, correct the cause, and run: {self._command()} "
            "(an unfinished launch or sweep in it resumes from its checkpoint)",
        }

    def _command(self) -> str:
        """Return the shell command that repeats the run."""
        words = ["nbtoolkit", "run", str(self.source), "--output", str(self.files.copy)]
        for name, value in self.values.items():
            words += ["-p", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
        return shlex.join(words)


def prepare_job(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    given: Layer,
    *,
    kernel: str | None = None,
    cwd: str | os.PathLike[str] | None = None,
    html: bool = True,
) -> tuple[NotebookJob, NotebookNode]:
    """Check the arguments of a run; return the job, and the notebook as it was read.

    Raises:
        ParameterError: a parameter is unknown, missing or of another type.
        NotebookError: the notebook is unreadable or not Python, or there is no such kernel.
        MissingExtra: papermill, or nbconvert for the page, is not installed.
    """
    require_extras(html)
    source = Path(path).expanduser().absolute()
    notebook = read_notebook(source)
    refuse_syntax_errors(notebook, source.name)
    job = NotebookJob(
        source=source,
        values=check_parameters(given, declared_parameters(notebook, source.name), source.name),
        kernel=_find_kernel(notebook, kernel, source.name),
        files=files_for(source, output),
        html=html,
        cwd=Path(cwd or "").absolute(),
    )
    return job, notebook


def require_extras(html: bool) -> None:
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


def skip_slow_imports() -> None:
    """Let papermill load without two slow packages, unless they are loaded already.

    nbformat loads jsonschema, which imports ``rfc3987_syntax`` if JupyterLab has installed it: that
    builds 38 grammars (1.2 s) to check URIs, which the notebook schema does not contain. papermill
    imports ``pyarrow`` (0.2 s) to read notebooks from Hadoop, if MLflow has installed it. Both work
    without these packages by design. Only for a process of our own, never for a user's kernel.
    """
    modules = cast("dict[str, object]", sys.modules)
    for name in ("rfc3987_syntax", "pyarrow"):
        modules.setdefault(name, None)  # None: importing the module raises ImportError


def _find_kernel(notebook: NotebookNode, name: str | None, title: str) -> str:
    """Return the name of the kernel spec to run a notebook with.

    Args:
        notebook: its metadata names a kernel spec; default: ``python3``.
        name: a kernel spec that overrides the notebook's own.
        title: the notebook's name, for messages.

    Raises:
        NotebookError: the kernel is not installed here, or is not for Python.
    """
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    kernel = str(name or notebook.metadata.get("kernelspec", {}).get("name") or "python3")
    specs = KernelSpecManager()
    try:
        spec = specs.get_kernel_spec(kernel)
    except NoSuchKernel as error:
        raise NotebookError(
            f"{title} needs the kernel {kernel!r}, which is not installed here",
            allowed=", ".join(sorted(specs.find_kernel_specs())) or "none: no kernel is installed",
            do='choose one of these: kernel="python3", or --kernel python3 in a shell',
        ) from error
    if spec.language.lower() != "python":
        raise NotebookError(
            f"the kernel {kernel!r} of {title} runs {spec.language}",
            allowed="kernels for Python",
        )
    return kernel


@contextmanager
def _private_folder() -> Iterator[Path]:
    """Make a temporary folder for a kernel's connection file, sockets and IPython profile.

    The kernel uses sockets instead of ports, so that two kernels cannot choose the same port and no
    other user can connect.
    """
    folder = tempfile.mkdtemp(prefix="nbtoolkit-")
    if len(os.fsencode(folder)) + len("/kernel-5") > _SOCKET_LENGTH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="nbtoolkit-", dir="/tmp")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _published_file(folder: Path) -> Path:
    """Return the file in a kernel's private folder that ``nb.publish`` writes."""
    return folder / "published.json"


def _import_for_page() -> None:
    """Import the packages for the page (0.5 s) while the kernel starts."""
    import nbconvert.exporters.html  # noqa: F401


def _sentinel(reached: Path, token: str) -> str:
    """Return the code of the last cell: it writes a token, unless an earlier cell called exit."""
    write = f"__import__('pathlib').Path({str(reached)!r}).write_text({token!r})"
    return f"get_ipython().exit_now or {write};"
