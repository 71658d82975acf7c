from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nbtoolkit import load_config
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import ConfigError, SpaceError
from nbtoolkit.search.study.sweep_config import SweepConfig, load_sweep_config

LR = {"type": "float", "low": 1e-4, "high": 1e-1, "log": True}
SPACE = {"optim.lr": LR}
ENDS = {"budget": {"n_trials": 3}, "space": SPACE}


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(env=None)


@pytest.mark.parametrize("name", ["digits", "smoke"])
def test_the_files_that_ship_are_right(name: str) -> None:
    config = load_config("config/train.yaml", env=None)
    sweep_config = load_sweep_config(f"config/hpo/{name}.yaml", config)
    assert sweep_config.metrics == ("val_accuracy",)
    assert sweep_config.directions == ("maximize",)
    assert sweep_config.budget.timeout is not None
    assert "optim.lr" in sweep_config.make_space().distributions


def test_a_bare_dict_of_dotted_names_is_a_space(config: Config) -> None:
    sweep_config = load_sweep_config(SPACE, config, n_trials=7)
    assert sweep_config.make_space().to_dict() == SPACE
    assert (sweep_config.budget.n_trials, sweep_config.metrics) == (7, ("val_loss",))
    assert sweep_config.directions == ("minimize",)


def test_a_bare_file_of_dotted_names_is_a_space_too(tmp_path: Path, config: Config) -> None:
    file = tmp_path / "space.yaml"
    file.write_text("optim.lr: [0.1, 0.2]\noptim.lrr: [0.1]\n")
    with pytest.raises(SpaceError, match=r"space.yaml:2: unknown setting 'optim.lrr'"):
        load_sweep_config(file, config, n_trials=2)


def test_the_metric_is_what_the_checkpoints_go_by(config: Config) -> None:
    watched = config.with_overrides({"checkpoint.monitor": "val_auc"})
    sweep_config = load_sweep_config(ENDS, watched)
    assert (sweep_config.metrics, sweep_config.directions) == (("val_auc",), ("maximize",))


def test_the_call_beats_the_file(config: Config) -> None:
    sweep_config = load_sweep_config(ENDS, config, n_trials=9, timeout="1h", folds=4)
    assert (sweep_config.budget.n_trials, sweep_config.budget.timeout, sweep_config.folds.k) == (
        9,
        3600.0,
        4,
    )


def test_what_is_written_is_read_back(tmp_path: Path, config: Config) -> None:
    given = {
        **ENDS,
        "study": {
            "metric": ["val_loss", "val_accuracy"],
            "sampler_options": {"n_startup_trials": 3},
        },
        "first_trials": [{"optim.lr": 0.01}],
        "constraints": {"latency": {"max": 20}},
        "folds": None,
    }
    sweep_config = load_sweep_config(given, config)
    assert sweep_config.directions == ("minimize", "maximize")
    assert sweep_config.pruner == "none"
    file = tmp_path / "sweep.yaml"
    file.write_text(sweep_config.to_yaml())
    assert load_sweep_config(file, config) == sweep_config
    assert SweepConfig.model_validate(sweep_config.to_dict()) == sweep_config


def with_study(**study: Any) -> dict[str, Any]:
    return {**ENDS, "study": study}


WRONG: dict[str, dict[str, Any]] = {
    r"unknown setting 'study.metrik'(.|\n)*'study.metric'": with_study(metrik="val_loss"),
    r"unknown setting 'budgt'(.|\n)*'budget'": {"budgt": {}, **ENDS},
    r"study.sampler: 'tpee' is not allowed(.|\n)*tpe, gp, cmaes": with_study(sampler="tpee"),
    r"budget.n_trials: 0 is not allowed": {"budget": {"n_trials": 0}, "space": SPACE},
    r"budget.timeout: 'soon' is not allowed": {"budget": {"timeout": "soon"}, "space": SPACE},
    r"'budget' is a section, not 5": {"budget": 5, "space": SPACE},
    r"has no end(.|\n)*n_trials=20 or timeout": {"space": SPACE},
    r"nothing to search": {"budget": {"n_trials": 2}},
    r"2 directions for 1 metrics": with_study(metric="a", direction=["minimize", "maximize"]),
    r"median compares one metric": with_study(metric=["a", "b"], pruner="median"),
    r"there are no folds": with_study(pruner="wilcoxon"),
    r"missing 1 required positional argument: 'percentile'": with_study(pruner="percentile"),
    r"cmaes improves one metric": with_study(metric=["a", "b"], sampler="cmaes"),
    r"a grid has no end with space.optim.lr": with_study(sampler="grid"),
    r"unexpected keyword argument 'n_startup_trials'": with_study(
        sampler="random", sampler_options={"n_startup_trials": 1}
    ),
    r"constraints.latency: .*True.* is no limit": {
        **ENDS,
        "constraints": {"latency": {"max": True}},
    },
    r"2 mistakes(.|\n)*pruner_options(.|\n)*sampler_options": with_study(
        sampler_options={"startup": 1}, pruner_options={"startup": 1}
    ),
    r"constraints.latency: 20 is no limit": {**ENDS, "constraints": {"latency": 20}},
    r"number 0: optim.name is not searched": {**ENDS, "first_trials": [{"optim.name": "sgd"}]},
    r"number 0: The value 7 of parameter 'optim.lr' isn't contained": {
        **ENDS,
        "first_trials": [{"optim.lr": 7}],
    },
}


@pytest.mark.parametrize(("says", "given"), WRONG.items())
def test_a_wrong_wish_is_refused(says: str, given: dict[str, Any], config: Config) -> None:
    with pytest.raises(SpaceError, match=says):
        load_sweep_config(given, config)


def test_every_mistake_of_a_file_has_its_line(tmp_path: Path, config: Config) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("study: {sampler: tpee}\nbudget:\n  n_trails: 3\nspace: {optim.lr: [0.1]}\n")
    with pytest.raises(SpaceError, match=r"2 mistakes(.|\n)*yaml:1: (.|\n)*yaml:3: .*n_trials"):
        load_sweep_config(file, config)
    file.write_text(
        "budget: {n_trials: 3}\nspace:\n  optim.lr:\n    type: float\n    low: x\n    high: 1\n"
    )
    with pytest.raises(SpaceError, match=r"yaml:3: space.optim.lr: low: 'x' is not a number"):
        load_sweep_config(file, config)


def test_a_file_that_is_not_there_is_told(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file 'config/hpo/nowhere.yaml'"):
        load_sweep_config("config/hpo/nowhere.yaml", config)
