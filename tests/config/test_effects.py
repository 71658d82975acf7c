"""Settings that once had no effect, or accepted any value."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import CPU_BUILD, machine
from torch import nn
from torch.nn import functional as F

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import FoldError, SpaceError
from nbtoolkit.search.slots import make_slots
from nbtoolkit.search.study.sweep_config import load_sweep_config
from nbtoolkit.worker.context import RunContext

SPACE = {"optim.lr": {"type": "float", "low": 0.1, "high": 0.9}}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"qmc_typ": "halton"}, r"unexpected keyword argument 'qmc_typ'[\s\S]*QMCSampler"),
        ({"qmc_type": "latin"}, r"qmc_type='latin'[\s\S]*`halton` or `sobol`"),
    ],
)
def test_options_that_qmc_does_not_have_are_refused(options: dict[str, Any], what: str) -> None:
    study = {"metric": "val_loss", "sampler": "qmc", "sampler_options": options}
    with pytest.raises(SpaceError, match=what):
        load_sweep_config({"study": study, "space": SPACE}, Config(), n_trials=2)


def test_options_that_qmc_has_are_taken() -> None:
    study = {"metric": "val_loss", "sampler": "qmc"}
    options = {"qmc_type": "halton", "scramble": False}
    sweep_config = {"study": {**study, "sampler_options": options}, "space": SPACE}
    assert load_sweep_config(sweep_config, Config(), n_trials=2).study.sampler_options == options


def test_trials_on_one_device_are_said_to_be_for_gpus() -> None:
    hardware = machine(build=CPU_BUILD)
    assert "for GPUs" not in make_slots(Config(), hardware, "auto").explain()
    told = make_slots(Config(), hardware, "auto", per_device=2).explain()
    assert "trials_per_device: 2 is for GPUs" in told


def fits(config: Config, ctx: RunContext) -> None:
    """Every trial is worse than the one before, from its first epoch on."""
    x = torch.ones(8, 2)
    loss = len(list((ctx.paths.folder.parent).iterdir()))

    def worse(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float(loss)

    metrics, model = {"mae": worse}, nn.Linear(2, 1)
    nb.fit(ctx, config, model, (x, x[:, :1]), (x, x[:, :1]), loss=F.mse_loss, metrics=metrics)


def loops(config: Config, ctx: RunContext) -> None:
    loss = len(list((ctx.paths.folder.parent).iterdir()))
    for epoch in range(config.train.epochs):
        ctx.report({"val_mae": float(loss)}, step=epoch)


@pytest.mark.parametrize("train", [fits, loops])
def test_warmup_steps_of_a_pruner_are_epochs(tmp_path: Path, train: Any) -> None:
    pytest.importorskip("optuna")
    settings = {"train": {"epochs": 5}, "tracking.mlflow": False, "checkpoint.enabled": False}
    config = Config().with_overrides({**settings, "runtime.output_dir": str(tmp_path)})
    options = {"n_warmup_steps": 3, "n_startup_trials": 1}
    study = {
        "metric": "val_mae",
        "sampler": "random",
        "pruner": "median",
        "pruner_options": options,
    }
    sweep_config = {"study": study, "space": SPACE, "placement": "all_devices_per_trial"}
    result = nb.sweep(train, config, sweep_config, n_trials=2, display="off")
    first, second = result.study.get_trials()
    # "Pruning is disabled until the trial exceeds the given number of step", which begin at 0.
    assert sorted(first.intermediate_values) == [0, 1, 2, 3, 4]
    assert sorted(second.intermediate_values) == [0, 1, 2, 3]
    assert second.state.name == "PRUNED"


def sleeps(config: Config, ctx: RunContext) -> None:
    while True:
        ctx.raise_if_stopped()
        time.sleep(0.01)


def test_a_cross_validation_without_a_fold_says_so(tmp_path: Path) -> None:
    config = Config().with_overrides(
        {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path), "runtime.time_budget": 1}
    )
    folds = nb.make_folds(range(8), k=2, kind="kfold")
    result = nb.cross_validate(sleeps, config, folds, display="off")
    assert result.status == "deadline"
    assert "0 of 2 folds" in repr(result)
    for look in (lambda: result.mean, lambda: result.std, lambda: result.oof):
        with pytest.raises(
            FoldError, match=r"none of 2 folds is done: .*deadline[\s\S]*time_budget"
        ):
            look()


def test_folds_of_a_function_that_fits_are_compared_from_fold_0_on(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    settings = {"train": {"epochs": 1}, "tracking.mlflow": False, "checkpoint.enabled": False}
    config = Config().with_overrides({**settings, "runtime.output_dir": str(tmp_path)})
    sweep_config = {"study": {"metric": "val_mae", "sampler": "random"}, "space": SPACE}
    folds = nb.make_folds(range(8), k=2, kind="kfold")
    result = nb.sweep(fits, config, sweep_config, n_trials=1, folds=folds, display="off")
    (trial,) = result.study.get_trials()
    assert sorted(trial.intermediate_values) == [0, 1]
