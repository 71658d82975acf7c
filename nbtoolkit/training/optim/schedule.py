"""Compute the rate of every step, by the configuration or the schedule passed to ``fit``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from nbtoolkit.errors import FitError

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

    from nbtoolkit.config.schema import Config

GivenSchedule: TypeAlias = "LRScheduler | Callable[..., Any]"
"""A scheduler, a function of the optimizer (and of the run's steps) that makes one, or a function
of the optimizer step (from 0) that returns the factor of the optimizer's rates."""

_ALLOWED_SCHEDULE = (
    "a torch.optim.lr_scheduler.LRScheduler of the optimizer, a function optimizer -> LRScheduler "
    "(or (optimizer, steps) -> LRScheduler), or a function step -> factor of the rate"
)


class Schedule:
    """The learning rate (and momentum) of every step. Make one with :func:`make_schedule`.

    Steps are optimizer steps of the run, counted from 0: the curve does not depend on the ranks or
    on accumulation, and a resumed run needs only its step (a plateau its state, too).

    Attributes:
        total: optimizer steps of the whole run.
    """

    total: int

    def rate(self, step: int) -> float:
        """The learning rate of optimizer step ``step`` (from 0)."""
        raise NotImplementedError

    def momentum(self, step: int) -> float | None:
        """The momentum (Adam: the first beta) of step ``step``; None: the optimizer's."""
        return None

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Use this schedule for ``optimizer``; called once, before the first step."""

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Set the rates of optimizer step ``step`` (from 0); returns the first group's."""
        rate = self.rate(step)
        set_rate(optimizer, rate, self.momentum(step))
        return rate

    def advance(self) -> None:
        """Called after each optimizer step."""

    def observe(self, value: float, better: bool) -> None:
        """Report an epoch's monitored value, and whether it is better than all before."""

    def state(self) -> dict[str, Any]:
        """What a resumed run needs besides the step."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state`."""


@dataclass(frozen=True, kw_only=True)
class Curve(Schedule):
    """Linear warm-up, then one of three curves: a pure function of the step.

    Attributes:
        kind: the curve after the warm-up: half a cosine (Loshchilov and Hutter 2017,
            https://arxiv.org/abs/1608.03983, without restarts), a straight line, or ``constant``.
        peak: the learning rate after the warm-up.
        warmup: steps of the warm-up: the first has ``peak / warmup``, the last ``peak``.
        floor: the learning rate that step ``total``, the one after the last, would have.
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
        done = _fraction(step - self.warmup, self.total - self.warmup)
        if self.kind == "cosine":
            return _half_cosine(self.peak, self.floor, done)
        return self.peak + (self.floor - self.peak) * done if self.kind == "linear" else self.peak


@dataclass(frozen=True, kw_only=True)
class OneCycle(Schedule):
    """Up to a high learning rate and down again, momentum inversely: a pure function of the step.

    The values are those of ``torch.optim.lr_scheduler.OneCycleLR`` with ``pct_start`` for the
    warm-up: from peak / 25 up to the peak, then down to the floor, each by half a cosine, while
    the momentum goes from 0.95 to 0.85 and back. The policy is Smith's (2018,
    https://arxiv.org/abs/1803.09820), with cosines in place of lines, as in fastai and torch.

    Attributes:
        peak: the highest learning rate.
        warmup: steps of the warm-up, not always a whole number.
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
        turn = max(0.0, self.warmup - 1)  # as torch does, possibly between two steps
        if step < turn:
            return _half_cosine(first, turning, step / turn)
        return _half_cosine(turning, last, _fraction(step - turn, self.total - 1 - turn))


@dataclass(kw_only=True)
class Plateau(Schedule):
    """A learning rate that drops when the monitored metric stops improving.

    After ``patience`` epochs in a row without a better value it is multiplied by ``factor``, and
    the count starts again. ``torch.optim.lr_scheduler.ReduceLROnPlateau`` does the same with a
    ``patience`` of one less: it counts the epochs that it tolerates.

    Attributes:
        start: the learning rate before the first drop, warm-up included.
        patience: epochs.
        factor: of each drop.
        floor: the smallest product of all drops.
        scale: the product of the drops so far.
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


@dataclass(frozen=True, kw_only=True)
class RangeTest(Schedule):
    """A rate that rises exponentially from the first step to the last.

    The learning-rate range test of Smith (2017, https://arxiv.org/abs/1506.01186), exponential as
    in fastai and Lightning. Of an optimizer that the user built, the first group has this rate, and
    the other groups keep their proportions to it.

    Attributes:
        low: the learning rate of the first step, above 0.
        high: the learning rate of the last step.
        total: optimizer steps of the whole run.
    """

    low: float
    high: float
    total: int

    def rate(self, step: int) -> float:
        """See :meth:`Schedule.rate`."""
        return self.low * math.pow(self.high / self.low, _fraction(step, self.total - 1))

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`Schedule.bind`."""
        # A scheduler that was made before has changed `lr`, and left the rate in `initial_lr`.
        rates = [group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups]
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            group.setdefault("lr_scale", own / rates[0] if rates[0] else 1.0)


def make_schedule(config: Config, *, steps: int, factor: float) -> Schedule:
    """Make the schedule that ``config.optim`` asks for.

    Args:
        config: ``optim.lr, schedule, warmup_ratio, min_lr_ratio, plateau_patience,
            plateau_factor``.
        steps: optimizer steps of the whole run.
        factor: multiplies ``optim.lr`` (the plan's ``lr_factor``).
    """
    optim = config.optim
    peak, warmup = optim.lr * factor, optim.warmup_ratio * steps
    floor = optim.min_lr_ratio * peak
    if optim.schedule == "range_test":
        return RangeTest(low=floor or peak * 1e-6, high=peak, total=steps)
    if optim.schedule == "one_cycle":
        return OneCycle(peak=peak, warmup=warmup, total=steps, floor=floor)
    if optim.schedule == "plateau":
        start = Curve(kind="constant", peak=peak, warmup=round(warmup), total=steps)
        patience, drop = optim.plateau_patience, optim.plateau_factor
        return Plateau(start=start, patience=patience, factor=drop, floor=optim.min_lr_ratio)
    return Curve(kind=optim.schedule, peak=peak, warmup=round(warmup), total=steps, floor=floor)


def _half_cosine(start: float, end: float, done: float) -> float:
    """From ``start`` (``done`` 0) to ``end`` (``done`` 1), with slope 0 at both."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * done))


def _fraction(part: float, whole: float) -> float:
    """``part / whole``, at most 1; 0 if ``whole`` is 0."""
    return min(1.0, part / whole) if whole > 0 else 0.0


def set_rate(optimizer: torch.optim.Optimizer, rate: float, momentum: float | None = None) -> None:
    """Set the learning rate of the next step, times each group's ``lr_scale`` (default 1).

    Args:
        optimizer: changed in place.
        rate: the schedule's learning rate.
        momentum: the schedule's momentum, or Adam's first beta; None: unchanged. A momentum of 0
            stays 0: the optimizer has none.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
        if momentum is None:
            continue
        if group.get("momentum"):
            group["momentum"] = momentum
        elif "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])


# --- the schedule that the user passes ---


def make_user_schedule(
    config: Config, optimizer: object, given: GivenSchedule | None, *, steps: int, factor: float
) -> Schedule:
    """The schedule that the user passed to ``fit``, or the one of ``config.optim``.

    An optimizer object (or one that a function makes) keeps the rates that it has, unless a
    schedule was passed: ``optim.schedule`` belongs to ``optim.lr``, which it does not use. Only
    ``range_test`` replaces both: it measures, and does not train.

    Args:
        config: its section ``optim``.
        optimizer: ``optimizer=`` of ``fit``.
        given: ``schedule=`` of ``fit``.
        steps: optimizer steps of the whole run.
        factor: multiplies ``optim.lr`` (the plan's ``lr_factor``).
    """
    from_config = optimizer is None or isinstance(optimizer, type)
    if config.optim.schedule == "range_test":
        return make_schedule(config, steps=steps, factor=factor if from_config else 1.0)
    if given is None and from_config:
        return make_schedule(config, steps=steps, factor=factor)
    peak = config.optim.lr * factor if from_config else None
    return UserSchedule(given, total=steps, peak=peak)


class UserSchedule(Schedule):
    """The rates of a user's schedule; without one those that the optimizer has.

    Args:
        given: ``schedule=`` of ``fit``, or None.
        total: optimizer steps of the whole run.
        peak: the optimizer's rate before the schedule; None: its own.
    """

    def __init__(
        self, given: GivenSchedule | None, *, total: int, peak: float | None = None
    ) -> None:
        self.total = total
        self._given, self._peak = given, peak
        self._scheduler: LRScheduler | None = None
        self._plateau: ReduceLROnPlateau | None = None
        self._factor: Callable[[int], float] | None = None
        self._base: list[float] = []

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`Schedule.bind`.

        Raises:
            FitError: what the user passed is no schedule, of another optimizer, or too short.
        """
        from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

        if self._peak is not None:
            set_rate(optimizer, self._peak)
        self._base = [group.get("lr", 0.0) for group in optimizer.param_groups]
        given = self._given
        if given is None:
            return
        made = given if isinstance(given, LRScheduler) else self._called(given, optimizer)
        if not isinstance(made, LRScheduler):
            self._factor = made
            return
        if made.optimizer is not optimizer:
            raise FitError(
                f"schedule= is a {type(made).__name__} of another optimizer than the one that "
                "fit steps",
                allowed=_ALLOWED_SCHEDULE,
                do="pass its optimizer, too, or a function: schedule=lambda optimizer: ...",
            )
        bases = getattr(made, "base_lrs", self._base)
        if len(bases) < len(self._base):
            raise FitError(
                f"schedule= is a {type(made).__name__} for {len(bases)} groups of parameters, "
                f"and its optimizer has {len(self._base)}: the loss has parameters, too",
                allowed="a schedule that is made when its optimizer has all its groups",
                do="give the optimizer the parameters of the loss, or pass a function: "
                "schedule=lambda optimizer: ...",
            )
        length = getattr(made, "total_steps", None)  # of OneCycleLR, which raises after them
        if isinstance(length, int) and length < self.total:
            raise FitError(
                f"schedule= is a {type(made).__name__} of {length} steps, and the run has "
                f"{self.total}",
                allowed="a schedule over all optimizer steps of the run",
                do=f"make it with total_steps={self.total}: a function (optimizer, steps) gets it",
            )
        self._scheduler = made
        self._plateau = made if isinstance(made, ReduceLROnPlateau) else None

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """See :meth:`Schedule.apply`."""
        if self._factor is not None:
            factor = self._factor(step)
            for group, base in zip(optimizer.param_groups, self._base, strict=True):
                group["lr"] = base * factor
        return float(optimizer.param_groups[0].get("lr", 0.0))

    def advance(self) -> None:
        """See :meth:`Schedule.advance`."""
        if self._scheduler is not None and self._plateau is None:
            self._scheduler.step()

    def observe(self, value: float, better: bool) -> None:
        """See :meth:`Schedule.observe`."""
        if self._plateau is not None:
            self._plateau.step(value)

    def state(self) -> dict[str, Any]:
        """See :meth:`Schedule.state`."""
        return {} if self._scheduler is None else {"scheduler": self._scheduler.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Schedule.restore`."""
        if self._scheduler is not None and "scheduler" in state:
            self._scheduler.load_state_dict(state["scheduler"])

    def _called(
        self, given: object, optimizer: torch.optim.Optimizer
    ) -> LRScheduler | Callable[[int], float]:
        """The scheduler that a function makes, or the function if it is one of the step."""
        from torch.optim.lr_scheduler import LRScheduler

        if not callable(given) or isinstance(given, type):
            raise self._refusal(f"is {given!r}")
        if required_arguments(given) == 2:
            made = given(optimizer, self.total)
        else:
            try:  # 1 is the factor of the first step of most curves
                number = given(0)
            except Exception as error:
                made = self._made(given, optimizer, error)
            else:
                if isinstance(number, (int, float)):
                    return cast("Callable[[int], float]", given)
                made = number
        if not isinstance(made, LRScheduler):
            raise self._refusal(f"is a function that returns a {type(made).__name__}")
        return made

    def _made(self, given: Callable[..., Any], optimizer: object, error: Exception) -> object:
        """What the function makes of the optimizer, since of a step it raised ``error``."""
        try:
            return given(optimizer)
        except Exception as second:
            raise self._refusal(
                f"is a function that fails: of step 0 with {type(error).__name__}: {error}; of the "
                f"optimizer with {type(second).__name__}: {second}"
            ) from second

    def _refusal(self, what: str) -> FitError:
        return FitError(
            f"schedule= {what}",
            allowed=_ALLOWED_SCHEDULE,
            do="pass schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100)",
        )


def required_arguments(function: Callable[..., Any]) -> int:
    """How many positional arguments a function requires; 0: unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 0
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.default is one.empty and one.kind in kinds for one in parameters)
