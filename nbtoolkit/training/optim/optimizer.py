"""Build the optimizer that the configuration names, and its learning-rate schedule."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from nbtoolkit.config.fields import FreeSection
from nbtoolkit.config.schema import measured
from nbtoolkit.errors import FitError
from nbtoolkit.training.optim.param_groups import Named, match_groups, parameters_without_decay

if TYPE_CHECKING:
    from types import ModuleType

    import torch
    from torch import nn

    from nbtoolkit.config.schema import Config, Optim


# --- schedules ---


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
    peak, warmup = measured(optim.lr, "optim.lr") * factor, optim.warmup_ratio * steps
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


# --- optimizer ---


OptimizerClass: TypeAlias = "type[torch.optim.Optimizer]"

_SHORT_NAMES = {
    "adamw": "torch.optim.AdamW",
    "adam": "torch.optim.Adam",
    "sgd": "torch.optim.SGD",
    "rmsprop": "torch.optim.RMSprop",
}


def make_optimizer(
    config: Config, model: nn.Module, kind: OptimizerClass | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer that ``config.optim`` names, over the trainable parameters of ``model``.

    Two groups, in this order, each in the order of ``model.parameters()``: the parameters with
    weight decay, and those without: biases, the weights of norms, and all others of at most one
    dimension (unless ``optim.decay_all``; without weight decay there is one group). Those that
    ``optim.param_groups`` match have groups of their own, after these two. A group may be given an
    ``lr_scale``.

    Args:
        config: ``optim.name, options, lr, weight_decay, decay_all, momentum, param_groups``. The
            class gets ``weight_decay`` only if it accepts it, ``momentum`` only if it is torch's
            SGD (others have it in ``options``).
        model: on its device already, with a trainable parameter.
        kind: the class, in place of ``optim.name``.

    Raises:
        FitError: there is no such class, it does not accept these arguments, its step needs a
            closure, or ``optim.param_groups`` do not fit the model.
    """
    optim = config.optim
    if kind is None:
        place, kind = "optim.name: ", _import_class(_SHORT_NAMES.get(optim.name, optim.name))
        name = optim.name
    else:
        place, name = "optimizer=", kind.__name__
    refuse_closure(kind, place, name)
    signature = _signature(kind)
    arguments = _arguments(optim, kind, signature, model)
    _check(place, name, signature, arguments)
    try:
        return kind(_groups(optim, name, signature, model), **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FitError(
            f"{place}{name} cannot be built: {error}",
            allowed="what its constructor accepts",
            do=f"check optim.options ({', '.join(optim.options) or 'empty'}) and the rest of optim",
        ) from error


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


class _Signature(NamedTuple):
    """The parameters of a callable after its first (the parameters to optimize, or self)."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    any_name: bool
    """Whether it accepts ``**kwargs``."""

    def accepts(self, name: str) -> bool:
        return self.any_name or name in self.names


def _signature(function: Callable[..., object]) -> _Signature:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = tuple(p.name for p in named if p.default is p.empty)
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return _Signature(tuple(p.name for p in named), required, any_name)


def _import_class(dotted: str) -> OptimizerClass:
    """The optimizer class of a dotted name."""
    import torch

    path, _, name = dotted.rpartition(".")
    kind = getattr(_import_module(path, dotted), name, None)
    if kind is None:
        raise _unknown_class(path, name)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise FitError(
            f"optim.name: {dotted} is not an optimizer but a {type(kind).__name__}",
            allowed=f"{', '.join(_SHORT_NAMES)}, or a subclass of torch.optim.Optimizer",
            do="name the class itself: package.module.Class",
        )
    return kind


def refuse_closure(kind: OptimizerClass, place: str, name: str) -> None:
    """Refuse an optimizer class, of ``name`` at ``place``, whose step computes the loss itself.

    Raises:
        FitError: it does.
    """
    if required := _signature(kind.step).required:
        raise FitError(
            f"{place}the step of {name} needs a {required[0]}: it computes the loss several times, "
            "and fit does so once, over all ranks and accumulation steps",
            allowed="an optimizer whose step() uses the present gradients",
            do="choose another, or write your own loop with ctx.prepare",
        )


def _import_module(path: str, dotted: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if not f"{path}.".startswith(f"{error.name}."):
            raise  # the module exists, but not one that it imports
        raise FitError(
            f"optim.name: {dotted} names a module that does not exist: {error.name}",
            allowed=f"{', '.join(_SHORT_NAMES)}, or package.module.Class that the ranks can import",
            do="check the name; install the package, or put its file beside the notebook",
        ) from None


def _unknown_class(path: str, name: str) -> FitError:
    import torch

    classes = {
        key.lower(): key
        for key, value in vars(importlib.import_module(path)).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    classes.pop("optimizer", None)
    if close := difflib.get_close_matches(name.lower(), classes, n=1, cutoff=0.5):
        do = f"did you mean {path}.{classes[close[0]]}?"
    elif path == "__main__":
        do = "put the class into a file beside the notebook: ranks import files, not cells"
    else:
        do = "check the name"
    return FitError(
        f"optim.name: {path} has no {name}",
        allowed=", ".join(sorted(classes.values())) or "a module with optimizers",
        do=do,
    )


def _arguments(
    optim: Optim, kind: OptimizerClass, signature: _Signature, model: nn.Module
) -> dict[str, Any]:
    """The arguments of the class, besides the groups."""
    import torch

    rate = measured(optim.lr, "optim.lr")
    own: dict[str, Any] = {"lr": rate} if signature.accepts("lr") else {}
    if "weight_decay" in signature.required:  # the groups have it too
        own["weight_decay"] = optim.weight_decay
    if issubclass(kind, torch.optim.SGD) and signature.accepts("momentum"):
        own["momentum"] = optim.momentum
    for name in sorted({"params", "lr", "weight_decay", *own} & optim.options.keys()):
        setting = "the model's parameters" if name == "params" else f"optim.{name}"
        raise FitError(
            f"optim.options.{name} is set in place of {setting}",
            allowed="arguments that have no setting of their own",
            do=f"remove it from optim.options: {setting} is used",
        )
    if _can_fuse(kind, model) and not optim.options.keys() & {"fused", "foreach", "differentiable"}:
        own["fused"] = True
    options = optim.options.items()
    return {
        **own,
        **{name: v.to_dict() if isinstance(v, FreeSection) else v for name, v in options},
    }


def _check(place: str, name: str, signature: _Signature, arguments: Mapping[str, object]) -> None:
    for key in arguments:
        if not signature.accepts(key):
            close = difflib.get_close_matches(key, signature.names, n=1)
            raise FitError(
                f"optim.options.{key} is not an argument of {name}",
                allowed=", ".join(signature.names),
                do=f"did you mean {close[0]}?" if close else "remove it",
            )
    if missing := [key for key in signature.required if key not in arguments]:
        raise FitError(
            f"{place}{name} needs more arguments: {', '.join(missing)}",
            allowed=", ".join(signature.names),
            do=f"set optim.options.{missing[0]}",
        )


def _groups(
    optim: Optim, name: str, signature: _Signature, model: nn.Module
) -> list[dict[str, Any]]:
    """The groups of :func:`make_optimizer`."""
    rest, matched = match_groups(optim.param_groups, model)
    without_decay = set() if optim.decay_all else parameters_without_decay(model)

    def decayed(named: Named, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        parameters = list(named.values())
        if not signature.accepts("weight_decay") or "weight_decay" in own:
            return [{"params": parameters, **own}]
        decay = optim.weight_decay
        others = {one: None for one in parameters if decay and one in without_decay}
        parts = [([one for one in parameters if one not in others], decay), ([*others], 0.0)]
        return [{"params": part, "weight_decay": rate, **own} for part, rate in parts if part]

    groups = decayed(rest, {})
    for number, group in enumerate(optim.param_groups):
        own: dict[str, Any] = group.to_dict()
        del own["match"]
        if "lr" in own:
            own["lr_scale"] = own.pop("lr") / measured(optim.lr, "optim.lr")
        for key in own:
            if key != "lr_scale" and not signature.accepts(key):
                close = difflib.get_close_matches(key, ("lr", "lr_scale", *signature.names), n=1)
                raise FitError(
                    f"optim.param_groups: {key} of the group {group.match!r} is not an argument of "
                    f"{name}",
                    allowed=", ".join(("match", "lr", "lr_scale", *signature.names)),
                    do=f"did you mean {close[0]}?" if close else "remove it",
                )
        groups += decayed(matched[number], own)
    return groups


def _can_fuse(kind: OptimizerClass, model: nn.Module) -> bool:
    """Whether one kernel can step all parameters.

    AdamW's step on a small MLP and a CPU then takes a quarter of the time (35, not 140 us). Other
    classes of torch accept `fused` too, but not on every device.
    """
    import torch

    return kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD) and all(
        parameter.device.type in ("cpu", "cuda") and parameter.is_floating_point()
        for parameter in model.parameters()
    )
