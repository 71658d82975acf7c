"""``folds:`` in a sweep's file, and other tools' names for its settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import ConfigError, FoldError, SpaceError
from nbtoolkit.search.study.sweep_config import FoldConfig, load_sweep_config
from nbtoolkit.search.sweep import configured_folds
from nbtoolkit.worker.context import RunContext

Y = [0, 1, 2] * 8
GROUPS = [number // 4 for number in range(24)]
SPACE = {"optim.lr": {"type": "float", "low": 0.1, "high": 0.9}}
STUDY = {"metric": "score"}

MODULE = """
from pathlib import Path

Y = [0, 1, 2] * 8


def load():
    return [[y] for y in Y], Y, [number // 4 for number in range(24)]


def train(config, ctx):
    fold = ctx.fold
    ctx.report({"score": config.optim.lr})
    return {"first": int(fold.valid_indices[0]), "size": len(fold.valid_indices)}
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config().with_overrides(
        {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path / "out")}
    )


def train(config: Config, ctx: RunContext) -> dict[str, int]:
    ctx.report({"score": config.optim.lr})
    return {"size": len(ctx.fold.valid_indices)}


def folds_of(**settings: Any) -> FoldConfig:
    return FoldConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("settings", "given", "expected"),
    [
        ({"k": 4, "seed": 3}, {"targets": Y}, {"k": 4, "seed": 3}),
        ({"k": 2, "repeats": 2}, {"targets": Y}, {"k": 2, "repeats": 2}),
        ({"k": 3, "kind": "group"}, {"targets": Y, "groups": GROUPS}, {"k": 3, "kind": "group"}),
        ({"k": 3}, {"targets": Y, "groups": GROUPS}, {"k": 3, "kind": "group"}),
        ({"k": 3, "kind": "kfold"}, {"targets": 24}, {"k": 3, "kind": "kfold"}),
        ({"k": 3, "kind": "time"}, {"targets": 24}, {"k": 3, "kind": "time"}),
    ],
)
def test_every_setting_of_the_folds_counts(
    settings: dict[str, Any], given: dict[str, Any], expected: dict[str, Any]
) -> None:
    given = {"groups": None, **given}
    found = configured_folds(folds_of(**settings), "__main__:train", **given)
    groups = given["groups"] if expected.get("kind") == "group" else None
    y = range(24) if given["targets"] == 24 else Y
    assert found == nb.make_folds(y, groups=groups, **expected)


def test_a_file_of_folds_is_read(tmp_path: Path) -> None:
    folds = nb.make_folds(Y, k=3, seed=5)
    folds.save(tmp_path / "folds.json")
    settings = folds_of(file=str(tmp_path / "folds.json"))
    assert configured_folds(settings, "__main__:train", None, None) == folds


def test_no_folds_are_made_without_settings() -> None:
    assert configured_folds(FoldConfig(), "__main__:train", None, None) is None
    with pytest.raises(FoldError, match=r"to a sweep without folds[\s\S]*set folds: \{k: 5\}"):
        configured_folds(FoldConfig(), "__main__:train", Y, None)


@pytest.mark.parametrize("task", ["__main__:train", "json:loads", "nowhere:train"])
def test_folds_without_targets_are_refused_before_the_start(task: str) -> None:
    with pytest.raises(
        FoldError, match=r"folds.k is 3, .* no targets[\s\S]*nb.sweep\(..., targets=y"
    ):
        configured_folds(folds_of(k=3), task, None, None)


def test_a_number_of_samples_makes_no_strata() -> None:
    with pytest.raises(FoldError, match=r"'stratified', which needs each sample's target"):
        configured_folds(folds_of(k=3), "__main__:train", 24, None)


# --- the same from a cell, a module, the command line ---


def test_a_sweep_of_a_cell_is_given_targets(config: Config) -> None:
    pytest.importorskip("optuna")
    sweep_config = {"study": STUDY, "space": SPACE, "folds": {"k": 4, "kind": "kfold", "seed": 2}}
    result = nb.sweep(train, config, sweep_config, n_trials=1, targets=Y, display="off")
    trial = result.paths.folder / "trials" / "0000"
    assert sorted(entry.name for entry in trial.glob("fold-*")) == [f"fold-{i}" for i in range(4)]
    expected = nb.make_folds(Y, k=4, kind="kfold", seed=2)
    found = json.loads((result.paths.folder / "folds.json").read_text())
    assert (found["kind"], found["seed"]) == ("kfold", 2)
    assert expected.hash in (result.paths.folder / "folds.json").read_text()


@pytest.mark.long
def test_the_command_line_takes_the_targets_of_the_module(config: Config, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    (tmp_path / "mine.py").write_text(MODULE)
    space = {"study": STUDY, "space": SPACE, "folds": {"k": 2, "kind": "group"}}
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(space))
    settings = config.with_overrides({"task": "mine:train"})
    (tmp_path / "train.yaml").write_text(settings.to_yaml())
    command = ["sweep", "space.yaml", "train.yaml", "--trials", "1"]
    program = [sys.executable, "-m", "nbtoolkit", *command]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "out").glob("*-sweep-*")
    assert json.loads((folder / "folds.json").read_text())["kind"] == "group"
    assert len(list((folder / "trials" / "0000").glob("fold-*"))) == 2


# --- other tools' names ---


def test_other_names_are_understood_in_a_sweeps_file(config: Config) -> None:
    sweep_config = load_sweep_config(
        {
            "study": {"metric": "val_loss"},
            "space": SPACE,
            "k_fold": {"enabled": True, "n_splits": 4, "random_seed": 7, "stratified": False},
            "sampling": {"algorithm": "bayesian", "max_trials": 30, "timeout_minutes": 90},
            "early_termination": {"policy": "median_stopping"},
            "trials_per_gpu": 2,
        },
        config,
    )
    assert (sweep_config.folds.k, sweep_config.folds.seed, sweep_config.folds.kind) == (
        4,
        7,
        "kfold",
    )
    assert (sweep_config.study.sampler, sweep_config.study.pruner) == ("tpe", "median")
    assert (sweep_config.budget.n_trials, sweep_config.budget.timeout) == (30, 5400.0)
    assert sweep_config.trials_per_device == 2


def test_ours_beat_other_names_and_a_fold_can_be_switched_off(config: Config) -> None:
    given = {"space": SPACE, "k_fold": {"enabled": False}, "sampling": "random"}
    sweep_config = load_sweep_config(
        {**given, "study": {"metric": "val_loss", "sampler": "tpe"}}, config, n_trials=2
    )
    assert (sweep_config.folds.k, sweep_config.study.sampler) == (None, "tpe")
    assert load_sweep_config({"space": SPACE, "k_fold": 3}, config, n_trials=2).folds.k == 3


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"k_fold": {"splits": 3}}, r"'k_fold' has no 'splits' here[\s\S]*see folds in"),
        ({"k_fold": {"shuffle": False}}, r"no 'shuffle' here"),
        ({"sampling": {"rate": 1}}, r"'sampling' has no 'rate' here[\s\S]*see study and budget in"),
        ({"sampling": "magic"}, r"sweep 'sampling'.*magic"),
        ({"early_termination": {"policy": "bandit"}}, r"bandit"),
        ({"early_termination": {"slack": 1}}, r"'slack' here[\s\S]*see study in"),
    ],
)
def test_what_other_names_cannot_say_is_refused(
    config: Config, given: dict[str, Any], what: str
) -> None:
    with pytest.raises(SpaceError, match=what):
        load_sweep_config({"space": SPACE, **given}, config, n_trials=2)


@pytest.mark.parametrize("name", ["k_fold", "sampling", "early_termination", "trials_per_gpu"])
def test_what_a_configuration_sends_to_the_sweeps_file_is_accepted_there(
    config: Config, name: str
) -> None:
    with pytest.raises(ConfigError, match="sweep's own file"):
        nb.load_config(env=None, overrides={name: 2})
    values = {"k_fold": 2, "sampling": "random", "early_termination": "median", "trials_per_gpu": 2}
    load_sweep_config({"space": SPACE, name: values[name]}, config, n_trials=2)
