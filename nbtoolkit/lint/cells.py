"""Cell: the code of one cell as Python, with the lines and numbers that people see."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbtoolkit.notebooks.document import as_python, numbered, tags

if TYPE_CHECKING:
    from nbformat import NotebookNode

_IGNORE = re.compile(r"#\s*nb:\s*ignore(?:\[([^\]]*)\])?")

# Magics whose cell or line is Python all the same.
_PYTHON_CELL = re.compile(r"\A\s*%%(time|timeit|capture|prun|python3?)\b.*")
_PYTHON_LINE = re.compile(r"^([ \t]*)%time[ \t]+", re.MULTILINE)
# IPython makes one line of a magic that goes on over several: give it the others back, empty.
_CONTINUED = re.compile(r"^[ \t]*[!%](?:[^\n]*\\\n)+[^\n]*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One code cell."""

    number: int
    """Its place among the code cells, from 1."""
    tree: ast.Module
    """Its code; empty where it is not Python."""
    error: SyntaxError | None = None
    """Why it is not Python."""
    is_parameters: bool = False
    """Whether it has the tag ``parameters``."""
    execution_count: int | None = None
    """When it was run, as it was saved."""
    ignored: dict[int, list[str]] = field(default_factory=dict)
    """Line -> the codes that a comment on it, or alone above it, allows."""


def read_cells(notebook: NotebookNode) -> list[Cell]:
    """The user's own code cells of a notebook, in order."""
    return [_cell(number, node) for number, node in numbered(notebook)]


def _cell(number: int, node: NotebookNode) -> Cell:
    tree, error = ast.Module([], []), None
    try:
        tree = _parsed(node.source)
    except (SyntaxError, ValueError) as wrong:
        # A cell that is meant to fail may do so in every way.
        if "raises-exception" not in tags(node):
            error = wrong if isinstance(wrong, SyntaxError) else SyntaxError(str(wrong))
    return Cell(
        number=number,
        tree=tree,
        error=error,
        is_parameters="parameters" in tags(node),
        execution_count=node.get("execution_count"),
        ignored=dict(_ignored(node.source)),
    )


def _parsed(source: str) -> ast.Module:
    plain = _PYTHON_LINE.sub(r"\1", _PYTHON_CELL.sub("", source))
    joined = _CONTINUED.sub(lambda magic: _on_one_line(magic[0]), plain)
    lines = joined.splitlines()
    empty = next((n for n, line in enumerate(lines) if line.strip()), len(lines))
    with warnings.catch_warnings():  # "\\d" in a text is the user's own business
        warnings.simplefilter("ignore")
        # IPython drops the empty lines at the top; an indented cell it moves to the left.
        return ast.increment_lineno(ast.parse(as_python("\n".join(lines[empty:]))), empty)


def _on_one_line(magic: str) -> str:
    return magic.replace("\\\n", " ") + "\n" * magic.count("\\\n")


def _ignored(source: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(source.splitlines(), start=1):
        if found := _IGNORE.search(line):
            codes = [code.strip() for code in (found[1] or "").split(",")]
            alone = not line[: found.start()].strip()
            yield (number + 1 if alone else number), codes
