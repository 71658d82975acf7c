"""Names: what a name in a notebook stands for, by its imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable


class Names:
    """The imports of a notebook.

    Args:
        trees: its cells.
    """

    def __init__(self, trees: Iterable[ast.AST]) -> None:
        self._imported: dict[str, str] = {}
        for tree in trees:
            for node in ast.walk(tree):
                self._add(node)

    def full(self, node: ast.AST) -> str:
        """``torch.utils.data.DataLoader`` of ``DataLoader``; ``.to`` of what is no plain name."""
        if isinstance(node, ast.Attribute):
            return f"{self.full(node.value)}.{node.attr}"
        if isinstance(node, ast.Name):
            return self._imported.get(node.id, node.id)
        return ""

    def _add(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for name in node.names:
                top = name.name.partition(".")[0]
                self._imported[name.asname or top] = name.name if name.asname else top
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                self._imported[name.asname or name.name] = f"{node.module or ''}.{name.name}"
