"""``distributed.strategy: pipeline``: each rank has some of the layers of an ``nn.Sequential``.

A batch passes the ranks one after the other. It is cut into micro-batches, the accumulation steps
of ``train.gradient_accumulation_steps``, so that the ranks work at the same time
(``torch.distributed.pipelining``, schedule 1F1B, or GPipe with fewer micro-batches than ranks).
See https://docs.pytorch.org/docs/stable/distributed.pipelining.html.

All ranks read the same samples; the last rank alone computes losses and metrics.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from nbtoolkit.errors import FitError
from nbtoolkit.training.evaluation import forward_pair
from nbtoolkit.training.losses import BatchLoss, training_pass
from nbtoolkit.training.model import autocasting
from nbtoolkit.training.reduction import Reduction
from nbtoolkit.training.step import Recipe, TrainStep
from nbtoolkit.training.strategy import Strategy
from nbtoolkit.worker.collectives import broadcast, gather_on_all, gather_on_first

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nbtoolkit.config.schema import Config
    from nbtoolkit.training.loading.data import Batch
    from nbtoolkit.training.loading.sampler import MicroBatch
    from nbtoolkit.training.train_state import State
    from nbtoolkit.worker.context import RunContext

_SEQUENTIAL = "an nn.Sequential whose layers pass one tensor on, with a trained layer for each rank"


class PipelineParallel(Strategy):
    """See the module. Saving and loading are collectives; files are those of one process."""

    gathers = True

    def part(self, model: nn.Module) -> nn.Module:
        """See :meth:`Strategy.part`; the layers keep their names.

        Raises:
            FitError: the model cannot be divided, or this torch is too old.
        """
        from torch import nn

        check_torch()
        self._model = model
        layers = _layers(model)
        stages = split(layers, self._ranks)
        self._owner = {
            f"{layer}.{name}": rank
            for rank, stage in enumerate(stages)
            for layer in stage
            for name in layers[layer].state_dict()
        }
        self._share_weights(dict.fromkeys(self._owner, 0))  # all start with rank 0's
        shown = " | ".join(f"{stage[0]} to {stage[-1]}" for stage in stages)
        self._ctx.print(f"fit: pipeline: the ranks have the layers {shown}")
        self._stage = nn.Sequential(
            OrderedDict((name, layers[name]) for name in stages[self._ctx.rank])
        )
        return self._stage

    def whole(self, module: nn.Module) -> nn.Module:
        """See :meth:`Strategy.whole`."""
        return self._model

    def wrap(self, module: nn.Module, *, steps: int) -> nn.Module:
        """See :meth:`Strategy.wrap`."""
        return module

    def make_optimizer(
        self, make: Callable[[nn.Module], torch.optim.Optimizer], module: nn.Module
    ) -> torch.optim.Optimizer:
        """See :meth:`Strategy.make_optimizer`.

        It is made for the whole model, so that its groups are those of one process, and then holds
        the parameters of this rank's layers only.
        """
        optimizer = make(self._model)
        held = [one for group in optimizer.param_groups for one in group["params"]]
        own = set(module.parameters())
        # The numbers that a state_dict of one process gives to this rank's parameters.
        self._numbers = [number for number, one in enumerate(held) if one in own]
        self._groups, start = [], 0
        for group in optimizer.param_groups:
            self._groups.append(list(range(start, start + len(group["params"]))))
            start += len(group["params"])
            group["params"] = [one for one in group["params"] if one in own]
        for one in held:
            if one not in own:
                optimizer.state.pop(one, None)
        return optimizer

    def no_sync(self, model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """See :meth:`Strategy.no_sync`; gradients stay on their rank in all passes."""
        return nullcontext

    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> Tensor:
        """See :meth:`Strategy.clip`."""
        norm = self.grad_norm(parameters)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for one in parameters:
            if one.grad is not None:
                one.grad.mul_(factor.to(one.grad.dtype))
        return norm

    def grad_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """See :meth:`Strategy.grad_norm`; over all ranks."""
        import torch.distributed as dist

        squared = super().grad_norm(parameters) ** 2
        dist.all_reduce(squared)
        return squared.sqrt()

    def broadcast_buffers(self, module: nn.Module) -> None:
        """See :meth:`Strategy.broadcast_buffers`; every buffer is on one rank only."""

    def gathered(self, state: State) -> State:
        """See :meth:`Strategy.gathered`."""
        from accelerate.utils import send_to_device

        own = {"model": state["model"], "numbers": self._numbers}
        if "optimizer" in state:
            own["optimizer"] = state["optimizer"]["state"]
        ranks = gather_on_first(send_to_device(own, "cpu"), self._ranks)
        if ranks is None:
            return {}
        parts: dict[str, Tensor] = {}
        for rank in ranks:
            parts.update(rank["model"])
        whole: State = {**state, "model": {name: parts[name] for name in self._owner}}
        if "optimizer" in state:
            moments = {
                rank["numbers"][number]: one
                for rank in ranks
                for number, one in rank["optimizer"].items()
            }
            groups = [
                {**group, "params": numbers}
                for group, numbers in zip(
                    state["optimizer"]["param_groups"], self._groups, strict=True
                )
            ]
            whole["optimizer"] = {"state": dict(sorted(moments.items())), "param_groups": groups}
        return whole

    def narrowed(self, state: State) -> State:
        """See :meth:`Strategy.narrowed`."""
        model, optimizer = state["model"], state["optimizer"]
        local = {number: index for index, number in enumerate(self._numbers)}
        groups = [
            {**group, "params": [local[number] for number in group["params"] if number in local]}
            for group in optimizer["param_groups"]
        ]
        moments = {
            local[number]: one for number, one in optimizer["state"].items() if number in local
        }
        return {
            **state,
            "model": self._own(model),
            "optimizer": {"state": moments, "param_groups": groups},
        }

    def load_on_all_ranks(self, module: nn.Module, weights: Mapping[str, Tensor] | None) -> None:
        """See :meth:`Strategy.load_on_all_ranks`."""
        if broadcast(weights is not None, self._ranks):
            if weights is not None:
                self._model.load_state_dict(weights)
            self._share_weights(dict.fromkeys(self._owner, 0))

    def close(self) -> None:
        """See :meth:`Strategy.close`."""
        self._share_weights(self._owner)
        self._model.to(self._ctx.device)

    def _own(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's weights, and those that the model does not have: loading refuses these."""
        rank = self._ctx.rank
        return {name: one for name, one in weights.items() if self._owner.get(name, rank) == rank}

    def _share_weights(self, owners: Mapping[str, int]) -> None:
        """Copy each tensor of the whole model from the rank that has it to all others."""
        import torch
        import torch.distributed as dist

        state = self._model.state_dict()
        for name, owner in owners.items():
            one = state[name]
            if isinstance(one, torch.Tensor):
                held = one.detach().to(self._ctx.device)
                dist.broadcast(held, src=owner)
                if held is not one:
                    one.copy_(held)


def make(ctx: RunContext, config: Config) -> Strategy:
    """The strategy."""
    return PipelineParallel(ctx, config)


# --- the division of the layers ---


def split(layers: Mapping[str, nn.Module], ranks: int) -> list[list[str]]:
    """Divide layers into ``ranks`` contiguous stages, the largest as small as possible, in bytes.

    A stage begins with a trained layer: each has something to train, and none begins with an
    activation that would write into the tensor that it receives.

    Args:
        layers: by name, in order.
        ranks: the number of stages.

    Raises:
        FitError: there are fewer trained layers, or two stages would share a parameter.
    """
    trained = [
        name for name, one in layers.items() if any(p.requires_grad for p in one.parameters())
    ]
    if len(trained) < ranks:
        raise FitError(
            f"distributed.strategy is pipeline on {ranks} ranks, and the model has {len(trained)} "
            "layers with trained parameters",
            allowed=_SEQUENTIAL,
            do=f"set distributed.world_size: {max(1, len(trained))}, or divide the model into more "
            "layers: nn.Sequential(*blocks)",
        )
    units: list[list[str]] = []
    for name in layers:
        if not units or (name in trained and any(one in trained for one in units[-1])):
            units.append([])
        units[-1].append(name)
    sizes = [sum(p.nbytes for name in unit for p in layers[name].parameters()) for unit in units]
    ends = _balanced(sizes, ranks)
    starts = [0, *ends[:-1]]
    stages = [
        [name for unit in units[start:end] for name in unit]
        for start, end in zip(starts, ends, strict=True)
    ]
    _refuse_shared(layers, stages)
    return stages


def _balanced(sizes: Sequence[int], parts: int) -> list[int]:
    """The ends of contiguous parts of ``sizes`` whose largest sum is smallest."""
    best: dict[int, tuple[int, list[int]]] = {
        end: (sum(sizes[:end]), [end]) for end in range(1, len(sizes) + 1)
    }
    for count in range(2, parts + 1):
        best = {
            end: min(
                (max(best[cut][0], sum(sizes[cut:end])), [*best[cut][1], end])
                for cut in range(count - 1, end)
            )
            for end in range(count, len(sizes) + 1)
        }
    return best[len(sizes)][1]


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of an ``nn.Sequential``, by name."""
    from torch import nn

    more = type(model).forward is not nn.Sequential.forward or model._parameters or model._buffers
    sequential = isinstance(model, nn.Sequential)
    if more or not sequential:
        what = "has more than layers" if sequential else "is no Sequential"
        raise FitError(
            f"distributed.strategy is pipeline, and this {type(model).__name__} {what}",
            allowed=_SEQUENTIAL,
            do="write the model as nn.Sequential(first, *blocks, last), or set "
            "distributed.strategy: fsdp",
        )
    return {name: one for name, one in model._modules.items() if one is not None}


def _refuse_shared(layers: Mapping[str, nn.Module], stages: Sequence[Sequence[str]]) -> None:
    seen: dict[object, tuple[int, str]] = {}
    for rank, stage in enumerate(stages):
        for layer in stage:
            for name, one in [*layers[layer].named_parameters(), *layers[layer].named_buffers()]:
                first, where = seen.setdefault(one, (rank, f"{layer}.{name}"))
                if first != rank:
                    raise FitError(
                        f"{where} and {layer}.{name} are one tensor, and distributed.strategy: "
                        f"pipeline would put it on the ranks {first} and {rank}",
                        allowed="layers that share no tensor with one of another rank",
                        do="give each layer its own, or set distributed.strategy: fsdp",
                    )


# --- steps ---


class PipelineTrainStep(TrainStep):
    """Makes the passes of all micro-batches of a step together, when the last of them has come."""

    def __init__(
        self, ctx: RunContext, config: Config, model: nn.Module, recipe: Recipe, *, steps: int
    ) -> None:
        if recipe.forward is not forward_pair:
            raise FitError(
                "step= is a function of your own, and distributed.strategy is pipeline, which "
                "passes the inputs of each batch through the layers itself",
                allowed="batches (inputs, targets), without step=",
                do="remove step=, or set distributed.strategy: fsdp or ddp",
            )
        super().__init__(ctx, config, model, recipe, steps=steps)
        self._rank, self._device = ctx.rank, ctx.device
        self.counts = self._is_last = ctx.rank == ctx.world_size - 1
        self._must_be_used = False  # each rank's own backward pass needs no other's parameters
        self._held: list[tuple[Batch, MicroBatch]] = []
        self._losses: list[BatchLoss] = []
        self._schedules: dict[tuple[object, ...], Any] = {}
        self._knows_reduction = False

    def close(self) -> None:
        """See :meth:`TrainStep.close`."""
        super().close()
        self._schedules.clear()
        self.module = self.strategy.whole(self.module)

    def evaluate(self, batch: Batch, samples: int) -> tuple[Batch, Batch, BatchLoss] | None:
        """See :meth:`TrainStep.evaluate`; the last rank alone has a result."""
        import torch

        inputs, targets = _pair(batch)
        with torch.no_grad():
            outputs = self._run(self._schedule(inputs, 1, trains=False), inputs)
            if not self._is_last:
                return None
            return self._evaluated(_same, (outputs, targets), samples)

    def _pass(self, batch: Batch, micro_batch: MicroBatch) -> BatchLoss:
        import torch

        self._held.append((batch, micro_batch))
        zero = torch.zeros((), device=self._device)
        if not micro_batch.last:
            return BatchLoss(zero, 0.0)
        self._losses, samples = [], sum(one.samples for _, one in self._held)
        for inputs, count in self._equal_sized():
            schedule = self._schedule(inputs[: len(inputs) // count], count, trains=True)
            self._run(schedule, inputs, target=torch.arange(count))
            self._held = self._held[count:]
        if not self._knows_reduction:
            reduction = gather_on_all(self.reduced_loss.reduction, self._ranks)[-1]
            self.reduced_loss.reduction = reduction
            self._knows_reduction = True
        if not self._is_last:
            return BatchLoss(zero, 0.0)
        loss = _mean(self._losses)
        weighted = self.reduced_loss.reduction is Reduction.WEIGHTED
        return loss._replace(weight=float(samples)) if weighted else loss

    def _equal_sized(self) -> Iterator[tuple[Tensor, int]]:
        """The inputs of micro-batches of one size in a row, joined, and how many they are.

        ``torch.distributed.pipelining`` cuts a batch into equal parts; the last step of an epoch
        may have a smaller one.
        """
        import torch

        while self._held:
            inputs = [_pair(batch)[0] for batch, _ in self._held]
            count = next((i for i, x in enumerate(inputs) if x.shape != inputs[0].shape), None)
            same = inputs[:count]
            yield torch.cat(same), len(same)

    def _loss_of(self, outputs: Tensor, index: Tensor) -> Tensor:
        """The loss of a micro-batch, as the backward pass takes it; on the last rank."""
        batch, micro_batch = self._held[int(index)]
        training_pass.samples = micro_batch.samples
        loss, scaled = self._loss(_same, (outputs, _pair(batch)[1]), micro_batch)
        self._losses.append(loss)
        return scaled

    def _schedule(self, inputs: Tensor, count: int, *, trains: bool) -> Any:
        """The schedule for ``count`` micro-batches such as ``inputs``; made once for each shape."""
        key = tuple(inputs.shape), inputs.dtype, count, trains
        if key not in self._schedules:
            self._schedules[key] = self._make_schedule(inputs, count, trains=trains)
        return self._schedules[key]

    def _make_schedule(self, inputs: Tensor, count: int, *, trains: bool) -> Any:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        received, sent = self._shapes(inputs)
        stage = PipelineStage(
            autocasting(self.module, self._autocast),
            self._rank,
            self._ranks,
            self._device,
            input_args=received.requires_grad_(trains and self._rank > 0),
            output_args=sent.requires_grad_(trains),
        )
        training: dict[str, Any] = (
            {"loss_fn": self._loss_of, "scale_grads": False} if trains else {}
        )
        if trains and count >= self._ranks:
            return Schedule1F1B(stage, count, **training)
        schedule = ScheduleGPipe(stage, max(count, self._ranks), **training)
        # torch 2.10 refuses fewer micro-batches than ranks here, too; GPipe works with any number.
        schedule._n_microbatches = count
        return schedule

    def _shapes(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What this rank receives and sends for ``inputs``: empty tensors; called by all ranks.

        One forward pass in evaluation mode, so that batch norms and random generators do not
        change (torch's own inference of the shapes passes a batch in training mode).
        """
        import torch

        modes = [(one, one.training) for one in self.module.modules()]
        self.module.eval()
        outputs = received = torch.zeros_like(inputs)
        found: object = None
        for rank in range(self._ranks):
            if rank == self._rank:
                with torch.no_grad(), self._autocast:
                    outputs = self.module(received)
                found = _meta(outputs)
            passed = gather_on_all(found, self._ranks)[rank]
            if not isinstance(passed, tuple):
                raise FitError(
                    f"the last layer of rank {rank} returns {passed}, and a pipeline passes one "
                    "tensor of real numbers on",
                    allowed=_SEQUENTIAL,
                    do="let the layers return one tensor, or set distributed.strategy: fsdp",
                )
            if rank + 1 == self._rank:
                shape, dtype = passed
                received = torch.zeros(shape, dtype=dtype, device=self._device)
        for one, mode in modes:
            one.training = mode
        return torch.empty_like(received), torch.empty_like(outputs)

    def _run(self, schedule: Any, inputs: Tensor, **more: Any) -> Any:
        """Pass a batch through all ranks; returns the outputs on the last rank in evaluation."""
        args = (inputs,) if self._rank == 0 else ()
        return schedule.step(*args, **(more if self._is_last else {}))


def check_torch() -> None:
    """Refuse a torch whose schedules always divide gradients by the number of micro-batches.

    Raises:
        FitError: it is older than 2.7.
    """
    import inspect

    import torch
    from torch.distributed.pipelining import ScheduleGPipe

    if "scale_grads" not in inspect.signature(ScheduleGPipe).parameters:
        raise FitError(
            f"distributed.strategy is pipeline, and torch {torch.__version__} is too old for it",
            allowed="torch 2.7 or newer, or another strategy",
            do="pip install -U torch, or set distributed.strategy: fsdp",
        )


def _pair(batch: Batch) -> tuple[Tensor, Batch]:
    """Inputs, one tensor, and targets of a batch."""
    import torch

    inputs, targets = forward_pair(cast("nn.Module", _same), batch)
    if isinstance(inputs, torch.Tensor):
        return inputs, targets
    raise FitError(
        f"the inputs of a batch are a {type(inputs).__name__}, and distributed.strategy: pipeline "
        "passes one tensor through the layers",
        allowed="batches (inputs, targets) whose inputs are one tensor",
        do="join the inputs to one tensor, or set distributed.strategy: fsdp",
    )


def _same(inputs: Any) -> Any:
    """Stands for the model where its outputs are there already."""
    return inputs


def _meta(outputs: object) -> tuple[tuple[int, ...], torch.dtype] | str:
    import torch

    if isinstance(outputs, torch.Tensor) and outputs.is_floating_point():
        return tuple(outputs.shape), outputs.dtype
    kind = f"whole numbers ({outputs.dtype})" if isinstance(outputs, torch.Tensor) else ""
    return kind or f"a {type(outputs).__name__}"


def _mean(losses: Sequence[BatchLoss]) -> BatchLoss:
    """The mean loss of all micro-batches of a step."""
    import torch

    device = losses[0].mean.device
    weights = [torch.as_tensor(one.weight, device=device).double() for one in losses]
    total = torch.stack(weights).sum()
    means = [one.mean.double() * weight for one, weight in zip(losses, weights, strict=True)]
    return BatchLoss(torch.stack(means).sum() / torch.where(total == 0, 1, total), total)
