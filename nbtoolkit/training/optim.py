"""Make the optimizer of a training, and the learning rates of its steps."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from nbtoolkit.config.directions import resolve
from nbtoolkit.config.fields import FreeSection
from nbtoolkit.errors import FitError, some_names
from nbtoolkit.training.losses import loss_parameters

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

    from nbtoolkit.config.schema import Config, Optim

OptimizerClass: TypeAlias = "type[torch.optim.Optimizer]"

GivenOptimizer: TypeAlias = (
    "torch.optim.Optimizer | OptimizerClass | Callable[[nn.Module], torch.optim.Optimizer]"
)
"""An optimizer over the model's parameters, a function that makes one of the model, or a class."""

GivenSchedule: TypeAlias = "LRScheduler | Callable[..., Any]"
"""A scheduler, a function of the optimizer (and of the run's steps) that makes one, or a function
of the optimizer step (from 0) that returns the factor of the optimizer's rates."""

Named: TypeAlias = "dict[str, nn.Parameter]"
"""Parameters by name."""

_ALLOWED_OPTIMIZER = (
    "a torch.optim.Optimizer over the model's parameters, a function model -> Optimizer, or a "
    "subclass of torch.optim.Optimizer"
)
_ALLOWED_SCHEDULE = (
    "a torch.optim.lr_scheduler.LRScheduler of the optimizer, a function optimizer -> LRScheduler "
    "(or (optimizer, steps) -> LRScheduler), or a function step -> factor of the rate"
)

_SHORT_NAMES = {
    "adamw": "torch.optim.AdamW",
    "adam": "torch.optim.Adam",
    "sgd": "torch.optim.SGD",
    "rmsprop": "torch.optim.RMSprop",
}


def make_optimizer(
    config: Config,
    model: nn.Module,
    given: GivenOptimizer | None = None,
    loss: nn.Module | None = None,
) -> torch.optim.Optimizer:
    """Make the optimizer that ``config.optim`` names, or take the one that was passed to ``fit``.

    A class gets two groups, in this order, each in the order of ``model.parameters()``: the
    parameters with weight decay, and those without: biases, the weights of norms, and all others of
    at most one dimension (unless ``optim.decay_all``; without weight decay there is one group).
    Those that ``optim.param_groups`` match have groups of their own, after these two. A group may
    be given an ``lr_scale``. The loss's parameters come last, with and without weight decay as the
    model's.

    Args:
        config: ``optim.name, options, lr, weight_decay, decay_all, momentum, param_groups``. The
            class gets ``weight_decay`` only if it accepts it, ``momentum`` only if it is torch's
            SGD (others have it in ``options``).
        model: on its device already, with a trainable parameter.
        given: ``optimizer=`` of ``fit``; None: the class that ``optim.name`` names.
        loss: with trainable parameters of its own; those that a given optimizer lacks join it as a
            group with its defaults.

    Raises:
        FitError: there is no such class, it does not accept these arguments, its step needs a
            closure, ``optim.param_groups`` do not fit the model; or ``given`` is no optimizer, or
            not one of all trainable parameters of ``model``.
    """
    from torch.optim import Optimizer

    if given is None or (isinstance(given, type) and issubclass(given, Optimizer)):
        return _of_class(config.optim, given, model, loss)
    if config.optim.param_groups:
        raise FitError(
            "optim.param_groups is set, and optimizer= is an optimizer with groups of its own",
            allowed="optim.param_groups with optim.name, or with a class as optimizer=",
            do="remove optim.param_groups, or pass the class (optimizer=torch.optim.AdamW)",
        )
    return _of_user(given, model, loss)


def _of_class(
    optim: Optim, given: OptimizerClass | None, model: nn.Module, loss: nn.Module | None
) -> torch.optim.Optimizer:
    """See :func:`make_optimizer`."""
    kind = given or _import_class(_SHORT_NAMES.get(optim.name, optim.name))
    place = f"optim.name: {optim.name}" if given is None else f"optimizer={kind.__name__}"
    _refuse_closure(kind, place)
    groups = _groups(optim, kind, model, loss)
    arguments = _arguments(optim, kind, model)
    try:
        return kind(groups, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FitError(
            f"{place} cannot be built: {error}",
            allowed=f"its arguments: {', '.join(_parameters(kind))}",
            do=f"check optim.options ({', '.join(optim.options) or 'empty'}) and the rest of optim",
        ) from error


def _parameters(kind: OptimizerClass) -> list[str]:
    """Return the names of a class's parameters after the first, those to optimize."""
    return list(inspect.signature(kind).parameters)[1:]


def _accepts(kind: OptimizerClass, name: str) -> bool:
    parameters = inspect.signature(kind).parameters
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return any_name or name in parameters


def _import_class(dotted: str) -> OptimizerClass:
    """Return the optimizer class of a dotted name."""
    from torch.optim import Optimizer

    path, _, name = dotted.rpartition(".")
    try:
        kind = getattr(importlib.import_module(path), name, None)
        fault = f"{path} has no optimizer {name}"
    except ModuleNotFoundError as error:
        if not f"{path}.".startswith(f"{error.name}."):
            raise  # the module exists, but not one that it imports
        kind = None
        fault = str(error)
    if isinstance(kind, type) and issubclass(kind, Optimizer):
        return kind
    raise FitError(
        f"optim.name: {dotted} cannot be used: {fault}",
        allowed=f"{', '.join(_SHORT_NAMES)}, or package.module.Class, a subclass of "
        "torch.optim.Optimizer that the ranks can import",
        do="check the name; install the package, or put the class into a file beside the "
        "notebook: ranks import files, not cells",
    )


def _refuse_closure(kind: OptimizerClass, place: str) -> None:
    """Refuse a class whose step computes the loss itself."""
    if required_arguments(kind.step) > 1:  # self is one
        raise FitError(
            f"{place}: the step of {kind.__name__} needs a closure: it computes the loss several "
            "times, and fit does so once, over all ranks and accumulation steps",
            allowed="an optimizer whose step() uses the present gradients",
            do="choose another, or write your own loop with ctx.prepare",
        )


def _arguments(optim: Optim, kind: OptimizerClass, model: nn.Module) -> dict[str, Any]:
    """Return the arguments of the class, besides the groups."""
    import torch

    arguments: dict[str, Any] = {"lr": optim.lr} if _accepts(kind, "lr") else {}
    if "weight_decay" in _parameters(kind):  # the groups have it too, but it may be required
        arguments["weight_decay"] = optim.weight_decay
    if issubclass(kind, torch.optim.SGD) and _accepts(kind, "momentum"):
        arguments["momentum"] = optim.momentum
    for name in sorted({"params", "lr", "weight_decay", *arguments} & optim.options.keys()):
        setting = "the model's parameters" if name == "params" else f"optim.{name}"
        raise FitError(
            f"optim.options.{name} is set in place of {setting}",
            allowed="arguments that have no setting of their own",
            do=f"remove it from optim.options: {setting} is used",
        )
    if _can_fuse(kind, model) and not optim.options.keys() & {"fused", "foreach", "differentiable"}:
        arguments["fused"] = True
    options = optim.options.items()
    return {
        **arguments,
        **{name: v.to_dict() if isinstance(v, FreeSection) else v for name, v in options},
    }


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


def _groups(
    optim: Optim, kind: OptimizerClass, model: nn.Module, loss: nn.Module | None
) -> list[dict[str, Any]]:
    """Return the groups of :func:`make_optimizer`."""
    rest, matched = match_groups(optim.param_groups, model)
    modules = [model] if loss is None else [model, loss]
    without_decay = (
        set() if optim.decay_all else set().union(*map(parameters_without_decay, modules))
    )

    def decayed(named: Named, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        parameters = list(named.values())
        if not _accepts(kind, "weight_decay") or "weight_decay" in options:
            return [{"params": parameters, **options}]
        decay = optim.weight_decay
        others = {
            parameter: None for parameter in parameters if decay and parameter in without_decay
        }
        parts = [
            ([parameter for parameter in parameters if parameter not in others], decay),
            ([*others], 0.0),
        ]
        return [{"params": part, "weight_decay": rate, **options} for part, rate in parts if part]

    groups = decayed(rest, {})
    for number, group in enumerate(optim.param_groups):
        settings: dict[str, Any] = group.to_dict()
        del settings["match"]
        if "lr" in settings:
            settings["lr_scale"] = settings.pop("lr") / optim.lr
        for key in settings:  # torch takes any key, and ignores it
            if key != "lr_scale" and not _accepts(kind, key):
                raise FitError(
                    f"optim.param_groups: {key} of the group {group.match!r} is not an argument of "
                    f"{kind.__name__}",
                    allowed=", ".join(("match", "lr", "lr_scale", *_parameters(kind))),
                    do="correct or remove it",
                )
        groups += decayed(matched[number], settings)
    groups += decayed(of_loss, {}) if (of_loss := loss_parameters(model, loss)) else []
    return groups


def match_groups(
    groups: Sequence[Mapping[str, Any]], model: nn.Module
) -> tuple[Named, list[Named]]:
    """Return the trainable parameters in no group, and those of each group, by name.

    Args:
        groups: each has ``match``: a pattern of parameter names as in ``fnmatch`` (``*`` matches
            dots, too), or a list of them.
        model: its parameters.

    Raises:
        FitError: a pattern matches no trainable parameter, or a parameter is in two groups.
    """
    left = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    owner: dict[str, Any] = {}
    matched: list[Named] = []
    for group in groups:
        patterns = group["match"]
        patterns = [patterns] if isinstance(patterns, str) else patterns
        names: dict[str, None] = {}
        for pattern in patterns:
            matching = [name for name in (*left, *owner) if fnmatchcase(name, pattern)]
            if not matching:
                raise FitError(
                    f"optim.param_groups: {pattern!r} matches no trainable parameter",
                    allowed=f"patterns of {some_names([*left, *owner])}",
                    do="correct the pattern: * stands for any characters, dots included",
                )
            names |= dict.fromkeys(matching)
        if twice := [name for name in names if name in owner]:
            raise FitError(
                f"optim.param_groups: {some_names(twice)} would be in two groups, of "
                f"{owner[twice[0]]!r} and of {group['match']!r}",
                allowed="patterns of which each parameter matches one at most",
                do="make one of the two patterns narrower",
            )
        owner |= dict.fromkeys(names, group["match"])
        matched.append({name: left.pop(name) for name in [*left] if name in names})
    return left, matched


def parameters_without_decay(model: nn.Module) -> set[nn.Parameter]:
    """Biases and the weights of norms.

    LayerNorm and RMSNorm alone have weights of more than one dimension; those of all other norms,
    the user's own included, are recognized by having one.
    """
    from torch import nn

    return {
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim <= 1 or name == "bias" or isinstance(module, (nn.LayerNorm, nn.RMSNorm))
    }


def _of_user(given: object, model: nn.Module, loss: nn.Module | None) -> torch.optim.Optimizer:
    """Return the optimizer of an object or a function, its state on the model's device."""
    from torch.optim import Optimizer

    made = given
    if not isinstance(given, (Optimizer, type)) and callable(given):
        made = given(model)
    if not isinstance(made, Optimizer):
        returned = "is" if made is given else "is a function that returns"
        kind = f"the class {made.__name__}" if isinstance(made, type) else type(made).__name__
        raise FitError(
            f"optimizer= {returned} no optimizer but {kind}",
            allowed=_ALLOWED_OPTIMIZER,
            do="pass optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)",
        )
    _refuse_closure(type(made), "optimizer=")
    modules = [model] if loss is None else [model, loss]
    known = {parameter for module in modules for parameter in module.parameters()}
    held = {parameter: None for group in made.param_groups for parameter in group["params"]}
    if strange := [parameter for parameter in held if parameter not in known]:
        shapes = some_names([str(tuple(parameter.shape)) for parameter in strange])
        raise FitError(
            f"optimizer= was made before the model was moved or replaced: {len(strange)} of its "
            f"{len(held)} parameters are not the model's (their shapes: {shapes})",
            allowed="an optimizer over the parameters of the model that fit trains",
            do="make it after the model, or pass a function: optimizer=lambda model: ...",
        )
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    if missing := [name for name, value in trained if value not in held]:
        raise FitError(
            f"optimizer= holds not all trainable parameters of the model: {some_names(missing)} "
            "would never change",
            allowed="an optimizer over every parameter with requires_grad",
            do="add them to the optimizer, or freeze them with requires_grad_(False)",
        )
    if made.state:  # its steps so far may have been on another device
        made.load_state_dict(made.state_dict())
    if of_loss := [
        parameter for parameter in loss_parameters(model, loss).values() if parameter not in held
    ]:
        made.add_param_group({"params": of_loss})
    return made


def refuse_several(given: object) -> None:
    """Refuse several optimizers, before anything of the training is made.

    Raises:
        FitError: names the page with a loop for them.
    """
    if isinstance(given, (Mapping, list, tuple)):
        raise FitError(
            f"optimizer= is a {type(given).__name__} of {len(given)}, and fit trains a model with "
            "one optimizer",
            allowed=_ALLOWED_OPTIMIZER,
            do="pass one; to train a GAN or another training with several, write a loop of your "
            "own with ctx.prepare, as docs/own-loop/several-models.md does",
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
        self._optimizer = optimizer
        self._is_curve = is_curve
        self._by_step = by_step
        self._by_epoch = by_epoch
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
        """Return what a resumed run needs besides the steps and the optimizer's groups."""
        return {name: scheduler.state_dict() for name, scheduler in self._counting().items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state`."""
        for name, scheduler in self._counting().items():
            if name in state:
                scheduler.load_state_dict(state[name])

    def _counting(self) -> dict[str, LRScheduler]:
        """Return the schedulers with a state, by name."""
        schedulers = {
            "by_step": None if self._is_curve else self._by_step,
            "by_epoch": self._by_epoch,
        }
        return {name: scheduler for name, scheduler in schedulers.items() if scheduler is not None}


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
        return _given_schedule(optimizer, given, steps)
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
    """Return the present rates, times ``factor`` of the step."""
    from torch.optim.lr_scheduler import LambdaLR

    _forget_schedulers(optimizer)
    return Schedule(optimizer, LambdaLR(optimizer, factor), is_curve=True)


def _forget_schedulers(optimizer: torch.optim.Optimizer) -> None:
    """Let a new scheduler begin at the present rates, not at those of an earlier scheduler."""
    for group in optimizer.param_groups:
        group.pop("initial_lr", None)


def warmup_and_decay(config: Config, steps: int) -> Callable[[int], float]:
    """Return the factor of the peak in each step: linear warm-up, then one of three curves.

    Half a cosine (Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983, without restarts),
    a straight line, or ``constant``. The first step of a warm-up has ``1 / warmup``, its last 1.
    Step ``steps``, the one after the last, would have ``min_lr_ratio``.
    """
    optim = config.optim
    kind = optim.schedule
    floor = optim.min_lr_ratio
    warmup = round(optim.warmup_ratio * steps)

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

    optim = config.optim
    defaults = optimizer.defaults
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
    """Return a rate that drops when the monitored metric stops improving, after a warm-up."""
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


def _given_schedule(optimizer: torch.optim.Optimizer, given: GivenSchedule, steps: int) -> Schedule:
    from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

    made = (
        given if isinstance(given, LRScheduler) else _schedule_of_function(given, optimizer, steps)
    )
    if not isinstance(made, LRScheduler):
        return _curve(optimizer, made)
    _check_schedule(made, optimizer, steps)
    if isinstance(made, ReduceLROnPlateau):
        return Schedule(optimizer, by_epoch=made)
    return Schedule(optimizer, made)


def _check_schedule(made: LRScheduler, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Refuse a scheduler that does not fit the optimizer or the run."""
    kind = type(made).__name__
    groups = optimizer.param_groups
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


def _schedule_of_function(
    given: object, optimizer: torch.optim.Optimizer, steps: int
) -> LRScheduler | Callable[[int], float]:
    """Return the scheduler that a function makes, or the function if it is one of the step."""
    from torch.optim.lr_scheduler import LRScheduler

    if not callable(given) or isinstance(given, type):
        raise _no_schedule(f"is {given!r}")
    if required_arguments(given) == 2:
        made = given(optimizer, steps)
    else:
        # One argument is a step or an optimizer. A function that fails with both shows both
        # errors, because Python chains the second to the first.
        try:
            made = given(0)
        except Exception:
            made = given(optimizer)
        if isinstance(made, (int, float)):
            return cast("Callable[[int], float]", given)
    if not isinstance(made, LRScheduler):
        raise _no_schedule(f"is a function that returns a {type(made).__name__}")
    return made


def _no_schedule(problem: str) -> FitError:
    return FitError(
        f"schedule= {problem}",
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
    return sum(
        parameter.default is parameter.empty and parameter.kind in kinds for parameter in parameters
    )
