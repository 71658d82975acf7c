"""How large checkpoints will be, before the first step: the disk is looked at then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbtoolkit.training.stepper import Stepper

if TYPE_CHECKING:
    import torch

# Copies of the weights that torch's optimizers keep in their state, with the usual settings.
_COPIES = {"SGD": 1, "RMSprop": 1, "Adagrad": 1}
_MOST = 2  # Adam and all that descend from it


def expected_bytes(stepper: Stepper) -> tuple[int, int]:
    """Bytes of the weights, and of everything to go on from (an estimate from the optimizer)."""
    weights = _size(stepper.module)
    trained = sum(p.nbytes for p in stepper.module.parameters() if p.requires_grad)
    copies = _COPIES.get(type(stepper.optimizer).__name__, _MOST)
    averaged = 2 * weights if stepper.averages is not None else 0  # to go on from, to predict with
    return weights, weights + copies * trained + averaged


def _size(module: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.state_dict().values())
