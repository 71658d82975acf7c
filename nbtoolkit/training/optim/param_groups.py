"""Choose a model's parameters by patterns of their names, and those without weight decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

from nbtoolkit.errors import FitError

if TYPE_CHECKING:
    from torch import nn

Named: TypeAlias = "dict[str, nn.Parameter]"
"""Parameters by name."""


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


def some_names(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


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
