"""Keep averaged weights, and recompute the batch-norm statistics for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import CheckpointError, FitError
from nbtoolkit.run.weights import load_weights

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nbtoolkit.config.schema import Config


# --- batch norm ---
# Batch norm: statistics for weights that no training step has had, averaged ones.


def batch_norms(module: nn.Module) -> list[Any]:
    """The batch norms of a module that keep running statistics."""
    from torch import nn

    kind = nn.modules.batchnorm._BatchNorm
    layers = [layer for layer in module.modules() if isinstance(layer, kind)]
    return [layer for layer in layers if layer.running_mean is not None]


def keep_to_itself(module: nn.Module) -> None:
    """Let the ``SyncBatchNorm`` of a copied module meet no other rank; called by all ranks."""
    import torch.distributed as dist
    from torch import nn

    synced = [layer for layer in module.modules() if isinstance(layer, nn.SyncBatchNorm)]
    if synced and dist.is_initialized():
        alone, _ = dist.new_subgroups(group_size=1)
        for layer in synced:
            layer.process_group = alone


def update_norms(
    module: nn.Module,
    batches: Iterable[Any],
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> None:
    """Compute a module's batch-norm statistics anew; called by all ranks.

    By ``torch.optim.swa_utils.update_bn``: the plain mean of the statistics of every batch. Each
    rank walks through batches of its own, as many as it has, and ends with what one rank would
    have of all of them.

    Not exact: the statistics of a batch depend on what is in it. One rank and several agree (up to
    summation order) where they see the same batches; where a batch is cut in parts, one for each
    rank, the means of the first norm still do if the parts are equal, its variances and the norms
    behind it only about.

    Args:
        module: changed in place; left in evaluation mode.
        batches: inputs, or lists or tuples whose first item is the inputs; on the device.
        forward: ``forward(module, batch)`` passes a batch of any form through the module.
    """
    from torch.optim.swa_utils import update_bn

    if forward is None:
        update_bn(batches, module)
    else:
        update_bn(((batch,) for batch in batches), _through(module, forward))
    module.eval()
    _mean_over_ranks(batch_norms(module))


def _through(module: nn.Module, forward: Callable[[nn.Module, Any], Any]) -> nn.Module:
    """A module that passes a batch through ``module`` as ``forward`` does."""
    from torch import nn

    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, batch: Any) -> Any:
            return forward(self.inner, batch)

    return Through()


def _mean_over_ranks(norms: list[Any]) -> None:
    """Average the statistics over the ranks; each counts by the batches that it has seen."""
    import torch
    import torch.distributed as dist

    if not norms or not dist.is_initialized():
        return
    parts = [_weighted(layer) for layer in norms]
    sums = torch.cat(parts)
    dist.all_reduce(sums)
    for layer, part in zip(norms, sums.split([len(one) for one in parts]), strict=True):
        batches = part[-1]
        if batches:  # else it has seen none on any rank, and is as a new layer is
            mean, variance = (part[:-1] / batches).chunk(2)
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(variance)


def _weighted(layer: Any) -> Tensor:
    """A layer's means, variances and the number of its batches, the former times the latter."""
    import torch

    one = torch.ones_like(layer.running_mean[:1])
    row = torch.cat([layer.running_mean, layer.running_var, one]).double()
    counted: Tensor = row * layer.num_batches_tracked
    return counted


# --- averaging ---


_STATISTICS = ("running_mean", "running_var")


def make_averages(
    config: Config, module: nn.Module, *, steps: int, factor: float = 1.0
) -> Averages | None:
    """The averages that ``config.train`` asks for; called by all ranks.

    Args:
        config: ``train.weight_averaging, ema_decay, swa_start, swa_lr``.
        module: the model that is trained, on its device, before the first step.
        steps: optimizer steps of the whole run.
        factor: what ``train.swa_lr`` is multiplied by (the plan's ``lr_factor``).

    Returns:
        None where nothing is averaged.

    Raises:
        FitError: the model cannot be copied, or its weights are too coarse to be averaged.
    """
    train = config.train
    if train.weight_averaging == "none":
        return None
    if train.weight_averaging == "ema":
        return Ema(module, decay=train.ema_decay)
    rate = None if train.swa_lr is None else train.swa_lr * factor
    return Swa(module, start=train.swa_start * steps, rate=rate)


class Averages:
    """The mean weights of a model, in a module of their own that is evaluated as it is.

    Averaged are the trained weights, and the running statistics of batch norms, which then fit
    them about as well as the model's own fit its own. Frozen weights are shared with the model;
    all other buffers (counters, masks, tables) are copied from it: their means would make no sense.

    It computes with the functions of ``torch.optim.swa_utils``, but is no ``AveragedModel``: that
    one walks through the module in Python and averages counters, too. A step of a small MLP takes
    it 41 us on a CPU, here 11.

    Every rank has its own, and all have the same: the ranks' weights are equal after each step.

    Attributes:
        taken: how many times the weights were averaged.
    """

    def __init__(self, module: nn.Module) -> None:
        _refuse_coarse(module)
        self._live, self._module = module, _twin(module)
        self._theirs, self._mine = _averaged(module), _averaged(self._module)
        self._module.requires_grad_(False)
        self._behind = False  # whether the buffers that are copied have changed since
        self.taken = 0

    @property
    def active(self) -> bool:
        """Whether there is an average yet; until then the model itself is to be validated."""
        return self.taken > 0

    @property
    def module(self) -> nn.Module:
        """The model with the averaged weights, in evaluation mode; never to be trained."""
        if self._behind:
            _copy_other_buffers(self._live, self._module)
            self._behind = False
        return self._module

    def update(self) -> None:
        """Called after every optimizer step."""

    def end_epoch(self, step: int) -> None:
        """Called at the end of every epoch, before it is validated; ``step``: steps done."""

    def rate(self, step: int) -> float | None:
        """The learning rate of optimizer step ``step`` (from 0); None: what the schedule says."""
        return None

    @property
    def needs_batch_norm(self) -> bool:
        """Whether :meth:`finish` has something to do."""
        return False

    def finish(
        self, batches: Iterable[Any], forward: Callable[[nn.Module, Any], Any] | None = None
    ) -> None:
        """Make batch-norm statistics for the averaged weights, where those here do not fit them."""

    def weights(self) -> dict[str, Tensor]:
        """The averaged model's ``state_dict``, by the names of the model itself."""
        return dict(self.module.state_dict())

    def state(self) -> dict[str, Any]:
        """What a resumed run needs: tensors and a number."""
        return {"weights": self.weights(), "taken": self.taken}

    def restore(self, state: Mapping[str, Any], *, source: str) -> None:
        """Go on from a :meth:`state` that was read from ``source``.

        Raises:
            CheckpointError: it is another model's, or not of :meth:`state`.
        """
        if missing := {"weights", "taken"} - state.keys():
            raise CheckpointError(
                f"the averages in {source} are not fit's: {', '.join(sorted(missing))} is missing",
                allowed="a checkpoint of a run with the same train.weight_averaging",
                do="launch with resume='never', or with train.weight_averaging as it was",
            )
        load_weights(state["weights"], self._module, source=source)
        self.taken, self._behind = state["taken"], True

    def _take(self, average: Callable[[list[Tensor], list[Tensor], int], None]) -> None:
        """Take the weights as they are now into the mean; the first time they are the mean."""
        import torch

        with torch.no_grad():
            if self.taken == 0:
                torch._foreach_copy_(self._mine, self._theirs)
            else:
                average(self._mine, self._theirs, self.taken)
        self.taken += 1
        self._behind = True


class Ema(Averages):
    """The exponential moving average of the weights, taken after every optimizer step.

    The decay begins low, so that the first weights are soon forgotten: after ``t`` steps it is
    ``min(decay, (1 + t) / (10 + t))``, as in TensorFlow's ExponentialMovingAverage with num_updates
    (https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage).
    """

    def __init__(self, module: nn.Module, *, decay: float) -> None:
        super().__init__(module)
        self._decay = decay

    def update(self) -> None:
        """See :meth:`Averages.update`."""
        from torch.optim.swa_utils import get_ema_multi_avg_fn

        decay = min(self._decay, (1 + self.taken) / (10 + self.taken))
        self._take(get_ema_multi_avg_fn(decay))


class Swa(Averages):
    """The mean of the weights at the ends of late epochs: stochastic weight averaging.

    Izmailov et al. 2018 (https://arxiv.org/abs/1803.05407, section 3.2): with a constant learning
    rate they are captured at each epoch, from those that training has by then on. Batch-norm
    statistics of a mean have to be computed anew.

    Args:
        module: the model that is trained.
        start: steps after which an epoch's end counts.
        rate: the constant learning rate from there on; None: what the schedule says.
    """

    def __init__(self, module: nn.Module, *, start: float, rate: float | None) -> None:
        super().__init__(module)
        self._start, self._rate = start, rate
        self._has_norms, self._stale = bool(batch_norms(self._module)), False
        keep_to_itself(self._module)

    def end_epoch(self, step: int) -> None:
        """See :meth:`Averages.end_epoch`."""
        from torch.optim.swa_utils import get_swa_multi_avg_fn

        if step >= self._start:
            self._take(get_swa_multi_avg_fn())
            self._stale = self._has_norms

    def rate(self, step: int) -> float | None:
        """See :meth:`Averages.rate`."""
        return self._rate if step >= self._start else None

    @property
    def needs_batch_norm(self) -> bool:
        """Whether weights were averaged, in a model with batch norms, since :meth:`finish`."""
        return self._stale

    def finish(
        self, batches: Iterable[Any], forward: Callable[[nn.Module, Any], Any] | None = None
    ) -> None:
        """Compute the batch-norm statistics of the averaged weights; called by all ranks.

        Args:
            batches: this rank's, see :func:`~nbtoolkit.training.averaging.update_norms`.
            forward: how a batch passes through the model.
        """
        update_norms(self._module, batches, forward)
        self._stale, self._behind = False, True


def _refuse_coarse(module: nn.Module) -> None:
    import torch

    for name, weight in module.named_parameters():
        if weight.requires_grad and weight.dtype in (torch.float16, torch.bfloat16):
            raise FitError(
                f"train.weight_averaging cannot average weights in {weight.dtype}, such as "
                f"{name}: the "
                "steps of a mean are smaller than what it can tell apart",
                allowed="trained weights in float32 (train.precision: bf16 computes in bfloat16)",
                do="set train.fp16_weights: upcast, or train.weight_averaging: none",
            )


def _twin(module: nn.Module) -> nn.Module:
    """A copy of the module in evaluation mode; frozen weights are the module's own."""
    frozen = {id(weight): weight for weight in module.parameters() if not weight.requires_grad}
    try:
        twin = copy.deepcopy(module, frozen)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise FitError(
            f"train.weight_averaging needs a copy of the model, and this "
            f"{type(module).__name__} cannot be "
            f"copied: {error}",
            allowed="a model that copy.deepcopy takes",
            do="set train.weight_averaging: none, or (for weight_norm) take the one of "
            "torch.nn.utils.parametrizations",
        ) from error
    return twin.eval()


def _averaged(module: nn.Module) -> list[Tensor]:
    """What is averaged of a module: in its order, which is its twin's, too."""
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    statistics = [
        buffer
        for layer in module.modules()
        for name, buffer in layer.named_buffers(recurse=False)
        if name in _STATISTICS
    ]
    return [*trained, *statistics]


def _copy_other_buffers(live: nn.Module, twin: nn.Module) -> None:
    """Give the twin the buffers that are not averaged, whatever shape they have by now."""
    for theirs, mine in zip(live.modules(), twin.modules(), strict=True):
        for name, buffer in theirs.named_buffers(recurse=False):
            if name not in _STATISTICS:
                setattr(mine, name, buffer.clone())
