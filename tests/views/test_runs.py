"""The list of runs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from harmless import EVIL
from run_folders import NOON, hold_lock, sweep, trained, trial, write_run

from nbtoolkit.run.paths import RunPaths
from nbtoolkit.views.runs import list_runs, newest


def ended_run(parent: Path, name: str, result: dict[str, Any], minutes: float = 0.0) -> RunPaths:
    kind = result.get("kind", "run")
    ended = {name: value for name, value in result.items() if name != "kind"}
    paths = write_run(parent, name, kind=kind, events=[{"type": "run"}], ended=ended)
    at = NOON + 60 * minutes
    os.utime(paths.events, (at, at))
    return paths


def texts(parent: Path) -> list[str]:
    return [entry.text for entry in list_runs(parent)]


# --- list ---


def test_runs_that_ended_are_listed_by_their_results(tmp_path: Path) -> None:
    counts = {"complete": 12, "pruned": 8}
    summary = {"counts": counts, "best_value": 0.36021, "metrics": ["rmse"]}
    friedman = {"kind": "sweep", "status": "completed", "summary": summary}
    scores = {"f1": {"mean": 0.91234, "std": 0.01}}
    folds = {"kind": "cv", "status": "stopped"}
    folds |= {"summary": {"folds": 5, "complete": 3, "scores": scores}}
    single = {"status": "completed", "metrics": {"val_loss": 0.25, "val_f1": 0.9}}
    ended_run(tmp_path, "20260101T000003-friedman-843e", friedman, minutes=12)
    ended_run(tmp_path, "20260101T000002-folds-0000", folds, minutes=180)
    ended_run(tmp_path, "20260101T000001-train-1234", single)
    failure = {"status": "failed", "error": f"E: {EVIL}"}
    ended_run(tmp_path, "20260101T000000-bad-1234", failure)
    assert texts(tmp_path) == [
        "friedman-843e · completed · 20 trials · best 0.3602 · 2026-01-01 00:12 UTC",
        "folds-0000 · stopped · 3/5 folds · f1 0.9123 · 2026-01-01 03:00 UTC",
        "train-1234 · completed · val_loss 0.25 · 2026-01-01 00:00 UTC",
        texts(tmp_path)[3],
    ]
    assert texts(tmp_path)[3].startswith("bad-1234 · failed · E: <script>")


def test_what_runs_and_what_died_is_listed_without_its_events(tmp_path: Path) -> None:
    paths = sweep(tmp_path, [trial(0, value=0.5, best=True), trial(1, "running")])
    other = write_run(tmp_path, "train-0001", events=trained({"val_loss": [0.5, 0.25]}))
    with hold_lock(paths):
        entries = {one.folder: one for one in list_runs(tmp_path)}
        assert entries[paths.folder].status == "running"
        assert entries[paths.folder].text == "sweep-0001 · running"
        assert entries[other.folder].text.startswith("train-0001 · interrupted · 20")
    assert sorted(texts(tmp_path))[0].startswith("sweep-0001 · interrupted · 20")


def test_the_newest_is_what_runs_else_the_last(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") is None
    old = write_run(tmp_path, "20260101T000000-a-0000", events=[{"type": "run"}])
    new = ended_run(tmp_path, "20260102T000000-b-0000", {"status": "completed"})
    assert newest(tmp_path) == new.folder
    with hold_lock(old):
        assert newest(tmp_path) == old.folder


def test_damaged_files_make_an_entry_and_no_error(tmp_path: Path) -> None:
    broken = write_run(tmp_path, "a", events=[{"type": "run"}])
    broken.events.write_text("{\n[]\n")
    odd = {"kind": "sweep", "status": "completed", "summary": {"counts": [], "best_value": "x"}}
    ended_run(tmp_path, "b", odd)
    ended_run(tmp_path, "c", {"status": 7, "metrics": [1], "summary": {"scores": {"f1": None}}})
    empty = tmp_path / "d"
    empty.mkdir()
    (empty / "events.jsonl").write_text("[]")
    assert len(list_runs(tmp_path)) == 4


def test_the_list_ends_and_shows_a_result_that_changed(tmp_path: Path) -> None:
    for number in range(5):
        name = f"2026010{number + 1}T000000-a-0000"
        paths = ended_run(tmp_path, name, {"status": "completed", "metrics": {"f1": number}})
    assert [entry.text.split(" · ")[2] for entry in list_runs(tmp_path, most=2)] == ["f1 4", "f1 3"]
    with paths.events.open("a") as events:
        ended = {"t": time.time(), "type": "ended", "status": "stopped", "metrics": {"f1": 9}}
        events.write(json.dumps(ended) + "\n")
    assert texts(tmp_path)[0].startswith("a-0000 · stopped · f1 9 · 20")


def test_a_large_output_folder_is_listed_quickly(tmp_path: Path) -> None:
    report = {"type": "intermediate", "number": 0, "step": 1, "value": 0.5}
    paths = sweep(tmp_path, [report] * 50_000, count=5000)
    for number in range(49):
        ended_run(tmp_path, f"run-{number}", {"status": "completed", "metrics": {"f1": 1}})
    with hold_lock(paths):
        seconds = []
        for _ in range(3):
            start = time.process_time()
            assert len(list_runs(tmp_path)) == 50
            seconds.append(time.process_time() - start)
    assert min(seconds) < 0.1, seconds  # 0.01 here; the events alone would take 0.5
