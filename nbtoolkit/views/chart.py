"""Draw charts as pictures for panel, live view, report and saved notebooks.

Text takes the colour of its surroundings. Lines and marks have colours by state, with a contrast of
at least 3 on white, #111111 and #1e1e1e (https://www.w3.org/TR/WCAG21/#non-text-contrast), so both
read well in light and in dark themes. A chart fills the width of its card and scales with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Literal, TypeAlias, TypeVar

from nbtoolkit.cards import ENDED, FONT_SIZE, RUNNING, Part, Picture, Text
from nbtoolkit.text_table import duration, shortened

_T = TypeVar("_T")

Points: TypeAlias = list[tuple[float, float]]
"""Positions and values."""

PALETTE = (RUNNING, "#009e73", "#8a63d2", "#a07800", "#c44e9b", "#0f8f9f", "#b5651d")
"""Colours of compared runs, in the order in which they were chosen; none means the best."""

Mark = Literal["line", "dashed", "steps", "dots", "crosses", "ring"]

_SIZE = (330, 180)  # units of a view box; a card is 300 to 500 pixels wide
# margins for ticks and names
_LEFT = 50
_RIGHT = 10
_TOP = 8
_BOTTOM = 32
_NAME = 40  # characters of a name
_MOST = 400  # points of a series: a chart shows no more


@dataclass(frozen=True)
class Axis:
    """An axis of a chart.

    Attributes:
        label: its name.
        low: the smallest value; None: that of the points. Smaller values lie on the edge.
        high: the largest value; None: that of the points. Larger values lie on the edge.
        log: whether it is logarithmic; ignored where a limit is not above 0.
        integer: whether only whole numbers are labelled.
        choices: the texts at 0, 1, 2, ...; empty: it is numeric.
    """

    label: str = ""
    low: float | None = None
    high: float | None = None
    log: bool = False
    integer: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Series:
    """Points that are drawn in one way.

    Attributes:
        name: in the legend and in the description; equal ones of one colour share an entry.
        points: their positions and values; those that are not finite are left out.
        mark: a line, or a mark for each point.
        colour: of line and marks.
        titles: what a pointer shows: one for each point, or one for all; empty: nothing.
        faint: whether it stands behind the others.
    """

    name: str
    points: Points
    mark: Mark = "line"
    colour: str = ENDED
    titles: Sequence[str] = ()
    faint: bool = False


def chart(
    series: Sequence[Series],
    *,
    x: Axis = Axis(integer=True),
    y: Axis = Axis(),
    legend: bool = False,
    size: tuple[int, int] = _SIZE,
) -> Part:
    """Draw several series; a sentence where there are no points.

    Args:
        series: what is drawn, the last one on top.
        x: the horizontal axis.
        y: the vertical axis.
        legend: whether the names stand below it.
        size: width and height in pixels at which its text has 11 pixels.
    """
    width, height = size
    drawn = [(line, _finite(line)) for line in series]
    drawn = [(line, points) for line, points in drawn if points]
    if not drawn:
        return Text("Nothing yet.", "faint")
    positions = [step for _, points in drawn for step, _, _ in points]
    values = [value for _, points in drawn for _, value, _ in points]
    bottom = _BOTTOM if x.label else _BOTTOM - FONT_SIZE
    across = _Scale.of(x, positions, _LEFT, width - _RIGHT)
    up = _Scale.of(y, values, height - bottom, _TOP)
    entries: dict[tuple[str, str], list[Series]] = {}
    for line, _ in drawn:
        entries.setdefault((line.name, line.colour), []).append(line)
    described = [_described(lines) for lines in entries.values()]
    label = f"{y.label or 'value'} by {x.label or 'step'}: "
    label += "; ".join(described[-len(PALETTE) :])
    shapes = "".join(_shape(line, points, across, up) for line, points in drawn)
    named = [_legend(lines[-1]) for lines in entries.values()] if legend else []
    return Picture(label, "".join(_axes(across, up)) + shapes, size, named)


def _described(lines: Sequence[Series]) -> str:
    """Put the series of an entry of the legend into words: how a line runs, where marks lie."""
    points = [point for line in lines for point in _finite(line)]
    values = [value for _, value, _ in points]
    name = lines[-1].name
    mark = lines[-1].mark
    if mark == "crosses":  # of trials that failed, they lie on the edge, not at their value
        return f"{len(points)} {name}"
    if len(points) == 1:
        return f"{name} {values[0]:.4g}"
    if len(lines) == 1 and mark in ("line", "dashed", "steps"):
        return f"{name} from {values[0]:.4g} to {values[-1]:.4g}"
    count = len(points) if mark in ("dots", "ring") else len(lines)
    return f"{count} {name} between {min(values):.4g} and {max(values):.4g}"


@dataclass(frozen=True)
class _Scale:
    """Where the values of an axis lie, in units of the view box."""

    axis: Axis
    low: float
    high: float
    start: float
    end: float
    log: bool

    @classmethod
    def of(cls, axis: Axis, values: Sequence[float], start: float, end: float) -> _Scale:
        if axis.choices:
            return cls(axis, -0.5, len(axis.choices) - 0.5, start, end, log=False)
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        log = axis.log and low > 0 and high > low
        if not high > low:
            margin = abs(low) * 0.05 or 0.5
            low = low - margin
            high = high + margin
        elif not log and axis.low is None and axis.high is None and not axis.integer:
            margin = (high - low) * 0.04
            low = low - margin
            high = high + margin
        return cls(axis, low, high, start, end, log)

    def at(self, value: float) -> float:
        """Return the position of a value; of one outside of the axis, its edge."""
        value = min(max(value, self.low), self.high)
        low = self.low
        high = self.high
        if self.log:
            value = math.log(value)
            low = math.log(low)
            high = math.log(high)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def outside(self, value: float) -> bool:
        """Whether a value lies beyond the axis."""
        return not self.low <= value <= self.high

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return a few round values, each with its text."""
        if self.axis.choices:
            every = -(-len(self.axis.choices) // most)
            return [
                (float(index), shortened(text, 12))
                for index, text in enumerate(self.axis.choices)
                if index % every == 0
            ]
        values = self._powers(most) if self.log else []
        return [(value, f"{value:.4g}") for value in values or self._round(most)]

    def _powers(self, most: int) -> list[float]:
        first = math.ceil(math.log10(self.low))
        last = math.floor(math.log10(self.high))
        powers = [10.0**power for power in range(first, last + 1)]
        return powers[:: -(-len(powers) // most)] if len(powers) > 1 else []

    def _round(self, most: int) -> list[float]:
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
        step = max(step, 1.0) if self.axis.integer else step
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [multiple * step for multiple in range(first, last + 1)]


def _axes(across: _Scale, up: _Scale) -> Iterator[str]:
    left = across.start
    right = across.end
    floor = up.start
    for value, text in up.ticks(4):
        y = up.at(value)
        yield (
            f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="currentColor" stroke-opacity="0.15"/>'
            f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'
        )
    for value, text in across.ticks(int(right - left) // 45):
        at = f'x="{across.at(value):.1f}" y="{floor + 14}"'
        yield f'<text {at} text-anchor="middle">{escape(text)}</text>'
    yield (
        f'<line x1="{left}" x2="{right}" y1="{floor}" y2="{floor}" '
        f'stroke="currentColor" stroke-opacity="0.6"/>'
    )
    if across.axis.label:
        name = escape(shortened(across.axis.label, _NAME))
        at = f'x="{(left + right) / 2}" y="{floor + _BOTTOM - 4}"'
        yield f'<text {at} text-anchor="middle">{name}</text>'


def _finite(series: Series) -> list[tuple[float, float, str]]:
    """Return the points that can be drawn, each with its title, thinned to what is visible."""
    alone = len(series.titles) == 1
    titles = series.titles if len(series.titles) == len(series.points) and not alone else ()
    points = [
        (step, value, titles[index] if titles else "")
        for index, (step, value) in enumerate(series.points)
        if drawable(step) and drawable(value)
    ]
    return thinned(points, _MOST)


def thinned(points: list[_T], most: int) -> list[_T]:
    """Drop points evenly until at most ``most`` are left; the last one stays."""
    every = -(-len(points) // most)
    return points[:: -every or -1][::-1]


def drawable(value: float) -> bool:
    """Whether a value is finite, and so is its difference to another such value."""
    return math.isfinite(value) and abs(value) < 1e300


def _shape(
    series: Series, points: list[tuple[float, float, str]], across: _Scale, up: _Scale
) -> str:
    corners = [(across.at(step), up.at(value)) for step, value, _ in points]
    if series.mark in ("dots", "crosses", "ring") or len(corners) == 1:
        return "".join(
            _point(series, x, y, title, cut=up.outside(value))
            for (x, y), (_, value, title) in zip(corners, points, strict=True)
        )
    if series.mark == "steps":
        turns = [(x, y0) for (_, y0), (x, _) in pairwise(corners)]
        turns.append(corners[-1])
        corners = [point for pair in zip(corners, turns, strict=True) for point in pair]
    dash = ' stroke-dasharray="5 3"' if series.mark == "dashed" else ""
    faint = ' stroke-opacity="0.45"' if series.faint else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    title = _title(series.titles[0] if len(series.titles) == 1 else series.name)
    width = 1.2 if series.faint else 2
    return (
        f'<polyline points="{path}" fill="none" stroke="{series.colour}" '
        f'stroke-width="{width}"{dash}{faint}>{title}</polyline>'
    )


def _point(series: Series, x: float, y: float, title: str, *, cut: bool) -> str:
    """Return a mark; a cross where the value lies beyond the axis."""
    inside = _title(title or (series.titles[0] if len(series.titles) == 1 else ""))
    if series.mark == "crosses" or cut:
        path = f"M{x - 3:.1f},{y - 3:.1f}l6,6m0,-6l-6,6"
        stroke = f'stroke="{series.colour}" stroke-width="1.5" fill="none"'
        return f'<path d="{path}" {stroke}>{inside}</path>'
    if series.mark == "ring":
        return (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{series.colour}" fill-opacity="0.25" '
            f'stroke="{series.colour}" stroke-width="2">{inside}</circle>'
        )
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.8" fill="{series.colour}">{inside}</circle>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


_SIGNS: dict[Mark, str] = {
    "line": "—", "dashed": "- -", "steps": "—", "dots": "●", "crosses": "×", "ring": "○",
}  # fmt: skip


def _legend(series: Series) -> tuple[str, str, str]:
    return series.colour, _SIGNS[series.mark], shortened(series.name, _NAME)


_SPARK = (90, 18)  # pixels


def sparkline(points: Points, label: str) -> Picture | None:
    """Draw values from 0 to 1 as a small curve without axes, of fixed size; None below two points.

    Args:
        points: positions and values.
        label: the same in words.
    """
    line = Series(label, points, colour=RUNNING)
    finite = _finite(line)
    if len(finite) < 2:
        return None
    width, height = _SPARK
    across = _Scale.of(Axis(), [step for step, _, _ in finite], 3, width - 3)
    up = _Scale.of(Axis(low=0, high=1), [], height - 3, 3)
    return Picture(label, _shape(line, finite, across, up), _SPARK, scales=False)


_ROW = 20  # units of a row's height
_BAR = 16  # units of a bar's height
_DIGIT = 7  # units of a character


@dataclass(frozen=True)
class Span:
    """A bar of a timeline: from ``begin`` to ``end``, in seconds; ``title``: for a pointer."""

    begin: float
    end: float
    label: str
    title: str
    colour: str = ENDED


def timeline(rows: Mapping[str, Sequence[Span]], begin: float, end: float) -> Picture | None:
    """Show what each worker does over time; a gap in a row is time without work.

    Args:
        rows: each worker's bars.
        begin: seconds at the left edge.
        end: seconds at the right edge.

    Returns:
        The picture; None: there is nothing to show.
    """
    if not rows or not end > begin:
        return None
    width = _SIZE[0]
    across = _Scale.of(Axis(low=begin, high=end), [], _LEFT, width - _RIGHT)
    shapes = []
    for index, (name, spans) in enumerate(rows.items()):
        top = index * _ROW
        shapes.append(f'<text x="0" y="{top + 12}">{escape(shortened(name, 8))}</text>')
        shapes += [_span(span, across, top) for span in spans]
    bottom = len(rows) * _ROW + 10
    shapes.append(f'<text x="{_LEFT}" y="{bottom}">0 s</text>')
    took = duration(end - begin)
    shapes.append(f'<text x="{width - _RIGHT}" y="{bottom}" text-anchor="end">{took}</text>')
    label = f"what {len(rows)} workers did over {took}"
    return Picture(label, "".join(shapes), (width, bottom + 4))


def _span(span: Span, across: _Scale, top: int) -> str:
    left = across.at(span.begin)
    right = across.at(span.end)
    width = max(right - left - 1, 1)
    label = ""
    if width > _DIGIT * len(span.label):
        at = f'x="{left + width / 2:.1f}" y="{top + 12}" text-anchor="middle"'
        # Black on each colour of a state has a contrast above 4.5, in light and in dark themes.
        label = f'<text {at} fill="#000">{escape(span.label)}</text>'
    return (
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" '
        f'fill="{span.colour}">{_title(span.title)}</rect>{label}'
    )
