"""Sweeps in MLflow: trials and folds nested in the sweep's run, from real event files."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tracked_runs import follow

from nbtoolkit.run.events import (
    EventLog,
    FoldChanged,
    MetricsReported,
    RunEnded,
    RunStarted,
    TrialChanged,
)
from nbtoolkit.run.paths import RunPaths, read_json
from nbtoolkit.tracking.database import database_uri, open_database, tracking_table
from nbtoolkit.tracking.follower import Follower
from nbtoolkit.tracking.service import replay

# MLflow 3.17 uses a loader that SQLAlchemy 2.1 means to drop; nothing we could do about it.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")

CONFIG = {"seed": 0, "optim": {"lr": 1e-3}}


class Sweep:
    """A sweep's folder with events written by hand, locked until it is released."""

    def __init__(self, output_dir: Path, tracking: Mapping[str, bool] | None = None) -> None:
        self.paths = RunPaths.create(output_dir, "digits")
        self._config = {**CONFIG, "tracking": tracking or {"mlflow": True}}
        self.own()

    def own(self) -> None:
        self._log = EventLog(self.paths.events)
        self._lock = os.open(self.paths.lock, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._log.write(RunStarted(run_id="x", config=self._config))

    def trial(self, number: int, state: str, **fields: Any) -> None:
        folder = f"trials/{number:04d}"
        fields = {"params": {"optim.lr": 0.1 / (number + 1)}, **fields}
        self._log.write(TrialChanged(number=number, state=state, folder=folder, **fields))

    def fold(self, number: int | None, fold: int, state: str, **metrics: float) -> None:
        above = "folds/" if number is None else f"trials/{number:04d}/fold-"
        fields = {"metrics": metrics, "folder": f"{above}{fold}", "seconds": 1.0}
        self._log.write(FoldChanged(number=number, fold=fold, state=state, **fields))

    def job(self, folder: str, steps: range, status: str | None = "completed") -> None:
        """Write the events of a job's own supervisor."""
        paths = RunPaths(self.paths.folder / folder)
        paths.log(0).parent.mkdir(parents=True, exist_ok=True)
        paths.log(0).write_text("hello from the trial\n")
        log = EventLog(paths.events)
        if steps.start == 0:
            log.write(RunStarted(run_id="x", config=CONFIG))
        for step in steps:
            log.write(MetricsReported(values={"val_accuracy": 0.1 * step}, step=step))
        if status is not None:
            log.write(RunEnded(status=status, seconds=1.0))
        log.close()

    def end(self, status: str = "completed") -> None:
        self._log.write(RunEnded(status=status, seconds=1.0))
        self.release()

    def release(self) -> None:
        self._log.close()
        os.close(self._lock)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without runs: copying it is quicker than making it (0.6 s)."""
    folder = tmp_path_factory.mktemp("template")
    open_database(folder, experiment="template")
    return folder / "mlflow.db"


@pytest.fixture
def outputs(tmp_path: Path, template: Path) -> Path:
    shutil.copy(template, tmp_path)
    return tmp_path


def runs(output_dir: Path) -> dict[str, Any]:
    """All MLflow runs by name."""
    client = client_of(output_dir)
    found = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return {run.info.run_name: run for run in found}


def client_of(output_dir: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(database_uri(output_dir / "mlflow.db"))


def parent(run: Any) -> str | None:
    found: str | None = run.data.tags.get("mlflow.parentRunId")
    return found


def contents(output_dir: Path) -> list[tuple[str, list[str]]]:
    """Every row of the database."""
    tables = ("runs", "params", "tags", "metrics", "latest_metrics")
    database = sqlite3.connect(output_dir / "mlflow.db")
    rows = [(t, sorted(map(repr, database.execute(f"select * from {t}")))) for t in tables]
    database.close()
    return rows


def two_trials(sweep: Sweep) -> None:
    sweep.trial(0, "running")
    sweep.trial(1, "running")
    sweep.job("trials/0000", range(5))
    sweep.job("trials/0001", range(2), "pruned")
    sweep.trial(0, "complete", value=0.4, best=True, seconds=1.0)
    sweep.trial(1, "pruned", reason="below the median", seconds=0.5)
    sweep.end()


def test_trials_are_runs_nested_in_the_sweeps_with_params_value_and_curves(outputs: Path) -> None:
    sweep = Sweep(outputs)
    two_trials(sweep)
    above_id = follow(sweep.paths)
    found = runs(outputs)
    assert set(found) == {sweep.paths.run_id, "trials/0000", "trials/0001"}
    first, second = found["trials/0000"], found["trials/0001"]
    assert parent(first) == parent(second) == above_id
    assert first.data.params == {"optim.lr": "0.1"}
    assert (first.info.status, first.data.tags["nbtoolkit.status"]) == ("FINISHED", "complete")
    assert first.data.metrics == {"value": 0.4, "val_accuracy": pytest.approx(0.4)}
    curve = client_of(outputs).get_metric_history(first.info.run_id, "val_accuracy")
    assert [point.step for point in curve] == [0, 1, 2, 3, 4]
    assert (second.info.status, second.data.tags["nbtoolkit.status"]) == ("KILLED", "pruned")
    assert second.data.tags["nbtoolkit.reason"] == "below the median"
    above = found[sweep.paths.run_id]
    assert above.data.metrics == {"value": 0.4, "best_value": 0.4}
    assert above.data.tags["nbtoolkit.best"] == "trials/0000"
    assert above.info.status == "FINISHED"


def test_folds_of_a_trial_are_nested_in_it(outputs: Path) -> None:
    sweep = Sweep(outputs)
    sweep.trial(7, "running")
    for fold in (0, 1):
        sweep.fold(7, fold, "running")
        sweep.job(f"trials/0007/fold-{fold}", range(2))
        sweep.fold(7, fold, "complete", val_accuracy=0.1 + fold)
    sweep.trial(7, "complete", value=0.6, best=True)
    sweep.end()
    follow(sweep.paths)
    found = runs(outputs)
    trial, fold = found["trials/0007"], found["trials/0007/fold-1"]
    assert parent(trial) == found[sweep.paths.run_id].info.run_id
    assert parent(fold) == trial.info.run_id
    assert fold.data.metrics == {"score/val_accuracy": 1.1, "val_accuracy": 0.1}
    assert fold.info.status == "FINISHED"
    assert "fold/val_accuracy" not in found[sweep.paths.run_id].data.metrics


def test_folds_of_a_cross_validation_are_nested_in_it_and_are_its_curve(outputs: Path) -> None:
    sweep = Sweep(outputs)
    for fold in (0, 1, 2):
        sweep.fold(None, fold, "running")
        sweep.job(f"folds/{fold}", range(2))
        sweep.fold(None, fold, "complete", val_accuracy=0.9)
    sweep.end()
    above_id = follow(sweep.paths)
    found = runs(outputs)
    assert {parent(found[f"folds/{fold}"]) for fold in (0, 1, 2)} == {above_id}
    points = client_of(outputs).get_metric_history(above_id, "fold/val_accuracy")
    assert [(point.step, point.value) for point in points] == [(0, 0.9), (1, 0.9), (2, 0.9)]


def test_a_trials_curve_is_written_while_it_runs(outputs: Path) -> None:
    sweep = Sweep(outputs)
    sweep.trial(0, "running")
    with Follower(sweep.paths) as follower:
        assert not follower.poll()  # its folder is not made yet
        sweep.job("trials/0000", range(2), None)
        assert not follower.poll()
        assert runs(outputs)["trials/0000"].info.status == "RUNNING"
        assert runs(outputs)["trials/0000"].data.metrics == {"val_accuracy": 0.1}
        sweep.job("trials/0000", range(2, 4))
        sweep.trial(0, "complete", value=0.3)
        assert not follower.poll()
        assert runs(outputs)["trials/0000"].data.metrics["val_accuracy"] == pytest.approx(0.3)
        sweep.end()
        assert follower.poll()


def test_a_follower_that_died_is_gone_on_with_and_nothing_is_written_twice(outputs: Path) -> None:
    sweep = Sweep(outputs)
    sweep.trial(0, "running")
    sweep.job("trials/0000", range(2), None)
    with Follower(sweep.paths) as follower:
        follower.poll()
    sweep.job("trials/0000", range(2, 4))
    sweep.trial(0, "complete", value=0.3, best=True)
    sweep.end()
    follow(sweep.paths)
    found = runs(outputs)
    assert len(found) == 2
    run_id = found["trials/0000"].info.run_id
    curve = client_of(outputs).get_metric_history(run_id, "val_accuracy")
    assert [point.step for point in curve] == [0, 1, 2, 3]
    before = contents(outputs)
    follow(sweep.paths)
    assert contents(outputs) == before


def test_a_lost_database_is_written_anew_with_all_trials(outputs: Path, template: Path) -> None:
    sweep = Sweep(outputs)
    two_trials(sweep)
    follow(sweep.paths)
    shutil.copy(template, outputs)
    follow(sweep.paths)
    found = runs(outputs)
    assert len(found) == 3
    assert found["trials/0000"].data.metrics["val_accuracy"] == pytest.approx(0.4)
    assert parent(found["trials/0000"]) == found[sweep.paths.run_id].info.run_id


def test_what_ran_when_the_scheduler_was_killed_ends_and_runs_again(outputs: Path) -> None:
    sweep = Sweep(outputs)
    sweep.trial(0, "running")
    sweep.job("trials/0000", range(2), None)
    sweep.release()  # no last event
    follow(sweep.paths)
    found = runs(outputs)
    assert {run.info.status for run in found.values()} == {"KILLED"}
    sweep.own()
    sweep.trial(0, "running")
    sweep.job("trials/0000", range(2, 4))
    sweep.trial(0, "complete", value=0.3)
    sweep.end()
    follow(sweep.paths)
    found = runs(outputs)
    assert {run.info.status for run in found.values()} == {"FINISHED"}
    assert len(found) == 2
    assert found["trials/0000"].data.metrics["val_accuracy"] == pytest.approx(0.3)


def test_trials_of_two_sweeps_of_one_number_are_two_runs(outputs: Path) -> None:
    for _ in range(2):
        sweep = Sweep(outputs)
        two_trials(sweep)
        follow(sweep.paths)
    table = tracking_table(outputs)
    assert sorted(table["run"]).count("trials/0000") == 2
    assert table.groupby("sweep").size().to_list() == [2, 2]
    assert sorted(table[table["run"] == "trials/0001"]["status"]) == ["pruned", "pruned"]


def test_a_failed_trials_logs_are_artifacts_and_those_of_others_are_not(outputs: Path) -> None:
    sweep = Sweep(outputs)
    for number, (status, state) in enumerate([("failed", "failed"), ("completed", "complete")]):
        sweep.trial(number, "running")
        sweep.job(f"trials/{number:04d}", range(1), status)
        sweep.trial(number, state, reason="ValueError: no" if state == "failed" else None)
    sweep.end()
    follow(sweep.paths)
    found, client = runs(outputs), client_of(outputs)
    assert found["trials/0000"].info.status == "FAILED"
    [file] = client.list_artifacts(found["trials/0000"].info.run_id, "ranks/0")
    assert file.path == "ranks/0/log.txt"
    assert client.list_artifacts(found["trials/0001"].info.run_id) == []


def test_tensorboard_has_the_trials_curves_in_their_own_folders(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sweep = Sweep(tmp_path, {"mlflow": False, "tensorboard": True})
    two_trials(sweep)
    follow(sweep.paths)
    events = EventAccumulator(str(sweep.paths.folder / "trials/0000/tensorboard")).Reload()
    assert [point.step for point in events.Scalars("val_accuracy")] == [0, 1, 2, 3, 4]
    assert read_json(RunPaths(sweep.paths.folder / "trials/0000").tracking)["done"]


@pytest.mark.long
def test_the_service_writes_a_sweep_with_its_trials(outputs: Path) -> None:
    sweep = Sweep(outputs)
    two_trials(sweep)
    assert replay(sweep.paths.folder) is not None
    assert runs(outputs)["trials/0000"].data.metrics["val_accuracy"] == pytest.approx(0.4)
