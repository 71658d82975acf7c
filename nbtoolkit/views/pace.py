"""Pace: how often a view is drawn: about once a second, and never for above 1% of a core."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 1.0
"""Between two looks at a folder."""

_SHARE = 0.01  # of one core
_LONGEST = 30.0  # seconds: however large a sweep becomes


class Pace:
    """When to draw next, by what drawing costs.

    Args:
        seconds: the shortest time between two.
        clock: monotonic seconds.
        cost: seconds of CPU that this thread has used.
    """

    def __init__(
        self,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
        cost: Callable[[], float] = time.thread_time,
    ) -> None:
        self._shortest, self._clock, self._cost = seconds, clock, cost
        self._next = clock() + seconds
        self.seconds = seconds
        """Between the last drawing and the next."""

    @property
    def due(self) -> bool:
        """Whether it is time."""
        return self._clock() >= self._next

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Around each drawing."""
        before = self._cost()
        try:
            yield
        finally:
            dear = (self._cost() - before) / _SHARE
            self.seconds = max(self._shortest, min(dear, _LONGEST))
            self._next = self._clock() + self.seconds
