"""The script of ``nbtoolkit recipe slurm`` on a real Slurm of two nodes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import slurm as slurms
from records import last_of

from nbtoolkit.config.schema import load_config
from nbtoolkit.extras.cluster.recipes import recipe
from nbtoolkit.run.events import EventReader, MetricsReported, RunEnded, RunStarted

pytestmark = pytest.mark.cluster


def submitted(slurm: slurms.Slurm, folder: Path, *settings: str) -> str:
    """The number of a job that trains on two nodes with one rank each."""
    fixed = ("tracking.mlflow=false", "task=job:train", f"runtime.output_dir={folder / 'runs'}")
    words = [word for setting in (*fixed, *settings) for word in ("-o", setting)]
    cluster = {"nodes": 2, "devices": 1, "gpu": False, "time_limit": "10m"}
    (folder / "train.sh").write_text(
        recipe("slurm", load_config(overrides={"cluster": cluster}), words)
    )
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = f"--export=ALL,PATH={search},PYTHONPATH={os.pathsep.join(sys.path)}"
    return slurm.run("sbatch", "--parsable", variables, "train.sh", cwd=folder)


def the_result(folder: Path) -> RunEnded:
    [run] = (folder / "runs").glob("*-train-*")
    return last_of(run)


def test_two_nodes_train_one_run(slurm: slurms.Slurm, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("from nbtoolkit.tasks.digits import train\n")
    job = submitted(slurm, tmp_path, "train.epochs=2")
    slurm.wait_for_job(job, "COMPLETED", 200)
    result = the_result(tmp_path)
    assert (result.status, result.processes) == ("completed", 2)


# Two steps a second; a checkpoint has the number of those that are done.
SLOW = """
import time
import torch

def train(config, ctx):
    saved = ctx.load()
    done = saved["done"] if saved else 0
    for step in range(done, 20):
        time.sleep(0.5)
        ctx.save({"done": step + 1})
        ctx.report({"score": 1.0}, step=step)  # where the ranks leave
    return {"started_at": done}
"""


def test_a_signal_before_the_time_limit_saves_requeues_and_resumes(
    slurm: slurms.Slurm, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(SLOW)
    job = submitted(slurm, tmp_path)
    slurm.wait_for_job(job, "RUNNING", 100)
    wait_for_report(tmp_path)
    slurm.run("scancel", "--signal=USR1", job)  # what --signal=USR1@120 sends
    slurm.wait_for_job(job, "COMPLETED", 280)

    result = the_result(tmp_path)
    assert result.status == "completed"
    metrics = result.metrics
    assert 0 < metrics["started_at"] < 20
    [log] = (tmp_path / "runs").glob("*-train-*/events.jsonl")
    events = list(EventReader(log).read())
    assert sum(isinstance(event, RunStarted) for event in events) == 2
    steps = [event.step for event in events if isinstance(event, MetricsReported)]
    assert [step for step in steps if step is not None] == list(range(20))  # none lost, none twice


def wait_for_report(folder: Path) -> None:
    deadline = time.monotonic() + 100
    while True:
        for log in (folder / "runs").glob("*-train-*/events.jsonl"):
            if any(isinstance(event, MetricsReported) for event in EventReader(log).read()):
                return
        assert time.monotonic() < deadline, (folder / "train.sh").read_text()
        time.sleep(0.2)
