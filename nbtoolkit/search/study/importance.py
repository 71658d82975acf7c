"""Compute the importance of parameters for panel, report and plots.

It is fANOVA (Hutter, Hoos, Leyton-Brown 2014, https://proceedings.mlr.press/v32/hutter14.html) as
``optuna.importance.FanovaImportanceEvaluator`` computes it: a random forest predicts the value, and
a parameter's share is the variance that it explains alone. Optuna 5's default, PED-ANOVA, compares
the best tenth with the rest: of ten trials, one with nine. The functions import Optuna late.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbtoolkit.errors import MissingExtra, SweepError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from nbtoolkit.search.study.space import Params

LEAST = 10
"""Complete trials below which nothing is shown."""

MOST = 100
"""Trials to use, drawn from all trials, since the first ones spread widest."""

_TREES = 64
_FENCE = 1.5  # interquartile ranges: https://en.wikipedia.org/wiki/Outlier#Tukey's_fences


@dataclass(frozen=True)
class ParameterShare:
    """A parameter's share of the values' variance, from 0 to 1."""

    name: str
    value: float


@dataclass(frozen=True)
class Importance:
    """The importance of a study's parameters.

    Attributes:
        shares: the largest first; they sum to 1.
        complete: number of complete trials.
        used: number of complete trials that the shares were computed from.
        pruned: number of pruned trials, which are left out: they have no final value.
        left_out: parameters with one value, with several ranges, or that only some trials have:
            fANOVA needs a value of every trial from one range.
    """

    shares: tuple[ParameterShare, ...]
    complete: int
    used: int
    pruned: int
    left_out: tuple[str, ...]

    def notes(self) -> list[str]:
        """Sentences on what the shares were computed from."""
        of = f" of {self.complete}" if self.used < self.complete else ""
        left = f"; {self.pruned} pruned trials are left out" if self.pruned else ""
        notes = [f"From {self.used}{of} complete trials{left}."]
        if self.left_out:
            names = ", ".join(self.left_out)
            notes.append(f"Not searched by all trials in one range, and left out: {names}.")
        return notes


def importance(
    trials: Sequence[FrozenTrial],
    *,
    maximize: bool = False,
    objective: int = 0,
    most: int = MOST,
) -> Importance:
    """Compute how much of the values' variance each parameter explains.

    Parameters searched on a logarithmic scale count on that scale: Optuna's evaluator weighs a
    range linearly, so that the upper of three decades has nine tenths of the weight and a third of
    the trials. Values worse than Tukey's fence count as the fence, so that one diverged trial does
    not cause all of the variance.

    Args:
        trials: trials of the study, in any state.
        maximize: whether larger values are better.
        objective: index of the objective.
        most: the number of complete trials to use; they are drawn if there are more.

    Raises:
        SweepError: fewer than :data:`LEAST` trials are complete, all have the same value, or they
            have no searched parameter in common.
        MissingExtra: scikit-learn is not installed.
    """
    from optuna.search_space import intersection_search_space
    from optuna.trial import TrialState

    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    if len(complete) < LEAST:
        raise SweepError(
            f"{len(complete)} trials are complete, too few to tell which parameters matter",
            allowed=f"at least {LEAST} complete trials",
            do="wait for more trials",
        )
    used = random.Random(0).sample(complete, min(len(complete), most))
    common = intersection_search_space(used)
    space = {name: common[name] for name in common if not common[name].single()}
    names = dict.fromkeys(name for trial in used for name in trial.params)
    values = _fenced([(-1 if maximize else 1) * trial.values[objective] for trial in used])
    if len(set(values)) == 1 or not space:
        raise SweepError(
            f"all {len(used)} trials have the same value" if space else "no parameter was searched",
            allowed="different values, and parameters that every trial has",
            do="wait for more trials, or search a larger space",
        )
    linear = [_linear(trial, space, value) for trial, value in zip(used, values, strict=True)]
    shares = [ParameterShare(name, value) for name, value in _shares(linear).items()]
    pruned = sum(trial.state == TrialState.PRUNED for trial in trials)
    left_out = tuple(name for name in names if name not in space)
    return Importance(tuple(shares), len(complete), len(used), pruned, left_out)


def _fenced(values: Sequence[float]) -> list[float]:
    """Clip values, of which less is better, at Tukey's fence."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return [0.0] * len(values)
    worst = fence(finite, _FENCE)
    return [max(min(value, worst), min(finite)) for value in values]


def fence(values: Sequence[float], ranges: float) -> float:
    """Return Tukey's fence: so many interquartile ranges above the third quartile.

    If half of the values are equal, it is the largest: only the others can be explained.
    """
    first, _, third = statistics.quantiles(values, n=4)
    return third + ranges * (third - first) if third > first else max(values)


def _linear(trial: FrozenTrial, space: dict[str, BaseDistribution], value: float) -> FrozenTrial:
    """Return the trial with a value, and with logarithms in place of logarithmic parameters."""
    from optuna.distributions import FloatDistribution, IntDistribution
    from optuna.trial import create_trial

    params: Params = {name: trial.params[name] for name in space}
    distributions = dict(space)
    for name, kind in space.items():
        if isinstance(kind, (FloatDistribution, IntDistribution)) and kind.log:
            # A whole number stands for all that rounds to it, as in Optuna's own transformation.
            half = 0.5 if isinstance(kind, IntDistribution) else 0.0
            low = math.log(kind.low - half)
            high = math.log(kind.high + half)
            params[name] = math.log(params[name])
            distributions[name] = FloatDistribution(low, high)
    return create_trial(params=params, distributions=distributions, value=value)


def _shares(trials: Sequence[FrozenTrial]) -> dict[str, float]:
    import optuna
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # else it logs the new study
    try:
        study = optuna.create_study()
        study.add_trials(trials)
        forest = FanovaImportanceEvaluator(n_trees=_TREES, seed=0)
        return get_param_importances(study, evaluator=forest)
    except ImportError as error:
        raise MissingExtra(
            f"importances need scikit-learn: {error}", do="pip install scikit-learn"
        ) from error
    finally:
        optuna.logging.set_verbosity(before)
