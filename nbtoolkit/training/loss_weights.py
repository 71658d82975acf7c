"""Record the sums of weights by which torch's class losses divide.

Imports torch; import it inside functions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from nbtoolkit.training.data import TORCHS_IGNORED

if TYPE_CHECKING:
    from nbtoolkit.training.losses import Labels

# Of F.cross_entropy; F.nll_loss has the same without the last one.
_PARAMETERS = (
    "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction",
    "label_smoothing",
)  # fmt: skip


class ClassLoss(NamedTuple):
    """A call of ``F.cross_entropy`` or ``F.nll_loss`` that returned a mean."""

    mean: Tensor
    """What it returned."""
    weight: Tensor
    """The sum of the targets' weights, by which it divided; a detached scalar."""
    target: Tensor
    class_weights: Tensor | None
    ignore_index: int

    @property
    def plain(self) -> bool:
        """Whether all targets weigh the same, but those that torch ignores by default."""
        return self.class_weights is None and self.ignore_index == TORCHS_IGNORED

    @property
    def share(self) -> Tensor:
        """The share of the targets that count, if there are no class weights; a scalar."""
        return self.weight / self.target.numel()

    def counts_all(self, targets: object, known: Labels | None) -> bool:
        """Whether no target of any batch is ignored, and all weigh the same.

        Args:
            targets: of the batch.
            known: all targets of the training set; None: not known.
        """
        if self.class_weights is not None or known is None or not isinstance(targets, Tensor):
            return False
        unchanged = self.target.data_ptr() == targets.data_ptr()
        return unchanged and not bool((known == self.ignore_index).any())

    def divides_as(self, other: ClassLoss) -> bool:
        """Whether both divide by the same weights in every batch; waits for the device."""
        weights = self.class_weights
        other_weights = other.class_weights
        return (
            self.ignore_index == other.ignore_index
            and (weights is None) == (other_weights is None)
            and (weights is None or other_weights is None or torch.equal(weights, other_weights))
            and torch.equal(self.target.flatten(), other.target.flatten())
        )


class WeightSums(TorchFunctionMode):
    """While active, records by what the means of ``F.cross_entropy`` and ``F.nll_loss`` divide.

    torch's loss modules call these functions, so the loss may be a module, a function, or part of a
    model's forward pass. A batch whose targets are all ignored has a loss of 0 here, not NaN.

    Attributes:
        calls: those that returned a mean over classes, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[ClassLoss] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is not functional.cross_entropy and func is not functional.nll_loss:
            return func(*args, **kwargs)
        call = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
        legacy = call.get("size_average") is not None or call.get("reduce") is not None
        # With probabilities as targets torch divides by the samples.
        if legacy or call.get("reduction", "mean") != "mean" or call["target"].is_floating_point():
            return func(*args, **kwargs)
        target = call["target"]
        class_weights = call.get("weight")
        ignored = call.get("ignore_index", TORCHS_IGNORED)
        weight = _sum_of_weights(target, class_weights, ignored)
        total = func(**{**call, "reduction": "sum"})
        mean = total / torch.where(weight == 0, 1, weight)
        self.calls.append(ClassLoss(mean, weight, target, class_weights, ignored))
        return mean


def _sum_of_weights(target: Tensor, class_weights: Tensor | None, ignored: int) -> Tensor:
    """Return the scalar by which torch divides.

    A target weighs 0 if ignored, else its class's weight.
    """
    counts = target != ignored
    if class_weights is None:
        number: Tensor = counts.sum().float()
        return number
    weights = class_weights.detach().to(target.device)[torch.where(counts, target, 0)]
    total: Tensor = torch.where(counts, weights, 0).sum()
    return total


def depends_otherwise(loss: Tensor, calls: Sequence[ClassLoss]) -> bool:
    """Whether the gradient of ``loss`` reaches parameters not only through ``calls``."""
    seen = {call.mean.grad_fn for call in calls}
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if hasattr(node, "variable"):  # a leaf
            return True
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False
