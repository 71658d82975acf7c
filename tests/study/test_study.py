from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest
from searches import LR, SPACE

from nbtoolkit import load_config
from nbtoolkit.errors import SpaceError, SweepError
from nbtoolkit.search.study.samplers import TrialSamplers, make_pruner, make_sampler
from nbtoolkit.search.study.study import FILE, SearchStudy, open_journal, open_study, read_study
from nbtoolkit.search.study.sweep_config import SweepConfig, load_sweep_config

COMPLETE = optuna.trial.TrialState.COMPLETE


class Opened:
    """Opens studies in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, source: Any, identity: dict[str, Any] | None = None) -> SearchStudy:
        sweep_config = configured(source)
        return open_study(
            self.folder / FILE, sweep_config, sweep_config.make_space(), identity or {}
        )


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    return Opened(tmp_path)


def configured(source: Any) -> SweepConfig:
    return load_sweep_config({"budget": {"n_trials": 9}, **source}, load_config(env=None))


def plain(**study: Any) -> dict[str, Any]:
    return {"study": study, "space": SPACE}


def finished(study: SearchStudy, value: float = 0.5) -> dict[str, Any]:
    number, params = study.ask()
    study.tell(number, COMPLETE, [value], {})
    return params


def test_parameters_are_those_in_the_file_to_the_last_bit(opened: Opened, tmp_path: Path) -> None:
    study = opened(plain(sampler="tpe"))
    asked = [finished(study, value=i / 7) for i in range(15)]
    stored = read_study(tmp_path / FILE).trials
    assert [{**trial.params} for trial in stored] == asked
    assert [trial.values for trial in stored] == [[i / 7] for i in range(15)]
    assert all(type(params["optim.lr"]) is float for params in asked)


@pytest.mark.parametrize(
    "sampler",
    [
        "tpe",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("random", "qmc", "gp", "cmaes")),
    ],
)
def test_a_reopened_study_draws_what_it_would_have_drawn(sampler: str, tmp_path: Path) -> None:
    options = {"n_startup_trials": 2} if sampler in ("tpe", "gp") else {}

    def drawn(folder: Path, sessions: list[int]) -> list[dict[str, Any]]:
        folder.mkdir()
        found, opener = [], Opened(folder)
        for trials in sessions:
            study = opener(plain(sampler=sampler, sampler_options=options))
            for _ in range(trials):
                found.append(finished(study, value=len(found) % 3))
        return found

    whole, parts = drawn(tmp_path / "one", [6]), drawn(tmp_path / "three", [2, 1, 3])
    assert whole == parts
    assert len({tuple(point.items()) for point in whole}) == 6


def test_seeds_draw_differently() -> None:
    space = configured(plain()).make_space()

    def first(sampler: str, seed: int) -> dict[str, Any]:
        study = optuna.create_study(
            sampler=TrialSamplers(configured(plain(sampler=sampler, seed=seed)), space).of(0)
        )
        return space.suggest(study.ask())

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for sampler in ("tpe", "random", "qmc"):
        assert first(sampler, 0) == first(sampler, 0) != first(sampler, 1)


def test_qmc_fills_the_space_evenly(opened: Opened) -> None:
    study = opened(
        {"study": {"sampler": "qmc"}, "space": {"model.x": {"type": "float", "low": 0, "high": 1}}}
    )
    finished(study)  # Optuna draws the first one at random
    points = sorted(finished(study)["model.x"] for _ in range(8))
    assert [int(x * 8) for x in points] == list(range(8))


def test_a_running_trial_is_taken_up_with_the_same_parameters(opened: Opened) -> None:
    study = opened(plain())
    number, params = study.ask()
    study.report(number, 0.5, 0)
    again = opened(plain())
    assert again.resume(number) == (number, params)
    assert again.report(number, 0.7, 0)[0] == 0  # the step counts once, without a warning
    assert again.report(number, 0.8, None)[0] == 1
    assert again.reports(number) == {0: 0.5, 1: 0.8}


def test_a_trial_cut_off_while_it_was_drawn_gets_its_missing_parameters(opened: Opened) -> None:
    study = opened(plain(sampler="random"))
    whole = study.ask()[1]
    study.optuna.ask().suggest_float("optim.lr", LR["low"], LR["high"], log=True)
    _, params = opened(plain(sampler="random")).resume(1)
    assert set(params) == set(whole)
    assert params != whole


def test_a_study_for_another_search_is_refused_and_the_difference_shown(opened: Opened) -> None:
    finished(opened(plain(), {"space.optim.lr": LR, "folds": "abc"}))
    with pytest.raises(SweepError, match=r"folds: was 'abc', is 'def'(.|\n)*start again"):
        opened(plain(), {"space.optim.lr": LR, "folds": "def"})
    with pytest.raises(SweepError, match=r"space.optim.lr: was {.*}, is None"):
        opened(plain(), {"folds": "abc"})


def test_a_study_cut_off_before_its_first_trial_is_made_anew(
    opened: Opened, tmp_path: Path
) -> None:
    storage = open_journal(tmp_path / FILE)
    half = optuna.create_study(study_name="sweep", storage=storage)
    half.enqueue_trial({"optim.lr": 0.5})
    study = opened({**plain(), "first_trials": [{"optim.lr": 0.25}]})
    assert finished(study)["optim.lr"] == 0.25
    finished(study)
    assert len(study.trials()) == 2


def test_first_trials_may_leave_parameters_to_the_sampler(opened: Opened) -> None:
    study = opened(
        {**plain(sampler="random"), "first_trials": [{"model.kind": "cnn", "optim.lr": 1}]}
    )
    first = finished(study)
    assert (first["model.kind"], first["optim.lr"]) == ("cnn", 1.0)
    assert 1 <= first["model.hidden"] <= 64


def test_lists_are_choices_too(opened: Opened) -> None:
    source = {"study": {"sampler": "random"}, "space": {"model.layers": [[64], [64, 32]]}}
    study = opened({**source, "first_trials": [{"model.layers": [64, 32]}]})
    found = [finished(study)["model.layers"] for _ in range(6)]
    assert found[0] == [64, 32]
    assert [64] in found
    assert all(layers in ([64], [64, 32]) for layers in found)


def test_a_study_is_the_same_when_it_is_opened_again(opened: Opened, tmp_path: Path) -> None:
    study = opened(plain(sampler="tpe", pruner="median"))
    for i in range(4):
        number, _ = study.ask()
        study.report(number, i / 3, None)
        study.report(number, i / 7, 5)
        study.constrain(number, {"memory": float(i)})
        if i < 3:
            study.tell(number, COMPLETE, [i / 7], {"seconds": 1.5, "fold-0": {"val_loss": 0.5}})
    study.optuna.set_user_attr("added", 2)
    own = seen(study.optuna)
    assert own == seen(opened(plain(sampler="tpe", pruner="median")).optuna)
    assert own == seen(read_study(tmp_path / FILE))


def seen(study: optuna.Study) -> list[Any]:
    def attributes(trial: optuna.trial.FrozenTrial) -> str:
        return json.dumps([trial.user_attrs, trial.system_attrs], sort_keys=True)

    trials = [
        [one.number, one.state, one.params, one.distributions, one.values, attributes(one)]
        for one in study.trials
    ]
    reports = [one.intermediate_values for one in study.trials]
    return [study.directions, study.user_attrs, trials, reports]


def test_a_warm_start_takes_the_trials_that_fit(opened: Opened, tmp_path: Path) -> None:
    old = Opened(tmp_path / "old")
    old.folder.mkdir()
    study = old(plain(sampler="random"))
    lrs = [finished(study, value=i)["optim.lr"] for i in range(6)]
    low = sorted(lrs)[2]
    narrow = {**SPACE, "optim.lr": {**LR, "low": low}}
    new = opened({"space": narrow, "warm_start": str(old.folder)})
    assert new.imported == sum(lr >= low for lr in lrs) == 4
    assert new.trials() == []
    assert [trial.user_attrs["warm_start"] for trial in new.optuna.trials] == [str(old.folder)] * 4
    number, _ = new.ask()
    assert number == 4


@pytest.mark.parametrize(
    ("says", "space", "study"),
    [
        ("other directions", SPACE, {"direction": "maximize"}),
        ("none of the 1 complete trials", {"optim.momentum": {**LR, "high": 0.9}}, {}),
    ],
)
def test_a_warm_start_that_cannot_be_is_refused(
    says: str, space: Any, study: Any, opened: Opened, tmp_path: Path
) -> None:
    old = Opened(tmp_path / "old")
    old.folder.mkdir()
    finished(old(plain()))
    with pytest.raises(SweepError, match=says):
        opened({"study": study, "space": space, "warm_start": str(old.folder)})


def test_a_warm_start_from_nowhere_is_refused(opened: Opened) -> None:
    with pytest.raises(SweepError, match="there is no study nowhere"):
        opened({**plain(), "warm_start": "nowhere"})


@pytest.mark.parametrize("name", ["median", "successive_halving", "hyperband", "patient", "none"])
def test_every_pruner_judges(name: str, opened: Opened) -> None:
    study = opened(plain(pruner=name))
    for _ in range(3):
        number, _ = study.ask()
        for step in range(4):
            study.report(number, float(step), step)
        study.tell(number, COMPLETE, [3.0], {})


def test_options_reach_optuna_and_wrong_ones_are_refused() -> None:
    pruner = make_pruner(
        configured(plain(pruner="percentile", pruner_options={"percentile": 25.0}))
    )
    assert isinstance(pruner, optuna.pruners.PercentilePruner)
    options = {"n_startup_trials": 3}
    sampler = make_sampler(configured(plain(sampler="tpe", sampler_options=options)))
    assert isinstance(sampler, optuna.samplers.TPESampler)
    with pytest.raises(SpaceError, match=r"pruner_options(.|\n)*n_trials(.|\n)*MedianPruner"):
        configured(plain(pruner="median", pruner_options={"n_trials": 3}))
    with pytest.raises(SpaceError, match=r"sampler_options(.|\n)*startup(.|\n)*TPESampler"):
        configured(plain(sampler="tpe", sampler_options={"startup": 3}))


@pytest.mark.parametrize("name", ["random", "qmc"])
def test_random_and_qmc_trials_are_those_of_optunas_own_sampler(name: str, opened: Opened) -> None:
    study = opened(plain(sampler=name, seed=3))
    sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed=3)
    if name == "qmc":
        with pytest.warns(optuna.exceptions.ExperimentalWarning):
            sampler = optuna.samplers.QMCSampler(seed=3, scramble=True)
    alone = optuna.create_study(sampler=sampler)
    distributions = dict(configured(plain()).make_space().distributions)
    expected = []
    for _ in range(8):
        trial = alone.ask(distributions)
        expected.append(trial.params)
        alone.tell(trial, 0.5)
    assert [study.ask()[1] for _ in range(8)] == expected


def test_a_grid_with_conditions_visits_each_visible_point_once(opened: Opened) -> None:
    space = {
        "optim.name": ["adamw", "sgd"],
        "optim.momentum": {"choices": [0.5, 0.9], "when": {"optim.name": "sgd"}},
        "train.epochs": {"low": 1, "high": 3},
    }
    study = opened({"study": {"sampler": "grid"}, "space": space})
    points = [tuple(study.ask()[1].items()) for _ in range(9)]
    assert len(set(points)) == 9
    assert tuple(study.ask()[1].items()) == points[0]
