"""Studies are read from a copy: written at, cut off, damaged, or on a read-only disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import optuna
import pytest
from run_folders import write_run

from nbtoolkit.errors import SweepError
from nbtoolkit.report.story import read_story
from nbtoolkit.report.sweeps import opened_study, sweeps
from nbtoolkit.search.study import open_storage


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A study of four trials, closed."""
    storage = open_storage(tmp_path / "study.db")
    add_trials(storage, 4)
    storage.remove_session()
    storage.engine.dispose()
    return tmp_path / "study.db"


def add_trials(storage: optuna.storages.RDBStorage, count: int) -> None:
    study = optuna.create_study(storage=storage, study_name="digits", load_if_exists=True)
    for _ in range(count):
        study.tell(study.ask({"x": optuna.distributions.FloatDistribution(0, 1)}), 0.5)


def trials(file: Path) -> int:
    with opened_study(file) as study:
        return len(study.trials)


def test_a_study_is_read_and_nothing_is_left_beside_it(file: Path) -> None:
    assert trials(file) == 4
    assert [path.name for path in file.parent.iterdir()] == ["study.db"]


def test_a_study_that_is_being_written_is_read_as_far_as_it_is(file: Path) -> None:
    storage = open_storage(file)
    try:
        add_trials(storage, 2)
        assert file.with_name("study.db-wal").stat().st_size > 0
        assert trials(file) == 6
    finally:
        storage.remove_session()
        storage.engine.dispose()


def test_a_study_cut_off_where_sqlite_cannot_write_is_read_whole(file: Path) -> None:
    storage = open_storage(file)
    add_trials(storage, 2)
    attached = file.parent / "attached"
    attached.mkdir()
    for name in ("study.db", "study.db-wal"):  # as a session leaves them that dies here
        shutil.copy(file.with_name(name), attached)
    storage.remove_session()
    storage.engine.dispose()
    # root may write everywhere, but not into a folder that is not there
    (attached / "study.db-shm").symlink_to(attached / "nowhere" / "study.db-shm")
    before = {path: path.lstat().st_mtime_ns for path in attached.iterdir()}
    assert trials(attached / "study.db") == 6
    assert {path: path.lstat().st_mtime_ns for path in attached.iterdir()} == before


def test_a_study_that_is_missing_damaged_or_empty_is_told(file: Path, tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"its study none\.db cannot be read"):
        trials(tmp_path / "none.db")
    assert not (tmp_path / "none.db").exists()
    (tmp_path / "text.db").write_text("no database" * 100)
    with pytest.raises(SweepError, match=r"its study text\.db cannot be read: .*not a database"):
        trials(tmp_path / "text.db")
    (tmp_path / "empty.db").touch()
    with pytest.raises(SweepError, match="its study file holds 0 studies"):
        trials(tmp_path / "empty.db")


def test_a_sweep_without_a_study_or_wishes_says_so_and_the_report_goes_on(tmp_path: Path) -> None:
    paths = write_run(tmp_path, "a", events=[{"type": "run"}], about={"kind": "sweep"})
    told = "".join(map(str, sweeps([read_story(paths)]).parts))
    assert "Its sweep.yaml cannot be read" in told
    (paths.folder / "sweep.yaml").write_text("study: {")
    told = "".join(map(str, sweeps([read_story(paths)]).parts))
    assert "Its sweep.yaml cannot be read: " in told
    assert "not valid YAML" in told
    (paths.folder / "sweep.yaml").write_text(
        "study: {name: rates, metric: val_accuracy}\nspace: {optim.lr: [0.1, 0.2]}\n"
    )
    told = "".join(map(str, sweeps([read_story(paths)]).parts))
    assert "rates: 0" in told
    assert "Its plots are missing: its study study.db cannot be read" in told
