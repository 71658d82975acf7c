"""Run one notebook through papermill in its kernel, and record how it ended."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from nbtoolkit.errors import NotebookError, NotebookFailed
from nbtoolkit.notebooks.document import executed_copy, made_ready, numbered
from nbtoolkit.notebooks.engine import CellFailure, Execution, Limits, with_its_own_loop
from nbtoolkit.notebooks.handle import (
    LAST_LINES,
    NotebookFiles,
    NotebookResult,
    indented,
    last_lines,
    not_written,
    outcome,
)
from nbtoolkit.notebooks.progress import CellProgress, Display
from nbtoolkit.notebooks.publish import TARGET as PUBLISHED
from nbtoolkit.run.paths import RUNS_FILE, read_json, write_json, write_whole

if TYPE_CHECKING:
    from nbformat import NotebookNode


# --- kernel ---
# The kernel a notebook is run with: found by name, before anything is started.


_SOCKET_LENGTH = 107  # bytes of a Unix socket's path, see man 7 unix


def find_kernel(notebook: NotebookNode, wish: str | None, name: str) -> str:
    """The name of the kernel spec to run a notebook with.

    Args:
        notebook: its metadata names one; without it: ``python3``.
        wish: a name that beats the notebook's own.
        name: the notebook's name, for messages.

    Raises:
        NotebookError: there is no such kernel here, or it is not one for Python.
    """
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    wanted = wish or notebook.metadata.get("kernelspec", {}).get("name") or "python3"
    specs = KernelSpecManager()
    try:
        spec = specs.get_kernel_spec(wanted)
    except NoSuchKernel as error:
        raise NotebookError(
            f"{name} wants the kernel {wanted!r}, which is not installed here",
            allowed=", ".join(sorted(specs.find_kernel_specs())) or "none: no kernel is installed",
            do='choose one of these: kernel="python3", or --kernel python3 in a shell',
        ) from error
    if spec.language.lower() != "python":
        raise NotebookError(
            f"the kernel {wanted!r} of {name} speaks {spec.language}",
            allowed="kernels for Python",
        )
    return str(wanted)


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder for one kernel, removed at the end: connection file, sockets, IPython profile.

    Sockets instead of ports: two kernels cannot meet on one, and nobody else can connect.
    """
    folder = tempfile.mkdtemp(prefix="nbtoolkit-")
    if len(os.fsencode(folder)) + len("/kernel-5") > _SOCKET_LENGTH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="nbtoolkit-", dir="/tmp")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def published_file(folder: Path) -> Path:
    """Where, in a kernel's private folder, ``nb.publish`` writes."""
    return folder / "published.json"


def kernel_environ(folder: Path, runs: Path) -> dict[str, str]:
    """The variables of a kernel: this process's, and its own.

    Args:
        folder: its private folder.
        runs: the file to which it tells which runs it has started.
    """
    return {
        **os.environ,
        "IPYTHONDIR": str(folder / "ipython"),
        PUBLISHED: str(published_file(folder)),
        RUNS_FILE: str(runs),
    }


# --- job ---


_ADVICE = {
    "exit": "let the last cell be the end: put what must not run under an `if`",
    "timeout": "give it more time (cell_timeout, timeout), or look where it waits",
}


@dataclass(frozen=True, kw_only=True)
class NotebookJob:
    """What is run, with what, to where."""

    source: Path
    kernel: str
    """The kernel spec's name."""
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
            notebook: as it was read, and checked.
            log: of :meth:`NotebookFiles.open`.
            limits: what it may take.
            display: what of it is shown.

        Raises:
            NotebookFailed: it did not reach its end.
        """
        with private_folder() as folder:
            execution = Execution(
                copy=self.files.copy,
                log=log,
                environ=kernel_environ(folder, self.files.runs),
                cwd=self.cwd,
                folder=folder,
                progress=CellProgress(display, len(list(numbered(notebook)))),
                limits=limits,
            )
            return self._execute(notebook, execution)

    def _execute(self, notebook: NotebookNode, execution: Execution) -> NotebookResult:
        begun = time.monotonic()
        token, reached = secrets.token_hex(8), execution.folder / "reached"
        ready = made_ready(notebook, self.values, _sentinel(reached, token))
        try:
            with_its_own_loop(partial(self._through_papermill, ready, execution))
        except KeyboardInterrupt:
            execution.fail("interrupt", "was interrupted")
            self._record(notebook, ready, execution, time.monotonic() - begun)
            raise
        if not execution.failure and _text(reached) != token:
            execution.fail("exit", "did not let the notebook come to its end")
        record = self._record(notebook, ready, execution, time.monotonic() - begun)
        return outcome(self.files, record)

    def _through_papermill(self, ready: NotebookNode, execution: Execution) -> None:
        from nbclient.exceptions import DeadKernelError
        from papermill.exceptions import PapermillExecutionError
        from papermill.execute import execute_notebook

        from nbtoolkit.notebooks.engine import ENGINE

        page = threading.Thread(target=_import_for_page)
        if self.html:
            page.start()
        try:
            execute_notebook(
                ready,
                None,  # the client saves, whole and without the sentinel
                engine_name=ENGINE,
                kernel_name=self.kernel,
                language="python",
                progress_bar=False,
                execution=execution,
            )
        except PapermillExecutionError:
            pass  # the client knows; a cell tagged raises-exception is no failure
        except DeadKernelError:
            pass  # after the last cell: whether it was reached says the sentinel
        except (RuntimeError, OSError) as error:  # it died before it answered, or is no program
            if execution.started and isinstance(error, OSError):
                raise not_written(self.files.copy, error, NotebookFailed) from error
            if execution.started:
                raise
            execution.fail("kernel", f"could not start its kernel {self.kernel!r}: {error}")
        finally:
            if self.html:
                page.join()

    def _record(
        self, notebook: NotebookNode, ready: NotebookNode, execution: Execution, seconds: float
    ) -> dict[str, Any]:
        """Write the executed copy, its page and the record, which is returned.

        Raises:
            NotebookFailed: the disk is full, or the folder is gone.
        """
        failure = execution.failure
        told = f"{self._what(failure)}\n{failure.traceback}" if failure else ""
        record = {
            "status": "failed" if failure else "completed",
            "notebook": str(self.source),
            "kernel": self.kernel,
            "parameters": self.values,
            "values": read_json(published_file(execution.folder)) or {},
            "html": self.html,
            "seconds": round(seconds, 3),
            "failure": vars(failure) if failure else None,
            "error": self._error(notebook, failure) if failure else None,
        }
        copy = executed_copy(execution.notebook or ready, told)
        try:
            write_whole(self.files.copy, copy)
            if self.html and (why := self._no_page(copy)):
                record["html"] = False
                execution.log.write(f"nbtoolkit: the page {self.files.html} was not made: {why}\n")
            write_json(self.files.record, record)
        except OSError as error:
            raise not_written(self.files.copy, error, NotebookFailed) from error
        return record

    def _no_page(self, copy: str) -> str | None:
        """Write the page; why that failed, which does not undo a run that succeeded."""
        try:
            self.files.write_html(copy)
        except OSError:
            raise
        except Exception as error:  # of nbconvert, of its templates, of what a cell has shown
            return f"{type(error).__name__}: {error}"
        return None

    def _what(self, failure: CellFailure) -> str:
        where = f"code cell {failure.cell} of {self.source.name}" if failure.cell else ""
        return f"{where or self.source.name} {failure.what}"

    def _error(self, notebook: NotebookNode, failure: CellFailure) -> dict[str, str]:
        """What is told of a failure, in the parts of an error."""
        lines = [self._what(failure)]
        source = dict(numbered(notebook)).get(failure.cell)
        if source is not None and failure.kind != "error":  # a traceback shows the line itself
            lines += ["  The cell:", *indented(source.source, LAST_LINES)]
        if failure.traceback:
            lines += indented(failure.traceback, 4 * LAST_LINES)
        elif failure.kind != "interrupt":
            lines += last_lines(self.files.log)
        return {
            "what": "\n".join(lines),
            "allowed": _ADVICE.get(failure.kind, ""),
            "do": f"look at {self.files.copy}; when that is mended: {self._again()} "
            "(an unfinished launch or sweep in it goes on from its checkpoint)",
        }

    def _again(self) -> str:
        """The shell command that runs it again."""
        words = ["nbtoolkit", "run", str(self.source), "--output", str(self.files.copy)]
        for name, value in self.values.items():
            words += ["-p", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
        return shlex.join(words)


def _import_for_page() -> None:
    """Import while the kernel starts what the page needs afterwards: 0.5 s."""
    import nbconvert.exporters.html  # noqa: F401


def _sentinel(reached: Path, token: str) -> str:
    """The last cell: it says that it was reached, unless a cell before it asked for the end."""
    written = f"__import__('pathlib').Path({str(reached)!r}).write_text({token!r})"
    return f"get_ipython().exit_now or {written};"


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
