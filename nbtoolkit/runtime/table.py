"""A small HTML table for a cell: values escaped, colours inherited (light and dark alike)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_LEFT = ' style="text-align: left"'


def html_table(title: str, rows: Sequence[tuple[str, object]], notes: Sequence[str] = ()) -> str:
    """A titled table of names and values, with a list of sentences under it.

    Args:
        title: its first line.
        rows: name and value of each row; a value is shown as ``str`` gives it.
        notes: sentences for the list below the table.

    Returns:
        HTML without scripts, classes or colours of its own.
    """
    body = "".join(_row(name, value) for name, value in rows)
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        f"<table><caption{_LEFT}><b>{escape(title)}</b></caption><tbody>{body}</tbody></table>"
        + (f"<ul>{listed}</ul>" if listed else "")
    )


def _row(name: str, value: object) -> str:
    return f"<tr><th{_LEFT}>{escape(name)}</th><td{_LEFT}>{escape(str(value))}</td></tr>"


def gib(size: int) -> str:
    """Bytes as a person reads them: ``"15.0 GiB"``."""
    return f"{size / 2**30:.1f} GiB"
