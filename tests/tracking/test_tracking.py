from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kernels import all_gone
from mounts import in_own_mounts
from tracked_runs import Run, all_runs, client_of, follow, whole_run

from nbtoolkit.errors import TrackingError
from nbtoolkit.launcher.fork_servers import shutdown, track
from nbtoolkit.run.events import (
    DevicesSampled,
    MetricsLogged,
    NoteAdded,
    RunStarted,
)
from nbtoolkit.run.paths import RunPaths, read_json
from nbtoolkit.tracking.catch_up import wait_for_tracking
from nbtoolkit.tracking.database import open_database, tracking_table
from nbtoolkit.tracking.follower import Follower
from nbtoolkit.tracking.service import TrackingProcess, replay
from nbtoolkit.tracking.tracker import Point, choose_tracking, points
from nbtoolkit.wire.messages import TrackRun
from nbtoolkit.wire.transport import Connection

# MLflow 3.17 uses a loader that SQLAlchemy 2.1 means to drop; nothing we could do about it.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without runs: copying it is quicker than making it (0.6 s)."""
    folder = tmp_path_factory.mktemp("template")
    open_database(folder, experiment="template")
    return folder / "mlflow.db"


@pytest.fixture
def outputs(tmp_path: Path, template: Path) -> Path:
    """An output folder that has a database already."""
    shutil.copy(template, tmp_path)
    return tmp_path


def contents(output_dir: Path) -> list[tuple[str, list[Any]]]:
    """Every row of the database but those that say when it was written itself."""
    with sqlite3.connect(output_dir / "mlflow.db") as database:
        tables = [row[0] for row in database.execute("select name from sqlite_master")]
        kept = [t for t in ("runs", "params", "tags", "metrics", "latest_metrics") if t in tables]
        rows = [(t, sorted(map(repr, database.execute(f"select * from {t}")))) for t in kept]
    database.close()
    return rows


# --- which trackers ---------------------------------------------------------------------------


def test_mlflow_is_on_and_tensorboard_off_by_default() -> None:
    choice = choose_tracking({}, installed=lambda module: True)
    assert (choice.trackers, choice.notes) == (("mlflow",), ())
    assert choice.on


def test_a_missing_mlflow_is_a_note_with_the_install_line_and_not_an_error() -> None:
    choice = choose_tracking({"mlflow": True}, installed=lambda module: module != "mlflow")
    assert not choice.on
    (note,) = choice.notes
    assert "pip install mlflow" in note
    assert "mlflow cannot be imported" in note


def test_mlflow_skinny_alone_misses_what_sqlite_needs() -> None:
    def skinny(module: str) -> bool:
        return module not in ("sqlalchemy", "alembic")

    (note,) = choose_tracking({"mlflow": True}, skinny).notes
    assert "sqlalchemy and alembic cannot be imported" in note
    assert choose_tracking({"mlflow": True, "uri": "http://tracking:5000"}, skinny).on


def test_a_missing_tensorboard_leaves_mlflow_on() -> None:
    settings = {"mlflow": True, "tensorboard": True}
    choice = choose_tracking(settings, installed=lambda module: module != "tensorboard")
    assert choice.trackers == ("mlflow",)
    assert "pip install tensorboard" in choice.notes[0]


def test_a_folder_called_mlflow_is_not_an_installed_mlflow(tmp_path: Path) -> None:
    (tmp_path / "mlflow").mkdir()
    code = "from nbtoolkit.tracking.tracker import choose_tracking as c; print(c({}).on)"
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {_source()!r}; {code}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def _source() -> list[str]:
    return ["", str(Path(__file__).parents[2])]


# --- what is drawn ----------------------------------------------------------------------------


def test_points_of_metrics_reports_and_device_readings() -> None:
    last: dict[str, int] = {}
    values: dict[str, Any] = {"loss": 0.5, "text": "no"}
    logged = MetricsLogged(t=1.0, values=values, step=7)
    assert points(logged, last) == [Point("loss", 0.5, 7, 1.0)]
    readings = [{"index": 1, "utilization": 93}, {"rank": 0, "memory": 5}]
    device = DevicesSampled(t=2.0, readings=readings)
    assert points(device, last) == [
        Point("system/gpu_1_utilization", 93.0, 0, 2.0),
        Point("system/rank_0_memory", 5.0, 0, 2.0),
    ]
    assert points(NoteAdded(t=3.0, text="x"), last) == []


def test_a_value_without_a_step_follows_its_curves_last_step() -> None:
    last: dict[str, int] = {}
    events = [MetricsLogged(t=1.0, values={"a": 1.0}, step=step) for step in (5, None, 9)]
    events.append(MetricsLogged(t=1.0, values={"a": 1.0, "b": 1.0}))
    steps = [(p.name, p.step) for event in events for p in points(event, last)]
    assert steps == [("a", 5), ("a", 6), ("a", 9), ("a", 10), ("b", 0)]


class Known:
    """A tracker that has, or has not, what was written of a run before."""

    place = "nowhere"

    def __init__(self, known: bool) -> None:
        self._known, self.opened, self.points = known, 0, 0

    def open(self, run: RunStarted, *, fresh: bool, done: bool) -> bool:
        self.opened += 1
        self._known |= fresh
        return self._known

    def write(self, points: Any, events: Any) -> None:
        self.points += len(points)

    def close(self, ended: Any) -> None: ...


def test_each_tracker_is_opened_and_one_that_lost_the_run_makes_all_start_over(
    tmp_path: Path,
) -> None:
    def written(*known: bool) -> list[Any]:
        trackers: list[Any] = [Known(one) for one in known]
        makers = {str(number): lambda one=one: one for number, one in enumerate(trackers)}
        with Follower(paths, make=lambda run: makers) as follower:
            assert follower.poll()
        assert all(tracker.opened for tracker in trackers)
        return [tracker.points for tracker in trackers]

    paths = whole_run(tmp_path)
    everything = written(True, True)
    assert all(everything)
    assert written(True, True) == [0, 0]
    assert written(False, True) == everything


# --- one run in MLflow ------------------------------------------------------------------------


def test_a_run_becomes_one_mlflow_run_with_everything_in_it(outputs: Path) -> None:
    run = Run.new(outputs)
    run.begin()
    run.log.write(NoteAdded(level="warning", text="one GPU is unusable"))
    run.train(range(5))
    run.log.write(DevicesSampled(readings=[{"index": 0, "utilization": 50.0}]))
    run.end()
    run_id = follow(run.paths)
    (found,) = all_runs(outputs)
    assert found.info.run_id == run_id
    assert found.info.status == "FINISHED"
    assert found.info.run_name == run.paths.run_id
    assert found.data.params["optim.lr"] == "0.001"
    assert found.data.params["model.layers"] == "[64, 10]"
    assert found.data.params["train.max_grad_norm"] == "null"
    assert found.data.params["plan.processes"] == "2"
    assert found.data.metrics["val_accuracy"] == 0.9
    assert found.data.metrics["system/gpu_0_utilization"] == 50.0
    tags = found.data.tags
    assert tags["nbtoolkit.run_id"] == run.paths.run_id
    assert tags["nbtoolkit.status"] == "completed"
    assert tags["nbtoolkit.torch"] == "2.13.0"
    assert tags["nbtoolkit.host"] == "script"
    assert tags["nbtoolkit.checkpoint.last"] == "checkpoints/last.pt"
    assert tags["mlflow.source.name"] == "train"
    assert "this machine has no GPU" in tags["mlflow.note.content"]


def test_metrics_keep_step_and_time_of_their_event_and_artifacts_lie_beside(outputs: Path) -> None:
    paths = whole_run(outputs)
    run_id = follow(paths)
    client = client_of(outputs)
    logged = [json.loads(line) for line in paths.events.read_text().splitlines()]
    expected = [
        (event["step"], round(event["t"] * 1000), event["values"]["loss"])
        for event in logged
        if event["type"] == "metrics"
    ]
    history = client.get_metric_history(run_id, "loss")
    assert sorted((m.step, m.timestamp, m.value) for m in history) == expected
    folder = outputs / "mlartifacts" / run_id / "artifacts"
    names = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert names == {"config.yaml", "ranks/0/log.txt", "ranks/1/log.txt"}
    assert not (outputs / "mlruns").exists()


@pytest.mark.parametrize(
    ("status", "mlflow_status"),
    [("failed", "FAILED"), ("stopped", "KILLED"), ("pruned", "KILLED"), ("deadline", "KILLED")],
)
def test_how_a_run_ended(outputs: Path, status: str, mlflow_status: str) -> None:
    run = Run.new(outputs)
    run.begin()
    run.end(status, error="ValueError: no" if status == "failed" else None)
    follow(run.paths)
    (found,) = all_runs(outputs)
    assert found.info.status == mlflow_status
    assert found.data.tags["nbtoolkit.status"] == status
    assert found.data.tags.get("nbtoolkit.error") == (
        "ValueError: no" if status == "failed" else None
    )


def test_odd_names_and_values_are_written_as_near_as_mlflow_can(outputs: Path) -> None:
    run = Run.new(outputs)
    run.begin(data={"words": "x" * 10_000, "größe": 1})
    odd = {"acc@1": 1.0, "a//b/../c": 2.0, "nan": math.nan, "n" * 300: 3.0, "n" * 299 + "m": 4.0}
    run.log.write(MetricsLogged(values=odd, step=0))
    run.end()
    follow(run.paths)
    (found,) = all_runs(outputs)
    assert found.data.metrics["acc_1"] == 1.0
    assert found.data.metrics["a/b/__/c"] == 2.0
    assert math.isnan(found.data.metrics["nan"])
    assert sorted(v for k, v in found.data.metrics.items() if k.startswith("nnn")) == [3.0, 4.0]
    words = found.data.params["data.words"]
    assert len(words) == 500
    assert words.endswith("[10000 characters; all of it in the run's folder]")
    assert found.data.params["data.gr__e"] == "1"


def test_a_long_log_becomes_an_artifact_by_its_end(outputs: Path) -> None:
    run = Run.new(outputs)
    run.begin()
    run.end()
    run.paths.log(1).write_text("first line\n" + "a line of the log\n" * 100_000 + "last line\n")
    run_id = follow(run.paths)
    text = (outputs / "mlartifacts" / str(run_id) / "artifacts/ranks/1/log.txt").read_text()
    assert len(text) < 1_001_000
    assert text.startswith("[the first ")
    assert text.endswith("last line\n")
    assert "first line" not in text


def test_notes_become_one_artifact(outputs: Path) -> None:
    run = Run.new(outputs)
    run.begin()
    run.log.write(NoteAdded(level="warning", text="one GPU is unusable"))
    run.end()
    run_id = follow(run.paths)
    notes = outputs / "mlartifacts" / str(run_id) / "artifacts/notes.txt"
    assert notes.read_text() == "warning: one GPU is unusable\n"


# --- going on, and doing it again -------------------------------------------------------------


def test_a_cut_off_tracking_is_gone_on_with_and_a_replay_changes_nothing(outputs: Path) -> None:
    run = Run.new(outputs)
    run.begin()
    run.train(range(5))
    with Follower(run.paths) as first:  # then it is cut off
        assert not first.poll()
    (found,) = all_runs(outputs)
    run_id = found.info.run_id
    run.train(range(5, 9))
    run.end()
    assert follow(run.paths) == run_id
    once = contents(outputs)
    assert follow(run.paths) == run_id
    assert contents(outputs) == once
    losses = client_of(outputs).get_metric_history(run_id, "loss")
    assert [m.step for m in losses] == list(range(9))


def test_a_replay_after_the_state_was_lost_finds_the_same_run(outputs: Path) -> None:
    paths = whole_run(outputs)
    run_id = follow(paths)
    once = contents(outputs)
    paths.tracking.unlink()
    assert follow(paths) == run_id
    assert contents(outputs) == once


@pytest.mark.long
def test_a_replay_after_the_database_was_lost_writes_it_anew(tmp_path: Path) -> None:
    paths = whole_run(tmp_path / "first")
    follow(paths)
    run_id = follow(paths, output_dir=tmp_path / "second")  # as good as a lost database
    (found,) = all_runs(tmp_path / "second")
    assert found.info.run_id == run_id
    assert len(client_of(tmp_path / "second").get_metric_history(run_id, "loss")) == 5
    assert read_json(paths.tracking)["places"] == {"mlflow": run_id}


def test_a_dead_owner_means_killed_and_a_new_attempt_goes_on_in_the_same_run(
    tmp_path: Path,
) -> None:
    run = Run.new(tmp_path)
    run.begin()
    run.train(range(3))
    run.release()
    run_id = follow(run.paths)
    (found,) = all_runs(tmp_path)
    assert found.info.status == "KILLED"
    once = contents(tmp_path)
    follow(run.paths)
    assert contents(tmp_path) == once

    resumed = Run(run.paths)
    resumed.begin(attempt=2, train={"epochs": 4, "max_grad_norm": None})
    with Follower(resumed.paths) as follower:
        follower.poll()
        assert {r.info.status for r in all_runs(tmp_path)} == {"RUNNING"}
    resumed.train(range(3, 6))
    resumed.end()
    assert follow(resumed.paths) == run_id
    (found,) = all_runs(tmp_path)
    assert found.info.status == "FINISHED"
    assert found.data.params["train.epochs"] == "2"
    assert found.data.params["attempt2.train.epochs"] == "4"
    assert found.data.tags["nbtoolkit.attempt"] == "2"
    assert len(client_of(tmp_path).get_metric_history(run_id, "loss")) == 6


def test_a_later_attempt_may_have_other_trackers(outputs: Path) -> None:
    run = Run.new(outputs)
    run.begin()
    run.train(range(3))
    run.end("stopped")
    follow(run.paths)
    resumed = Run(run.paths)
    resumed.begin(attempt=2, tracking={"mlflow": False, "tensorboard": True})
    resumed.train(range(3, 5))
    resumed.end()
    follow(resumed.paths)
    (found,) = all_runs(outputs)
    losses = client_of(outputs).get_metric_history(found.info.run_id, "loss")
    assert [m.step for m in losses] == [0, 1, 2]
    assert found.data.tags["nbtoolkit.status"] == "stopped"  # as its attempt ended
    assert [step for step, _ in scalars(run.paths.folder / "tensorboard")] == [3, 4]


def test_only_one_process_follows_a_folder(tmp_path: Path) -> None:
    paths = whole_run(tmp_path)
    with (
        Follower(paths, make=_null),
        pytest.raises(TrackingError, match="is being tracked by another process"),
    ):
        Follower(paths, make=_null)
    with (
        Follower(paths, make=_null),
        pytest.raises(TrackingError, match="is being tracked by another process"),
    ):
        replay(paths.folder)


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(TrackingError, match="there is no run folder /nonexistent"):
        Follower(RunPaths(Path("/nonexistent")))


def _null(run: RunStarted) -> dict[str, Any]:
    return {}


def test_tracking_off_writes_no_database(tmp_path: Path) -> None:
    paths = whole_run(tmp_path, tracking={"mlflow": False, "tensorboard": False})
    assert follow(paths) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == [paths.run_id]
    assert read_json(paths.tracking)["done"]


# --- TensorBoard ------------------------------------------------------------------------------


def scalars(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars("loss")]


def test_tensorboard_has_the_same_curves_and_a_replay_adds_nothing(tmp_path: Path) -> None:
    paths = whole_run(tmp_path, tracking={"mlflow": False, "tensorboard": True})
    follow(paths)
    expected = [(step, pytest.approx(1 / (step + 1))) for step in range(5)]
    assert scalars(paths.folder / "tensorboard") == expected
    follow(paths)
    assert len(list((paths.folder / "tensorboard").iterdir())) == 1
    paths.tracking.unlink()
    follow(paths)
    assert scalars(paths.folder / "tensorboard") == expected


# --- the database -----------------------------------------------------------------------------


SUPPORT = str(Path(__file__).parents[1] / "support")

# One process imports MLflow and forks one for each folder; when the pipe closes, all of them go.
FOLLOW_AT_ONCE = """
import os, sys
from pathlib import Path
from mounts import in_own_mounts
from tracked_runs import follow
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.tracking.catch_up import wait_for_tracking
from nbtoolkit.tracking.database import import_client

import_client()
import mlflow.store.tracking.sqlalchemy_store
wait, go = os.pipe()
children = []
for folder in sys.argv[1:]:
    children.append(os.fork())
    if children[-1] == 0:
        os.close(go)
        os.read(wait, 1)
        follow(RunPaths(Path(folder)))
        os._exit(0)
os.close(go)
sys.exit(sum(os.waitpid(child, 0)[1] for child in children) != 0)
"""


@pytest.mark.long
def test_four_processes_and_one_fresh_database_make_four_runs(tmp_path: Path) -> None:
    runs = [whole_run(tmp_path, name=f"trial{index}") for index in range(4)]
    folders = [str(paths.folder) for paths in runs]
    environ = {**os.environ, "PYTHONPATH": SUPPORT}
    subprocess.run([sys.executable, "-c", FOLLOW_AT_ONCE, *folders], check=True, env=environ)
    found = {run.info.run_name: run for run in all_runs(tmp_path)}
    assert sorted(found) == sorted(paths.run_id for paths in runs)
    assert {run.info.status for run in found.values()} == {"FINISHED"}
    assert len({run.info.experiment_id for run in found.values()}) == 1


@pytest.mark.long
def test_our_fresh_database_is_the_one_mlflow_makes(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    stock = tmp_path / "stock.db"
    MlflowClient(f"sqlite:///{stock}")
    open_database(tmp_path)
    assert schema(tmp_path / "mlflow.db") == schema(stock)


def schema(file: Path) -> list[Any]:
    """All tables and indices, and MLflow's version of them.

    By sorted lines: two databases of stock MLflow differ in the order of their constraints.
    """
    with sqlite3.connect(file) as database:
        rows = list(database.execute("select name, sql from sqlite_master order by 1"))
        version = list(database.execute("select * from alembic_version"))
    database.close()
    return version + [(name, sorted(re.split(r",?\s*\n", sql or ""))) for name, sql in rows]


def test_a_killed_first_use_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").touch()  # as stock MLflow leaves it behind
    (tmp_path / ".mlflow.db.4711").write_bytes(b"half")
    follow(whole_run(tmp_path))
    assert len(all_runs(tmp_path)) == 1


@pytest.mark.long
def test_a_folder_with_an_odd_name(tmp_path: Path) -> None:
    output_dir = tmp_path / "my runs, 100% 'done' #1 é"
    run_id = follow(whole_run(output_dir))
    assert (output_dir / "mlartifacts" / str(run_id) / "artifacts/config.yaml").exists()
    assert len(all_runs(output_dir)) == 1


def test_a_folder_that_no_uri_can_name(tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match=r"after '\?' would be read as options"):
        follow(whole_run(tmp_path / "what?"))


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("not a database, but long enough")
    with pytest.raises(TrackingError, match=r"mlflow\.db is not an SQLite database"):
        follow(whole_run(tmp_path))


def test_a_database_of_a_newer_mlflow_is_refused_with_what_to_do(tmp_path: Path) -> None:
    open_database(tmp_path / "ours")
    paths = whole_run(tmp_path / "theirs")
    shutil.copy(tmp_path / "ours/mlflow.db", tmp_path / "theirs")
    with sqlite3.connect(tmp_path / "theirs/mlflow.db") as database:
        database.execute("update alembic_version set version_num = 'ffffffffffff'")
    database.close()
    with pytest.raises(TrackingError, match="out-of-date database schema"):
        follow(paths)


@pytest.mark.long
def test_an_output_folder_deleted_between_two_runs_of_one_process(tmp_path: Path) -> None:
    follow(whole_run(tmp_path / "outputs"))
    shutil.rmtree(tmp_path / "outputs")
    paths = whole_run(tmp_path / "outputs")
    follow(paths)
    with sqlite3.connect(tmp_path / "outputs/mlflow.db") as database:  # not by MLflow's open one
        names = list(database.execute("select name from runs"))
    database.close()
    assert names == [(paths.run_id,)]


def test_another_uri_and_experiment(tmp_path: Path) -> None:
    settings = {"mlflow": True, "uri": "sqlite:///../team/all.db", "experiment": "digits, team"}
    follow(whole_run(tmp_path / "mine", tracking=settings))
    assert not (tmp_path / "mine/mlflow.db").exists()
    assert (tmp_path / "team/all.db").exists()
    assert (tmp_path / "team/mlartifacts").exists()


def test_a_deleted_experiment_is_not_written_to(outputs: Path) -> None:
    client, experiment = open_database(outputs, experiment="old")
    client.delete_experiment(experiment)
    with pytest.raises(TrackingError, match=r"'old' was deleted[\s\S]*mlflow experiments restore"):
        open_database(outputs, experiment="old")


# --- the service ------------------------------------------------------------------------------


SERVICE = """
import sys
from nbtoolkit.tracking.service import run_service
run_service([int(sys.argv[1])])
"""


@contextlib.contextmanager
def serving() -> Iterator[Connection]:
    """A tracking service, by the kernel's end of its connection."""
    kernel, other_end = Connection.pair()
    fd = other_end.fileno()
    process = subprocess.Popen([sys.executable, "-c", SERVICE, str(fd)], pass_fds=[fd])
    other_end.close()
    try:
        yield kernel
    finally:
        kernel.close()
        assert process.wait() == 0


def request(folder: Path) -> TrackRun:
    return TrackRun(folder=str(folder), environ=dict(os.environ))


@pytest.mark.long
def test_a_process_follows_two_live_runs_and_tells_of_a_third_that_fails(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)  # left behind by a fluent call in the kernel
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    first, second = Run.new(outputs), Run.new(outputs)
    folders = [first.paths.folder, second.paths.folder]
    for run in (first, second):
        run.begin()
    process = TrackingProcess([*folders, outputs / "nothing"])
    for run in (second, first):
        run.train(range(3))
        run.end()
    process.wait()
    with pytest.raises(TrackingError, match="the tracking process died"):
        process.check(outputs / "nothing")
    ids = {folder.name: process.check(folder) for folder in folders}
    assert ids == {run.info.run_name: run.info.run_id for run in all_runs(outputs)}


def test_the_service_keeps_an_error_with_its_run(
    outputs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = Run.new(outputs)
    broken.begin(tracking={"mlflow": True, "uri": "sqlite:///../broken/mlflow.db"})
    broken.end()
    (outputs.parent / "broken").mkdir()
    (outputs.parent / "broken/mlflow.db").write_text("not a database, but long enough")
    paths = whole_run(outputs)
    with serving() as kernel:
        kernel.send(request(outputs / "nothing"))
        kernel.send(request(broken.paths.folder))
        kernel.send(request(paths.folder))
    assert [run.info.run_name for run in all_runs(outputs)] == [paths.run_id]
    state = read_json(paths.tracking)
    assert state["done"]
    assert state["written"] == paths.events.stat().st_size
    state = read_json(broken.paths.tracking)
    assert not state["done"]
    assert "is not an SQLite database" in state["error"]
    assert "there is no run folder" in capfd.readouterr().err


@pytest.mark.long
def test_the_service_finishes_what_has_ended_when_the_other_end_is_gone(outputs: Path) -> None:
    run = Run.new(outputs)
    run.begin()
    with serving() as kernel:
        kernel.send(request(run.paths.folder))
        run.train(range(3))
        run.end()
    (found,) = all_runs(outputs)
    assert found.info.status == "FINISHED"


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file: fork servers that start now work on the import of MLflow until it is there."""
    folder = tmp_path / "at_start"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os, sys\n"
        "first = os.getpid()\n"  # the fork server itself only asks whether there is an MLflow
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        while name == 'mlflow' and os.getpid() != first and not os.path.exists(\n"
        f"            {str(tmp_path / 'go')!r}\n"
        "        ): pass\n"
        "sys.meta_path.insert(0, Slow())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return tmp_path / "go"


@contextlib.contextmanager
def soon(act: Callable[[], object]) -> Iterator[None]:
    """Do something after 1.5 s: later than a wait of 1 s ends that counts wall time."""
    timer = threading.Timer(1.5, act)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@pytest.mark.long
def test_what_is_not_written_yet_is_told_of_and_written_at_the_kernels_end(
    outputs: Path, held: Path
) -> None:
    paths = whole_run(outputs)
    shutdown()  # a new fork server has the variables of the test
    pid, said = track(paths.folder), list[str]()
    assert not wait_for_tracking(paths, pid, said.append, limit=0.0)
    (line,) = said
    assert line.startswith("tracking has not written the whole run yet, and continues in the backg")
    assert str(paths.tracking) in line
    assert f"nbtoolkit.tracking.replay({str(paths.folder)!r})" in line
    with soon(held.touch):
        shutdown(stalled=1.0)
    all_gone({pid})
    assert read_json(paths.tracking)["done"]
    assert [run.info.run_name for run in all_runs(outputs)] == [paths.run_id]


@pytest.mark.long
def test_a_launch_waits_for_tracking_that_is_slow_and_tells_of_one_that_fails(
    outputs: Path, held: Path
) -> None:
    paths, said = whole_run(outputs), list[str]()
    shutdown()  # a new fork server has the variables of the test
    pid = track(paths.folder)
    with soon(held.touch):
        assert wait_for_tracking(paths, pid, said.append, stalled=1.0)
    assert [line for line in said if not line.startswith("waiting for ")] == []
    (outputs / "mlflow.db").write_text("not a database, but long enough")
    paths = whole_run(outputs)
    track(paths.folder)
    assert not wait_for_tracking(paths, pid, said.append)
    assert said[-1].startswith("warning: tracking did not write the whole run: TrackingError: ")
    shutdown()


def test_a_process_that_does_nothing_is_given_up(outputs: Path) -> None:
    process = TrackingProcess([whole_run(outputs).folder])
    process.wait(stalled=1.0)  # it takes longer, and works
    before = psutil.Process().children()  # a fork server of an earlier test, say
    process = TrackingProcess([whole_run(outputs).folder])
    (child,) = [one for one in psutil.Process().children() if one not in before]
    child.suspend()
    with pytest.raises(TimeoutError, match=r"made no progress for 1 s; .*replay\(folder\)"):
        process.wait(stalled=1.0)
    assert not child.is_running()


@pytest.mark.long
def test_replay_in_a_process_of_its_own(tmp_path: Path) -> None:
    paths = whole_run(tmp_path, tracking={"mlflow": True, "tensorboard": True})
    run_id = replay(paths.folder)
    (found,) = all_runs(tmp_path)
    assert found.info.run_id == run_id
    assert len(scalars(paths.folder / "tensorboard")) == 5


def test_replay_of_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="there are no events in"):
        replay(tmp_path)


def test_replay_is_where_the_messages_say() -> None:
    import nbtoolkit.tracking

    assert nbtoolkit.tracking.replay is replay
    assert nbtoolkit.tracking.tracking_table is tracking_table
    with pytest.raises(AttributeError, match="no attribute 'repeat'"):
        nbtoolkit.tracking.repeat  # noqa: B018


def test_the_table_of_an_output_folder(outputs: Path) -> None:
    paths = whole_run(outputs)
    follow(paths)
    table = tracking_table(outputs)
    assert list(table["run"]) == [paths.run_id]
    assert list(table["status"]) == ["completed"]
    assert table.loc[0, "val_accuracy"] == 0.9
    assert table.loc[0, "params.optim.lr"] == "0.001"
    with pytest.raises(TrackingError, match=r"no experiment 'other'[\s\S]*'nbtoolkit'"):
        tracking_table(outputs, experiment="other")
    with pytest.raises(TrackingError, match="there is no"):
        tracking_table(outputs / "elsewhere")


def test_importing_the_room_imports_no_mlflow_and_no_torch() -> None:
    code = "import nbtoolkit.tracking, sys; print({'mlflow', 'torch', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


FULL_DISK = """
from pathlib import Path
from nbtoolkit.run.paths import RunPaths, read_json
from nbtoolkit.tracking.follower import Follower

paths = RunPaths.create("out", "full")
with Follower(paths) as follower:
    with open("out/fill", "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError as error:
            print(error.strerror)
    follower.failed("MlflowException: database or disk is full " + 9000 * "and more")
print(read_json(paths.tracking)["error"][:41])
print(read_json(paths.tracking)["done"])
"""


def test_an_error_of_tracking_has_room_on_a_full_disk(tmp_path: Path) -> None:
    lines = in_own_mounts(FULL_DISK, tmp_path)
    full = "MlflowException: database or disk is full"
    assert lines == ["No space left on device", full, "False"]


def test_an_error_does_not_repeat_the_batch_that_was_not_written(
    outputs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = whole_run(outputs)
    with sqlite3.connect(outputs / "mlflow.db") as database:
        database.execute(
            "create trigger full before insert on metrics "
            "begin select raise(fail, 'database or disk is full'); end"
        )
    with pytest.raises(TrackingError, match="database or disk is full") as caught:
        replay(run.folder)
    assert "INSERT INTO" not in str(caught.value)
    assert "INSERT INTO" in capfd.readouterr().err  # in full where the service writes


def test_a_process_that_dies_is_no_success_because_an_earlier_one_wrote_the_run(
    outputs: Path,
) -> None:
    paths = whole_run(outputs)
    follow(paths)
    process = TrackingProcess([paths.folder])
    for child in psutil.Process().children():
        if "follow_to_end" in " ".join(child.cmdline()):
            child.kill()
    process.wait()
    with pytest.raises(TrackingError, match=r"the tracking process died \(exit code -9\)"):
        process.check(paths.folder)
