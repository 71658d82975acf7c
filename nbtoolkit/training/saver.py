"""Saver: when a checkpoint is due, what it costs the training, and the one to go on from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from nbtoolkit.errors import CheckpointError
from nbtoolkit.runtime.disk import free_space, size_text
from nbtoolkit.runtime.host import detect_host
from nbtoolkit.training.shelf import Entry, Shelf
from nbtoolkit.training.snapshot import Snapshot
from nbtoolkit.training.writer import Writer

if TYPE_CHECKING:
    from nbtoolkit.config import Config
    from nbtoolkit.runtime.context import RunContext

State = dict[str, Any]
_Pending = tuple[int, Mapping[str, State], State]  # step, state by file, words for the manifest

# A best epoch's weights are copied at once, and written when the last write is so many times its
# own duration ago: epochs may take milliseconds, and writing then takes 3% of the time, not all.
_PAUSE = 30
_SLOW_DISK = 50e6  # bytes a second: what a write is expected to take before one was seen

# Calls of fit in each run: the second one of a training function has checkpoints of its own.
_fits: WeakKeyDictionary[RunContext, int] = WeakKeyDictionary()


class Saver:
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
        self.shelf = Shelf(
            folder if number == 1 else folder / f"fit-{number}", keep=config.checkpoint.keep_last
        )
        self._writer = Writer(self.shelf, ctx.note_saved)
        self._state, self._weights = Snapshot(), Snapshot()
        self._best: _Pending | None = None
        self._kept: State | None = None  # the best weights, as long as this process has them
        self._writing: _Pending | None = None
        self._saved_at, self._saved = time.monotonic(), (-1, -1)
        self._best_at, self._bytes = 0.0, 0

    def __enter__(self) -> Saver:
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
            entry, _ = self.shelf.good("best")
        except CheckpointError as error:
            text = f"the model keeps the last weights, not the best: {error}"
            self._ctx.note(text, level="warning")
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
        self._ctx.note(f"training goes on without a checkpoint: {error}", level="warning")
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

    def find(self) -> Entry | None:
        """The newest undamaged checkpoint, the same on all ranks; None: there is none.

        Raises:
            CheckpointError: there are checkpoints, and all of them are damaged.
        """
        if not self._on:
            return None
        found = _agreed(self._ctx, self._look)
        return None if found is None else Entry(Path(found["folder"]), found["about"])

    def _look(self) -> State | None:
        self.shelf.tidy()
        entry, wrong = self.shelf.good("step")
        if entry is None:
            return None
        for damage in wrong:
            text = f"passed over a damaged checkpoint, {damage}: going on from {entry.folder.name}"
            self._ctx.note(text, level="warning")
        return {"folder": str(entry.folder), "about": entry.about}


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
