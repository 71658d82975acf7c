"""``where="ray"`` on a Ray cluster of several nodes on this machine: Ray's own test cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nbtoolkit as nb
from nbtoolkit.errors import LaunchError, PlanError
from nbtoolkit.run.attempts import last_event
from nbtoolkit.run.events import CommandReceived, EventReader, MetricsReported, RunStarted
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.tasks.digits import load
from nbtoolkit.tasks.digits import train as digits

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("default")]
ray = pytest.importorskip("ray", reason="NOT TESTED: Ray is not installed (make test-cluster)")

SPACE = {"optim.lr": {"type": "float", "low": 1e-3, "high": 1e-1, "log": True}}


@pytest.fixture(autouse=True)
def test_leaves_nothing() -> None:
    """In place of the check after each test: Ray keeps idle workers until it ends."""


@pytest.fixture
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 80 * 1024 * 1024}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **memory})
    cluster.add_node(num_cpus=2, **memory)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def lost(cluster: Any) -> Any:
    """A second node, which a test removes."""
    node = cluster.add_node(num_cpus=2, object_store_memory=80 * 1024 * 1024)
    cluster.wait_for_nodes()
    yield node
    if node in cluster.list_all_nodes():
        cluster.remove_node(node)


def config(folder: Path, **settings: Any) -> dict[str, Any]:
    fixed = {
        "runtime.output_dir": str(folder / "runs"),
        "tracking.mlflow": False,
        "train.epochs": 2,
        "cluster.gpu": False,
        "cluster.devices": 1,
    }
    return {**fixed, **settings}


def steps(config: Any, ctx: Any) -> dict[str, float]:
    saved = ctx.load()
    done = saved["done"] if saved else 0
    (ctx.paths.folder / f"node-{ctx.rank}").write_text(ray.get_runtime_context().get_node_id())
    for step in range(done, 20):
        time.sleep(0.3)
        ctx.save({"done": step + 1})
        ctx.report({"score": 1.0}, step=step)
    return {"started_at": float(done)}


def raises(config: Any, ctx: Any) -> None:
    raise ZeroDivisionError("on purpose")


def wait_until(reached: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def reported(handle: Any, count: int = 1) -> None:
    wait_until(
        lambda: sum(isinstance(event, MetricsReported) for event in handle.events()) >= count
    )


@pytest.mark.usefixtures("cluster")
def test_two_ranks_give_the_metrics_of_a_local_launch(tmp_path: Path) -> None:
    local = nb.launch(digits, config(tmp_path), processes=2, resume="never", display="off")
    settings = config(tmp_path, **{"cluster.devices": 2})
    result = nb.launch(digits, settings, where="ray", resume="never", display="off")
    assert (result.status, result.plan.processes) == ("completed", 2)
    assert result.metrics == pytest.approx(local.metrics, abs=1e-4)


@pytest.mark.usefixtures("cluster")
def test_stop_and_cancel(tmp_path: Path) -> None:
    handle = nb.launch(steps, config(tmp_path), where="ray", wait=False, display="off")
    reported(handle)
    assert handle.status == "Ray's job: 1 ranks"
    nb.attach(handle.paths.folder).stop()
    assert handle.result(timeout=100).status == "stopped"
    again = nb.launch(steps, config(tmp_path), where="ray", wait=False, display="off")
    assert again.paths == handle.paths
    reported(again, 5)
    again.cancel()
    with pytest.raises(LaunchError, match="has ended without a result: Ray's job has ended"):
        again.result(timeout=60)


@pytest.mark.usefixtures("cluster")
def test_what_the_function_raises_is_raised_here(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        nb.launch(raises, config(tmp_path), where="ray", display="off")
    [log] = (tmp_path / "runs").glob("*-raises-*/events.jsonl")
    assert sum(isinstance(event, RunStarted) for event in EventReader(log).read()) == 1


def test_the_loss_of_a_node_costs_the_steps_since_the_last_checkpoint(
    cluster: Any, lost: Any, tmp_path: Path
) -> None:
    settings = config(tmp_path, **{"cluster.devices": 2, "cluster.cpus_per_device": 1})
    handle = nb.launch(steps, settings, where="ray", wait=False, display="off")
    reported(handle, 3)
    nodes = {(handle.paths.folder / f"node-{rank}").read_text() for rank in (0, 1)}
    used = next(n for n in cluster.worker_nodes if n.node_id in nodes)
    cluster.remove_node(used, allow_graceful=False)
    if used is not lost:  # the others need two CPUs
        cluster.add_node(num_cpus=2, object_store_memory=80 * 1024 * 1024)
    result = handle.result(timeout=200)
    assert result.status == "completed"
    assert 3 <= result.metrics["started_at"] < 20
    found = [event.step for event in handle.events() if isinstance(event, MetricsReported)]
    steps_seen = [step for step in found if step is not None]
    assert sorted(set(steps_seen)) == list(range(20))


# --- searches ---


def commands(handle: Any) -> list[str]:
    return [event.op for event in handle.events() if isinstance(event, CommandReceived)]


@pytest.mark.usefixtures("cluster")
def test_a_sweep_runs_its_trials_as_tasks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    space = {
        "space": SPACE,
        "study": {"metric": "val_accuracy"},
        "budget": {"n_trials": 4},
    }
    result = nb.sweep(digits, config(tmp_path), space, where="ray", display="off")
    assert result.status == "completed"
    assert list(result.trials["state"]) == ["complete"] * 4
    assert result.best_value > 0.5
    more = nb.sweep(digits, config(tmp_path), space, n_trials=6, where="ray", display="off")
    assert more.paths == result.paths
    assert len(more.trials) == 6
    assert "retries remaining" not in "".join(capfd.readouterr())


@pytest.mark.usefixtures("cluster")
def test_a_handle_pauses_resumes_and_stops_trials(tmp_path: Path) -> None:
    def train(config: Any, ctx: Any) -> dict[str, float]:
        for step in range(600 if ctx.paths.folder.name == "0000" else 1):
            ctx.report({"score": float(step)}, step=step)
            time.sleep(0.1)
        return {"score": 1.0}

    space = {
        "space": {"model.x": {"type": "categorical", "choices": [0, 1, 2]}},
        "study": {"metric": "score", "direction": "maximize", "sampler": "grid"},
        "budget": {"n_trials": 1},
    }
    handle = nb.sweep(train, config(tmp_path), space, where="ray", wait=False, display="off")
    trials = handle.paths.folder / "trials"
    wait_until((trials / "0000/events.jsonl").exists)
    handle.pause()
    handle.add_trials(2)
    handle.stop_trial(0)
    wait_until(lambda: commands(handle) == ["pause", "add_trials", "stop_trial"])
    wait_until(lambda: last_event(RunPaths(trials / "0000")) is not None)
    time.sleep(2)
    assert not (trials / "0001").exists()  # it is paused
    handle.resume()
    result = handle.result(timeout=120)
    assert list(result.trials["state"]) == ["pruned", "complete", "complete"]


@pytest.mark.usefixtures("cluster")
def test_the_pruner_ends_trials(tmp_path: Path) -> None:
    def train(config: Any, ctx: Any) -> None:
        for step in range(5):
            ctx.report({"score": ctx.params["model.x"]}, step=step)

    space = {
        "space": {"model.x": {"type": "float", "low": 0.0, "high": 1.0}},
        "study": {"metric": "score", "direction": "maximize", "pruner": "median"},
        "budget": {"n_trials": 12},
    }
    result = nb.sweep(train, config(tmp_path), space, where="ray", display="off")
    assert set(result.trials["state"]) == {"complete", "pruned"}


@pytest.mark.usefixtures("cluster")
def test_a_trial_that_fails_fails_alone(tmp_path: Path) -> None:
    def train(config: Any, ctx: Any) -> dict[str, float]:
        if ctx.params["model.x"] == 1:
            raise ZeroDivisionError("on purpose")
        if ctx.params["model.x"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"score": 1.0}

    space = {
        "space": {"model.x": {"type": "categorical", "choices": [0, 1, 2]}},
        "study": {"metric": "score", "direction": "maximize", "sampler": "grid"},
    }
    result = nb.sweep(train, config(tmp_path), space, where="ray", display="off")
    trials = result.trials.set_index("model.x")
    assert trials["state"].to_dict() == {0: "complete", 1: "failed", 2: "failed"}
    assert "on purpose" in trials["reason"][1]


def test_trials_of_a_lost_node_run_again_elsewhere(cluster: Any, lost: Any, tmp_path: Path) -> None:
    space = {
        "space": {"model.x": {"type": "float", "low": 0.0, "high": 1.0}},
        "study": {"metric": "started_at", "direction": "maximize"},
        "budget": {"n_trials": 4, "retries": 2},
    }
    handle = nb.sweep(steps, config(tmp_path), space, where="ray", wait=False, display="off")
    marks = handle.paths.folder / "trials"
    wait_until(lambda: len(list(marks.glob("*/checkpoints/*"))) >= 4)
    cluster.remove_node(lost, allow_graceful=False)
    result = handle.result(timeout=250)
    assert list(result.trials["state"]) == ["complete"] * 4
    resumed = [value for value in result.trials["value"] if value > 0]
    assert len(resumed) >= 1


@pytest.mark.usefixtures("cluster")
def test_a_cross_validation_runs_its_folds_as_tasks(tmp_path: Path) -> None:
    folds = nb.make_folds(load()[1], k=2)
    remote = nb.cross_validate(digits, config(tmp_path), folds, where="ray", display="off")
    local = nb.cross_validate(digits, config(tmp_path), folds, resume="never", display="off")
    assert remote.mean == pytest.approx(local.mean, abs=1e-4)


@pytest.mark.usefixtures("cluster")
def test_trials_on_several_devices_are_refused(tmp_path: Path) -> None:
    space = {"space": SPACE, "placement": "all_devices_per_trial", "budget": {"n_trials": 1}}
    with pytest.raises(PlanError, match='all_devices_per_trial with where="ray"'):
        nb.sweep(digits, config(tmp_path), space, where="ray", display="off")
