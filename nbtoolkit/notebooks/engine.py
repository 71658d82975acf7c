"""Run a notebook through papermill with a client that watches its kernel.

Imported only when a notebook is run: papermill takes half a second to load.
"""

from __future__ import annotations

import logging
from typing import Any

from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from traitlets.config import Config

from nbtoolkit.notebooks.execution import Execution, meaning

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
