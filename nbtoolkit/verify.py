"""Check that a training function gives equal results on several processes and after a kill.

- ``nb.verify.parity(train, config)`` compares a run on one process with a run on several.
- ``nb.verify.resume(train, config)`` compares a killed and resumed run with an uninterrupted one.

Each of them runs the whole training twice, so use a configuration that takes seconds.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from nbtoolkit import cards
from nbtoolkit.config.aliases import refuse_other_launchers_names
from nbtoolkit.config.schema import Config, ConfigLike, as_config
from nbtoolkit.errors import NbtoolkitError, WorkerDied
from nbtoolkit.launcher.train_function import check_function
from nbtoolkit.run.checkpoints.checkpoint_store import has_checkpoint, read_state
from nbtoolkit.run.checkpoints.weights import find_weights
from nbtoolkit.run.events import EventReader, MetricsLogged, MetricsReported
from nbtoolkit.worker.metric_values import numbers_and_step
from nbtoolkit.worker.random_numbers import read_inexact

if TYPE_CHECKING:
    from torch import Tensor

    from nbtoolkit.launcher.run_result import RunResult
    from nbtoolkit.worker.context import RunContext

Train = Callable[..., object]
_Step = TypeVar("_Step")
_KILLED = "killed"  # marker file in the folder of a run that has been killed once


@dataclass(frozen=True)
class Comparison:
    """The differences between two runs of one training function.

    Attributes:
        what: a description of the two runs.
        tolerance: values that differ by at most this much count as equal.
        steps: the number of steps whose logged losses were compared; None: no loss was logged.
        first_other_step: the first step whose losses differ by more than the tolerance, or whose
            loss only one of the runs logged; None if there is none.
        loss: the largest difference of a logged loss; None: no loss was logged.
        metrics: the largest difference of each reported metric.
        weights: the largest difference of a weight in the last checkpoints; None: there are no
            checkpoints.
        inexact: layers, random generators and GPU kernels that cannot give exactly equal results,
            with the reason: they depend on the ranks, on random numbers, or on the order in which
            the GPU adds.
    """

    what: str
    tolerance: float
    steps: int | None
    first_other_step: int | None
    loss: float | None
    metrics: dict[str, float]
    weights: float | None
    inexact: dict[str, str]

    @property
    def passed(self) -> bool:
        """Whether every difference is within the tolerance; False if nothing was compared."""
        return self.largest <= self.tolerance

    @property
    def largest(self) -> float:
        """The largest of all differences; NaN if nothing was compared."""
        differences = [self.loss, self.weights, *self.metrics.values()]
        return max((value for value in differences if value is not None), default=math.nan)

    def explain(self) -> str:
        """Describe the differences, one per line."""
        rows = (f"  {name}: {text}" for name, text in self._rows())
        return "\n".join([f"{self._outcome()}: {self.what}", *rows])

    def _outcome(self) -> str:
        if self.passed:
            return "equal"
        if math.isnan(self.largest):
            return "nothing was compared (ctx.log, ctx.report or ctx.save give values)"
        return "DIFFERENT"

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "loss of each step", self._losses()
        if self.loss is not None:
            yield "loss", _difference_text(self.loss, "")
        for name, value in self.metrics.items():
            yield name, _difference_text(value, "")
        yield "weights", _difference_text(self.weights, "no checkpoint")
        yield "tolerance", f"{self.tolerance:g}"
        for name, reason in self.inexact.items():
            yield f"inexact by nature: {name}", reason

    def _losses(self) -> str:
        if self.steps is None:
            return "not logged"
        if self.first_other_step is not None:
            return f"differs, first in step {self.first_other_step}"
        return f"equal in {self.steps} steps"

    __str__ = explain

    def _repr_html_(self) -> str:
        return cards.html([cards.Card("", [cards.Text(self.explain(), "code")], span=4)])


@refuse_other_launchers_names
def parity(
    train: Train, config: ConfigLike, *, processes: int = 2, tolerance: float = 1e-5
) -> Comparison:
    """Run ``train`` on one process and on several, and compare the results.

    Args:
        train: a training function that logs its loss (``nb.fit`` does), reports or saves.
        config: a configuration that takes seconds, for example with ``train.max_steps: 50``.
            Tracking is switched off.
        processes: the number of processes of the second run.
        tolerance: values that differ by at most this much count as equal. Sums in float32 differ by
            about 1e-6 if their order differs.

    Raises:
        Exception: an exception of ``train``.
    """
    recorded = _Recorded(train)
    with _scratch(config) as settings:
        single = _launch(recorded, settings, processes=1)
        several = _launch(recorded, settings, processes=processes)
        description = f"1 process compared with {processes}"
        return _compare(description, single, several, tolerance=tolerance)


@refuse_other_launchers_names
def resume(
    train: Train,
    config: ConfigLike,
    *,
    processes: int | None = None,
    at: float = 0.5,
    tolerance: float = 0.0,
) -> Comparison:
    """Run ``train`` once without interruption and once with a SIGKILL and a resume, and compare.

    Args:
        train: a training function that logs (``nb.fit`` does) and saves.
        config: a configuration that takes seconds. The interrupted run saves a checkpoint every few
            steps, and tracking is switched off.
        processes: the number of ranks, as in :func:`nbtoolkit.launch`.
        at: the share of the logged steps after which the SIGKILL is sent.
        tolerance: values that differ by at most this much count as equal; 0: every bit must be
            equal.

    Raises:
        NbtoolkitError: ``train`` logs fewer than two steps, or saves no checkpoint to resume from.
        Exception: an exception of ``train``.
    """
    with _scratch(config) as settings:
        whole = _launch(_Recorded(train), settings, processes=processes)
        last = max(_losses(whole), default=0)
        if last < 2:
            raise NbtoolkitError(
                f"the run logged {last} steps, too few to kill it in the middle",
                allowed="a function that calls nb.fit, or ctx.log({'loss': ...}, step=...)",
                do="log every optimizer step, and train for two steps or more",
            )
        killed_at = max(1, round(at * last))
        often = settings.with_overrides({"checkpoint.every_steps": max(1, killed_at // 2)})
        killed = _KilledOnce(train, killed_at)
        try:
            _launch(killed, often, processes=processes, name="interrupted")
        except WorkerDied:
            pass
        else:
            raise NbtoolkitError(
                f"the function saved nothing between step {killed_at} and its end",
                allowed="a function that calls nb.fit, or ctx.save and ctx.load",
                do="save in the loop, and load before it",
            )
        resumed = _launch(killed, often, processes=processes, name="interrupted", resume="auto")
        description = (
            f"killed at step {killed_at} of {last} and resumed, compared with an uninterrupted run"
        )
        return _compare(description, whole, resumed, tolerance=tolerance)


class _Recorded:
    """A training function whose run records what cannot give exactly equal results.

    Args:
        train: the training function.

    Raises:
        LaunchError: it cannot be called as ``train(config, ctx)``.
    """

    def __init__(self, train: Train) -> None:
        # A launch checks this object, which can be called with any training function inside.
        check_function(train)
        self.__wrapped__ = train
        self.__name__ = getattr(train, "__name__", "train")

    def __call__(self, config: Config, ctx: RunContext) -> object:
        ctx.records_inexact = True
        return self.__wrapped__(config, ctx)


class _KilledOnce(_Recorded):
    """A training function whose main rank kills itself in its first attempt.

    Args:
        train: the training function.
        step: the logged step from which on the rank is killed, once a checkpoint exists.
    """

    def __init__(self, train: Train, step: int) -> None:
        super().__init__(train)
        self._step = step

    def __call__(self, config: Config, ctx: RunContext) -> object:
        marker = ctx.paths.folder / _KILLED
        log = ctx.log

        def log_or_die(
            metrics: Mapping[str, Any] | None = None, step: int | None = None, **named: Any
        ) -> None:
            log(metrics, step, **named)
            _, at = numbers_and_step(metrics, step, named)
            due = ctx.is_main and at is not None and at >= self._step
            if due and not marker.exists() and has_checkpoint(ctx.paths.checkpoints):
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        ctx.log = log_or_die  # type: ignore[method-assign]
        return super().__call__(config, ctx)


@contextmanager
def _scratch(config: ConfigLike) -> Iterator[Config]:
    """Yield the configuration for runs in a temporary folder, with every step logged."""
    with tempfile.TemporaryDirectory(prefix="nbtoolkit-verify-") as folder:
        yield as_config(config).with_overrides(
            {
                "runtime.output_dir": folder,
                "runtime.restarts": 0,
                "tracking.mlflow": False,
                "tracking.tensorboard": False,
                "tracking.wandb": False,
                "tracking.log_every_n_steps": 1,
                "checkpoint.enabled": True,
            }
        )


def _launch(
    train: Train,
    config: Config,
    *,
    processes: int | None,
    name: str | None = None,
    resume: str = "never",
) -> RunResult:
    from nbtoolkit.launcher.launch import launch

    return launch(train, config, processes=processes, name=name, resume=resume, display="off")


def _compare(description: str, run: RunResult, other: RunResult, *, tolerance: float) -> Comparison:
    """Compare two runs, of which ``other`` has as many ranks as ``run``, or more."""
    reports = _reports(run)
    other_reports = _reports(other)
    losses = _losses(run)
    other_losses = _losses(other)
    inexact = read_inexact(other.paths)
    if run.plan.device_type == "cuda":
        # Two equal runs differ: on an H100, convolutions in fp32 by 6e-8 after 40 steps.
        inexact["the GPU's kernels"] = (
            "some add in any order; torch.backends.cudnn.deterministic = True makes convolutions "
            "exact (torch.use_deterministic_algorithms for all)"
        )
    return Comparison(
        what=description,
        tolerance=tolerance,
        steps=len({*losses, *other_losses}) or None,
        first_other_step=_first_other_step(losses, other_losses, tolerance),
        loss=difference(losses, other_losses) if losses or other_losses else None,
        metrics={
            name: difference(reports.get(name, {}), other_reports.get(name, {}))
            for name in {**reports, **other_reports}
        },
        weights=_weight_difference(run, other),
        inexact=inexact,
    )


def _losses(run: RunResult) -> dict[int, float]:
    """Return the logged training loss of each step; the last one of a repeated step."""
    events = EventReader(run.paths.events).read()
    logged = (event for event in events if isinstance(event, MetricsLogged))
    return {
        event.step: event.values["loss"]
        for event in logged
        if "loss" in event.values and event.step is not None
    }


def _reports(run: RunResult) -> dict[str, dict[int | None, float]]:
    """Return the reported values by name and step; None: the last one.

    A returned number is an event of its own only if it differs from the last report, so its event
    may exist in one of two runs that differ by a rounding error.
    """
    curves: dict[str, dict[int | None, float]] = {}
    for event in EventReader(run.paths.events).read():
        if isinstance(event, MetricsReported):
            for name, value in event.values.items():
                curves.setdefault(name, {}).update({event.step: value, None: value})
    return curves


def _first_other_step(
    losses: Mapping[int, float], others: Mapping[int, float], tolerance: float
) -> int | None:
    for step in sorted({*losses, *others}):
        missing = step not in losses or step not in others
        if missing or _gap(losses[step], others[step]) > tolerance:
            return step
    return None


def difference(curve: Mapping[_Step, float], other: Mapping[_Step, float]) -> float:
    """Return the largest difference of two curves; infinite if they have different steps."""
    if curve.keys() != other.keys():
        return math.inf
    return max((_gap(value, other[step]) for step, value in curve.items()), default=0.0)


def _gap(value: float, other: float) -> float:
    if value == other or (math.isnan(value) and math.isnan(other)):
        return 0.0
    gap = abs(value - other)
    # max() would pass over a NaN.
    return math.inf if math.isnan(gap) else gap


def _weight_difference(run: RunResult, other: RunResult) -> float | None:
    """Return the largest difference of a tensor in the last checkpoints."""
    path, other_path = (find_weights(each.paths.folder, "last") for each in (run, other))
    if path is None or other_path is None:
        return None
    tensors, others = (dict(_tensors(read_state(each))) for each in (path, other_path))
    if tensors.keys() != others.keys():
        return math.inf
    return max((_distance(tensors[name], others[name]) for name in tensors), default=0.0)


def _tensors(state: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a state and of its nested dicts, by dotted name."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{name}.")
        elif hasattr(value, "is_floating_point"):
            yield f"{prefix}{name}", cast("Tensor", value)


def _distance(tensor: Tensor, other: Tensor) -> float:
    if tensor.shape != other.shape:
        return math.inf
    return float((tensor.double() - other.double()).abs().max()) if tensor.numel() else 0.0


def _difference_text(value: float | None, absent: str) -> str:
    return absent if value is None else "no difference" if value == 0 else f"at most {value:.2g}"
