"""``where="slurm"`` on a real Slurm of two nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import slurm as slurms

import nbtoolkit as nb
from nbtoolkit.errors import LaunchError, ResumeError
from nbtoolkit.run.events import EventReader, MetricsReported, RunStarted
from nbtoolkit.tasks.digits import load
from nbtoolkit.tasks.digits import train as digits
from nbtoolkit.views.state import read_state

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("slurm_here")]


def config(folder: Path, **settings: Any) -> dict[str, Any]:
    fixed = {
        "runtime.output_dir": str(folder / "runs"),
        "tracking.mlflow": False,
        "train.epochs": 2,
        "cluster.gpu": False,
        "cluster.devices": 1,
        "cluster.time_limit": "10m",
    }
    return {**fixed, **settings}


def steps(config: Any, ctx: Any) -> dict[str, float]:
    """Two steps a second; the checkpoint has the number of those that are done."""
    saved = ctx.load()
    done = saved["done"] if saved else 0
    print(f"starts at {done}", flush=True)
    for step in range(done, 20):
        time.sleep(0.5)
        ctx.save({"done": step + 1})
        ctx.report({"score": 1.0}, step=step)
    return {"started_at": float(done)}


def silent(config: Any, ctx: Any) -> None:
    ctx.save({"done": 1})
    ctx.log({"score": 1.0})
    time.sleep(600)


def raises(config: Any, ctx: Any) -> None:
    raise ZeroDivisionError("on purpose")


def killed(config: Any, ctx: Any) -> None:
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)


def reported(handle: Any, count: int = 1) -> None:
    wait_until(
        lambda: sum(isinstance(event, MetricsReported) for event in handle.events()) >= count
    )


def wait_until(reached: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.2)


# --- launch ---


def test_one_node_trains_and_gives_the_metrics_of_a_local_launch(tmp_path: Path) -> None:
    local = nb.launch(digits, config(tmp_path), resume="never", display="off")
    result = nb.launch(digits, config(tmp_path), where="slurm", resume="never", display="off")
    assert result.status == "completed"
    assert result.metrics == pytest.approx(local.metrics, abs=1e-4)
    assert result.value == local.value
    assert result.paths.folder.stat().st_mode & 0o777 == 0o700


def test_two_nodes_train_one_run_and_show_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = nb.launch(digits, config(tmp_path), processes=2, resume="never", display="off")
    settings = config(tmp_path, **{"cluster.nodes": 2})
    result = nb.launch(digits, settings, where="slurm", resume="never", display="text")
    assert (result.status, result.plan.processes) == ("completed", 2)
    assert result.metrics == pytest.approx(local.metrics, abs=1e-4)
    shown = capsys.readouterr().out
    assert f"slurm -> {result.paths.folder}" in shown
    assert "Slurm's job" in shown


def test_a_function_of_a_script_outlives_its_process_and_is_attached_to(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(
        "import time, nbtoolkit as nb\n"
        "def train(config, ctx):\n"
        "    print('hello from the node', flush=True)\n"
        "    time.sleep(3)\n"
        "    return {'answer': 42.0}\n"
        f"handle = nb.launch(train, {config(tmp_path)!r}, where='slurm', wait=False)\n"
        "print(handle.paths.folder)\n"
    )
    script = [sys.executable, "kernel.py"]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    handle = nb.attach(done.stdout.split()[-1], display="off")
    assert handle.result(timeout=200).metrics == {"answer": 42.0}
    assert handle.status == "completed"
    assert "hello from the node" in handle.logs()


def test_what_the_function_raises_is_raised_here(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        nb.launch(raises, config(tmp_path), where="slurm", display="off")


# --- pre-emption, stop, cancel ---


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_signal_saves_requeues_and_resumes(
    slurm: slurms.Slurm, tmp_path: Path, nodes: int
) -> None:
    settings = config(tmp_path, **{"cluster.nodes": nodes})
    handle = nb.launch(steps, settings, where="slurm", wait=False, display="off")
    reported(handle)
    slurm.run("scancel", "--signal=USR1", slurm.job_of(handle.paths))  # as a time limit does
    result = handle.result(timeout=280)
    assert result.status == "completed"
    assert 0 < result.metrics["started_at"] < 20
    events = list(EventReader(handle.paths.events).read())
    attempts = [event.attempt for event in events if isinstance(event, RunStarted)]
    assert attempts == [1, 2]
    found = [event.step for event in events if isinstance(event, MetricsReported)]
    assert [step for step in found if step is not None] == list(range(20))


def test_without_restarts_a_signal_ends_it_and_the_next_launch_resumes(
    slurm: slurms.Slurm, tmp_path: Path
) -> None:
    settings = config(tmp_path, **{"cluster.restarts": 0})
    handle = nb.launch(steps, settings, where="slurm", wait=False, display="off")
    reported(handle)
    slurm.run("scancel", "--signal=USR1", slurm.job_of(handle.paths))
    assert handle.result(timeout=100).status == "deadline"
    again = nb.launch(steps, settings, where="slurm", display="off")
    assert again.paths.folder == handle.paths.folder
    assert again.metrics["started_at"] > 0


def test_stop_lets_the_ranks_leave_and_the_job_is_not_requeued(tmp_path: Path) -> None:
    settings = config(tmp_path, **{"cluster.nodes": 2})
    handle = nb.launch(steps, settings, where="slurm", wait=False, display="off")
    reported(handle)
    assert handle.status.endswith("RUNNING")
    handle.stop()
    assert handle.result(timeout=100).status == "stopped"


def test_a_job_that_waits_says_why_and_is_cancelled(slurm: slurms.Slurm, tmp_path: Path) -> None:
    slurm.run("scontrol", "update", "PartitionName=all", "State=DOWN")
    try:
        handle = nb.launch(steps, config(tmp_path), where="slurm", wait=False, display="off")
        assert "PENDING" in handle.status
        wait_until(lambda: "PartitionDown" in handle.status)
        assert not handle.done()
        assert read_state(handle.paths.folder).status == "submitted"
        # Nobody else starts it meanwhile.
        with pytest.raises(ResumeError, match="still running"):
            nb.launch(steps, config(tmp_path), resume=handle.paths.folder, display="off")
        handle.stop()
        with pytest.raises(LaunchError, match="CANCELLED"):
            handle.result(timeout=60)
    finally:
        slurm.run("scontrol", "update", "PartitionName=all", "State=UP")


def test_cancel_ends_a_job_at_once_and_it_resumes(tmp_path: Path) -> None:
    handle = nb.launch(steps, config(tmp_path), where="slurm", wait=False, display="off")
    reported(handle, 3)
    handle.cancel()
    with pytest.raises(LaunchError, match=r"has ended without a result: .*CANCELLED"):
        handle.result(timeout=100)
    assert (
        nb.launch(steps, config(tmp_path), where="slurm", display="off").metrics["started_at"] >= 3
    )


# --- faults ---


def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    settings = config(tmp_path, **{"cluster.nodes": 2})
    with pytest.raises(LaunchError, match=r"has ended without a result: .*FAILED"):
        nb.launch(killed, settings, where="slurm", display="off")


def test_slurm_refuses_a_partition_that_it_does_not_have(tmp_path: Path) -> None:
    settings = config(tmp_path, **{"cluster.partition": "nowhere"})
    with pytest.raises(LaunchError, match=r"sbatch failed: .*invalid partition"):
        nb.launch(digits, settings, where="slurm", display="off")
    assert not list((tmp_path / "runs").glob("*-train-*"))  # nothing is left behind


def test_the_time_limit_of_slurm_is_named_and_the_run_can_resume(
    slurm: slurms.Slurm, tmp_path: Path
) -> None:
    handle = nb.launch(silent, config(tmp_path), where="slurm", wait=False, display="off")
    wait_until(lambda: list(handle.paths.checkpoints.glob("*")) != [])
    # The shortest limit that Slurm knows is a minute: it is set when the job runs.
    job = slurm.job_of(handle.paths)
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    with pytest.raises(LaunchError, match="at its time limit"):
        handle.result(timeout=200)
    again = nb.launch(silent, config(tmp_path), where="slurm", wait=False, display="off")
    assert again.paths == handle.paths
    again.cancel()


# --- searches ---


SPACE = {"optim.lr": {"type": "float", "low": 1e-3, "high": 1e-1, "log": True}}


def test_a_sweep_runs_as_one_job_and_resumes_with_more_trials(tmp_path: Path) -> None:
    space = {"space": SPACE, "study": {"metric": "val_accuracy"}, "budget": {"n_trials": 3}}
    settings = config(tmp_path, **{"cluster.devices": 2})
    handle = nb.sweep(digits, settings, space, where="slurm", wait=False, display="off")
    assert handle.status.startswith("Slurm's job")
    result = nb.attach(handle.paths.folder, display="off").result(timeout=200)
    assert result.status == "completed"
    assert list(result.trials["state"]) == ["complete"] * 3
    more = nb.sweep(digits, settings, space, n_trials=4, where="slurm", display="off")
    assert more.paths == result.paths
    assert len(more.trials) == 4


def test_a_cross_validation_runs_as_one_job(tmp_path: Path) -> None:
    folds = nb.make_folds(load()[1], k=2)
    settings = config(tmp_path, **{"cluster.devices": 2})
    remote = nb.cross_validate(digits, settings, folds, where="slurm", display="off")
    local = nb.cross_validate(digits, settings, folds, resume="never", display="off")
    assert remote.status == "completed"
    assert remote.mean == pytest.approx(local.mean, abs=1e-4)
