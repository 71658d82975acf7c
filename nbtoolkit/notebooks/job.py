"""Job: one notebook on its way through papermill, and what is made of its end."""

from __future__ import annotations

import json
import secrets
import shlex
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import NotebookDied, NotebookFailed, NotebookTimeout
from nbtoolkit.notebooks.document import executed_copy, made_ready, numbered
from nbtoolkit.notebooks.event_loop import with_its_own_loop
from nbtoolkit.notebooks.execution import Execution, Failure
from nbtoolkit.notebooks.files import NotebookFiles, not_written
from nbtoolkit.notebooks.kernel import published_file
from nbtoolkit.notebooks.result import NotebookResult
from nbtoolkit.runtime.paths import read_json, write_json, write_whole

if TYPE_CHECKING:
    from nbformat import NotebookNode

_LAST_LINES = 12  # of the log, in an error's text
_LAST_BYTES = 4_000

_ERRORS = {"timeout": NotebookTimeout, "death": NotebookDied, "kernel": NotebookDied}

_ADVICE = {
    "exit": "let the last cell be the end: put what must not run under an `if`",
    "timeout": "give it more time (cell_timeout, timeout), or look where it waits",
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is run, with what, to where."""

    source: Path
    kernel: str
    """The kernel spec's name."""
    files: NotebookFiles
    values: dict[str, Any]
    """Checked values of parameters."""
    html: bool

    def run(self, notebook: NotebookNode, execution: Execution) -> NotebookResult:
        """Run the notebook to its end.

        Raises:
            NotebookFailed: it did not reach it.
        """
        begun = time.monotonic()
        token, reached = secrets.token_hex(8), execution.folder / "reached"
        ready = made_ready(notebook, self.values, _sentinel(reached, token))
        try:
            with_its_own_loop(partial(self._through_papermill, ready, execution))
        except KeyboardInterrupt:
            execution.fail("interrupt", "was interrupted")
            self._record(ready, execution, time.monotonic() - begun)
            raise
        if not execution.failure and _text(reached) != token:
            execution.fail("exit", "did not let the notebook come to its end")
        seconds = time.monotonic() - begun
        self._record(ready, execution, seconds)
        if execution.failure:
            raise self._error(notebook, execution.failure)
        return NotebookResult(
            values=read_json(published_file(execution.folder)) or {},
            parameters=self.values,
            output=self.files.copy,
            html=self.files.html if self.html else None,
            log=self.files.log,
            seconds=seconds,
        )

    def _through_papermill(self, ready: NotebookNode, execution: Execution) -> None:
        from nbclient.exceptions import DeadKernelError
        from papermill.exceptions import PapermillExecutionError
        from papermill.execute import execute_notebook

        from nbtoolkit.notebooks.client import ENGINE

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

    def _record(self, ready: NotebookNode, execution: Execution, seconds: float) -> None:
        """Write the executed copy, its page and the record.

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
            "seconds": round(seconds, 3),
            "failure": failure and vars(failure),
        }
        copy = executed_copy(execution.notebook or ready, told)
        try:
            write_whole(self.files.copy, copy)
            if self.html:
                self.files.write_html(copy)
            write_json(self.files.record, record)
        except OSError as error:
            raise not_written(self.files.copy, error, NotebookFailed) from error

    def _what(self, failure: Failure) -> str:
        where = f"code cell {failure.cell} of {self.source.name}" if failure.cell else ""
        return f"{where or self.source.name} {failure.what}"

    def _error(self, notebook: NotebookNode, failure: Failure) -> NotebookFailed:
        lines = [self._what(failure)]
        source = dict(numbered(notebook)).get(failure.cell)
        if source is not None and failure.kind != "error":  # a traceback shows the line itself
            lines += ["  The cell:", *_indented(source.source, _LAST_LINES)]
        if failure.traceback:
            lines += _indented(failure.traceback, 4 * _LAST_LINES)
        elif last := _tail(self.files.log):
            lines += ["  The last lines:", *_indented(last, _LAST_LINES)]
        error = _ERRORS.get(failure.kind, NotebookFailed)(
            "\n".join(lines),
            allowed=_ADVICE.get(failure.kind, ""),
            do=f"look at {self.files.copy}; when that is mended: {self._again()} "
            "(an unfinished launch or sweep in it goes on from its checkpoint)",
        )
        error.cell, error.output = failure.cell, self.files.copy
        return error

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


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LAST_BYTES))
        return file.read().decode(errors="replace").strip()


def _indented(text: str, lines: int) -> list[str]:
    """The last lines of a text, indented."""
    return [f"    {line}" for line in text.strip().splitlines()[-lines:]]
