"""Checkpoints of ``fsdp`` in parts: each rank writes and reads its own, no rank gathers the state.

``torch.distributed.checkpoint`` with the format safetensors, whose files hold tensors and their
places only. DCP's own format has a pickled file, and a checkpoint must not run code when it is
read. What is no tensor is in ``training.pt``, written by rank 0. See
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import FitError
from nbtoolkit.run.checkpoints.checkpoint_store import StoredCheckpoint, stored_file
from nbtoolkit.run.checkpoints.shards import FOLDER, MODEL, OPTIMIZER, Shards, shapes, with_tensors
from nbtoolkit.run.checkpoints.weights import fitting_weights
from nbtoolkit.run.paths import temporary_beside
from nbtoolkit.worker.collectives import broadcast, gather_on_all

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nbtoolkit.training.train_state import State
    from nbtoolkit.worker.context import RunContext

_LARGE = 1e9  # bytes: `auto` writes parts from here on


def can_write_parts() -> bool:
    """Whether this torch can write and read them: 2.8 and newer."""
    import torch.distributed.checkpoint as dcp

    writer = getattr(dcp, "HuggingFaceStorageWriter", None)
    return writer is not None and "save_distributed" in signature(writer).parameters


def writes_parts(setting: str, module: nn.Module, *, able: bool) -> bool:
    """Whether checkpoints of ``module`` are to be in parts.

    Args:
        setting: ``checkpoint.format``.
        module: with all parameters.
        able: whether this torch can.

    Raises:
        FitError: they are to be, and this torch cannot.
    """
    if setting == "sharded" and not able:
        import torch

        raise FitError(
            f"checkpoint.format is sharded, and torch {torch.__version__} cannot write such files",
            allowed="torch 2.8 or newer, or checkpoint.format: whole",
            do="set checkpoint.format: whole, or pip install -U torch",
        )
    weights = sum(one.numel() * one.element_size() for one in module.parameters())
    return setting == "sharded" or (setting == "auto" and able and 3 * weights >= _LARGE)


def written(ctx: RunContext, state: State) -> State:
    """Write the tensors of ``state`` in parts; a collective.

    Args:
        ctx: the run's context.
        state: ``model``, and a state to resume from if it has an ``optimizer``.

    Returns:
        On rank 0 the state, with :class:`Shards` as its model and without the optimizer's tensors;
        empty on the others.
    """
    import torch
    from torch.distributed.tensor import DTensor

    tensors = {f"{MODEL}{name}": one for name, one in state["model"].items()}
    rest: dict[Any, dict[str, Any]] = {}
    for number, values in state.get("optimizer", {"state": {}})["state"].items():
        rest[number] = {}
        for name, one in values.items():
            if isinstance(one, torch.Tensor):
                tensors[f"{OPTIMIZER}{number}.{name}"] = one
            else:
                rest[number][name] = one
    if not ctx.is_main:  # a batch norm's statistics are each rank's own: rank 0's count
        tensors = {name: one for name, one in tensors.items() if isinstance(one, DTensor)}
    parts = _write(ctx, tensors)
    if not ctx.is_main:
        return {}
    whole: State = {**state, "model": parts}
    if "optimizer" in state:
        whole["optimizer"] = {**state["optimizer"], "state": rest}
    return whole


def _write(ctx: RunContext, tensors: Mapping[str, Tensor]) -> Shards:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    hidden = temporary_beside(ctx.paths.checkpoints / "shards-") if ctx.is_main else None
    folder = broadcast(hidden, ctx.world_size)
    assert folder is not None
    error, own = "", {}
    try:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(dict(tensors), storage_writer=writer)
        # Written by this rank, which need not read the files of others.
        mine = f"shard-{ctx.rank + 1:05d}-*"
        own = {file.name: stored_file(file) for file in folder.glob(mine)}
    except (OSError, CheckpointException) as failure:
        error = str(failure) or type(failure).__name__
    found = gather_on_all((own, error), ctx.world_size)
    error = next((text for _, text in found if text), "")
    if error and ctx.is_main:
        shutil.rmtree(folder, ignore_errors=True)
    files = {name: file for files, _ in found for name, file in files.items()}
    return Shards(folder, files, error.strip().splitlines()[-1] if error else "")


def read_parts(
    stored: StoredCheckpoint, training: State, module: nn.Module, optimizer: torch.optim.Optimizer
) -> State:
    """The state to resume from, of which each rank reads its own parts; a collective.

    Args:
        stored: a checkpoint in parts, of any number of ranks.
        training: its part of this name.
        module: sharded; its weights are overwritten.
        optimizer: of it.

    Raises:
        CheckpointError: it is another model's, or damaged.
    """
    import torch
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    folder = stored.folder / FOLDER
    sizes = shapes(folder)
    saved = {
        name.removeprefix(MODEL): torch.empty(size, device="meta")
        for name, size in sizes.items()
        if name.startswith(MODEL)
    }
    fitting_weights(saved, module, source=str(stored.folder))
    weights = module.state_dict()
    targets = {f"{MODEL}{name}": one for name, one in weights.items()}
    held = [one for group in optimizer.param_groups for one in group["params"]]
    moments: dict[str, Tensor] = {}
    for key, size in sizes.items():
        if key.startswith(OPTIMIZER):
            name = key.removeprefix(OPTIMIZER)
            number = int(name.partition(".")[0])
            like = held[number] if number < len(held) else None
            if like is not None and tuple(like.shape) == size:
                moments[name] = torch.zeros_like(like)
            else:
                moments[name] = torch.zeros(size)
            targets[key] = moments[name]
    with torch.no_grad():
        load(targets, storage_reader=HuggingFaceStorageReader(str(folder)))
    return {
        **training,
        "model": weights,
        "optimizer": with_tensors(training["optimizer"], moments),
    }
