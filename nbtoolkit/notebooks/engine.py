"""Run a notebook through papermill with a client that watches its kernel.

Imported only when a notebook is run: papermill takes half a second to load.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import psutil
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from traitlets.config import Config

from nbtoolkit.host import memory_limit
from nbtoolkit.launcher.failures import describe
from nbtoolkit.notebooks.document import executed_copy, is_injected, is_sentinel
from nbtoolkit.notebooks.progress import CellProgress
from nbtoolkit.run.paths import write_whole
from nbtoolkit.text_table import gib

if TYPE_CHECKING:
    from nbformat import NotebookNode


# --- a kernel's death ---
# How a kernel died: its memory when it was last seen, its exit code, and what that means.


_INTERVAL = 0.2  # seconds between two looks: one costs about a millisecond


@dataclass
class Memory:
    """How much memory a kernel and the processes it started were last seen to use."""

    size: int = 0
    """Bytes; shared pages count for each process."""
    seen: float = 0.0
    """When (``time.monotonic``)."""

    def look(self, pid: int) -> None:
        """Look, unless that was done a moment ago or the process is gone."""
        now = time.monotonic()
        if now - self.seen < _INTERVAL:
            return
        if size := _tree_size(pid):
            self.size, self.seen = size, now

    def __str__(self) -> str:
        if not self.size:
            return "its memory is not known"
        limit = memory_limit()
        of = f" of {gib(limit)}" if limit else ""
        return f"{gib(self.size)}{of} in use {time.monotonic() - self.seen:.1f} s before"


def meaning(code: int | None, asked: bool) -> str:
    """How a kernel ended, in words.

    Args:
        code: its exit code; negative: minus the signal.
        asked: whether a cell asked it to end (``exit()``, ``quit()``).
    """
    if asked or code == 0:
        return "ended its kernel with exit() or quit()"
    return f"lost its kernel: {describe(code)}"


def _tree_size(pid: int) -> int:
    """Return the resident bytes of a process and its descendants; 0 if it is gone."""
    size = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        kernel = psutil.Process(pid)
        for process in [kernel, *kernel.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                size += process.memory_info().rss
    return size


# --- event loop ---
# The event loop that nbclient makes in a thread without one, closed when the run is over.


def with_its_own_loop(work: Callable[[], None]) -> None:
    """Do ``work``; close the event loop that it left in this thread, unless it is the main one.

    nbclient keeps a loop (three open files) for each thread that ever ran a notebook, in a context
    variable: in a copy of the context nobody else comes to know of it. In a thread whose loop runs,
    as in a kernel, it uses another one, which stays.
    """
    if threading.current_thread() is threading.main_thread() or _runs():
        work()
        return
    try:
        contextvars.copy_context().run(work)
    finally:
        asyncio.get_event_loop().close()
        asyncio.set_event_loop(None)


def _runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# --- execution ---


_SAVE_SECONDS = 10.0  # between two saves of a cell that goes on writing
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass
class CellFailure:
    """A cell that did not end well."""

    cell: int
    """Its number among the user's code cells, from 1; 0: before the first."""
    kind: str
    """``error``, ``exit``, ``death``, ``timeout`` or ``kernel`` (it did not start)."""
    what: str
    """A sentence without a subject: ``raised ValueError: no luck``."""
    traceback: str = ""
    """Without colours."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a run of a notebook may take."""

    cell_timeout: float | None = None
    """Seconds a cell may take."""
    timeout: float | None = None
    """Seconds the whole notebook may take, from the kernel's start."""
    max_output: int
    """Characters of output kept of one cell."""


@dataclass
class Execution:
    """A notebook that runs: its files, limits, and what has happened so far."""

    copy: Path
    """Where the executed copy goes."""
    log: TextIO
    environ: dict[str, str]
    """The kernel's environment variables."""
    cwd: Path
    folder: Path
    """The kernel's private folder."""
    progress: CellProgress
    limits: Limits
    """The notebook's time runs from now."""
    memory: Memory = field(default_factory=Memory)
    failure: CellFailure | None = None
    started: bool = False
    """Whether the kernel has started: a cell has begun."""
    notebook: NotebookNode | None = None
    """What runs, with its outputs so far: papermill's own copy of what it was given."""
    number: int = 0
    """The running cell's number; the injected cell has its predecessor's."""
    begun: float = field(default_factory=time.monotonic)
    _kept: int = 0
    _hidden: int = 0
    _saved: float = 0.0

    def time_left(self) -> float | None:
        """Seconds the cell that begins now may take; None: no limit. Never 0, which is no limit."""
        cell, whole = self.limits.cell_timeout, self.limits.timeout
        left = [] if cell is None else [cell]
        left += [] if whole is None else [self.begun + whole - time.monotonic()]
        return max(0.01, min(left)) if left else None

    def too_long(self) -> str:
        """Which limit was passed, in words."""
        whole = self.limits.timeout
        if whole is not None and time.monotonic() - self.begun >= whole:
            return f"was still running after the {whole:g} s that the notebook may take"
        return f"took longer than the {self.limits.cell_timeout:g} s that a cell may"

    def begin(self, cell: NotebookNode) -> None:
        """A cell begins."""
        self.started = True
        self._kept = self._hidden = 0
        if cell.cell_type == "code" and not is_injected(cell) and not is_sentinel(cell):
            self.number += 1
            self.progress.begin(self.number, cell.source)

    def end(self, cell: NotebookNode, notebook: NotebookNode) -> None:
        """A cell has ended, well or not."""
        if self._hidden:
            text = f"\n... {self._hidden:,} characters more: {self.log.name}\n"
            cell.outputs.append(_stream(text))
        if cell.cell_type == "code" and not is_injected(cell) and not is_sentinel(cell):
            self.progress.end(self.failure.kind if self.failure else "")
        self.save(notebook)

    def fail(self, kind: str, what: str, traceback: str = "") -> None:
        """The running cell has failed; the first failure stands."""
        clean = _COLOURS.sub("", traceback)
        self.failure = self.failure or CellFailure(self.number, kind, what, clean)

    def take(self, text: str) -> str:
        """Log what the running cell writes; the part of it that the notebook keeps."""
        self.log.write(text)
        self.log.flush()
        self.progress.output(text)
        return text[: self.room(len(text))]

    def room(self, size: int) -> int:
        """Count an output; how many of its characters the notebook still keeps."""
        kept = max(0, min(size, self.limits.max_output - self._kept))
        self._kept += size
        self._hidden += size - kept
        return kept

    def cleared(self) -> None:
        """The cell's output so far was taken back (``clear_output``)."""
        self._kept = self._hidden = 0

    def save_now_and_then(self, notebook: NotebookNode) -> None:
        """Save in the middle of a long cell, so that one can look."""
        if time.monotonic() - self._saved >= _SAVE_SECONDS:
            self.save(notebook)

    def save(self, notebook: NotebookNode) -> None:
        """Write the executed copy as far as it is."""
        self.notebook, self._saved = notebook, time.monotonic()
        write_whole(self.copy, executed_copy(notebook), durable=False)


def _stream(text: str) -> NotebookNode:
    from nbformat.v4 import new_output

    node: NotebookNode = new_output("stream", name="stderr", text=text)
    return node


ENGINE = "nbtoolkit"

# Seconds to wait for the rest of a cell's output; then it counts as lost. What a cell has printed
# in a loop takes some seconds to come through.
_LOST_OUTPUT = 60.0

# Seconds for a kernel that lives to answer; one that dies is noticed at once. ipykernel takes 1 s
# to start, and a minute from a cold disk beside other work. Less where the notebook has less time.
_START_SECONDS, _LEAST_START_SECONDS = 600.0, 60.0


class Client(PapermillNotebookClient):
    """Runs the cells; keeps the failure, the memory and the output within its limit."""

    def __init__(self, manager: Any, execution: Execution, **options: Any) -> None:
        super().__init__(manager, **options)
        self._execution = execution
        self._asked_to_end = False

    def execute(self, **kwargs: Any) -> Any:
        """Start the kernel with its own environment, and run all cells in it."""
        run = self._execution
        # What native code and ipykernel itself write past the notebook goes to the log as well.
        pipes = {"stdout": run.log.fileno(), "stderr": run.log.fileno()}
        # Older kernels (6.17 on Kaggle) print three lines about their debugger from Python 3.11 on.
        environ = {"PYDEVD_DISABLE_FILE_VALIDATION": "1", **run.environ}
        return super().execute(env=environ, cwd=str(run.cwd), **pipes, **kwargs)

    def papermill_execute_cells(self) -> None:
        """Run one cell after another, to the first that fails."""
        for index, cell in enumerate(self.nb.cells):
            self.nb_man.cell_start(cell, index)
            self._execution.begin(cell)
            try:
                self.execute_cell(cell, index)
                if self._asked_to_end:
                    self._fail(cell, index, "exit", meaning(None, asked=True))
            except CellExecutionError as error:
                self._raised(cell, index, error)
            except CellTimeoutError:
                self._fail(cell, index, "timeout", self._execution.too_long())
            except DeadKernelError:
                self._fail(cell, index, "death", self._death())
            finally:
                self.nb_man.cell_complete(cell, cell_index=index)
                self._execution.end(cell, self.nb)
            if self._execution.failure:
                return

    def wait_for_reply(self, *args: Any, **kwargs: Any) -> Any:
        """The kernel's answer; of one that is gone, what papermill looks for in it."""
        if self._execution.failure:
            return {"content": {"language_info": {"name": "python"}}}
        return super().wait_for_reply(*args, **kwargs)

    def process_message(self, msg: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Take one message of the running cell, if there is room for it."""
        kind, content = msg["msg_type"], msg["content"]
        if kind == "stream":
            content["text"] = self._execution.take(content["text"])
            if not content["text"]:
                return None
        elif kind in ("display_data", "execute_result"):
            size = sum(len(str(data)) for data in content["data"].values())
            if self._execution.room(size) < size:
                return None
        elif kind == "clear_output":
            self._execution.cleared()
        self._look()
        self._execution.save_now_and_then(self.nb)
        return super().process_message(msg, *args, **kwargs)

    async def _async_poll_for_reply(self, *args: Any, **kwargs: Any) -> Any:
        reply = await super()._async_poll_for_reply(*args, **kwargs)
        payload = reply["content"].get("payload") or []
        self._asked_to_end |= any(part.get("source") == "ask_exit" for part in payload)
        return reply

    async def _async_check_alive(self) -> None:
        self._look()
        await super()._async_check_alive()

    def _look(self) -> None:
        process = getattr(self.km.provisioner, "process", None)
        if process is not None:
            self._execution.memory.look(process.pid)

    def _raised(self, cell: Any, index: int, error: CellExecutionError) -> None:
        name, text = getattr(error, "ename", "an error"), getattr(error, "evalue", "")
        if name == "SystemExit":
            what = f"ended the notebook with sys.exit({text})"
            self._fail(cell, index, "exit", what)
        else:
            self._fail(cell, index, "error", f"raised {name}: {text}", str(error.traceback))

    def _fail(self, cell: Any, index: int, kind: str, what: str, traceback: str = "") -> None:
        self._execution.fail(kind, what, traceback)
        self.nb_man.cell_exception(cell, cell_index=index)
        self.shutdown_kernel = "immediate"  # one that hangs would be waited for

    def _death(self) -> str:
        process = getattr(self.km.provisioner, "process", None)
        code = None if process is None else process.poll()
        return f"{meaning(code, asked=False)}; {self._execution.memory}"


class Engine(NBClientEngine):
    """Papermill's engine with :class:`Client` in it."""

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: Any,
        kernel_name: str,
        *,
        execution: Execution,
        **_: Any,
    ) -> Any:
        """Run a notebook's cells (called by papermill)."""
        start = max(_LEAST_START_SECONDS, execution.limits.timeout or _START_SECONDS)
        connection = execution.folder / "kernel"
        kernel = {
            "transport": "ipc",
            "connection_file": f"{connection}.json",
            "ip": str(connection),
        }
        return Client(
            nb_man,
            execution,
            kernel_name=kernel_name,
            startup_timeout=int(min(start, _START_SECONDS)),
            timeout_func=lambda cell: execution.time_left(),
            iopub_timeout=int(_LOST_OUTPUT),
            raise_on_iopub_timeout=False,
            config=Config({"KernelManager": kernel}),
            log=_silent(),
        ).execute()


def _silent() -> logging.Logger:
    """Failures are raised, with more in them than nbclient's log says."""
    log = logging.Logger("nbtoolkit.notebooks", logging.CRITICAL + 1)
    log.addHandler(logging.NullHandler())
    return log


papermill_engines.register(ENGINE, Engine)
