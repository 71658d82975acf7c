"""Names that the views still import from here."""

from __future__ import annotations

from nbtoolkit.run.events import number_values as numbers
from nbtoolkit.run.paths import KIND_NAMES as KIND_NAMES
from nbtoolkit.run.paths import Kind as Kind
from nbtoolkit.run.paths import kind_of as kind_of
from nbtoolkit.views.chart import Points as Points

__all__ = ["KIND_NAMES", "Kind", "Points", "kind_of", "numbers", "thinned"]


def thinned(points: Points, most: int = 1000) -> Points:
    """Drop points evenly until at most ``most`` are left; the last one stays."""
    every = -(-len(points) // most)
    return points[:: -every or -1][::-1]
