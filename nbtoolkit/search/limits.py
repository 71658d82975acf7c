"""Limits: constraints on metrics that are not themselves made best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from nbtoolkit.search.wishes import Wishes

OUT_OF_MEMORY = "out_of_memory"
"""The limit that a trial breaks when a device's memory does not suffice."""


class Limit(NamedTuple):
    """One side of a constraint."""

    metric: str
    side: str
    bound: float

    @property
    def name(self) -> str:
        """What it is called in the study."""
        return f"{self.metric}_{self.side}"

    def excess(self, value: float) -> float:
        """By how much a value breaks it; 0 or less: it is kept."""
        return value - self.bound if self.side == "max" else self.bound - value


def limits_of(wishes: Wishes) -> list[Limit]:
    """The limits that are wished for."""
    return [
        Limit(metric, side, float(bound))
        for metric, sides in wishes.constraints.items()
        for side, bound in sides.items()
    ]


def broken(limits: list[Limit], metrics: Mapping[str, float]) -> str | None:
    """Which limits these metrics break, as a sentence; None: none."""
    texts = [
        f"{one.metric} is {metrics[one.metric]:g}, {one.side} {one.bound:g}"
        for one in limits
        if one.excess(metrics[one.metric]) > 0
    ]
    return "; ".join(texts) or None
