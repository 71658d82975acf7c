"""The importance of parameters."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import optuna
import pytest
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from nbtoolkit.errors import SweepError
from nbtoolkit.search.study.importance import Importance, importance

SPACE: dict[str, BaseDistribution] = {
    "optim.lr": FloatDistribution(1e-4, 1e-1, log=True),
    "model.hidden": IntDistribution(8, 128, log=True),
    "model.dropout": FloatDistribution(0.0, 0.5),
}
Params = Mapping[str, Any]


def by_rate(params: Params) -> float:
    """The learning rate decides; the rest adds a little; dropout does nothing."""
    return abs(math.log10(params["optim.lr"]) + 2) + 0.002 * params["model.hidden"]


def study_of(
    value: Callable[[Params], float],
    complete: int,
    *,
    pruned: int = 0,
    space: Mapping[str, BaseDistribution] = SPACE,
    storage: Any = None,
    seed: int = 0,
) -> optuna.Study:
    """A real study of random trials; the pruned ones come last."""
    sampler = optuna.samplers.RandomSampler(seed=seed)
    study = optuna.create_study(sampler=sampler, storage=storage)
    for number in range(complete + pruned):
        trial = study.ask(dict(space))
        if number < complete:
            study.tell(trial, value(trial.params))
        else:
            trial.report(1.0, 0)
            study.tell(trial, state=TrialState.PRUNED)
    return study


def computed(study: optuna.Study, **options: Any) -> Importance:
    return importance(study.trials, **options)


def notes(study: optuna.Study, **options: Any) -> str:
    """All sentences on an importance."""
    return " ".join(computed(study, **options).notes())


def leaders(study: optuna.Study) -> list[str]:
    """The names of the parameters, the largest share first."""
    return [share.name for share in computed(study).shares]


def test_nine_trials_have_no_importances_and_ten_have() -> None:
    with pytest.raises(SweepError, match=r"9 trials are complete[^\n]*\n.*at least 10"):
        computed(study_of(by_rate, 9, pruned=5))
    assert "From 10 complete trials." in notes(study_of(by_rate, 10))


def test_how_many_trials_it_is_from_and_that_pruned_ones_are_left_out_is_said() -> None:
    told = notes(study_of(by_rate, 12, pruned=3))
    assert "From 12 complete trials; 3 pruned trials are left out." in told
    assert "pruned" not in notes(study_of(by_rate, 12))


@pytest.mark.long
def test_the_shares_sum_to_one_and_the_largest_is_first() -> None:
    shares = computed(study_of(by_rate, 40)).shares
    assert shares[0].name == "optim.lr"
    assert sum(share.value for share in shares) == pytest.approx(1.0)


@pytest.mark.long
def test_the_parameter_that_does_nothing_is_never_first_of_a_few_trials() -> None:
    """Optuna 5's default, PED-ANOVA, puts it first in some of these."""
    for seed in range(6):
        assert leaders(study_of(by_rate, 14, seed=seed))[0] == "optim.lr"


@pytest.mark.long
def test_a_logarithmic_parameter_counts_on_the_scale_it_is_searched_on() -> None:
    """Linearly, the lower two of its three decades would be a tenth of the range."""
    space = {"a": FloatDistribution(1e-4, 1e-1, log=True), "b": FloatDistribution(0.0, 1.0)}
    study = study_of(lambda p: (p["a"] > 1e-3) + 0.3 * p["b"], 40, space=space)
    assert leaders(study) == ["a", "b"]


@pytest.mark.long
def test_one_diverged_trial_is_not_all_of_the_variance() -> None:
    study = study_of(by_rate, 30)
    params = {"optim.lr": 0.01, "model.hidden": 64, "model.dropout": 0.49}
    study.add_trial(create_trial(params=params, distributions=SPACE, value=1e9))
    assert leaders(study)[0] == "optim.lr"


@pytest.mark.long
def test_parameters_that_only_some_trials_have_are_said_to_be_left_out() -> None:
    study = study_of(by_rate, 12)
    space = {**SPACE, "model.$x": FloatDistribution(0.0, 1.0)}
    more = study_of(by_rate, 12, space=space, seed=1)
    study.add_trials(more.trials)
    assert "Not searched by all trials in one range, and left out: model.$x." in notes(study)
    assert sorted(leaders(study)) == sorted(SPACE)


@pytest.mark.long
def test_of_very_many_trials_some_are_drawn_and_it_is_said() -> None:
    study = study_of(by_rate, 0)
    rng = random.Random(0)
    for _ in range(130):
        params = {"optim.lr": 10 ** rng.uniform(-4, -1), "model.hidden": 8, "model.dropout": 0.1}
        study.add_trial(create_trial(params=params, distributions=SPACE, value=by_rate(params)))
    assert "From 100 of 130 complete trials." in notes(study)


def test_importances_of_one_of_several_objectives() -> None:
    study = optuna.create_study(directions=["maximize", "minimize"])
    space: dict[str, BaseDistribution] = {name: FloatDistribution(0, 1) for name in "ab"}
    for i in range(30):
        params = {"a": i / 30, "b": (i * 7 % 30) / 30}
        values = [params["a"], params["b"]]
        study.add_trial(create_trial(params=params, distributions=space, values=values))
    for objective, leader in enumerate("ab"):
        assert computed(study, objective=objective).shares[0].name == leader


def test_equal_values_have_no_importances() -> None:
    with pytest.raises(SweepError, match="all 10 trials have the same value"):
        computed(study_of(lambda params: 0.5, 10))


def test_optuna_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    study = study_of(by_rate, 10)
    capfd.readouterr()
    computed(study)
    assert capfd.readouterr() == ("", "")
