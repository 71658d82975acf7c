"""Define the run context, what ``train(config, ctx)`` sees of its run."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import reprlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from nbtoolkit.config.aliases import refuse_old_name
from nbtoolkit.config.validation import mark_used, unused_settings
from nbtoolkit.errors import CheckpointError, ReportError, RunStopped
from nbtoolkit.run import messages
from nbtoolkit.run.checkpoint_store import read_state, write_state
from nbtoolkit.worker.channel import Channel

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from nbtoolkit.run.rank_check import SteppedOptimizers, Weights
    from nbtoolkit.run.request import JobSpec
    from nbtoolkit.worker.loss_checks import ClassLosses


class RunContext:
    """One rank's view of its run. Everything else a training function needs is in ``config``.

    Attributes:
        config: the resolved configuration.
        plan: what was decided for this launch, with reasons.
        paths: the run's folder.
        rank: this process, 0 to ``world_size - 1``.
        local_rank: its number on this machine; the index of its device.
        world_size: the number of ranks.
        device: the ``torch.device`` of this rank.
        seed: the run's seed (equal on all ranks).
        fold: a fold with ``index, train_indices, valid_indices``; None outside cross-validation.
        deadline: unix time at which the run is asked to leave; None: no limit.
    """

    def __init__(
        self,
        job: JobSpec,
        channel: Channel,
        *,
        rank: int = 0,
        local_rank: int = 0,
        world_size: int = 1,
        optimizers: SteppedOptimizers | None = None,
    ) -> None:
        self.config, self.plan, self.paths = job.config, job.plan, job.paths
        self.rank, self.local_rank, self.world_size = rank, local_rank, world_size
        self.deadline, self._params, self.fold = job.deadline, dict(job.params), job.fold
        self.seed: int = job.config.seed
        self._channel = channel
        self._accelerator: Accelerator | None = None
        self._optimizers = optimizers
        self._class_losses: ClassLosses | None = None

    if not TYPE_CHECKING:  # type checkers are to know the attributes that there are

        def __getattr__(self, name: str) -> NoReturn:
            """Refuse an unknown name; one of version 0.1 with its new name."""
            refuse_old_name(f"ctx.{name}")
            raise AttributeError(f"the run context has no attribute {name!r}")

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

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
        """An ``accelerate.Accelerator`` set up from the plan; built when first asked for.

        Its ``prepare`` is :meth:`prepare`.
        """
        if self._accelerator is None:
            from nbtoolkit.worker.prepare import make_accelerator

            self._accelerator = make_accelerator(self)
        return self._accelerator

    def print(self, *values: Any, **options: Any) -> None:
        """``print`` on the main rank, nothing on the others."""
        if self.is_main:
            print(*values, **options)

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Note metrics of this moment; cheap, no collective; the other ranks' calls do nothing.

        Args:
            metrics: names and numbers (a tensor of one element is a number).
            step: the optimizer step they belong to.

        Raises:
            TypeError: a value or the step is not a number.
        """
        if self.is_main:
            self._channel.send(messages.MetricsSent(values=_numbers(metrics), step=_whole(step)))

    def report(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Report a validation's metrics; called by **all** ranks, once each. May not return.

        The ranks wait for each other here, and then all go on, or all leave the training function:
        because somebody pressed stop, the time budget is used up, or the trial is pruned. Rank 0's
        values count.

        Args:
            metrics: names and numbers.
            step: the optimizer step (or epoch) they belong to.

        Raises:
            RunStopped: the run is to end here (a BaseException: let it pass).
            ReportError: another rank is not coming to this call.
        """
        values, at = _numbers(metrics), _whole(step)
        if self._channel.alone and not self.stop_requested():
            self._channel.send(messages.Reported(values=values, step=at))
        else:
            weights, where = self.weights(), _caller()
            self._together(
                messages.ReportRequest(values=values, step=at, weights=weights, where=where)
            )

    def announce(
        self, names: Sequence[str], stems: Sequence[str] = (), *, first_step: int = 0
    ) -> None:
        """Say which metrics will be reported, so that a search over a misspelt one ends now.

        Args:
            names: of the metrics; others may still come.
            stems: beginnings of names that are not known yet.
            first_step: the step of the first report; Optuna's pruners count from 0.
        """
        if self.is_main:
            self._channel.send(
                messages.MetricsAnnounced(
                    names=list(names), stems=list(stems), first_step=first_step
                )
            )

    def raise_if_stopped(self, *, reserve: float = 0.0) -> None:
        """Ask whether to go on, inside a long epoch; called by **all** ranks. May not return.

        As :meth:`report`, without metrics: all ranks go on, or all leave the training function. It
        costs what a small collective costs (about 0.2 ms): every few seconds is enough.

        Args:
            reserve: seconds you need to save before the run can end: with a deadline nearer than
                that all ranks leave now. Rank 0's counts.

        Raises:
            RunStopped: the run is to end here (a BaseException: let it pass).
            ReportError: another rank is not coming to this call.
        """
        if status := self.should_stop(reserve=reserve):
            raise RunStopped(status)

    def should_stop(self, reserve: float = 0.0) -> str | None:
        """As :meth:`check`, but the status is returned, so that a loop can save before it leaves.

        Returns:
            None: go on. ``"stopped"``, ``"deadline"`` or ``"pruned"``, the same on all ranks: save,
            then ``raise nb.RunStopped(status)``.

        Raises:
            ReportError: another rank is not coming to this call.
        """
        return self._ask(messages.StopCheck(reserve=float(reserve), where=_caller()))

    def stop_requested(self) -> bool:
        """Whether all ranks should come to :meth:`check` now; for rank 0, False on the others.

        Somebody pressed stop, a signal came, or the deadline is reached. No collective, never
        waits, 2 us: a loop may ask in every step. The other ranks must hear of it from rank 0.
        """
        if not self.is_main:
            return False
        late = self.deadline is not None and time.time() >= self.deadline
        return late or self._channel.news()

    def message(self, text: str, level: Literal["info", "warning"] = "info") -> None:
        """Show the user a sentence, and keep it in the run's events; the main rank's counts."""
        if self.is_main:
            self._channel.send(messages.NoteSent(text=text, level=level))

    def tell_unread(self, reads: set[str]) -> None:
        """Warn of settings that had no effect on the function, which read ``reads`` of them."""
        if self.is_main and (text := unused_settings(self.config, reads, self._params)) is not None:
            self._channel.send(messages.SettingsUnread(text=text))

    def note_saved(self, path: str | os.PathLike[str], step: int | None, kind: str) -> None:
        """Note a checkpoint that is written without :meth:`save`; the main rank's, any thread's."""
        if self.is_main:
            self._channel.send(
                messages.CheckpointWritten(path=str(path), step=_whole(step), kind=kind)
            )

    def save(
        self, state: Mapping[str, Any], *, kind: str = "last", step: int | None = None
    ) -> Path:
        """Save a checkpoint; called by **all** ranks, written by the main one, whole or not at all.

        Args:
            state: tensors, numbers, strings, and dicts, lists, tuples of them (``state_dict()`` is
                that), so that ``torch.load(path, weights_only=True)`` reads it.
            kind: ``"last"``, ``"best"`` or a name of your own; the file ``checkpoints/<kind>.pt``
                is replaced.
            step: the optimizer step it belongs to.

        Returns:
            The file, there on return on every rank.

        Raises:
            CheckpointError: the state holds something else (names it), ``kind`` is no name, or the
                disk is full.
            ReportError: another rank is not coming to this call.
        """
        path, where = self._checkpoint(kind), _caller()
        # only when all ranks are here: one that is late must not load what is saved now
        self._together(messages.SaveRequest(where=where))
        if self.is_main:
            write_state(path, state)
        self._together(
            messages.CheckpointRequest(path=str(path), step=_whole(step), kind=kind, where=where)
        )
        return path

    def load(self, kind: str = "last") -> dict[str, Any] | None:
        """The state last saved as ``kind`` in this run, on the CPU; None when there is none.

        Raises:
            CheckpointError: the file is damaged.
        """
        path = self._checkpoint(kind)
        return read_state(path) if path.exists() else None

    def prepare(self, *objects: Any) -> Any:
        """Prepare your own loop's model, optimizer and loaders, as ``Accelerator.prepare`` does.

        A loader's ``batch_size`` is the global batch: the ranks divide each batch among them (one
        with a ``DistributedSampler`` has a rank's batch size). No sample comes twice. A model gets
        ``distributed.sync_batchnorm``.

        Raises:
            PlanError: a loader's batches cannot be divided by the ranks, a step of training would
                not be the mean over its samples, or the model is wrapped already. Later, when the
                loop trains with class weights or ignored targets, whose mean is over weights.
        """
        return self.accelerator.prepare(*objects)

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model as it was before :meth:`prepare`: its ``state_dict()`` has the plain names."""
        plain: torch.nn.Module = self.accelerator.unwrap_model(model)
        return plain

    def refuse_weighted_losses(self) -> None:
        """From here on, and until :meth:`close`, an own loop's loss must be a mean over samples."""
        if self._class_losses is None:
            from nbtoolkit.worker.loss_checks import ClassLosses

            self._class_losses = ClassLosses()

    def close(self) -> None:
        """The training function has ended: what it had changed in this process is as before."""
        if self._class_losses is not None:
            self._class_losses.close()
            self._class_losses = None

    def weights(self) -> Weights | None:
        """What the ranks are compared by; None: nothing is (``runtime.compare_ranks``)."""
        return None if self._optimizers is None else self._optimizers.weights()

    def cached(self, key: str, build: Callable[[], Any]) -> Any:
        """``build()``, but once for all ranks and later runs; the others map its file.

        Args:
            key: names the content; a new content needs a new key.
            build: makes tensors (or dicts, lists, tuples of them).

        Returns:
            The built value, its tensors mapped from disk (writes stay private).
        """
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        path = Path(self.config.runtime.output_dir).expanduser() / ".cache" / f"{name}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        long = self.pause_hang_detection(f"cached({key!r})")
        with long, path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                write_state(path, {"value": build()})
            return read_state(path, mmap=True)["value"]

    @contextmanager
    def pause_hang_detection(self, what: str) -> Iterator[None]:
        """Inside ``with ctx.pause_hang_detection("download"):`` a rank may be silent and idle."""
        self._channel.send(messages.LongOperation(what=what, entered=True))
        try:
            yield
        finally:
            self._channel.send(messages.LongOperation(what=what, entered=False))

    def _checkpoint(self, kind: str) -> Path:
        if not re.fullmatch(r"[^./][^/]*", kind):  # "../../x" would leave the run's folder
            raise CheckpointError(
                f"kind={kind!r} cannot name a checkpoint",
                allowed="a name without '/' and a leading '.': the file is checkpoints/<kind>.pt",
                do='choose a plain name, such as kind="epoch_3"',
            )
        return self.paths.checkpoints / f"{kind}.pt"

    def _together(self, question: messages.Question) -> None:
        """One call that every rank makes; leaves where the answer says so."""
        if status := self._ask(question):
            raise RunStopped(status)

    def _ask(self, question: messages.Question) -> str | None:
        """One call that every rank makes; the status to leave with, or None."""
        reply = self._channel.ask(question)
        if isinstance(reply, messages.CallRefused):
            raise ReportError(reply.what, allowed=reply.allowed, do=reply.do)
        return reply.leave

    def __repr__(self) -> str:
        rank = f"{self.rank}({self.world_size})"
        return f"RunContext(rank={rank}, device={self.device}, run={self.paths.run_id})"


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
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


def _whole(step: Any) -> int | None:
    """A step as the whole number it stands for (NumPy's and torch's are taken too)."""
    try:
        if isinstance(step, str):
            raise TypeError
        return None if step is None else int(step)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise TypeError(
            f"step is {step!r} (a {type(step).__name__}), not a number\n"
            "  Allowed: a whole number, such as the optimizer step or the epoch; None\n"
            "  Do now:  pass step=<number>; what has a name belongs into the metric's name"
        ) from None


def _caller() -> str:
    """File and line of the user's call: the innermost frame outside this package."""
    frame = sys._getframe(1)
    here = os.path.dirname(os.path.dirname(__file__))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
