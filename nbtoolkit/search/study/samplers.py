"""Build Optuna's samplers and pruners; a trial's draws depend on the seed and its number.

A model-based search has a new sampler for each trial, seeded by (seed, trial number): a resumed
sweep draws what it would have drawn, and nothing twice. A random or qmc search has the points that
Optuna's own sampler draws one after the other in a study in memory; a trial takes the point of its
number, on any number of slots. In the sweep's own study, QMCSampler would count the samples that it
has drawn, those of a killed session too (optuna/samplers/_qmc.py).

This module imports Optuna: import it late.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import optuna
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler

from nbtoolkit.errors import MissingExtra, SpaceError

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from nbtoolkit.search.study.space import Params, Space
    from nbtoolkit.search.study.sweep_config import SweepConfig

_Made = TypeVar("_Made", BasePruner, BaseSampler)


OUT_OF_MEMORY = "out_of_memory"
"""The limit that a trial breaks if it needs more memory than a device has."""


class Limit(NamedTuple):
    """One side of a constraint on a metric that is not itself an objective."""

    metric: str
    side: str
    bound: float

    @property
    def name(self) -> str:
        """Its name in the study."""
        return f"{self.metric}_{self.side}"

    def excess(self, value: float) -> float:
        """By how much a value exceeds it; 0 or less if it does not."""
        return value - self.bound if self.side == "max" else self.bound - value

    def share(self, excess: float) -> float:
        """Return an excess as a share of the bound, to compare limits of different units."""
        return max(excess, 0.0) / (abs(self.bound) or 1.0)


def limits_of(sweep_config: SweepConfig) -> list[Limit]:
    """Return the limits in the sweep's constraints."""
    return [
        Limit(metric, side, float(bound))
        for metric, sides in sweep_config.constraints.items()
        for side, bound in sides.items()
    ]


def broken(limits: list[Limit], metrics: Mapping[str, float]) -> str | None:
    """Return a sentence on the limits that these metrics exceed; None: there are none."""
    texts = [
        f"{limit.metric} is {metrics[limit.metric]:g}, {limit.side} {limit.bound:g}"
        for limit in limits
        if limit.excess(metrics[limit.metric]) > 0
    ]
    return "; ".join(texts) or None


class Violations:
    """The trials that violate constraints, and which of them comes nearest to meeting them."""

    def __init__(self, limits: list[Limit]) -> None:
        self._limits = limits
        self._reasons: dict[int, str] = {}
        self._distances: dict[int, float] = {}

    def add(self, number: int, reason: str | None, excess: Mapping[str, float]) -> None:
        """Note a trial.

        Args:
            number: of the trial.
            reason: names the limits that it exceeds; None: it meets all of them.
            excess: its excess over each limit, by the limit's name.
        """
        if reason is not None:
            self._reasons[number] = reason
            self._distances[number] = sum(limit.share(excess[limit.name]) for limit in self._limits)

    def text(self) -> str:
        """How many there are, and the nearest; empty if there are none."""
        if not self._reasons:
            return ""
        nearest = min(self._distances, key=self._distances.__getitem__)
        return (
            f"no trial meets the constraints ({len(self._reasons)} violate them); the nearest is "
            f"trial {nearest}: {self._reasons[nearest]}"
        )


_PRUNERS: dict[str, type[BasePruner]] = {
    "median": optuna.pruners.MedianPruner,
    "percentile": optuna.pruners.PercentilePruner,
    "successive_halving": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
    "wilcoxon": optuna.pruners.WilcoxonPruner,
    "patient": optuna.pruners.PatientPruner,
    "none": optuna.pruners.NopPruner,
}


def make_pruner(sweep_config: SweepConfig) -> BasePruner:
    """Make the sweep's pruner.

    ``patient`` waits for ``patience`` reports (5) without an improvement, then asks the median.

    Raises:
        SpaceError: the pruner does not accept one of the options.
    """
    options: dict[str, object] = sweep_config.study.pruner_options.to_dict()
    if sweep_config.pruner == "patient":
        options = {"wrapped_pruner": optuna.pruners.MedianPruner(), "patience": 5, **options}
    return _make(_PRUNERS[sweep_config.pruner], options, "study.pruner_options")


def _make(kind: Callable[..., _Made], options: Mapping[str, object], setting: str) -> _Made:
    """Make a pruner or a sampler from the options in a setting."""
    try:
        with warnings.catch_warnings():  # Optuna calls several classes and options experimental
            warnings.simplefilter("ignore")
            return kind(**options)
    except (TypeError, ValueError) as error:
        allowed = f"the arguments of Optuna's {getattr(kind, '__name__', kind)}"
        raise SpaceError(f"{setting}: {error}", allowed=allowed) from error


BY_NUMBER = ("random", "qmc", "grid")
"""Samplers for which a trial's number alone decides its parameters."""

_SAMPLERS: dict[str, type[BaseSampler]] = {
    "tpe": optuna.samplers.TPESampler,
    "gp": optuna.samplers.GPSampler,
    "cmaes": optuna.samplers.CmaEsSampler,
    "qmc": optuna.samplers.QMCSampler,
    "random": RandomSampler,
    "grid": RandomSampler,
}
# group: parameters that exist together are sampled together, which conditions need. constant_liar
# keeps trials that run at the same time apart.
_DEFAULTS: dict[str, dict[str, bool]] = {
    "tpe": {"multivariate": True, "group": True, "constant_liar": True},
    "gp": {"warn_independent_sampling": False},
    "cmaes": {"warn_independent_sampling": False},
    "qmc": {"scramble": True, "warn_independent_sampling": False},
}
# Number of trials that each of Optuna's samplers draws at random before it learns from results.
_STARTUP = {"tpe": 10, "gp": 10, "cmaes": 1}


class TrialSamplers:
    """Makes the sampler of each trial of a sweep.

    Args:
        sweep_config: name, options and seed.
        space: what is searched.
        offset: the number of trials before that were not drawn: first trials and a warm start's.

    Raises:
        SpaceError: the sampler does not accept one of the options.
    """

    def __init__(self, sweep_config: SweepConfig, space: Space, offset: int = 0) -> None:
        self._sweep_config = sweep_config
        self._space = space
        self._offset = offset
        self._points: list[Params] = []
        name = sweep_config.study.sampler
        seed = sweep_config.study.seed
        if name == "grid":
            self._points = [space.encode(point) for point in space.grid()]
        elif name in BY_NUMBER:
            self._in_memory = optuna.create_study(sampler=make_sampler(sweep_config, seed))

    def of(self, number: int) -> BaseSampler:
        """Make the sampler of a trial.

        Raises:
            MissingExtra: it needs a package that is not installed.
        """
        if self._sweep_config.study.sampler not in BY_NUMBER:
            # A seed for each (seed, number), far from its neighbours'.
            sequence = np.random.SeedSequence([self._sweep_config.study.seed, number])
            return make_sampler(self._sweep_config, int(sequence.generate_state(1)[0]))
        point = self._point(max(number - self._offset, 0))
        # The base sampler draws what a condition hides at this point: a first trial may need it.
        fixed = {"fixed_params": point, "base_sampler": RandomSampler(seed=number)}
        return _make(PartialFixedSampler, fixed, "study.sampler_options")

    def _point(self, index: int) -> Params:
        """Return the parameters that a trial's number alone decides."""
        if self._sweep_config.study.sampler == "grid":
            return self._points[index % len(self._points)]
        while len(self._points) <= index:
            trial = self._in_memory.ask(dict(self._space.distributions))
            self._points.append(trial.params)
            self._in_memory.tell(trial, 0.0)  # QMCSampler takes the space from the first that ended
        return self._points[index]


def make_sampler(sweep_config: SweepConfig, seed: int = 0) -> BaseSampler:
    """Make Optuna's sampler with a seed.

    Raises:
        SpaceError: it does not accept one of the options.
        MissingExtra: it needs a package that is not installed.
    """
    name = sweep_config.study.sampler
    options = sweep_config.study.sampler_options.to_dict()
    accepted = inspect.signature(_SAMPLERS[name]).parameters
    defaults = {key: value for key, value in _DEFAULTS.get(name, {}).items() if key in accepted}
    options = {**defaults, **options, "seed": seed}
    # Optuna 4 asks the sampler for constraints; 5 stores them with the trial.
    asks = "constraints_func" in accepted and not hasattr(optuna.trial.Trial, "set_constraint")
    if sweep_config.constraints and asks:
        options["constraints_func"] = lambda trial: _excess(trial, sweep_config)
    try:
        return _make(_SAMPLERS[name], options, "study.sampler_options")
    except ImportError as error:
        package = "cmaes" if name == "cmaes" else "scipy"
        raise MissingExtra(f"the {name} sampler: {error}", do=f"pip install {package}") from error


def _excess(trial: FrozenTrial, sweep_config: SweepConfig) -> list[float]:
    exceeded = trial.user_attrs.get("constraints", {})
    names = [*(limit.name for limit in limits_of(sweep_config)), OUT_OF_MEMORY]
    return [float(exceeded.get(name, 0.0)) for name in names]


def learns_from(sweep_config: SweepConfig) -> float:
    """Return the number of the first trial whose parameters may depend on how others ended."""
    name = sweep_config.study.sampler
    if name in BY_NUMBER:
        return math.inf
    return int(sweep_config.study.sampler_options.get("n_startup_trials", _STARTUP[name]))
