"""Make the learning-rate scheduler that the configuration names, or take the one of ``fit``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from nbtoolkit.config.directions import resolve
from nbtoolkit.errors import FitError

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

    from nbtoolkit.config.schema import Config

GivenSchedule: TypeAlias = "LRScheduler | Callable[..., Any]"
"""A scheduler, a function of the optimizer (and of the run's steps) that makes one, or a function
of the optimizer step (from 0) that returns the factor of the optimizer's rates."""

_ALLOWED_SCHEDULE = (
    "a torch.optim.lr_scheduler.LRScheduler of the optimizer, a function optimizer -> LRScheduler "
    "(or (optimizer, steps) -> LRScheduler), or a function step -> factor of the rate"
)


class Schedule:
    """The learning rates of an optimizer, set by schedulers of torch.

    Steps are optimizer steps of the run, counted from 0: the rates depend neither on the ranks nor
    on accumulation.

    Args:
        optimizer: whose rates the schedulers set.
        by_step: sets the rates of each step; None: the optimizer keeps those that it has.
        by_epoch: lowers the rates after an epoch.
        is_curve: whether the rates of ``by_step`` follow from the number of the step alone. A
            resumed run then needs no state, and may be longer than before.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        by_step: LRScheduler | None = None,
        by_epoch: ReduceLROnPlateau | None = None,
        *,
        is_curve: bool = False,
    ) -> None:
        self._optimizer, self._is_curve = optimizer, is_curve
        self._by_step, self._by_epoch = by_step, by_epoch
        scales = [group.get("lr_scale", 1.0) for group in optimizer.param_groups]
        self._group = next((number for number, scale in enumerate(scales) if scale), 0)
        # In fp16 the first step may overflow: the optimizer skips it, and torch would warn that the
        # scheduler steps before the optimizer.
        optimizer._opt_called = True  # type: ignore[attr-defined]

    @property
    def rate(self) -> float:
        """The learning rate now, of a group without a scale of its own."""
        group = self._optimizer.param_groups[self._group]
        return float(group.get("lr", 0.0)) / (group.get("lr_scale") or 1.0)

    def begin_step(self, step: int) -> None:
        """Set the rates of optimizer step ``step``."""
        if self._is_curve and self._by_step is not None and self._by_step.last_epoch != step:
            self._by_step.last_epoch = step - 1
            self._by_step.step()

    def end_step(self) -> None:
        """Advance a scheduler that counts the steps itself."""
        if self._by_step is not None and not self._is_curve:
            self._by_step.step()

    def end_epoch(self, value: float) -> None:
        """Report an epoch's monitored value."""
        if self._by_epoch is not None:
            self._by_epoch.step(value)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs besides the number of steps and the optimizer's groups."""
        return {name: scheduler.state_dict() for name, scheduler in self._counting().items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state`."""
        for name, scheduler in self._counting().items():
            if name in state:
                scheduler.load_state_dict(state[name])

    def _counting(self) -> dict[str, LRScheduler]:
        """The schedulers with a state, by name."""
        schedulers = {
            "by_step": None if self._is_curve else self._by_step,
            "by_epoch": self._by_epoch,
        }
        return {name: one for name, one in schedulers.items() if one is not None}


def make_schedule(
    config: Config,
    optimizer: torch.optim.Optimizer,
    given: GivenSchedule | None = None,
    *,
    steps: int,
    factor: float = 1.0,
    from_config: bool = True,
) -> Schedule:
    """Make the schedule that was passed to ``fit``, or that of ``config.optim``.

    An optimizer object (or one that a function makes) keeps the rates that it has, unless a
    schedule was passed: ``optim.schedule`` belongs to ``optim.lr``, which it does not use. Only
    ``range_test`` replaces both: it measures, and does not train.

    Args:
        config: ``optim.lr, schedule, warmup_ratio, min_lr_ratio, plateau_patience,
            plateau_factor``, and for a plateau what says which values of the metric are better.
        optimizer: its rates are set.
        given: ``schedule=`` of ``fit``.
        steps: optimizer steps of the whole run.
        factor: multiplies ``optim.lr`` (the plan's ``lr_factor``).
        from_config: whether the optimizer has the rate of ``optim.lr``.

    Raises:
        FitError: what the user passed is no schedule, of another optimizer, or too short.
    """
    optim = config.optim
    if from_config:
        set_rate(optimizer, optim.lr * factor)
    if optim.schedule == "range_test":
        if not from_config:
            _keep_proportions(optimizer)
            set_rate(optimizer, optim.lr)
        return _curve(optimizer, range_test(optim.min_lr_ratio or 1e-6, steps))
    if given is not None:
        return _users(optimizer, given, steps)
    if not from_config:
        return Schedule(optimizer)
    if optim.schedule == "one_cycle":
        return Schedule(optimizer, _one_cycle(config, optimizer, steps), is_curve=True)
    if optim.schedule == "plateau":
        return _plateau(config, optimizer, steps)
    return _curve(optimizer, warmup_and_decay(config, steps))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of each group, times its ``lr_scale`` (default 1)."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def _curve(optimizer: torch.optim.Optimizer, factor: Callable[[int], float]) -> Schedule:
    """The present rates, times ``factor`` of the step."""
    from torch.optim.lr_scheduler import LambdaLR

    _forget_schedulers(optimizer)
    return Schedule(optimizer, LambdaLR(optimizer, factor), is_curve=True)


def _forget_schedulers(optimizer: torch.optim.Optimizer) -> None:
    """Let a new scheduler begin at the present rates, not at those of an earlier scheduler."""
    for group in optimizer.param_groups:
        group.pop("initial_lr", None)


# --- the schedules of the configuration ---


def warmup_and_decay(config: Config, steps: int) -> Callable[[int], float]:
    """Return the factor of the peak in each step: linear warm-up, then one of three curves.

    Half a cosine (Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983, without restarts),
    a straight line, or ``constant``. The first step of a warm-up has ``1 / warmup``, its last 1.
    Step ``steps``, the one after the last, would have ``min_lr_ratio``.
    """
    optim = config.optim
    kind, floor, warmup = optim.schedule, optim.min_lr_ratio, round(optim.warmup_ratio * steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = _share(step - warmup, steps - warmup)
        if kind == "cosine":
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
        return 1 + (floor - 1) * done if kind == "linear" else 1.0

    return factor


def range_test(low: float, steps: int) -> Callable[[int], float]:
    """Return the factor of the rate in each step, which rises exponentially from ``low`` to 1.

    The learning-rate range test of Smith (2017, https://arxiv.org/abs/1506.01186), exponential as
    in fastai and Lightning.
    """
    return lambda step: low ** (1 - _share(step, steps - 1))


def _keep_proportions(optimizer: torch.optim.Optimizer) -> None:
    """Give the groups of a user's optimizer scales: the first has the rate of the test."""
    # A scheduler that was made before has changed `lr`, and left the rate in `initial_lr`.
    rates = [group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group.setdefault("lr_scale", rate / rates[0] if rates[0] else 1.0)


def _one_cycle(config: Config, optimizer: torch.optim.Optimizer, steps: int) -> OneCycleLR:
    """Up to the peak and down again, momentum inversely, if the optimizer has any."""
    from torch.optim.lr_scheduler import OneCycleLR

    optim, defaults = config.optim, optimizer.defaults
    steps = max(steps, 2)  # torch divides by the number of steps after the first
    # The rise of a single step would be torch's division by zero.
    rise = optim.warmup_ratio if optim.warmup_ratio * steps > 1 else 0.0
    _forget_schedulers(optimizer)
    return OneCycleLR(
        optimizer,
        max_lr=[group["lr"] for group in optimizer.param_groups],
        total_steps=steps,
        pct_start=rise,
        div_factor=25,
        final_div_factor=1 / (25 * optim.min_lr_ratio) if optim.min_lr_ratio else math.inf,
        cycle_momentum=bool(defaults.get("momentum")) or "betas" in defaults,
    )


def _plateau(config: Config, optimizer: torch.optim.Optimizer, steps: int) -> Schedule:
    """A rate that drops when the monitored metric stops improving, after a warm-up."""
    from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau

    optim = config.optim
    floors = [group["lr"] * optim.min_lr_ratio for group in optimizer.param_groups]
    direction = resolve(config.checkpoint.monitor or "val_loss", config)
    plateau = ReduceLROnPlateau(
        optimizer,
        "max" if direction == "maximize" else "min",
        factor=optim.plateau_factor,
        patience=optim.plateau_patience - 1,  # torch counts the epochs that it tolerates
        threshold=0.0,
        min_lr=floors,
        eps=0.0,
    )
    warmup = round(optim.warmup_ratio * steps)
    if warmup < 2:
        return Schedule(optimizer, by_epoch=plateau)
    _forget_schedulers(optimizer)
    # It multiplies the present rates, and so keeps what the plateau has made of them.
    rise = LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
    return Schedule(optimizer, rise, plateau)


def _share(part: float, whole: float) -> float:
    """``part / whole``, at most 1; 0 if ``whole`` is 0."""
    return min(1.0, part / whole) if whole > 0 else 0.0


# --- the schedule that the user passes ---


def _users(optimizer: torch.optim.Optimizer, given: GivenSchedule, steps: int) -> Schedule:
    from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

    made = given if isinstance(given, LRScheduler) else _called(given, optimizer, steps)
    if not isinstance(made, LRScheduler):
        return _curve(optimizer, made)
    _check(made, optimizer, steps)
    if isinstance(made, ReduceLROnPlateau):
        return Schedule(optimizer, by_epoch=made)
    return Schedule(optimizer, made)


def _check(made: LRScheduler, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Refuse a scheduler that does not fit the optimizer or the run."""
    kind, groups = type(made).__name__, optimizer.param_groups
    if made.optimizer is not optimizer:
        raise FitError(
            f"schedule= is a {kind} of another optimizer than the one that fit steps",
            allowed=_ALLOWED_SCHEDULE,
            do="pass its optimizer, too, or a function: schedule=lambda optimizer: ...",
        )
    bases = getattr(made, "base_lrs", groups)
    if len(bases) < len(groups):
        raise FitError(
            f"schedule= is a {kind} for {len(bases)} groups of parameters, and its optimizer has "
            f"{len(groups)}: the loss has parameters, too",
            allowed="a schedule that is made when its optimizer has all its groups",
            do="give the optimizer the parameters of the loss, or pass a function: "
            "schedule=lambda optimizer: ...",
        )
    length = getattr(made, "total_steps", None)  # of OneCycleLR, which raises after them
    if isinstance(length, int) and length < steps:
        raise FitError(
            f"schedule= is a {kind} of {length} steps, and the run has {steps}",
            allowed="a schedule over all optimizer steps of the run",
            do=f"make it with total_steps={steps}: a function (optimizer, steps) gets it",
        )


def _called(
    given: object, optimizer: torch.optim.Optimizer, steps: int
) -> LRScheduler | Callable[[int], float]:
    """The scheduler that a function makes, or the function if it is one of the step."""
    from torch.optim.lr_scheduler import LRScheduler

    if not callable(given) or isinstance(given, type):
        raise _refusal(f"is {given!r}")
    if required_arguments(given) == 2:
        made = given(optimizer, steps)
    else:
        try:  # 1 is the factor of the first step of most curves
            number = given(0)
        except Exception as error:
            made = _made(given, optimizer, error)
        else:
            if isinstance(number, (int, float)):
                return cast("Callable[[int], float]", given)
            made = number
    if not isinstance(made, LRScheduler):
        raise _refusal(f"is a function that returns a {type(made).__name__}")
    return made


def _made(given: Callable[..., Any], optimizer: object, error: Exception) -> object:
    """What the function makes of the optimizer, since of a step it raised ``error``."""
    try:
        return given(optimizer)
    except Exception as second:
        raise _refusal(
            f"is a function that fails: of step 0 with {type(error).__name__}: {error}; of the "
            f"optimizer with {type(second).__name__}: {second}"
        ) from second


def _refusal(what: str) -> FitError:
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
