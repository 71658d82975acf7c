"""A script of each framework's documentation: launched, killed, stopped, swept, in folds."""

from __future__ import annotations

import ast
import inspect
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import framework_scripts as scripts
import pytest
from kernels import until
from records import owner_pid

import nbtoolkit as nb
from nbtoolkit.errors import WorkerDied
from nbtoolkit.run.checkpoints.checkpoint_store import read_state

pytestmark = pytest.mark.timeout(900)  # the frameworks alone take seconds to import


@dataclass(frozen=True)
class Script:
    """What a test knows of a documented script."""

    train: Callable[..., Any]
    loss: str
    """The reported metric that falls."""
    steps: dict[int, int]
    """Optimizer steps of an epoch, by the number of ranks."""
    samples: int
    """The samples of which a fold takes its part."""


SCRIPTS = {
    "lightning": Script(scripts.lightning_in_15_minutes, "train_loss", {1: 8, 2: 8}, 60),
    "transformers": Script(scripts.transformers_fine_tuning, "eval_loss", {1: 6, 2: 6}, 48),
    "keras": Script(scripts.keras_simple_mnist_convnet, "loss", {1: 7}, 60),
}
ON_RANKS = [(name, ranks) for name, script in SCRIPTS.items() for ranks in script.steps]


@pytest.fixture(autouse=True)
def keras_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")


@pytest.fixture
def config(tmp_path: Path) -> nb.Config:
    settings = {
        "runtime.output_dir": str(tmp_path / "out"),
        "tracking.mlflow": False,
        "train.epochs": 2,
        "train.batch_size": 8,
        "optim.lr": 0.01,
        "data": {"seconds": 0.0, "kill_at": 0},
    }
    return nb.load_config(env=None, overrides=settings)


def script_of(name: str) -> Script:
    if find_spec(name) is None:
        pytest.skip(f"NOT TESTED: {name} is not installed (make test-integrations)")
    return SCRIPTS[name]


def for_ranks(config: nb.Config, name: str, ranks: int) -> nb.Config:
    # Lightning's loader of the page has one sample in a batch, whatever the plan says.
    several = {"distributed.world_size": ranks, "distributed.enabled": ranks > 1}
    return config.with_overrides(several)


def reports(run: Any) -> list[Any]:
    """The reports with a step; what the function returns has none."""
    events = nb.attach(run.paths.folder).events()
    return [event for event in events if event.type == "report" and event.step is not None]


def saved_step(run: Any) -> int:
    state = read_state(run.paths.checkpoints / "last.pt")
    return int(state["trainings"]["trainer"]["step"])


TENSORFLOW = scripts.tensorflow_distributed_training_with_keras  # test_tensorflow_script.py


@pytest.mark.parametrize(
    "train", [*(script.train for script in SCRIPTS.values()), TENSORFLOW], ids=[*SCRIPTS, "tf"]
)
def test_at_most_two_lines_of_a_script_change(train: Callable[..., Any]) -> None:
    source = inspect.getsource(train)
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    uses = re.compile(r"\bnb(l|t|k|tf)\.")
    changed = [one for one in function.body if uses.search(ast.unparse(one))]
    assert 1 <= len(changed) <= 2
    assert len(changed) == source.count("# nbtoolkit\n")


HERE = ("transformers", 1)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        # One framework in make test-rest: each takes some ten seconds to import and to start.
        pytest.param(*one, marks=getattr(pytest.mark, "apart" if one != HERE else "long"))
        for one in ON_RANKS
    ],
)
def test_it_trains_and_reports_on_every_rank(config: nb.Config, name: str, ranks: int) -> None:
    script = script_of(name)
    run = nb.launch(script.train, for_ranks(config, name, ranks), display="off")
    assert (run.status, run.plan.processes, len(run.values)) == ("completed", ranks, ranks)
    assert len({value["weights"] for value in run.values}) == 1  # one model
    steps = script.steps[ranks]
    assert sorted({event.step for event in reports(run)}) == [steps, 2 * steps]
    assert all(script.loss in event.values for event in reports(run))
    assert saved_step(run) == 2 * steps
    log = run.paths.log(0).read_text()
    assert "Traceback" not in log


@pytest.mark.apart
@pytest.mark.parametrize(("name", "ranks"), ON_RANKS)
def test_a_killed_run_resumes_and_ends_with_the_same_weights(
    config: nb.Config, name: str, ranks: int
) -> None:
    script = script_of(name)
    settings = for_ranks(config, name, ranks).with_overrides({"train.epochs": 3})
    whole = nb.launch(script.train, settings, display="off")
    steps = script.steps[ranks]
    dies = settings.with_overrides({"data.kill_at": steps + 3})
    with pytest.raises(WorkerDied):
        nb.launch(script.train, dies, display="off")
    resumed = nb.launch(script.train, dies, display="off")
    assert resumed.status == "completed"
    assert [event.step for event in reports(resumed)][:3] == [steps, 2 * steps, 3 * steps]
    for value, expected in zip(resumed.values, whole.values, strict=True):
        assert value["weights"] == pytest.approx(expected["weights"], rel=1e-9)


@pytest.mark.apart
@pytest.mark.parametrize(("name", "ranks"), ON_RANKS)
@pytest.mark.parametrize("why", ["stopped", "deadline"])
def test_a_run_ends_within_an_epoch_and_resumes(
    config: nb.Config, name: str, ranks: int, why: str
) -> None:
    script = script_of(name)
    settings = for_ranks(config, name, ranks).with_overrides({"data.seconds": 1.0})
    settings = settings.with_overrides({"train.epochs": 1})
    handle = nb.launch(script.train, settings, wait=False, display="off")
    begun = handle.paths.folder / "steps-0"
    until(lambda: begun.exists() and begun.stat().st_size >= 2, "the second step")
    if why == "stopped":
        handle.stop()
    else:
        os.kill(owner_pid(handle.paths.folder), signal.SIGTERM)
    stopped = handle.result()
    assert stopped.status == why
    assert stopped.values == []
    assert not reports(stopped)
    assert 1 <= saved_step(stopped) < script.steps[ranks]
    for rank in range(ranks):
        assert "Traceback" not in stopped.paths.log(rank).read_text()
    resumed = nb.launch(script.train, settings, display="off")
    assert (resumed.status, resumed.paths.folder) == ("completed", stopped.paths.folder)
    assert reports(resumed)[-1].step >= script.steps[ranks]


@pytest.mark.apart
@pytest.mark.parametrize(("name", "ranks"), ON_RANKS)
def test_a_sweep_prunes_its_trials(config: nb.Config, name: str, ranks: int) -> None:
    script = script_of(name)
    search = {
        "study": {
            "metric": script.loss,
            "sampler": "random",
            "pruner": "median",
            "pruner_options": {"n_startup_trials": 1},
        },
        "placement": "all_devices_per_trial" if ranks > 1 else "device_per_trial",
        "space": {"optim.lr": {"type": "float", "low": 1e-6, "high": 1e-1, "log": True}},
    }
    settings = for_ranks(config, name, ranks).with_overrides({"train.epochs": 3})
    result = nb.sweep(script.train, settings, search, n_trials=6, display="off")
    assert set(result.trials["state"]) == {"complete", "pruned"}
    assert result.best_value == result.trials["value"].dropna().min()


@pytest.mark.apart
@pytest.mark.parametrize("name", SCRIPTS)
def test_folds_are_cross_validated(config: nb.Config, name: str) -> None:
    script = script_of(name)
    folds = nb.make_folds(list(range(script.samples)), kind="kfold", k=2)
    result = nb.cross_validate(script.train, config, folds, display="off")
    assert result.status == "completed"
    weights = result.scores["weights"]
    assert len(weights) == 2
    assert weights[0] != weights[1]  # each has learned its own samples
