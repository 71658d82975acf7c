"""Directive ``commands``: every command of the command line, from its own help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.nodes import nested_parse_with_titles

from nbtoolkit.__main__ import command_line


class Commands(Directive):
    """All commands with their arguments and options."""

    def run(self) -> list[nodes.Node]:
        """Parse the commands as reStructuredText."""
        group = typer.main.get_command(command_line())
        context = group.context_class(group, info_name="nbtoolkit")
        text = StringList()
        for name in group.list_commands(context):
            for line in lines(group.get_command(context, name), context):
                text.append(line, name)
        holder = nodes.section(document=self.state.document)
        nested_parse_with_titles(self.state, text, holder)
        return holder.children


def lines(command: Any, parent: Any) -> Iterator[str]:
    """One command: its title, and its help as a terminal shows it."""
    context = command.context_class(command, info_name=command.name, parent=parent)
    context.max_content_width = 88
    title = f"nbtoolkit {command.name}"
    yield from (title, "-" * len(title), "", ".. code-block:: text", "")
    yield from (f"   {line}".rstrip() for line in command.get_help(context).splitlines())
    yield ""


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True}
