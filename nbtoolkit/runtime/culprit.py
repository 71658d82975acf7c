"""Who made this process not fork-safe? An import, found by trying; else a cell, as suspect."""

from __future__ import annotations

import ast
import subprocess
import sys
import time

from nbtoolkit.runtime.ahead import installed_roots

LIMIT = 60.0  # seconds for the search among imports

_PROBE = """
import importlib, sys
sys.path[:] = {path!r}
for name in {names!r}:
    try: importlib.import_module(name)
    except Exception: pass
from nbtoolkit.runtime.probe import probe_fork
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


def find_culprit(*, device: bool) -> str:
    """Name the import that breaks forks; where no import does, the cells that may.

    Args:
        device: whether a child must be able to use a GPU, too.

    Returns:
        A sentence.
    """
    packages = loaded_packages()
    guilty = guilty_import(packages, device=device)
    if guilty is not None:
        return f"made so by `import {guilty}`: import it inside the training function"
    cells = suspicious_cells(executed_cells())
    if cells:
        named = ", ".join(f"In[{number}]" for number in cells)
        return f"no import does it; a cell that computed does, probably {named}"
    return (
        "no import does it; something that ran in this process computed in parallel or used the GPU"
    )


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
    """The first package after whose import a fresh interpreter is not fork-safe; None: none."""
    end = time.monotonic() + limit

    def breaks(count: int) -> bool:
        return not _fork_safe_after(packages[:count], device, max(1.0, end - time.monotonic()))

    if not packages or not breaks(len(packages)):
        return None
    good, bad = 0, len(packages)
    while bad - good > 1 and time.monotonic() < end:
        middle = (good + bad) // 2
        good, bad = (good, middle) if breaks(middle) else (middle, bad)
    return packages[bad - 1] if bad - good == 1 else None


def _fork_safe_after(names: list[str], device: bool, seconds: float) -> bool:
    code = _PROBE.format(path=sys.path, names=names, device=device, seconds=5.0)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True  # not known to be guilty
    return done.returncode != 3


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
