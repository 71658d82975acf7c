"""Record the sum of weights by which torch's class losses divide.

Imports torch; import it inside functions only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from nbtoolkit.training.loading.data import TORCHS_IGNORED


class WeightSums(TorchFunctionMode):
    """While active, records by what the mean of ``F.cross_entropy`` and ``F.nll_loss`` divides.

    torch's loss modules call these functions, so the loss may be a module, a function, or part of a
    model's forward pass. A batch whose targets are all ignored has a loss of 0 here, not NaN.

    Args:
        all_count: no target is torch's own ``ignore_index``. A call without another
            ``ignore_index`` and without class weights is then a mean over samples, left as it is.

    Attributes:
        weight: the sum of the targets' weights in the first such call, a detached scalar; None:
            there was no such call.
    """

    def __init__(self, *, all_count: bool = False) -> None:
        super().__init__()
        self._all_count = all_count
        self.weight: Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is functional.cross_entropy or func is functional.nll_loss:
            call = _signature(func).bind(*args, **kwargs)
            call.apply_defaults()
            if self._is_weighted(call.arguments):
                weight = _sum_of_weights(call.arguments)
                if self.weight is None:
                    self.weight = weight
                total = func(**{**call.arguments, "reduction": "sum"})
                return total / torch.where(weight == 0, 1, weight)
        return func(*args, **kwargs)

    def _is_weighted(self, call: Mapping[str, Any]) -> bool:
        legacy = call["size_average"] is not None or call["reduce"] is not None
        if legacy or call["reduction"] != "mean" or call["target"].is_floating_point():
            return False
        plain = call["weight"] is None and call["ignore_index"] == TORCHS_IGNORED
        return not (plain and self._all_count)


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _sum_of_weights(call: Mapping[str, Any]) -> Tensor:
    """The scalar by which torch divides; a target weighs 0 if ignored, else its class's weight."""
    target, weight = call["target"], call["weight"]
    counts = target != call["ignore_index"]
    if weight is None:
        number: Tensor = counts.sum().float()
        return number
    weights = weight.detach().to(target.device)[torch.where(counts, target, 0)]
    total: Tensor = torch.where(counts, weights, 0).sum()
    return total
