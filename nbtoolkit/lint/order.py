"""Hidden state: names that a run from top to bottom does not have, outputs of another order."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from copy import deepcopy

from nbtoolkit.errors import MissingExtra
from nbtoolkit.lint.cells import Cell
from nbtoolkit.lint.hazard import Hazard, hazard

# What IPython puts beside Python's own names.
_IPYTHON = {"get_ipython", "display", "In", "Out", "_", "__", "___", "exit", "quit", "_i", "_ih"}


def undefined_names(cells: list[Cell]) -> Iterator[Hazard]:
    """Names that are read before any cell above has defined them.

    The cells are looked at as one module by pyflakes (https://github.com/PyCQA/pyflakes).

    Raises:
        MissingExtra: pyflakes is not installed.
    """
    try:
        from pyflakes.checker import Checker
        from pyflakes.messages import UndefinedName
    except ImportError as error:
        raise MissingExtra(
            "looking for undefined names needs pyflakes", do="pip install pyflakes"
        ) from error
    if any(_brings_names(cell) for cell in cells):
        return
    module, places = _as_module(cells)
    told = set()
    for message in Checker(module, builtins=_IPYTHON).messages:
        name = message.message_args[0] if isinstance(message, UndefinedName) else ""
        if name and name not in told:
            told.add(name)
            cell, line = places[message.lineno]
            yield hazard("undefined-name", _undefined(name, cells, cell), cell=cell, line=line)


def out_of_order(cells: list[Cell]) -> Iterator[Hazard]:
    """Cells that were run before one that stands above them."""
    above = 0
    for cell in cells:
        count = cell.execution_count or above
        if count < above:
            what = f"it was run as number {count}, a cell above it as number {above}"
            yield hazard("out-of-order", what, cell=cell.number)
            return
        above = count


def _undefined(name: str, cells: list[Cell], number: int) -> str:
    later = [cell.number for cell in cells if cell.number > number and _assigns(cell, name)]
    if later:
        return f"{name} is read here and defined in cell {later[0]} below"
    return f"{name} is defined nowhere in the notebook"


def _assigns(cell: Cell, name: str) -> bool:
    return any(
        (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store))
        or name in (getattr(node, "name", None), getattr(node, "asname", None))
        for node in ast.walk(cell.tree)
    )


def _brings_names(cell: Cell) -> bool:
    """Whether it may define names that cannot be read in it."""
    calls = (node for node in ast.walk(cell.tree) if isinstance(node, ast.Call))
    return cell.error is not None or any(
        ast.unparse(call.func) == "get_ipython().run_line_magic"
        and getattr(call.args[0], "value", "") in ("run", "pylab", "store")
        for call in calls
    )


def _as_module(cells: list[Cell]) -> tuple[ast.Module, dict[int, tuple[int, int]]]:
    """All cells as one module, and for each line of it the cell and the line there."""
    body: list[ast.stmt] = []
    places: dict[int, tuple[int, int]] = {}
    offset = 0
    for cell in cells:
        last = max((statement.end_lineno or 0 for statement in cell.tree.body), default=0)
        places |= {offset + line: (cell.number, line) for line in range(1, last + 1)}
        body += ast.increment_lineno(deepcopy(cell.tree), offset).body
        offset += last
    return ast.Module(body, []), places
