"""Decide when a checkpoint is due, copy it to the CPU, and write it beside the training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from nbtoolkit.environment.resources import free_space, size_text
from nbtoolkit.errors import CheckpointError
from nbtoolkit.host import detect_host
from nbtoolkit.run.checkpoint_store import CheckpointStore, Kind, StoredCheckpoint
from nbtoolkit.training.step import TrainStep

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nbtoolkit.config.schema import Config
    from nbtoolkit.worker.context import RunContext


# --- copies on the CPU ---
# A state's tensors copied to the CPU, into memory that the next copy uses again.


class HostCopy:
    """Copies of nested states; the last one is overwritten by the next :meth:`take`.

    Fresh memory would cost more than the copy itself: 47 ms against 6 ms for 100 MB (page faults).
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of ``state`` (dicts, lists, tensors, plain values), its tensors on the CPU.

        The only time that training waits for a checkpoint.
        """
        import torch

        copy: dict[str, Any] = self._copy(state, "")
        if any(tensor.is_pinned() for tensor in self._memory.values()):
            torch.cuda.synchronize()
        return copy

    def _copy(self, value: Any, where: str) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            return self._to_memory(value.detach(), where)
        if isinstance(value, Mapping):
            return {key: self._copy(item, f"{where}/{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            items = [self._copy(item, f"{where}/{i}") for i, item in enumerate(value)]
            return tuple(items) if isinstance(value, tuple) else items
        return value

    def _to_memory(self, tensor: Tensor, where: str) -> Tensor:
        import torch

        memory = self._memory.get(where)
        if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
            pinned = tensor.is_cuda
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._memory[where] = memory
        return memory.copy_(tensor, non_blocking=tensor.is_cuda)


# --- writing ---
# Puts checkpoints on the checkpoint store beside the training, one after the other.


class AsyncCheckpointWriter:
    """A thread that writes while the step loop goes on; both hold the GIL for moments only.

    Args:
        store: where the checkpoints go.
        on_saved: called (in the thread) with path, step and kind of each one that is there.

    Attributes:
        seconds: how long the last write took; 0 before the first.
    """

    def __init__(self, store: CheckpointStore, on_saved: Callable[[Path, int, Kind], None]) -> None:
        self._store, self._on_saved = store, on_saved
        self._thread: threading.Thread | None = None
        self._failure: tuple[Kind, Exception] | None = None
        self.seconds = 0.0

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written: its state must stay as it is."""
        return self._thread is not None and self._thread.is_alive()

    def put(
        self, kind: Kind, step: int, parts: Mapping[str, Mapping[str, Any]], about: dict[str, Any]
    ) -> None:
        """Begin to write a checkpoint, after the one before. See :meth:`CheckpointStore.put`.

        ``parts`` must stay as they are until :attr:`busy` is false.
        """
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(kind, step, parts, about), name="nbtoolkit-writer"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until what was begun is written, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def failure(self) -> tuple[Kind, Exception] | None:
        """What could not be written since the last call, and why; None: all is there."""
        failure, self._failure = self._failure, None
        return failure

    def _write(
        self, kind: Kind, step: int, parts: Mapping[str, Mapping[str, Any]], about: dict[str, Any]
    ) -> None:
        start = time.monotonic()
        try:
            path = self._store.put(kind, step, parts, about)
        except (CheckpointError, OSError) as error:
            self._failure = kind, error
        else:
            self._on_saved(path, step, kind)
        self.seconds = time.monotonic() - start


# --- disk space ---
# How large checkpoints will be, before the first step: the disk is looked at then.


# Copies of the weights that torch's optimizers keep in their state, with the usual settings.
_COPIES = {"SGD": 1, "RMSprop": 1, "Adagrad": 1}
_MOST = 2  # Adam and all that descend from it


def expected_bytes(train_step: TrainStep) -> tuple[int, int]:
    """Bytes of the weights, and of everything to go on from (an estimate from the optimizer)."""
    weights = _size(train_step.module)
    trained = sum(p.nbytes for p in train_step.module.parameters() if p.requires_grad)
    copies = _COPIES.get(type(train_step.optimizer).__name__, _MOST)
    averaged = (
        2 * weights if train_step.averages is not None else 0
    )  # to go on from, to predict with
    return weights, weights + copies * trained + averaged


def _size(module: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.state_dict().values())


# --- the manager ---


State = dict[str, Any]
_Pending = tuple[int, Mapping[str, State], State]  # step, state by file, words for the manifest

# A best epoch's weights are copied at once, and written when the last write is so many times its
# own duration ago: epochs may take milliseconds, and writing then takes 3% of the time, not all.
_PAUSE = 30
_SLOW_DISK = 50e6  # bytes a second: what a write is expected to take before one was seen

# Calls of fit in each run: the second one of a training function has checkpoints of its own.
_fits: WeakKeyDictionary[RunContext, int] = WeakKeyDictionary()


class CheckpointManager:
    """The checkpoints of one fit. All ranks have one; only the main rank's copies and writes.

    Use it as a context manager: on the way out what was begun is written.

    Attributes:
        number: which call of fit in the training function this is, from 1.
    """

    def __init__(self, ctx: RunContext, config: Config) -> None:
        self.number = number = _fits[ctx] = _fits.get(ctx, 0) + 1
        folder = ctx.paths.checkpoints
        self._ctx, self._wish = ctx, config.checkpoint
        self._on = config.checkpoint.enabled
        self.store = CheckpointStore(
            folder if number == 1 else folder / f"fit-{number}", keep=config.checkpoint.keep_last
        )
        self._writer = AsyncCheckpointWriter(self.store, ctx.note_saved)
        self._state, self._weights = HostCopy(), HostCopy()
        self._best: _Pending | None = None
        self._kept: State | None = None  # the best weights, as long as this process has them
        self._writing: _Pending | None = None
        self._saved_at, self._saved = time.monotonic(), (-1, -1)
        self._best_at, self._bytes = 0.0, 0

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self._write_best(now=True)
        self._finish()

    # --- when ---

    def due_by_steps(self, step: int) -> bool:
        """Whether one is wanted after optimizer step ``step``; the same on all ranks."""
        every = self._wish.every_steps
        return self._on and every is not None and step % every == 0

    def due_by_epochs(self, epoch: int) -> bool:
        """Whether one is wanted after ``epoch``; the same on all ranks."""
        every = self._wish.every_epochs
        return self._on and every is not None and epoch % every == 0

    def due_by_time(self) -> bool:
        """Whether one is wanted now, by this rank's clock; the ranks have to agree."""
        every = self._wish.every_minutes
        late = every is not None and time.monotonic() - self._saved_at >= every * 60
        return self._on and late and not self._writer.busy

    @property
    def reserve(self) -> float:
        """Seconds that saving now may take, with twice the time of the last one; 0 when off."""
        if not self._on:
            return 0.0
        return 1.0 + 2 * (self._writer.seconds or self._bytes / _SLOW_DISK)

    # --- what ---

    def save(self, parts: Callable[[], Mapping[str, State]], step: int, about: State) -> None:
        """Copy a state and have it written; the training waits for the copy only.

        Args:
            parts: makes the state, by file; called on the main rank only.
            step: optimizer steps done.
            about: for the manifest; a second call at the same step and ``epoch`` does nothing.
        """
        place = step, about["epoch"]
        if not self._on or place == self._saved or not self._ctx.is_main:
            return
        self._saved_at = time.monotonic()
        self._write_best(now=True)
        self._finish()
        if self._best is None:  # else the state would speak of a best epoch that is not on disk
            self._saved = place
            self._writer.put("step", step, self._state.take(parts()), about)

    def keep_best(self, weights: Callable[[], State], step: int, about: State) -> None:
        """Copy the best weights so far; they are on disk before the next :meth:`save` is."""
        if not self._ctx.is_main or not (self._on or self._wish.weights == "best"):
            return
        if self._writer.busy:
            self._finish()  # it may be writing the best before
        self._kept = self._weights.take(weights())
        if self._on:
            self._best = step, {"model": self._kept}, about
            self._write_best(now=False)

    def best_weights(self) -> State | None:
        """The best weights, for the main rank; None on the others, and where there are none."""
        if self._kept is not None or not self._ctx.is_main:
            return self._kept
        try:
            entry, _ = self.store.good("best")
        except CheckpointError as error:
            text = f"the model keeps the last weights, not the best: {error}"
            self._ctx.message(text, level="warning")
            return None
        return None if entry is None else entry.read("model")

    def _write_best(self, *, now: bool) -> None:
        pause = _PAUSE * self._writer.seconds
        if self._best is None or (not now and time.monotonic() - self._best_at < pause):
            return
        self._finish()
        self._writing, self._best, self._best_at = self._best, None, time.monotonic()
        self._writer.put("best", *self._writing)

    def _finish(self) -> None:
        """Wait for the writer; what it could not write is said, kept for later, and no error."""
        self._writer.wait()
        failure = self._writer.failure()
        if failure is None:
            return
        kind, error = failure
        self._ctx.message(f"training goes on without a checkpoint: {error}", level="warning")
        if kind == "best":
            self._best = self._best or self._writing
        else:
            self._saved = (-1, -1)

    # --- before the first step ---

    def check_space(self, weights: int, state: int) -> None:
        """See that what will be kept fits on the disk.

        Args:
            weights: bytes of the model.
            state: bytes of everything to go on from.

        Raises:
            CheckpointError: it does not.
        """
        self._bytes = state
        if not self._on or not self._ctx.is_main:
            return
        needed = (self._wish.keep_last + 1) * state + 2 * weights
        free = free_space(self._ctx.paths.folder)
        if needed > free:
            folder = self._ctx.paths.folder
            raise CheckpointError(
                f"checkpoints will need {size_text(needed)} ({self._wish.keep_last} kept and one "
                f"being written of {size_text(state)} each, the best weights of "
                f"{size_text(weights)} twice), and {folder} has {size_text(free)} free",
                allowed="a disk with more free space, or fewer checkpoints",
                do=f"lower checkpoint.keep_last, {_larger_disk(needed)}, or set "
                "checkpoint.enabled: false",
            )

    def find(self) -> StoredCheckpoint | None:
        """The newest undamaged checkpoint, the same on all ranks; None: there is none.

        Raises:
            CheckpointError: there are checkpoints, and all of them are damaged.
        """
        if not self._on:
            return None
        found = _agreed(self._ctx, self._look)
        return None if found is None else StoredCheckpoint(Path(found["folder"]), found["about"])

    def _look(self) -> State | None:
        self.store.tidy()
        entry, wrong = self.store.good("step")
        if entry is None:
            return None
        for damage in wrong:
            text = f"passed over a damaged checkpoint, {damage}: going on from {entry.folder.name}"
            self._ctx.message(text, level="warning")
        return {"folder": str(entry.folder), "about": entry.manifest}


def _agreed(ctx: RunContext, look: Callable[[], State | None]) -> State | None:
    """What the main rank finds, on all ranks; what it raises, all of them raise."""
    if ctx.world_size == 1:
        return look()
    import torch.distributed as dist

    box: list[Any] = [None]
    if ctx.is_main:
        try:
            box = [look()]
        except CheckpointError as error:
            box = [error]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], CheckpointError):
        raise box[0]
    found: State | None = box[0]
    return found


def _larger_disk(needed: int) -> str:
    """Where there would be room: the host's scratch disk, or one that the user knows."""
    scratch = detect_host().scratch
    free = free_space(scratch)
    if free < needed:
        return "set runtime.output_dir to a larger disk"
    return (
        f"set runtime.output_dir: '{{scratch}}/outputs' ({scratch} has {size_text(free)} free; "
        "nb.pack() then puts what is to be kept into one file)"
    )
