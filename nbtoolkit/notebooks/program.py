"""Parse a notebook's cells, and find which code runs in the kernel and which in the ranks."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbtoolkit.notebooks.document import as_python, numbered

if TYPE_CHECKING:
    from nbformat import NotebookNode


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Return what the imports in a syntax tree bind: name -> full name."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):  # `import torch.nn` itself binds `torch`
            names.update({each.asname: each.name for each in node.names if each.asname})
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                names[each.asname or each.name] = f"{node.module or ''}.{each.name}"
    return names


# Names that are true only in the main rank, as in ``if ctx.is_main:``.
_MAIN = {
    "is_main",
    "is_main_process",
    "is_local_main_process",
    "is_global_zero",
    "is_rank_zero",
    "is_world_process_zero",
    # decorators of accelerate and Lightning
    "on_main_process",
    "on_local_main_process",
    "rank_zero_only",
}
# Names of a rank's number, as in ``if rank != 0: return``.
_RANKS = {"rank", "local_rank", "process_index", "local_process_index", "global_rank", "get_rank"}


def only_main(test: ast.expr) -> bool | None:
    """Evaluate the condition of an ``if``, or a function's decorator, for the main rank.

    Returns:
        True: only the main rank meets it; False: all ranks but the main one; None: neither.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = only_main(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        # One part of an `and` excludes the other ranks; one part of an `or` admits them.
        decisive = isinstance(test.op, ast.And)
        return decisive if decisive in map(only_main, test.values) else None
    if isinstance(test, ast.Compare) and _last(test.left) in _RANKS and _zero(test.comparators):
        return isinstance(test.ops[0], ast.Eq)
    name = _last(test)
    return True if name in _MAIN else False if name in _RANKS else None


def mentions_rank(node: ast.AST) -> bool:
    """Whether the code contains a rank's number, as in the name of a file for each rank."""
    return any(_last(inner) in _RANKS for inner in ast.walk(node))


def leaves(body: list[ast.stmt]) -> bool:
    """Whether a block never reaches the statement after it."""
    return bool(body) and isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))


def _zero(values: list[ast.expr]) -> bool:
    return all(isinstance(value, ast.Constant) and value.value == 0 for value in values)


def _last(node: ast.AST) -> str:
    """Return ``is_main`` for ``ctx.is_main`` and for ``is_main()``."""
    if isinstance(node, ast.Call):
        return _last(node.func)
    name = getattr(node, "attr", "") or getattr(node, "id", "")
    return name.lower() if isinstance(name, str) else ""


# Magics whose cell or line is Python. IPython joins the lines of a continued magic: empty lines
# after it keep the line numbers.
_PYTHON_CELL = re.compile(r"\A\s*%%(time|timeit|capture|prun|python3?)\b.*")
_PYTHON_LINE = re.compile(r"^([ \t]*)%time[ \t]+", re.MULTILINE)
_CONTINUED = re.compile(r"^[ \t]*[!%](?:[^\n]*\\\n)+[^\n]*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A code cell, with the line numbers that people see."""

    number: int
    """Position among the code cells, from 1."""
    lines: list[str]
    tree: ast.Module
    """The code; empty if it is not Python."""


def read_cells(notebook: NotebookNode) -> list[Cell]:
    """Return the user's own code cells of a notebook, in order."""
    cells = []
    for number, node in numbered(notebook):
        try:
            tree = _parse(node.source)
        except (SyntaxError, ValueError):  # `ruff check` reports it
            tree = ast.Module([], [])
        cells.append(Cell(number=number, lines=node.source.splitlines(), tree=tree))
    return cells


def _parse(source: str) -> ast.Module:
    plain = _PYTHON_LINE.sub(r"\1", _PYTHON_CELL.sub("", source))
    joined = _CONTINUED.sub(
        lambda magic: magic[0].replace("\\\n", " ") + "\n" * magic[0].count("\\\n"), plain
    )
    # IPython drops empty lines at the top.
    body = re.sub(r"\A(\s*\n)+", "", joined)
    top = joined.count("\n") - body.count("\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes such as "\\d" are allowed
        return ast.increment_lineno(ast.parse(as_python(body)), top)


Function = ast.FunctionDef | ast.AsyncFunctionDef

# Functions that start ranks, by the last part of the name. The training function is their first
# argument, or one of the keywords.
_LAUNCHES = ("launch", "sweep", "cross_validate", "panel", "notebook_launcher")
_FUNCTION_KEYWORDS = ("train", "function")


@dataclass(frozen=True)
class Site:
    """An expression or statement, and whether all ranks reach it."""

    cell: Cell
    node: ast.AST
    guarded: bool
    """Whether only the main rank reaches it."""


class NotebookProgram:
    """A notebook's cells as one program.

    Functions that are passed to a launch, or that take ``(config, ctx)``, run in the ranks, as do
    the functions that they call. Other code that the cells reach runs in the kernel.

    Args:
        cells: the code cells, in order.
    """

    def __init__(self, cells: list[Cell]) -> None:
        self.cells = cells
        self._imported: dict[str, str] = {}
        for cell in cells:
            self._imported.update(imported_names(cell.tree))
        self._functions = {
            node.name: (cell, node) for cell in cells for node in _functions(cell.tree)
        }

    def full_name(self, node: ast.AST) -> str:
        """Return ``torch.utils.data.DataLoader`` for ``DataLoader``; ``.to`` for ``f(x).to``."""
        if isinstance(node, ast.Attribute):
            return f"{self.full_name(node.value)}.{node.attr}"
        if isinstance(node, ast.Name):
            return self._imported.get(node.id, node.id)
        return ""

    def in_kernel(self) -> Iterator[Site]:
        """Yield the code that runs in the kernel: the cells, and the functions that they call."""
        seen: set[tuple[str, bool]] = set()
        for cell in self.cells:
            yield from self._reached(cell, cell.tree.body, False, seen, called=True)

    def in_ranks(self) -> Iterator[Site]:
        """Yield the code that runs in the ranks: launched functions, and those they mention."""
        seen: set[tuple[str, bool]] = set()
        for name in self._launched():
            if (name, False) not in seen:
                seen.add((name, False))
                cell, function = self._functions[name]
                yield from self._reached(cell, function.body, False, seen, called=False)

    def first_launch(self) -> tuple[int, int] | None:
        """Return the cell and line of the first launch; None without a launch."""
        places = [(cell.number, call.lineno) for cell, call in self._launches()]
        return min(places, default=None)

    def _launches(self) -> Iterator[tuple[Cell, ast.Call]]:
        for cell in self.cells:
            for node in ast.walk(cell.tree):
                if isinstance(node, ast.Call) and self._is_launch(node):
                    yield cell, node

    def _is_launch(self, call: ast.Call) -> bool:
        module, _, name = self.full_name(call.func).rpartition(".")
        return name in _LAUNCHES and module.partition(".")[0] in ("nbtoolkit", "accelerate", "")

    def _launched(self) -> list[str]:
        passed: list[ast.expr] = []
        for _, call in self._launches():
            passed += call.args[:1]
            passed += [word.value for word in call.keywords if word.arg in _FUNCTION_KEYWORDS]
        names = [node.id for node in passed if isinstance(node, ast.Name)]
        names += [name for name, (_, function) in self._functions.items() if _takes_ctx(function)]
        return [name for name in names if name in self._functions]

    def _reached(
        self,
        cell: Cell,
        body: list[ast.stmt],
        guarded: bool,
        seen: set[tuple[str, bool]],
        *,
        called: bool,
    ) -> Iterator[Site]:
        for site in _sites(cell, body, guarded):
            yield site
            name = _mention(site.node, called)
            if name in self._functions and (name, site.guarded) not in seen:
                seen.add((name, site.guarded))
                home, function = self._functions[name]
                guarded = site.guarded or any(map(only_main, function.decorator_list))
                yield from self._reached(home, function.body, guarded, seen, called=called)


def _functions(tree: ast.AST) -> Iterator[Function]:
    """Yield all functions except methods, which are not called by their bare name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function) and not isinstance(tree, ast.ClassDef):
            yield node
        yield from _functions(node)


def _takes_ctx(function: Function) -> bool:
    arguments = function.args.posonlyargs + function.args.args
    return len(arguments) >= 2 and arguments[1].arg == "ctx"


def _mention(node: ast.AST, called: bool) -> str:
    """Return the name of a function that the node calls, or (not ``called``) mentions."""
    if called:
        node = node.func if isinstance(node, ast.Call) else ast.Pass()
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else ""


def _sites(cell: Cell, body: Iterable[ast.stmt], guarded: bool) -> Iterator[Site]:
    """Yield all nodes of a block, except the bodies of functions defined in it."""
    for statement in body:
        if isinstance(statement, ast.If):
            main = only_main(statement.test)
            yield from _inner(cell, statement.test, guarded)
            yield from _sites(cell, statement.body, guarded or main is True)
            yield from _sites(cell, statement.orelse, guarded or main is False)
            guarded |= main is False and leaves(statement.body)
        else:
            yield from _inner(cell, statement, guarded)


def _inner(cell: Cell, node: ast.AST, guarded: bool) -> Iterator[Site]:
    if isinstance(node, Function):
        parts: list[ast.AST] = [*node.decorator_list, *node.args.defaults]
    elif isinstance(node, ast.Lambda):
        parts = []
    else:
        yield Site(cell, node, guarded)
        parts = list(ast.iter_child_nodes(node))
    # The statements of one block stay together: a guard may cover the statements after it.
    statements: list[ast.stmt] = []
    for part in parts:
        if isinstance(part, ast.stmt):
            statements.append(part)
        else:
            yield from _inner(cell, part, guarded)
    yield from _sites(cell, statements, guarded)
