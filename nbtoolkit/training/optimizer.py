"""Optimizer: the class and the arguments that the config names, over a model's parameters."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from nbtoolkit.config_values import FreeSection
from nbtoolkit.errors import FitError

if TYPE_CHECKING:
    import torch

    from nbtoolkit.config import Config, Optim

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
