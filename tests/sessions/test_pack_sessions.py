"""A session that stops at its deadline resumes elsewhere, with the results of one session."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from host_sessions import FIT, FOLDS, PIPELINE, SWEEP, Session, write_steps

import nbtoolkit as nb
from nbtoolkit.run.events import EventReader
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.sessions.bundle import DEFAULT_NAME

pytestmark = pytest.mark.timeout(900)  # three sessions

# No session of this machine is an hour from its end, whatever it runs on.
UNHURRIED = {"runtime.session_limit": None}
CUT_OFF = {**UNHURRIED, "runtime.time_budget": 4.0}
# Seconds a step of the first session, whose 12 epochs of 6 steps would take 21 s.
WAIT = 0.3


def stops_without_a_checkpoint(config: nb.Config, ctx: Any) -> None:
    ctx.report({"loss": 1.0}, step=0)
    raise nb.RunStopped("deadline")


def test_an_unpacked_run_without_a_checkpoint_starts_at_the_beginning_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(folder: str, **settings: Any) -> str:
        settings |= {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path / folder)}
        config = nb.load_config(env=None, overrides=settings)
        nb.launch(stops_without_a_checkpoint, config, processes=1, display="text")
        return capsys.readouterr().out

    assert "not resumed" not in launch("first")
    bundle = nb.pack(tmp_path, source=tmp_path / "first").path
    [run] = nb.unpack(bundle, into=tmp_path / "second").new
    said = f"not resumed: the unfinished run {Path(run).name} has these settings and this code, but"
    assert f"warning: {said} no checkpoint; this run starts at the beginning" in launch("second")
    assert "not resumed" not in launch("second", **{"optim.lr": 0.5})


def two_sessions(home: Path, work: str, **overrides: Any) -> tuple[Session, Session, Session]:
    """A session cut off by its deadline, one that goes on from its bundle alone, an undisturbed."""
    first = Session(home / "first", work, WAIT, **CUT_OFF, **overrides)
    quiet = {**overrides, "tracking.mlflow": False}
    undisturbed = Session(home / "undisturbed", work, **UNHURRIED, **quiet)
    assert first.told["status"] == "deadline", first.output
    (home / "second").mkdir(exist_ok=True)
    shutil.move(home / "first" / DEFAULT_NAME, home / "second")
    shutil.rmtree(home / "first")
    return first, Session(home / "second", work, **UNHURRIED, **overrides), undisturbed


@pytest.mark.long
def test_a_fit_goes_on_in_the_next_session_and_ends_with_the_metrics_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    pytest.importorskip("mlflow")
    first, second, undisturbed = two_sessions(tmp_path, FIT)
    assert "packed for the next session: PackResult(1 run, " in first.output
    assert "resuming the unfinished run" in second.output
    assert second.told["status"] == "completed"
    assert second.told["metrics"] == undisturbed.told["metrics"]

    folder = Path(second.told["folder"])
    assert [folder.name] == second.told["unpacked"] == [Path(first.told["folder"]).name]
    events = EventReader(RunPaths(folder).events).read()
    assert [event.attempt for event in events if event.type == "run"] == [1, 2]
    with closing(sqlite3.connect(folder.parent / "mlflow.db")) as database:
        ((status, uri),) = database.execute("select status, artifact_uri from runs").fetchall()
    assert status == "FINISHED"
    assert uri.startswith((tmp_path / "second").as_uri())


@pytest.mark.long
def test_a_sweep_goes_on_in_the_next_session_with_the_trials_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    first, second, undisturbed = two_sessions(tmp_path, SWEEP, **{"tracking.mlflow": False})
    assert len(first.told["metrics"]) < 4
    assert "resuming the sweep" in second.output
    assert second.told["status"] == "completed"
    assert second.told["metrics"] == undisturbed.told["metrics"]
    assert second.told["best"] == undisturbed.told["best"]


@pytest.mark.long
def test_folds_go_on_in_the_next_session(tmp_path: Path) -> None:
    _, second, undisturbed = two_sessions(tmp_path, FOLDS, **{"tracking.mlflow": False})
    assert second.told["status"] == "completed"
    assert second.told["metrics"] == undisturbed.told["metrics"]


@pytest.mark.long
def test_a_pipeline_goes_on_in_the_next_session_with_the_step_that_was_cut_off(
    tmp_path: Path,
) -> None:
    for name in ("first", "second", "undisturbed"):
        write_steps(tmp_path / name)
    _, second, undisturbed = two_sessions(tmp_path, PIPELINE, **{"tracking.mlflow": False})
    assert second.told["status"] == "completed"
    assert second.told["steps"] == {"first": "skipped", "second": "done"}
    assert second.told["metrics"] == undisturbed.told["metrics"]
