"""Share the training of a model between the ranks of a fit, by DDP, DataParallel or FSDP."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from nbtoolkit.errors import FitError, PlanError, some_names
from nbtoolkit.training.model import (
    batch_norms,
    broadcast_buffers,
    find_blocks,
    half_precision,
    wrap_model,
)
from nbtoolkit.worker.collectives import broadcast

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    from nbtoolkit.config.schema import Config
    from nbtoolkit.run.checkpoints.checkpoint_store import State
    from nbtoolkit.worker.context import RunContext

_COMPILERS = ("torch._dynamo", "torch._inductor")


class HostState(dict[str, Any]):
    """A state in CPU memory that no training step changes: a checkpoint needs no copy of it."""


class Strategy:
    """One process, DDP, or DataParallel; a subclass replaces what differs in it.

    Every rank has all weights here, so rank 0 alone can validate, save and load.

    Args:
        ctx: the run's context.
        config: ``train`` and ``distributed``.

    Attributes:
        gathers: whether a checkpoint's state comes from all ranks; :meth:`gathered` is then called
            by all of them, at the same steps.
    """

    gathers = False

    def __init__(self, ctx: RunContext, config: Config) -> None:
        self._ctx = ctx
        self._config = config
        self._ranks = ctx.world_size

    def wrap(self, module: nn.Module, *, steps: int) -> nn.Module:
        """Return the model as a training step calls it; called once, before the optimizer is made.

        Args:
            module: what ``prepare_model`` returned; may be changed in place.
            steps: optimizer steps of the whole run.
        """
        return wrap_model(self._ctx, self._config, module, steps=steps)

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer of the wrapped model, before its first step."""

    def no_sync(self, model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Return what makes the contexts of passes whose gradients stay on this rank.

        These are all passes of a step but its last.

        Args:
            model: what :meth:`wrap` returned.
        """
        return nullcontext if self._ranks == 1 else cast("DistributedDataParallel", model).no_sync

    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> Tensor:
        """Scale the gradients down to ``max_norm``; return their norm before."""
        import torch

        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def grad_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Return the norm of the gradients."""
        return total_norm(
            [parameter.grad for parameter in parameters if parameter.grad is not None]
        )

    def translated(
        self, error: Exception, parameters: Mapping[str, nn.Parameter]
    ) -> FitError | None:
        """Return the error to raise for one of this strategy's in a step; None: it is not.

        Args:
            error: what the forward pass, the loss or the backward pass raised.
            parameters: those that are trained, by name, in the model's order.
        """
        text = str(error)
        if _UNFINISHED in text or _CHANGED in text:
            names = _names_in(text, list(parameters))
            return _unused_parameters(names, static_graph="static_graph" in text)
        return _of_compiler(error) if self._config.train.compile else None

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which a rank can call the module without the others."""
        return nullcontext()

    def gathered(self, state: State) -> State:
        """Return a training state as one process would have it.

        If :attr:`gathers`, it is a :class:`HostState`, empty on other ranks than 0.
        """
        return state

    def agreed(self, value: bool) -> bool:
        """Return rank 0's ``value`` if :attr:`gathers`, else this rank's."""
        return broadcast(value, self._ranks) if self.gathers else value

    def load_on_all_ranks(self, module: nn.Module, weights: Mapping[str, Tensor] | None) -> None:
        """Load rank 0's ``weights`` into the model on every rank; None there: its present ones."""
        import torch
        import torch.distributed as dist

        if weights is not None:
            module.load_state_dict(weights)
        if self._ranks > 1:
            for value in module.state_dict().values():
                if isinstance(value, torch.Tensor):
                    dist.broadcast(value, src=0)

    def close(self) -> None:
        """Leave the whole, plain model on each rank; called by all of them at the end."""


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all numbers of ``gradients`` together."""
    import torch  # torch.nn.utils.get_total_norm is public from torch 2.7 on only

    def norm(values: Tensor) -> Tensor:
        wide = torch.promote_types(values.dtype, torch.float32)  # half precision would overflow
        total: Tensor = torch.linalg.vector_norm(values, dtype=wide)
        return total

    return norm(torch.stack([norm(gradient) for gradient in gradients]))


def _of_compiler(error: Exception) -> FitError | None:
    """Return the error to raise for one of ``torch.compile``; None: it is another."""
    if not any(base.__module__.startswith(_COMPILERS) for base in type(error).__mro__):
        return None
    lines = (line.strip() for line in str(error).splitlines())
    reason = next((line for line in lines if line), "no reason")
    return FitError(
        f"torch.compile cannot compile this model here: {type(error).__name__}: {reason}",
        allowed="models that torch.compile can trace, where there is a C++ compiler (on a GPU: "
        "Triton)",
        do="set train.compile: false; an error in the model itself then shows plainly",
    )


_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_CHANGED = "Your training graph has changed in this iteration"


def refuse_unused(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters without a gradient after a backward pass under DDP.

    DDP reports them one step later, without names; the ranks may wait for each other by then.

    Raises:
        FitError: there are any; names them.
    """
    names = [name for name, parameter in parameters.items() if parameter.grad is None]
    if names:
        raise _unused_parameters(names, static_graph=False)


def _unused_parameters(names: Sequence[str], *, static_graph: bool) -> FitError:
    """Return the error for parameters not used in a step of several ranks.

    Args:
        names: of the parameters; empty: not known.
        static_graph: whether ``distributed.static_graph`` is set.
    """
    shown = some_names(names) or "(DDP does not say which)"
    promise = "; distributed.static_graph promised the same ones in every step"
    unset = "static_graph: false and " if static_graph else ""
    return FitError(
        f"parameters took no part in the loss of a training step, and the ranks wait for their "
        f"gradients: {shown}{promise if static_graph else ''}",
        allowed="models that use every trainable parameter in every step; other models only if "
        "distributed.find_unused_parameters is true",
        do=f"set distributed.{unset}find_unused_parameters: true (slower), or freeze them with "
        "requires_grad_(False)",
    )


def _names_in(text: str, names: Sequence[str]) -> list[str]:
    """Return the names behind "Parameter indices which did not receive grad for rank 1: 2 3"."""
    match = re.search(r"Parameter indices which did not receive grad for rank \d+:([ \d]+)", text)
    return [names[int(index)] for index in match[1].split()] if match else []


# FSDP2 (``torch.distributed.fsdp.fully_shard``), for ``nb.fit`` and ``ctx.prepare``. accelerate's
# plugin for FSDP is not used: on the CPU it trains with DDP, and does not say so (accelerate 1.15).
# The parameters are DTensors: each rank holds a part of their rows. Names and order of the
# parameters do not change. A checkpoint has whole tensors, as one process writes it: each rank
# gives its part, one tensor after the other, and rank 0 keeps them in CPU memory. See
# https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.


# Their state has other shapes than the parameters, or a step needs whole matrices.
_NOT_SHARDED = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
_NOT_THROUGH_FORWARD = (
    "got mixed torch.Tensor and DTensor",
    "FSDP requires running forward through the root module first",
)


class OutsideForward(FitError, AttributeError):
    """A step uses a part of a sharded model, whose weights are gathered in its forward only."""


class Fsdp(Strategy):
    """Each rank keeps a part of weights, gradients and optimizer state: ``strategy: fsdp``.

    Saving and loading are collectives; files are those of one process.
    """

    gathers = True

    def wrap(self, module: nn.Module, *, steps: int) -> nn.Module:
        """See :meth:`Strategy.wrap`; shards ``module`` in place.

        Raises:
            FitError: FSDP cannot shard it.
        """
        super().load_on_all_ranks(module, None)  # as DDP does: all start with rank 0's weights
        self._module = module
        self._sharded = ShardedModule(self._ctx, module)
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
        """See :meth:`Strategy.clip`.

        torch's ``clip_grad_norm_`` would exchange numbers on the gradients' device, which with
        offload is the CPU: NCCL cannot.
        """
        import torch

        norm = self.grad_norm(parameters)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        gradients = _local_gradients(parameters)
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
        return norm

    def grad_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """See :meth:`Strategy.grad_norm`."""
        import torch.distributed as dist

        squared = total_norm(_local_gradients(parameters)).to(self._ctx.device) ** 2
        dist.all_reduce(squared, group=self._sharded.group)
        return squared.sqrt()

    def translated(
        self, error: Exception, parameters: Mapping[str, nn.Parameter]
    ) -> FitError | None:
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
        return cast("State", whole) if self._ctx.is_main else HostState()

    def load_on_all_ranks(self, module: nn.Module, weights: Mapping[str, Tensor] | None) -> None:
        """See :meth:`Strategy.load_on_all_ranks`."""
        import torch

        if not broadcast(weights is not None, self._ranks):
            return  # the present ones are equal on all ranks
        if weights is None:
            state = module.state_dict()
            weights = {
                name: torch.empty(value.shape, dtype=value.dtype)
                if hasattr(value, "shape")
                else value
                for name, value in state.items()
            }
        module.load_state_dict(weights)
        broadcast_buffers(module, self._ranks)

    def close(self) -> None:
        """See :meth:`Strategy.close`."""
        self._sharded.make_plain()


def forward_only(module: nn.Module) -> nn.Module:
    """Return a module that passes calls on, and refuses the use of parts of ``module``."""
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


def _outside_forward(part: str) -> OutsideForward:
    return OutsideForward(
        f"the step uses {part} outside of the model's forward, and distributed.strategy: fsdp "
        "gathers the weights only there",
        allowed="a step that calls model(...) itself",
        do="move this into the model's forward (an argument can choose the path), or set "
        "distributed.strategy: ddp",
    )


def _local_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return this rank's parts of the gradients."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [cast("DTensor", gradient).to_local() for gradient in gradients]


class ShardedModule:
    """A module whose parameters are sharded, in units of its repeated layers.

    A unit's parameters are gathered for its forward and its backward pass only. Loading a plain
    ``state_dict`` into the module works on all ranks together: each takes its part of rank 0's.

    Args:
        ctx: the run's context; ``fsdp`` of its plan says how the module is divided. In half
            precision, units with batch norms keep the type of their parameters; gradients are
            reduced in float32.
        module: changed in place; on its device, equal on all ranks.

    Attributes:
        units: the number of units besides the rest of the module.
        group: the ranks that hold the parts of a parameter.

    Raises:
        FitError: FSDP cannot shard the module.
    """

    def __init__(self, ctx: RunContext, module: nn.Module) -> None:
        import torch

        if ctx.device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
            raise FitError(
                f"distributed.strategy is fsdp, and torch {torch.__version__} has it on GPUs only",
                allowed="torch 2.7 or newer on the CPU",
                do="pip install -U torch, or set distributed.strategy: ddp",
            )
        self._module = module
        self._reshards = ctx.plan.fsdp["reshard_after_forward"]
        self._plain = [(part, type(part), _attributes(part)) for part in module.modules()]
        blocks = [block for block in find_blocks(module) if block is not module]
        self.units = len(blocks)
        mesh = _mesh(ctx)
        self.group = mesh.get_group(mesh.ndim - 1)
        try:
            for unit in (*blocks, module):
                _fully_shard(ctx, unit, mesh)
        except (AssertionError, ValueError, NotImplementedError, RuntimeError) as error:
            raise FitError(
                f"FSDP cannot shard this {type(module).__name__}: {error}",
                allowed="models that torch.distributed.fsdp.fully_shard takes: no scalar "
                "parameters, none shared between two of the repeated layers",
                do="set distributed.strategy: ddp, or change the model",
            ) from error
        check_sharded(module)
        module.register_load_state_dict_pre_hook(_distribute_weights)

    def unshard(self) -> None:
        """Gather all parameters, until :meth:`reshard`: a forward pass then has no collective."""
        root = cast("FSDPModule", self._module)
        root.set_reshard_after_forward(False)
        for unit in self._units():
            unit.unshard()

    def reshard(self) -> None:
        """Undo :meth:`unshard`."""
        root = cast("FSDPModule", self._module)
        root.set_reshard_after_forward(self._reshards)
        # The backward pass begins with the root's own parameters.
        root.set_reshard_after_forward(False, recurse=False)
        for unit in self._units():
            unit.reshard()

    def make_plain(self) -> None:
        """Make the module what it was, with all weights on every rank; a collective."""
        from torch import nn
        from torch.distributed._composable_state import _module_state_mapping

        whole = {
            id(parameter): nn.Parameter(_whole(cast("DTensor", parameter)), parameter.requires_grad)
            for parameter in self._module.parameters()
        }
        for module, kind, attributes in self._plain:
            # FSDP refuses a module that it knows; torch has no public way to undo it.
            _module_state_mapping.pop(module, None)
            module.__class__ = kind
            for name in [name for name in vars(module) if name not in attributes]:
                del module.__dict__[name]
            hooks = {name: value for name, value in attributes.items() if value is not None}
            module.__dict__.update(hooks)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = whole[id(parameter)]

    def _units(self) -> list[FSDPModule]:
        from torch.distributed.fsdp import FSDPModule

        return [module for module in self._module.modules() if isinstance(module, FSDPModule)]


def check_sharded(module: nn.Module) -> None:
    """Refuse a module with a parameter that is not sharded.

    Raises:
        FitError: names the first one.
    """
    from torch.distributed.tensor import DTensor

    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            raise FitError(
                f"the parameter {name} is not sharded: it is a {type(parameter).__name__}",
                allowed="FSDP2 of this torch, which makes every parameter a DTensor",
                do="set distributed.strategy: ddp, and report this with the version of torch",
            )


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Prepare an optimizer over sharded parameters.

    It then takes a plain state, if all ranks load it together. Of the fused kernels, those of Adam
    and AdamW alone can work on DTensors (torch 2.13).
    """
    if not type(optimizer).__name__.startswith("Adam"):
        for group in optimizer.param_groups:
            if group.get("fused"):
                group["fused"] = False
        # A fused kernel takes the loss scale of fp16; for any other the scaler divides by it.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    optimizer.register_load_state_dict_pre_hook(_distribute_state)


def gathered(value: Any, *, keep: bool) -> Any:
    """Return a nested state with whole tensors on the CPU in place of sharded ones; a collective.

    The ranks' device has one whole tensor at a time. The result shares no memory with ``value``.

    Args:
        value: dicts, lists, tuples, tensors and plain values; equal in structure on all ranks.
        keep: whether this rank needs the result; else its whole tensors are dropped at once.
    """
    import torch
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        whole = _whole(value)
        if not keep:
            return None
        # With a single shard, torch returns this rank's part itself.
        alone = whole.data_ptr() == value.to_local().data_ptr()
        return whole.to("cpu", copy=alone)
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True) if keep else None
    if isinstance(value, Mapping):
        return HostState({key: gathered(item, keep=keep) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        items = [gathered(item, keep=keep) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _whole(tensor: DTensor) -> Tensor:
    """Return the whole tensor, on the ranks' device; with offload its parts are on the CPU."""
    return cast("DTensor", tensor.detach().to(tensor.device_mesh.device_type)).full_tensor()


def _mesh(ctx: RunContext) -> DeviceMesh:
    """Return the ranks in one row; or, as replicas of shards, in one row per replica."""
    from torch.distributed.device_mesh import init_device_mesh

    replicas = ctx.plan.fsdp["replicas"]
    names = ("replicas", "shards")
    if replicas == 1:
        return init_device_mesh(ctx.device.type, (ctx.world_size,), mesh_dim_names=names[1:])
    shape = replicas, ctx.world_size // replicas
    return init_device_mesh(ctx.device.type, shape, mesh_dim_names=names)


def _fully_shard(ctx: RunContext, unit: nn.Module, mesh: DeviceMesh) -> None:
    import torch
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    half = half_precision(ctx)
    precision = MixedPrecisionPolicy()
    if half is not None and not batch_norms(unit):
        precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    fully_shard(
        unit,
        mesh=mesh,
        reshard_after_forward=ctx.plan.fsdp["reshard_after_forward"],
        mp_policy=precision,
        offload_policy=CPUOffloadPolicy() if ctx.plan.fsdp["offload"] else OffloadPolicy(),
    )


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the names of a module's attributes, with copies of its hooks; None for all others."""
    return {
        name: copy.copy(value) if "_hooks" in name else None for name, value in vars(module).items()
    }


def _distribute_weights(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if (value := state.get(prefix + name)) is not None:
            state[prefix + name] = _distributed(value, parameter)


def _distribute_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    current = optimizer.param_groups
    saved = state["param_groups"]
    parameters = {
        number: parameter
        # load_state_dict refuses other lengths.
        for mine, group in zip(current, saved, strict=False)
        for parameter, number in zip(mine["params"], group["params"], strict=False)
    }
    groups = [
        {**group, "fused": mine["fused"]} if "fused" in mine else group
        for mine, group in zip(current, saved, strict=False)
    ]
    sharded = {
        number: {
            name: _distributed(value, parameters.get(number)) for name, value in values.items()
        }
        for number, values in state["state"].items()
    }
    return {"state": sharded, "param_groups": [*groups, *saved[len(groups) :]]}


def _distributed(value: Any, like: Tensor | None) -> Any:
    """Return this rank's part of rank 0's ``value``, sharded as ``like``.

    Unchanged if the shapes differ.

    Unequal shapes are for ``load_state_dict`` to refuse, or a step count and the like.
    """
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if not plain or not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    # A copy: with one row per rank and more, parts would be views of a file in memory.
    device = like.device_mesh.device_type
    part = distribute_tensor(value.to(device), like.device_mesh, like.placements)
    return part.to(like.device)  # with offload, the CPU


def rebind(
    optimizers: Iterable[torch.optim.Optimizer],
    before: Sequence[nn.Parameter],
    after: Sequence[nn.Parameter],
) -> None:
    """Give ``optimizers`` the parameters ``after`` in place of ``before``, one by one."""
    new = dict(zip(before, after, strict=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new.get(parameter, parameter) for parameter in group["params"]]
        prepare_optimizer(optimizer)


def shard_inputs(ctx: RunContext, objects: Sequence[object]) -> None:
    """Shard the models among the objects of ``ctx.prepare``, and rebind their optimizers.

    Raises:
        PlanError: an optimizer has made steps already, or a model comes without its optimizer.
        FitError: FSDP cannot shard a model.
    """
    from torch import nn
    from torch.optim import Optimizer

    models = [item for item in objects if isinstance(item, nn.Module)]
    optimizers = [item for item in objects if isinstance(item, Optimizer)]
    if any(optimizer.state for optimizer in optimizers):
        raise PlanError(
            "an optimizer has made steps before ctx.prepare, and distributed.strategy: fsdp "
            "replaces its parameters",
            allowed="a new optimizer, in the same ctx.prepare as its model",
            do="load its state after ctx.prepare: optimizer.load_state_dict(...)",
        )
    for model in models:
        Strategy(ctx, ctx.config).load_on_all_ranks(model.to(ctx.device), None)
        before = list(model.parameters())
        ShardedModule(ctx, model)
        rebind(optimizers, before, list(model.parameters()))


def gather_state(ctx: RunContext, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what ``ctx.save`` writes: ``state`` with whole tensors on rank 0; a collective."""
    return cast("Mapping[str, Any]", gathered(state, keep=ctx.is_main))
