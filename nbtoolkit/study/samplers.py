"""Build Optuna's samplers and pruners; samplers are seeded by (seed, trial number).

A sampler is made anew for each trial, so that a resumed sweep draws what it would have drawn, and
nothing twice. Random, qmc and grid searches are pure functions of the trial's number: the same
trials on any number of slots. (Optuna's own QMC and grid count the trials that have ended, and
sample the first ones of a parallel study apart: optuna/samplers/_qmc.py.)

Imports Optuna: load it late.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import optuna
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler

from nbtoolkit.errors import MissingExtra, SpaceError
from nbtoolkit.study.parameter import stored

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study
    from optuna.trial import FrozenTrial, TrialState

    from nbtoolkit.study.space import Space
    from nbtoolkit.study.sweep_config import SweepConfig


# --- limits ---
# Constraints on metrics that are not themselves made best.


OUT_OF_MEMORY = "out_of_memory"
"""The limit that a trial breaks when a device's memory does not suffice."""


class Limit(NamedTuple):
    """One side of a constraint."""

    metric: str
    side: str
    bound: float

    @property
    def name(self) -> str:
        """What it is called in the study."""
        return f"{self.metric}_{self.side}"

    def excess(self, value: float) -> float:
        """By how much a value breaks it; 0 or less: it is kept."""
        return value - self.bound if self.side == "max" else self.bound - value


def limits_of(sweep_config: SweepConfig) -> list[Limit]:
    """The limits that are wished for."""
    return [
        Limit(metric, side, float(bound))
        for metric, sides in sweep_config.constraints.items()
        for side, bound in sides.items()
    ]


def broken(limits: list[Limit], metrics: Mapping[str, float]) -> str | None:
    """Which limits these metrics break, as a sentence; None: none."""
    texts = [
        f"{one.metric} is {metrics[one.metric]:g}, {one.side} {one.bound:g}"
        for one in limits
        if one.excess(metrics[one.metric]) > 0
    ]
    return "; ".join(texts) or None


# --- pruners ---
# What ends hopeless trials early. Imports Optuna: load it late.


_PRUNERS: dict[str, Callable[..., BasePruner]] = {
    "median": optuna.pruners.MedianPruner,
    "percentile": optuna.pruners.PercentilePruner,
    "successive_halving": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
    "wilcoxon": optuna.pruners.WilcoxonPruner,
    "patient": optuna.pruners.PatientPruner,
    "none": optuna.pruners.NopPruner,
}


def make_pruner(sweep_config: SweepConfig) -> BasePruner:
    """The pruner that is wished for.

    ``patient`` waits ``patience`` reports (5) without a better one, then asks the median.

    Raises:
        SpaceError: the pruner does not know one of its options, or does not take its value.
    """
    options: dict[str, Any] = sweep_config.study.pruner_options.to_dict()
    if sweep_config.pruner == "patient":
        options = {"wrapped_pruner": optuna.pruners.MedianPruner(), "patience": 5, **options}
    try:
        with warnings.catch_warnings():  # Optuna calls two of them experimental
            warnings.simplefilter("ignore")
            return _PRUNERS[sweep_config.pruner](**options)
    except (TypeError, ValueError) as error:
        cls = getattr(_PRUNERS[sweep_config.pruner], "__name__", sweep_config.pruner)
        allowed = f"the arguments of Optuna's {cls}"
        raise SpaceError(f"study.pruner_options: {error}", allowed=allowed) from error


# --- samplers ---


BY_NUMBER = ("random", "qmc", "grid")
"""Samplers for which a trial's number alone decides its parameters."""


class Seeded(BaseSampler):
    """Hands every trial to a sampler made for its number.

    Args:
        make: number -> sampler.
    """

    def __init__(self, make: Callable[[int], BaseSampler]) -> None:
        self._make = make
        self._number = -1
        self._sampler: BaseSampler | None = None

    def _of(self, trial: FrozenTrial) -> BaseSampler:
        sampler = self._sampler
        if sampler is None or self._number != trial.number:
            sampler = self._make(trial.number)
            self._number, self._sampler = trial.number, sampler
        return sampler

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """As the trial's sampler does."""
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """As the trial's sampler does."""
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """As the trial's sampler does."""
        return self._of(trial).sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """As the trial's sampler does."""
        self._of(trial).before_trial(study, trial)

    def after_trial(
        self,
        study: Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """As the trial's sampler does."""
        self._of(trial).after_trial(study, trial, state, values)


class Listed(BaseSampler):
    """Gives every trial the point that was computed for it.

    Args:
        point: the parameters, those whose condition holds.
        space: what is searched.
    """

    def __init__(self, point: Mapping[str, Any], space: Space) -> None:
        self._point, self._space = point, space

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """The searched parameters of the point."""
        return {
            name: one for name, one in self._space.distributions().items() if name in self._point
        }

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The point."""
        return {name: stored(self._point[name]) for name in search_space}

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """A parameter that a condition hides at this point, and a first trial's own does not."""
        return optuna.samplers.RandomSampler(seed=trial.number).sample_independent(
            study, trial, param_name, param_distribution
        )


def make_sampler(
    sweep_config: SweepConfig, space: Space, number: int, offset: int = 0
) -> BaseSampler:
    """The sampler of one trial.

    Args:
        sweep_config: name, options and seed.
        space: what is searched.
        number: the trial's.
        offset: how many trials before were not drawn: first trials, a warm start's.

    Raises:
        SpaceError: the sampler does not know one of its options.
        MissingExtra: it needs a package that is not installed.
    """
    name, seed = sweep_config.study.sampler, sweep_config.study.seed
    if name in BY_NUMBER:
        return Listed(_point(name, sweep_config, space, max(number - offset, 0)), space)
    mixed = _mixed(seed, number)
    defaults = {**_known(name), **sweep_config.study.sampler_options.to_dict(), "seed": mixed}
    if name != "cmaes":
        defaults.update(_constraints_before_5(sweep_config))
    return _made(name, _SAMPLERS[name], defaults)


_SAMPLERS: dict[str, Callable[..., BaseSampler]] = {
    "tpe": optuna.samplers.TPESampler,
    "gp": optuna.samplers.GPSampler,
    "cmaes": optuna.samplers.CmaEsSampler,
}
# Groups: parameters that exist together are sampled together, which conditions need. The liar keeps
# trials that run at the same time apart.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "tpe": {"multivariate": True, "group": True, "constant_liar": True},
    "gp": {"warn_independent_sampling": False},
    "cmaes": {"warn_independent_sampling": False},
}


# Trials that Optuna's samplers draw at random before they learn; each counts those that are there.
_STARTUP = {"tpe": 10, "gp": 10, "cmaes": 1}


def learns_from(sweep_config: SweepConfig) -> float:
    """The number of the first trial whose parameters may depend on how others ended."""
    name = sweep_config.study.sampler
    if name in BY_NUMBER:
        return math.inf
    return int(sweep_config.study.sampler_options.get("n_startup_trials", _STARTUP[name]))


def _known(name: str) -> dict[str, Any]:
    """Our defaults, those that this Optuna has."""
    takes = inspect.signature(_SAMPLERS[name]).parameters
    return {key: value for key, value in _DEFAULTS[name].items() if key in takes}


def _made(name: str, cls: Callable[..., BaseSampler], options: dict[str, Any]) -> BaseSampler:
    try:
        with warnings.catch_warnings():  # Optuna calls several of its options experimental
            warnings.simplefilter("ignore")
            return cls(**options)
    except TypeError as error:
        allowed = "the arguments of Optuna's " + getattr(cls, "__name__", name)
        raise SpaceError(f"study.sampler_options: {error}", allowed=allowed) from error
    except ImportError as error:
        package = "cmaes" if name == "cmaes" else "scipy"
        raise MissingExtra(f"the {name} sampler: {error}", do=f"pip install {package}") from error


def _point(name: str, sweep_config: SweepConfig, space: Space, index: int) -> dict[str, Any]:
    if name == "grid":
        points = space.grid()
        return points[index % len(points)]
    return space.at(_shares(name, sweep_config, len(space.searched), index))


def _shares(name: str, sweep_config: SweepConfig, size: int, index: int) -> list[float]:
    """Where in the unit cube a trial lies."""
    import numpy as np

    if name == "random":
        return [
            float(x) for x in np.random.default_rng([sweep_config.study.seed, index]).random(size)
        ]
    from scipy.stats import qmc

    kind = sweep_config.study.sampler_options.get("qmc_type", "sobol")
    engine = {"sobol": qmc.Sobol, "halton": qmc.Halton}[kind]
    scramble = sweep_config.study.sampler_options.get("scramble", True)
    sequence = engine(size, scramble=scramble, seed=sweep_config.study.seed)
    if index:
        sequence.fast_forward(index)
    return [min(float(x), 1 - 2**-53) for x in sequence.random(1)[0]]


def _mixed(seed: int, number: int) -> int:
    """A seed for each (seed, number), far from its neighbours' (numpy's SeedSequence)."""
    import numpy as np

    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def _constraints_before_5(sweep_config: SweepConfig) -> dict[str, Any]:
    """Optuna 4 asks the sampler for constraints; 5 keeps them with the trial."""
    if not sweep_config.constraints or hasattr(optuna.trial.Trial, "set_constraint"):
        return {}
    return {"constraints_func": lambda trial: _excess(sweep_config, trial)}


def _excess(sweep_config: SweepConfig, trial: FrozenTrial) -> list[float]:
    exceeded = trial.user_attrs.get("constraints", {})
    names = [*(limit.name for limit in limits_of(sweep_config)), OUT_OF_MEMORY]
    return [float(exceeded.get(name, 0.0)) for name in names]
