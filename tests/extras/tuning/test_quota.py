"""Device-hours by host and week, from the runs' own events."""

from __future__ import annotations

import json
import os
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
from nbtoolkit.errors import TuningError
from nbtoolkit.extras.tuning.quota import week_of
from nbtoolkit.panel.cost import cost_text, quota_cost
from nbtoolkit.panel.form import FormState

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


def test_a_bundle_carries_the_hours_with_its_runs(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    name = "20261119T120000-a-0001"
    write_run(here, name, events=events(THURSDAY, 1, 2, "kaggle"))
    bundle = nb.pack(tmp_path / "x.bundle", source=here).path
    for _ in range(2):
        assert not nb.unpack(bundle, into=there).notes
        assert cells(nb.quota(there)) == cells(nb.quota(here))
    assert [*there.glob("quota*")] == [*here.glob("quota*")] == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff not JSON\n",
        b'{"type": "metrics", "t": 1.0, "values": {}}\n',
        b'{"type": "run", "t": NaN, "host": "kaggle", "plan": {}}\n',
        b'{"type": "run", "t": 1e300, "host": "kaggle", "plan": {}}\n',
        b'{"type": "run", "t": 5.0, "plan": {"devices": 5}}\n',
        b'{"type": "run", "t": 5.0, "plan": {"devices": ["x"], "device_names": [{}]}}\n',
    ],
)
def test_a_damaged_folder_is_named_and_the_others_count(tmp_path: Path, content: bytes) -> None:
    write_run(tmp_path, "20261119T120000-a-0001", events=events(THURSDAY, 1, 1, "colab"))
    damaged = write_run(tmp_path, "20261119T130000-b-0002")
    damaged.events.write_bytes(content)
    quota = nb.quota(tmp_path)
    assert [row.device_hours for row in quota.rows] == [1.0]
    assert quota.skipped == ("20261119T130000-b-0002",)
    assert "not counted: 1 folder with unreadable events: 20261119T130000-b" in repr(quota)


def test_events_that_are_no_file_do_not_block(tmp_path: Path) -> None:
    for name, make in {"fifo": os.mkfifo, "folder": os.mkdir}.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name / "events.jsonl")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "events.jsonl").symlink_to(tmp_path / "nowhere")
    assert nb.quota(tmp_path).skipped == ("fifo", "link")


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match="there is no folder"):
        nb.quota(tmp_path / "none")
    with pytest.raises(TuningError, match="0 hours"):
        nb.quota(tmp_path, hours=0)
    assert "no runs" in repr(nb.quota(tmp_path))


def test_real_runs_on_the_cpu_are_listed_with_no_gpu_hours(tmp_path: Path) -> None:
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path)}
    nb.launch(train, settings, processes=2)
    space = {"optim.lr": {"type": "float", "low": 0.1, "high": 0.9}}
    found = {"study": {"metric": "value", "direction": "maximize"}, "space": space}
    nb.sweep(train, settings, found, n_trials=3)
    quota = nb.quota(tmp_path)
    (row,) = quota.rows
    assert (row.device, row.runs, row.device_hours, row.used) == ("CPU", 4, 0.0, 0.0)
    assert quota.skipped == ()
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
    # As if it had run on a GPU.
    (record,) = tmp_path.glob("*/events.jsonl")
    first, *others = map(json.loads, record.read_text().splitlines())
    first["plan"] |= {"devices": ["GPU-0"], "device_names": ["Tesla T4"]}
    record.write_text("".join(json.dumps(event) + "\n" for event in (first, *others)))
    assert 0 < sum(row.device_hours for row in nb.quota(tmp_path).rows) < 60 / HOUR


def test_the_cost_of_a_search_is_told_in_hours_of_the_quota() -> None:
    config = Config().with_overrides({"runtime.quota_hours": 30})
    jobs = {"jobs": 60, "seconds": 540.0, "slots": 2}
    assert quota_cost(config, "kaggle", **jobs, devices=1) == "about 4.5 of your 30 GPU hours"
    assert quota_cost(config, "jupyter", **jobs, devices=1) == "about 9 of your 30 GPU hours"
    assert quota_cost(config, "jupyter", **jobs, devices=0) == "about 0 of your 30 GPU hours"
    assert quota_cost(Config(), "kaggle", **jobs, devices=1) == ""
    text = cost_text(FormState(config).validate(), 36.0, 2, folds=5, devices=1)
    cost = "5 folds = 5 trainings, about 2 min on 2 slots: about 0.05 of your 30 GPU hours"
    assert text == cost
