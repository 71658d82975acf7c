"""Schedule: the learning rate (and momentum) of every optimizer step of a run.

Steps are optimizer steps of the run, counted from 0: the curve does not depend on the ranks or on
accumulation, and a resumed run finds its place by the step alone (a plateau by its state, too).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from nbtoolkit.config import Config


class Schedule:
    """What the stepper asks before every step. Make one with :func:`make_schedule`.

    Attributes:
        total: optimizer steps of the whole run.
    """

    total: int

    def rate(self, step: int) -> float:
        """The learning rate of optimizer step ``step`` (from 0)."""
        raise NotImplementedError

    def momentum(self, step: int) -> float | None:
        """The momentum (Adam: the first beta) of step ``step``; None: what the optimizer has."""
        return None

    def observe(self, value: float, better: bool) -> None:
        """Take in an epoch's monitored value, and whether it is better than all before."""

    def state(self) -> dict[str, Any]:
        """What a resumed run has to know besides the step: numbers only."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state`."""


@dataclass(frozen=True, kw_only=True)
class Curve(Schedule):
    """A straight way up to the peak, then one of three ways on: a pure function of the step.

    Attributes:
        kind: the way on. A cosine (Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983,
            without restarts), a straight line, or none: ``constant``.
        peak: the learning rate after the warm-up.
        warmup: steps of the way up: the first has ``peak / warmup``, the last ``peak``.
        floor: the learning rate that step ``total``, the first not taken, would have.
        total: optimizer steps of the whole run.
    """

    kind: Literal["cosine", "linear", "constant"]
    peak: float
    warmup: int
    total: int
    floor: float = 0.0

    def rate(self, step: int) -> float:
        """See :meth:`Schedule.rate`."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = _share(step - self.warmup, self.total - self.warmup)
        if self.kind == "cosine":
            return _half_cosine(self.peak, self.floor, done)
        return self.peak + (self.floor - self.peak) * done if self.kind == "linear" else self.peak


@dataclass(frozen=True, kw_only=True)
class OneCycle(Schedule):
    """Up to a high learning rate and down again, momentum the other way: a pure function.

    The steps are those of ``torch.optim.lr_scheduler.OneCycleLR`` with ``pct_start`` for the
    warm-up: from peak / 25 up to the peak, then down to the floor, each by half a cosine, while
    the momentum goes from 0.95 to 0.85 and back. The policy is Smith's (2018,
    https://arxiv.org/abs/1803.09820); the cosines are what fastai and torch made of its lines.

    Attributes:
        peak: the highest learning rate.
        warmup: steps of the way up, not always a whole number.
        total: optimizer steps of the whole run.
        floor: the learning rate of the last step.
    """

    peak: float
    warmup: float
    total: int
    floor: float = 0.0

    def rate(self, step: int) -> float:
        """See :meth:`Schedule.rate`."""
        return self._at(step, self.peak / 25, self.peak, self.floor)

    def momentum(self, step: int) -> float:
        """See :meth:`Schedule.momentum`."""
        return self._at(step, 0.95, 0.85, 0.95)

    def _at(self, step: int, first: float, turning: float, last: float) -> float:
        turn = max(0.0, self.warmup - 1)  # torch turns here, between two steps if need be
        if step < turn:
            return _half_cosine(first, turning, step / turn)
        return _half_cosine(turning, last, _share(step - turn, self.total - 1 - turn))


@dataclass(kw_only=True)
class Plateau(Schedule):
    """A learning rate that drops when the monitored metric gets no better.

    After ``patience`` epochs in a row without a better value it is multiplied by ``factor``, and
    the count begins anew. ``torch.optim.lr_scheduler.ReduceLROnPlateau`` with one less for its
    ``patience`` does the same: that is how many epochs it lets pass.

    Attributes:
        start: the learning rate before the first drop, warm-up included.
        patience: epochs.
        factor: what a drop leaves of the learning rate.
        floor: what all drops together leave at least.
        scale: what they have left until now.
        worse: epochs since the last better value or drop.
    """

    start: Curve
    patience: int
    factor: float
    floor: float = 0.0
    scale: float = 1.0
    worse: int = 0

    def __post_init__(self) -> None:
        self.total = self.start.total

    def rate(self, step: int) -> float:
        """See :meth:`Schedule.rate`."""
        return self.start.rate(step) * self.scale

    def observe(self, value: float, better: bool) -> None:
        """See :meth:`Schedule.observe`; a value that is not a number is never better."""
        self.worse = 0 if better and not math.isnan(value) else self.worse + 1
        if self.worse >= self.patience:
            self.scale, self.worse = max(self.scale * self.factor, self.floor), 0

    def state(self) -> dict[str, Any]:
        """See :meth:`Schedule.state`."""
        return {"scale": self.scale, "worse": self.worse}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Schedule.restore`."""
        self.scale, self.worse = float(state["scale"]), int(state["worse"])


def make_schedule(config: Config, *, steps: int, factor: float) -> Schedule:
    """The schedule that ``config.optim`` asks for.

    Args:
        config: ``optim.lr, schedule, warmup, floor, plateau_patience, plateau_factor``.
        steps: optimizer steps of the whole run.
        factor: what ``optim.lr`` is multiplied by (the plan's ``lr_factor``).
    """
    optim = config.optim
    peak, warmup = optim.lr * factor, optim.warmup * steps
    floor = optim.floor * peak
    if optim.schedule == "one_cycle":
        return OneCycle(peak=peak, warmup=warmup, total=steps, floor=floor)
    if optim.schedule == "plateau":
        start = Curve(kind="constant", peak=peak, warmup=round(warmup), total=steps)
        patience, drop = optim.plateau_patience, optim.plateau_factor
        return Plateau(start=start, patience=patience, factor=drop, floor=optim.floor)
    return Curve(kind=optim.schedule, peak=peak, warmup=round(warmup), total=steps, floor=floor)


def _half_cosine(start: float, end: float, done: float) -> float:
    """From ``start`` (``done`` 0) to ``end`` (1), level at both."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * done))


def _share(part: float, whole: float) -> float:
    """How much of ``whole`` is done, from 0 to 1; of nothing, nothing is."""
    return min(1.0, part / whole) if whole > 0 else 0.0
