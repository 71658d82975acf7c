"""A script of TensorFlow's documentation: launched, killed, stopped, swept, in folds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from framework_scripts import tensorflow_distributed_training_with_keras as train
from frameworks import needs
from kernels import until

import nbtoolkit as nb
from nbtoolkit.errors import WorkerDied

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.apart,
    needs("tensorflow", "keras"),
]
BATCHES = 8  # of an epoch of 60 samples


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nb.Config:
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    settings = {
        "runtime.output_dir": str(tmp_path / "out"),
        "tracking.mlflow": False,
        "train.epochs": 3,
        "optim.lr": 0.001,
        "data": {"seconds": 0.0, "kill_at": 0},
        "distributed.backend": "tensorflow",
    }
    return nb.load_config(env=None, overrides=settings)


def reports(run: Any) -> list[Any]:
    """The reports of epochs, numbered from 1; what the function returns has no step."""
    events = nb.attach(run.paths.folder).events()
    return [event for event in events if event.type == "report" and event.step is not None]


def check(run: nb.RunResult) -> None:
    assert (run.status, run.value["replicas"]) == ("completed", 1)
    steps = [event.step for event in reports(run)]
    assert len(steps) == 3
    assert steps == sorted(steps)


def test_it_trains_and_a_killed_run_resumes(config: nb.Config) -> None:
    dies = config.with_overrides({"data.kill_at": BATCHES + 3})
    with pytest.raises(WorkerDied):
        nb.launch(train, dies, display="off")
    run = nb.launch(train, dies, display="off")
    check(run)
    losses = [event.values["loss"] for event in reports(run)]
    assert losses[-1] < losses[0]
    # The second epoch begins twice, and the first does not.
    assert (run.paths.folder / "steps-0").stat().st_size == 3 * BATCHES + 3


def test_a_run_ends_within_an_epoch_and_resumes(config: nb.Config) -> None:
    slow = config.with_overrides({"data.seconds": 1.0})
    handle = nb.launch(train, slow, wait=False, display="off")
    begun = handle.paths.folder / "steps-0"
    until(lambda: begun.exists() and begun.stat().st_size >= 2, "the second step", 240)
    handle.stop()
    stopped = handle.result()
    assert (stopped.status, stopped.values, reports(stopped)) == ("stopped", [], [])
    run = nb.launch(train, config, display="off")
    check(run)


def test_a_sweep_prunes_its_trials(config: nb.Config) -> None:
    search = {
        "study": {
            "metric": "loss",
            "sampler": "random",
            "pruner": "median",
            "pruner_options": {"n_startup_trials": 1},
        },
        "placement": "device_per_trial",
        "space": {"optim.lr": {"type": "float", "low": 1e-7, "high": 1e-2, "log": True}},
        "first_trials": [{"optim.lr": rate} for rate in (1e-3, 1e-3, 1e-7)],
    }
    result = nb.sweep(train, config, search, n_trials=4, display="off")
    assert set(result.trials["state"]) == {"complete", "pruned"}
    assert result.best_value == result.trials["value"].dropna().min()


def test_folds_are_cross_validated(config: nb.Config) -> None:
    folds = nb.make_folds(list(range(60)), kind="kfold", k=2)
    result = nb.cross_validate(train, config, folds, display="off")
    assert result.status == "completed"
    first, second = result.scores["weights"]
    assert first != second  # each has learned its own samples
