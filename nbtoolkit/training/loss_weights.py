"""Take the sum of weights by which torch's class losses divide, while they compute.

Imports torch; import it inside functions only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from nbtoolkit.training.data import TORCHS_IGNORED

if TYPE_CHECKING:
    pass


class WeightSums(TorchFunctionMode):
    """While active, ``F.cross_entropy`` and ``F.nll_loss`` tell by what their mean divides.

    Their modules call them, so that the loss may be a module, a function, or part of a model's
    forward pass. A batch whose targets are all ignored has a loss of 0 here, not torch's NaN.

    Args:
        all_count: no target is torch's own ``ignore_index``: calls that ignore no other one, and
            have no class weights, are means over samples and stay as they are.

    Attributes:
        weight: the sum of the targets' weights in the first such call, detached; None: there was
            none.
    """

    def __init__(self, *, all_count: bool = False) -> None:
        super().__init__()
        self._all_count = all_count
        self.weight: Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.cross_entropy or func is functional.nll_loss:
            call = _signature(func).bind(*args, **kwargs)
            call.apply_defaults()
            if self._weighs(call.arguments):
                weight = _sum_of_weights(call.arguments)
                if self.weight is None:
                    self.weight = weight
                total = func(**{**call.arguments, "reduction": "sum"})
                return total / torch.where(weight == 0, 1, weight)
        return func(*args, **kwargs)

    def _weighs(self, call: dict[str, Any]) -> bool:
        legacy = call["size_average"] is not None or call["reduce"] is not None
        if legacy or call["reduction"] != "mean" or call["target"].is_floating_point():
            return False
        plain = call["weight"] is None and call["ignore_index"] == TORCHS_IGNORED
        return not (plain and self._all_count)


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _sum_of_weights(call: dict[str, Any]) -> Tensor:
    """A scalar, as torch divides by it: ignored targets have no weight, others their class's."""
    target, weight = call["target"], call["weight"]
    counts = target != call["ignore_index"]
    if weight is None:
        number: Tensor = counts.sum().float()
        return number
    weights = weight.detach().to(target.device)[torch.where(counts, target, 0)]
    total: Tensor = torch.where(counts, weights, 0).sum()
    return total
