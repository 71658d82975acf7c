"""Refuse a loss that compares each output with the targets of all samples."""

from __future__ import annotations

from nbtoolkit.errors import FitError


def check_shapes(outputs: object, targets: object, returned: object) -> None:
    """Refuse outputs (n, 1) and targets (n,), or the reverse, that a loss broadcasts to (n, n).

    The shapes alone do not tell it: a loss may call ``outputs.squeeze(1)`` itself. The autograd
    graph of what it returned does, whatever the values are.

    Args:
        outputs: of the model, with gradients.
        targets: of the same samples.
        returned: by the loss for them.

    Raises:
        FitError: the loss has made (n, n) of them.
    """
    import torch

    from nbtoolkit.worker.loss_graph import compared_pairs, roots

    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return
    if {outputs.shape[1:], targets.shape[1:]} != {(1,), ()}:
        return
    for loss in roots(returned):
        if pairs := compared_pairs(loss, roots(outputs)):
            raise FitError(
                f"the loss compares each output with the targets of all samples: torch makes "
                f"{pairs[1]} of outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}",
                allowed="outputs and targets of the same shape; a loss of pairs of samples with "
                "train.loss_reduction: batch",
                do="let the model return outputs.squeeze(1), or give targets[:, None]",
            )
