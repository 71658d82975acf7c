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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.resources import try_lock
from nbtoolkit.errors import LossNotFinite, TuningError
from nbtoolkit.extras.tuning.answer import Subject
from nbtoolkit.launcher.launch import launch
from nbtoolkit.launcher.out_of_memory import is_out_of_memory
from nbtoolkit.launcher.run_handle import RunHandle
from nbtoolkit.launcher.run_result import RunResult
from nbtoolkit.run.events import Event, MetricsLogged, MetricsReported, RunStarted

_TRACKERS = ("mlflow", "tensorboard", "wandb", "device_metrics")
QUIET: dict[str, object] = {
    **{f"tracking.{name}": False for name in _TRACKERS},
    "checkpoint.enabled": False,
    "runtime.deadline": None,
    "runtime.pack": False,
    "runtime.restarts": 0,
}
"""Settings of a run that writes nothing but its events, and ends when a rank dies."""
_SCRATCH = "nbtoolkit-probe-"
LONGEST = 60.0
"""Seconds that a probe may take."""

_ENDLESS = 1_000_000  # steps of a probe that ends when it has measured enough

Status = Literal["measured", "out_of_memory", "not_finite"]


class LoggedStep(NamedTuple):
    """What one optimizer step of a probe logged."""

    step: int
    t: float
    """Unix time of the log point."""
    loss: float
    rate: float
    samples: float
    """Samples per second, over all ranks, since the log point before."""


@dataclass(kw_only=True)
class Probe:
    """What a short run has shown.

    Attributes:
        status: ``"measured"``; ``"out_of_memory"`` on any rank; or a loss was ``"not_finite"``.
        reason: the error in one line; empty if there was none.
        steps: the logged optimizer steps, in order.
        epochs: how often all samples were taken.
        memory: the largest memory of a rank, in GB (on a GPU the allocator's peak, on the CPU the
            resident memory); 0 if no step was done.
        plan: the launch plan; None if the run did not start.
        seconds: what the probe took, its start included.
    """

    status: Status = "measured"
    reason: str = ""
    steps: list[LoggedStep] = field(default_factory=list)
    epochs: int = 0
    memory: float = 0.0
    plan: LaunchPlan | None = None
    seconds: float = 0.0

    @property
    def samples_per_second(self) -> float:
        """Throughput of the second half of the steps, over all ranks; 0 if there is none.

        The first half warms up: allocator, caches, cuDNN's choice of kernels, DDP's buckets.
        """
        rates = [step.samples for step in self.steps[len(self.steps) // 2 :] if step.samples > 0]
        return statistics.harmonic_mean(rates) if rates else 0.0

    def add(self, event: Event) -> bool:
        """Take what an event of the run says; returns whether it logs a step."""
        if isinstance(event, RunStarted):
            self.plan = LaunchPlan.from_dict(event.plan)
        if isinstance(event, MetricsReported) and event.step is not None:
            self.epochs = event.step
        if not isinstance(event, MetricsLogged) or event.step is None:
            return False
        values = event.values
        used = (value for name, value in values.items() if name.startswith("memory_gb_rank"))
        self.memory = max([self.memory, *used])
        if "samples_per_second" not in values:
            return False
        while self.steps and self.steps[-1].step >= event.step:  # of ranks that ran out of memory
            self.steps.pop()
        numbers = map(values.__getitem__, ("loss", "lr", "samples_per_second"))
        self.steps.append(LoggedStep(event.step, event.t, *numbers))
        return True


def probe(
    subject: Subject,
    overrides: Mapping[str, object],
    *,
    steps: int,
    seconds: float = 0.0,
    enough: Callable[[Probe], bool] = lambda _: False,
) -> Probe:
    """Run a training function for some optimizer steps, and return what they have shown.

    Args:
        subject: the function and its configuration.
        overrides: settings of this probe.
        steps: optimizer steps.
        seconds: go on after ``steps`` until the steps have taken so long.
        enough: called after each logged step with what there is so far; True ends the probe.

    Raises:
        TuningError: the function did no optimizer step of ``fit`` within a minute.
        Exception: the function's own, unless memory ran out or a loss was not finite.
    """
    result = Probe()
    began = time.monotonic()
    running = list[RunHandle]()

    def listen(event: Event) -> None:
        if not result.add(event) or not running:
            return
        first = result.steps[0]
        last = result.steps[-1]
        over = seconds and last.step >= steps and last.t - first.t >= seconds
        if over or enough(result):
            running.pop().stop("the probe has measured enough")

    train = subject.train
    config = subject.config
    if config.distributed.strategy == "measured":  # no calibration is kept in the scratch folder
        config = config.with_overrides({"distributed.strategy": "auto"})
    most = _ENDLESS if seconds else steps
    with scratch_folder() as folder:
        settings = {
            **QUIET,
            "distributed.fallback": False,
            "tracking.log_every_n_steps": 1,
            "train.early_stopping_patience": None,
            "train.epochs": most,
            "train.max_steps": most,
            **overrides,
            "runtime.output_dir": folder,
        }
        mine = config.with_overrides(settings)
        handle = launch(train, mine, resume="never", wait=False, display="off", on_event=listen)
        running.append(handle)
        try:
            result_within(handle, LONGEST)
        except Exception as error:
            finite = not isinstance(error, LossNotFinite)
            if finite and not is_out_of_memory(error):
                raise
            result.status = "out_of_memory" if finite else "not_finite"
            result.reason = str(error).splitlines()[0]
    result.seconds = time.monotonic() - began
    if result.status == "measured" and not result.steps:
        raise TuningError(
            f"{subject.name} did no optimizer step of nb.fit in {result.seconds:.0f} s",
            allowed="training functions that call nb.fit within a minute",
            do="measure a function that calls nb.fit, or choose the setting by hand",
        )
    return result


@contextmanager
def scratch_folder() -> Iterator[str]:
    """Yield a folder that is deleted at the end.

    Those of processes that were killed are deleted now.

    A process locks its folder: its number would say nothing to a container that shares the disk.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with suppress(OSError), _locked(folder) as free:
            if free:
                shutil.rmtree(folder, ignore_errors=True)
    with ExitStack() as stack:
        while True:
            made = tempfile.mkdtemp(prefix=_SCRATCH)
            # Another probe may delete the folder before it is locked.
            with suppress(FileNotFoundError):
                if stack.enter_context(_locked(Path(made))) and os.path.isdir(made):
                    break
        stack.callback(shutil.rmtree, made, ignore_errors=True)
        yield made


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder inside the block; False if another process has locked it."""
    opened = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield try_lock(opened)
    finally:
        os.close(opened)


def result_within(handle: RunHandle, seconds: float) -> RunResult | None:
    """Return the result of a launch.

    After so many seconds it is stopped, and the result is None.
    """
    try:
        return handle.result(timeout=max(seconds, 0.0))
    except TimeoutError:
        handle.stop("it has run for long enough", grace=0.0)
        handle.result()
        return None
