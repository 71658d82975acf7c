from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import RDBStorage
from searches import LR, SPACE
from sqlalchemy import text

from nbtoolkit import load_config
from nbtoolkit.errors import RunFolderError, SpaceError, SweepError
from nbtoolkit.search.pruners import make_pruner
from nbtoolkit.search.samplers import make_sampler
from nbtoolkit.search.study import SearchStudy, copy_study, keep_tables, open_storage, open_study
from nbtoolkit.search.wishes import Wishes, load_wishes

COMPLETE = optuna.trial.TrialState.COMPLETE


class Opened:
    """Opens studies, and closes them when the test is over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: list[SearchStudy] = []

    def __call__(self, source: Any, identity: dict[str, Any] | None = None) -> SearchStudy:
        wishes = wished(source)
        file = self.folder / "study.db"
        study = open_study(file, wishes, wishes.make_space(), identity or {})
        self._open.append(study)
        return study

    def close(self) -> None:
        while self._open:
            self._open.pop().close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    opener = Opened(tmp_path)
    yield opener
    opener.close()


def wished(source: Any) -> Wishes:
    return load_wishes({"budget": {"n_trials": 9}, **source}, load_config(env=None))


def plain(**study: Any) -> dict[str, Any]:
    return {"study": study, "space": SPACE}


def finished(study: SearchStudy, value: float = 0.5) -> dict[str, Any]:
    number, params = study.ask()
    study.tell(number, COMPLETE, [value], {})
    return params


def test_parameters_are_those_in_the_file_to_the_last_bit(opened: Opened, tmp_path: Path) -> None:
    study = opened(plain(sampler="tpe"))
    asked = [finished(study, value=i / 7) for i in range(15)]
    opened.close()
    stored = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path}/study.db").trials
    assert [{**trial.params} for trial in stored] == asked
    assert [trial.values for trial in stored] == [[i / 7] for i in range(15)]
    assert all(type(params["optim.lr"]) is float for params in asked)


def test_a_study_is_plain_sqlite_in_wal_mode(opened: Opened, tmp_path: Path) -> None:
    finished(opened(plain()))
    with sqlite3.connect(tmp_path / "study.db") as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert database.execute("SELECT count(*) FROM trials").fetchone() == (1,)
    database.close()
    opened.close()
    assert not (tmp_path / "study.db-wal").exists()


@pytest.mark.parametrize(
    "sampler",
    [
        "tpe",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("random", "qmc", "gp", "cmaes")),
    ],
)
def test_a_reopened_study_draws_what_it_would_have_drawn(sampler: str, tmp_path: Path) -> None:
    options = {"n_startup_trials": 2} if sampler in ("tpe", "gp") else {}

    def drawn(folder: Path, sessions: list[int]) -> list[dict[str, Any]]:
        folder.mkdir()
        found, opener = [], Opened(folder)
        for trials in sessions:
            study = opener(plain(sampler=sampler, sampler_options=options))
            for _ in range(trials):
                found.append(finished(study, value=len(found) % 3))
            opener.close()
        return found

    whole, parts = drawn(tmp_path / "one", [6]), drawn(tmp_path / "three", [2, 1, 3])
    assert whole == parts
    assert len({tuple(point.items()) for point in whole}) == 6


def test_seeds_draw_differently() -> None:
    space = wished(plain()).make_space()

    def first(sampler: str, seed: int) -> dict[str, Any]:
        study = optuna.create_study(
            sampler=make_sampler(wished(plain(sampler=sampler, seed=seed)), space, 0)
        )
        return space.suggest(study.ask())

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for sampler in ("tpe", "random", "qmc"):
        assert first(sampler, 0) == first(sampler, 0) != first(sampler, 1)


def test_qmc_fills_the_space_evenly(opened: Opened) -> None:
    study = opened(
        {"study": {"sampler": "qmc"}, "space": {"model.x": {"type": "float", "low": 0, "high": 1}}}
    )
    points = sorted(finished(study)["model.x"] for _ in range(8))
    assert [int(x * 8) for x in points] == list(range(8))


def test_a_running_trial_is_taken_up_with_the_same_parameters(opened: Opened) -> None:
    study = opened(plain())
    number, params = study.ask()
    study.report(number, 0.5, 0)
    opened.close()
    again = opened(plain())
    assert again.take_up(number) == (number, params)
    assert again.report(number, 0.7, 0)[0] == 0  # the step counts once, without a warning
    assert again.report(number, 0.8, None)[0] == 1
    assert again.reports(number) == {0: 0.5, 1: 0.8}


def test_a_trial_cut_off_while_it_was_drawn_gets_its_missing_parameters(opened: Opened) -> None:
    study = opened(plain(sampler="random"))
    whole = study.ask()[1]
    study.optuna.ask().suggest_float("optim.lr", LR["low"], LR["high"], log=True)
    opened.close()
    _, params = opened(plain(sampler="random")).take_up(1)
    assert set(params) == set(whole)
    assert params != whole


def test_a_study_for_another_search_is_refused_and_the_difference_shown(opened: Opened) -> None:
    finished(opened(plain(), {"space.optim.lr": LR, "folds": "abc"}))
    with pytest.raises(SweepError, match=r"folds: was 'abc', is 'def'(.|\n)*begin anew"):
        opened(plain(), {"space.optim.lr": LR, "folds": "def"})
    with pytest.raises(SweepError, match=r"space.optim.lr: was {.*}, is None"):
        opened(plain(), {"folds": "abc"})


def test_a_study_cut_off_before_its_first_trial_is_made_anew(
    opened: Opened, tmp_path: Path
) -> None:
    storage = open_storage(tmp_path / "study.db")
    half = optuna.create_study(study_name="sweep", storage=storage)
    half.enqueue_trial({"optim.lr": 0.5})
    storage.engine.dispose()
    study = opened({**plain(), "first_trials": [{"optim.lr": 0.25}]})
    assert finished(study)["optim.lr"] == 0.25
    finished(study)
    assert len(study.trials()) == 2


def test_first_trials_may_leave_parameters_to_the_sampler(opened: Opened) -> None:
    study = opened(
        {**plain(sampler="random"), "first_trials": [{"model.kind": "cnn", "optim.lr": 1}]}
    )
    first = finished(study)
    assert (first["model.kind"], first["optim.lr"]) == ("cnn", 1.0)
    assert 1 <= first["model.hidden"] <= 64


def test_lists_are_choices_too(opened: Opened) -> None:
    source = {"study": {"sampler": "random"}, "space": {"model.layers": [[64], [64, 32]]}}
    study = opened({**source, "first_trials": [{"model.layers": [64, 32]}]})
    found = [finished(study)["model.layers"] for _ in range(6)]
    assert found[0] == (64, 32)
    assert set(found) == {(64,), (64, 32)}


def test_a_copy_is_whole_while_the_study_is_open(opened: Opened, tmp_path: Path) -> None:
    study = opened(plain())
    finished(study)
    target = tmp_path / "kept.db"
    for count in (1, 2):
        copy_study(tmp_path / "study.db", target)
        with sqlite3.connect(target) as database:
            assert database.execute("SELECT count(*) FROM trials").fetchone() == (count,)
        database.close()
        finished(study)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def fill(study: SearchStudy) -> None:
    for _ in range(1000):
        finished(study)


def test_what_is_read_from_memory_is_what_lies_on_disk(opened: Opened, tmp_path: Path) -> None:
    study = opened(plain(sampler="tpe", pruner="median"))
    for i in range(4):
        number, _ = study.ask()
        study.report(number, i / 3, None)
        study.report(number, i / 7, 5)
        study.constrain(number, {"memory": float(i)})
        if i < 3:
            study.tell(number, COMPLETE, [i / 7], {"seconds": 1.5, "fold-0": {"val_loss": 0.5}})
    study.remember("added", 2)
    own, _ = seen(study.optuna), opened.close()
    assert own == seen(opened(plain(sampler="tpe", pruner="median")).optuna)
    opened.close()
    storage = f"sqlite:///{tmp_path}/study.db"
    assert own == seen(optuna.load_study(study_name="sweep", storage=storage))


def test_the_storage_of_a_sweep_is_for_its_study_alone(opened: Opened) -> None:
    storage = opened(plain())._storage
    with pytest.raises(SweepError, match=r"asked to make the study 'other'(.|\n)*once the sweep"):
        optuna.create_study(study_name="other", storage=storage)
    with pytest.raises(SweepError, match="asked to delete the study 'sweep'"):
        optuna.delete_study(study_name="sweep", storage=storage)


def seen(study: optuna.Study) -> list[Any]:
    def attributes(trial: optuna.trial.FrozenTrial) -> str:
        return json.dumps([trial.user_attrs, trial.system_attrs], sort_keys=True)

    trials = [
        [one.number, one.state, one.params, one.distributions, one.values, attributes(one)]
        for one in study.trials
    ]
    reports = [one.intermediate_values for one in study.trials]
    return [study.directions, study.user_attrs, trials, reports]


def test_a_study_made_from_kept_tables_is_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "empty").mkdir()
    RDBStorage(f"sqlite:///{tmp_path}/plain/study.db").engine.dispose()
    keep_tables(tmp_path / "empty")
    opener = Opened(tmp_path)
    finished(opener(plain()))
    opener.close()
    assert schema(tmp_path / "study.db") == schema(tmp_path / "plain" / "study.db")
    storage = f"sqlite:///{tmp_path}/study.db"  # its version is checked here
    assert len(optuna.load_study(study_name="sweep", storage=storage).trials) == 1


def schema(file: Path) -> list[Any]:
    with contextlib.closing(sqlite3.connect(file)) as database:
        tables = database.execute("select sql from sqlite_master order by name").fetchall()
        versions = [*database.execute("select * from version_info")]
        return [tables, versions, [*database.execute("select * from alembic_version")]]


def test_a_full_disk_is_told(opened: Opened) -> None:
    study = opened(plain())
    finished(study)
    with study._storage._disk.engine.connect() as connection:  # the pool's only one
        connection.execute(text("PRAGMA max_page_count = 1"))
    with pytest.raises(RunFolderError, match=r"database or disk is full(.|\n)*free some space"):
        fill(study)


def test_a_warm_start_takes_the_trials_that_fit(opened: Opened, tmp_path: Path) -> None:
    old = Opened(tmp_path / "old")
    old.folder.mkdir()
    study = old(plain(sampler="random"))
    lrs = [finished(study, value=i)["optim.lr"] for i in range(6)]
    old.close()
    low = sorted(lrs)[2]
    narrow = {**SPACE, "optim.lr": {**LR, "low": low}}
    new = opened({"space": narrow, "warm_start": str(old.folder)})
    assert new.imported == sum(lr >= low for lr in lrs) == 4
    assert new.trials() == []
    assert [trial.user_attrs["warm_start"] for trial in new.optuna.trials] == [str(old.folder)] * 4
    number, _ = new.ask()
    assert number == 4


@pytest.mark.parametrize(
    ("says", "space", "study"),
    [
        ("other directions", SPACE, {"direction": "maximize"}),
        ("none of the 1 complete trials", {"optim.momentum": {**LR, "high": 0.9}}, {}),
    ],
)
def test_a_warm_start_that_cannot_be_is_refused(
    says: str, space: Any, study: Any, opened: Opened, tmp_path: Path
) -> None:
    old = Opened(tmp_path / "old")
    old.folder.mkdir()
    finished(old(plain()))
    old.close()
    with pytest.raises(SweepError, match=says):
        opened({"study": study, "space": space, "warm_start": str(old.folder)})


def test_a_warm_start_from_nowhere_is_refused(opened: Opened) -> None:
    with pytest.raises(SweepError, match="there is no study nowhere"):
        opened({**plain(), "warm_start": "nowhere"})


@pytest.mark.parametrize("name", ["median", "successive_halving", "hyperband", "patient", "none"])
def test_every_pruner_judges(name: str, opened: Opened) -> None:
    study = opened(plain(pruner=name))
    for _ in range(3):
        number, _ = study.ask()
        for step in range(4):
            study.report(number, float(step), step)
        study.tell(number, COMPLETE, [3.0], {})


def test_options_reach_optuna_and_wrong_ones_are_refused() -> None:
    pruner = make_pruner(wished(plain(pruner="percentile", pruner_options={"percentile": 25.0})))
    assert isinstance(pruner, optuna.pruners.PercentilePruner)
    with pytest.raises(SpaceError, match=r"pruner_options(.|\n)*n_trials(.|\n)*MedianPruner"):
        make_pruner(wished(plain(pruner="median", pruner_options={"n_trials": 3})))
    wrong = wished(plain(sampler="tpe", sampler_options={"startup": 3}))
    with pytest.raises(SpaceError, match=r"sampler_options(.|\n)*startup(.|\n)*TPESampler"):
        make_sampler(wrong, wrong.make_space(), 0)
