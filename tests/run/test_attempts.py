"""The first and the last event of the newest attempt, found in files of any length and damage."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from nbtoolkit.errors import RunFileError
from nbtoolkit.run.attempts import (
    completed,
    first_event,
    kind_of,
    last_event,
    newest_plan,
    opening_event,
)
from nbtoolkit.run.events import (
    Event,
    EventLog,
    MetricsLogged,
    NoteAdded,
    PlanChanged,
    RunEnded,
    RunStarted,
    RunSubmitted,
)
from nbtoolkit.run.paths import RunPaths

STEP = MetricsLogged(values={"loss": 0.5, "rate": 1e-3, "samples_per_second": 1234.5}, step=1)


def written(folder: Path, *events: Event) -> RunPaths:
    log = EventLog(folder / "events.jsonl")
    for event in events:
        log.write(event)
    log.close(durable=False)
    return RunPaths(folder)


def started(attempt: int, **more: object) -> RunStarted:
    return RunStarted(attempt=attempt, **more)  # type: ignore[arg-type]


def test_the_newest_attempt_counts(tmp_path: Path) -> None:
    end = RunEnded(status="failed", error="ValueError: no")
    paths = written(tmp_path, started(1, function="m.f"), STEP, end)
    assert (first_event(paths) or started(0)).attempt == 1
    assert (last_event(paths) or RunEnded(status="")).status == "failed"
    written(tmp_path, started(2, search="cv"), STEP)
    assert (first_event(paths) or started(0)).attempt == 2
    assert last_event(paths) is None
    assert (opening_event(paths) or started(0)).function == "m.f"
    assert kind_of(first_event(paths)) == "cv"
    assert not completed(paths)
    written(tmp_path, RunEnded(status="completed"))
    assert completed(paths)


def test_a_submitted_attempt_has_not_ended(tmp_path: Path) -> None:
    paths = written(tmp_path, started(1), RunEnded(status="stopped"), RunSubmitted(attempt=2))
    first = first_event(paths)
    assert type(first) is RunSubmitted
    assert first.attempt == 2
    assert last_event(paths) is None


def test_a_plan_that_was_changed_is_the_newest(tmp_path: Path) -> None:
    paths = written(tmp_path, started(1, plan={"processes": 2}), PlanChanged(plan={"processes": 1}))
    assert newest_plan(paths) == {"processes": 1}
    written(tmp_path, started(2, plan={"processes": 4}))
    assert newest_plan(paths) == {"processes": 4}


def test_text_that_looks_like_an_event_is_none(tmp_path: Path) -> None:
    text = '{"type": "run", "t": 1.0, "attempt": 9}\n{"type": "ended", "status": "completed"}'
    config = {"model": {"type": "run", "other": {"type": "ended", "status": "completed"}}}
    paths = written(tmp_path, started(1, config=config), NoteAdded(text=text))
    assert (first_event(paths) or started(0)).attempt == 1
    assert last_event(paths) is None


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_lines_lie_across_the_blocks_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    paths = written(tmp_path, started(1), *[STEP] * count, RunEnded(status="completed"))
    for block in range(1, 200):
        monkeypatch.setattr("nbtoolkit.run.attempts._BLOCK", block)
        assert (first_event(paths) or started(0)).attempt == 1
        assert completed(paths)


def test_the_last_lines_of_other_ranks_do_not_hide_the_end(tmp_path: Path) -> None:
    paths = written(tmp_path, started(1), RunEnded(status="failed", error="E: no"), STEP, STEP)
    assert (last_event(paths) or RunEnded(status="")).status == "failed"


@pytest.mark.parametrize(
    "text", ["", "\n", "[1]\n", '{"type": "run", "t": 1.0, "run_id"', "\0" * 99]
)
def test_a_record_without_a_first_event_has_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "events.jsonl").write_text(text)
    paths = RunPaths(tmp_path)
    assert (first_event(paths), last_event(paths), opening_event(paths)) == (None, None, None)
    assert newest_plan(paths) == {}


@pytest.mark.timeout(20)
def test_what_is_no_file_is_an_error_and_not_waited_for(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    os.mkfifo(paths.events)
    os.mkfifo(paths.lock)
    for read in (first_event, last_event, newest_plan):
        with pytest.raises(RunFileError, match="it is not a regular file"):
            read(paths)
    assert opening_event(paths) is None
    with pytest.raises(OSError, match="it is not a regular file"):
        EventLog(paths.events)
    with pytest.raises(RunFileError, match="it is not a regular file"):
        paths.owned()


def test_a_long_record_is_read_from_its_end(tmp_path: Path) -> None:
    """100 MB: the end is found in a millisecond, and the first event in a second."""
    paths = written(tmp_path, started(1), STEP)
    line = paths.events.read_bytes().splitlines(keepends=True)[1]
    with paths.events.open("ab") as events:
        events.write(line * (100_000_000 // len(line)))
    written(tmp_path, RunEnded(status="completed"))
    began = time.perf_counter()
    assert completed(paths)
    found = time.perf_counter()
    assert (first_event(paths) or started(0)).attempt == 1
    ended = time.perf_counter()
    assert found - began < 0.1
    assert ended - found < 5.0
