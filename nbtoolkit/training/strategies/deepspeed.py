"""``distributed.strategy: deepspeed``: ZeRO stages 1 to 3 of DeepSpeed, with offload to the CPU.

DeepSpeed changes a model's parameters and modules, so it trains a copy. The user's model waits in
CPU memory and gets the trained weights when they are needed: for validation, checkpoints, and at
the end. The optimizer is torch's own: DeepSpeed's have to be compiled. See
https://deepspeed.readthedocs.io/en/latest/zero3.html.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nbtoolkit.environment.installed import install_line
from nbtoolkit.errors import FitError, MissingExtra, PlanError
from nbtoolkit.training.model import autocast, autocasting, broadcast_buffers
from nbtoolkit.training.fsdp import forward_only
from nbtoolkit.training.strategies.zero_optimizer import ZeroOptimizer, check_optimizer
from nbtoolkit.training.strategy import Strategy

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config, Distributed
    from nbtoolkit.training.train_state import State
    from nbtoolkit.worker.context import RunContext


class DeepSpeed(Strategy):
    """See the module. Saving and loading are collectives; files are those of one process."""

    gathers = True

    def wrap(self, module: nn.Module, *, steps: int) -> nn.Module:
        """See :meth:`Strategy.wrap`.

        Raises:
            MissingExtra: DeepSpeed is not installed.
            FitError: DeepSpeed trains on other devices, or the model cannot be copied.
        """
        super().load_on_all_ranks(module, None)  # as DDP does: all start with rank 0's weights
        self._zero = ZeroModel(self._ctx, module)
        return self._zero.wrapped

    def make_optimizer(
        self, make: Callable[[nn.Module], torch.optim.Optimizer], module: nn.Module
    ) -> torch.optim.Optimizer:
        """See :meth:`Strategy.make_optimizer`.

        Raises:
            FitError: its state cannot be divided.
        """
        self._optimizer = self._zero.start(make(module))
        self._optimizer.keeps_state = self._ctx.is_main
        return self._optimizer

    def no_sync(self, model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """See :meth:`Strategy.no_sync`; from stage 2 on, each pass reduces its gradients."""
        return nullcontext

    def refuse_unused(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """See :meth:`Strategy.refuse_unused`; :meth:`ZeroOptimizer.step` does it."""

    def scale(self, parameters: list[nn.Parameter], factor: Tensor) -> None:
        """See :meth:`Strategy.scale`."""
        self._optimizer.scale(float(factor))

    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> Tensor:
        """See :meth:`Strategy.clip`; the norm is known after the optimizer's step."""
        return self._optimizer.clip(max_norm)

    def grad_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """See :meth:`Strategy.grad_norm`; known after the optimizer's step."""
        return self._optimizer.clip(0.0)

    def broadcast_buffers(self, module: nn.Module) -> None:
        """See :meth:`Strategy.broadcast_buffers`."""
        broadcast_buffers(self._zero.trained, self._ranks)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """See :meth:`Strategy.evaluating`; each rank has all weights on its device meanwhile."""
        self._zero.pull()
        self._zero.plain.to(self._ctx.device)
        try:
            yield
        finally:
            self._zero.plain.to("cpu")

    def gathered(self, state: State) -> State:
        """See :meth:`Strategy.gathered`."""
        self._zero.pull()
        model = self._zero.plain.state_dict()
        return {**state, "model": model} if self._ctx.is_main else {}

    def restore(self, state: State) -> None:
        """See :meth:`Strategy.restore`."""
        self._zero.push()

    def load_on_all_ranks(self, module: nn.Module, weights: Mapping[str, Tensor] | None) -> None:
        """See :meth:`Strategy.load_on_all_ranks`."""
        self._zero.pull()
        super().load_on_all_ranks(module.to(self._ctx.device), weights)

    def close(self) -> None:
        """See :meth:`Strategy.close`."""
        self._zero.pull()
        self._zero.engine.destroy()
        self._zero.plain.to(self._ctx.device)


def make(ctx: RunContext, config: Config) -> Strategy:
    """The strategy."""
    return DeepSpeed(ctx, config)


class ZeroModel:
    """A model, and the copy of it that DeepSpeed trains.

    Attributes:
        plain: the user's, on the CPU; its weights are those of the last :meth:`pull`.
        trained: the copy.
        wrapped: passes calls on to DeepSpeed's engine; its ``state_dict`` is the plain model's, of
            the present weights, and has to be called by all ranks.
        engine: DeepSpeed's; from :meth:`start` on.
        stale: whether the copy may have other weights or buffers than the plain model.
        unused: the names of trained parameters that no backward pass since the last step has used.
    """

    engine: Any

    def __init__(self, ctx: RunContext, plain: nn.Module) -> None:
        self._ctx, self._settings = ctx, ctx.config.distributed
        self._deepspeed = _imported(ctx)
        self.plain = plain.to("cpu")
        try:
            self.trained = copy.deepcopy(plain).to(ctx.device)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise FitError(
                "distributed.strategy: deepspeed trains a copy of the model, and this "
                f"{type(plain).__name__} cannot be copied: {error}",
                allowed="a model that copy.deepcopy accepts",
                do="set distributed.strategy: fsdp or ddp",
            ) from error
        self.unused: set[str] = set()
        self.stale = False
        self._numbers = sum(one.numel() for one in plain.parameters())
        self.wrapped = forward_only(self.trained, "deepspeed", self._forward)
        self.wrapped.state_dict = self._state_dict  # type: ignore[method-assign, assignment]
        self.wrapped.load_state_dict = self._load  # type: ignore[method-assign]

    def start(self, optimizer: torch.optim.Optimizer) -> ZeroOptimizer:
        """Begin to train: make the engine of an optimizer over the plain model's parameters.

        Raises:
            FitError: its state cannot be divided.
        """
        own = dict(zip(self.plain.parameters(), self.trained.parameters(), strict=True))
        check_optimizer(optimizer)
        for group in optimizer.param_groups:
            group["params"] = [own[one] for one in group["params"]]
        self.names = [name for name, one in self.trained.named_parameters() if one.requires_grad]
        zero = ZeroOptimizer(self, optimizer, ranks=self._ctx.world_size, rank=self._ctx.rank)
        self.engine, *_ = self._deepspeed.initialize(
            model=autocasting(self.trained, autocast(self._ctx)),
            optimizer=optimizer,
            config=deepspeed_settings(self._settings, self._numbers),
            dist_init_required=False,
        )
        for name, one in self.trained.named_parameters():
            if one.requires_grad:
                one.register_post_accumulate_grad_hook(lambda _, name=name: self._use(name))
        self.unused = set(self.names)
        return zero

    def pull(self) -> None:
        """Copy the trained weights and buffers into the plain model; a collective."""
        if not self.stale:
            return
        for mine, theirs in self._pairs():
            with torch.no_grad(), self._deepspeed.zero.GatheredParameters([theirs]):
                mine.copy_(theirs)
        self.stale = False

    def push(self) -> None:
        """Train on from the plain model's weights and buffers, equal on all ranks; a collective."""
        for mine, theirs in self._pairs():
            gathered = self._deepspeed.zero.GatheredParameters([theirs], modifier_rank=0)
            with torch.no_grad(), gathered:
                theirs.copy_(mine)
        self.engine.optimizer.refresh_fp32_params()
        self.stale = False

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter and buffer of the plain model with the one that is trained."""
        yield from zip(self.plain.parameters(), self.trained.parameters(), strict=True)
        yield from zip(self.plain.buffers(), self.trained.buffers(), strict=True)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self.stale = True
        return self.engine(*args, **kwargs)

    def _use(self, name: str) -> None:
        self.unused.discard(name)

    def _state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.pull()
        return self.plain.state_dict(*args, **kwargs)

    def _load(self, *args: Any, **kwargs: Any) -> Any:
        found = self.plain.load_state_dict(*args, **kwargs)
        self.push()
        return found


def zero_inputs(ctx: RunContext, objects: Sequence[object]) -> list[object]:
    """The objects of ``ctx.prepare``, the model and its optimizer replaced by DeepSpeed's.

    Raises:
        PlanError: there is another number of them, or the optimizer has made steps already.
        MissingExtra: DeepSpeed is not installed.
        FitError: DeepSpeed cannot train them.
    """
    models = [one for one in objects if isinstance(one, nn.Module)]
    optimizers = [one for one in objects if isinstance(one, torch.optim.Optimizer)]
    if not models and not optimizers:
        return [*objects]
    if len(models) != 1 or len(optimizers) != 1 or optimizers[0].state:
        raise PlanError(
            f"ctx.prepare gets {len(models)} models and {len(optimizers)} optimizers"
            f"{', which have made steps' if any(one.state for one in optimizers) else ''}, and "
            "distributed.strategy is deepspeed",
            allowed="one model and its new optimizer, in one call",
            do="pass them together, and load states after ctx.prepare; or set "
            "distributed.strategy: ddp",
        )
    model = models[0].to(ctx.device)
    Strategy(ctx, ctx.config).load_on_all_ranks(model, None)
    zero = ZeroModel(ctx, model)
    new = {id(model): zero.wrapped, id(optimizers[0]): zero.start(optimizers[0])}
    return [new.get(id(one), one) for one in objects]


def _imported(ctx: RunContext) -> Any:
    """DeepSpeed, for this run's devices."""
    os.environ.setdefault("DS_ACCELERATOR", ctx.device.type)
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator
    except ImportError as error:
        raise MissingExtra(
            f"distributed.strategy: deepspeed needs DeepSpeed, which cannot be imported: {error}",
            allowed="an environment with DeepSpeed, or distributed.strategy: fsdp",
            do=install_line("deepspeed"),
        ) from error
    kind = get_accelerator()._name
    if kind != ctx.device.type:
        raise FitError(
            f"DeepSpeed was imported for {kind}, and this run is on {ctx.device.type}",
            allowed=f"DS_ACCELERATOR={ctx.device.type}",
            do=f"set the variable DS_ACCELERATOR={ctx.device.type} before the first launch",
        )
    if kind == "cpu":
        # Else DeepSpeed compiles a communication of its own, for minutes. Gloo does the same.
        deepspeed.ops.__compatible_ops__ = {}
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    return deepspeed


def deepspeed_settings(own: Distributed, numbers: int) -> dict[str, Any]:
    """DeepSpeed's configuration.

    Args:
        own: the settings.
        numbers: of the model's parameters; a larger bucket of gradients would be wasted memory.
    """
    zero: dict[str, Any] = {"stage": own.zero_stage}
    zero["reduce_bucket_size"] = min(numbers, 500_000_000)  # DeepSpeed's default
    if own.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if own.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,  # counts nothing that nbtoolkit uses
        "managed_gradient_accumulation": False,  # a step takes the passes since the last one
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1; see ZeroOptimizer.clip
        "steps_per_print": None,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # see check_optimizer
        "zero_force_ds_cpu_optimizer": False,  # it would have to be compiled
    }
