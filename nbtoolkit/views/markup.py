"""Render text, tables, bars and charts as HTML without scripts; all values are escaped.

Text takes the colour of its surroundings. Lines have the report's colours, with a contrast of at
least 3 on white and on black, so both read well in light and in dark themes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle, pairwise
from typing import Literal

from nbtoolkit.report.run_summary import Points, thinned
from nbtoolkit.study.plots import COLOURS
from nbtoolkit.text_table import number, shortened

_WRAPS = "white-space:pre-wrap;overflow-wrap:anywhere"
_VIEW = (
    "color:var(--jp-ui-font-color1, inherit);line-height:1.45;font-size:13px;"
    "font-variant-numeric:tabular-nums;overflow-x:auto"
)
_CELL = "text-align:left;padding:2px 10px 2px 0;white-space:nowrap"


def view(*parts: str) -> str:
    """Wrap the parts of a view in one element.

    JupyterLab runs MathJax on all outputs, and two dollar signs enclose a formula; these classes
    keep it from doing so.
    """
    return f'<div class="tex2jax_ignore mathjax_ignore" style="{_VIEW}">{"".join(parts)}</div>'


def side_by_side(*views: str) -> str:
    """Place views beside each other, or below each other in a narrow window."""
    inside = "".join(views)
    return f'<div style="display:flex;flex-wrap:wrap;gap:0 24px">{inside}</div>' if inside else ""


def paragraph(text: str, *, strong: bool = False) -> str:
    """Render a paragraph."""
    weight = "font-weight:600;" if strong else ""
    return f'<div style="{weight}{_WRAPS}">{escape(text)}</div>'


def alert(text: str) -> str:
    """Render an error, marked by a sign and a border, since not everybody sees colours.

    The text keeps the theme's own colour, whose contrast suits light and dark.
    """
    style = "border-left:3px solid #d55e00;padding-left:8px;white-space:pre-wrap;font-size:12px"
    return f'<div role="alert" style="{style};overflow-wrap:anywhere">⚠ {escape(text)}</div>'


def property_table(values: Mapping[str, object]) -> str:
    """Render names and values as a table with a row for each."""
    body = "".join(
        f'<tr><th scope="row" style="{_CELL};vertical-align:top">{escape(name)}</th>'
        f'<td style="{_CELL};{_WRAPS}">{escape(str(value))}</td></tr>'
        for name, value in values.items()
    )
    return f'<table style="font-size:inherit">{body}</table>' if body else ""


def data_table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """Render a table with a header."""
    head = "".join(f'<th scope="col" style="{_CELL}">{escape(name)}</th>' for name in header)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{escape(value)}</td>' for value in row) + "</tr>"
        for row in rows
    )
    above = f'<caption style="text-align:left">{escape(caption)}</caption>' if caption else ""
    inside = f"{above}<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<table style="font-size:inherit">{inside}</table>'


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
        f'<div style="display:flex;align-items:center;gap:10px;margin:3px 0">'
        f'<div role="progressbar" aria-valuenow="{percent}" aria-valuemin="0" aria-valuemax="100" '
        f'aria-label="{escape(label, quote=True)}" style="width:220px;height:10px;flex:none;'
        f'border:1px solid currentColor"><div style="width:{percent}%;height:100%;'
        f'background:#2a7fc9"></div></div><span>{escape(label)}</span></div>'
    )


def code_block(text: str) -> str:
    """Render lines to be copied."""
    return f'<pre style="{_WRAPS};font-size:12px;margin:2px 0 10px 0">{escape(text)}</pre>'


# --- sparklines ---

_SPARK_WIDTH, _SPARK_HEIGHT, _SPARK_EDGE = 120, 28, 3  # pixels
_SPARK_LABEL = 32  # characters of a name


def sparklines(curves: Mapping[str, Points], most: int = 6) -> str:
    """Render small curves side by side, each with its name and last value.

    Args:
        curves: each metric's values by step.
        most: the number of curves that are drawn; the others are left out.
    """
    drawn = [(name, points) for name, points in curves.items() if points][:most]
    tiles = "".join(
        f'<div style="white-space:nowrap"><div>{escape(shortened(name, _SPARK_LABEL))} '
        f"<b>{escape(number(points[-1][1]))}</b></div>{_sparkline(name, points)}</div>"
        for name, points in drawn
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:4px 20px">{tiles}</div>' if tiles else ""


def _sparkline(name: str, points: Points) -> str:
    """Draw a curve; empty below two finite points."""
    # One point per pixel.
    points = [point for point in thinned(points, _SPARK_WIDTH) if all(map(_drawable, point))]
    if len(points) < 2:
        return ""
    steps, values = zip(*points, strict=True)
    x = _scaled(steps, _SPARK_WIDTH)
    y = [_SPARK_HEIGHT - value for value in _scaled(values, _SPARK_HEIGHT)]
    label = escape(f"{name} from {number(values[0])} to {number(values[-1])}", quote=True)
    return (
        f'<svg role="img" aria-label="{label}" width="{_SPARK_WIDTH}" height="{_SPARK_HEIGHT}" '
        f'viewBox="0 0 {_SPARK_WIDTH} {_SPARK_HEIGHT}"><polyline points="{_path(x, y)}" '
        f'fill="none" stroke="{COLOURS[0]}" stroke-width="1.8"/></svg>'
    )


def _scaled(values: Sequence[float], size: int) -> list[float]:
    """Scale values to pixels from an edge; equal values lie in the middle."""
    low, high = min(values), max(values)
    width = (high - low) or 1.0
    middle = 0.5 if high == low else 0.0
    room = size - 2 * _SPARK_EDGE
    return [_SPARK_EDGE + ((value - low) / width + middle) * room for value in values]


# --- charts ---

_WIDTH, _HEIGHT = 380, 220  # pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 10, 26, 36  # margins for ticks and names
_TICKS = 6  # at most, or one more
_LABEL = 40  # characters of a name

Mark = Literal["line", "dashed", "dots", "crosses", "steps"]
_LEGEND_SIGNS: dict[Mark, str] = {
    "line": "—",
    "dashed": "- -",
    "dots": "●",
    "crosses": "×",
    "steps": "—",
}


@dataclass(frozen=True)
class Series:
    """One series of points, and how it is drawn."""

    name: str
    points: Points
    mark: Mark = "line"
    colour: str | None = None
    """None: by its position among the series."""


def chart(title: str, series: Sequence[Series], *, along: str = "step") -> str:
    """Draw a chart of several series with a legend; a sentence where there are no points.

    Args:
        title: the heading.
        series: what is drawn; points that are not finite are left out.
        along: the name of the horizontal axis.
    """
    lines = list(map(_DrawnSeries, series, cycle(COLOURS)))
    lines = [line for line in lines if line.points]
    head = escape(shortened(title, _LABEL))
    if not lines:
        return f"<p>{head}: nothing yet.</p>"
    frame = _Frame.around([point for line in lines for point in line.points])
    shapes = "".join(line.shape(frame) for line in lines)
    label = escape(f"{title} by {along}: {', '.join(line.name for line in lines)}", quote=True)
    legend = "".join(line.legend() for line in lines)
    return (
        f'<div style="display:inline-block;vertical-align:top;margin:4px 12px 4px 0">'
        f'<svg role="img" aria-label="{label}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-size="12" fill="currentColor">'
        f'<text x="{_LEFT}" y="15" font-weight="600">{head}</text>'
        f"{''.join(frame.axes(along))}{shapes}</svg>"
        f'<div style="max-width:{_WIDTH}px;font-size:12px;line-height:1.5">{legend}</div></div>'
    )


class _DrawnSeries:
    """A series with its colour, thinned to what is visible."""

    def __init__(self, series: Series, colour: str) -> None:
        self.name, self._mark = series.name, series.mark
        self._colour = series.colour or colour
        finite = [point for point in series.points if all(map(_drawable, point))]
        self.points = thinned(finite)

    def shape(self, frame: _Frame) -> str:
        """Draw its line, or a mark for each of its points."""
        corners = [(frame.x(step), frame.y(value)) for step, value in self.points]
        if self._mark in ("dots", "crosses") or len(corners) == 1:
            return "".join(self._point(x, y) for x, y in corners)
        if self._mark == "steps":
            turns = [(x, y0) for (_, y0), (x, _) in pairwise(corners)]
            turns.append(corners[-1])
            corners = [point for pair in zip(corners, turns, strict=True) for point in pair]
        dash = ' stroke-dasharray="5 3"' if self._mark == "dashed" else ""
        path = _path(*zip(*corners, strict=True))
        line = f'stroke="{self._colour}" stroke-width="1.8"{dash}'
        return f'<polyline points="{path}" fill="none" {line}/>'

    def _point(self, x: float, y: float) -> str:
        if self._mark == "crosses":
            path = f"M{x - 3:.1f},{y - 3:.1f}l6,6m0,-6l-6,6"
            return f'<path d="{path}" stroke="{self._colour}" stroke-width="1.5" fill="none"/>'
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.8" fill="{self._colour}"/>'

    def legend(self) -> str:
        """Draw its entry in the legend."""
        return (
            f'<span style="margin-right:12px;white-space:nowrap"><span aria-hidden="true" '
            f'style="color:{self._colour};font-weight:700">{_LEGEND_SIGNS[self._mark]}</span> '
            f"{escape(shortened(self.name, _LABEL))}</span>"
        )


@dataclass(frozen=True)
class _Frame:
    """The ranges of the axes, and where a value lies in the image."""

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
        """Draw lines at round numbers, with the numbers."""
        floor = _HEIGHT - _BOTTOM
        for value in _ticks(self.low, self.high):
            y = self.y(value)
            yield (
                f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
                f'stroke="currentColor" stroke-opacity="0.18"/>'
                f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>'
            )
        for step in _ticks(self.left, self.right):
            position = f'x="{self.x(step):.1f}" y="{floor + 16}"'
            yield f'<text {position} text-anchor="middle">{step:.6g}</text>'
        yield (
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{floor}" y2="{floor}" '
            f'stroke="currentColor" stroke-opacity="0.6"/>'
            f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 4}" '
            f'text-anchor="middle">{escape(along)}</text>'
        )


def _path(x: Sequence[float], y: Sequence[float]) -> str:
    """Format points for an SVG polyline."""
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def _widened(low: float, high: float) -> tuple[float, float]:
    """Return a range a little wider than its values, also where all of them are equal."""
    if high > low:
        margin = (high - low) * 0.03
        return (low - margin, high + margin) if margin > 0 else (low - 1, high + 1)
    margin = abs(low) * 0.05 or 0.5
    return low - margin, high + margin


def _ticks(low: float, high: float) -> list[float]:
    """Return a few round numbers in a range."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [multiple * step for multiple in range(first, last + 1)]


def _drawable(value: float) -> bool:
    """Whether a value is finite, and so is its difference to another such value."""
    return math.isfinite(value) and abs(value) < 1e300
