"""Sparks: a metric's name, last value and the way it took, a few centimetres wide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from nbtoolkit.report.story import Points
from nbtoolkit.report.words import number
from nbtoolkit.search.labels import shortened
from nbtoolkit.search.plots import COLOURS

_WIDTH, _HEIGHT, _EDGE = 120, 28, 3  # pixels
_POINTS = 120  # a pixel each
_LABEL = 32  # characters of a name


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
        f'<div style="white-space:nowrap"><div>{escape(shortened(name, _LABEL))} '
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
    x = _scaled(steps, _WIDTH)
    y = [_HEIGHT - value for value in _scaled(values, _HEIGHT)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    label = escape(f"{name} from {number(values[0])} to {number(values[-1])}", quote=True)
    return (
        f'<svg role="img" aria-label="{label}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}"><polyline points="{path}" fill="none" '
        f'stroke="{COLOURS[0]}" stroke-width="1.8"/></svg>'
    )


def _scaled(values: tuple[float, ...], size: int) -> list[float]:
    """Values as distances from an edge; all in the middle where they are one."""
    low, high = min(values), max(values)
    wide = (high - low) or 1.0
    middle = 0.5 if high == low else 0.0
    return [_EDGE + ((v - low) / wide + middle) * (size - 2 * _EDGE) for v in values]
