"""Processes for tests to talk to and kill: scripts with a pipe, and real Jupyter kernels."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

from records import owned_runs, owner_pid

from nbtoolkit.wire.tracebacks import without_launcher
from nbtoolkit.worker.main import STACKS_SIGNAL

HERE = Path(__file__).parent
SECONDS = 240.0
"""Longest wait for anything that must come: only a hang reaches it, however slow the machine."""

START = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import functions
import nbtoolkit as nb
import nbtoolkit.host
nbtoolkit.host._is_watched = lambda *_: True  # else each run that fails would start again
"""


def until(look: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    """The first true value of ``look()``; fails, naming ``what``, when there is none in time."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if found := look():
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what} did not come within {seconds:g} s")


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_gone(pids: set[int], seconds: float = SECONDS) -> None:
    """Wait until none of the processes is left."""
    limit = time.monotonic() + seconds
    while left := {pid: status_of(pid) for pid in pids if alive(pid)}:
        assert time.monotonic() < limit, f"after {seconds:g} s there are still {left}"
        time.sleep(0.02)


def status_of(pid: int) -> str:
    """The name, state and parent of a process; empty: it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return ", ".join(line for line in lines if line.startswith(("Name:", "State:", "PPid:")))


def run_folder(output_dir: Path) -> Path:
    """The one run in a folder, once it has a supervisor."""
    found = until(lambda: owned_runs(output_dir), "the run's supervisor")
    assert len(found) == 1
    return Path(found[0])


def ranks_up(folder: Path, count: int = 2) -> set[int]:
    """The pids of a run's ranks, once all of them say that they are up."""
    files = [folder / f"up-{rank}" for rank in range(count)]
    until(lambda: all(file.exists() for file in files), "all ranks")
    return {int(file.read_text()) for file in files}


def descendants(pid: int) -> set[int]:
    """A process's children, theirs, and so on."""
    found: set[int] = set()
    for child in children(pid):
        found |= {child} | descendants(child)
    return found


def children(pid: int) -> set[int]:
    """The processes that a process has started; none where it has ended."""
    found: set[int] = set()
    threads = Path(f"/proc/{pid}/task")
    # Processes and threads come and go while one looks.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(threads):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found |= {*map(int, (threads / thread / "children").read_text().split())}
    return found


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal, so that it does not die of it."""
    status = Path(f"/proc/{pid}/status").read_text()
    [caught] = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (number - 1) & 1)


def finish(handle: Any, seconds: float = SECONDS) -> Any:
    """Wait for a run's result; after ``seconds``, stop the run and fail with its state."""
    try:
        return handle.result(timeout=seconds)
    except TimeoutError as error:
        told = _all_that_is_known(handle)
        handle.stop("the test has waited long enough", grace=0.0)
        raise AssertionError(f"{error}\n{told}") from None


def _all_that_is_known(handle: Any) -> str:
    events = [event for event in handle.events() if event.type != "run"]
    ranks = {event.pid for event in events if event.type == "rank" and event.pid}
    for pid in filter(alive, ranks):
        os.kill(pid, STACKS_SIGNAL)
    time.sleep(0.5)
    files = [*handle.paths.folder.glob("ranks/*.txt"), *handle.paths.folder.glob("ranks/*/*.txt")]
    logs = [f"--- {file}\n{without_launcher(file.read_text())[-3000:]}" for file in files]
    supervisor = owner_pid(handle.paths.folder)
    family = {supervisor, *ranks, *descendants(os.getpid())}
    waits = [f"{pid} in {_read(pid, 'wchan')}: {_read(pid, 'stat')[:60]}" for pid in sorted(family)]
    return "\n".join([*map(str, events), *waits, *logs])


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError as error:
        return str(error)


class Script:
    """A Python process without a notebook that runs ``code`` after START."""

    def __init__(self, code: str, cwd: Path, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", START + textwrap.dedent(code)],
            cwd=cwd,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def end(self, seconds: float = SECONDS) -> tuple[str, str]:
        """Wait for its end; what it wrote to stdout and stderr."""
        return self.process.communicate(timeout=seconds)

    def output(self) -> str:
        """Wait for its end, which must be a good one; what it wrote to stdout."""
        out, err = self.end()
        assert self.process.returncode == 0, err
        return out

    def interrupt(self) -> None:
        """Ctrl-C, as a terminal sends it: to the whole process group."""
        os.killpg(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL, to it alone."""
        self.process.kill()
        self.process.wait()


@contextmanager
def script(code: str, cwd: Path, **environ: str) -> Iterator[Script]:
    """A Script, killed at the end if it still runs."""
    running = Script(code, cwd, **environ)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.kill()
        for pipe in (running.process.stdout, running.process.stderr):
            assert pipe is not None
            pipe.close()


class Notebook:
    """A Jupyter kernel, spoken to as a front end does; with more variables of the environment."""

    def __init__(self, cwd: Path, **environ: str) -> None:
        from jupyter_client.manager import KernelManager

        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(cwd=str(cwd), env={**os.environ, **environ})
        self._connect()

    def _connect(self) -> None:
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=SECONDS)
        self.run(START).ok()

    @property
    def pid(self) -> int:
        """The kernel's process id."""
        return int(self._manager.provisioner.process.pid)

    def start(self, code: str) -> str:
        """Send a cell; returns its message id for :meth:`wait`."""
        return str(self._client.execute(textwrap.dedent(code)))

    def run(self, code: str) -> Cell:
        """Run a cell to its end."""
        return self.wait(self.start(code))

    def wait(self, message: str, seconds: float = SECONDS) -> Cell:
        """Collect a cell's output until the kernel is idle again."""
        cell, limit = Cell(), time.monotonic() + seconds
        while time.monotonic() < limit:
            try:
                answer = self._client.get_iopub_msg(timeout=0.5)
            except Empty:
                continue
            if answer["parent_header"].get("msg_id") == message and cell.take(answer):
                return cell
        raise AssertionError(f"the cell did not end within {seconds:g} s; it wrote: {cell.text}")

    def hear(self, look: Callable[[dict[str, Any]], Any], what: str) -> Any:
        """The first true value of ``look(message)``, of all messages that are not yet read."""
        limit = time.monotonic() + SECONDS
        while time.monotonic() < limit:
            with contextlib.suppress(Empty):
                if found := look(self._client.get_iopub_msg(timeout=0.5)):
                    return found
        raise AssertionError(f"{what} did not come within {SECONDS:g} s")

    def click(self, comm: str) -> None:
        """What a front end sends when a button is clicked."""
        data = {"method": "custom", "content": {"event": "click"}}
        message = self._client.session.msg("comm_msg", {"comm_id": comm, "data": data})
        self._client.shell_channel.send(message)

    def warm(self) -> set[int]:
        """The pids of the processes that it keeps warm between launches."""
        cell = self.run("from nbtoolkit.launcher.fork_servers import pids; print(*pids())").ok()
        # on a busy machine lines of its start come first
        return {int(pid) for pid in cell.text.splitlines()[-1].split()} if cell.text else set()

    def interrupt(self) -> None:
        """What the stop button does."""
        self._manager.interrupt_kernel()

    def restart(self) -> None:
        """What the restart button does."""
        self._client.stop_channels()
        self._manager.restart_kernel(now=False)
        self._connect()

    def kill(self) -> None:
        """SIGKILL of the kernel, as the memory killer does it."""
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Shut it down."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()


@dataclass
class Cell:
    """What a cell wrote, and how it ended."""

    text: str = ""
    displayed: list[dict[str, Any]] = field(default_factory=list)
    updated: list[dict[str, Any]] = field(default_factory=list)
    """What outputs that have an id were changed to."""
    error: str = ""
    """The exception's class name; empty where the cell ended well."""
    traceback: str = ""

    def take(self, message: dict[str, Any]) -> bool:
        """Add what a message says; whether it is the cell's last."""
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            self.text += content["text"]
        elif kind in ("display_data", "execute_result"):
            self.displayed.append(content["data"])
        elif kind == "update_display_data":
            self.updated.append(content["data"])
        elif kind == "error":
            self.error, self.traceback = content["ename"], "\n".join(content["traceback"])
        return bool(kind == "status" and content["execution_state"] == "idle")

    def ok(self) -> Cell:
        """The cell itself, if it ended well."""
        assert not self.error, self.traceback
        return self


@contextmanager
def notebook(cwd: Path, **environ: str) -> Iterator[Notebook]:
    """A Notebook, shut down at the end."""
    running = Notebook(cwd, **environ)
    try:
        yield running
    finally:
        running.close()


SHARED: list[Notebook] = []
"""Kernels of several tests: the processes that they keep warm do not count as left behind."""


@contextmanager
def shared_notebook(cwd: Path) -> Iterator[Notebook]:
    """A Notebook for several tests, with a warm fork server; shut down at the end."""
    with notebook(cwd) as running:
        running.run("from nbtoolkit.launcher.fork_servers import fork_server; fork_server()").ok()
        SHARED.append(running)
        try:
            yield running
        finally:
            SHARED.remove(running)
