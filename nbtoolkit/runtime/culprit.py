"""Who made this process not fork-safe? An import, found by trying; else a cell, as suspect."""

from __future__ import annotations

import ast
import subprocess
import sys
import time

from nbtoolkit.runtime.ahead import installed_roots

LIMIT = 180.0  # seconds for the search among imports; longer, and nobody is named
_HUNG_SECONDS = 2.0  # without progress; less than elsewhere, as each verdict is tried twice

_PROBE = """
import importlib, sys
sys.path[:] = {path!r}
for name in {names!r}:
    try: importlib.import_module(name)
    except (Exception, SystemExit): pass
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


class Unproven(Exception):
    """It could not be told whether an import breaks forks; the text says why."""


def find_culprit(*, device: bool) -> str:
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
