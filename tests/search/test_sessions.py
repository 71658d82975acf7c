"""The display of a search's second session, and the report of a cross-validation's folds."""

from __future__ import annotations

from pathlib import Path

import pytest

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.run.events import RECORD, EventLog, RunEnded, RunStarted
from nbtoolkit.run.identity import Identity
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.search.submit import WantedSearch, complete, unfinished
from nbtoolkit.worker.context import RunContext

SPACE = {
    "space": {"model.x": {"type": "float", "low": 0.0, "high": 1.0}},
    "study": {"metric": "loss"},
}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path), "model.x": 0.5}
    return Config().with_overrides(settings)


def train(config: Config, ctx: RunContext) -> None:
    for step in range(1, 4):
        ctx.log({"samples_per_second": 100.0 * step}, step=step)
        ctx.report({"loss": config.model["x"] / step}, step=step)


def test_a_resumed_sweep_counts_what_is_done_and_repeats_nothing(
    config: Config, capfd: pytest.CaptureFixture[str]
) -> None:
    said = []
    for trials in (2, 3, 4):
        nb.sweep(train, config, SPACE, n_trials=trials, display="text")
        said.append(capfd.readouterr().out)
    assert "trial 0 " in said[0]
    assert "the study already has 2 trials" in said[1]
    assert "the study already has 3 trials" in said[2]
    assert "the study already has 2 trials" not in said[2]
    assert "trial 3 " in said[2]
    assert not any(f"trial {number} " in said[2] for number in range(3))
    assert "4/4 trials" in said[2]


def test_a_complete_sweep_is_shown_again_and_not_run_again(
    config: Config, capfd: pytest.CaptureFixture[str]
) -> None:
    first = nb.sweep(train, config, SPACE, n_trials=2, display="text")
    printed = capfd.readouterr().out
    events = first.paths.events.read_bytes()
    again = nb.sweep(train, config, SPACE, n_trials=2, display="text")
    fewer = nb.sweep(train, config, SPACE, n_trials=1, display="off", wait=False).result()
    assert again.paths.folder == fewer.paths.folder == first.paths.folder
    assert again.best_params == first.best_params
    assert first.paths.events.read_bytes() == events
    shown = capfd.readouterr().out
    assert "it is complete and shown again; resume='never' runs a new one" in shown
    trials = [line for line in printed.splitlines() if line.startswith("trial ")]
    assert [line for line in shown.splitlines() if line.startswith("trial ")] == trials
    new = nb.sweep(train, config, SPACE, n_trials=2, display="off", resume="never")
    assert new.paths.folder != first.paths.folder
    latest = nb.sweep(train, config, SPACE, n_trials=2, display="off")
    assert latest.paths.folder == new.paths.folder


@pytest.mark.parametrize(
    ("asked", "done"),
    [
        ({"total": 4}, True),
        ({"total": 3, "timeout": 90.0}, True),
        ({"total": 5}, False),
        ({"timeout": 60.0}, False),
        ({}, False),
    ],
)
def test_a_sweep_is_complete_unless_more_trials_are_asked_for(
    asked: dict[str, float], done: bool, tmp_path: Path
) -> None:
    check_complete({"total": 4, "timeout": 60.0}, asked, done, tmp_path)


@pytest.mark.parametrize(
    ("asked", "done"),
    [({"timeout": 60.0}, True), ({"timeout": 61.0}, False), ({}, False), ({"total": 4}, False)],
)
def test_a_sweep_that_only_time_has_limited_is_complete_unless_there_is_more_time(
    asked: dict[str, float], done: bool, tmp_path: Path
) -> None:
    check_complete({"total": None, "timeout": 60.0}, asked, done, tmp_path)


def check_complete(
    before: dict[str, float | None], asked: dict[str, float], done: bool, folder: Path
) -> None:
    identity = Identity("m.train", "{}", {"train": "f"})
    log = EventLog(RunPaths.create(folder, "sweep").events)
    log.write(RunStarted(record=RECORD, search="sweep", identity=identity.hash, **before))
    log.write(RunEnded(status="completed"))
    log.close()
    limits = {"total": None, "timeout": None, **asked}
    wanted = WantedSearch(kind="sweep", identity=identity, **limits)
    found = complete(folder, wanted)
    assert (found is not None) == done
    assert len(list(unfinished(folder, wanted))) == (not done)


def test_a_report_has_the_curves_of_the_folds(config: Config) -> None:
    cv = nb.cross_validate(train, config, nb.make_folds([0, 1] * 6, k=2), display="off")
    page = nb.report(cv.paths.folder).read_text()
    assert "mean ± sd" in page
    for number in range(2):
        assert f">fold {number}<" in page
