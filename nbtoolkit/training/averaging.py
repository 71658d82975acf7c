"""Keep averaged weights, and recompute the batch-norm statistics for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

from nbtoolkit.errors import CheckpointError, FitError
from nbtoolkit.run.checkpoints.weights import load_weights
from nbtoolkit.training.model import batch_norms

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nbtoolkit.config.schema import Config
    from nbtoolkit.run.checkpoints.checkpoint_store import State
    from nbtoolkit.training.data import Batch
    from nbtoolkit.training.model import BatchNorm

BatchForward: TypeAlias = "Callable[[nn.Module, Batch], object]"
"""``forward(module, batch)`` passes a batch of any form through a module."""

_STATISTICS = ("running_mean", "running_var")


def make_averages(
    config: Config, module: nn.Module, *, steps: int, factor: float = 1.0
) -> Averages | None:
    """Make the averages that ``config.train`` asks for; called by all ranks.

    Args:
        config: ``train.weight_averaging, ema_decay, swa_start, swa_lr``.
        module: the model that is trained, on its device, before the first step.
        steps: optimizer steps of the whole run.
        factor: multiplies ``train.swa_lr`` (the plan's ``lr_factor``).

    Returns:
        None without averaging.

    Raises:
        FitError: the model cannot be copied, or its weights are in half precision.
    """
    train = config.train
    if train.weight_averaging == "none":
        return None
    if train.weight_averaging == "ema":
        return Ema(module, decay=train.ema_decay)
    rate = None if train.swa_lr is None else train.swa_lr * factor
    return Swa(module, start=train.swa_start * steps, rate=rate)


class Averages:
    """The mean weights of a model, in a copy of it that is evaluated as it is.

    Averaged are the trained weights and the running statistics of batch norms, which then fit them
    about as well as the model's own statistics fit its own weights. Frozen weights are shared with
    the model; all other buffers (counters, masks, tables) are copied: their mean has no meaning.

    This is no ``torch.optim.swa_utils.AveragedModel``, which walks through the module in Python and
    averages counters, too: 107 us per step of a small MLP on a CPU, here 10.

    Every rank keeps its own averages, and all are equal: so are the ranks' weights after each step.

    Attributes:
        n_averaged: how many times the weights were averaged.
    """

    def __init__(self, module: nn.Module) -> None:
        _refuse_half_precision(module)
        self._model = module
        self._copy = _copy_of(module)
        self._weights, self._means = _averaged_tensors(module), _averaged_tensors(self._copy)
        self._copy.requires_grad_(False)
        self._outdated = False  # whether the buffers that are only copied have changed
        self._stale_norms = False
        self.n_averaged = 0

    @property
    def active(self) -> bool:
        """Whether there is an average yet; until then the model itself is validated."""
        return self.n_averaged > 0

    @property
    def module(self) -> nn.Module:
        """The model with the averaged weights, in evaluation mode; never to be trained."""
        if self._outdated:
            _copy_other_buffers(self._model, self._copy)
            self._outdated = False
        return self._copy

    def update(self) -> None:
        """Run after every optimizer step."""

    def end_epoch(self, step: int) -> None:
        """Run at the end of every epoch, before validation, after ``step`` optimizer steps."""

    def rate(self, step: int) -> float | None:
        """Return the learning rate of optimizer step ``step`` (from 0); None: the schedule's."""
        return None

    @property
    def needs_batch_norm(self) -> bool:
        """Whether the batch-norm statistics do not fit the averaged weights."""
        return self._stale_norms

    def update_batch_norm(
        self, batches: Iterable[Batch], forward: BatchForward | None = None
    ) -> None:
        """Recompute the batch-norm statistics for the averaged weights; called by all ranks.

        Args:
            batches: this rank's, see :func:`update_norms`.
            forward: how a batch passes through the model.
        """
        update_norms(self._copy, batches, forward)
        self._stale_norms = False
        self._outdated = True

    def weights(self) -> dict[str, Tensor]:
        """Return the averaged model's ``state_dict``, by the names of the model itself."""
        return dict(self.module.state_dict())

    def state(self) -> State:
        """Return what a resumed run needs: tensors and a number."""
        return {"weights": self.weights(), "n_averaged": self.n_averaged}

    def restore(self, state: State, *, source: str) -> None:
        """Continue from a :meth:`state` that was read from ``source``.

        Raises:
            CheckpointError: it is another model's, or not of :meth:`state`.
        """
        if missing := {"weights", "n_averaged"} - state.keys():
            raise CheckpointError(
                f"the averages in {source} are not fit's: {', '.join(sorted(missing))} is missing",
                allowed="a checkpoint of a run with the same train.weight_averaging",
                do="launch with resume='never', or with train.weight_averaging as it was",
            )
        load_weights(state["weights"], self._copy, source=source)
        self.n_averaged = state["n_averaged"]
        self._outdated = True

    def _average(self, share: float) -> None:
        """Give the present weights this share in the mean; the first time they are the mean."""
        import torch

        with torch.no_grad():
            torch._foreach_lerp_(self._means, self._weights, share if self.n_averaged else 1.0)
        self.n_averaged += 1
        self._outdated = True


class Ema(Averages):
    """The exponential moving average of the weights, updated after every optimizer step.

    The decay starts low, so that the first weights soon lose their influence: after ``t`` steps it
    is ``min(decay, (1 + t) / (10 + t))``, as in TensorFlow's ExponentialMovingAverage with
    num_updates (https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage).
    """

    def __init__(self, module: nn.Module, *, decay: float) -> None:
        super().__init__(module)
        self._decay = decay

    def update(self) -> None:
        """See :meth:`Averages.update`."""
        decay = min(self._decay, (1 + self.n_averaged) / (10 + self.n_averaged))
        self._average(1 - decay)


class Swa(Averages):
    """The mean of the weights at the ends of late epochs: stochastic weight averaging.

    Izmailov et al. 2018 (https://arxiv.org/abs/1803.05407, section 3.2): with a constant learning
    rate the weights are averaged at the end of each epoch, from ``start`` on. The batch-norm
    statistics of such a mean have to be recomputed.

    Args:
        module: the model that is trained.
        start: steps after which an epoch's end counts.
        rate: the constant learning rate from there on; None: the schedule's.
    """

    def __init__(self, module: nn.Module, *, start: float, rate: float | None) -> None:
        super().__init__(module)
        self._start = start
        self._rate = rate
        self._has_norms = bool(batch_norms(self._copy))
        _isolate_sync_batch_norms(self._copy)

    def end_epoch(self, step: int) -> None:
        """See :meth:`Averages.end_epoch`."""
        if step >= self._start:
            self._average(1 / (self.n_averaged + 1))
            self._stale_norms = self._has_norms

    def rate(self, step: int) -> float | None:
        """See :meth:`Averages.rate`."""
        return self._rate if step >= self._start else None


def _refuse_half_precision(module: nn.Module) -> None:
    import torch

    for name, weight in module.named_parameters():
        if weight.requires_grad and weight.dtype in (torch.float16, torch.bfloat16):
            raise FitError(
                f"train.weight_averaging cannot average weights in {weight.dtype}, such as {name}: "
                "the steps of a mean are too small for this precision",
                allowed="trained weights in float32 (train.precision: bf16 computes in bfloat16)",
                do="set train.fp16_weights: upcast, or train.weight_averaging: none",
            )


def _copy_of(module: nn.Module) -> nn.Module:
    """Return a copy of the module in evaluation mode; frozen weights are the module's own."""
    frozen = {id(weight): weight for weight in module.parameters() if not weight.requires_grad}
    try:
        return copy.deepcopy(module, frozen).eval()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise FitError(
            f"train.weight_averaging needs a copy of the model, and this {type(module).__name__} "
            f"cannot be copied: {error}",
            allowed="a model that copy.deepcopy accepts",
            do="set train.weight_averaging: none, or (for weight_norm) use the one of "
            "torch.nn.utils.parametrizations",
        ) from error


def _averaged_tensors(module: nn.Module) -> list[Tensor]:
    """Return the tensors of a module that are averaged, in an order that its copy has, too."""
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    statistics = [
        buffer
        for layer in module.modules()
        for name, buffer in layer.named_buffers(recurse=False)
        if name in _STATISTICS
    ]
    return [*trained, *statistics]


def _copy_other_buffers(module: nn.Module, module_copy: nn.Module) -> None:
    """Copy the buffers that are not averaged; their shapes may have changed."""
    for layer, layer_copy in zip(module.modules(), module_copy.modules(), strict=True):
        for name, buffer in layer.named_buffers(recurse=False):
            if name not in _STATISTICS:
                setattr(layer_copy, name, buffer.clone())


def update_norms(
    module: nn.Module, batches: Iterable[Batch], forward: BatchForward | None = None
) -> None:
    """Recompute a module's batch-norm statistics; called by all ranks.

    By ``torch.optim.swa_utils.update_bn``: the plain mean of the statistics of every batch. Each
    rank passes its own batches, of any number, and gets the statistics of all ranks' batches.

    Not exact: the statistics of a batch depend on the samples in it. One rank and several agree (up
    to summation order) if they see the same batches. If each batch is cut into one part per rank,
    the means of the first norm still agree if the parts are equal, its variances and the later
    norms only approximately.

    Args:
        module: changed in place; left in evaluation mode.
        batches: inputs, or lists or tuples whose first item is the inputs; on the device.
        forward: passes a batch of any form through the module.
    """
    from torch.optim.swa_utils import update_bn

    if forward is None:
        update_bn(batches, module)
    else:
        update_bn(((batch,) for batch in batches), _with_forward(module, forward))
    module.eval()
    _average_over_ranks(batch_norms(module))


def _with_forward(module: nn.Module, forward: BatchForward) -> nn.Module:
    """Return a module that passes a batch through ``module`` by ``forward``."""
    from torch import nn

    class WithForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, batch: Batch) -> object:
            return forward(self.inner, batch)

    return WithForward()


def _average_over_ranks(norms: list[BatchNorm]) -> None:
    """Average the statistics over the ranks, each weighted by its number of batches."""
    import torch
    import torch.distributed as dist

    if not norms or not dist.is_initialized():
        return
    parts = [_weighted_statistics(layer) for layer in norms]
    sums = torch.cat(parts)
    dist.all_reduce(sums)
    for layer, part in zip(norms, sums.split([len(part) for part in parts]), strict=True):
        batches = part[-1]
        if batches:  # else no rank passed a batch, and the layer is as a new one is
            mean, variance = (part[:-1] / batches).chunk(2)
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(variance)


def _weighted_statistics(layer: BatchNorm) -> Tensor:
    """Return a layer's means and variances times the number of its batches, and this number."""
    import torch

    ones = torch.ones_like(layer.running_mean[:1])
    row = torch.cat([layer.running_mean, layer.running_var, ones]).double()
    weighted: Tensor = row * layer.num_batches_tracked
    return weighted


def _isolate_sync_batch_norms(module: nn.Module) -> None:
    """Let each ``SyncBatchNorm`` of a copy compute on its rank alone; called by all ranks."""
    import torch.distributed as dist
    from torch import nn

    synced = [layer for layer in module.modules() if isinstance(layer, nn.SyncBatchNorm)]
    if synced and dist.is_initialized():
        alone, _ = dist.new_subgroups(group_size=1)
        for layer in synced:
            layer.process_group = alone
