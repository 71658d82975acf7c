"""Cards of text, tables and pictures, with their two writers: :func:`html` and :func:`text`.

HTML is made and escaped here and in ``views/chart.py`` only. It has no scripts, and styles stand in
each element, since a saved notebook has no style sheet. Text takes the colour of its output or
page; a colour that marks a state is mixed with it, which gives a contrast of at least 4.5 in light
and in dark themes (https://www.w3.org/TR/WCAG21/#contrast-minimum).
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, TypeAlias

from nbtoolkit.text_table import one_line, text_columns

# Colours by state. What is failed also has a sign and a word.
RUNNING = "#2a7fc9"
ENDED = "#7d7d7d"
BEST = "#d55e00"
FAILED = "#dc3a3a"

FONT_SIZE = 11
"""Pixels of the text in a picture that is not scaled."""

# JupyterLab removes styles with ``var()`` from outputs that are not trusted.
_RULE = "#8884"
_SAFE = 'class="tex2jax_ignore mathjax_ignore"'
_FONT = "line-height:1.45;font-size:13px;font-variant-numeric:tabular-nums"
_WRAPS = "white-space:pre-wrap;overflow-wrap:anywhere"
_CELL = "padding:2px 10px 2px 0;white-space:nowrap"
_TABLE = "border-collapse:collapse;font-size:inherit"
_WIDTHS = {1: "1 1 200px", 2: "2 1 280px", 3: "3 1 560px", 4: "1 1 100%"}

# Of texts and axes in an image, which inherits no colour. The contrast is 4.5 on white (WCAG AA for
# text) and 4.2 on the ground of JupyterLab's dark theme. CSS's prefers-color-scheme would not help:
# it is the system's, and a notebook's theme often differs from it.
_GREY = "#767676"

_TITLE = re.compile(r"<title>.*?</title>", re.DOTALL)  # no browser shows it in an image


@dataclass(frozen=True)
class Text:
    """A paragraph.

    Attributes:
        text: its lines.
        kind: ``"faint"`` is less important, ``"alert"`` an error, ``"headline"`` the value that
            matters most, ``"bold"`` a name, and ``"code"`` is scrolled to its end.
        title: what a pointer shows.
    """

    text: str
    kind: Literal["plain", "faint", "alert", "headline", "bold", "code"] = "plain"
    title: str = ""


@dataclass(frozen=True)
class Chip:
    """The word of a state, in its colour."""

    text: str
    colour: str


@dataclass(frozen=True)
class Bar:
    """A bar of progress; ``share``: the filled part, from 0 to 1; ``text``: the same in words."""

    share: float
    text: str


@dataclass(frozen=True)
class ColouredCell:
    """A cell of a table that has a colour: a word of it, or a bar behind its text.

    Attributes:
        text: what it says.
        colour: of the state.
        bar: the share of the cell that the bar fills; None: there is none.
    """

    text: str
    colour: str
    bar: float | None = None


@dataclass(frozen=True)
class Table:
    """A table; columns with numbers are aligned right.

    Attributes:
        header: the names of the columns.
        rows: the cells of each row.
        titles: what a pointer shows on each row; empty: nothing.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str | ColouredCell]]
    titles: Sequence[str] = ()


@dataclass(frozen=True)
class Properties:
    """Names and values, a row for each."""

    values: Mapping[str, object]


@dataclass(frozen=True)
class Picture:
    """A picture in SVG.

    Attributes:
        text: the same in words.
        shapes: the elements of SVG, escaped.
        size: units of its view box: pixels at which its text has :data:`FONT_SIZE`.
        legend: colour, sign and name of what is drawn.
        scales: whether it is as wide as its place; else it has its size.
    """

    text: str
    shapes: str
    size: tuple[int, int]
    legend: Sequence[tuple[str, str, str]] = ()
    scales: bool = True


@dataclass(frozen=True)
class Line:
    """Parts beside each other on a line, which wraps."""

    parts: Sequence[Text | Chip | Bar | Picture]


@dataclass(frozen=True)
class Tiles:
    """Groups of parts with equal width, in rows; ``least``: pixels of the narrowest."""

    groups: Sequence[Sequence[Part]]
    least: int


Part: TypeAlias = Text | Chip | Bar | Table | Properties | Picture | Line | Tiles


@dataclass(frozen=True)
class Card:
    """A part of a page, with a border.

    Attributes:
        title: its heading; empty: none.
        parts: its contents.
        span: its width beside others: 1 (200 pixels or more), 2 (280), 3 (560) or 4 (a whole row).
        note: a short text beside the heading.
    """

    title: str
    parts: Sequence[Part]
    span: int = 1
    note: str = ""


def html(cards: Iterable[Card], *, images: bool = True) -> str:
    """Write cards as HTML: beside each other, or below each other in a narrow window.

    Args:
        cards: what is written.
        images: whether pictures are ``<img>``, as in all outputs that a notebook stores. In a
            notebook that is not trusted, as each one from somebody else, JupyterLab removes the
            elements of SVG and leaves their texts. A widget and a file contain the SVG itself,
            which has the colours of the theme, and titles for a pointer.
    """
    written = "".join(_card(card, images) for card in cards)
    return f'<div style="display:flex;flex-wrap:wrap;gap:8px">{written}</div>'


def properties_html(
    title: str, rows: Iterable[tuple[str, object]], notes: Iterable[str] = ()
) -> str:
    """Write one card of names and values, with sentences below.

    Args:
        title: its heading.
        rows: name and value of each row; a value is shown as ``str(value)``.
        notes: the sentences.
    """
    return html([Card(title, [Properties(dict(rows)), *map(Text, notes)], span=4)])


def _card(card: Card, images: bool) -> str:
    head = ""
    if card.title:
        beside = f'<span style="opacity:0.75">{escape(card.note)}</span>' if card.note else ""
        head = (
            '<div style="display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 8px;'
            f'margin-bottom:4px"><b>{escape(card.title)}</b>{beside}</div>'
        )
    # JupyterLab runs MathJax on outputs, and two dollar signs enclose a formula: _SAFE stops it.
    return (
        f'<div {_SAFE} style="{_FONT};flex:{_WIDTHS[card.span]};min-width:0;min-height:100%;'
        f"box-sizing:border-box;border:1px solid {_RULE};border-radius:6px;padding:8px 12px;"
        f'overflow-x:auto">{head}{_parts(card.parts, images)}</div>'
    )


def _parts(parts: Iterable[Part], images: bool) -> str:
    return "".join(_part(part, images) for part in parts)


def _part(part: Part, images: bool) -> str:
    match part:
        case Text():
            return _paragraph(part)
        case Chip():
            style = f"border-radius:9px;padding:0 8px;background:{part.colour}2b;white-space:nowrap"
            return f'<span style="{style};{_tinted(part.colour)}">{escape(part.text)}</span>'
        case Bar():
            return _bar(part)
        case Table():
            return _table(part)
        case Properties():
            return _properties(part.values)
        case Picture():
            return _image(part) if images else _svg(part)
        case Line():
            items = "".join(f"<span>{_inline(item, images)}</span>" for item in part.parts)
            style = "display:flex;flex-wrap:wrap;align-items:center;gap:0 12px"
            return f'<div style="{style}">{items}</div>'
        case Tiles():
            groups = "".join(
                f'<div style="min-width:0">{_parts(group, images)}</div>' for group in part.groups
            )
            columns = f"repeat(auto-fit,minmax({part.least}px,1fr))"
            return (
                f'<div style="display:grid;grid-template-columns:{columns};gap:8px">{groups}</div>'
            )


def _inline(part: Text | Chip | Bar | Picture, images: bool) -> str:
    if not isinstance(part, Text):
        return _part(part, images)
    if part.kind == "bold":
        return f"<b{_title(part.title)}>{escape(part.text)}</b>"
    if part.kind == "headline":
        return f'<b style="{_tinted(BEST)}">{escape(part.text)}</b>'
    return escape(part.text)


def _paragraph(part: Text) -> str:
    text = escape(part.text)
    match part.kind:
        case "alert":
            # Marked by a sign and a border, too, since not everybody sees colours.
            style = f"border-left:3px solid {FAILED};padding-left:8px;margin:4px 0;{_WRAPS}"
            return f'<div role="alert" style="{style}">⚠ {text}</div>'
        case "headline":
            style = f"font-size:26px;font-weight:700;line-height:1.3;{_tinted(BEST)}"
            return f'<div style="{style}">{text}</div>'
        case "code":
            # In a reversed column, the end is what is seen without scrolling.
            style = "display:flex;flex-direction:column-reverse;max-height:360px;overflow-y:auto"
            inside = f'<pre style="{_WRAPS};font-size:12px;margin:2px 0 10px 0">{text}</pre>'
            return f'<div style="{style}"><div style="flex:none">{inside}</div></div>'
    style = {"faint": "opacity:0.75;", "bold": "font-weight:600;"}.get(part.kind, "")
    return f'<div style="{style}{_WRAPS}">{text}</div>'


def _bar(bar: Bar) -> str:
    percent = round(100 * max(0.0, min(bar.share, 1.0)))
    return (
        f'<div style="display:flex;align-items:center;gap:8px;min-width:0">'
        f'<div role="progressbar" aria-valuenow="{percent}" aria-valuemin="0" aria-valuemax="100" '
        f'aria-label="{escape(bar.text)}" style="width:110px;height:8px;'
        f'border-radius:4px;background:{RUNNING}2b"><div style="width:{percent}%;height:100%;'
        f'border-radius:4px;background:{RUNNING}"></div></div>'
        f'<span style="white-space:nowrap">{escape(bar.text)}</span></div>'
    )


def _table(table: Table) -> str:
    columns = zip(*table.rows, strict=True) if table.rows else [()] * len(table.header)
    sides = ["right" if any(map(_is_number, column)) else "left" for column in columns]
    cells = zip(table.header, sides, strict=True)
    head = "".join(
        f'<th scope=col style="text-align:{side};border-bottom:2px solid {_RULE};{_CELL}">'
        f"{escape(name)}</th>"
        for name, side in cells
    )
    body = []
    for index, row in enumerate(table.rows):
        title = table.titles[index] if table.titles else ""
        inside = "".join(map(_cell, row, sides))
        body.append(f"<tr{_title(title)}>{inside}</tr>")
    return (
        f'<table style="width:100%;{_TABLE}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def _cell(cell: str | ColouredCell, side: str) -> str:
    style = f"text-align:{side};border-bottom:1px solid {_RULE};{_CELL}"
    if isinstance(cell, str):
        return f'<td style="{style}">{escape(cell)}</td>'
    if cell.bar is None:
        return f'<td style="{style}">{_part(Chip(cell.text, cell.colour), images=True)}</td>'
    fill = f"{cell.colour}3d {cell.bar:.0%},transparent {cell.bar:.0%}"
    style += f";background:linear-gradient(to left,{fill})"
    return f'<td style="{style}">{escape(cell.text)}</td>'


def _is_number(cell: str | ColouredCell) -> bool:
    """Whether a cell holds a number, perhaps with a sign, a unit or a deviation."""
    text = cell if isinstance(cell, str) else cell.text
    return text.lstrip("★+- ")[:1].isdigit()


def _properties(values: Mapping[str, object]) -> str:
    body = "".join(
        f'<tr><th scope="row" style="text-align:left;font-weight:400;vertical-align:top;{_CELL}">'
        f'{escape(name)}</th><td style="text-align:left;padding:2px 0;{_WRAPS}">'
        f"{escape(str(value))}</td></tr>"
        for name, value in values.items()
    )
    return f'<table style="{_TABLE}">{body}</table>'


def _svg(picture: Picture) -> str:
    width, height = picture.size
    drawn = (
        f'<svg role="img" aria-label="{escape(picture.text)}" viewBox="0 0 {width} {height}" '
        f'style="{_style(picture)}" font-size="{FONT_SIZE}" fill="currentColor">'
        f"{picture.shapes}</svg>"
    )
    return drawn + _legend(picture)


def _image(picture: Picture) -> str:
    source = b64encode(svg_file([picture]).encode()).decode()
    width, height = picture.size
    drawn = (
        f'<img alt="{escape(picture.text)}" width="{width}" height="{height}" '
        f'style="{_style(picture)}" src="data:image/svg+xml;base64,{source}">'
    )
    return drawn + _legend(picture)


def svg_file(pictures: Sequence[Picture]) -> str:
    """Return pictures below each other as a file of SVG."""
    top = 0
    parts = []
    for picture in pictures:
        width, height = picture.size
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        shapes = _TITLE.sub("", picture.shapes)
        parts.append(f'<svg y="{top}" {size}>{shapes}</svg>')
        top += height + 8
    width = max((picture.size[0] for picture in pictures), default=1)
    height = max(top - 8, 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="{FONT_SIZE}" '
        f'color="{_GREY}" fill="currentColor">{"".join(parts)}</svg>'
    )


def _style(picture: Picture) -> str:
    width, height = picture.size
    if picture.scales:
        return f"display:block;width:100%;height:auto;max-height:{height * 5 // 4}px"
    return f"width:{width}px;height:{height}px"


def _legend(picture: Picture) -> str:
    if not picture.legend:
        return ""
    entries = "".join(
        '<span style="margin-right:12px;white-space:nowrap"><span aria-hidden="true" '
        f'style="color:{colour};font-weight:700">{sign}</span> {escape(name)}</span>'
        for colour, sign, name in picture.legend
    )
    return f'<div style="font-size:11px;line-height:1.5">{entries}</div>'


def _tinted(colour: str) -> str:
    """Return the style of text in the colour of a state, readable in light and dark themes."""
    return f"color:color-mix(in srgb, {colour} 65%, currentColor)"


def _title(text: str) -> str:
    return f' title="{escape(text)}"' if text else ""


def text(cards: Iterable[Card]) -> str:
    """Write cards as lines of text; pictures, and cards of nothing else, are left out.

    A terminal would obey control characters: they become spaces.
    """
    written = []
    for card in cards:
        lines = [part for part in map(_text, card.parts) if part]
        if not lines:
            continue
        note = f" ({card.note})" if card.note else ""
        written.append("\n".join([f"{card.title}{note}", *lines] if card.title else lines))
    return "\n".join(map(one_line, "\n\n".join(written).split("\n")))


def _text(part: Part) -> str:
    match part:
        case Text() | Chip() | Bar():
            return part.text
        case Table():
            rows = [[_cell_text(cell) for cell in row] for row in part.rows]
            return text_columns(part.header, rows)
        case Properties():
            pairs = [[name, str(value)] for name, value in part.values.items()]
            return text_columns(pairs[0], pairs[1:]) if pairs else ""
        case Picture():
            return ""
        case Line():
            return "  ".join(filter(None, map(_text, part.parts)))
        case Tiles():
            texts = [_text(item) for group in part.groups for item in group]
            return "\n".join(filter(None, texts))


def _cell_text(cell: str | ColouredCell) -> str:
    return cell if isinstance(cell, str) else cell.text
