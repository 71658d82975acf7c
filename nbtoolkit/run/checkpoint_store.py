"""Save states as whole files without pickled code, and keep the checkpoints of one fit on disk.

    checkpoints/
      step-000001200/   model.pt  training.pt  manifest.json    everything to go on from
      best-000000900/   model.pt  manifest.json                 the best epoch's weights
      fit-2/            the same for the second fit of a training function

A checkpoint is built in a folder whose name begins with a dot, its manifest (sizes and SHA-256 of
the files) last, and then renamed: a kill at any moment leaves the earlier ones as they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from nbtoolkit.errors import CheckpointError
from nbtoolkit.run.paths import temporary_beside

# --- checkpoint ---
# One state on disk: written whole, without pickled code (``weights_only=True`` reads it).


_PLAIN = (str, int, float, bool, type(None))


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` to ``path``: temporary file beside it, fsync, ``os.replace``.

    Raises:
        CheckpointError: the state holds something that is not a tensor or a plain value (names it),
            or the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
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


# --- checkpoint store ---


Kind = Literal["step", "best"]

FORMAT = "nbtoolkit checkpoint 1"
_MANIFEST = "manifest.json"
_BLOCK = 2**20


@dataclass(frozen=True)
class StoredCheckpoint:
    """One checkpoint whose manifest could be read.

    Attributes:
        folder: where it lies.
        about: its manifest: ``format, step, files`` and what the writer added.
    """

    folder: Path
    about: dict[str, Any]

    @classmethod
    def at(cls, folder: Path) -> StoredCheckpoint:
        """The checkpoint in ``folder``.

        Raises:
            CheckpointError: its manifest is missing, damaged, or of another format.
        """
        about = _manifest(folder)
        if about is None:
            raise CheckpointError(
                f"{folder / _MANIFEST} cannot be read, or is not one of ours",
                allowed=f"a folder that fit wrote ({FORMAT})",
                do="use another checkpoint of the run, or put this one back from a copy",
            )
        return cls(folder, about)

    @property
    def step(self) -> int:
        """Optimizer steps done when it was saved."""
        return int(self.about["step"])

    def read(self, part: str) -> dict[str, Any]:
        """The state in ``<part>.pt``, on the CPU.

        Raises:
            CheckpointError: it is not there, or damaged.
        """
        return read_state(self.folder / f"{part}.pt")

    def damage(self) -> str:
        """What is wrong with its files, by size and SHA-256; empty: nothing is."""
        for name, file in self.about["files"].items():
            path = self.folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != file["bytes"]:
                return f"{name} has {path.stat().st_size} bytes of {file['bytes']}"
            try:
                digest = _hash(path)
            except OSError as error:
                return f"{name} cannot be read: {error.strerror}"
            if digest != file["sha256"]:
                return f"{name} is damaged: its SHA-256 differs"
        return ""


class CheckpointStore:
    """The checkpoints in one folder. One process writes; any may read.

    Args:
        folder: made with the first checkpoint.
        keep: how many of the newest ``step`` checkpoints stay; of ``best`` one does.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder, self._keep = folder, keep

    def put(
        self, kind: Kind, step: int, parts: Mapping[str, Mapping[str, Any]], about: dict[str, Any]
    ) -> Path:
        """Write a checkpoint whole, then take away what is older than wanted.

        Args:
            kind: ``"step"`` to go on from, ``"best"`` to predict with.
            step: optimizer steps done.
            parts: file name (without ``.pt``) -> state of tensors and plain values.
            about: plain values for the manifest.

        Raises:
            CheckpointError: the disk is full, or a state holds something else. What was there
                before is untouched.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        building = temporary_beside(self.folder / "new-")
        try:
            building.mkdir()
            files = {f"{name}.pt": _write(building, name, state) for name, state in parts.items()}
            manifest = {"format": FORMAT, "kind": kind, "step": step, **about, "files": files}
            _write_synced(building / _MANIFEST, json.dumps(manifest, indent=1).encode())
            place = self._place(building, self.folder / f"{kind}-{step:09d}")
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        finally:
            shutil.rmtree(building, ignore_errors=True)
        self._prune(kind, place)
        return place

    def entries(self, kind: Kind) -> list[StoredCheckpoint]:
        """The checkpoints whose manifest can be read, newest first."""
        folders = sorted(self.folder.glob(f"{kind}-*"), reverse=True)
        found = [(folder, _manifest(folder)) for folder in folders]
        return [StoredCheckpoint(folder, about) for folder, about in found if about is not None]

    def good(self, kind: Kind) -> tuple[StoredCheckpoint | None, list[str]]:
        """The newest undamaged checkpoint, and what is wrong with those newer than it.

        Raises:
            CheckpointError: there are checkpoints, and all of them are damaged.
        """
        wrong: list[str] = []
        for folder in sorted(self.folder.glob(f"{kind}-*"), reverse=True):
            about = _manifest(folder)
            damage = (
                StoredCheckpoint(folder, about).damage() if about else "its manifest cannot be read"
            )
            if about and not damage:
                return StoredCheckpoint(folder, about), wrong
            wrong.append(f"{folder.name}: {damage}")
        if wrong:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged: {'; '.join(wrong)}",
                allowed="one that is whole",
                do="put one back from a copy, or launch with resume='never'",
            )
        return None, []

    def tidy(self) -> None:
        """Remove what a killed writer left half-built."""
        for folder in self.folder.glob(".*-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _place(self, building: Path, place: Path) -> Path:
        """Give a whole checkpoint its name; one of the same step makes room."""
        if place.exists():  # a step taken again after a damaged or an older checkpoint
            os.rename(place, building.with_name(building.name.replace("new", "old")))
        os.rename(building, place)
        _sync_folder(self.folder)
        shutil.rmtree(building.with_name(building.name.replace("new", "old")), ignore_errors=True)
        return place

    def _prune(self, kind: Kind, newest: Path) -> None:
        """Take away what is old, and what is later than ``newest``: a future that was given up."""
        folders = sorted(self.folder.glob(f"{kind}-*"), reverse=True)
        place = folders.index(newest)
        keep = folders[place : place + (self._keep if kind == "step" else 1)]
        for folder in set(folders) - set(keep):
            with contextlib.suppress(OSError):  # damaged: a folder in its place, or a file
                (folder / _MANIFEST).unlink()  # no longer one, whatever comes
            shutil.rmtree(folder, ignore_errors=True)


class _Hashing:
    """A file that notes size and SHA-256 of what goes through it.

    Its errors are kept for :meth:`close`: torch's zip writer calls from C, where none may pass.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash, self._size = file, hashlib.sha256(), 0
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
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
        """For torch; the end is what counts."""

    def close(self) -> dict[str, Any]:
        """Have everything on disk; returns what the manifest says of the file."""
        if self._error is not None:
            raise self._error
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self._size, "sha256": self._hash.hexdigest()}


def _write(folder: Path, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    with (folder / f"{name}.pt").open("wb") as file:
        hashing = _Hashing(file)
        dump_state(state, hashing)
        return hashing.close()


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        if not (folder / _MANIFEST).is_file():  # a FIFO would be waited for
            return None
        about = json.loads((folder / _MANIFEST).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    known = isinstance(about, dict) and about.get("format") == FORMAT
    known = known and isinstance(about.get("files"), dict)
    return about if known else None


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in _blocks(file):
            digest.update(block)
    return digest.hexdigest()


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(_BLOCK):
        yield block


def _cannot_write(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"a checkpoint could not be written to {folder}: {error.strerror or error}",
        allowed="a folder on a disk with free space (the earlier checkpoints are untouched)",
        do="free some space, lower checkpoint.keep_last, or set runtime.output_dir to another disk",
    )
