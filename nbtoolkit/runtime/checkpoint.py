"""One state on disk: written whole, without pickled code (``weights_only=True`` reads it)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbtoolkit.errors import CheckpointError
from nbtoolkit.runtime.paths import unused_beside

_PLAIN = (str, int, float, bool, type(None))


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` to ``path``: temporary file beside it, fsync, ``os.replace``.

    Raises:
        CheckpointError: the state holds something that is not a tensor or a plain value (names it),
            or the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = unused_beside(path)
    try:
        with temporary.open("xb") as file:
            dump_state(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path} could not be written: {error}",
            allowed="a folder on a disk with free space (the last good checkpoint is untouched)",
            do="free some space, save fewer checkpoints, or set runtime.output_dir to another disk",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def dump_state(state: Mapping[str, Any], file: Any) -> None:
    """Write ``state`` into an open file, in torch's format.

    Raises:
        CheckpointError: it holds something that is not a tensor or a plain value (names it).
        OSError: the file cannot be written.
    """
    import torch

    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"a checkpoint was to be made of a {type(state).__name__}, not a dict",
            allowed="a dict of tensors, numbers, strings, and dicts, lists, tuples of them",
            do='save {"model": model.state_dict()}',
        )
    plain = _plain(state, "state")
    try:
        torch.save(plain, file)
    except RuntimeError as error:  # how torch's zip writer reports a full disk
        raise OSError(str(error)) from error


def read_state(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Read what :func:`write_state` wrote, on the CPU.

    Args:
        path: the file.
        mmap: map the tensors from the file instead of reading them (writes to them stay private).

    Raises:
        CheckpointError: the file is missing or damaged, or holds more than tensors and plain
            values.
    """
    import torch

    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch raises half a dozen types for a bad file
        raise CheckpointError(
            f"the checkpoint {path} cannot be read: {type(error).__name__}: {error}",
            allowed="a file written by ctx.save or fit, whole",
            do="use another one of the run's folder (checkpoints/best.pt, checkpoints/last.pt)",
        ) from error
    return state


def has_checkpoint(folder: Path) -> bool:
    """Whether a run's ``checkpoints`` folder has something to go on from (ctx.save's, or fit's)."""
    patterns = ("last.pt", "step-*/manifest.json", "fit-*/step-*/manifest.json")
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _plain(value: Any, where: str) -> Any:
    """``value`` of plain containers and tensors; raises for what weights-only loading refuses."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biuf":
        return torch.as_tensor(value)
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}: "
        "a checkpoint cannot hold that",
        allowed="tensors, numbers, strings, None, and dicts, lists, tuples of them",
        do="save its state_dict() or its plain values",
    )
