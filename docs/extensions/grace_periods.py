"""Directive ``grace-periods``: how long processes wait for each other.

The table is made from the names in ``nbtoolkit.environment.grace`` and the texts below them.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from other_names import code, table
from sphinx.application import Sphinx

from nbtoolkit.environment import grace

HEAD = ("name", "seconds", "who waits for what", "why this number")


class GracePeriods(Directive):
    """The table."""

    def run(self) -> list[nodes.Node]:
        """Parse the table as reStructuredText."""
        text = StringList()
        for line in table(HEAD, rows()):
            text.append(line, grace.__name__)
        holder = nodes.section(document=self.state.document)
        self.state.nested_parse(text, 0, holder)
        return holder.children


def rows() -> Iterator[tuple[str, ...]]:
    """Return the cells of each name."""
    statements = ast.parse(inspect.getsource(grace)).body
    for statement, below in pairwise(statements):
        match statement, below:
            case ast.Assign(targets=[ast.Name(name)]), ast.Expr(ast.Constant(str(text))):
                who, why = (" ".join(part.split()) for part in text.split("\n\n"))
                yield code(name), f"{getattr(grace, name):g}", who, why


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("grace-periods", GracePeriods)
    return {"parallel_read_safe": True}
