"""Ensemble: the folds' models as one, which answers with the mean of what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import FoldError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Ensemble:
    """The mean of several models' outputs, without gradients.

    Args:
        models: in evaluation mode; called with the same inputs.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self.models = tuple(models)

    def __call__(self, *inputs: Any) -> Tensor:
        """The models' mean output: of logits, where they give logits.

        Args:
            inputs: what one model takes, on the models' device.

        Raises:
            FoldError: the outputs are not tensors of one shape.
        """
        import torch

        with torch.no_grad():
            outputs = [model(*inputs) for model in self.models]
        if len({getattr(output, "shape", None) for output in outputs} | {None}) != 2:
            kinds = sorted({type(output).__name__ for output in outputs})
            raise FoldError(
                f"the outputs of the {len(outputs)} models ({', '.join(kinds)}) have no mean",
                allowed="models whose output is one tensor, of the same shape for all",
                do="call ensemble.models one by one, and put their outputs together yourself",
            )
        return torch.stack(outputs).mean(dim=0)

    def __len__(self) -> int:
        return len(self.models)

    def __repr__(self) -> str:
        kinds = ", ".join(sorted({type(model).__name__ for model in self.models}))
        return f"Ensemble({len(self.models)} x {kinds})"
