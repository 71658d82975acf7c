"""Define the run context, the ``ctx`` of ``train(config, ctx)``."""

from __future__ import annotations

import hashlib
import os
import re
import reprlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from nbtoolkit.config.aliases import refuse_old_name
from nbtoolkit.config.validation import mark_used, searched_in_vain, unused_settings
from nbtoolkit.errors import CheckpointError, ReportError, RunStopped
from nbtoolkit.run import messages
from nbtoolkit.run.checkpoints.checkpoint_store import State, read_state, write_state
from nbtoolkit.run.events import CheckpointSaved, MetricsLogged, MetricsReported, NoteAdded
from nbtoolkit.run.paths import exclusive
from nbtoolkit.run.rank_check import track_optimizers
from nbtoolkit.worker.channel import Channel

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from nbtoolkit.folds.folds import Fold
    from nbtoolkit.run.payload import JobSpec
    from nbtoolkit.run.rank_check import SteppedOptimizers, Weights
    from nbtoolkit.worker.prepare import ClassLosses

_FOLD_UNREAD = (
    "the training function has ended without reading ctx.fold: every fold trains on the same "
    "samples, and the scores tell nothing about others\n"
    "  Allowed: a function that uses ctx.fold.train_indices and ctx.fold.valid_indices\n"
    "  Do now:  train on x[ctx.fold.train_indices], validate on x[ctx.fold.valid_indices]"
)


class RunContext:
    """One rank's view of its run. All settings are in ``config``.

    Attributes:
        config: the resolved configuration.
        plan: the plan of this launch, with reasons.
        paths: the run's folder.
        rank: the number of this process, 0 to ``world_size - 1``.
        local_rank: its number on this machine; the index of its device.
        world_size: the number of ranks.
        device: the ``torch.device`` of this rank.
        seed: the run's seed, equal on all ranks.
        fold: a fold with ``index, train_indices, valid_indices``; None outside cross-validation.
        deadline: unix time at which the run is asked to stop; None: no limit.
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
        self.config, self.plan, self.paths = job.config, job.plan, job.paths
        self.rank, self.local_rank, self.world_size = rank, local_rank, world_size
        self.deadline = job.deadline
        self._fold, self._fold_read = job.fold, False
        self._params: dict[str, Any] = dict(job.params)
        self.seed: int = job.config.seed
        self._channel = channel
        self._accelerator: Accelerator | None = None
        self._optimizers: SteppedOptimizers | None = None
        self._class_losses: ClassLosses | None = None

    if not TYPE_CHECKING:  # else type checkers would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Refuse an unknown name; the error gives the new name of one of version 0.1."""
            refuse_old_name(f"ctx.{name}")
            raise AttributeError(f"the run context has no attribute {name!r}")

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def fold(self) -> Fold | None:
        """The fold to train on; None outside cross-validations and sweeps with folds."""
        self._fold_read = True
        return self._fold

    @property
    def has_fold(self) -> bool:
        """Whether there is a fold; this does not count as reading it."""
        return self._fold is not None

    @property
    def params(self) -> dict[str, Any]:
        """A trial's parameters; empty outside sweeps."""
        mark_used(self._params)
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
        """An ``accelerate.Accelerator`` set up from the plan, created on first use.

        Its ``prepare`` is :meth:`prepare`.
        """
        if self._accelerator is None:
            from nbtoolkit.worker.prepare import make_accelerator

            self._accelerator = make_accelerator(self)
        return self._accelerator

    def print(self, *values: object, **options: Any) -> None:
        """``print`` on the main rank; the other ranks print nothing."""
        if self.is_main:
            print(*values, **options)

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics; cheap, without a collective; calls on other ranks than 0 do nothing.

        Args:
            metrics: numbers by name (a tensor of one element is a number).
            step: the optimizer step they belong to.

        Raises:
            TypeError: a value or the step is not a number.
        """
        if self.is_main:
            self._channel.send(MetricsLogged(values=_as_numbers(metrics), step=_as_step(step)))

    def report(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Report the metrics of a validation; **all** ranks call it, once each. May not return.

        The ranks wait for each other here. Then all of them continue, or all leave the training
        function: because of a stop request, the time budget, or pruning. Rank 0's values count.

        Args:
            metrics: numbers by name.
            step: the optimizer step (or epoch) they belong to.

        Raises:
            RunStopped: the run must stop here (a BaseException: do not catch it).
            ReportError: another rank does not make this call.
        """
        values, at = _as_numbers(metrics), _as_step(step)
        if self._channel.async_reports and not self.stop_requested():
            self._channel.send(MetricsReported(values=values, step=at))
        else:
            weights, where = self.weights(), _caller()
            self._together(
                messages.ReportRequest(values=values, step=at, weights=weights, where=where)
            )

    def announce(
        self, names: Sequence[str], stems: Sequence[str] = (), *, first_step: int = 0
    ) -> None:
        """Announce the metrics to be reported, so that a search with a misspelt metric fails early.

        Args:
            names: of metrics; others may follow.
            stems: prefixes of names that are not known yet.
            first_step: the step of the first report; Optuna's pruners count from 0.
        """
        if self.is_main:
            self._channel.send(
                messages.MetricsAnnounced(
                    names=list(names), stems=list(stems), first_step=first_step
                )
            )

    def accumulates(self, *, entered: bool) -> None:
        """Say that this rank enters or leaves a loop that follows ``plan.accumulate``.

        If it runs out of memory there, the run may start again with more accumulation steps.
        """
        self._channel.send(messages.Accumulates(entered=entered))

    def raise_if_stopped(self, *, reserve: float = 0.0) -> None:
        """Stop here if a stop was requested; **all** ranks call it. May not return.

        Like :meth:`report` without metrics, for use inside a long epoch: all ranks continue, or all
        leave the training function. Costs as much as a small collective (about 0.2 ms): every few
        seconds is enough.

        Args:
            reserve: seconds needed for saving: all ranks stop if the deadline is nearer than that.
                Rank 0's value counts.

        Raises:
            RunStopped: the run must stop here (a BaseException: do not catch it).
            ReportError: another rank does not make this call.
        """
        if status := self.should_stop(reserve=reserve):
            raise RunStopped(status)

    def should_stop(self, reserve: float = 0.0) -> str | None:
        """Like :meth:`raise_if_stopped`, but returns the status, so that a loop can save first.

        Returns:
            None: continue. ``"stopped"``, ``"deadline"`` or ``"pruned"``, equal on all ranks: save,
            then ``raise nb.RunStopped(status)``.

        Raises:
            ReportError: another rank does not make this call.
        """
        return self._ask(messages.StopCheck(reserve=float(reserve), where=_caller()))

    def stop_requested(self) -> bool:
        """Whether a stop was requested (stop button, signal, deadline); always False on ranks > 0.

        Returns at once (2 us, no collective): a loop may call it in every step. Rank 0 must then
        tell the other ranks, and all ranks call :meth:`raise_if_stopped` or :meth:`should_stop`.
        """
        if not self.is_main:
            return False
        late = self.deadline is not None and time.time() >= self.deadline
        return late or self._channel.stop_pending()

    def message(self, text: str, level: Literal["info", "warning"] = "info") -> None:
        """Show a message to the user and add it to the run's events; from the main rank only."""
        if self.is_main:
            self._channel.send(NoteAdded(text=text, level=level))

    def warn_unused_settings(self, reads: set[str]) -> None:
        """Warn of settings without effect, and of a fold, that the function has not read.

        Args:
            reads: the settings that it has read.
        """
        if not self.is_main:
            return
        texts = [
            unused_settings(self.config, reads, self._params),
            searched_in_vain(self.config, reads, self._params),
            _FOLD_UNREAD if self._fold is not None and not self._fold_read else None,
        ]
        for text in filter(None, texts):
            self._channel.send(messages.SettingsUnread(text=text))

    def note_saved(self, path: str | os.PathLike[str], step: int | None, kind: str) -> None:
        """Record a checkpoint written without :meth:`save`; from the main rank only, any thread."""
        if self.is_main:
            self._channel.send(CheckpointSaved(path=str(path), step=_as_step(step), kind=kind))

    def save(
        self, state: Mapping[str, Any], *, kind: str = "last", step: int | None = None
    ) -> Path:
        """Save a checkpoint atomically; **all** ranks call it, the main rank writes.

        Args:
            state: tensors, numbers, strings, and dicts, lists, tuples of them (such as
                ``state_dict()``), so that ``torch.load(path, weights_only=True)`` reads it.
            kind: ``"last"``, ``"best"`` or a name of your own; replaces ``checkpoints/<kind>.pt``.
            step: the optimizer step it belongs to.

        Returns:
            The file, which exists for every rank.

        Raises:
            CheckpointError: the state holds something else (names it), ``kind`` is not a name, or
                the disk is full.
            ReportError: another rank does not make this call.
        """
        path, where = self._checkpoint(kind), _caller()
        # First wait for all ranks: a late one must not load what is saved now.
        self._together(messages.SaveRequest(where=where))
        if self.plan.strategy == "fsdp":
            # A collective. By its name: the strategy may import what this module must not.
            state = resolve_name("nbtoolkit.training.strategies.fsdp:gather_state")(self, state)
        if self.is_main:
            write_state(path, state)
        self._together(
            messages.CheckpointRequest(path=str(path), step=_as_step(step), kind=kind, where=where)
        )
        return path

    def load(self, kind: str = "last") -> State | None:
        """The last state saved as ``kind`` in this run, on the CPU; None: there is none.

        Raises:
            CheckpointError: the file is damaged.
        """
        path = self._checkpoint(kind)
        return read_state(path) if path.exists() else None

    def prepare(self, *objects: Any) -> Any:
        """Prepare the model, optimizer and loaders of your own loop, like ``Accelerator.prepare``.

        A loader's ``batch_size`` is the global batch size: each rank gets a slice of every batch
        (with a ``DistributedSampler`` it is the batch size of one rank). No sample is repeated.
        Applies ``distributed.sync_batchnorm`` to models.

        Raises:
            PlanError: the ranks cannot divide a loader's batches, a training step would not be the
                mean over its samples, or the model is already wrapped. Later, if the loop trains
                with class weights or ignored targets, whose mean is over weights.
        """
        return self.accelerator.prepare(*objects)

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model without :meth:`prepare`'s wrapper: its ``state_dict()`` has the plain names."""
        plain: torch.nn.Module = self.accelerator.unwrap_model(model)
        return plain

    def refuse_weighted_losses(self) -> None:
        """Until :meth:`close`, refuse losses that are not a mean over samples."""
        if self._class_losses is None:
            from nbtoolkit.worker.prepare import ClassLosses

            self._class_losses = ClassLosses()

    def track_optimizers(self) -> None:
        """Until :meth:`close`, note which optimizers step, if ``runtime.compare_ranks`` is on."""
        self._optimizers = track_optimizers(self.config, self.plan.data_ranks)

    def close(self) -> None:
        """Undo, after the training function, what the run has changed in torch."""
        if self._optimizers is not None:
            self._optimizers.close()
        if self._class_losses is not None:
            self._class_losses.close()
            self._class_losses = None

    def weights(self) -> Weights | None:
        """Some weights, to compare the ranks; None: ``runtime.compare_ranks`` is off."""
        return None if self._optimizers is None else self._optimizers.weights()

    def cached(self, key: str, build: Callable[[], Any]) -> Any:
        """The value of ``build()``, computed once for all ranks and later runs, mapped from a file.

        Args:
            key: identifies the value; use a new key for a new value.
            build: returns tensors (or dicts, lists, tuples of them).

        Returns:
            The value, its tensors mapped from disk (writes stay private).
        """
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        path = Path(self.config.runtime.output_dir).expanduser() / ".cache" / f"{name}.pt"
        with self.pause_hang_detection(f"cached({key!r})"), exclusive(path):
            if not path.exists():
                write_state(path, {"value": build()})
            return read_state(path, mmap=True)["value"]

    @contextmanager
    def pause_hang_detection(self, what: str) -> Iterator[None]:
        """Inside ``with ctx.pause_hang_detection("download"):``, a silent, idle rank is no hang."""
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


def _as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics are {reprlib.repr(metrics)} (a {type(metrics).__name__}), not a dict\n"
            "  Allowed: a dict of names and numbers\n"
            '  Do now:  write {"loss": value}'
        )
    values = {}
    for name, value in metrics.items():
        try:
            values[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"the metric {name!r} is {value!r} (a {type(value).__name__}), not a number\n"
                "  Allowed: int, float, bool, and tensors or arrays of one element\n"
                "  Do now:  report a number, for example value.mean()"
            ) from None
    return values


def _as_step(step: Any) -> int | None:
    """The step as an int; also of NumPy's and torch's numbers."""
    try:
        if isinstance(step, str):
            raise TypeError
        return None if step is None else int(step)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise TypeError(
            f"step is {step!r} (a {type(step).__name__}), not a number\n"
            "  Allowed: a whole number, such as the optimizer step or the epoch; None\n"
            "  Do now:  pass step=<number>; put names into the metric's name"
        ) from None


def _caller() -> str:
    """File and line of the user's call: the innermost frame outside this package."""
    frame = sys._getframe(1)
    here = os.path.dirname(os.path.dirname(__file__))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
