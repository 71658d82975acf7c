"""Device-hours by host and week, from the runs' own events."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from command_line import command
from run_folders import write_run

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import RunFileError, TuningError
from nbtoolkit.panel.form import FormState
from nbtoolkit.panel.setup import cost_text as panel_cost_text
from nbtoolkit.run.device_ledger import LEDGER, cost_text, read_ledger, update_ledger, week_of
from nbtoolkit.run.paths import TRASH
from nbtoolkit.views.runs import move_to_trash

HOUR = 3600.0


def unix(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc).timestamp()


THURSDAY = unix("2026-11-19T12:00:00")


def train(config: nb.Config, ctx: nb.RunContext) -> float:
    if config.model.get("endless"):
        ctx.log({"alive": 1.0})
        time.sleep(120)
    ctx.log({"now": 1.0})
    return config.optim.lr


def events(start: float, hours: float, gpus: int, host: str, **more: Any) -> list[dict[str, Any]]:
    """One attempt: its first event, one more, and its end unless ``killed``."""
    plan = {"devices": [f"GPU-{i}" for i in range(gpus)], "device_names": ["Tesla T4"] * gpus}
    begun = {"type": "run", "t": start, "host": host, "plan": plan, "config": {}, **more}
    last = {"t": start + hours * HOUR}
    if more.pop("killed", False):
        return [begun, {"type": "metrics", "values": {"loss": 1.0}, **last}]
    return [begun, {"type": "ended", "status": "completed", **last}]


def cells(quota: nb.Quota) -> list[tuple[Any, ...]]:
    return [
        (row.host, row.week, row.device, row.runs, round(row.device_hours, 6), round(row.used, 6))
        for row in quota.rows
    ]


def test_hours_of_attempts_of_killed_runs_and_of_trials_count(tmp_path: Path) -> None:
    two = [*events(THURSDAY, 1, 2, "jupyter", killed=True)]
    two += events(THURSDAY + 5 * HOUR, 0.5, 1, "jupyter")
    write_run(tmp_path, "20261119T120000-a-0001", events=two)
    sweep = [{"type": "run", "t": THURSDAY, "search": "sweep"}, {"type": "note", "text": "x"}]
    folder = write_run(tmp_path, "20261119T120000-s-0002", events=sweep).folder
    for number in (0, 1):
        write_run(folder / "trials", f"000{number}", events=events(THURSDAY, 1, 1, "jupyter"))
    quota = nb.quota(tmp_path, hours=30)
    assert cells(quota) == [("jupyter", "2026-11-16", "Tesla T4", 3, 4.5, 4.5)]
    assert repr(quota).splitlines()[1].split()[-4:] == ["4.50", "4.50", "30", "25.50"]
    assert "<td" in quota._repr_html_()
    assert cells(nb.quota(tmp_path)) == cells(quota)


def test_a_session_of_kaggle_counts_once_and_its_week_begins_on_saturday(tmp_path: Path) -> None:
    friday = unix("2026-11-20T22:00:00")
    write_run(tmp_path, "20261120T220000-a-0001", events=events(friday, 3, 2, "kaggle"))
    # Two trials side by side, on one GPU each.
    write_run(tmp_path, "20261121T020000-b-0002", events=events(friday + 4 * HOUR, 1, 1, "kaggle"))
    other = events(friday + 4.5 * HOUR, 1, 1, "kaggle")
    write_run(tmp_path, "20261121T023000-c-0003", events=other)
    assert cells(nb.quota(tmp_path)) == [
        ("kaggle", "2026-11-21", "Tesla T4", 3, 4.0, 2.5),
        ("kaggle", "2026-11-14", "Tesla T4", 1, 4.0, 2.0),
    ]
    assert week_of("jupyter", friday) == week_of("script", unix("2026-11-16T00:00:00"))


def test_the_present_week_has_hours_used_and_left(tmp_path: Path) -> None:
    now = max(time.time() - 10, week_of("kaggle", time.time()).timestamp())
    run = events(now, 10 / 3600, 2, "kaggle")
    write_run(tmp_path, "20261120T220000-a-0001", events=run)
    quota = nb.quota(tmp_path, hours=0.01)
    assert quota.used == pytest.approx(10 / 3600, abs=1e-6)
    assert quota.left == pytest.approx(0.01 - 10 / 3600, abs=1e-6)
    assert nb.quota(tmp_path).left is None


def test_deleted_and_trashed_runs_count(tmp_path: Path) -> None:
    names = [f"20261119T12000{i}-a-000{i}" for i in range(3)]
    for name in names:
        write_run(tmp_path, name, events=events(THURSDAY, 1, 1, "colab"))
    move_to_trash(tmp_path / names[0])
    shutil.rmtree(tmp_path / TRASH)
    before = nb.quota(tmp_path)
    assert [row.device_hours for row in before.rows] == [3.0]
    move_to_trash(tmp_path / names[1])
    shutil.rmtree(tmp_path / names[2])
    assert cells(nb.quota(tmp_path)) == cells(before)


def test_the_ledger_travels_with_a_bundle_and_counts_once(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    name = "20261119T120000-a-0001"
    write_run(here, name, events=events(THURSDAY, 1, 1, "kaggle"))
    deleted = write_run(here, "20261118T120000-b-0002", events=events(THURSDAY, 2, 1, "kaggle"))
    before = nb.quota(here)
    shutil.rmtree(deleted.folder)
    bundle = nb.pack(tmp_path / "x.bundle", source=here).path
    # The other session resumed the same run, and has a run of its own.
    shutil.copytree(here / name, there / name)
    with (there / name / "events.jsonl").open("a") as file:
        for event in events(THURSDAY + 9 * HOUR, 3, 1, "kaggle", attempt=2):
            file.write(json.dumps(event) + "\n")
    own = events(THURSDAY + 20 * HOUR, 1, 1, "kaggle")
    write_run(there, "20261120T080000-c-0003", events=own)
    nb.quota(there)
    for _ in range(2):
        nb.unpack(bundle, into=there)
        # Both attempts and the third run; the deleted run overlaps with the first attempt.
        assert [row.device_hours for row in nb.quota(there).rows] == [7.0]
        assert [row.used for row in nb.quota(there).rows] == [2 + 3 + 1]
    fresh = nb.unpack(bundle, into=tmp_path / "fresh")
    assert not fresh.notes
    assert cells(nb.quota(tmp_path / "fresh")) == cells(before)


def test_a_damaged_ledger_of_a_bundle_is_left_out_and_a_damaged_own_one_is_reported(
    tmp_path: Path,
) -> None:
    here = tmp_path / "here"
    write_run(here, "20261119T120000-a-0001", events=events(THURSDAY, 1, 1, "kaggle"))
    (here / LEDGER).write_text('{"x": {"unknown": 1}}')
    with pytest.raises(RunFileError, match=r"quota\.json cannot be read: TypeError"):
        nb.quota(here)
    (here / LEDGER).write_text('{"cut off')
    with pytest.raises(RunFileError, match=r"quota\.json cannot be read"):
        nb.quota(here)
    bundle = nb.pack(tmp_path / "x.bundle", source=here).path
    unpacked = nb.unpack(bundle, into=tmp_path / "there")
    assert any("quota.json" in note for note in unpacked.notes)
    assert nb.quota(tmp_path / "there").rows[0].device_hours == 1.0


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match="there is no folder"):
        nb.quota(tmp_path / "none")
    with pytest.raises(TuningError, match="0 hours"):
        nb.quota(tmp_path, hours=0)
    assert "no runs" in repr(nb.quota(tmp_path))


def test_real_runs_on_the_cpu_are_listed_with_no_gpu_hours(tmp_path: Path) -> None:
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path)}
    result = nb.launch(train, settings, processes=2)
    space = {"optim.lr": {"type": "float", "low": 0.1, "high": 0.9}}
    found = {"study": {"metric": "value", "direction": "maximize"}, "space": space}
    swept = nb.sweep(train, {**settings, "runtime.quota_hours": 30}, found, n_trials=3)
    (row,) = nb.quota(tmp_path).rows
    assert (row.device, row.runs, row.device_hours, row.used) == ("CPU", 4, 0.0, 0.0)
    ledger = read_ledger(tmp_path)
    (entry,) = (one for one in ledger.values() if one.run == result.paths.run_id)
    assert entry.seconds == pytest.approx(result.seconds, abs=0.5)
    assert entry.completed
    notes = (swept.paths.folder / "events.jsonl").read_text()
    assert "this sweep will cost about 0 of your 30 GPU hours" in notes
    printed = command(tmp_path, "quota", "--source", str(tmp_path), "--hours", "30")
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.split()[:2] == ["host", "week"]
    assert command(tmp_path, "quota", "--source", "none").returncode == 2


@pytest.mark.long
def test_a_killed_run_counts_until_its_last_event(tmp_path: Path) -> None:
    """The whole session is killed: no process can write the end of the run."""
    settings = {
        "tracking.mlflow": False,
        "runtime.output_dir": str(tmp_path),
        "model": {"endless": True},
    }
    lines = f"import test_quota, nbtoolkit as nb\nnb.launch(test_quota.train, {settings!r})\n"
    program = [sys.executable, "-c", lines]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environ = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(program, env=environ, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while not any("alive" in one.read_text() for one in tmp_path.glob("*/events.jsonl")):
            assert time.monotonic() < until
            time.sleep(0.1)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    (usage,) = update_ledger(tmp_path)
    assert not usage.completed
    assert 0 < usage.seconds < 60


def test_the_cost_of_a_search_is_told_in_hours_of_the_quota() -> None:
    config = Config().with_overrides({"runtime.quota_hours": 30})
    jobs = {"jobs": 60, "seconds": 540.0, "slots": 2}
    assert cost_text(config, "kaggle", **jobs, devices=1) == "about 4.5 of your 30 GPU hours"
    assert cost_text(config, "jupyter", **jobs, devices=1) == "about 9 of your 30 GPU hours"
    assert cost_text(config, "jupyter", **jobs, devices=0) == "about 0 of your 30 GPU hours"
    assert cost_text(Config(), "kaggle", **jobs, devices=1) == ""
    text = panel_cost_text(FormState(config).validate(), 36.0, 2, folds=5, devices=1)
    cost = "5 folds = 5 trainings, about 2 min on 2 slots: about 0.05 of your 30 GPU hours"
    assert text == cost
