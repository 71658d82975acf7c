"""Use the optimizer and the learning-rate schedule that the user passes to ``fit``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from nbtoolkit.config.schema import measured
from nbtoolkit.errors import FitError
from nbtoolkit.training.optim.optimizer import (
    OptimizerClass,
    Schedule,
    make_optimizer,
    make_schedule,
    refuse_closure,
    set_rate,
)
from nbtoolkit.training.optim.param_groups import some_names

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

    from nbtoolkit.config.schema import Config

GivenOptimizer: TypeAlias = (
    "torch.optim.Optimizer | OptimizerClass | Callable[[nn.Module], torch.optim.Optimizer]"
)
"""An optimizer over the model's parameters, a function that makes one of the model, or a class."""

GivenSchedule: TypeAlias = "LRScheduler | Callable[..., Any]"
"""A scheduler, a function of the optimizer (and of the run's steps) that makes one, or a function
of the optimizer step (from 0) that returns the factor of the optimizer's rates."""

_ALLOWED_OPTIMIZER = (
    "a torch.optim.Optimizer over the model's parameters, a function model -> Optimizer, or a "
    "subclass of torch.optim.Optimizer"
)
_ALLOWED_SCHEDULE = (
    "a torch.optim.lr_scheduler.LRScheduler of the optimizer, a function optimizer -> LRScheduler "
    "(or (optimizer, steps) -> LRScheduler), or a function step -> factor of the rate"
)


# --- the optimizer ---


def make_user_optimizer(
    config: Config, model: nn.Module, given: GivenOptimizer | None
) -> torch.optim.Optimizer:
    """The optimizer that the user passed to ``fit``, or the one of ``config.optim``.

    Args:
        config: ``optim``; of an object or a function only that ``optim.param_groups`` is empty.
        model: on its device already.
        given: ``optimizer=``; None: the one that ``optim.name`` names.

    Raises:
        FitError: it is no optimizer, or not one of all trainable parameters of ``model``.
    """
    from torch.optim import Optimizer

    if given is None or (isinstance(given, type) and issubclass(given, Optimizer)):
        return make_optimizer(config, model, given)
    optimizer = resolve_optimizer(model, given, "optimizer=")
    if config.optim.param_groups:
        raise FitError(
            "optim.param_groups is set, and optimizer= is an optimizer with groups of its own",
            allowed="optim.param_groups with optim.name, or with a class as optimizer=",
            do="remove optim.param_groups, or pass the class (optimizer=torch.optim.AdamW)",
        )
    check_all_held(model, [optimizer])
    return optimizer


def check_all_held(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse trainable parameters of ``model`` that no optimizer has.

    Raises:
        FitError: names them.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = {one for group in groups for one in group["params"]}
    named = model.named_parameters()
    if missing := [name for name, one in named if one.requires_grad and one not in held]:
        raise FitError(
            f"optimizer= holds not all trainable parameters of the model: {some_names(missing)} "
            "would never change",
            allowed="an optimizer over every parameter with requires_grad",
            do="add them to the optimizer, or freeze them with requires_grad_(False)",
        )


def resolve_optimizer(model: nn.Module, given: object, place: str) -> torch.optim.Optimizer:
    """The optimizer of an object or a function, its state on the model's device.

    Args:
        model: as it is trained.
        given: the optimizer, or a function ``model`` -> optimizer.
        place: the argument, for messages.

    Raises:
        FitError: it is something else, or an optimizer of parameters that are not the model's.
    """
    from torch.optim import Optimizer

    made = given
    if not isinstance(given, (Optimizer, type)) and callable(given):
        made = given(model)
    if not isinstance(made, Optimizer):
        what = "is" if made is given else "is a function that returns"
        kind = f"the class {made.__name__}" if isinstance(made, type) else type(made).__name__
        raise FitError(
            f"{place} {what} no optimizer but {kind}",
            allowed=_ALLOWED_OPTIMIZER,
            do="pass optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)",
        )
    refuse_closure(type(made), f"{place}: ", type(made).__name__)
    names = {one: name for name, one in model.named_parameters()}
    held = [one for group in made.param_groups for one in group["params"]]
    if strange := [one for one in held if one not in names]:
        shapes = some_names([str(tuple(one.shape)) for one in strange])
        raise FitError(
            f"{place} was made before the model was moved or replaced: {len(strange)} of its "
            f"{len(held)} parameters are not the model's (their shapes: {shapes})",
            allowed="an optimizer over the parameters of the model that fit trains",
            do="make it after the model, or pass a function: optimizer=lambda model: ...",
        )
    if made.state:  # its steps so far may have been on another device
        made.load_state_dict(made.state_dict())
    return made


# --- the schedule ---


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
    peak = measured(config.optim.lr, "optim.lr") * factor if from_config else None
    return UserSchedule(given, total=steps, peak=peak)


class UserSchedule(Schedule):
    """The rates of a user's schedule; without one those that the optimizer has.

    Args:
        given: ``schedule=`` of ``fit``, or None.
        total: optimizer steps of the whole run.
        peak: the optimizer's rate before the schedule; None: its own.
        place: the argument, for messages.
    """

    def __init__(
        self,
        given: GivenSchedule | None,
        *,
        total: int,
        peak: float | None = None,
        place: str = "schedule=",
    ) -> None:
        self.total = total
        self._given, self._peak, self._place = given, peak, place
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
                f"{self._place} is a {type(made).__name__} of another optimizer than the one that "
                "fit steps",
                allowed=_ALLOWED_SCHEDULE,
                do="pass its optimizer, too, or a function: schedule=lambda optimizer: ...",
            )
        length = getattr(made, "total_steps", None)  # of OneCycleLR, which raises after them
        if isinstance(length, int) and length < self.total:
            raise FitError(
                f"{self._place} is a {type(made).__name__} of {length} steps, and the run has "
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
            f"{self._place} {what}",
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
