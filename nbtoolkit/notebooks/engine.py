"""Run a notebook's cells through papermill, with a client that watches the kernel.

Import this module only to run a notebook: papermill takes half a second to load.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from traitlets.config import Config

from nbtoolkit.launcher.failures import describe
from nbtoolkit.notebooks.execution import Execution
from nbtoolkit.notebooks.handle import FailureKind

if TYPE_CHECKING:
    from nbformat import NotebookNode
    from papermill.engines import NotebookExecutionManager

ENGINE = "nbtoolkit"

# Seconds to wait for the rest of a cell's output; after that it counts as lost. The output of a
# loop that prints takes some seconds to arrive.
_LOST_OUTPUT_SECONDS = 60.0

# Seconds for a live kernel to answer; a dead one is noticed at once. ipykernel takes 1 s to start,
# and a minute from a cold disk beside other work. A notebook with a shorter time limit waits less.
_START_SECONDS, _LEAST_START_SECONDS = 600.0, 60.0

_EXITED = "ended its kernel with exit() or quit()"


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
    """Run the cells; record the first failure and the memory, and limit the output that is kept."""

    def __init__(
        self, manager: NotebookExecutionManager, execution: Execution, **options: object
    ) -> None:
        super().__init__(manager, **options)
        self._execution = execution
        self._exit_requested = False

    def execute(self, **kwargs: object) -> NotebookNode:
        """Start the kernel with its own environment, and run all cells in it."""
        run = self._execution
        # Output that bypasses the notebook, of native code and of ipykernel, goes to the log too.
        pipes = {"stdout": run.log.fileno(), "stderr": run.log.fileno()}
        # Older kernels (6.17 on Kaggle) print three lines about their debugger from Python 3.11 on.
        environ = {"PYDEVD_DISABLE_FILE_VALIDATION": "1", **run.environ}
        notebook: NotebookNode = super().execute(env=environ, cwd=str(run.cwd), **pipes, **kwargs)
        return notebook

    def papermill_execute_cells(self) -> None:
        """Run the cells in order, up to the first that fails."""
        for index, cell in enumerate(self.nb.cells):
            self.nb_man.cell_start(cell, index)
            self._execution.start_cell(cell)
            try:
                self.execute_cell(cell, index)
                if self._exit_requested:
                    self._fail(cell, index, "exit", _EXITED)
            except CellExecutionError as error:
                self._fail_with(cell, index, error)
            except CellTimeoutError:
                self._fail(cell, index, "timeout", self._execution.describe_timeout())
            except DeadKernelError:
                self._fail(cell, index, "death", self._describe_death())
            finally:
                self.nb_man.cell_complete(cell, cell_index=index)
                self._execution.finish_cell(cell, self.nb)
            if self._execution.failure:
                return

    def wait_for_reply(self, *args: object, **kwargs: object) -> dict[str, Any] | None:
        """Return the kernel's reply; after a failure, the part of one that papermill reads."""
        if self._execution.failure:
            return {"content": {"language_info": {"name": "python"}}}
        reply: dict[str, Any] | None = super().wait_for_reply(*args, **kwargs)
        return reply

    def process_message(
        self, msg: JupyterMessage, *args: object, **kwargs: object
    ) -> NotebookNode | None:
        """Process one message of the running cell; drop output beyond the limit."""
        kind, body = msg["msg_type"], msg["content"]
        if kind == "stream":
            kept = self._execution.write_output(body["text"])
            if not kept:
                return None
            body["text"] = kept
        elif kind in ("display_data", "execute_result"):
            size = sum(len(str(shown)) for shown in body["data"].values())
            if self._execution.count_output(size) < size:
                return None
        elif kind == "clear_output":
            self._execution.clear_output()
        self._measure_memory()
        self._execution.save_if_due(self.nb)
        output: NotebookNode | None = super().process_message(msg, *args, **kwargs)
        return output

    async def _async_poll_for_reply(self, *args: object, **kwargs: object) -> JupyterMessage:
        reply: JupyterMessage = await super()._async_poll_for_reply(*args, **kwargs)
        payload = reply["content"].get("payload") or []
        self._exit_requested |= any(part.get("source") == "ask_exit" for part in payload)
        return reply

    async def _async_check_alive(self) -> None:
        self._measure_memory()
        await super()._async_check_alive()

    def _measure_memory(self) -> None:
        process = getattr(self.km.provisioner, "process", None)
        if process is not None:
            self._execution.memory.measure(process.pid)

    def _fail_with(self, cell: NotebookNode, index: int, error: CellExecutionError) -> None:
        name, text = getattr(error, "ename", "an error"), getattr(error, "evalue", "")
        if name == "SystemExit":
            self._fail(cell, index, "exit", f"ended the notebook with sys.exit({text})")
        else:
            self._fail(cell, index, "error", f"raised {name}: {text}", str(error.traceback))

    def _fail(
        self, cell: NotebookNode, index: int, kind: FailureKind, what: str, traceback: str = ""
    ) -> None:
        self._execution.fail(kind, what, traceback)
        self.nb_man.cell_exception(cell, cell_index=index)
        # A kernel that hangs would not react to a request to shut down.
        self.shutdown_kernel = "immediate"

    def _describe_death(self) -> str:
        process = getattr(self.km.provisioner, "process", None)
        code = None if process is None else process.poll()
        what = _EXITED if code == 0 else f"lost its kernel: {describe(code)}"
        return f"{what}; {self._execution.memory}"


class Engine(NBClientEngine):
    """Papermill's engine that uses :class:`Client`."""

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: NotebookExecutionManager,
        kernel_name: str,
        *,
        execution: Execution,
        **_: object,
    ) -> NotebookNode:
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
            iopub_timeout=int(_LOST_OUTPUT_SECONDS),
            raise_on_iopub_timeout=False,
            config=Config({"KernelManager": kernel}),
            log=_silent_log(),
        ).execute()


def _silent_log() -> logging.Logger:
    """Return a log without output: the errors that are raised say more than nbclient's log."""
    log = logging.Logger("nbtoolkit.notebooks", logging.CRITICAL + 1)
    log.addHandler(logging.NullHandler())
    return log


papermill_engines.register(ENGINE, Engine)


def run_with_own_loop(function: Callable[[], None]) -> None:
    """Call ``function``; close the event loop that nbclient leaves in a thread.

    nbclient keeps a loop (three open files) for each thread that ever ran a notebook, in a context
    variable. In a copy of the context, that loop stays invisible to other code. The main thread
    keeps its loop. A thread with a running loop, as in a kernel, is left alone: nbclient uses
    another loop there, which stays.
    """
    if threading.current_thread() is threading.main_thread() or _has_running_loop():
        function()
        return
    try:
        contextvars.copy_context().run(function)
    finally:
        asyncio.get_event_loop().close()
        asyncio.set_event_loop(None)


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
