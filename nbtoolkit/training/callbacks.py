"""Call the user's objects at named moments of a fit, and keep their state in the checkpoints."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import FitError, RunStopped
from nbtoolkit.run.checkpoints.checkpoint_store import State, dump_state
from nbtoolkit.training.data import noted
from nbtoolkit.training.optim import required_arguments
from nbtoolkit.worker.collectives import gather_on_all

if TYPE_CHECKING:
    import torch
    from torch.profiler import profile

    from nbtoolkit.worker.context import RunContext


@dataclass(frozen=True)
class FitState:
    """The state of a training with ``fit``, which the methods of a callback get.

    Attributes:
        epoch: the number of the current epoch, from 1. In ``on_fit_start`` and ``on_fit_end``, the
            number of finished epochs.
        step: the number of finished optimizer steps.
        metrics: the metrics of the current epoch. As long as this epoch has none, the metrics of
            the epoch before. They are equal on all ranks.
        model: the module that you passed to ``fit``, without a wrapper, on this rank's device.
        optimizer: the optimizer.
        ctx: the run's context.
    """

    epoch: int
    step: int
    metrics: Mapping[str, float]
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    ctx: RunContext
    _stop: Callable[[str], None]

    def stop(self, reason: str) -> None:
        """End the training on all ranks, within about a second.

        It is enough if one rank calls this. ``fit`` then validates, reports and saves the current
        epoch, and returns as after its last epoch.
        """
        self._stop(reason)


class Callback:
    """The base class of callbacks for ``nb.fit``; its methods do nothing.

    The methods have the names of Lightning's methods that are called at the same moments, but each
    of them gets one argument only, a :class:`FitState`. ``fit`` calls them on all ranks, in the
    order of ``callbacks``. A callback need not be a subclass: any object with some of these methods
    is a callback.
    """

    def on_fit_start(self, state: FitState) -> None:
        """Run before the first step; in a resumed run, after its state was restored."""

    def on_train_epoch_start(self, state: FitState) -> None:
        """Run before the first step of an epoch; in a resumed epoch, before its next step."""

    def on_train_batch_end(self, state: FitState) -> None:
        """Run after each optimizer step, not after each micro-batch."""

    def on_train_epoch_end(self, state: FitState) -> None:
        """Run after the last step of an epoch and before its validation.

        ``state.metrics`` has the training losses of the epoch.
        """

    def on_validation_end(self, state: FitState) -> Mapping[str, float] | None:
        """Run after the validation of each epoch, and also if there is no ``valid_data``.

        Returns:
            More metrics for this epoch, or None. ``fit`` reports them, a sweep can prune trials by
            them, and ``checkpoint.monitor`` can name one. The values of rank 0 count.
        """

    def on_save_checkpoint(self, state: FitState) -> None:
        """Run before a checkpoint is made, on rank 0 only."""

    def on_fit_end(self, state: FitState) -> None:
        """Run after the last epoch, when the model has the weights of ``checkpoint.weights``."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as tensors and plain values; rank 0's is saved."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`; called on all ranks, before :meth:`on_fit_start`."""


MOMENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    """The callbacks of one fit.

    Args:
        callbacks: the user's.
        rank: this rank.
        ranks: the number of ranks.

    Raises:
        FitError: one has no moment of :class:`Callback`, an unknown one, or one with other
            arguments.
    """

    def __init__(self, callbacks: Iterable[object], rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._reason = ""
        self._moments: dict[str, list[tuple[str, Callable[..., Any]]]] = {}
        self._named: dict[str, object] = {}
        for callback in callbacks:
            name = type(callback).__qualname__
            if name in self._named:
                name = f"{name} {len(self._named) + 1}"
            _check(callback, name)
            self._named[name] = callback
            for moment in (*MOMENTS, "state_dict", "load_state_dict"):
                if _implements(callback, moment):
                    self._moments.setdefault(moment, []).append((name, getattr(callback, moment)))

    def __bool__(self) -> bool:
        return bool(self._named)

    def have(self, moment: str) -> bool:
        """Whether a callback implements a method."""
        return moment in self._moments

    def call(self, moment: str, state: FitState) -> dict[str, float]:
        """Call a method of all callbacks that have it; returns the metrics they return.

        Raises:
            Exception: a callback's own, with a note of its name and the rank.
        """
        added: dict[str, float] = {}
        for name, method in self._moments.get(moment, ()):
            returned = self._run(moment, name, method, state)
            if moment == "on_validation_end" and returned is not None:
                values = {str(key): float(value) for key, value in returned.items()}
                if taken := {*values} & {*state.metrics, *added}:
                    raise FitError(
                        f"the callback {name} returns the metric {min(taken)!r}, which is there",
                        allowed="metrics with names of their own",
                        do="rename it",
                    )
                added |= values
        return added

    def request_stop(self, reason: str) -> None:
        """Ask for the end of the training."""
        self._reason = self._reason or reason or "no reason given"

    @property
    def stop_requested(self) -> bool:
        """Whether a callback of this rank has asked for the end."""
        return bool(self._reason)

    def agree(self, added: Mapping[str, float]) -> tuple[str, Mapping[str, float]]:
        """Return the reason to stop ("": none) and rank 0's ``added``, on all ranks.

        A collective.
        """
        gathered = gather_on_all((self._reason, added), self._ranks)
        return next((reason for reason, _ in gathered if reason), ""), gathered[0][1]

    def state(self) -> State:
        """Return the states to save, by callback."""
        methods = self._moments.get("state_dict", ())
        return {name: self._run("state_dict", name, method) for name, method in methods}

    def restore(self, states: State) -> None:
        """Continue from a :meth:`state`; a callback that it does not know starts anew."""
        for name, method in self._moments.get("load_state_dict", ()):
            if name in states:
                self._run("load_state_dict", name, method, states[name])

    def check_states(self) -> None:
        """Refuse a state that a checkpoint cannot hold."""
        for name, state in self.state().items():
            self._run("state_dict", name, dump_state, state, io.BytesIO())

    def _run(self, moment: str, name: str, method: Callable[..., Any], *args: object) -> Any:
        with noted(f"in {moment} of the callback {name}, on rank {self._rank}"):
            return method(*args)


def _implements(callback: object, moment: str) -> bool:
    """Whether an object has a method, other than :class:`Callback`'s own."""
    method = getattr(callback, moment, None)
    return callable(method) and getattr(method, "__func__", method) is not vars(Callback)[moment]


def _check(callback: object, name: str) -> None:
    hooks = [hook for hook in dir(callback) if hook.startswith("on_")]
    several = [
        hook
        for hook in hooks
        if hook in MOMENTS and required_arguments(getattr(callback, hook)) != 1
    ]
    unknown = [hook for hook in hooks if hook not in MOMENTS]
    if isinstance(callback, type):
        fault = f"the callback {callback.__name__} is a class"
        do = "pass an object: add ()"
    elif several:
        fault = f"{several[0]} of the callback {name} does not take one argument, the state"
        do = f"define it as {several[0]}(self, state): state has epoch, metrics, model and ctx"
    elif unknown:
        fault = f"fit never calls {unknown[0]} of the callback {name}"
        do = "rename it"
    elif not hooks:
        fault = f"the callback {name} has no method that fit calls"
        do = "derive from nb.Callback"
    else:
        return
    raise FitError(fault, allowed=", ".join(MOMENTS), do=do)


# Optimizer steps that pass first, that warm the profiler up, and that are recorded.
WAIT = 5
WARM_UP = 2
ACTIVE = 5

_ROWS = 10
_NAME_WIDTH = 40


class StepProfiler(Callback):
    """Records optimizer steps of the first epoch that this process trains, on each rank.

    The trace goes to ``ranks/<rank>/trace.json.gz`` of the run (for https://ui.perfetto.dev or
    chrome://tracing), and rank 0 prints the operators that took the most time. See
    https://docs.pytorch.org/docs/stable/profiler.html.

    Args:
        ctx: the run's context.
    """

    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx
        self._per_epoch: int | None = None
        self._total = WAIT + WARM_UP + ACTIVE
        self._profile: profile | None = None
        self._ready = False

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or isinstance(error, RunStopped):
            self.close()
            return
        with contextlib.suppress(RuntimeError):  # of a broken device: the first error matters
            self.close()

    def expect(self, per_epoch: int | None, total: int) -> None:
        """Say how many optimizer steps an epoch (None: unknown) and the run have."""
        self._per_epoch = per_epoch
        self._total = total

    def on_train_epoch_start(self, state: FitState) -> None:
        """Start, in the first epoch that has a step left."""
        from torch.profiler import ProfilerActivity, profile, schedule

        if self._ready:
            return
        activities = [ProfilerActivity.CPU]
        if self._ctx.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        left = self._total - state.step
        if self._per_epoch is not None:
            left = min(left, state.epoch * self._per_epoch - state.step)
        if left < 1:
            return  # resumed after the last step of this epoch: the next one is recorded
        wait, warm_up, active = split_steps(left)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=warm_up, active=active, repeat=1),
            on_trace_ready=self._keep,
        )
        self._profile.start()

    def on_train_batch_end(self, state: FitState) -> None:
        """Count an optimizer step."""
        if self._profile is not None:
            self._profile.step()
            if self._ready:
                self.close()

    def on_train_epoch_end(self, state: FitState) -> None:
        """Stop, if the epoch was shorter than expected."""
        self.close()

    def close(self) -> None:
        """Stop; keeps what was recorded so far. May be called twice."""
        profile = self._profile
        self._profile = None
        if profile is not None:
            profile.stop()
            if not self._ready:
                self._ctx.print("profile: the run stopped before a step was recorded")
            self._ready = True

    def _keep(self, profile: profile) -> None:
        """Write the trace, and print the table; torch calls it when the last step is recorded."""
        if self._ready:
            return
        self._ready = True
        trace = self._ctx.paths.trace(self._ctx.rank)
        hidden = trace.with_name(f".{trace.name}")
        trace.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(hidden))
        os.replace(hidden, trace)
        device = "cuda" if self._ctx.device.type == "cuda" else "cpu"
        table = profile.key_averages().table(
            sort_by=f"self_{device}_time_total", row_limit=_ROWS, max_name_column_width=_NAME_WIDTH
        )
        self._ctx.print(f"{table}profile: {trace} (open it in https://ui.perfetto.dev)")


def split_steps(steps: int) -> tuple[int, int, int]:
    """How many of ``steps`` optimizer steps to wait for, to warm up in, and to record."""
    active = min(ACTIVE, max(1, steps // 2))
    warm_up = min(WARM_UP, steps - active)
    return min(WAIT, steps - active - warm_up), warm_up, active
