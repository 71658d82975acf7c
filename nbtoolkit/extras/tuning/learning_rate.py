"""Find a learning rate by a range test over the real training loop."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from nbtoolkit.config.aliases import refuse_other_launchers_names
from nbtoolkit.config.schema import ConfigLike, as_config
from nbtoolkit.errors import TuningError
from nbtoolkit.extras.tuning.answer import FinderResult, Subject
from nbtoolkit.extras.tuning.probe import Probe, probe
from nbtoolkit.launcher.train_function import Train
from nbtoolkit.run.output import to_stdout
from nbtoolkit.training.optim import range_test
from nbtoolkit.views.figure import Chart, curves_chart

_SMOOTHING = 0.9  # share of the mean before in the mean after a step
_DIVERGED = 4.0  # times the lowest smoothed loss: the test ends
# points at the ends of the curve that are not suggested
_FIRST = 10
_LAST = 5
_FEWEST = 30  # steps of a test
_LEAST_FALL = 0.01  # share of the first loss


@dataclass(frozen=True, kw_only=True)
class RangeTest:
    """A rate that rises exponentially.

    Attributes:
        low: the learning rate of the first step.
        high: the learning rate of the last step.
        steps: optimizer steps.
    """

    low: float = 1e-6
    high: float = 1.0
    steps: int = 100

    def rate(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step`` (from 0)."""
        return self.high * range_test(self.low / self.high, self.steps)(step)


@dataclass(frozen=True, kw_only=True, repr=False)
class LearningRate(FinderResult):
    """The result of :func:`find_learning_rate`.

    Attributes:
        suggestion: the suggested value of ``optim.lr``, rounded to three digits.
        rates: the learning rate of each step of the test, before ``optim.lr_rule`` multiplies it.
        losses: the training loss of each of these steps, over all ranks.
    """

    suggestion: float
    rates: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for ``config.with_overrides``."""
        return {"optim.lr": self.suggestion}

    def plot(self) -> Chart:
        """Draw the loss and the smoothed loss at each learning rate, and mark the suggestion."""
        values = {"loss": self.losses, "smoothed": smoothed(self.losses)}
        curves = {name: [*zip(self.rates, ys, strict=True)] for name, ys in values.items()}
        mark = min(curves["smoothed"], key=lambda point: abs(point[0] - self.suggestion))
        curves[f"suggestion {self.suggestion:g}"] = [mark]
        return curves_chart("learning-rate range test", {("optim.lr", "training loss"): curves})

    @property
    def why(self) -> str:
        """The reason for the suggestion, as a line of text."""
        means = smoothed(self.losses)
        return (
            f"the mean loss falls from {means[0]:.4g} to {min(means):.4g} in {len(means)} steps "
            f"from {self.rates[0]:.3g} to {self.rates[-1]:.3g}; {self.cost}"
        )

    def columns(self) -> tuple[list[str], list[list[str]]]:
        """Return the names of the columns, and the texts of each row."""
        return ["optim.lr"], [[f"{self.suggestion:g}"]]


@refuse_other_launchers_names
def find_learning_rate(
    train: Train,
    config: ConfigLike = None,
    *,
    low: float = RangeTest.low,
    high: float = RangeTest.high,
    steps: int = RangeTest.steps,
    processes: int | None = None,
    force: bool = False,
) -> LearningRate:
    """Suggest ``optim.lr`` by a range test (Smith 2017, https://arxiv.org/abs/1506.01186).

    ``train`` runs for ``steps`` optimizer steps in new processes, while the rate rises
    exponentially from ``low`` to ``high``. Your own runs and the models in this process do not
    change. The test ends early when the loss diverges: the smoothed loss rises above 4 times its
    lowest value, or a loss is not finite.

    The suggestion is the smaller of two rates. The first is the rate at which the smoothed loss
    falls fastest. Let ``s_i`` be the exponential moving average of the losses (weight 0.9, with
    bias correction), and ``r_i`` the rates. The first rate is the ``r_k`` with the lowest slope
    ``(s_{k+1} - s_{k-1}) / (ln r_{k+1} - ln r_{k-1})``, without the first 10 and the last 5 steps.
    Lightning and fastai do about the same. The second is a tenth of the rate with the lowest
    ``s_i`` (fastai's ``minimum``). The first rate is too high if the loss diverges soon after its
    steepest fall, as with SGD and momentum. In this case, the second rate is smaller.

    The answer is kept in ``<output_dir>/tuning.json``. A later call uses it again if the function,
    the devices, the library versions and the settings that affect a step are the same.

    Args:
        train: a training function that calls :func:`nbtoolkit.fit` with the configuration it gets.
            If it passes an optimizer object or a schedule, the test replaces their rates. The first
            parameter group gets the rate of the test; the other groups keep their ratios to it.
        config: the configuration of the run to come. The rates are values of ``optim.lr``, before
            the factor of ``optim.lr_rule``.
        low: the rate of the first step.
        high: the rate of the last step, above ``low``.
        steps: the number of optimizer steps, at least 30.
        processes: the number of ranks; None: as ``config`` says.
        force: measure again, even if an answer was kept.

    Raises:
        TuningError: the loss falls at no rate, memory ran out, the function does not train with
            ``nb.fit`` and this configuration, or ``low``, ``high`` or ``steps`` is invalid.
        Exception: the exception of the training function.
    """
    test = RangeTest(low=low, high=high, steps=steps)
    if not (0 < test.low < test.high and test.steps >= _FEWEST):
        raise TuningError(
            f"a range test from {test.low:g} to {test.high:g} in {test.steps} steps is impossible",
            allowed=f"0 < low < high, and at least {_FEWEST} steps",
            do="leave them out: low=1e-6, high=1.0, steps=100",
        )
    subject = Subject(train, as_config(config, processes))
    config = subject.config
    optim = {**config.to_dict()["optim"], "lr": None, "schedule": None, "warmup_ratio": None}
    others = config.seed, config.train.max_grad_norm, config.train.drop_last
    key = subject.key(astuple(test), optim, others)
    measure = partial(_measure, subject, test)
    result = subject.find(LearningRate, "learning_rate", key, measure, force=force)
    to_stdout(f"optim.lr: {result.suggestion:g} ({result.why})\n", flush=True)
    return result


def _measure(subject: Subject, test: RangeTest) -> LearningRate:
    settings = {
        "optim.schedule": "range_test",
        "optim.lr": test.high,
        "optim.min_lr_ratio": test.low / test.high,
        "optim.warmup_ratio": 0.0,
        "train.weight_averaging": "none",
        # The losses of a step arrive at once: those before one that is not finite count.
        "checkpoint.every_steps": 1,
    }
    result = probe(
        subject,
        settings,
        steps=test.steps,
        enough=lambda measured: diverged([step.loss for step in measured.steps]),
    )
    if result.status == "out_of_memory":
        raise TuningError(
            f"memory ran out in the range test: {result.reason}",
            allowed="a batch that fits into memory",
            do="lower train.batch_size, or raise train.gradient_accumulation_steps",
        )
    losses = [step.loss for step in result.steps]
    cut = next((n for n in range(1, len(losses)) if diverged(losses[:n])), len(losses))
    losses = losses[:cut]
    rates = [test.rate(step.step - 1) for step in result.steps[:cut]]
    _check_rates(result, rates)
    suggestion = suggest(rates, losses)
    return LearningRate(suggestion=suggestion, rates=tuple(rates), losses=tuple(losses))


def _check_rates(result: Probe, rates: Sequence[float]) -> None:
    """Refuse a first loss that is not finite, and a function with rates of its own."""
    if not rates:
        raise TuningError(
            f"the first loss is not finite: {result.reason}",
            allowed="a loss that is a finite number at the start",
            do="check the data and the initial weights",
        )
    first = result.steps[0].rate
    last = result.steps[len(rates) - 1].rate
    if not first or not math.isclose(last / first, rates[-1] / rates[0], rel_tol=1e-3):
        raise TuningError(
            f"the training function had rates of its own, from {first:.3g} to {last:.3g}",
            allowed="a function that gives nb.fit the configuration that it gets",
            do="do not change config.optim inside the function",
        )


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the exponential mean of the losses up to each one, corrected for its start."""
    sums = accumulate(
        losses, lambda mean, loss: _SMOOTHING * mean + (1 - _SMOOTHING) * loss, initial=0.0
    )
    return [mean / (1 - _SMOOTHING**n) for n, mean in enumerate(sums) if n]


def diverged(losses: Sequence[float]) -> bool:
    """Whether the smoothed loss is now above 4 times its lowest."""
    means = smoothed(losses)
    return bool(means) and means[-1] > min(means) + (_DIVERGED - 1) * abs(min(means))


def suggest(rates: Sequence[float], losses: Sequence[float]) -> float:
    """Return the rate at which the smoothed loss falls fastest; see :func:`find_learning_rate`.

    Raises:
        TuningError: it does not fall, or diverges too early to tell.
    """
    means = smoothed(losses)
    lowest = min(range(len(means)), key=means.__getitem__)
    start = means[min(_FIRST, len(means)) - 1]
    noise = [loss - mean for loss, mean in zip(losses, means, strict=True)][: lowest + 1]
    least = max(_LEAST_FALL * abs(start), statistics.pstdev(noise))
    inner = range(_FIRST, len(means) - _LAST)
    if not inner or start - means[lowest] < least:
        raise TuningError(
            f"the loss falls at no rate from {rates[0]:.3g} to {rates[-1]:.3g}: it is {start:.4g} "
            f"at the start, and {means[lowest]:.4g} at the lowest, in {len(losses)} steps",
            allowed="a loss that falls at some rate between low and high, before it diverges",
            do="check the targets, the loss and the model; else widen low and high, or raise steps",
        )

    def slope(i: int) -> float:
        return (means[i + 1] - means[i - 1]) / math.log(rates[i + 1] / rates[i - 1])

    return float(f"{min(rates[min(inner, key=slope)], rates[lowest] / 10):.3g}")
