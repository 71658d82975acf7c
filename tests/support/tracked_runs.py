"""Run folders with events written by hand, and MLflow's runs of them."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

from nbtoolkit.run.events import (
    CheckpointSaved,
    EventLog,
    MetricsLogged,
    MetricsReported,
    RunEnded,
    RunStarted,
)
from nbtoolkit.run.paths import RunPaths, read_json
from nbtoolkit.tracking.database import database_uri
from nbtoolkit.tracking.follower import Follower

CONFIG = {
    "task": "nbtoolkit.tasks.digits:train",
    "seed": 0,
    "model": {"hidden": 64, "layers": [64, 10]},
    "optim": {"name": "adamw", "lr": 1e-3},
    "train": {"epochs": 2, "max_grad_norm": None},
    "tracking": {"mlflow": True, "tensorboard": False},
}
PLAN = {"processes": 2, "precision": "fp32", "reasons": ["fp32: this machine has no GPU"]}
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "host": "script", "function": "train"}


class Run:
    """A run folder with events written by hand, locked until it is released."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.log = EventLog(self.paths.events)
        self._lock = os.open(self.paths.lock, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    @classmethod
    def new(cls, output_dir: Path, name: str = "digits") -> Run:
        return cls(RunPaths.create(output_dir, name))

    def begin(self, attempt: int = 1, parent: str | None = None, **changed: Any) -> None:
        started = RunStarted(
            run_id=self.paths.run_id,
            attempt=attempt,
            plan=PLAN,
            config={**CONFIG, **changed},
            versions=VERSIONS,
            mlflow_parent=parent,
        )
        self.log.write(started)

    def train(self, steps: range) -> None:
        for step in steps:
            self.log.write(MetricsLogged(values={"loss": 1 / (step + 1), "lr": 1e-3}, step=step))
        self.log.write(MetricsReported(values={"val_accuracy": 0.9}, step=steps[-1]))
        self.log.write(CheckpointSaved(path="checkpoints/last.pt", step=steps[-1], kind="last"))

    def end(self, status: str = "completed", error: str | None = None) -> None:
        for rank in (0, 1):
            self.paths.log(rank).parent.mkdir(parents=True, exist_ok=True)
            self.paths.log(rank).write_text(f"hello from rank {rank}\n")
        self.paths.config.write_text("seed: 0\n")
        self.log.write(RunEnded(status=status, seconds=1.0, error=error))
        self.release()

    def release(self) -> None:
        self.log.close()
        os.close(self._lock)


def whole_run(output_dir: Path, name: str = "digits", **changed: Any) -> RunPaths:
    run = Run.new(output_dir, name)
    run.begin(**changed)
    run.train(range(5))
    run.end()
    return run.paths


def client_of(output_dir: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(database_uri(output_dir / "mlflow.db"))


def all_runs(output_dir: Path) -> list[Any]:
    client = client_of(output_dir)
    return list(client.search_runs([e.experiment_id for e in client.search_experiments()]))


def follow(paths: RunPaths, output_dir: Path | None = None) -> str | None:
    """Follow a run until it is written to its end; the id of its MLflow run."""
    with Follower(paths, output_dir=output_dir) as follower:
        while not follower.poll():
            time.sleep(0.05)
    saved: Any = read_json(paths.tracking)
    return saved["places"].get("mlflow")
