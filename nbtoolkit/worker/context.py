"""Define the run context, the ``ctx`` of ``train(config, ctx)``."""

from __future__ import annotations

import copy
import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from nbtoolkit.config import reads, unused
from nbtoolkit.environment.deadline import on_monotonic_clock
from nbtoolkit.errors import CheckpointError, ReportError, RunStopped
from nbtoolkit.run.checkpoints.checkpoint_store import State, read_state, write_state
from nbtoolkit.run.events import CheckpointSaved, MetricsLogged, MetricsReported, NoteAdded
from nbtoolkit.run.paths import exclusive
from nbtoolkit.run.rank_check import track_optimizers
from nbtoolkit.wire import messages
from nbtoolkit.worker.channel import AloneChannel, Channel
from nbtoolkit.worker.metric_values import as_step, numbers_and_step
from nbtoolkit.worker.watch import Watch

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from nbtoolkit.run.rank_check import SteppedOptimizers
    from nbtoolkit.search.folds.folds import Fold
    from nbtoolkit.wire.messages import Weights
    from nbtoolkit.wire.payload import JobSpec
    from nbtoolkit.worker.first_step import FirstStep
    from nbtoolkit.worker.random_numbers import RankDraws
    from nbtoolkit.worker.undivided import UndividedLoaders

_PACKAGE = os.path.dirname(os.path.dirname(__file__))

_FOLD_UNREAD = (
    "the training function has ended without reading ctx.fold: every fold trains on the same "
    "samples, and the scores tell nothing about others\n"
    "  Allowed: a function that uses ctx.fold.train_indices and ctx.fold.valid_indices\n"
    "  Do now:  train on x[ctx.fold.train_indices], validate on x[ctx.fold.valid_indices]"
)


class RunContext:
    """What one rank knows of its run, and the calls that it can make: the ``ctx`` of ``train``.

    Attributes:
        config: the configuration of the run, with all settings.
        plan: the plan of this launch, with reasons.
        paths: the run's folder and its files.
        local_rank: the number of this rank on its machine, and the index of its device.
        world_size: the number of ranks.
        device: the ``torch.device`` of this rank.
        seed: the run's seed, equal on all ranks.
        fold: the fold to train on, with ``index``, ``train_indices`` and ``valid_indices``; None
            without folds.
        deadline: the unix time at which the run is asked to stop; None: no limit.
    """

    def __init__(
        self,
        job: JobSpec,
        channel: Channel,
        *,
        rank: int = 0,
        local_rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.config = job.config
        self.plan = job.plan
        self.paths = job.paths
        self._rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.deadline = job.deadline
        self._ends = on_monotonic_clock(job.deadline)
        self._fold = job.fold
        self._fold_read = False
        self._params: dict[str, Any] = dict(job.params)
        self.seed: int = job.config.seed
        self._channel = channel
        self._accelerator: Accelerator | None = None
        self._optimizers: SteppedOptimizers | None = None
        self._first_step: FirstStep | None = None
        self._watch: Watch | None = None
        self._draws: RankDraws | None = None
        self._loaders: UndividedLoaders | None = None
        # nb.verify sets it before it calls the training function: rank 0 then records which layers
        # and random generators cannot give equal results.
        self.records_inexact = False

    @property
    def rank(self) -> int:
        """The number of this rank, from 0 to ``world_size - 1``."""
        if self._loaders is not None and not _called_here():
            self._loaders.divide()  # the user's code may divide the samples by it
        return self._rank

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self._rank == 0

    @property
    def fold(self) -> Fold | None:
        """The fold to train on; None outside cross-validations and sweeps with folds."""
        self._fold_read = True
        return self._fold

    @property
    def has_fold(self) -> bool:
        """Whether there is a fold.

        nbtoolkit warns if the training function never reads :attr:`fold`, even if it reads
        ``has_fold``.
        """
        return self._fold is not None

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of this trial; empty outside sweeps."""
        reads.note(*self._params)
        return self._params

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        import torch

        if self.plan.device_type == "cuda":
            return torch.device("cuda", self.local_rank)
        return torch.device("cpu")

    @property
    def accelerator(self) -> Accelerator:
        """An ``accelerate.Accelerator`` with the settings of the plan, created on first use.

        Its method ``prepare`` does the same as :meth:`prepare`.
        """
        if self._accelerator is None:
            from nbtoolkit.worker.prepare import make_accelerator

            self._accelerator = make_accelerator(self)
        return self._accelerator

    def alone(self) -> RunContext:
        """Return the context of this rank for work that it does by itself, as the only rank.

        The calls of this context wait for no other rank. A stop ends its work on rank 0, and the
        deadline on every rank, at the next check.
        """
        if self.world_size == 1:
            return self
        alone = copy.copy(self)
        alone._rank = 0
        alone.world_size = 1
        alone._channel = AloneChannel(self._channel, self._ends)
        return alone

    def print(self, *values: object, **options: Any) -> None:
        """Call ``print`` on rank 0; the other ranks print nothing."""
        if self.is_main:
            print(*values, **options)

    def log(
        self, metrics: Mapping[str, Any] | None = None, step: int | None = None, **named: Any
    ) -> None:
        """Log metrics of rank 0; calls on the other ranks do nothing.

        A call is cheap, because the ranks do not wait for each other.

        Args:
            metrics: numbers by name; a tensor of one element counts as a number.
            step: the optimizer step of the metrics.
            named: as for :meth:`report`.

        Raises:
            TypeError: a value or the step is not a number.
        """
        if self.is_main:
            values, at = numbers_and_step(metrics, step, named)
            self._channel.send(MetricsLogged(values=values, step=at))

    def report(
        self, metrics: Mapping[str, Any] | None = None, step: int | None = None, **named: Any
    ) -> None:
        """Report the metrics of a validation; **all** ranks must make this call, once each.

        The ranks wait for each other here. Then either all of them continue, or all of them leave
        the training function, because a stop was requested, the time is over, or the trial is
        pruned. The values of rank 0 count.

        Args:
            metrics: numbers by name.
            step: the optimizer step (or the epoch) of the metrics.
            named: the metrics as keywords in place of a dict:
                ``ctx.report(val_accuracy=0.9, epoch=3)``. Without ``step``, ``epoch`` is the step.

        Raises:
            RunStopped: the run must stop here. It is a BaseException; do not catch it.
            ReportError: another rank did not make this call.
            TypeError: a value or the step is not a number.
        """
        values, at = numbers_and_step(metrics, step, named)
        if self._channel.async_reports and not self.stop_requested():
            self._channel.send(MetricsReported(values=values, step=at))
        else:
            weights = self.weights()
            where = _caller()
            self._together(
                messages.ReportRequest(values=values, step=at, weights=weights, where=where)
            )

    def announce(
        self, names: Sequence[str], stems: Sequence[str] = (), *, first_step: int = 0
    ) -> None:
        """Announce which metrics this run will report.

        With the names, a sweep whose metric is misspelt fails at once. ``nb.fit`` makes this call.

        Args:
            names: the names of the metrics; the run may report other metrics, too.
            stems: the beginnings of further names, such as ``val_auc`` for ``val_auc_<class>``.
            first_step: the step of the first report. Optuna's pruners count from 0, so nbtoolkit
                subtracts this number.
        """
        if self.is_main:
            self._channel.send(
                messages.MetricsAnnounced(
                    names=list(names), stems=list(stems), first_step=first_step
                )
            )

    def accumulates(self, *, entered: bool) -> None:
        """Tell nbtoolkit that this rank enters or leaves a loop that uses ``plan.accumulate``.

        If a rank runs out of memory inside this loop, nbtoolkit may start the run again with more
        accumulation steps.
        """
        self.divides_samples()
        self._channel.send(messages.Accumulates(entered=entered))

    def watch(self, save: Callable[[], object], *, step: int | None = None) -> None:
        """Save or stop if it is time to; **all** ranks must make this call once after each step.

        About once a second, the ranks agree what to do, with one small all-reduce. When a
        checkpoint is due (``checkpoint.every_minutes``, ``checkpoint.every_steps``), all ranks call
        ``save`` after the same step. When the run must stop, they call ``save`` and leave the
        training function, early enough before the deadline for twice the time that the last
        checkpoint took. A pruned trial leaves without saving.

        Args:
            save: a function without arguments that writes a checkpoint, with :meth:`save` or in
                another way. With ``checkpoint.enabled: false``, it is not called.
            step: the number of steps done, for ``checkpoint.every_steps``. Default: the number of
                calls in this process.

        Raises:
            RunStopped: the run must stop here. It is a BaseException; do not catch it.
        """
        if self._watch is None:
            self._watch = Watch(self)
        self._watch.follow(save, step)

    def raise_if_stopped(self, *, reserve: float = 0.0) -> None:
        """Leave the training function if a stop was requested; **all** ranks must make this call.

        This is like :meth:`report` without metrics, for use inside a long epoch: either all ranks
        continue, or all of them leave the training function. A call costs as much as a small
        collective operation (about 0.2 ms). One call every few seconds is enough.

        Args:
            reserve: the time that you need for saving, in seconds. All ranks stop if less than this
                time is left before the deadline. The value of rank 0 counts.

        Raises:
            RunStopped: the run must stop here. It is a BaseException; do not catch it.
            ReportError: another rank did not make this call.
        """
        if status := self.should_stop(reserve=reserve):
            raise RunStopped(status)

    def should_stop(self, reserve: float = 0.0) -> str | None:
        """Like :meth:`raise_if_stopped`, but return the status, so that your loop can save first.

        Returns:
            None if the run continues. Otherwise the status ``"stopped"``, ``"deadline"`` or
            ``"pruned"``, equal on all ranks. Your loop then saves and raises
            ``nb.RunStopped(status)``.

        Raises:
            ReportError: another rank did not make this call.
        """
        return self._ask(messages.StopCheck(reserve=float(reserve), where=_caller()))

    def stop_requested(self, reserve: float = 0.0) -> bool:
        """Return whether a stop was requested, by the stop button, a signal or the deadline.

        A loop may call this in every step: the call takes 2 us, and the ranks do not wait for each
        other. Only rank 0 gets True; the other ranks always get False. Rank 0 must tell them, and
        all ranks then call :meth:`raise_if_stopped` or :meth:`should_stop`.

        Args:
            reserve: seconds before the deadline that saving takes.
        """
        if not self.is_main:
            return False
        late = self._ends is not None and time.monotonic() + reserve >= self._ends
        return late or self._channel.stop_pending()

    def message(self, text: str, level: Literal["info", "warning"] = "info") -> None:
        """Show a message of rank 0 to the user, and add it to the run's events.

        Calls on the other ranks do nothing.
        """
        if self.is_main:
            self._channel.send(NoteAdded(text=text, level=level))

    def warn_unused_settings(self) -> None:
        """Warn of a fold or a setting that was not read, and of undivided samples."""
        if not self.is_main:
            return
        unread = unused.unread_names(self.config, self._params)
        texts = [
            unused.warning(self.config, unread),
            _FOLD_UNREAD if self._fold is not None and not self._fold_read else None,
        ]
        if self._loaders is not None and self.weights():
            texts.append(self._loaders.warning(self.world_size))
        free = ("model.", "data.")
        searched = [name for name in self._params if name in unread and name.startswith(free)]
        for text in filter(None, texts):
            self._channel.send(messages.UsageWarning(text=text, searched=searched))

    def _warn(self, text: str) -> None:
        self._channel.send(messages.UsageWarning(text=text))

    def note_saved(self, path: str | os.PathLike[str], step: int | None, kind: str) -> None:
        """Record a checkpoint of rank 0 that :meth:`save` did not write; any thread may call it."""
        if self.is_main:
            self._channel.send(CheckpointSaved(path=str(path), step=as_step(step), kind=kind))

    def save(
        self, state: Mapping[str, Any], *, kind: str = "last", step: int | None = None
    ) -> Path:
        """Save a checkpoint atomically; **all** ranks must make this call, and rank 0 writes.

        Args:
            state: a dict of tensors, numbers, strings, and dicts, lists or tuples of them, such as
                a ``state_dict()``. ``torch.load(path, weights_only=True)`` can read the file.
            kind: ``"last"``, ``"best"`` or a name of your own. The call replaces the file
                ``checkpoints/<kind>.pt``.
            step: the optimizer step of the state.

        Returns:
            The path of the file. When the call returns on any rank, the file exists.

        Raises:
            CheckpointError: ``state`` contains something else (the message names it), ``kind``
                cannot be the name of a file, or the disk is full.
            ReportError: another rank did not make this call.
        """
        path = self._checkpoint(kind)
        where = _caller()
        # First wait for all ranks: a late one must not load what is saved now.
        self._together(messages.SaveRequest(where=where))
        if self.plan.strategy == "fsdp":
            # A collective. By its name: the strategy may import what this module must not.
            state = resolve_name("nbtoolkit.training.strategy:gather_state")(self, state)
        if self.is_main:
            write_state(path, state)
        self._together(
            messages.CheckpointRequest(path=str(path), step=as_step(step), kind=kind, where=where)
        )
        return path

    def load(self, kind: str = "last") -> State | None:
        """Return the last state that this run saved as ``kind``, on the CPU; None if there is none.

        Raises:
            CheckpointError: the file is damaged.
        """
        path = self._checkpoint(kind)
        return read_state(path) if path.exists() else None

    def prepare(self, *objects: Any) -> Any:
        """Prepare the model, optimizer and loaders of your own loop, like ``Accelerator.prepare``.

        The ``batch_size`` of a loader is the global batch size: each rank gets a slice of every
        batch. With a ``DistributedSampler``, it is the batch size of one rank. No sample is
        repeated. The setting ``distributed.sync_batchnorm`` applies to the model.

        Raises:
            PlanError: the batches of a loader cannot be divided among the ranks; the model is
                already wrapped; or, with ``fsdp``, an optimizer has made steps. A backward pass
                raises it for a batch that the ranks cannot share equally.
        """
        return self.accelerator.prepare(*objects)

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model without the wrapper of :meth:`prepare`, and of ``torch.compile``.

        Its ``state_dict()`` has the original names of the parameters.
        """
        plain = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        # Below DDP accelerate keeps it.
        uncompiled: torch.nn.Module = getattr(plain, "_orig_mod", plain)
        return uncompiled

    @property
    def draws(self) -> RankDraws:
        """The random numbers of this rank's own loop."""
        if self._draws is None:
            from nbtoolkit.worker.random_numbers import RankDraws

            self._draws = RankDraws(self)
        return self._draws

    def watch_losses(self, model: torch.nn.Module) -> None:
        """Warn of a loss in the first training step that depends on the number of ranks.

        Args:
            model: as the loop calls it.
        """
        if self.world_size == 1 or not self.is_main or self.config.train.loss_reduction == "batch":
            return
        if self._first_step is None:
            from nbtoolkit.worker.first_step import FirstStep

            self._first_step = FirstStep(self)
        self._first_step.watch(model)

    def track_optimizers(self) -> None:
        """Record which optimizers make steps, until :meth:`close`.

        It does nothing if ``runtime.compare_ranks`` is off.
        """
        self._optimizers = track_optimizers(self.config, self.plan.processes)
        if self._optimizers is not None and self.is_main:
            from nbtoolkit.worker.undivided import UndividedLoaders

            self._loaders = UndividedLoaders(self._warn)

    def divides_samples(self) -> None:
        """Note that something divides the samples among the ranks, so that no warning follows."""
        if self._loaders is not None:
            self._loaders.divide()

    def close(self) -> None:
        """Undo what this context has changed in torch; called after the training function."""
        if self._draws is not None:
            self._draws.close()
        if self._optimizers is not None:
            self._optimizers.close()
        if self._loaders is not None:
            self._loaders.close()
        if self._first_step is not None:
            self._first_step.close()

    def weights(self) -> Weights | None:
        """Return some weights of the model, to compare the ranks; None if they are not compared."""
        return None if self._optimizers is None else self._optimizers.weights()

    def cached(self, key: str, build: Callable[[], Any]) -> Any:
        """Return the value of ``build()``, which is computed only once and then read from a file.

        All ranks share this file, and so do later runs with the same output folder.

        Args:
            key: the name of the value; if ``build`` returns another value, use another key.
            build: a function that returns tensors, or dicts, lists or tuples of tensors.

        Returns:
            The value. Its tensors are mapped from the file; if you change them, the file stays as
            it is.
        """
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        path = Path(self.config.runtime.output_dir).expanduser() / ".cache" / f"{name}.pt"
        with self.pause_hang_detection(f"cached({key!r})"), exclusive(path):
            if not path.exists():
                write_state(path, {"value": build()})
            return read_state(path, mmap=True)["value"]

    @contextmanager
    def pause_hang_detection(self, what: str) -> Iterator[None]:
        """Do not treat this rank as hung inside the ``with`` block, although it is silent and idle.

        Args:
            what: the name of the operation, such as ``"download"``.
        """
        self._channel.send(messages.LongOperation(what=what, entered=True))
        try:
            yield
        finally:
            self._channel.send(messages.LongOperation(what=what, entered=False))

    def _checkpoint(self, kind: str) -> Path:
        if not re.fullmatch(r"[^./][^/]*", kind):  # "../../x" is outside the run's folder
            raise CheckpointError(
                f"kind={kind!r} cannot name a checkpoint",
                allowed="a name without '/' and a leading '.': the file is checkpoints/<kind>.pt",
                do='choose a plain name, such as kind="epoch_3"',
            )
        return self.paths.checkpoints / f"{kind}.pt"

    def _together(self, question: messages.Question) -> None:
        """Ask with all ranks; raise RunStopped if the answer is to stop."""
        if status := self._ask(question):
            raise RunStopped(status)

    def _ask(self, question: messages.Question) -> str | None:
        """Ask with all ranks; returns the status to stop with, or None."""
        reply = self._channel.ask(question)
        if isinstance(reply, messages.CallRefused):
            raise ReportError(reply.what, allowed=reply.allowed, do=reply.do)
        return reply.leave

    def __repr__(self) -> str:
        rank = f"{self.rank}({self.world_size})"
        return f"RunContext(rank={rank}, device={self.device}, run={self.paths.run_id})"


def _called_here() -> bool:
    """Whether the caller of this function was called by this package."""
    return sys._getframe(2).f_code.co_filename.startswith(_PACKAGE)


def _caller() -> str:
    """File and line of the user's call: the innermost frame outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
