"""Build the optimizer that the configuration names, and its learning rate at every step."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from nbtoolkit.config.fields import FreeSection
from nbtoolkit.errors import FitError

if TYPE_CHECKING:
    import torch

    from nbtoolkit.config.schema import Config, Optim


# --- schedule ---
# The learning rate (and momentum) of every optimizer step of a run.
#
# Steps are optimizer steps of the run, counted from 0: the curve does not depend on the ranks or on
# accumulation, and a resumed run finds its place by the step alone (a plateau by its state, too).


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
    peak, warmup = optim.lr * factor, optim.warmup_ratio * steps
    floor = optim.min_lr_ratio * peak
    if optim.schedule == "one_cycle":
        return OneCycle(peak=peak, warmup=warmup, total=steps, floor=floor)
    if optim.schedule == "plateau":
        start = Curve(kind="constant", peak=peak, warmup=round(warmup), total=steps)
        patience, drop = optim.plateau_patience, optim.plateau_factor
        return Plateau(start=start, patience=patience, factor=drop, floor=optim.min_lr_ratio)
    return Curve(kind=optim.schedule, peak=peak, warmup=round(warmup), total=steps, floor=floor)


def _half_cosine(start: float, end: float, done: float) -> float:
    """From ``start`` (``done`` 0) to ``end`` (1), level at both."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * done))


def _share(part: float, whole: float) -> float:
    """How much of ``whole`` is done, from 0 to 1; of nothing, nothing is."""
    return min(1.0, part / whole) if whole > 0 else 0.0


# --- optimizer ---


Kind: TypeAlias = "type[torch.optim.Optimizer]"

_SHORT = {
    "adamw": "torch.optim.AdamW",
    "adam": "torch.optim.Adam",
    "sgd": "torch.optim.SGD",
    "rmsprop": "torch.optim.RMSprop",
}


def make_optimizer(config: Config, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer that ``config.optim`` names, over the trainable parameters of ``model``.

    Two groups, in this order, each in the order of ``model.parameters()``: what decays, and what
    is spared: biases, the weights of norms, and all else of one dimension or none (unless
    ``optim.decay_all``; one group where nothing decays). A group may be given an ``lr_scale``.

    Args:
        config: ``optim.name, options, lr, weight_decay, decay_all, momentum``. The class gets
            ``weight_decay`` only if it takes it, ``momentum`` only if it is torch's SGD (others
            have it in ``options``).
        model: on its device already, with something to train.

    Raises:
        FitError: there is no such class, it does not take these arguments or refuses them, its
            step wants a closure.
    """
    optim = config.optim
    kind = _find(_SHORT.get(optim.name, optim.name))
    takes = _takes(kind)
    arguments = _arguments(optim, kind, takes, model)
    _check(optim.name, takes, arguments)
    try:
        return kind(_groups(optim, takes, model), **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FitError(
            f"optim.name: {optim.name} cannot be built: {error}",
            allowed="what its constructor accepts",
            do=f"check optim.options ({', '.join(optim.options) or 'empty'}) and the rest of optim",
        ) from error


def set_rate(optimizer: torch.optim.Optimizer, rate: float, momentum: float | None = None) -> None:
    """Set the learning rate of the next step, times each group's ``lr_scale`` (default 1).

    Args:
        optimizer: changed in place.
        rate: what the schedule says.
        momentum: what it says about momentum, or Adam's first beta; None: leave it. A momentum of
            0 stays 0: the optimizer has none.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
        if momentum is None:
            continue
        if group.get("momentum"):
            group["momentum"] = momentum
        elif "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])


class _Takes(NamedTuple):
    """The arguments of a callable after its first (the parameters, or self)."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    anything: bool
    """Whether it takes any name (``**kwargs``)."""

    def takes(self, name: str) -> bool:
        return self.anything or name in self.names


def _takes(function: Callable[..., Any]) -> _Takes:
    given = list(inspect.signature(function).parameters.values())[1:]
    named = [one for one in given if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    required = [one.name for one in named if one.default is one.empty]
    anything = any(one.kind is one.VAR_KEYWORD for one in given)
    return _Takes(tuple(one.name for one in named), tuple(required), anything)


def _find(dotted: str) -> Kind:
    """The optimizer class of that dotted name."""
    import torch

    path, _, name = dotted.rpartition(".")
    found = getattr(_module(path, dotted), name, None)
    if found is None:
        _refuse_unknown(path, name)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise FitError(
            f"optim.name: {dotted} is no optimizer but a {type(found).__name__}",
            allowed=f"{', '.join(_SHORT)}, or a subclass of torch.optim.Optimizer",
            do="name the class itself: package.module.Class",
        )
    if wants := _takes(found.step).required:
        raise FitError(
            f"optim.name: the step of {dotted} wants a {wants[0]}: it computes the loss several "
            "times, and fit does so once, over all ranks and accumulation steps",
            allowed="an optimizer whose step() takes the gradients that are there",
            do="choose another, or write a loop of your own with ctx.prepare",
        )
    return found


def _module(path: str, dotted: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if not f"{path}.".startswith(f"{error.name}."):
            raise  # it is there, but something that it imports is not
        raise FitError(
            f"optim.name: {dotted} names a module that is not there: {error.name}",
            allowed=f"{', '.join(_SHORT)}, or package.module.Class that the ranks can import",
            do="check the name; install the package, or put its file beside the notebook",
        ) from None


def _refuse_unknown(path: str, name: str) -> None:
    import torch

    there = {
        key.lower(): key
        for key, value in vars(importlib.import_module(path)).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    there.pop("optimizer", None)
    close = difflib.get_close_matches(name.lower(), there, n=1, cutoff=0.5)
    cell = "put the class into a file beside the notebook: ranks import it, cells they cannot"
    other = cell if path == "__main__" else "check the name"
    raise FitError(
        f"optim.name: {path} has no {name}",
        allowed=", ".join(sorted(there.values())) or "a module with optimizers",
        do=f"did you mean {path}.{there[close[0]]}?" if close else other,
    )


def _arguments(optim: Optim, kind: Kind, takes: _Takes, model: torch.nn.Module) -> dict[str, Any]:
    """What the class is called with, besides the groups."""
    import torch

    own: dict[str, Any] = {"lr": optim.lr} if takes.takes("lr") else {}
    if issubclass(kind, torch.optim.SGD) and takes.takes("momentum"):
        own["momentum"] = optim.momentum
    _refuse_twice(optim, {"params", "lr", "weight_decay", *own})
    if _can_fuse(kind, model) and not optim.options.keys() & {"fused", "foreach", "differentiable"}:
        own["fused"] = True
    return {**own, **{name: _plain(value) for name, value in optim.options.items()}}


def _refuse_twice(optim: Optim, elsewhere: set[str]) -> None:
    for name in sorted(elsewhere & optim.options.keys()):
        setting = "the model's parameters" if name == "params" else f"optim.{name}"
        raise FitError(
            f"optim.options.{name} stands where {setting} is meant",
            allowed="arguments that have no setting of their own",
            do=f"take it out of optim.options: {setting} is what counts",
        )


def _check(name: str, takes: _Takes, arguments: Mapping[str, Any]) -> None:
    for key in arguments:
        if not takes.takes(key):
            close = difflib.get_close_matches(key, takes.names, n=1)
            raise FitError(
                f"optim.options.{key} is no argument of {name}",
                allowed=", ".join(takes.names),
                do=f"did you mean {close[0]}?" if close else "take it out",
            )
    if missing := [key for key in takes.required if key not in arguments]:
        raise FitError(
            f"optim.name: {name} needs more arguments: {', '.join(missing)}",
            allowed=", ".join(takes.names),
            do=f"set optim.options.{missing[0]}",
        )


def _groups(optim: Optim, takes: _Takes, model: torch.nn.Module) -> list[dict[str, Any]]:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not takes.takes("weight_decay"):
        return [{"params": trainable}]
    if optim.decay_all or not optim.weight_decay:
        return [{"params": trainable, "weight_decay": optim.weight_decay}]
    spared = _spared(model)
    decayed = [parameter for parameter in trainable if parameter not in spared]
    plain = [parameter for parameter in trainable if parameter in spared]
    groups = [(decayed, optim.weight_decay), (plain, 0.0)]
    return [{"params": some, "weight_decay": decay} for some, decay in groups if some]


def _spared(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Biases and the weights of norms.

    Only these two norms have weights of more than one dimension; those of all others, of the
    user's own too, are known by having one.
    """
    from torch import nn

    return {
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim <= 1 or name == "bias" or isinstance(module, (nn.LayerNorm, nn.RMSNorm))
    }


def _can_fuse(kind: Kind, model: torch.nn.Module) -> bool:
    """Whether one kernel may step all parameters.

    AdamW's step on a small MLP and a CPU then takes a quarter of the time (35, not 140 us). Other
    classes of torch take `fused` too, but not on every device.
    """
    import torch

    return kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD) and all(
        parameter.device.type in ("cpu", "cuda") and parameter.is_floating_point()
        for parameter in model.parameters()
    )


def _plain(value: Any) -> Any:
    return value.to_dict() if isinstance(value, FreeSection) else value
