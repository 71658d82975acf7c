"""Checks of one's own training function: equal on one process and on several, and after a kill.

    nb.verify.parity(train, config)    one process against two: samples, losses, metrics, weights
    nb.verify.resume(train, config)    killed in the middle and gone on with, against never killed

Both run the whole training more than once: give them a configuration that takes seconds.
"""

from __future__ import annotations

import html
import math
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbtoolkit.config.schema import Config, ConfigLike, as_config
from nbtoolkit.errors import NbtoolkitError, WorkerDied
from nbtoolkit.run.checkpoint_store import has_checkpoint, read_state
from nbtoolkit.run.events import EventReader, MetricsLogged, MetricsReported
from nbtoolkit.run.paths import read_json
from nbtoolkit.run.weights import find_weights
from nbtoolkit.training.sampler import read_samples

if TYPE_CHECKING:
    from nbtoolkit.launcher.handle import RunResult
    from nbtoolkit.worker.context import RunContext

Train = Callable[..., Any]
_KILLED = "killed"  # a file in the folder of a run that has been killed once


@dataclass(frozen=True)
class Comparison:
    """What two runs of one training function have in common.

    Attributes:
        what: the two runs, in words.
        tolerance: differences up to this count as equal.
        steps: optimizer steps whose samples were compared; None: it does not call nb.fit.
        first_other_step: (epoch, step) whose samples differ; None: all are the same.
        loss: the largest difference of a logged loss; None: none was logged.
        metrics: the largest difference of each reported metric.
        weights: the largest difference of a weight in the last checkpoints; None: there are none.
        inexact: what depends on the ranks, on random numbers or on the GPU's order of sums: layers,
            kernels, with the reason.
    """

    what: str
    tolerance: float
    steps: int | None
    first_other_step: tuple[int, int] | None
    loss: float | None
    metrics: dict[str, float]
    weights: float | None
    inexact: dict[str, str]

    @property
    def passed(self) -> bool:
        """Whether the samples are the same and every difference is within the tolerance."""
        return self.first_other_step is None and self.largest <= self.tolerance

    @property
    def largest(self) -> float:
        """The largest difference of all."""
        seen = [self.loss, self.weights, *self.metrics.values()]
        return max((value for value in seen if value is not None), default=math.nan)

    def explain(self) -> str:
        """The findings, one a line."""
        rows = (f"  {name}: {text}" for name, text in self._rows())
        return "\n".join([f"{'equal' if self.passed else 'DIFFERENT'}: {self.what}", *rows])

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "samples of each step", self._about_samples()
        yield "loss", _difference(self.loss, "not logged")
        for name, value in self.metrics.items():
            yield name, _difference(value, "")
        yield "weights", _difference(self.weights, "no checkpoint")
        yield "tolerance", f"{self.tolerance:g}"
        for name, reason in self.inexact.items():
            yield f"inexact by nature: {name}", reason

    def _about_samples(self) -> str:
        if self.steps is None:
            return "not seen: the function does not call nb.fit"
        if self.first_other_step is not None:
            epoch, step = self.first_other_step
            return f"differ, first in epoch {epoch}, step {step}"
        return f"the same in {self.steps} steps"

    __str__ = explain

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.explain())}</pre>"


def parity(
    train: Train, config: ConfigLike, *, processes: int = 2, tolerance: float = 1e-5
) -> Comparison:
    """Run ``train`` on one process and on several, and compare.

    Args:
        train: a training function; the samples are compared where it calls ``nb.fit``.
        config: takes seconds to train (say ``train.max_steps: 50``). Tracking is off.
        processes: the other number of processes.
        tolerance: what counts as equal: float32 sums in another order differ by about 1e-6.

    Raises:
        Exception: what ``train`` raises.
    """
    with _scratch(config) as mine:
        one = _launch(train, mine, processes=1)
        several = _launch(train, mine, processes=processes)
        return _compare(
            f"1 process against {processes}", one, several, tolerance=tolerance, ordered=False
        )


def resume(
    train: Train,
    config: ConfigLike,
    *,
    processes: int | None = None,
    at: float = 0.5,
    tolerance: float = 0.0,
) -> Comparison:
    """Run ``train``, run it again with a SIGKILL in the middle, go on with that run, and compare.

    Args:
        train: a training function that logs (``nb.fit`` does) and saves.
        config: takes seconds to train. A checkpoint is saved every few steps, tracking is off.
        processes: as in :func:`nbtoolkit.launch`.
        at: where it is killed: the share of its logged steps.
        tolerance: what counts as equal; 0: bit by bit.

    Raises:
        NbtoolkitError: it logs no steps: there is no middle to kill it in.
        Exception: what ``train`` raises.
    """
    with _scratch(config) as mine:
        whole = _launch(train, mine, processes=processes)
        last = max(_losses(whole), default=0)
        if last < 2:
            raise NbtoolkitError(
                f"the run logged {last} steps: there is no middle to kill it in",
                allowed="a function that calls nb.fit, or ctx.log({'loss': ...}, step=...)",
                do="log every optimizer step, and train for two steps or more",
            )
        killed_at = max(1, round(at * last))
        often = mine.with_overrides({"checkpoint.every_steps": max(1, killed_at // 2)})
        killed = _KilledOnce(train, killed_at)
        try:
            _launch(killed, often, processes=processes, name="interrupted")
        except WorkerDied:
            pass
        else:
            raise NbtoolkitError(
                f"the function saved nothing between step {killed_at} and its end",
                allowed="a function that calls nb.fit, or ctx.save and ctx.load",
                do="save in the loop, and load where it begins",
            )
        gone_on = _launch(killed, often, processes=processes, name="interrupted", resume="auto")
        what = f"killed at step {killed_at} of {last} and gone on with, against never killed"
        return _compare(what, whole, gone_on, tolerance=tolerance, ordered=True)


class _KilledOnce:
    """A training function whose main rank kills itself at a logged step of its first attempt."""

    def __init__(self, train: Train, step: int) -> None:
        self._train, self._step = train, step
        self.__name__ = getattr(train, "__name__", "train")

    def __call__(self, config: Config, ctx: RunContext) -> Any:
        marker, log = ctx.paths.folder / _KILLED, ctx.log

        def log_or_die(metrics: Mapping[str, Any], step: int | None = None) -> None:
            log(metrics, step)
            late = ctx.is_main and step is not None and step >= self._step
            if late and not marker.exists() and has_checkpoint(ctx.paths.checkpoints):
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        ctx.log = log_or_die  # type: ignore[method-assign]
        return self._train(config, ctx)


@contextmanager
def _scratch(config: ConfigLike) -> Iterator[Config]:
    """The configuration for runs in a folder that is removed, with every step logged."""
    with tempfile.TemporaryDirectory(prefix="nbtoolkit-verify-") as folder:
        yield as_config(config).with_overrides(
            {
                "runtime.output_dir": folder,
                "tracking.mlflow": False,
                "tracking.tensorboard": False,
                "tracking.record_samples": True,
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


# --- comparing ---


def _compare(
    what: str, one: RunResult, other: RunResult, *, tolerance: float, ordered: bool
) -> Comparison:
    """Args: ``ordered``: whether a step's samples must come in the same order, too."""
    steps, first_other = _compare_samples(one, other, ordered=ordered)
    return Comparison(
        what=what,
        tolerance=tolerance,
        steps=steps,
        first_other_step=first_other,
        loss=_largest(_losses(one), _losses(other)),
        metrics=_metric_differences(one, other),
        weights=_weight_difference(one, other),
        inexact={**_inexact_layers(one), **_inexact_kernels(one)},
    )


def _compare_samples(
    one: RunResult, other: RunResult, *, ordered: bool
) -> tuple[int | None, tuple[int, int] | None]:
    """How many steps were compared, and the first whose samples differ."""
    mine, theirs = read_samples(one.paths), read_samples(other.paths)
    if not mine and not theirs:
        return None, None
    kind: Callable[[list[int]], list[int]] = list if ordered else sorted
    for place in sorted({*mine, *theirs}):
        if kind(mine.get(place, [])) != kind(theirs.get(place, [])):
            return len(mine), place
    return len(mine), None


def _losses(run: RunResult) -> dict[int, float]:
    """The logged training loss of each step; of a step that was taken twice, the last."""
    events = EventReader(run.paths.events).read()
    logged = (event for event in events if isinstance(event, MetricsLogged))
    return {
        event.step: event.values["loss"]
        for event in logged
        if "loss" in event.values and event.step is not None
    }


def _reports(run: RunResult) -> dict[str, dict[int | None, float]]:
    """The reported values by name and step."""
    found: dict[str, dict[int | None, float]] = {}
    for event in EventReader(run.paths.events).read():
        if isinstance(event, MetricsReported):
            for name, value in event.values.items():
                found.setdefault(name, {})[event.step] = value
    return found


def _metric_differences(one: RunResult, other: RunResult) -> dict[str, float]:
    mine, theirs = _reports(one), _reports(other)
    pairs = {name: (mine.get(name, {}), theirs.get(name, {})) for name in {**mine, **theirs}}
    return {name: difference(*pair) for name, pair in pairs.items()}


def difference(mine: Mapping[Any, float], theirs: Mapping[Any, float]) -> float:
    """The largest difference of two curves; infinite where one has a point the other lacks."""
    if mine.keys() != theirs.keys():
        return math.inf
    gaps = [_gap(mine[place], theirs[place]) for place in mine]
    return max(gaps, default=0.0)


def _gap(mine: float, theirs: float) -> float:
    return (
        0.0 if mine == theirs or (math.isnan(mine) and math.isnan(theirs)) else abs(mine - theirs)
    )


def _largest(mine: Mapping[Any, float], theirs: Mapping[Any, float]) -> float | None:
    return difference(mine, theirs) if mine or theirs else None


def _weight_difference(one: RunResult, other: RunResult) -> float | None:
    """The largest difference of a tensor in the last checkpoints."""
    mine, theirs = (find_weights(run.paths.folder, "last") for run in (one, other))
    if mine is None or theirs is None:
        return None
    ours, others = dict(_tensors(read_state(mine))), dict(_tensors(read_state(theirs)))
    if ours.keys() != others.keys():
        return math.inf
    return max((_apart(ours[name], others[name]) for name in ours), default=0.0)


def _tensors(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors of a state, those of nested dicts too, by name."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{name}.")
        elif hasattr(value, "is_floating_point"):
            yield f"{prefix}{name}", value


def _apart(mine: Any, theirs: Any) -> float:
    if mine.shape != theirs.shape:
        return math.inf
    return float((mine.double() - theirs.double()).abs().max()) if mine.numel() else 0.0


def _inexact_layers(run: RunResult) -> dict[str, str]:
    """What nb.fit noted of the model's layers."""
    layers: dict[str, str] = read_json(run.paths.layers) or {}
    return layers


def _inexact_kernels(run: RunResult) -> dict[str, str]:
    """On a GPU two equal runs differ: an H100's convolutions in fp32 by 6e-8 after 40 steps."""
    if run.plan.device_type != "cuda":
        return {}
    why = (
        "some add in any order; torch.backends.cudnn.deterministic = True makes convolutions exact"
    )
    return {"the GPU's kernels": f"{why} (torch.use_deterministic_algorithms for all)"}


def _difference(value: float | None, absent: str) -> str:
    return absent if value is None else "no difference" if value == 0 else f"at most {value:.2g}"
