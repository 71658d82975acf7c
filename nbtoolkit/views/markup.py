"""Escape values and wrap views so that they follow the theme around them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Literal

from nbtoolkit.report.charts import thinned
from nbtoolkit.report.run_summary import Points, number
from nbtoolkit.study.plots import COLOURS, shortened

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


# Texts take the colour of what is around them and lines those of the report, which have a contrast
# of 3 and more on white and on black: so they are read in light and dark themes.


# --- sparklines ---
# A metric's name, last value and the way it took, a few centimetres wide.


_SPARK_WIDTH, _SPARK_HEIGHT, _EDGE = 120, 28, 3  # pixels
_POINTS = 120  # a pixel each
_SPARK_LABEL = 32  # characters of a name


def sparks(curves: Mapping[str, Points], most: int = 6) -> str:
    """Small curves side by side, as HTML with SVG; names are escaped.

    Args:
        curves: each metric's values by step.
        most: how many are drawn; of the others nothing is said.
    """
    shown = [(name, points) for name, points in curves.items() if points][:most]
    tiles = "".join(_tile(name, points) for name, points in shown)
    return f'<div style="display:flex;flex-wrap:wrap;gap:4px 20px">{tiles}</div>' if tiles else ""


def _tile(name: str, points: Points) -> str:
    last = number(points[-1][1])
    return (
        f'<div style="white-space:nowrap"><div>{escape(shortened(name, _SPARK_LABEL))} '
        f"<b>{escape(last)}</b></div>{_line(name, points)}</div>"
    )


def _line(name: str, points: Points) -> str:
    """The curve; nothing where there are not yet two points to draw it through."""
    every = -(-len(points) // _POINTS)
    kept = points[:: -every or -1][::-1]  # the last one stays
    kept = [one for one in kept if all(math.isfinite(x) and abs(x) < 1e300 for x in one)]
    if len(kept) < 2:
        return ""
    steps, values = zip(*kept, strict=True)
    x = _scaled(steps, _SPARK_WIDTH)
    y = [_SPARK_HEIGHT - value for value in _scaled(values, _SPARK_HEIGHT)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    label = escape(f"{name} from {number(values[0])} to {number(values[-1])}", quote=True)
    return (
        f'<svg role="img" aria-label="{label}" width="{_SPARK_WIDTH}" height="{_SPARK_HEIGHT}" '
        f'viewBox="0 0 {_SPARK_WIDTH} {_SPARK_HEIGHT}"><polyline points="{path}" fill="none" '
        f'stroke="{COLOURS[0]}" stroke-width="1.8"/></svg>'
    )


def _scaled(values: tuple[float, ...], size: int) -> list[float]:
    """Values as distances from an edge; all in the middle where they are one."""
    low, high = min(values), max(values)
    wide = (high - low) or 1.0
    middle = 0.5 if high == low else 0.0
    return [_EDGE + ((v - low) / wide + middle) * (size - 2 * _EDGE) for v in values]


# --- svg ---


_WIDTH, _HEIGHT = 380, 220  # pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 10, 26, 36  # around the plot, for ticks and names
_TICKS = 6  # at most, or one more
_LABEL = 40  # characters of a name

Mark = Literal["line", "dashed", "dots", "crosses", "steps"]


@dataclass(frozen=True)
class Series:
    """Points that belong together, and how they are drawn."""

    name: str
    points: Points
    mark: Mark = "line"
    colour: str | None = None
    """None: by its place among the others."""


def chart(title: str, series: Sequence[Series], *, along: str = "step") -> str:
    """A chart of several series with a legend below it; a sentence where there is nothing to draw.

    Args:
        title: what is drawn, above it.
        series: names are escaped; points that are not finite are left out.
        along: what the horizontal axis is.
    """
    drawn = [_Drawn(one, COLOURS[at % len(COLOURS)]) for at, one in enumerate(series)]
    drawn = [one for one in drawn if one.points]
    if not drawn:
        return f"<p>{escape(shortened(title, _LABEL))}: nothing yet.</p>"
    frame = _Frame.around([point for one in drawn for point in one.points])
    shapes = "".join(one.shape(frame) for one in drawn)
    head = escape(shortened(title, _LABEL))
    label = escape(f"{title} by {along}: {', '.join(one.series.name for one in drawn)}", quote=True)
    return (
        f'<div style="display:inline-block;vertical-align:top;margin:4px 12px 4px 0">'
        f'<svg role="img" aria-label="{label}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-size="12" fill="currentColor">'
        f'<text x="{_LEFT}" y="15" font-weight="600">{head}</text>'
        f"{''.join(frame.axes(along))}{shapes}</svg>{_legend(drawn)}</div>"
    )


class _Drawn:
    """A series with its colour, thinned to what can be seen."""

    def __init__(self, series: Series, colour: str) -> None:
        self.series, self.colour = series, series.colour or colour
        steps, values = thinned([point for point in series.points if all(map(_finite, point))])
        self.points = list(zip(steps, values, strict=True))

    def shape(self, frame: _Frame) -> str:
        """Its line, or a mark for each of its points."""
        at = [(frame.x(step), frame.y(value)) for step, value in self.points]
        if self.series.mark in ("dots", "crosses") or len(at) == 1:
            return "".join(self._mark(x, y) for x, y in at)
        if self.series.mark == "steps":
            corners = [(x, y0) for (_, y0), (x, _) in pairwise(at)]
            at = [point for pair in zip(at, [*corners, at[-1]], strict=True) for point in pair]
        dash = ' stroke-dasharray="5 3"' if self.series.mark == "dashed" else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        line = f'stroke="{self.colour}" stroke-width="1.8"{dash}'
        return f'<polyline points="{path}" fill="none" {line}/>'

    def _mark(self, x: float, y: float) -> str:
        if self.series.mark == "crosses":
            path = f"M{x - 3:.1f},{y - 3:.1f}l6,6m0,-6l-6,6"
            return f'<path d="{path}" stroke="{self.colour}" stroke-width="1.5" fill="none"/>'
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.8" fill="{self.colour}"/>'


@dataclass(frozen=True)
class _Frame:
    """The ranges that are shown, and where a value lies in the picture."""

    left: float
    right: float
    low: float
    high: float

    @classmethod
    def around(cls, points: Points) -> _Frame:
        steps, values = zip(*points, strict=True)
        return cls(*_widened(min(steps), max(steps)), *_widened(min(values), max(values)))

    def x(self, step: float) -> float:
        share = (step - self.left) / (self.right - self.left)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def axes(self, along: str) -> Iterator[str]:
        """Lines at round numbers, with the numbers."""
        floor = _HEIGHT - _BOTTOM
        for value in _ticks(self.low, self.high):
            y = self.y(value)
            yield (
                f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
                f'stroke="currentColor" stroke-opacity="0.18"/>'
                f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>'
            )
        for step in _ticks(self.left, self.right):
            place = f'x="{self.x(step):.1f}" y="{floor + 16}"'
            yield f'<text {place} text-anchor="middle">{step:.6g}</text>'
        yield (
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{floor}" y2="{floor}" '
            f'stroke="currentColor" stroke-opacity="0.6"/>'
            f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 4}" '
            f'text-anchor="middle">{escape(along)}</text>'
        )


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range around values, even where all are one, and a little wider than they are."""
    if high > low:
        around = (high - low) * 0.03
        return (low - around, high + around) if around > 0 else (low - 1, high + 1)
    around = abs(low) * 0.05 or 0.5
    return low - around, high + around


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers in a range, a few of them."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _finite(value: float) -> bool:
    return math.isfinite(value) and abs(value) < 1e300  # the difference of two must be finite too


def _legend(drawn: Sequence[_Drawn]) -> str:
    entries = "".join(
        f'<span style="margin-right:12px;white-space:nowrap"><span aria-hidden="true" '
        f'style="color:{one.colour};font-weight:700">{_SIGNS[one.series.mark]}</span> '
        f"{escape(shortened(one.series.name, _LABEL))}</span>"
        for one in drawn
    )
    return f'<div style="max-width:{_WIDTH}px;font-size:12px;line-height:1.5">{entries}</div>'


_SIGNS: dict[Mark, str] = {"line": "—", "dashed": "- -", "dots": "●", "crosses": "×", "steps": "—"}
