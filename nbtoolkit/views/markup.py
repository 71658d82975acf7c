"""Escape values and wrap views so that they follow the theme around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_BOX = (
    "color:var(--jp-ui-font-color1, inherit);line-height:1.45;font-size:13px;"
    "font-variant-numeric:tabular-nums;overflow-x:auto"
)
_CELL = "text-align:left;padding:2px 10px 2px 0;white-space:nowrap"
_WRAPS = "white-space:pre-wrap;overflow-wrap:anywhere"


def boxed(*parts: str) -> str:
    """Parts of a view in one box.

    JupyterLab lets MathJax look at all outputs, where two dollar signs enclose a formula: by these
    classes it leaves them alone.
    """
    return f'<div class="tex2jax_ignore mathjax_ignore" style="{_BOX}">{"".join(parts)}</div>'


def beside(*boxes: str) -> str:
    """Boxes beside each other; below each other where there is no room."""
    inside = "".join(boxes)
    return f'<div style="display:flex;flex-wrap:wrap;gap:0 24px">{inside}</div>' if inside else ""


def said(text: str, *, strong: bool = False) -> str:
    """A sentence, escaped."""
    weight = "font-weight:600;" if strong else ""
    return f'<div style="{weight}white-space:pre-wrap;overflow-wrap:anywhere">{escape(text)}</div>'


def wrong(text: str) -> str:
    """A sentence on what is wrong, escaped: by a sign and a border, since colours alone say little.

    The text keeps the theme's own colour, whose contrast is right in light and dark.
    """
    style = "border-left:3px solid #d55e00;padding-left:8px;white-space:pre-wrap;font-size:12px"
    return f'<div role="alert" style="{style};overflow-wrap:anywhere">⚠ {escape(text)}</div>'


def rows(names: Mapping[str, object]) -> str:
    """A table of names and values, escaped."""
    body = "".join(
        f'<tr><th scope="row" style="{_CELL};vertical-align:top">{escape(name)}</th>'
        f'<td style="{_CELL};{_WRAPS}">{escape(str(value))}</td></tr>'
        for name, value in names.items()
    )
    return f'<table style="font-size:inherit">{body}</table>' if body else ""


def columns(header: Sequence[str], lines: Sequence[Sequence[str]], caption: str = "") -> str:
    """A table with a header, escaped."""
    head = "".join(f'<th scope="col" style="{_CELL}">{escape(name)}</th>' for name in header)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{escape(value)}</td>' for value in line) + "</tr>"
        for line in lines
    )
    above = f'<caption style="text-align:left">{escape(caption)}</caption>' if caption else ""
    inside = f"{above}<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<table style="font-size:inherit">{inside}</table>'


def bar(share: float | None, label: str) -> str:
    """How much of something is done or used, with the same in words beside it.

    Args:
        share: from 0 to 1; None: not known, and only the words are shown.
        label: the words.
    """
    if share is None:
        return said(label)
    percent = round(100 * max(0.0, min(share, 1.0)))
    return (
        f'<div style="display:flex;align-items:center;gap:10px;margin:3px 0">'
        f'<div role="progressbar" aria-valuenow="{percent}" aria-valuemin="0" aria-valuemax="100" '
        f'aria-label="{escape(label, quote=True)}" style="width:220px;height:10px;flex:none;'
        f'border:1px solid currentColor"><div style="width:{percent}%;height:100%;'
        f'background:#2a7fc9"></div></div><span>{escape(label)}</span></div>'
    )


def preformatted(text: str) -> str:
    """Lines to be copied, escaped."""
    style = "white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px;margin:2px 0 10px 0"
    return f'<pre style="{style}">{escape(text)}</pre>'
