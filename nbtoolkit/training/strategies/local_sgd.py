"""``distributed.local_sgd_steps``: each rank trains alone; the weights are averaged sometimes.

For links so slow that DDP waits for them in every step. Local SGD (Stich 2019,
https://arxiv.org/abs/1805.09767) is not exact: with ``local_sgd_steps: 1`` and plain SGD it takes
the steps of DDP, with more steps or with Adam it takes others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, cast

from nbtoolkit.training.strategy import Strategy
from nbtoolkit.worker.collectives import gather_on_first

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nbtoolkit.config.schema import Config
    from nbtoolkit.training.train_state import State
    from nbtoolkit.worker.context import RunContext


class LocalSgd(Strategy):
    """See the module. Optimizers, clipping and loss scales are each rank's own.

    A checkpoint has the mean of the ranks' weights as its model, and each rank's weights and
    optimizer to resume from. A run that resumes with another number of ranks takes the mean, and
    rank 0's optimizer.
    """

    gathers = True

    def __init__(self, ctx: RunContext, config: Config) -> None:
        super().__init__(ctx, config)
        self._every = config.distributed.local_sgd_steps or 1
        self._apart = False  # whether the ranks have made steps since the last average
        self.after_step = self._count
        self.state_copies = ctx.world_size

    def wrap(self, module: nn.Module, *, steps: int) -> nn.Module:
        """See :meth:`Strategy.wrap`."""
        import torch

        self.load_on_all_ranks(module, None)  # as DDP does: all start with rank 0's weights
        self._module = module
        compiles = self._config.train.compile
        return cast("nn.Module", torch.compile(module)) if compiles else module

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`Strategy.bind`."""
        self._optimizer = optimizer

    def no_sync(self, model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """See :meth:`Strategy.no_sync`."""
        return nullcontext

    def end_epoch(self) -> None:
        """See :meth:`Strategy.end_epoch`; the weights are then equal on all ranks."""
        if self._apart:
            self._average()

    def gathered(self, state: State) -> State:
        """See :meth:`Strategy.gathered`."""
        from accelerate.utils import send_to_device

        if "optimizer" not in state:  # weights only, at an epoch's end: equal on all ranks
            return state if self._ctx.is_main else {}
        own = {"model": state["model"], "optimizer": state["optimizer"]}
        ranks = gather_on_first(send_to_device(own, "cpu"), self._ranks)
        if ranks is None:
            return {}
        model = _mean([one["model"] for one in ranks]) if self._apart else state["model"]
        return {**state, "model": model, "local": {"ranks": ranks, "apart": self._apart}}

    def restore(self, state: State) -> None:
        """See :meth:`Strategy.restore`."""
        local = state.get("local", {"ranks": [], "apart": False})
        if len(local["ranks"]) == self._ranks:
            own = local["ranks"][self._ctx.rank]
            self._module.load_state_dict(own["model"])
            self._optimizer.load_state_dict(own["optimizer"])
            self._apart = local["apart"]

    def _count(self, steps: int) -> None:
        self._apart = True
        if steps % self._every == 0:
            self._average()

    def _average(self) -> None:
        """Average the trained weights and the buffers of real numbers: one all-reduce."""
        import torch
        import torch.distributed as dist

        weights = [one for one in self._module.parameters() if one.requires_grad]
        tensors = [*weights, *(one for one in self._module.buffers() if one.is_floating_point())]
        with torch.no_grad():
            flat = torch.cat([one.reshape(-1) for one in tensors])
            dist.all_reduce(flat)
            flat /= self._ranks
            for one, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
                one.copy_(part.view(one.shape))
        self._apart = False


def make(ctx: RunContext, config: Config) -> Strategy:
    """The strategy."""
    return LocalSgd(ctx, config)


def _mean(models: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of the ranks' weights, by name; rank 0's whole numbers."""
    import torch

    return {
        name: torch.stack([one[name] for one in models]).mean(0)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in models[0].items()
    }
