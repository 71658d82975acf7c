"""Make the optimizer that the configuration names, or take the one passed to ``fit``."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from nbtoolkit.config.fields import FreeSection
from nbtoolkit.errors import FitError, some_names
from nbtoolkit.training.losses import loss_parameters

if TYPE_CHECKING:
    from types import ModuleType

    import torch
    from torch import nn

    from nbtoolkit.config.schema import Config, Optim

OptimizerClass: TypeAlias = "type[torch.optim.Optimizer]"

GivenOptimizer: TypeAlias = (
    "torch.optim.Optimizer | OptimizerClass | Callable[[nn.Module], torch.optim.Optimizer]"
)
"""An optimizer over the model's parameters, a function that makes one of the model, or a class."""

Named: TypeAlias = "dict[str, nn.Parameter]"
"""Parameters by name."""

_ALLOWED_OPTIMIZER = (
    "a torch.optim.Optimizer over the model's parameters, a function model -> Optimizer, or a "
    "subclass of torch.optim.Optimizer"
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
    kind: OptimizerClass | None = None,
    loss: nn.Module | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer that ``config.optim`` names, over the trainable parameters of ``model``.

    Two groups, in this order, each in the order of ``model.parameters()``: the parameters with
    weight decay, and those without: biases, the weights of norms, and all others of at most one
    dimension (unless ``optim.decay_all``; without weight decay there is one group). Those that
    ``optim.param_groups`` match have groups of their own, after these two. A group may be given an
    ``lr_scale``. The loss's parameters come last, with and without weight decay as the model's.

    Args:
        config: ``optim.name, options, lr, weight_decay, decay_all, momentum, param_groups``. The
            class gets ``weight_decay`` only if it accepts it, ``momentum`` only if it is torch's
            SGD (others have it in ``options``).
        model: on its device already, with a trainable parameter.
        kind: the class, in place of ``optim.name``.
        loss: with trainable parameters of its own.

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
        return kind(_groups(optim, name, signature, model, loss), **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FitError(
            f"{place}{name} cannot be built: {error}",
            allowed="what its constructor accepts",
            do=f"check optim.options ({', '.join(optim.options) or 'empty'}) and the rest of optim",
        ) from error


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

    own: dict[str, Any] = {"lr": optim.lr} if signature.accepts("lr") else {}
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
    optim: Optim, name: str, signature: _Signature, model: nn.Module, loss: nn.Module | None
) -> list[dict[str, Any]]:
    """The groups of :func:`make_optimizer`."""
    rest, matched = match_groups(optim.param_groups, model)
    modules = [model] if loss is None else [model, loss]
    without_decay = (
        set() if optim.decay_all else set().union(*map(parameters_without_decay, modules))
    )

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
            own["lr_scale"] = own.pop("lr") / optim.lr
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
    groups += decayed(of_loss, {}) if (of_loss := loss_parameters(model, loss)) else []
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


# --- groups of parameters ---


def match_groups(
    groups: Sequence[Mapping[str, Any]], model: nn.Module
) -> tuple[Named, list[Named]]:
    """The trainable parameters that no group's pattern matches, and those of each group, by name.

    Args:
        groups: each has ``match``: a pattern of parameter names as in ``fnmatch`` (``*`` matches
            dots, too), or a list of them.
        model: its parameters.

    Raises:
        FitError: a pattern matches no trainable parameter, or a parameter is in two groups.
    """
    left = {name: one for name, one in model.named_parameters() if one.requires_grad}
    owner: dict[str, Any] = {}
    found: list[Named] = []
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
        found.append({name: left.pop(name) for name in [*left] if name in names})
    return left, found


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


# --- the optimizer that the user passes ---


def make_user_optimizer(
    config: Config, model: nn.Module, given: GivenOptimizer | None, loss: nn.Module | None = None
) -> torch.optim.Optimizer:
    """The optimizer that the user passed to ``fit``, or the one of ``config.optim``.

    Args:
        config: ``optim``; of an object or a function only that ``optim.param_groups`` is empty.
        model: on its device already.
        given: ``optimizer=``; None: the one that ``optim.name`` names.
        loss: with trainable parameters of its own; those that ``given`` lacks join it as a group
            with its defaults.

    Raises:
        FitError: it is no optimizer, or not one of all trainable parameters of ``model``.
    """
    from torch.optim import Optimizer

    if given is None or (isinstance(given, type) and issubclass(given, Optimizer)):
        return make_optimizer(config, model, given, loss)
    optimizer = resolve_optimizer(model, given, loss)
    if config.optim.param_groups:
        raise FitError(
            "optim.param_groups is set, and optimizer= is an optimizer with groups of its own",
            allowed="optim.param_groups with optim.name, or with a class as optimizer=",
            do="remove optim.param_groups, or pass the class (optimizer=torch.optim.AdamW)",
        )
    check_all_held(model, optimizer)
    add_parameters(optimizer, model, loss)
    return optimizer


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


def check_all_held(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse trainable parameters of ``model`` that the optimizer does not have.

    Raises:
        FitError: names them.
    """
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    if missing := [name for name, value in trained if value not in held]:
        raise FitError(
            f"optimizer= holds not all trainable parameters of the model: {some_names(missing)} "
            "would never change",
            allowed="an optimizer over every parameter with requires_grad",
            do="add them to the optimizer, or freeze them with requires_grad_(False)",
        )


def resolve_optimizer(
    model: nn.Module, given: object, loss: nn.Module | None = None
) -> torch.optim.Optimizer:
    """The optimizer of an object or a function, its state on the model's device.

    Args:
        model: as it is trained.
        given: the optimizer, or a function ``model`` -> optimizer.
        loss: with trainable parameters of its own, which the optimizer may have.

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
            f"optimizer= {what} no optimizer but {kind}",
            allowed=_ALLOWED_OPTIMIZER,
            do="pass optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)",
        )
    refuse_closure(type(made), "optimizer=: ", type(made).__name__)
    modules = [model] if loss is None else [model, loss]
    known = {one for module in modules for one in module.parameters()}
    held = [one for group in made.param_groups for one in group["params"]]
    if strange := [one for one in held if one not in known]:
        shapes = some_names([str(tuple(one.shape)) for one in strange])
        raise FitError(
            f"optimizer= was made before the model was moved or replaced: {len(strange)} of its "
            f"{len(held)} parameters are not the model's (their shapes: {shapes})",
            allowed="an optimizer over the parameters of the model that fit trains",
            do="make it after the model, or pass a function: optimizer=lambda model: ...",
        )
    if made.state:  # its steps so far may have been on another device
        made.load_state_dict(made.state_dict())
    return made


def add_parameters(
    optimizer: torch.optim.Optimizer, model: nn.Module, loss: nn.Module | None
) -> None:
    """Give the user's optimizer the loss's parameters that it lacks, in a group of its defaults."""
    held = {one for group in optimizer.param_groups for one in group["params"]}
    missing = [one for one in loss_parameters(model, loss).values() if one not in held]
    if missing:
        optimizer.add_param_group({"params": missing})
