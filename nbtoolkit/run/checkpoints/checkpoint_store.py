"""Write states atomically and without pickled code, and keep the checkpoints of a fit on disk.

    checkpoints/
      step-000001200/   model.pt  training.pt  manifest.json    everything needed to resume
      best-000000900/   model.pt  manifest.json                 the best epoch's weights
                        loss_parameters.pt                      those of a loss that is trained
      fit-2/            the same for the second fit of a training function

A checkpoint is written to a folder whose name begins with a dot, its manifest (sizes and SHA-256 of
the files) last, and then renamed: a kill at any moment leaves the earlier ones as they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias, TypedDict, cast

from nbtoolkit.errors import CheckpointError
from nbtoolkit.run.paths import (
    atomic_file,
    make_folder,
    put_in_place,
    read_or_empty,
    temporary_beside,
    write_json,
)

State: TypeAlias = dict[str, Any]
"""A state that was read: tensors, numbers, strings, and dicts, lists and tuples of them."""

_PLAIN = (str, int, float, bool, type(None))


def write_state(path: Path, state: Mapping[str, object]) -> None:
    """Write ``state`` to ``path`` atomically, and flush it to the disk.

    ``torch.load(path, weights_only=True)`` reads it.

    Raises:
        CheckpointError: the state holds something that is not a tensor or a plain value (names it),
            or the disk is full.
    """
    try:
        with atomic_file(path) as file:
            dump_state(state, file)
    except OSError as error:
        raise _cannot_write(path, error) from error


def dump_state(state: Mapping[str, object], file: Any) -> None:
    """Write ``state`` into an open file, in torch's format.

    Raises:
        CheckpointError: it holds something that is not a tensor or a plain value (names it).
        OSError: the file cannot be written.
    """
    import torch

    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"cannot save a {type(state).__name__} as a checkpoint: it is not a dict",
            allowed="a dict of tensors, numbers, strings, and dicts, lists, tuples of them",
            do='save {"model": model.state_dict()}',
        )
    plain = _plain(state, "state")
    try:
        torch.save(plain, file)
    except RuntimeError as error:  # how torch's zip writer reports a full disk
        raise OSError(str(error)) from error


def read_state(path: Path, *, mmap: bool = False) -> State:
    """Return the state that :func:`write_state` was given; tensors are on the CPU.

    Args:
        path: the file.
        mmap: map the tensors from the file instead of reading them (writes stay private).

    Raises:
        CheckpointError: the file is missing or damaged, or holds more than tensors and plain
            values.
    """
    import torch

    try:
        state: State = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch raises half a dozen types for a bad file
        raise CheckpointError(
            f"the checkpoint {path} cannot be read: {type(error).__name__}: {error}",
            allowed="an undamaged file of ctx.save or fit",
            do="use another file of the run (checkpoints/best.pt, checkpoints/last.pt)",
        ) from error
    return cast("State", _as_given(state))


def has_checkpoint(folder: Path) -> bool:
    """Whether a run's ``checkpoints`` folder has a checkpoint to resume from."""
    patterns = ("last.pt", "step-*/manifest.json", "fit-*/step-*/manifest.json")
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _plain(value: object, where: str) -> object:
    """``value`` as plain containers and tensors, without torch.compile's names.

    Raises where weights-only loading would fail.
    """
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        plain = {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
        return _without_compile(plain)
    if isinstance(value, (list, tuple)):
        items = [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        return torch.as_tensor(value)
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "cannot hold",
        allowed="tensors, numbers, strings, None, and dicts, lists, tuples of them",
        do="save its state_dict() or its plain values",
    )


_COMPILE_PREFIX = "_orig_mod."
_GIVEN_NAMES = "given_names"


def without_compile(name: str) -> str:
    """Return a parameter's name without what torch.compile puts before the names of a module."""
    return name.replace(_COMPILE_PREFIX, "")


def _without_compile(state: dict[Any, Any]) -> dict[Any, Any]:
    """Return a state with the names that a model has without torch.compile.

    Remembers the given ones.
    """
    names = [without_compile(key) if isinstance(key, str) else key for key in state]
    if names == list(state) or len(set(names)) < len(names):
        return state
    renamed: dict[Any, Any] = OrderedDict(zip(names, state.values(), strict=True))
    # As an attribute, so that torch.load returns nothing but the names of the plain model.
    setattr(renamed, _GIVEN_NAMES, list(state))
    return renamed


def _as_given(value: object) -> object:
    """Return a state as it was saved: the loop that saved it loads it into its compiled model."""
    if isinstance(value, dict):
        names = getattr(value, _GIVEN_NAMES, value)
        return {n: _as_given(item) for n, item in zip(names, value.values(), strict=True)}
    if isinstance(value, (list, tuple)):
        return type(value)(_as_given(item) for item in value)
    return value


Kind = Literal["step", "best"]

FORMAT = "nbtoolkit checkpoint 1"
_MANIFEST = "manifest.json"


class StoredFile(TypedDict):
    """Size and SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredCheckpoint:
    """One checkpoint with a readable manifest.

    Attributes:
        folder: its folder.
        step: optimizer steps done when it was saved.
        files: by name, those that the manifest lists.
    """

    folder: Path
    step: int
    files: Mapping[str, StoredFile]

    @classmethod
    def at(cls, folder: Path) -> StoredCheckpoint:
        """Return the checkpoint in ``folder``.

        Raises:
            CheckpointError: its manifest is missing, damaged, or of another format.
        """
        stored = _stored(folder)
        if stored is None:
            raise CheckpointError(
                f"{folder / _MANIFEST} cannot be read, or is not a checkpoint's",
                allowed=f"a folder that fit wrote ({FORMAT})",
                do="use another checkpoint of the run, or restore this one from a copy",
            )
        return stored

    def read(self, part: str) -> State:
        """Return the state in ``<part>.pt``, on the CPU.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        return read_state(self.folder / f"{part}.pt")

    def weights(self) -> State:
        """Return the weights of the model, and of a loss that was trained with it.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        weights = {"model": self.read("model")}
        if "loss_parameters.pt" in self.files:
            weights["loss_parameters"] = self.read("loss_parameters")
        return weights

    def damage(self) -> str:
        """Return the first file whose size or SHA-256 is wrong, as text; empty: all are right."""
        for name, file in self.files.items():
            path = self.folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != file["bytes"]:
                return f"{name} has {path.stat().st_size} bytes of {file['bytes']}"
            try:
                digest = _sha256(path)
            except OSError as error:
                return f"{name} cannot be read: {error.strerror}"
            if digest != file["sha256"]:
                return f"{name} is damaged: its SHA-256 differs"
        return ""


class CheckpointStore:
    """The checkpoints in one folder. One process writes; any process may read.

    Args:
        folder: created with the first checkpoint.
        keep: number of ``step`` checkpoints to keep, the newest ones; of ``best``, one is kept.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self._keep = keep

    def put(
        self,
        kind: Kind,
        step: int,
        parts: Mapping[str, Mapping[str, object]],
        fields: Mapping[str, object],
    ) -> Path:
        """Write a checkpoint atomically, then delete older ones.

        Args:
            kind: ``"step"`` to resume from, ``"best"`` to predict with.
            step: optimizer steps done.
            parts: file name (without ``.pt``) -> state of tensors and plain values.
            fields: further fields of the manifest, plain values.

        Raises:
            CheckpointError: the disk is full, or a state holds something else. The earlier
                checkpoints are unchanged.
        """
        make_folder(self.folder)
        building = temporary_beside(self.folder / "new-")
        try:
            building.mkdir()
            files = {f"{name}.pt": _write(building, name, state) for name, state in parts.items()}
            manifest = {"format": FORMAT, "kind": kind, "step": step, **fields, "files": files}
            write_json(building / _MANIFEST, manifest)
            folder = self._publish(building, self.folder / f"{kind}-{step:09d}")
        except OSError as error:
            raise _cannot_write(self.folder / f"{kind}-{step:09d}", error) from error
        finally:
            shutil.rmtree(building, ignore_errors=True)
        self._prune(kind, folder)
        return folder

    def entries(self, kind: Kind) -> list[StoredCheckpoint]:
        """Return the checkpoints whose manifest can be read, newest first."""
        stored = map(_stored, self._folders(kind))
        return [checkpoint for checkpoint in stored if checkpoint is not None]

    def good(self, kind: Kind) -> tuple[StoredCheckpoint | None, list[str]]:
        """Return the newest undamaged checkpoint, and the damage of each newer one.

        Raises:
            CheckpointError: there are checkpoints, and all of them are damaged.
        """
        damages: list[str] = []
        for folder in self._folders(kind):
            checkpoint = _stored(folder)
            damage = checkpoint.damage() if checkpoint else "its manifest cannot be read"
            if not damage:
                return checkpoint, damages
            damages.append(f"{folder.name}: {damage}")
        if damages:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged: {'; '.join(damages)}",
                allowed="an undamaged checkpoint",
                do="restore one from a copy, or launch with resume='never'",
            )
        return None, []

    def tidy(self) -> None:
        """Remove the unfinished folders of a killed writer."""
        for folder in self.folder.glob(".*-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _folders(self, kind: Kind) -> list[Path]:
        return sorted(self.folder.glob(f"{kind}-*"), reverse=True)

    def _publish(self, building: Path, folder: Path) -> Path:
        """Rename a finished checkpoint to its folder, replacing one of the same step."""
        replaced = building.with_name(building.name.replace("new", "old"))
        if folder.exists():  # a step repeated after a damaged or an older checkpoint
            os.rename(folder, replaced)
        put_in_place(building, folder)
        shutil.rmtree(replaced, ignore_errors=True)
        return folder

    def _prune(self, kind: Kind, newest: Path) -> None:
        """Delete old checkpoints, and those after ``newest``: the run has resumed before them."""
        folders = self._folders(kind)
        first = folders.index(newest)
        keep = folders[first : first + (self._keep if kind == "step" else 1)]
        for folder in set(folders) - set(keep):
            with contextlib.suppress(OSError):  # damaged: a folder in its place, or a file
                (folder / _MANIFEST).unlink()  # first, so that a kill leaves no partial checkpoint
            shutil.rmtree(folder, ignore_errors=True)


class _HashingFile:
    """A file that records the size and SHA-256 of its content.

    Keeps errors for :meth:`close`: torch's zip writer calls from C, which no exception can pass.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._size = 0
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        size = memoryview(data).nbytes
        try:
            if self._error is None:
                self._file.write(data)
        except OSError as error:
            self._error = error
        self._hash.update(data)
        self._size += size
        return size

    def flush(self) -> None:
        """For torch; :meth:`close` flushes."""

    def close(self) -> StoredFile:
        """Flush the file to disk; returns its entry for the manifest."""
        if self._error is not None:
            raise self._error
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self._size, "sha256": self._hash.hexdigest()}


def _write(folder: Path, name: str, state: Mapping[str, object]) -> StoredFile:
    with (folder / f"{name}.pt").open("wb") as file:
        hashing = _HashingFile(file)
        dump_state(state, hashing)
        return hashing.close()


def _stored(folder: Path) -> StoredCheckpoint | None:
    """Return the checkpoint in a folder.

    None: its manifest is missing, damaged or of another format.
    """
    manifest = read_or_empty(folder / _MANIFEST)
    step = manifest.get("step")
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(step, int) or not isinstance(files, dict):
        return None
    return StoredCheckpoint(folder, step, files)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} could not be written: {error.strerror or error}",
        allowed="a folder on a disk with free space (the earlier checkpoints are unchanged)",
        do="free some space, keep fewer checkpoints (checkpoint.keep_last), or set "
        "runtime.output_dir to another disk",
    )
