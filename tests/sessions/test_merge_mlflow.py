"""Unpacking a bundle merges its MLflow runs into the database of the target folder."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
from kernels import SECONDS

import nbtoolkit as nb
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.resume import lock_run

# Not by importorskip: every worker would import MLflow, 2 s, while it collects.
pytestmark = pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")


def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    for step in range(1, 4):
        ctx.log({"loss": 1.0 / step}, step=step)
    return {"val_loss": config.optim.lr}


def launched(folder: Path, *names: str) -> None:
    settings = {"runtime.output_dir": str(folder), "runtime.pack": False}
    config = nb.load_config(env=None, overrides=settings)
    for name in names:
        nb.launch(train, config, name=name, display="off", resume="never")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder with two launches and a sweep of two trials, all in MLflow."""
    folder = tmp_path_factory.mktemp("theirs") / "outputs"
    launched(folder, "one", "two")
    config = nb.load_config(
        env=None, overrides={"runtime.output_dir": str(folder), "runtime.pack": False}
    )
    space = {"optim.lr": {"type": "float", "low": 1e-3, "high": 1e-1}}
    nb.sweep(train, config, space, n_trials=2, name="search", display="off")
    return folder


@pytest.fixture
def bundle(theirs: Path, tmp_path: Path) -> Path:
    return nb.pack(tmp_path, source=theirs).path


def rows(folder: Path, query: str) -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        return sorted(database.execute(query).fetchall())


def runs_of(folder: Path) -> Counter[str]:
    """How often each run is in the database, the user's view: what is not deleted."""
    query = (
        "select value from tags join runs using (run_uuid) "
        "where key = 'nbtoolkit.run_id' and lifecycle_stage = 'active'"
    )
    return Counter(value for (value,) in rows(folder, query))


METRICS = (
    "select t.value, m.key, m.step, m.value from metrics m join tags t using (run_uuid) "
    "where t.key = 'nbtoolkit.run_id'"
)
STATUS = "select status, artifact_uri from runs"


def test_runs_are_written_to_a_database_that_is_there_once_each(
    bundle: Path, theirs: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    launched(mine, "mine")
    before = runs_of(mine)
    done = nb.unpack(bundle, into=mine)
    assert set(done.tracked) == set(done.new)
    assert len(done.tracked) == 3
    assert "MLflow: 3 runs" in repr(done)
    assert runs_of(mine) == before + runs_of(theirs)
    assert set(runs_of(mine).values()) == {1}
    assert set(rows(theirs, METRICS)) <= set(rows(mine, METRICS))
    assert {status for status, _ in rows(mine, STATUS)} == {"FINISHED"}
    assert all(uri.startswith(mine.as_uri()) for _, uri in rows(mine, STATUS))
    kept = [rows(mine, query) for query in (METRICS, STATUS)]
    again = nb.unpack(bundle, into=mine)
    assert again.tracked == ()
    assert [rows(mine, query) for query in (METRICS, STATUS)] == kept
    assert runs_of(mine) == before + runs_of(theirs)


def test_without_a_database_a_new_one_is_written_from_the_events(
    bundle: Path, theirs: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    done = nb.unpack(bundle, into=mine)
    assert set(done.tracked) == set(done.new)
    assert "MLflow: 3 runs" in repr(done)
    assert runs_of(mine) == runs_of(theirs)
    assert all(uri.startswith(mine.as_uri()) for _, uri in rows(mine, STATUS))


@pytest.mark.long
def test_runs_that_an_earlier_unpacking_left_out_are_written_by_the_next(
    bundle: Path, theirs: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    nb.unpack(bundle, into=mine)
    (mine / "mlflow.db").unlink()
    launched(mine, "mine")
    done = nb.unpack(bundle, into=mine)
    assert len(done.unchanged) == len(done.tracked) == 3
    assert runs_of(theirs) <= runs_of(mine)


def test_a_run_that_is_further_in_the_bundle_is_written_on_to_its_own_entry(
    bundle: Path, theirs: Path, tmp_path: Path
) -> None:
    """Another database has it under another id, and says how far that one is."""
    mine = tmp_path / "mine"
    (one,) = theirs.glob("*-one-*")
    shutil.copytree(one, mine / one.name)
    events = RunPaths(mine / one.name).events
    lines = events.read_text().splitlines(keepends=True)
    logged = next(at for at, line in enumerate(lines) if json.loads(line)["type"] == "metrics")
    events.write_text("".join(lines[: logged + 1]))
    (mine / one.name / "tracking.json").unlink()
    from nbtoolkit.tracking.service import replay

    replay(mine / one.name)
    short = rows(mine, METRICS)
    done = nb.unpack(bundle, into=mine)
    assert done.advanced == (one.name,)
    assert one.name in done.tracked
    assert runs_of(mine) == runs_of(theirs)
    assert len(short) < len(rows(mine, METRICS)) == len(rows(theirs, METRICS))


def test_a_run_that_the_user_deleted_in_mlflow_does_not_come_back(
    bundle: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    nb.unpack(bundle, into=mine)
    with closing(sqlite3.connect(mine / "mlflow.db")) as database, database:
        database.execute("update runs set lifecycle_stage = 'deleted'")
    assert nb.unpack(bundle, into=mine).tracked == ()
    assert runs_of(mine) == Counter()


def test_a_run_that_goes_on_is_left_to_its_own_process(bundle: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    nb.unpack(bundle, into=mine)
    (one,) = mine.glob("*-one-*")
    with closing(sqlite3.connect(mine / "mlflow.db")) as database, database:
        database.execute("delete from tags where value = ?", (one.name,))
    lock = lock_run(RunPaths(one))
    assert lock is not None
    try:
        assert nb.unpack(bundle, into=mine).tracked == ()
    finally:
        lock.release()


@pytest.mark.long
def test_another_store_that_a_bundle_names_is_not_written_to(theirs: Path, tmp_path: Path) -> None:
    outputs = Path(shutil.copytree(theirs, tmp_path / "theirs"))
    (outputs / "mlflow.db").unlink()
    (one,) = outputs.glob("*-one-*")
    (search,) = outputs.glob("*-search-*")
    events = RunPaths(one).events
    store = f'"uri": "sqlite:///{tmp_path}/victim.db"'
    events.write_text(events.read_text().replace('"uri": null', store))
    with RunPaths(search).events.open("a") as diary:
        job = {"t": 1.0, "type": "trial", "number": 9, "state": "running", "folder": "../../victim"}
        diary.write(json.dumps(job) + "\n")
    (tmp_path / "victim").mkdir()
    shutil.copy(events, tmp_path / "victim")
    mine = tmp_path / "mine"
    launched(mine, "mine")
    done = nb.unpack(nb.pack(tmp_path, source=outputs).path, into=mine)
    assert one.name not in done.tracked
    assert not (tmp_path / "victim.db").exists()
    assert [path.name for path in (tmp_path / "victim").iterdir()] == ["events.jsonl"]


@pytest.mark.long
def test_without_mlflow_runs_are_unpacked_and_the_rest_is_said_once(
    bundle: Path, tmp_path: Path
) -> None:
    program = (
        "import sys, importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'mlflow' else find(name, *more)\n"
        "import nbtoolkit as nb; done = nb.unpack(sys.argv[1], into=sys.argv[2])\n"
        "assert len(done.new) == 3 and done.tracked == (), done\n"
        '(note,) = done.notes; assert "not in MLflow\'s database" in note, note\n'
    )
    words = [sys.executable, "-c", program, bundle, tmp_path / "mine"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
