"""Fail each test that leaves a process, thread, variable, folder, port or changed directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

T = TypeVar("T")

GRACE = 30.0
"""Seconds a process or thread that is on its way out gets before it counts as left behind.

On a quiet machine one takes some milliseconds; only a leak takes all of it.
"""

LONGEST_TMPDIR = 40
"""Characters of a TMPDIR in which there is room for the tests' own folders and their sockets."""

OUR_FOLDERS = ("nbtoolkit-", "torchelastic_")
"""Beginnings of the names of temporary folders that we (or torch elastic for us) make."""

FAMILY = "NBTOOLKIT_TEST_FAMILY"
"""Variable that marks every process started by this session, detached ones too."""

GPU = Path("/dev/nvidiactl")
"""Exists if the machine has an NVIDIA GPU and its driver."""

FOREIGN: set[int] = set()
"""Processes that were there before the session: most of the machine's, and none of ours."""

# Variables that a library sets for good when it is first imported or used, with the culprit.
SET_BY_LIBRARIES = {
    "PYTEST_CURRENT_TEST",  # pytest itself, at every phase
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn, at import
    "KMP_INIT_AT_FORK",  # scikit-learn, at import
    "_MLFLOW_TELEMETRY_SESSION_ID",  # mlflow 3, when it is first used
    "TORCHINDUCTOR_CACHE_DIR",  # torch, when the first optimizer is made
    # TensorFlow, at import; torch's TensorBoard writer imports it where it is installed
    *("ENABLE_RUNTIME_UPTIME_TELEMETRY", "HDF5_PLUGIN_PATH", "TF2_BEHAVIOR"),
    *("TPU_ML_PLATFORM", "TPU_ML_PLATFORM_VERSION"),
}

# Threads that a library keeps for the life of the process, by class: tqdm's, IPython's.
KEPT_BY_LIBRARIES = ("TMonitor", "HistorySavingThread")


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts the background jobs of a script with SIGINT ignored, and every process that a
    # test starts would inherit that: its interrupts would be lost.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A sweep has as many slots as CPUs: with two CPUs a test means the same on every machine.
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker or not config.getoption("numprocesses", None):
        cpus = sorted(os.sched_getaffinity(0))
        first = 2 * int((worker or "gw0")[2:])
        os.sched_setaffinity(0, {cpus[at % len(cpus)] for at in (first, first + 1)})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not GPU.exists():
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))
    # Long tests start first, so that no worker is left alone with one at the end.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


# pytest-xdist has groups by a marker too; from pytest 9.2 on its version 3.8 overlooks them.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Distribute tests one by one, except those that one worker must run in sequence."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(str(config.rootpath / nodeid.partition("::")[0])) or nodeid

    return Together(config, log)


@cache
def _group(file: str) -> str | None:
    """The group of tests that one worker runs; None if the tests of this file need no group."""
    # Two browsers with their servers and kernels are too much for two cores.
    if "/tests/browser/" in file:
        return "browser"
    # Ranks that import torchmetrics cold take 3 s of CPU each, and the fork server once more.
    if file.endswith(("/test_metrics.py", "/test_evaluation.py")):
        return "torchmetrics"
    # Each worker would make the module's fixture again.
    return file if 'scope="module"' in Path(file).read_text() else None


@pytest.fixture(scope="session", autouse=True)
def session_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the session a temporary folder and a mark; fail if a process is left at its end."""
    tmp_path_factory.getbasetemp()  # pytest's own folders stay where one looks for them
    before = dict(os.environ), tempfile.tempdir
    # Unix sockets of multiprocessing have no room for a long path.
    place = "/tmp" if len(tempfile.gettempdir()) > LONGEST_TMPDIR else None
    folder = tempfile.mkdtemp(prefix="nbt-", dir=place)
    os.environ.update({"TMPDIR": folder, FAMILY: uuid.uuid4().hex})
    # A test is the same with a GPU and without; those marked so, and their kernels, see the first.
    if GPU.exists():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    tempfile.tempdir = None
    FOREIGN.update(_all_processes())
    yield
    _shut_forkserver()
    left = _end_processes(set()) + _temporary_folders()
    os.environ.clear()
    os.environ.update(before[0])
    tempfile.tempdir = before[1]
    shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"the session left behind: {left}"


@pytest.fixture(autouse=True)
def test_leaves_nothing(session_leaves_nothing: None) -> Iterator[None]:
    """Fail a test that leaves something behind, and clean up for the next one."""
    processes, threads = _processes(), set(threading.enumerate())
    folders, ports = _temporary_folders(), _listening()
    environ, cwd = dict(os.environ), os.getcwd()
    yield
    left = {
        "processes": _end_processes(processes),
        "threads": _wait_until_empty(lambda: _threads_left(threads)),
        "folders": _wait_until_empty(lambda: [f for f in _temporary_folders() if f not in folders]),
        "ports": [port for port in _listening() if port not in ports],
        "variables": _changed_variables(environ),
        "directory": [os.getcwd()] if os.getcwd() != cwd else [],
    }
    _restore(environ, cwd)
    left = {kind: things for kind, things in left.items() if things}
    assert not left, f"the test left behind: {left}"


@pytest.fixture(scope="session", autouse=True)
def somebody_watches() -> Iterator[None]:
    """Let a run that fails end at once, as in a live notebook; pytest is a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nbtoolkit.host._is_watched", lambda *_: True)
        yield


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """The defaults, for runs in a folder of the test that are not tracked."""
    import nbtoolkit as nb

    settings = {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path / "out")}
    return nb.load_config(env=None, overrides=settings)


def _shut_forkserver() -> None:
    """End the fork server that the first nb.launch of this process keeps warm, if there was one."""
    forkserver = sys.modules.get("nbtoolkit.launcher.fork_servers")
    if forkserver is not None:
        forkserver.shutdown()


def _kept_warm() -> set[int]:
    """The fork servers' own processes: this process's, and those of kernels that tests share."""
    forkserver, kernels = map(sys.modules.get, ("nbtoolkit.launcher.fork_servers", "kernels"))
    warm = forkserver.pids() if forkserver is not None else set()
    return warm.union(*(kernel.warm() for kernel in kernels.SHARED)) if kernels else warm


def _processes() -> set[int]:
    """Processes of this session: its children's trees, and those that carry its mark anywhere.

    Read from /proc at first hand: there are two scans a test, and psutil's take 7 ms each.
    """
    mark = f"{FAMILY}={os.environ.get(FAMILY)}".encode()
    parents: dict[int, int] = {}
    family = {os.getpid()}
    for pid in _all_processes() - FOREIGN:
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            parents[pid] = int(fields[1])
            # Neither has variables: a zombie, and a kernel thread (PF_KTHREAD of linux/sched.h).
            zombie, kernel_thread = fields[0] in "ZX", int(fields[6]) & 0x00200000
            if not zombie and not kernel_thread and _marked(pid, mark):
                family.add(pid)
    while new := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= new
    return {pid for pid in family - _kept_warm() - {os.getpid()} if _ours(pid)}


def _marked(pid: int, mark: bytes) -> bool:
    """Whether a process has ``mark`` among its variables, or is about to have some.

    In the middle of ``execve`` Linux shows neither variables nor a command line: of 400 looks at
    processes that were just detached, 3 came so early. Whoever waits looks again.
    """
    for _ in range(3):
        if variables := Path(f"/proc/{pid}/environ").read_bytes():
            return mark in variables
        if not Path(f"/proc/{pid}/cmdline").read_bytes():
            return True
    return False


def _all_processes() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _end_processes(before: set[int]) -> list[str]:
    """Processes started since ``before`` that are left after the grace period; they are killed."""
    left = _wait_until_empty(lambda: sorted(_processes() - before))
    told = [f"{pid} {_command(pid)[:120]}" for pid in left]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in left:
        with contextlib.suppress(psutil.Error):
            psutil.Process(pid).wait(GRACE)
    return told


def _ours(pid: int) -> bool:
    """Python's resource tracker lives as long as the process that once needed it."""
    return "multiprocessing.resource_tracker" not in _command(pid)


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "(gone)"
    return b" ".join(words).decode(errors="replace") or "(zombie)"


def _threads_left(before: set[threading.Thread]) -> list[str]:
    new = set(threading.enumerate()) - before
    return [t.name for t in new if type(t).__name__ not in KEPT_BY_LIBRARIES and t.is_alive()]


def _temporary_folders() -> list[str]:
    names = os.listdir(tempfile.gettempdir())
    return sorted(name for name in names if name.startswith(OUR_FOLDERS))


def _listening() -> list[str]:
    """Ports on which this very process listens.

    Asked of each socket: the kernel's table of all connections, after a thousand of them, takes
    12 ms to read, twice a test.
    """
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed, or no socket
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as one:
                    listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if listens and one.family in (socket.AF_INET, socket.AF_INET6):
                        found.append("{}:{}".format(*one.getsockname()[:2]))
    return found


def _changed_variables(before: dict[str, str]) -> list[str]:
    now = dict(os.environ)
    names = {*before, *now} - SET_BY_LIBRARIES
    return sorted(name for name in names if before.get(name) != now.get(name))


def _restore(environ: dict[str, str], cwd: str) -> None:
    os.chdir(cwd)
    for name in _changed_variables(environ):
        os.environ.pop(name, None)
        if name in environ:
            os.environ[name] = environ[name]


def _wait_until_empty(look: Callable[[], list[T]]) -> list[T]:
    """What ``look`` still finds after the grace; returns at once when it finds nothing."""
    end = time.monotonic() + GRACE
    while (left := look()) and time.monotonic() < end:
        time.sleep(0.05)
    return left
