"""Run a training function for a few optimizer steps, and measure its speed and memory.

A probe is a run of its own, in a scratch folder that is deleted afterwards: nothing of it is left
in the runs of the user, and a device is clean when its processes have ended.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.resources import is_running
from nbtoolkit.errors import LossNotFinite, TuningError
from nbtoolkit.launcher.failures import is_out_of_memory
from nbtoolkit.launcher.handle import RunHandle
from nbtoolkit.launcher.launch import Train, launch
from nbtoolkit.launcher.measured import unmeasured
from nbtoolkit.run.events import Event, MetricsLogged, MetricsReported, RunStarted

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config

# Settings of every probe: it writes nothing but its events, and logs every step.
_QUIET = {
    "tracking.mlflow": False,
    "tracking.tensorboard": False,
    "tracking.wandb": False,
    "tracking.device_metrics": False,
    "tracking.record_samples": False,
    "tracking.log_every_n_steps": 1,
    "checkpoint.enabled": False,
    "train.early_stopping_patience": None,
    "runtime.deadline": None,
    "runtime.pack": False,
    "distributed.fallback": False,
}
_SCRATCH = "nbtoolkit-probe-"  # followed by the process that made the folder
# In place of `auto`, which a probe does not measure.
_UNMEASURED = {"distributed.strategy": "auto", "optim.lr": 1e-3, "train.num_workers": 0}
LONGEST = 60.0
"""Seconds that a probe may take."""

Status = Literal["measured", "out_of_memory", "not_finite"]


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """What one optimizer step of a probe logged."""

    step: int
    loss: float
    rate: float
    samples: float
    """Samples per second, over all ranks, since the step before."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a short run has shown.

    Attributes:
        status: ``"measured"``; ``"out_of_memory"`` on any rank; or a loss was ``"not_finite"``.
        reason: the error in one line; empty if there was none.
        steps: the logged optimizer steps, in order.
        epochs: how often all samples were taken.
        memory: the largest memory of a rank, in GB (on a GPU the allocator's peak, on the CPU the
            resident memory); 0 if no step was done.
        data_share: the share of the steps' time in which the ranks waited for batches.
        plan: the launch plan; None if the run did not start.
        seconds: what the probe took, its start included.
    """

    status: Status
    reason: str = ""
    steps: tuple[LoggedStep, ...] = ()
    epochs: int = 0
    memory: float = 0.0
    data_share: float = 0.0
    plan: LaunchPlan | None = None
    seconds: float = 0.0

    @property
    def samples_per_second(self) -> float:
        """Throughput of the second half of the steps, over all ranks; 0 if there is none.

        The first half warms up: allocator, caches, cuDNN's choice of kernels.
        """
        rates = [step.samples for step in self.steps[len(self.steps) // 2 :] if step.samples > 0]
        return statistics.harmonic_mean(rates) if rates else 0.0


def probe(
    train: Train,
    config: Config,
    overrides: Mapping[str, object],
    *,
    steps: int,
    processes: int | None = None,
    on_step: Callable[[LoggedStep], bool] | None = None,
) -> Probe:
    """Run ``train`` for ``steps`` optimizer steps, and return what they have shown.

    Args:
        train: a training function that calls :func:`nbtoolkit.fit`.
        config: the configuration of the run to come.
        overrides: settings of this probe.
        steps: optimizer steps.
        processes: ranks; None: as ``config`` says.
        on_step: called with each step, in its order; True ends the probe.

    Raises:
        TuningError: the function did no optimizer step of ``fit`` within a minute.
        Exception: the function's own, unless memory ran out or a loss was not finite.
    """
    _remove_stale()
    with tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{os.getpid()}-") as folder:
        settings = {
            **_QUIET,
            **{name: _UNMEASURED[name] for name in unmeasured(config)},
            "train.epochs": steps,
            "train.max_steps": steps,
            **overrides,
            "runtime.output_dir": folder,
        }
        listener = _Listener(on_step)
        began = time.monotonic()
        handle = launch(
            train,
            config.with_overrides(settings),
            processes=processes,
            resume="never",
            wait=False,
            display="off",
            on_event=listener,
        )
        listener.handle = handle
        status, reason = _wait(handle)
        if status == "measured" and not listener.steps:
            raise TuningError(
                f"{getattr(train, '__name__', 'the function')} did no optimizer step of nb.fit in "
                f"{time.monotonic() - began:.0f} s",
                allowed="training functions that call nb.fit within a minute",
                do="measure a function that calls nb.fit, or choose the setting by hand",
            )
        return Probe(
            status=status,
            reason=reason,
            steps=tuple(listener.steps),
            epochs=listener.epochs,
            memory=listener.memory,
            data_share=statistics.fmean(listener.data_shares or [0.0]),
            plan=listener.plan,
            seconds=time.monotonic() - began,
        )


def _remove_stale() -> None:
    """Remove the scratch folders of processes that were killed in the middle of a probe."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*-*"):
        pid = folder.name.removeprefix(_SCRATCH).partition("-")[0]
        if pid.isdigit() and not is_running(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _wait(handle: RunHandle) -> tuple[Status, str]:
    """Wait for a probe's end; returns how it ended, and its error in one line."""
    try:
        handle.result(timeout=LONGEST)
    except TimeoutError:
        handle.stop("the probe has measured for long enough", grace=0.0)
        handle.result()
    except LossNotFinite as error:
        return "not_finite", str(error).splitlines()[0]
    except Exception as error:
        if is_out_of_memory(error):
            return "out_of_memory", str(error).splitlines()[0]
        raise
    return "measured", ""


class _Listener:
    """Collects the steps of a probe from its events."""

    def __init__(self, on_step: Callable[[LoggedStep], bool] | None) -> None:
        self._on_step = on_step
        self.handle: RunHandle | None = None
        self.steps: list[LoggedStep] = []
        self.epochs = 0
        self.memory = 0.0
        self.data_shares: list[float] = []
        self.plan: LaunchPlan | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.plan = LaunchPlan.from_dict(event.plan)
        if isinstance(event, MetricsReported) and event.step is not None:
            self.epochs = event.step
        if not isinstance(event, MetricsLogged) or event.step is None:
            return
        values = event.values
        used = (value for name, value in values.items() if name.startswith("memory_gb_rank"))
        self.memory = max([self.memory, *used])
        if "data_share" in values:
            self.data_shares.append(values["data_share"])
        if "samples_per_second" not in values:
            return
        step = LoggedStep(
            step=event.step,
            loss=values["loss"],
            rate=values["lr"],
            samples=values["samples_per_second"],
        )
        self.steps.append(step)
        if self._on_step is not None and self._on_step(step) and self.handle is not None:
            self._on_step = None
            self.handle.stop("the probe has measured enough")
