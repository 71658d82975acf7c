"""Test whether this process is fork-safe, and name the import or the cell that made it unsafe."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass

from nbtoolkit.environment.installed import installed_roots
from nbtoolkit.environment.resources import STALL_SECONDS, Activity, tree_seconds

# --- probe ---


PROBE_SECONDS = 5.0
"""A child without progress for this long hangs: it waits for threads that the fork lost."""
# CPU limit of a child that spins (OMP_WAIT_POLICY=active); a healthy one needs 5 ms.
_CPU_SECONDS = 30.0
_READY = b"\0"  # sent when the child has imported torch


@dataclass(frozen=True)
class ProbeResult:
    """Whether a forked child could work, and why not."""

    ok: bool
    reason: str


def probe_fork(*, device: bool, seconds: float = PROBE_SECONDS) -> ProbeResult:
    """Test whether this process is fork-safe: fork a child that does what a rank would do.

    The child computes in parallel. Counting threads does not answer the question (NumPy alone
    leaves some that are harmless), nor does ``torch.cuda.is_initialized()`` (it stays False after
    some imports that break every fork).

    Args:
        device: also allocate on the first GPU.
        seconds: a child that has imported torch and makes no progress for this long is killed. A
            slow child is not.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    with warnings.catch_warnings():
        # Python 3.12 warns about a fork in a process with threads, which is what this tests.
        warnings.simplefilter("ignore", DeprecationWarning)
        parent, pid = os.getpid(), os.fork()
    if pid == 0:
        _child(write_end, device, parent)
    os.close(write_end)
    try:
        status, output = _wait(pid, read_end, seconds)
    finally:
        os.close(read_end)
    if status is None:
        reason = "a forked child hung in a parallel operation (OpenMP was used here): no progress"
        return ProbeResult(False, f"{reason} for {seconds:g} s")
    if status != 0:
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        return ProbeResult(False, f"a forked child failed: {output or how}")
    where = " and allocated on the GPU" if device else ""
    return ProbeResult(True, f"a forked child computed in parallel{where}")


def _child(write_end: int, device: bool, parent: int) -> None:
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        import torch
        from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

        # A child that hangs would outlive a parent that is killed.
        _prctl_pr_set_pdeathsig(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(code)
        os.write(write_end, _READY)
        # Large enough that torch splits it over its OpenMP threads (grain size 32768).
        matrix = torch.ones(512, 512)
        float((matrix @ matrix).exp().clamp(max=1.0).sum())
        if device:
            torch.ones(1, device="cuda").item()
        code = 0
    except BaseException as error:
        os.write(write_end, f"{type(error).__name__}: {error}".encode()[:4000])
    finally:
        os._exit(code)


def _wait(pid: int, read_end: int, seconds: float) -> tuple[int | None, str]:
    """Return the child's exit code (negative: a signal; None: it hung, was killed) and output."""
    activity = Activity(pid, descendants=False)
    output, cpu_at_start = b"", None
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        with contextlib.suppress(BlockingIOError):
            output += os.read(read_end, 4096)
        if ended:
            text = output.lstrip(_READY).decode(errors="replace")
            return os.waitstatus_to_exitcode(status), text
        cpu = tree_seconds(pid, {})
        if cpu_at_start is None and output:
            cpu_at_start = cpu
        stalled = STALL_SECONDS if cpu_at_start is None else seconds
        spins = cpu_at_start is not None and cpu - cpu_at_start >= _CPU_SECONDS
        if activity.idle() >= stalled or spins:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None, ""
        time.sleep(0.002)


# --- cause ---


LIMIT = 180.0
"""Seconds for the search among imports."""
# Shorter than PROBE_SECONDS, since the result is confirmed by a second probe.
_HUNG_SECONDS = 2.0

_PROBE = """
import importlib, sys
sys.path[:] = {path!r}
for name in {names!r}:
    try: importlib.import_module(name)
    except (Exception, SystemExit): pass
from nbtoolkit.environment.fork_diagnosis import probe_fork
sys.exit(0 if probe_fork(device={device!r}, seconds={seconds!r}).ok else 3)
"""

# Functions that compute or use a device when a cell calls them at its top level.
_COMPUTING_CALLS = (
    {"cuda", "matmul", "mm", "bmm", "exp", "backward", "fit", "predict", "sum", "mean", "conv2d"}
    | {"randn", "Accelerator", "synchronize", "is_available", "get_device_properties"}
    | {"empty_cache"}
)


class Inconclusive(Exception):
    """The search cannot decide whether an import breaks forks; the message says why."""


def find_cause(*, device: bool) -> str:
    """Name the import that breaks forks; if no import does, the cells that may.

    Args:
        device: whether a forked child must also be able to use a GPU.

    Returns:
        A sentence.
    """
    try:
        package = find_breaking_import(loaded_packages(), device=device)
    except Inconclusive as error:
        imports, cell = f"it is unknown whether an import is the cause ({error})", "may be"
    else:
        if package is not None:
            return f"the cause is `import {package}`: import it inside the training function"
        imports, cell = "no import is the cause", "probably is"
    cells = suspicious_cells(executed_cells())
    if cells:
        names = ", ".join(f"In[{number}]" for number in cells)
        return f"{imports}; a cell that computed {cell}: {names}"
    return f"{imports}; something that ran in this process computed in parallel or used the GPU"


def loaded_packages() -> list[str]:
    """Return the installed top-level packages of this process, in order of import."""
    roots = installed_roots()
    modules = list(sys.modules.items())
    return [
        name
        for name, module in modules
        if "." not in name and (getattr(module, "__file__", None) or "").startswith(roots)
    ]


def find_breaking_import(packages: list[str], *, device: bool, limit: float = LIMIT) -> str | None:
    """Find the first package whose import makes a new interpreter not fork-safe, by bisection.

    Raises:
        Inconclusive: a second probe disagrees, an interpreter without any of the packages is not
            fork-safe either, or the search exceeds ``limit`` seconds.
    """
    end = time.monotonic() + limit

    def breaks(count: int) -> bool:
        return not _fork_safe_after(packages[:count], device, end)

    if not packages or not breaks(len(packages)):
        return None
    if breaks(0):
        raise Inconclusive("a new interpreter without any of them is not fork-safe here")
    good, bad = 0, len(packages)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if breaks(middle) else (middle, bad)
    if breaks(good) or not breaks(bad):
        raise Inconclusive(f"two tries with `import {packages[good]}` disagree")
    return packages[good]


def _fork_safe_after(names: list[str], device: bool, end: float) -> bool:
    code = _PROBE.format(path=sys.path, names=names, device=device, seconds=_HUNG_SECONDS)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            timeout=max(end - time.monotonic(), 0.0),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Inconclusive("the search took too long") from error
    if done.returncode not in (0, 3):
        raise Inconclusive(f"an interpreter that imported them ended with code {done.returncode}")
    return done.returncode == 0


def executed_cells() -> dict[int, str]:
    """Return the cells that this kernel has run, by number."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    history = shell.user_ns.get("In", []) if shell is not None else []
    return {number: source for number, source in enumerate(history) if source}


def suspicious_cells(cells: dict[int, str]) -> list[int]:
    """Return the numbers of the cells that compute outside of function bodies."""
    return [number for number, source in cells.items() if _computes(source)]


def _computes(source: str) -> bool:
    lines = [line for line in source.splitlines() if not line.lstrip().startswith(("%", "!"))]
    try:
        tree = ast.parse("\n".join(lines))
    except SyntaxError:
        return False
    return any(_runs_computation(statement) for statement in tree.body)


def _runs_computation(node: ast.AST) -> bool:
    """Return whether a node computes when it is executed; a function definition does not."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return False
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return True
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        moves = any(isinstance(arg, ast.Constant) and arg.value == "cuda" for arg in node.args)
        if name in _COMPUTING_CALLS or moves:
            return True
    return any(_runs_computation(child) for child in ast.iter_child_nodes(node))
