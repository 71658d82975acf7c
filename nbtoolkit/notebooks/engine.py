"""Extend papermill's engine by what none of its arguments gives.

Papermill runs the cells. Its client has no limit for output, so that a flood fills the memory of
this process and the executed copy. It sends the next cell to a kernel that is ending after
``exit()``. It marks a cell in which the kernel died as completed, and does not tell the kernel's
exit code. And it writes the executed copy in place, so that a reader, or a kill, finds half of it.

Import this module only to run a notebook: papermill takes half a second to load.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines

from nbtoolkit.host import memory_limit
from nbtoolkit.notebooks.document import executed_copy, is_own_code
from nbtoolkit.notebooks.handle import FailureKind
from nbtoolkit.run.paths import write_whole
from nbtoolkit.text_table import gib

if TYPE_CHECKING:
    from nbformat import NotebookNode
    from papermill.engines import NotebookExecutionManager

    from nbtoolkit.notebooks.job import NotebookJob

ENGINE = "nbtoolkit"

# Seconds between two saves while one cell keeps writing output.
_SAVE_SECONDS = 10.0

# Seconds between two updates of the line of a cell.
_PROGRESS_SECONDS = 0.2

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class CellProgress:
    """Writes a line per cell to the process that waits; updates it while the cell runs.

    Args:
        descriptor: a pipe to that process; None: nobody waits.
        cells: number of cells.
        width: columns of the terminal; 0 writes finished cells only.
    """

    def __init__(self, descriptor: int | None, cells: int, width: int) -> None:
        self._pipe = None if descriptor is None else os.fdopen(descriptor, "w", encoding="utf-8")
        self._cells = cells
        self._width = width
        self._label = ""
        self._started_at = self._written_at = 0.0

    def start(self, number: int, source: str) -> None:
        """Begin the line of a cell; it shows the first statement that is not an import."""
        lines = [line.strip() for line in source.splitlines() if line.strip()]
        statements = [line for line in lines if not line.startswith(("#", "import ", "from "))]
        shown = (statements or lines or [""])[0]
        self._label = f"[{number}/{self._cells}] {shown[:60]}"
        self._started_at = time.monotonic()
        self._update("")

    def output(self, text: str) -> None:
        """Show the last line of the running cell's output."""
        if time.monotonic() - self._written_at >= _PROGRESS_SECONDS and text.strip():
            self._update(text.strip().splitlines()[-1])

    def end(self, outcome: str) -> None:
        """Complete the line; ``outcome`` says how the cell failed, if it did."""
        line = f"{self._line(outcome)}\n"
        self._write(f"\r\x1b[K{line}" if self._width else line)

    def _update(self, text: str) -> None:
        if self._width:
            self._write(f"\r\x1b[K{self._line(text)[: self._width - 1]}")

    def _line(self, text: str) -> str:
        line = f"{self._label}  {time.monotonic() - self._started_at:.1f} s"
        return f"{line}  {text}" if text else line

    def _write(self, text: str) -> None:
        self._written_at = time.monotonic()
        if self._pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # the parent has ended: a signal comes
                self._pipe.write(text)
                self._pipe.flush()


@dataclass(frozen=True)
class CellFailure:
    """The failure that ended a run."""

    kind: FailureKind
    cell: int
    """Number of the code cell, from 1; 0: the run failed before the first cell."""
    what: str
    """A sentence without a subject: ``raised ValueError: no luck``."""
    traceback: str = ""
    """Without colour codes; empty unless a cell raised."""


@dataclass(kw_only=True)
class Execution:
    """A running notebook: its limits, and its state so far."""

    job: NotebookJob
    """Its time for the whole notebook counts from the creation of this object."""
    progress: CellProgress
    notebook: NotebookNode
    """The notebook; once the kernel has started, papermill's copy with the outputs so far."""
    started: bool = False
    """Whether the kernel has started: a cell has begun."""
    number: int = 0
    """The running cell's number; the injected cell has the number of the cell before it."""
    failure: CellFailure | None = None
    started_at: float = field(default_factory=time.monotonic)
    _size: int = 0
    _omitted: int = 0
    _saved_at: float = 0.0

    def time_left(self, _: NotebookNode | None = None) -> float | None:
        """Seconds that the cell which starts now may take; None: no limit. Never 0: no limit."""
        left = [] if self.job.cell_timeout is None else [self.job.cell_timeout]
        if self.job.timeout is not None:
            left.append(self.started_at + self.job.timeout - time.monotonic())
        return max(0.01, min(left)) if left else None

    def fail(self, kind: FailureKind, problem: str) -> None:
        """Record a failure of the running cell; only the first one counts."""
        self.failure = self.failure or CellFailure(kind, self.number, problem)

    def start_cell(self, cell: NotebookNode, notebook: NotebookNode) -> None:
        """Record that a cell starts."""
        self.started = True
        self.notebook = notebook
        self.clear_output()
        if is_own_code(cell):
            self.number += 1
            self.progress.start(self.number, cell.source)

    def end_cell(self, cell: NotebookNode) -> None:
        """Record that a cell has ended, successfully or not, and save the executed copy."""
        if self._omitted:
            from nbformat.v4 import new_output

            text = f"\n... {self._omitted:,} characters more: {self.job.files.log}\n"
            cell.outputs.append(new_output("stream", name="stderr", text=text))
        if is_own_code(cell):
            self.progress.end(self.failure.kind if self.failure else "")
        self.save()

    def write_output(self, text: str) -> str:
        """Log text that the running cell writes; return the part that the notebook keeps."""
        sys.stdout.write(text)
        sys.stdout.flush()
        self.progress.output(text)
        return text[: self.count_output(len(text))]

    def count_output(self, size: int) -> int:
        """Count an output of ``size`` characters; return how many of them the notebook keeps."""
        kept = max(0, min(size, self.job.max_output - self._size))
        self._size += size
        self._omitted += size - kept
        return kept

    def clear_output(self) -> None:
        """Forget the running cell's output so far: the cell called ``clear_output``."""
        self._size = self._omitted = 0

    def save(self, every: float = 0.0) -> None:
        """Write the executed copy with the outputs so far, if the last time is long enough ago."""
        if time.monotonic() - self._saved_at >= every:
            write_whole(self.job.files.copy, executed_copy(self.notebook), durable=False)
            self._saved_at = time.monotonic()


class MessageContent(TypedDict, total=False):
    """The fields of a Jupyter message's content that the client reads.

    See https://jupyter-client.readthedocs.io/en/stable/messaging.html.
    """

    text: str
    """Of a ``stream`` message."""
    data: dict[str, object]
    """Of ``display_data`` and ``execute_result``: MIME type -> representation."""
    payload: list[dict[str, object]] | None
    """Of an execute reply: requests to the client. The source of ``exit()`` is ``ask_exit``."""


class JupyterMessage(TypedDict):
    """A Jupyter message, as nbclient passes it on."""

    msg_type: str
    content: MessageContent


class Client(PapermillNotebookClient):
    """Papermill's client, which also limits output, notices ``exit()`` and describes a failure."""

    def __init__(
        self, manager: NotebookExecutionManager, execution: Execution, **options: object
    ) -> None:
        super().__init__(manager, **options)
        self._execution = execution
        self._exit_requested = False

    def execute_cell(self, cell: NotebookNode, cell_index: int, **options: object) -> None:
        """Run one cell.

        Raises:
            CellExecutionError: the cell raised an exception; papermill runs no further cell.
            CellTimeoutError: a time limit was exceeded.
            DeadKernelError: the kernel died, or ends because the cell called ``exit()``.
        """
        self._execution.start_cell(cell, self.nb)
        try:
            super().execute_cell(cell, cell_index, **options)
            if self._exit_requested:
                raise DeadKernelError("exit() or quit()")
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            self._execution.failure = self._describe(error)
            self.nb_man.cell_exception(cell, cell_index=cell_index)
            # A kernel that hangs would not react to a request to shut down.
            self.shutdown_kernel = "immediate"
            raise
        finally:
            self._execution.end_cell(cell)

    def process_message(
        self, msg: JupyterMessage, *args: object, **kwargs: object
    ) -> NotebookNode | None:
        """Process one message of the running cell; drop output beyond the limit."""
        kind = msg["msg_type"]
        body = msg["content"]
        execution = self._execution
        if kind == "stream":
            body["text"] = execution.write_output(body["text"])
            if not body["text"]:
                return None
        elif kind in ("display_data", "execute_result"):
            size = sum(len(str(shown)) for shown in body["data"].values())
            if execution.count_output(size) < size:
                return None
        elif kind == "clear_output":
            execution.clear_output()
        execution.save(every=_SAVE_SECONDS)
        output: NotebookNode | None = super().process_message(msg, *args, **kwargs)
        return output

    async def _async_poll_for_reply(self, *args: object, **kwargs: object) -> JupyterMessage:
        # nbclient 0.7 has a hook with the reply; Kaggle's image has 0.5.13.
        reply: JupyterMessage = await super()._async_poll_for_reply(*args, **kwargs)
        payload = reply["content"].get("payload") or []
        self._exit_requested |= any(part.get("source") == "ask_exit" for part in payload)
        return reply

    def _describe(self, error: Exception) -> CellFailure:
        kind: FailureKind = "error"
        name = getattr(error, "ename", "an error")
        text = getattr(error, "evalue", "")
        problem = f"raised {name}: {text}"
        traceback = str(getattr(error, "traceback", ""))
        if isinstance(error, CellTimeoutError):
            kind = "timeout"
            problem = self._describe_timeout()
        elif self._exit_requested:
            kind = "exit"
            problem = "ended its kernel with exit() or quit()"
        elif isinstance(error, DeadKernelError):
            kind = "death"
            problem = f"lost its kernel: {self._describe_death()}"
        elif name == "SystemExit":
            kind = "exit"
            problem = f"ended the notebook with sys.exit({text})"
        if kind != "error":
            traceback = ""
        plain = _COLOURS.sub("", traceback)
        return CellFailure(kind, self._execution.number, problem, plain)

    def _describe_death(self) -> str:
        from nbtoolkit.launcher.failures import describe  # 0.25 s

        process = getattr(self.km.provisioner, "process", None)
        code = None if process is None else process.poll()
        # The kernel is the only child that this process has waited for.
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        return f"{describe(code)}; it used at most {gib(peak)} of {gib(memory_limit())}"

    def _describe_timeout(self) -> str:
        job = self._execution.job
        started_at = self._execution.started_at
        if job.timeout is not None and time.monotonic() - started_at >= job.timeout:
            return f"was still running after the {job.timeout:g} s that the notebook may take"
        return f"took longer than the {job.cell_timeout:g} s that a cell may"


class Engine(NBClientEngine):
    """Papermill's engine with :class:`Client`."""

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: NotebookExecutionManager,
        kernel_name: str,
        *,
        execution: Execution,
        client_options: dict[str, object],
        **_: object,
    ) -> NotebookNode:
        """Run a notebook's cells (called by papermill)."""
        client = Client(nb_man, execution, kernel_name=kernel_name, **client_options)
        notebook: NotebookNode = client.execute()
        return notebook


papermill_engines.register(ENGINE, Engine)
