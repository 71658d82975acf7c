"""``distributed.strategy: fsdp``: each rank keeps a part of weights, gradients and optimizer state.

FSDP2 (``torch.distributed.fsdp.fully_shard``), for ``nb.fit`` and ``ctx.prepare``. accelerate's
plugin for FSDP is not used: on the CPU it trains with DDP, and does not say so (accelerate 1.15).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

from nbtoolkit.errors import FitError, PlanError
from nbtoolkit.training.model import broadcast_buffers, half_precision
from nbtoolkit.training.strategies.sharding import (
    ShardedModule,
    gathered,
    prepare_optimizer,
    rebind,
)
from nbtoolkit.training.strategy import Strategy, clip, grad_norm
from nbtoolkit.worker.collectives import broadcast

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.fsdp import FSDPModule

    from nbtoolkit.config.schema import Config
    from nbtoolkit.training.train_state import State
    from nbtoolkit.worker.context import RunContext

# Their state has other shapes than the parameters, or a step needs whole matrices.
_NOT_SHARDED = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
_NOT_THROUGH_FORWARD = (
    "got mixed torch.Tensor and DTensor",
    "FSDP requires running forward through the root module first",
)


class OutsideForward(FitError, AttributeError):
    """A step uses a part of a sharded model, whose weights are gathered in its forward only."""


class Fsdp(Strategy):
    """See the module. Saving and loading are collectives; files are those of one process."""

    gathers = True

    def wrap(self, module: nn.Module, *, steps: int) -> nn.Module:
        """See :meth:`Strategy.wrap`; shards ``module`` in place.

        Raises:
            FitError: FSDP cannot shard it.
        """
        super().load_on_all_ranks(module, None)  # as DDP does: all start with rank 0's weights
        self._module = module
        self._sharded = _shard(self._ctx, module)
        if not self._sharded.units:
            self._ctx.print(
                "fit: fsdp gathers the whole model in each pass: it has no layers of one class "
                "that repeat"
            )
        return forward_only(module)

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`Strategy.bind`.

        Raises:
            FitError: its state cannot be sharded.
        """
        kind = type(optimizer).__name__
        if kind in _NOT_SHARDED:
            raise FitError(
                f"the optimizer is {kind}, whose state distributed.strategy: fsdp cannot shard",
                allowed="optimizers that keep their state per weight: SGD, Adam, AdamW, RMSprop",
                do="set optim.name: adamw, or distributed.strategy: ddp",
            )
        prepare_optimizer(optimizer)

    def no_sync(self, model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """See :meth:`Strategy.no_sync`; gradients are whole on each rank in such a pass."""
        root = cast("FSDPModule", self._module)

        @contextmanager
        def held() -> Iterator[None]:
            root.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                root.set_requires_gradient_sync(True)

        return held

    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> Tensor:
        """See :meth:`Strategy.clip`."""
        return _whole(clip(parameters, max_norm))

    def grad_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """See :meth:`Strategy.grad_norm`."""
        return _whole(grad_norm(parameters))

    def translated(self, error: Exception) -> FitError | None:
        """See :meth:`Strategy.translated`."""
        if isinstance(error, OutsideForward):
            return error
        if any(text in str(error) for text in _NOT_THROUGH_FORWARD):
            return _outside_forward("a part of the model")
        return None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """See :meth:`Strategy.evaluating`; each rank has all weights meanwhile."""
        self._sharded.unshard()
        try:
            yield
        finally:
            self._sharded.reshard()

    def gathered(self, state: State) -> State:
        """See :meth:`Strategy.gathered`."""
        whole = gathered(state, keep=self._ctx.is_main)
        return cast("State", whole) if self._ctx.is_main else {}

    def load_on_all_ranks(self, module: nn.Module, weights: Mapping[str, Tensor] | None) -> None:
        """See :meth:`Strategy.load_on_all_ranks`."""
        import torch

        if not broadcast(weights is not None, self._ranks):
            return  # the present ones are equal on all ranks
        if weights is None:
            state = module.state_dict()
            weights = {
                name: torch.empty(one.shape, dtype=one.dtype) if hasattr(one, "shape") else one
                for name, one in state.items()
            }
        module.load_state_dict(weights)
        broadcast_buffers(module, self._ranks)

    def close(self) -> None:
        """See :meth:`Strategy.close`."""
        self._sharded.make_plain()


def make(ctx: RunContext, config: Config) -> Strategy:
    """The strategy."""
    return Fsdp(ctx, config)


def forward_only(module: nn.Module) -> nn.Module:
    """A module that passes calls on to ``module``, and refuses the use of its parts."""
    import torch
    from torch import nn

    class ForwardOnly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            if name in self._modules:
                return self._modules[name]
            value = getattr(module, name)
            if isinstance(value, torch.Tensor) or callable(value):
                raise _outside_forward(f"model.{name}")
            return value

        def __getitem__(self, key: object) -> Any:
            raise _outside_forward(f"model[{key!r}]")

    return ForwardOnly()


def _outside_forward(what: str) -> OutsideForward:
    return OutsideForward(
        f"the step uses {what} outside of the model's forward, and distributed.strategy: fsdp "
        "gathers the weights only there",
        allowed="a step that calls model(...) itself",
        do="move this into the model's forward (an argument can choose the path), or set "
        "distributed.strategy: ddp",
    )


def _shard(ctx: RunContext, module: nn.Module) -> ShardedModule:
    device, half = ctx.device.type, half_precision(ctx)
    return ShardedModule(module, device=device, ranks=ctx.world_size, half=half)


def _whole(norm: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return norm.full_tensor() if isinstance(norm, DTensor) else norm


# --- own loops ---


def shard_inputs(ctx: RunContext, objects: Sequence[object]) -> None:
    """Shard the models among the objects of ``ctx.prepare``, and rebind their optimizers.

    Raises:
        PlanError: an optimizer has made steps already, or a model comes without its optimizer.
        FitError: FSDP cannot shard a model.
    """
    from torch import nn
    from torch.optim import Optimizer

    models = [one for one in objects if isinstance(one, nn.Module)]
    optimizers = [one for one in objects if isinstance(one, Optimizer)]
    if any(one.state for one in optimizers):
        raise PlanError(
            "an optimizer has made steps before ctx.prepare, and distributed.strategy: fsdp "
            "replaces its parameters",
            allowed="a new optimizer, in the same ctx.prepare as its model",
            do="load its state after ctx.prepare: optimizer.load_state_dict(...)",
        )
    for model in models:
        Strategy(ctx, ctx.config).load_on_all_ranks(model.to(ctx.device), None)
        before = list(model.parameters())
        _shard(ctx, model)
        rebind(optimizers, before, list(model.parameters()))


def gather_state(ctx: RunContext, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """What ``ctx.save`` writes: ``state`` with whole tensors on rank 0; a collective."""
    return cast("Mapping[str, Any]", gathered(state, keep=ctx.is_main))
