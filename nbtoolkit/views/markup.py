"""Render text, cards, tables and bars as HTML without scripts; all values are escaped.

Styles stand in each element, since a saved notebook has no style sheet. Text takes the colour of
its output or page (:func:`in_widget` for widgets); a colour that marks a state is mixed with it,
which gives a contrast of at least 4.5 in light and in dark themes
(https://www.w3.org/TR/WCAG21/#contrast-minimum).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from nbtoolkit.views.chart import BEST, FAILED, RUNNING

WRAPS = "white-space:pre-wrap;overflow-wrap:anywhere"
"""The style of text with lines of its own."""

RULE = "#8884"
"""The colour of borders and rules; JupyterLab removes styles with ``var()`` from outputs that are
not trusted."""

WIDGET_TEXT = "var(--jp-ui-font-color1, inherit)"
"""The colour of text in widgets, which have none in some front ends."""

_SAFE = 'class="tex2jax_ignore mathjax_ignore"'
_FONT = "line-height:1.45;font-size:13px;font-variant-numeric:tabular-nums"
_CELL = "padding:2px 10px 2px 0;white-space:nowrap"
_WIDTHS = {1: "1 1 200px", 2: "2 1 280px", 3: "3 1 560px", 4: "1 1 100%"}


def view(*parts: str) -> str:
    """Wrap the parts of a view in one element, as wide as its page.

    JupyterLab runs MathJax on all outputs, and two dollar signs enclose a formula; these classes
    keep it from doing so.
    """
    return f'<div {_SAFE} style="{_FONT};flex:{_WIDTHS[4]};overflow-x:auto">{"".join(parts)}</div>'


def in_widget(html: str) -> str:
    """Give HTML in a widget the text colour of JupyterLab's theme.

    Outputs that are no widgets need none: in dark themes of VS Code, which shows widgets on white,
    this variable would make them dark on dark.
    """
    return f'<div style="color:{WIDGET_TEXT}">{html}</div>'


def card(title: str, body: str, *, span: int = 1, note: str = "") -> str:
    """Render a part of a page with a border and a heading.

    Args:
        title: the heading; empty: none.
        body: HTML.
        span: the width beside others: 1 (200 pixels or more), 2 (280), 3 (560) or 4 (a whole row).
        note: a short text beside the heading.
    """
    beside = f'<span style="opacity:0.75">{escape(note)}</span>' if note else ""
    head = (
        '<div style="display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 8px;'
        f'margin-bottom:4px"><b>{escape(title)}</b>{beside}</div>'
    )
    return (
        f'<div {_SAFE} style="{_FONT};flex:{_WIDTHS[span]};min-width:0;min-height:100%;'
        f"box-sizing:border-box;border:1px solid {RULE};border-radius:6px;padding:8px 12px;"
        f'overflow-x:auto">{head if title else ""}{body}</div>'
    )


def grid(*cards: str) -> str:
    """Place cards beside each other, or below each other in a narrow window."""
    return f'<div style="display:flex;flex-wrap:wrap;gap:8px">{"".join(cards)}</div>'


def tiles(parts: Sequence[str], least: int) -> str:
    """Place parts of equal width in rows; ``least``: pixels of the narrowest."""
    style = f"display:grid;grid-template-columns:repeat(auto-fit,minmax({least}px,1fr));gap:8px"
    inside = "".join(f'<div style="min-width:0">{part}</div>' for part in parts)
    return f'<div style="{style}">{inside}</div>'


def paragraph(text: str, *, faint: bool = False) -> str:
    """Render a paragraph."""
    style = "opacity:0.75;" if faint else ""
    return f'<div style="{style}{WRAPS}">{escape(text)}</div>'


def alert(text: str) -> str:
    """Render an error, marked by a sign and a border, since not everybody sees colours."""
    style = f"border-left:3px solid {FAILED};padding-left:8px;margin:4px 0;{WRAPS}"
    return f'<div role="alert" style="{style}">⚠ {escape(text)}</div>'


def headline(text: str) -> str:
    """Render the value that matters most."""
    style = f"font-size:26px;font-weight:700;line-height:1.3;{tinted(BEST)}"
    return f'<div style="{style}">{escape(text)}</div>'


def tinted(colour: str) -> str:
    """Return the style of text in the colour of a state, readable in light and dark themes."""
    return f"color:color-mix(in srgb, {colour} 65%, currentColor)"


def chip(text: str, colour: str, title: str = "") -> str:
    """Render the word of a state on a ground of its colour; ``title``: for a pointer."""
    hint = f' title="{escape(title, quote=True)}"' if title else ""
    style = f"border-radius:9px;padding:0 8px;background:{colour}2b;white-space:nowrap"
    return f'<span style="{style};{tinted(colour)}"{hint}>{escape(text)}</span>'


def property_table(values: Mapping[str, object]) -> str:
    """Render names and values as a table with a row for each."""
    body = "".join(
        f'<tr><th scope="row" style="text-align:left;font-weight:400;vertical-align:top;{_CELL}">'
        f'{escape(name)}</th><td style="padding:2px 0;{WRAPS}">{escape(str(value))}</td></tr>'
        for name, value in values.items()
    )
    return f'<table style="border-collapse:collapse;font-size:inherit">{body}</table>'


def data_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render a table with a header; columns with numbers are aligned right.

    Args:
        header: the names of the columns.
        rows: the cells of each row.
    """
    columns = zip(*rows, strict=True) if rows else [()] * len(header)
    sides = ["right" if any(map(_numeric, column)) else "left" for column in columns]

    def line(cells: Sequence[str], tag: str, width: int) -> str:
        inside = "".join(
            f'<{tag} style="text-align:{side};border-bottom:{width}px solid {RULE};{_CELL}">'
            f"{escape(text)}</{tag.partition(' ')[0]}>"
            for text, side in zip(cells, sides, strict=True)
        )
        return f"<tr>{inside}</tr>"

    head = line(header, "th scope=col", 2)
    body = "".join(line(row, "td", 1) for row in rows)
    return (
        '<table style="width:100%;border-collapse:collapse;font-size:inherit">'
        f"<thead>{head}</thead><tbody>{body}</tbody></table>"
    )


def _numeric(text: str) -> bool:
    """Whether a cell holds a number, perhaps with a sign, a unit or a deviation."""
    return text.lstrip("+-")[:1].isdigit()


def progress_bar(share: float | None, label: str) -> str:
    """Render a bar with its label beside it.

    Args:
        share: the filled part, from 0 to 1; None: unknown, and only the label is shown.
        label: the same in words.
    """
    if share is None:
        return paragraph(label)
    percent = round(100 * max(0.0, min(share, 1.0)))
    return (
        f'<div style="display:flex;align-items:center;gap:8px;min-width:0">'
        f'<div role="progressbar" aria-valuenow="{percent}" aria-valuemin="0" aria-valuemax="100" '
        f'aria-label="{escape(label, quote=True)}" style="width:110px;height:8px;'
        f'border-radius:4px;background:{RUNNING}2b"><div style="width:{percent}%;height:100%;'
        f'border-radius:4px;background:{RUNNING}"></div></div>'
        f'<span style="white-space:nowrap">{escape(label)}</span></div>'
    )


def code_block(text: str) -> str:
    """Render lines to be copied."""
    return f'<pre style="{WRAPS};font-size:12px;margin:2px 0 10px 0">{escape(text)}</pre>'
