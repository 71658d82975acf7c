"""Keep the checkpoints that a resumed fit needs.

A checkpoint is copied to the CPU when it is due, and written beside the training.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from nbtoolkit.environment.resources import free_space, size_text
from nbtoolkit.errors import CheckpointError
from nbtoolkit.host import detect_host
from nbtoolkit.run.checkpoints.checkpoint_store import (
    CheckpointStore,
    Kind,
    State,
    StoredCheckpoint,
)
from nbtoolkit.training.progress import TrainState
from nbtoolkit.training.strategy import HostState
from nbtoolkit.worker.collectives import broadcast, gather_on_all
from nbtoolkit.worker.random_numbers import seed_rank
from nbtoolkit.worker.watch import SaveTimes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nbtoolkit.config.schema import Config
    from nbtoolkit.training.callbacks import Callbacks
    from nbtoolkit.training.step import TrainStep
    from nbtoolkit.worker.context import RunContext


RandomState: TypeAlias = dict[str, Any]
"""The states of one rank's generators: tensors and plain values."""


def gather_random_states(device: torch.device, ranks: int) -> list[RandomState]:
    """Return the states of all ranks' generators, by rank.

    A collective when there are several ranks.
    """
    return gather_on_all(_random_state(device), ranks)


def _random_state(device: torch.device) -> RandomState:
    import numpy as np
    import torch

    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [torch.tensor(np.asarray(keys, np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: RandomState, device: torch.device) -> None:
    """Set this process's generators to one of :func:`gather_random_states`."""
    import numpy as np
    import torch

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


# The best epoch's weights are copied at once, but written only when the last write is this many
# times its own duration ago: epochs may take milliseconds, and writing then takes 3% of the time.
_PAUSE = 30
_SLOW_DISK = 50e6  # bytes a second: the assumed speed before the first write

# Calls of fit in each run: the second one of a training function has its own checkpoints.
_fits: WeakKeyDictionary[RunContext, int] = WeakKeyDictionary()


class _BestWeights(NamedTuple):
    """Weights of the best epoch that are to be written."""

    step: int
    parts: Mapping[str, State]
    about: State


@dataclass(frozen=True)
class Resumable:
    """The parts of a fit that a checkpoint holds.

    Attributes:
        train_step: the model, its optimizer and its averages.
        progress: the epochs done, and the best one.
        callbacks: the user's.
        sampling: what must be equal for a position in an epoch to mean the same samples.
    """

    train_step: TrainStep
    progress: TrainState
    callbacks: Callbacks
    sampling: State

    def files(self, state: State, random_states: list[RandomState] | None) -> dict[str, State]:
        """Return the state of each file; on the main rank.

        Args:
            state: of :attr:`train_step`, gathered.
            random_states: of all ranks, within an epoch; None at its end.
        """
        averages = self.train_step.averages
        training = dict(state)
        files = {"model": training.pop("model"), "training": training}
        training |= {
            "progress": self.progress.state(),
            "random_states": random_states,
            "sampling": self.sampling,
            "callbacks": self.callbacks.state(),
        }
        if "loss_parameters" in training:
            files["loss_parameters"] = training.pop("loss_parameters")
        if averages is not None and averages.active:
            files["averaged"] = averages.weights()
        return files

    def restore(self, stored: StoredCheckpoint, ctx: RunContext) -> None:
        """Continue from the :meth:`files` of a checkpoint.

        Raises:
            CheckpointError: it belongs to other data or another model.
        """
        progress = self.progress
        saved = stored.read("training")
        _check_same_samples(stored.folder, saved["sampling"], self.sampling)
        self.train_step.restore({**saved, **stored.weights()}, source=str(stored.folder))
        progress.restore(saved["progress"])
        self.callbacks.restore(saved.get("callbacks", {}))
        if progress.taken:
            if len(saved["random_states"]) == ctx.world_size:
                restore_random_state(saved["random_states"][ctx.rank], ctx.device)
            else:
                steps = self.train_step.steps_done
                seed_rank(ctx.device, ctx.seed, "resumed", steps, ctx.rank)
        within = f", {progress.taken} steps into the next one" if progress.taken else ""
        ctx.print(f"fit: resumes after epoch {progress.epoch}{within}")


def _check_same_samples(folder: Path, then: State, now: State) -> None:
    """Refuse a checkpoint whose position in an epoch means other samples than it does now."""
    changed = [
        f"{name} {then[name] or 'a permutation'} then, {now[name] or 'a permutation'} now"
        for name in now
        if then[name] != now[name]
    ]
    if changed:
        raise CheckpointError(
            f"the checkpoint {folder} was made with other samples in its steps: "
            + "; ".join(changed),
            allowed="the same data set, seed, and samples in an optimizer step (with "
            "train.batch_size_per_device: the same number of ranks and accumulation steps)",
            do="launch as before, or with resume='never'",
        )


class CheckpointManager(SaveTimes):
    """The checkpoints of one fit. All ranks have one; only the main rank's copies and writes.

    A context manager: on exit it finishes writing.
    """

    def __init__(self, ctx: RunContext, config: Config) -> None:
        super().__init__(config.checkpoint)
        # Which call of fit in the training function this is, from 1.
        number = _fits[ctx] = _fits.get(ctx, 0) + 1
        folder = ctx.paths.checkpoints
        self._ctx = ctx
        self._settings = config.checkpoint
        self._store = CheckpointStore(
            folder if number == 1 else folder / f"fit-{number}", keep=config.checkpoint.keep_last
        )
        self._writer = AsyncCheckpointWriter(self._store, ctx.note_saved)
        self._state_copy = HostCopy()
        self._weights_copy = HostCopy()
        self._best: _BestWeights | None = None
        self._writing: _BestWeights | None = None
        self._best_weights: State | None = None  # as long as this process has them
        self._position = (-1, -1)  # step and epoch of the last state that was written
        self._best_written_at = 0.0
        self._state_bytes = 0

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish_writing()

    def due_by_epochs(self, epoch: int) -> bool:
        """Whether a checkpoint is due after ``epoch``; the same on all ranks."""
        every = self._settings.every_epochs
        return self.enabled and every is not None and epoch % every == 0

    def due_by_time(self) -> bool:
        """Whether a checkpoint is due now, by this rank's clock; the ranks have to agree."""
        return super().due_by_time() and not self._writer.busy

    @property
    def reserve(self) -> float:
        """Seconds to reserve for a checkpoint: 1 and twice the last write; 0 when off."""
        if not self.enabled:
            return 0.0
        return 1.0 + 2 * (self._writer.seconds or self._state_bytes / _SLOW_DISK)

    def save(self, fit: Resumable, before: Callable[[], object], *, within_epoch: bool) -> None:
        """Copy the state of a fit and start to write it; the training waits for the copy only.

        All ranks call it. A second call at the same step and epoch writes nothing.

        Args:
            fit: what is saved.
            before: called on the main rank before a state is taken.
            within_epoch: whether the epoch has steps left: only then the states of the random
                generators are needed.
        """
        if not self.enabled:
            return
        ctx = self._ctx
        train_step = fit.train_step
        progress = fit.progress
        state = None
        states = gather_random_states(ctx.device, ctx.world_size) if within_epoch else None
        if train_step.strategy.gathers:
            self.finish_writing()  # rank 0 then has the memory of one whole state
            state = train_step.strategy.gathered(train_step.state())
        position = (train_step.steps_done, progress.epoch)
        if position == self._position or not ctx.is_main:
            return
        self.saved()
        self.finish_writing()
        if self._best is None:  # else the state would name a best epoch that is not on disk
            self._position = position
            before()
            files = fit.files(train_step.state() if state is None else state, states)
            about = {"epoch": progress.epoch, "taken": progress.taken, "values": progress.values}
            step = train_step.steps_done
            self._writer.put("step", step, self._state_copy.update(files), about)

    def resume(self, fit: Resumable) -> None:
        """Continue from the newest undamaged checkpoint, if there is one; all ranks call it.

        Raises:
            CheckpointError: all checkpoints are damaged, the newest one does not fit, or the disk
                has too little space for new ones.
        """
        stored = self._latest()
        self._check_space(*estimate_bytes(fit.train_step))
        if self._ctx.is_main:
            fit.callbacks.check_states()
        if stored is not None:
            fit.restore(stored, self._ctx)

    def finish_writing(self) -> None:
        """Wait until everything kept so far is written; the memory of a written state is free."""
        self._write_best(now=True)
        self._finish()

    def keep_best(self, state: State, step: int, about: State) -> None:
        """Copy the best weights so far; they are on disk before the next :meth:`save` is.

        Args:
            state: :meth:`TrainStep.weights` of the main rank.
            step: optimizer steps done.
            about: for the manifest.
        """
        if not self._ctx.is_main or not (self.enabled or self._settings.weights == "best"):
            return
        if self._writer.busy:
            self._finish()  # it may be writing the previous best from the same memory
        self._best_weights = self._weights_copy.update(state)
        if self.enabled:
            self._best = _BestWeights(step, self._best_weights, about)
            self._write_best(now=False)

    def best_weights(self) -> State | None:
        """Return the best :meth:`TrainStep.weights` on the main rank.

        None on the others, or without.
        """
        if self._best_weights is not None or not self._ctx.is_main:
            return self._best_weights
        self._finish()  # after a resume, they are on disk only
        if self._best is not None:
            text = "the model keeps the last weights: the best ones could not be written"
            self._ctx.message(text, level="warning")
            return None
        try:
            stored, _ = self._store.good("best")
        except CheckpointError as error:
            text = f"the model keeps the last weights, not the best: {error}"
            self._ctx.message(text, level="warning")
            return None
        return None if stored is None else stored.weights()

    def _check_space(self, weights: int, state: int) -> None:
        """Check before the first step that the checkpoints fit on the disk.

        Args:
            weights: bytes of the model.
            state: bytes of everything a resumed run needs.

        Raises:
            CheckpointError: they do not fit.
        """
        self._state_bytes = state
        if not self.enabled or not self._ctx.is_main:
            return
        folder = self._ctx.paths.folder
        kept = self._settings.keep_last
        needed = (kept + 1) * state + 2 * weights
        free = free_space(folder)
        if needed > free:
            raise CheckpointError(
                f"checkpoints will need {size_text(needed)} ({kept} kept and one being written of "
                f"{size_text(state)} each, the best weights of {size_text(weights)} twice), and "
                f"{folder} has {size_text(free)} free",
                allowed="a disk with more free space, or fewer checkpoints",
                do=f"lower checkpoint.keep_last, {_larger_disk(needed)}, or set "
                "checkpoint.enabled: false",
            )

    def _latest(self) -> StoredCheckpoint | None:
        """Return the newest undamaged checkpoint, the same on all ranks; None: there is none.

        Raises:
            CheckpointError: there are checkpoints, and all of them are damaged.
        """
        if not self.enabled:
            return None
        latest: StoredCheckpoint | CheckpointError | None = None
        if self._ctx.is_main:
            try:
                latest = self._find_latest()
            except CheckpointError as error:
                latest = error
        latest = broadcast(latest, self._ctx.world_size)
        if isinstance(latest, CheckpointError):
            raise latest
        return latest

    def _find_latest(self) -> StoredCheckpoint | None:
        self._store.tidy()
        newest, damages = self._store.good("step")
        if newest is None:
            return None
        for damage in damages:
            text = f"skipped a damaged checkpoint, {damage}: resuming from {newest.folder.name}"
            self._ctx.message(text, level="warning")
        return newest

    def _write_best(self, *, now: bool) -> None:
        pause = _PAUSE * self._writer.seconds
        if self._best is None or (not now and time.monotonic() - self._best_written_at < pause):
            return
        self._finish()
        self._writing = self._best
        self._best = None
        self._best_written_at = time.monotonic()
        self._writer.put("best", *self._writing)

    def _finish(self) -> None:
        """Wait for the writer. A failed write is reported, not raised, and tried again later."""
        self._writer.wait()
        failure = self._writer.failure()
        if failure is None:
            self._writing = None
            return
        kind, error = failure
        self._ctx.message(f"training continues without a checkpoint: {error}", level="warning")
        if kind == "best":
            self._best = self._best or self._writing
        else:
            self._position = (-1, -1)


class AsyncCheckpointWriter:
    """Writes checkpoints in a thread, beside the training; both hold the GIL for moments only.

    Args:
        store: where the checkpoints go.
        on_saved: called in the thread with path, step and kind of each checkpoint written.

    Attributes:
        seconds: the duration of the last write; 0 before the first.
    """

    def __init__(self, store: CheckpointStore, on_saved: Callable[[Path, int, Kind], None]) -> None:
        self._store = store
        self._on_saved = on_saved
        self._thread: threading.Thread | None = None
        self._failure: tuple[Kind, Exception] | None = None
        self.seconds = 0.0

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written: its state must not change."""
        return self._thread is not None and self._thread.is_alive()

    def put(self, kind: Kind, step: int, parts: Mapping[str, State], about: State) -> None:
        """Start to write a checkpoint, after the previous one. See :meth:`CheckpointStore.put`.

        ``parts`` must not change until :attr:`busy` is false.
        """

        def write() -> None:
            start = time.monotonic()
            try:
                path = self._store.put(kind, step, parts, about)
            except (CheckpointError, OSError) as error:
                self._failure = kind, error
            else:
                self._on_saved(path, step, kind)
            self.seconds = time.monotonic() - start

        self.wait()
        self._thread = threading.Thread(target=write, name="nbtoolkit-writer")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the present write has succeeded or failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def failure(self) -> tuple[Kind, Exception] | None:
        """Return the failed write since the last call, with its error; None: there was none."""
        failure = self._failure
        self._failure = None
        return failure


class HostCopy:
    """A copy of a nested state on the CPU, into memory that the next :meth:`update` uses again.

    New memory would cost more than the copy itself: 47 ms against 6 ms for 100 MB (page faults).
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def update(self, state: Mapping[str, Any]) -> State:
        """Copy ``state`` (dicts, lists, tensors, plain values); overwrites the previous copy.

        The only time that training waits for a checkpoint. A :class:`HostState` is not copied.
        """
        import torch

        copy: State = self._copy(state, "")
        if any(tensor.is_pinned() for tensor in self._memory.values()):
            torch.cuda.synchronize()
        return copy

    def _copy(self, value: Any, where: str) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            return self._to_memory(value.detach(), where)
        if isinstance(value, HostState):
            return value
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


# Copies of the weights in the state of torch's optimizers, with the usual settings.
_COPIES = {"SGD": 1, "RMSprop": 1, "Adagrad": 1}
_MOST_COPIES = 2  # Adam and its variants


def estimate_bytes(train_step: TrainStep) -> tuple[int, int]:
    """Estimate the bytes of the weights, and of everything a resumed run needs."""
    model = train_step.module
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    copies = _COPIES.get(type(train_step.optimizer).__name__, _MOST_COPIES)
    # Two files have the averages: one to resume from, one to predict with.
    averaged = 2 * weights if train_step.averages is not None else 0
    return weights, weights + copies * trained + averaged


def _larger_disk(needed: int) -> str:
    """Where the checkpoints would fit: the host's scratch disk, or one that the user knows."""
    scratch = detect_host().scratch
    free = free_space(scratch)
    if free < needed:
        return "set runtime.output_dir to a larger disk"
    return (
        f"set runtime.output_dir: '{{scratch}}/outputs' ({scratch} has {size_text(free)} free; "
        "nb.pack() then puts what is to be kept into one file)"
    )
