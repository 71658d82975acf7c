"""Shard a module over the ranks by FSDP2, gather what is sharded, and make the module plain again.

See https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html. The parameters are
DTensors: each rank holds a part of their rows. Names and order of the parameters do not change.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from nbtoolkit.errors import FitError
from nbtoolkit.training.model import batch_norms, find_blocks

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


class ShardedModule:
    """A module whose parameters are sharded, in units of its repeated layers.

    A unit's parameters are gathered for its forward and its backward pass only. Loading a plain
    ``state_dict`` into the module works on all ranks together: each takes its part of rank 0's.

    Args:
        module: changed in place; on its device, equal on all ranks.
        device: the type of the device, ``"cpu"`` or ``"cuda"``.
        ranks: the number of ranks.
        half: the type of the forward and backward passes; None: that of the parameters. Units with
            batch norms keep the type of their parameters; gradients are reduced in float32.

    Attributes:
        units: the number of units besides the rest of the module.

    Raises:
        FitError: FSDP cannot shard the module.
    """

    def __init__(
        self, module: nn.Module, *, device: str, ranks: int, half: torch.dtype | None
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self._module = module
        self._plain = [(one, type(one), _attributes(one)) for one in module.modules()]
        blocks = [one for one in find_blocks(module) if one is not module]
        self.units = len(blocks)
        mesh = init_device_mesh(device, (ranks,))
        try:
            for unit in (*blocks, module):
                _shard(unit, mesh, half)
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
        root.set_reshard_after_forward(True)
        # The backward pass begins with the root's own parameters.
        root.set_reshard_after_forward(False, recurse=False)
        for unit in self._units():
            unit.reshard()

    def make_plain(self) -> None:
        """Make the module what it was, with all weights on every rank; a collective."""
        from torch import nn
        from torch.distributed._composable_state import _module_state_mapping

        whole = {
            id(one): nn.Parameter(cast("DTensor", one).full_tensor(), one.requires_grad)
            for one in self._module.parameters()
        }
        for module, kind, attributes in self._plain:
            # FSDP refuses a module that it knows; torch has no public way to undo it.
            _module_state_mapping.pop(module, None)
            module.__class__ = kind
            for name in [name for name in vars(module) if name not in attributes]:
                del module.__dict__[name]
            hooks = {name: value for name, value in attributes.items() if value is not None}
            module.__dict__.update(hooks)
            for name, one in module._parameters.items():
                if one is not None:
                    module._parameters[name] = whole[id(one)]

    def _units(self) -> list[FSDPModule]:
        from torch.distributed.fsdp import FSDPModule

        return [one for one in self._module.modules() if isinstance(one, FSDPModule)]


def check_sharded(module: nn.Module) -> None:
    """Refuse a module with a parameter that is not sharded.

    Raises:
        FitError: names the first one.
    """
    from torch.distributed.tensor import DTensor

    for name, one in module.named_parameters():
        if not isinstance(one, DTensor):
            raise FitError(
                f"the parameter {name} is not sharded: it is a {type(one).__name__}",
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
    optimizer.register_load_state_dict_pre_hook(_distribute_state)


def gathered(value: Any, *, keep: bool) -> Any:
    """A nested state with whole tensors on the CPU in place of sharded ones; a collective.

    Args:
        value: dicts, lists, tuples, tensors and plain values; equal in structure on all ranks.
        keep: whether this rank needs the result; else its whole tensors are dropped at once.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        whole = cast("DTensor", value.detach()).full_tensor()
        return whole.cpu() if keep else None
    if isinstance(value, Mapping):
        return {key: gathered(item, keep=keep) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [gathered(item, keep=keep) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _shard(unit: nn.Module, mesh: DeviceMesh, half: torch.dtype | None) -> None:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if half is not None and not batch_norms(unit):
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    fully_shard(unit, mesh=mesh, mp_policy=policy)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The names of a module's attributes, with copies of its hooks; None for all others."""
    return {
        name: copy.copy(value) if "_hooks" in name else None for name, value in vars(module).items()
    }


def _distribute_weights(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for name, one in module.named_parameters(remove_duplicate=False):
        if (value := state.get(prefix + name)) is not None:
            state[prefix + name] = _distributed(value, one)


def _distribute_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    own, saved = optimizer.param_groups, state["param_groups"]
    parameters = {
        number: one
        for mine, group in zip(own, saved, strict=False)  # load_state_dict refuses other lengths
        for one, number in zip(mine["params"], group["params"], strict=False)
    }
    groups = [
        {**group, "fused": mine["fused"]} if "fused" in mine else group
        for mine, group in zip(own, saved, strict=False)
    ]
    sharded = {
        number: {name: _distributed(value, parameters.get(number)) for name, value in one.items()}
        for number, one in state["state"].items()
    }
    return {"state": sharded, "param_groups": [*groups, *saved[len(groups) :]]}


def _distributed(value: Any, like: Tensor | None) -> Any:
    """This rank's part of rank 0's ``value``, sharded as ``like``; unchanged if the shapes differ.

    Unequal shapes are for ``load_state_dict`` to refuse, or a step count and the like.
    """
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if not plain or not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    # A copy: with one row per rank and more, parts would be views of a file in memory.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def rebind(
    optimizers: Iterable[torch.optim.Optimizer],
    before: Sequence[nn.Parameter],
    after: Sequence[nn.Parameter],
) -> None:
    """Give ``optimizers`` the parameters ``after`` in place of ``before``, one by one."""
    new = dict(zip(before, after, strict=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new.get(one, one) for one in group["params"]]
        prepare_optimizer(optimizer)
