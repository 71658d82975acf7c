"""Refuse a training step over a batch that the ranks cannot share equally.

DDP averages the gradients of the ranks with equal weights. That is the gradient of the batch's mean
loss only if all ranks have the same number of its samples. Whether a loop trains is known when a
backward pass begins, not before: an evaluation may have gradients enabled and may shuffle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle


@dataclass(eq=False)
class Reading:
    """A loop over a loader.

    Attributes:
        loader: which one, for the user.
        expected: the uneven batch that will come; None: there is none, or it is not known.
        batch: the batch that the loop has now, if it is uneven.
    """

    loader: str
    expected: str | None
    batch: str | None = None


class EvenSteps:
    """Watches the prepared models while a loop has an uneven batch, or will have one.

    Args:
        ranks: that share the batches.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._models: list[nn.Module] = []
        self._readings: list[Reading] = []  # the one that was read last is the last one
        self._hooks: list[RemovableHandle] = []

    def watch(self, model: nn.Module) -> None:
        """Watch a model as the loop calls it."""
        self._models.append(model)

    def read(self, reading: Reading, batch: str | None) -> None:
        """Note that a loop has its next batch."""
        reading.batch = batch
        if reading in self._readings:
            self._readings.remove(reading)
        self._readings.append(reading)
        self._set_hooks()

    def end(self, reading: Reading) -> None:
        """Note that a loop has ended, or was left."""
        if reading in self._readings:
            self._readings.remove(reading)
        self._set_hooks()

    def _set_hooks(self) -> None:
        """Watch only while there is something to refuse: a hook costs some microseconds a step."""
        needed = any(reading.batch or reading.expected for reading in self._readings)
        if needed and not self._hooks:
            self._hooks = [model.register_forward_hook(self._after) for model in self._models]
        elif not needed:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def _after(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """After a forward pass: let a backward pass through its outputs raise, if it is uneven."""
        import torch

        from nbtoolkit.worker.loss_graph import tensors

        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        error = self._error()
        if error is None:
            return

        def refuse(gradient: Tensor) -> None:
            raise error

        for tensor in tensors(outputs):
            if tensor.requires_grad:
                tensor.register_hook(refuse)

    def _error(self) -> PlanError | None:
        # What is to come counts only for the loader that was read last: a loop over another one may
        # be an evaluation that has paused.
        last = self._readings[-1] if self._readings else None
        if last is not None and last.expected is not None:
            return self._refused(last.loader, last.expected)
        for reading in self._readings:
            if reading.batch is not None:
                return self._refused(reading.loader, reading.batch)
        return None

    def _refused(self, loader: str, batch: str) -> PlanError:
        return PlanError(
            f"{loader}: {batch}, which {self._ranks} ranks cannot share equally: a training "
            "step would not be the mean over its samples",
            allowed="for a backward pass, batches that the ranks share equally; without one, as in "
            "an evaluation, any batches",
            do=f"pass a batch_size that is a multiple of {self._ranks}, and drop_last=True, to the "
            "DataLoader, or use nb.fit, which weights an uneven step",
        )
