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
# Is this process fork-safe? Found by trying, in a child, what a rank would do.
#
# Counting threads does not answer it (numpy alone leaves some that are harmless), and neither does
# ``torch.cuda.is_initialized()`` (it stays False after some imports that break every fork).


PROBE_SECONDS = 5.0  # without progress: a child that hangs waits for threads that it has not got
_CPU_SECONDS = 30.0  # or it turns in a loop (OMP_WAIT_POLICY=active): 5 ms is what it needs
_READY = b"\0"  # the child has imported what it needs


@dataclass(frozen=True)
class ProbeResult:
    """Whether a forked child could work, and what it said."""

    ok: bool
    reason: str


def probe_fork(*, device: bool, seconds: float = PROBE_SECONDS) -> ProbeResult:
    """Fork a child that computes in parallel (and allocates on the first GPU when ``device``).

    Args:
        device: also try a CUDA allocation.
        seconds: a child that makes no progress for so long, once it has imported torch, hangs. It
            is killed then. A slow one is waited for.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python 3.12 warns on fork beside threads: we test just that
        pid = os.fork()
    if pid == 0:
        _child(write_end, device)
    os.close(write_end)
    try:
        status, said = _wait(pid, read_end, seconds)
    finally:
        os.close(read_end)
    if status is None:
        return ProbeResult(
            False,
            "a forked child hung in a parallel operation (OpenMP was used here): no progress for "
            f"{seconds:g} s",
        )
    if status != 0:
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        return ProbeResult(False, f"a forked child failed: {said or how}")
    return ProbeResult(
        True,
        "a forked child computed in parallel" + (" and allocated on the GPU" if device else ""),
    )


def _child(write_end: int, device: bool) -> None:
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        import torch

        os.write(write_end, _READY)
        # Large enough that torch splits it over its OpenMP team (grain size 32768).
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
    """The child's exit code (negative: its signal; None: it hung and was killed) and its words."""
    activity = Activity(pid, descendants=False)
    said, begun = b"", None
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        with contextlib.suppress(BlockingIOError):
            said += os.read(read_end, 4096)
        if done:
            return os.waitstatus_to_exitcode(status), said.lstrip(_READY).decode(errors="replace")
        used = tree_seconds(pid, {})
        if begun is None and said:
            begun = used
        stalled = STALL_SECONDS if begun is None else seconds
        if activity.idle() >= stalled or (begun is not None and used - begun >= _CPU_SECONDS):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None, ""
        time.sleep(0.002)


# --- the cause ---


LIMIT = 180.0  # seconds for the search among imports; longer, and nobody is named
_HUNG_SECONDS = 2.0  # without progress; less than elsewhere, as each verdict is tried twice

_PROBE = """
import importlib, sys
sys.path[:] = {path!r}
for name in {names!r}:
    try: importlib.import_module(name)
    except (Exception, SystemExit): pass
from nbtoolkit.environment.fork_diagnosis import probe_fork
sys.exit(0 if probe_fork(device={device!r}, seconds={seconds!r}).ok else 3)
"""

# What computes or touches a device when a cell runs it at its top level.
_COMPUTES = frozenset(
    {"cuda", "matmul", "mm", "bmm", "exp", "backward", "fit", "predict", "sum", "mean", "conv2d"}
)
_COMPUTES |= {
    "randn",
    "Accelerator",
    "synchronize",
    "is_available",
    "get_device_properties",
    "empty_cache",
}


class Unproven(Exception):
    """It could not be told whether an import breaks forks; the text says why."""


def find_cause(*, device: bool) -> str:
    """Name the import that breaks forks; where no import does, the cells that may.

    Args:
        device: whether a child must be able to use a GPU, too.

    Returns:
        A sentence.
    """
    try:
        guilty = guilty_import(loaded_packages(), device=device)
    except Unproven as error:
        imports, cell = f"whether an import does it is not known ({error})", "may, such as"
    else:
        if guilty is not None:
            return f"made so by `import {guilty}`: import it inside the training function"
        imports, cell = "no import does it", "does, probably"
    cells = suspicious_cells(executed_cells())
    if cells:
        named = ", ".join(f"In[{number}]" for number in cells)
        return f"{imports}; a cell that computed {cell} {named}"
    return f"{imports}; something that ran in this process computed in parallel or used the GPU"


def loaded_packages() -> list[str]:
    """Installed top-level packages of this process, in the order of their import."""
    roots = installed_roots()
    modules = list(sys.modules.items())
    return [
        name
        for name, module in modules
        if "." not in name and (getattr(module, "__file__", None) or "").startswith(roots)
    ]


def guilty_import(packages: list[str], *, device: bool, limit: float = LIMIT) -> str | None:
    """The first package after whose import a fresh interpreter is not fork-safe; None: none.

    Raises:
        Unproven: a second try says otherwise, an interpreter that has imported none of the packages
            is not fork-safe either, or ``limit`` seconds were too few.
    """
    end = time.monotonic() + limit

    def breaks(count: int) -> bool:
        return not _fork_safe_after(packages[:count], device, end)

    if not packages or not breaks(len(packages)):
        return None
    if breaks(0):
        raise Unproven("a fresh interpreter without any of them is not fork-safe here")
    good, bad = 0, len(packages)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if breaks(middle) else (middle, bad)
    if breaks(good) or not breaks(bad):
        raise Unproven(f"two tries with `import {packages[good]}` disagree")
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
        raise Unproven("the search took too long") from error
    if done.returncode not in (0, 3):
        raise Unproven(f"an interpreter that imported them ended with code {done.returncode}")
    return done.returncode == 0


def executed_cells() -> dict[int, str]:
    """The cells this kernel has run, by number."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    history = shell.user_ns.get("In", []) if shell is not None else []
    return {number: source for number, source in enumerate(history) if source}


def suspicious_cells(cells: dict[int, str]) -> list[int]:
    """Numbers of the cells that call something which computes, outside of function bodies."""
    return [number for number, source in cells.items() if _computes(source)]


def _computes(source: str) -> bool:
    try:
        tree = ast.parse(
            "\n".join(
                line for line in source.splitlines() if not line.lstrip().startswith(("%", "!"))
            )
        )
    except SyntaxError:
        return False
    return any(_calls(statement) for statement in tree.body)


def _calls(node: ast.AST) -> bool:
    """Whether the node runs a suspicious call now (a definition runs nothing)."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return False
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return True
    if isinstance(node, ast.Call):
        called = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        if called in _COMPUTES or any(
            isinstance(arg, ast.Constant) and arg.value == "cuda" for arg in node.args
        ):
            return True
    return any(_calls(child) for child in ast.iter_child_nodes(node))
