"""Program: which code of a notebook runs in its kernel, and which in the ranks of a launch."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nbtoolkit.lint.cells import Cell
from nbtoolkit.lint.main_rank import leaves, only_main
from nbtoolkit.lint.names import Names

Function = ast.FunctionDef | ast.AsyncFunctionDef

# What starts ranks, by the last part of its name; the function comes first, or by keyword.
LAUNCHES = ("launch", "sweep", "cross_validate", "panel", "notebook_launcher")
_FUNCTION_WORDS = ("train", "function")


@dataclass(frozen=True)
class Site:
    """An expression or statement, and under what circumstances it runs."""

    cell: Cell
    node: ast.AST
    guarded: bool
    """Whether only the main rank comes here."""


class Program:
    """A notebook's cells as one program.

    Functions that are handed to a launch, or take ``(config, ctx)``, run in the ranks, and so does
    what they call; all else that is reached from the cells themselves runs in the kernel.

    Args:
        cells: the code cells, in order.
    """

    def __init__(self, cells: list[Cell]) -> None:
        self.cells = cells
        self.names = Names(cell.tree for cell in cells)
        self._functions = {
            node.name: (cell, node) for cell in cells for node in _functions(cell.tree)
        }

    def in_kernel(self) -> Iterator[Site]:
        """What runs in the kernel: the cells, and functions of theirs that they call."""
        seen: set[tuple[str, bool]] = set()
        for cell in self.cells:
            yield from self._reached(cell, cell.tree.body, False, seen, called=True)

    def in_ranks(self) -> Iterator[Site]:
        """What runs in the ranks: launched functions, and what is named in them."""
        seen: set[tuple[str, bool]] = set()
        for name in self._launched():
            if (name, False) not in seen:
                seen.add((name, False))
                cell, function = self._functions[name]
                yield from self._reached(cell, function.body, False, seen, called=False)

    def first_launch(self) -> tuple[int, int] | None:
        """The cell and line of the first launch; None where nothing is launched."""
        places = [(cell.number, call.lineno) for cell, call in self._launches()]
        return min(places, default=None)

    def _launches(self) -> Iterator[tuple[Cell, ast.Call]]:
        for cell in self.cells:
            for node in ast.walk(cell.tree):
                if isinstance(node, ast.Call) and self._is_launch(node):
                    yield cell, node

    def _is_launch(self, call: ast.Call) -> bool:
        module, _, name = self.names.full(call.func).rpartition(".")
        return name in LAUNCHES and module.partition(".")[0] in ("nbtoolkit", "accelerate", "")

    def _launched(self) -> list[str]:
        given = [
            word.value if isinstance(word, ast.keyword) else word
            for _, call in self._launches()
            for word in [*call.args[:1], *(k for k in call.keywords if k.arg in _FUNCTION_WORDS)]
        ]
        names = [node.id for node in given if isinstance(node, ast.Name)]
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
    """All functions but methods: these are not called by their bare name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function) and not isinstance(tree, ast.ClassDef):
            yield node
        yield from _functions(node)


def _takes_ctx(function: Function) -> bool:
    arguments = function.args.posonlyargs + function.args.args
    return len(arguments) >= 2 and arguments[1].arg == "ctx"


def _mention(node: ast.AST, called: bool) -> str:
    """The name of a function that is called here, or (not ``called``) read at all."""
    if called:
        node = node.func if isinstance(node, ast.Call) else ast.Pass()
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else ""


def _sites(cell: Cell, body: Iterable[ast.stmt], guarded: bool) -> Iterator[Site]:
    """All nodes of a block, without the bodies of functions that are defined in it."""
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
    statements: list[ast.stmt] = []  # of one block, in order: a guard may cover those after it
    for part in parts:
        if isinstance(part, ast.stmt):
            statements.append(part)
        else:
            yield from _inner(cell, part, guarded)
    yield from _sites(cell, statements, guarded)
