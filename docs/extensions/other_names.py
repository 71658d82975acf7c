"""Directive ``other-names``: the names of settings in files for other launchers, and ours.

    .. other-names:: accepted

The tables are those of ``nbtoolkit.config.aliases``.
"""

from __future__ import annotations

from collections.abc import Iterator

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.nodes import nested_parse_with_titles

from nbtoolkit.config import aliases


class OtherNames(Directive):
    """One of the tables."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Parse the table as reStructuredText."""
        head, rows = TABLES[self.arguments[0]]
        text = StringList()
        for line in table(head, rows()):
            text.append(line, self.arguments[0])
        holder = nodes.section(document=self.state.document)
        nested_parse_with_titles(self.state, text, holder)
        return holder.children


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    """Return a list table."""
    yield from (".. list-table::", "   :header-rows: 1", "")
    for row in (head, *rows):
        for column, cell in enumerate(row):
            yield f"   {'  -' if column else '* -'} {cell}"
    yield ""


def accepted() -> Iterator[tuple[str, ...]]:
    """Names that are read as ours."""
    for name, ours in sorted(aliases.MEANINGS.items()):
        if ": " not in name:
            yield code(name), f":confval:`{ours}`"


def values() -> Iterator[tuple[str, ...]]:
    """Values that are read as ours, and those that are refused."""
    for name, ours in sorted(aliases.MEANINGS.items()):
        if ": " in name:
            yield code(name), f"means {code(ours)}"
    for name, reason in sorted(aliases.REFUSALS.items()):
        if ": " in name:
            yield code(name), f"refused: {reason}"


def refused() -> Iterator[tuple[str, ...]]:
    """Names that are refused, why, and what to do."""
    for name, text in sorted(aliases.REFUSALS.items()):
        why, _, instead = text.partition("; ")
        if not instead:
            why, instead = "is another tool's name of a setting", f"set :confval:`{text}`"
        if ": " not in name:
            yield code(name), why, instead.replace("*", r"\*")


def code(value: object) -> str:
    """Return a name or value as YAML writes it, in code."""
    return f"``{str(value).lower() if isinstance(value, bool) else value}``"


TABLES = {
    "accepted": (("name in another launcher", "setting of nbtoolkit"), accepted),
    "values": (("in another launcher", "in nbtoolkit"), values),
    "refused": (("name", "why", "what to do"), refused),
}


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("other-names", OtherNames)
    return {"parallel_read_safe": True}
