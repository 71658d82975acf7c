"""Read checkpoints whose tensors are in parts, one file per rank.

The files are in the format safetensors, which holds no code: ``torch.distributed.checkpoint`` keeps
the place of each part in their headers. They are read without distributed code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from nbtoolkit.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "shards"
"""The folder in a checkpoint that holds the files."""

MODEL, OPTIMIZER = "model.", "optimizer."
"""Beginnings of the tensors' names: ``model.<name>``, ``optimizer.<number>.<name>``."""

Place: TypeAlias = tuple[slice, ...]
"""Where a part is in its tensor."""


@dataclass(frozen=True)
class Shards:
    """Tensors that all ranks have written to a temporary folder.

    Attributes:
        folder: becomes :data:`FOLDER` of a checkpoint.
        files: size and SHA-256 of each file, by name.
        error: why they could not be written; empty: they were.
    """

    folder: Path
    files: Mapping[str, Any]
    error: str = ""


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every whole tensor, by name.

    Raises:
        CheckpointError: a file is damaged, or safetensors is not installed.
    """
    found: dict[str, tuple[int, ...]] = {}
    for parts in _files(folder):
        for name, place, _ in parts:
            ends = tuple(part.stop for part in place)
            found[name] = tuple(map(max, zip(found.get(name, ends), ends, strict=True)))
    return found


def read_shards(folder: Path, prefix: str) -> dict[str, Tensor]:
    """The whole tensors whose names begin with ``prefix``, on the CPU, without it.

    Raises:
        CheckpointError: a file is damaged, or safetensors is not installed.
    """
    import torch

    sizes, whole = shapes(folder), dict[str, "Tensor"]()
    for parts in _files(folder):
        for name, place, read in parts:
            if name.startswith(prefix):
                part = read()
                short = name.removeprefix(prefix)
                if short not in whole:
                    whole[short] = torch.empty(sizes[name], dtype=part.dtype)
                whole[short][place] = part
    return whole


def with_tensors(optimizer: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """An optimizer's state with its tensors.

    Args:
        optimizer: ``state`` without tensors, and ``param_groups``.
        tensors: by ``<number>.<name>``.
    """
    state = {number: dict(values) for number, values in optimizer["state"].items()}
    for key, tensor in tensors.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = tensor
    return {**optimizer, "state": dict(sorted(state.items()))}


def _files(folder: Path) -> Iterator[list[tuple[str, Place, Any]]]:
    """Of each file the parts: name, place in the whole tensor, and a function that reads it."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"the checkpoint {folder.parent} is sharded, and safetensors, which reads it, is not "
            "installed",
            allowed="an environment with safetensors (accelerate needs it, too)",
            do="pip install safetensors",
        ) from error
    with _damage(folder, SafetensorError):
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                information = json.loads((opened.metadata() or {})["DCP_SHARDING_INFO"])
                yield [
                    (name, _place(information[name]["saved_offsets"], opened, name),
                     lambda name=name, opened=opened: opened.get_tensor(name))
                    for name in opened.keys()  # noqa: SIM118
                ]  # fmt: skip


def _place(offsets: list[int], opened: Any, name: str) -> Place:
    shape = opened.get_slice(name).get_shape()
    return tuple(slice(low, low + size) for low, size in zip(offsets, shape, strict=True))


@contextmanager
def _damage(folder: Path, kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except (kind, OSError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint {folder.parent} cannot be read: {type(error).__name__}: {error}",
            allowed="undamaged files that fit wrote, of all ranks",
            do="use another checkpoint of the run, or restore this one from a copy",
        ) from error
