"""The table of runs, from folders in any state."""

from __future__ import annotations

import fcntl
import math
import os
from pathlib import Path

import pytest
from run_folders import NOON, PLAN, trained, write_run

from nbtoolkit.cards import html
from nbtoolkit.run.events import number_values
from nbtoolkit.run.paths import runs_in
from nbtoolkit.views.report import label, read_report, runs_below
from nbtoolkit.views.state import read_state
from nbtoolkit.views.text import curves_of, devices_of, final_values


def words(folder: Path) -> str:
    """Everything that the table of runs says."""
    return html(read_report(folder).overview.cards, images=False)


def test_a_run_that_ended_well_has_its_result_and_its_time(tmp_path: Path) -> None:
    [began, *reports] = trained({"val_loss": [0.5, 0.25]})
    ended = {"type": "ended", "status": "completed", "seconds": 2.0}
    diary = [{**began, "plan": PLAN}, *reports, ended]
    run = read_state(write_run(tmp_path, "20260101T000000-a-0001", events=diary).folder)
    assert (label(run), run.status, run.elapsed()) == ("a-0001", "completed", 2.0)
    assert final_values(run) == {"val_loss": 0.25}
    assert devices_of(run.plan) == "2 x Tesla T4, fp16"
    assert run.curves == {"val_loss": [(1, 0.5), (2, 0.25)]}
    assert "2 x Tesla T4, fp16" in words(tmp_path)


def test_seconds_are_those_of_all_attempts_and_a_step_counts_as_it_was_trained_last(
    tmp_path: Path,
) -> None:
    first = trained({"val_loss": [0.5, 0.4, 0.3]})
    again = trained({"val_loss": [0.45, 0.35]}, start=NOON + 3600)  # steps 1 and 2 once more
    run = read_state(write_run(tmp_path, "a", events=[*first, *again]).folder)
    assert (run.attempts, run.elapsed()) == (2, 5.0)
    assert run.curves["val_loss"] == [(1, 0.45), (2, 0.35)]
    assert "5.0 s, in 2 attempts" in words(tmp_path)


def test_without_reports_the_curves_are_what_was_logged(tmp_path: Path) -> None:
    logged = [{"type": "metrics", "values": {"loss": v, "lr": 0.1}, "step": v} for v in (1, 2)]
    logged.append({"type": "metrics", "values": {"loss": 3.0}, "step": None})
    run = read_state(write_run(tmp_path, "a", events=logged).folder)
    assert curves_of(run) == {"loss": [(1, 1.0), (2, 2.0), (3, 3.0)]}
    assert set(final_values(run)) == {"loss"}


def test_a_run_without_an_end_runs_while_it_has_an_owner(tmp_path: Path) -> None:
    paths = write_run(tmp_path, "a", events=trained({"val_loss": [1.0]}))
    assert read_state(paths.folder).status == "cut off"
    assert "its process died" in words(tmp_path)
    with paths.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_state(paths.folder).status == "running"
        assert final_values(read_state(paths.folder)) == {"val_loss": 1.0}


def test_a_failure_is_told_in_one_line_and_as_text(tmp_path: Path) -> None:
    error = "ValueError: <script>alert(1)</script>\n" + "x" * 999
    ended = {"type": "ended", "status": "failed", "seconds": 1.0, "error": error}
    write_run(tmp_path, "a", events=[*trained({"val_loss": [1.0]}), ended])
    told = words(tmp_path)
    assert "a: ValueError: &lt;script&gt;alert(1)&lt;/script&gt; xxx" in told
    assert len(told) < 3000


def test_of_damaged_files_the_rest_is_read(tmp_path: Path) -> None:
    paths = write_run(tmp_path, "a", events=trained({"val_loss": [1.0, 0.5]}))
    with paths.events.open("a") as diary:
        diary.write('[1]\n{"type": "report"}\n{"t": 1, "ty\n{"t": 2, "type": "report"')
    assert read_state(paths.folder).curves == {"val_loss": [(1, 1.0), (2, 0.5)]}
    assert "cannot be read" not in words(tmp_path)


def test_runs_are_found_in_folders_below_without_trials_folds_and_copies(tmp_path: Path) -> None:
    for place in ("20260102T000000-b-1", "deep/er/20260101T000000-a-1", "a/b/c/d/e/too-deep"):
        write_run(tmp_path, place, events=trained({"loss": [1.0]}))
    write_run(tmp_path / "20260102T000000-b-1", "trials/0000", events=trained({"loss": [1.0]}))
    (copy := tmp_path / "mlartifacts/0/artifacts").mkdir(parents=True)
    (copy / "config.yaml").write_text("{}")  # MLflow's, of a run's artifacts
    (tmp_path / "loop").symlink_to(tmp_path)
    names = [paths.run_id for paths in runs_below(tmp_path)]
    assert names == ["20260101T000000-a-1", "20260102T000000-b-1"]
    assert len(runs_below(tmp_path / names[1])) == 1  # a run's own folder


def test_an_empty_folder_is_no_error(tmp_path: Path) -> None:
    assert "no runs in this folder" in words(tmp_path)


def test_only_numbers_are_metrics() -> None:
    found = number_values({"a": 1, "b": True, "c": "x", "d": math.inf, "e": None})
    assert found == {"a": 1.0, "d": math.inf}
    assert number_values(None) == {}


@pytest.mark.parametrize("name", ["20260101T000000-a-0001", "a-0001", "2026-a"])
def test_a_name_is_the_id_without_its_time(tmp_path: Path, name: str) -> None:
    run = read_state(write_run(tmp_path, name).folder)
    assert label(run) == {"20260101T000000-a-0001": "a-0001"}.get(name, name)


def test_runs_of_one_second_are_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    made = ["20260412T101500-z-7f3a", "20260412T101500-a-0001", "20260412T101501-a-0002"]
    for age, name in enumerate(made):
        paths = write_run(tmp_path, name)
        paths.config.touch()
        os.utime(paths.config, ns=(age, age))
    assert [paths.run_id for paths in runs_below(tmp_path)] == made
    assert [paths.run_id for paths in runs_in(tmp_path)] == made[::-1]
