"""What handles write into a run's folder: requests to stop, and commands to a search."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nbtoolkit.run.events import EventReader, NoteAdded
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.record import RunRecord
from nbtoolkit.wire.messages import SearchCommand, StopRequest

ASKED = StopRequest(reason="a handle asked", grace=None)


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    return RunRecord(RunPaths(tmp_path), deadline=None)


def test_no_request(record: RunRecord) -> None:
    assert record.stop_requested() is None
    assert record.commands_requested() == []


def test_a_request_is_followed_once(record: RunRecord) -> None:
    record.paths.stop.write_text(json.dumps({"reason": "enough", "grace": 2.0}))
    assert record.stop_requested() == StopRequest(reason="enough", grace=2.0)
    assert record.stop_requested() is None


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda file: file.write_text('{"reason": "cu'), id="cut"),
        pytest.param(lambda file: file.write_text("[1]"), id="a list"),
        pytest.param(lambda file: file.touch(), id="empty, made by touch"),
        pytest.param(os.mkfifo, id="a FIFO, which a plain read would wait for"),
        pytest.param(os.mkdir, id="a folder"),
    ],
)
def test_anything_of_the_name_asks_to_stop(record: RunRecord, make: Callable[[Path], None]) -> None:
    make(record.paths.stop)
    assert record.stop_requested() == ASKED


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(os.mkfifo, id="a FIFO"),
        pytest.param(lambda file: file.write_text('{"op": "pau'), id="cut"),
        pytest.param(lambda file: file.write_text('{"op": "quit"}'), id="unknown"),
        pytest.param(lambda file: file.write_text('{"op": "stop_trial", "n": "best"}'), id="type"),
    ],
)
def test_what_is_no_command_is_named_and_the_next_one_followed(
    record: RunRecord, make: Callable[[Path], None]
) -> None:
    record.paths.commands.mkdir()
    make(record.paths.commands / "1.json")
    (record.paths.commands / "2.json").write_text(json.dumps({"op": "add_trials", "n": 3}))
    assert record.commands_requested() == [SearchCommand(op="add_trials", n=3)]
    assert record.commands_requested() == []
    [note] = EventReader(record.paths.events).read()
    assert isinstance(note, NoteAdded)
    assert "1.json holds no command of a search" in note.text
