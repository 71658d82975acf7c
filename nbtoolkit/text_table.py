"""Render small tables as plain text and as escaped HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_LEFT = ' style="text-align: left; padding-right: 10px"'


def html_table(title: str, rows: Sequence[tuple[str, object]], notes: Sequence[str] = ()) -> str:
    """Render a titled table of names and values, followed by a list of notes.

    Args:
        title: the table's caption.
        rows: name and value of each row; a value is shown as ``str(value)``.
        notes: sentences for the list below the table.

    Returns:
        HTML without scripts, classes or colours.
    """
    body = "".join(
        f"<tr><th{_LEFT}>{escape(name)}</th><td{_LEFT}>{escape(str(value))}</td></tr>"
        for name, value in rows
    )
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        f"<table><caption{_LEFT}><b>{escape(title)}</b></caption><tbody>{body}</tbody></table>"
        + (f"<ul>{items}</ul>" if items else "")
    )


def html_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render a table with a header row; every value is escaped."""
    head = "".join(f"<th{_LEFT}>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td{_LEFT}>{escape(value)}</td>" for value in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def text_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render a table as lines of text; each column is as wide as its longest value."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def gib(size: int) -> str:
    """Format bytes as GiB: ``"15.0 GiB"``."""
    return f"{size / 2**30:.1f} GiB"
