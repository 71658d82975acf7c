"""Absolute paths: of one machine, written into a notebook that is to run on any."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from nbtoolkit.lint.cells import Cell
from nbtoolkit.lint.hazard import Hazard, hazard

# Folders that one machine or host has and others have not (/tmp and /dev/shm are everywhere).
_HERE_ONLY = re.compile(
    r"(/(home|Users|root|mnt|media|data|datasets|content|kaggle|workspace|scratch|drive|dbfs)/"
    r"|[A-Z]:[\\/])\S"
)
_SEARCHES = {"glob", "rglob", "exists", "is_dir", "is_file", "isdir", "isfile"}


def absolute_paths(cells: list[Cell]) -> Iterator[Hazard]:
    """Absolute paths outside the parameters cell, but for those that are only looked for."""
    for cell in cells:
        if cell.is_parameters:
            continue
        searched = set(_searched(cell.tree))
        for node in ast.walk(cell.tree):
            if node not in searched and (path := _path(node)):
                line = getattr(node, "lineno", 0)
                what = f"{path!r} is a path of one machine"
                yield hazard("absolute-path", what, cell=cell.number, line=line)


def _path(node: ast.AST) -> str:
    """The path that a text is, or that a shell's line has in it; empty where there is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value if _HERE_ONLY.match(node.value) and "\n" not in node.value else ""
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("get_ipython()."):
        words = [word for text in node.args for word in str(getattr(text, "value", "")).split()[1:]]
        return next(filter(_HERE_ONLY.match, words), "")
    return ""


def _searched(tree: ast.AST) -> Iterator[ast.AST]:
    """Texts in ``Path("/x").glob(...)``, ``os.path.exists("/x")``: where there is none, no harm."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.rpartition(".")[2] in _SEARCHES:
                yield from ast.walk(node)
