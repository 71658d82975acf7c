"""Compute the importance of parameters, by one rule for panel, report and plots.

fANOVA (Hutter, Hoos, Leyton-Brown 2014, https://proceedings.mlr.press/v32/hutter14.html) as
``optuna.importance.FanovaImportanceEvaluator`` computes it: a random forest predicts the value, and
a parameter's share is the variance that it explains alone. Optuna 5's default, PED-ANOVA, compares
the best tenth with the rest: of ten trials, one with nine. Optuna is imported in the functions.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import MissingExtra, SweepError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

LEAST = 10
"""Complete trials below which nothing is shown."""

MOST = 100
"""Trials that are used, drawn from all, as the first ones spread widest: 2.4 s of CPU."""

_TREES, _RESAMPLES, _TREES_OF_RESAMPLE = 64, 20, 8  # 0.4 s of CPU for 20 trials
_FENCE = 1.5  # quartile distances: https://en.wikipedia.org/wiki/Outlier#Tukey's_fences


@dataclass(frozen=True)
class ParameterShare:
    """A parameter's share of the values' variance, from 0 to 1, and its range over resamples."""

    name: str
    value: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """Share and range as ``"0.52 (0.31 to 0.68)"``."""
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Importance:
    """What the parameters of a study explain.

    Attributes:
        shares: the largest first; they sum to 1.
        complete: complete trials there were.
        used: complete trials they were computed from.
        pruned: pruned trials, which are left out: they have no final value.
        left_out: parameters with one value, with several ranges, or that only some trials have;
            fANOVA needs a value of every trial from one range.
    """

    shares: tuple[ParameterShare, ...]
    complete: int
    used: int
    pruned: int
    left_out: tuple[str, ...]

    def groups(self) -> list[list[ParameterShare]]:
        """Shares that cannot be told apart: each group overlaps the range of its first member."""
        groups: list[list[ParameterShare]] = []
        for share in self.shares:
            if groups and share.high >= groups[-1][0].low:
                groups[-1].append(share)
            else:
                groups.append([share])
        return groups

    def notes(self) -> list[str]:
        """From what the shares were computed, and what cannot be told from it, as sentences."""
        of = f" of {self.complete}" if self.used < self.complete else ""
        left = f"; {self.pruned} pruned trials are left out" if self.pruned else ""
        told = [
            f"From {self.used}{of} complete trials{left}.",
            f"In brackets: the range over {_RESAMPLES} resamples of the trials, a seed each.",
        ]
        for group in self.groups():
            if len(group) > 1:
                names = ", ".join(one.name for one in group)
                told.append(f"Cannot tell yet which matters more: {names}.")
        if self.left_out:
            names = ", ".join(self.left_out)
            told.append(f"Not searched by all trials in one range, and left out: {names}.")
        return told


def importance(
    trials: Sequence[FrozenTrial],
    *,
    maximize: bool = False,
    objective: int = 0,
    most: int = MOST,
) -> Importance:
    """Compute how much of the values' variance each parameter explains.

    A parameter that is searched on a logarithmic scale counts on that scale: Optuna's evaluator
    weighs its range linearly, where the upper of three decades has nine tenths of the weight and a
    third of the trials. Values worse than Tukey's fence count as the fence, so that one diverged
    trial does not make all of the variance. A range is that of forests, each with a seed of its
    own, on trials drawn with replacement: it holds the noise of the trials and of the forest.

    Args:
        trials: of the study, in any state.
        maximize: whether larger values are better.
        objective: which of several objectives.
        most: complete trials that are used; of more than these, so many are drawn.

    Raises:
        SweepError: fewer than :data:`LEAST` trials are complete, all have the same value, or they
            have no parameter in common that was searched.
        MissingExtra: scikit-learn is not installed.
    """
    from optuna.search_space import intersection_search_space
    from optuna.trial import TrialState

    found = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    if len(found) < LEAST:
        raise SweepError(
            f"{len(found)} trials are complete, too few to tell which parameters matter",
            allowed=f"at least {LEAST} complete trials",
            do="wait for more trials",
        )
    used = random.Random(0).sample(found, min(len(found), most))
    space = {name: one for name, one in intersection_search_space(used).items() if not one.single()}
    names = dict.fromkeys(name for trial in used for name in trial.params)
    values = _fenced([(-1 if maximize else 1) * trial.values[objective] for trial in used])
    if len(set(values)) == 1 or not space:
        raise SweepError(
            f"all {len(used)} trials have the same value" if space else "no parameter was searched",
            allowed="values that differ, to be explained by parameters that every trial has",
            do="wait for more trials, or search a larger space",
        )
    rows = [_searched(trial, space, value) for trial, value in zip(used, values, strict=True)]
    shares = _shares(rows, 0, _TREES)
    seen = [shares]
    for seed in range(1, _RESAMPLES + 1):
        drawn = random.Random(seed).choices(rows, k=len(rows))
        if len({row.value for row in drawn}) > 1:  # else there is no variance to explain
            seen.append(_shares(drawn, seed, _TREES_OF_RESAMPLE))
    ordered = [
        ParameterShare(name, value, min(one[name] for one in seen), max(one[name] for one in seen))
        for name, value in sorted(shares.items(), key=lambda pair: -pair[1])
    ]
    pruned = sum(trial.state == TrialState.PRUNED for trial in trials)
    left_out = tuple(name for name in names if name not in space)
    return Importance(tuple(ordered), len(found), len(used), pruned, left_out)


def _fenced(values: Sequence[float]) -> list[float]:
    """Values of which less is better; those beyond the fence count as the fence."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return [0.0] * len(values)
    first, _, third = statistics.quantiles(finite, n=4)
    # Half of the values are equal: what differs is all that can be explained.
    fence = third + _FENCE * (third - first) if third > first else max(finite)
    return [max(min(value, fence), min(finite)) for value in values]


def _searched(trial: FrozenTrial, space: dict[str, BaseDistribution], value: float) -> FrozenTrial:
    """A trial whose logarithmic parameters stand as their logarithms."""
    from optuna.distributions import FloatDistribution, IntDistribution
    from optuna.trial import create_trial

    params: dict[str, Any] = {}
    kinds: dict[str, BaseDistribution] = {}
    for name, kind in space.items():
        params[name], kinds[name] = trial.params[name], kind
        if isinstance(kind, (FloatDistribution, IntDistribution)) and kind.log:
            # A whole number stands for what is rounded to it, as in Optuna's own transformation.
            half = 0.5 if isinstance(kind, IntDistribution) else 0.0
            params[name] = math.log(trial.params[name])
            kinds[name] = FloatDistribution(math.log(kind.low - half), math.log(kind.high + half))
    return create_trial(params=params, distributions=kinds, value=value)


def _shares(trials: Sequence[FrozenTrial], seed: int, trees: int) -> dict[str, float]:
    import optuna
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # no line on a study in memory
    try:
        study = optuna.create_study()
        study.add_trials(trials)
        forest = FanovaImportanceEvaluator(n_trees=trees, seed=seed)
        return get_param_importances(study, evaluator=forest)
    except ImportError as error:
        raise MissingExtra(
            f"importances need scikit-learn: {error}", do="pip install scikit-learn"
        ) from error
    finally:
        optuna.logging.set_verbosity(before)
