"""Events are read as they were written; a damaged line costs only itself."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from dataclasses import MISSING, FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from nbtoolkit.run.events import (
    RECORD,
    CheckpointSaved,
    CommandReceived,
    DevicesSampled,
    Event,
    EventLog,
    EventReader,
    FoldChanged,
    IntermediateReported,
    MetricsLogged,
    MetricsReported,
    NoteAdded,
    PlanChanged,
    RankPhaseChanged,
    RunEnded,
    RunStarted,
    RunSubmitted,
    StopRequested,
    TrialChanged,
    decode,
    encode,
)

WHOLE: list[Event] = [
    RunStarted(
        t=1.5,
        run_id="20260101T000000-a-0001",
        attempt=2,
        record=RECORD,
        identity="0123",
        code={"train": "4567"},
        detached=True,
        total=7,
        timeout=60.0,
        function="module.train",
        host="kaggle",
        versions={"python": "3.11.7"},
        config={"seed": 0, "train": {"epochs": 2, "max_grad_norm": None}},
        search="sweep",
        params={"optim.lr": 0.1},
        plan={"processes": 2},
    ),
    RankPhaseChanged(t=1.5, rank=1, phase="ready", pid=7),
    NoteAdded(t=1.5, level="warning", text="größer, in two\nlines"),
    MetricsLogged(t=1.5, values={"loss": 0.5, "worst": math.inf}, step=3),
    MetricsReported(t=1.5, values={"loss": 0.5}, step=3, decision="pruned"),
    CheckpointSaved(t=1.5, path="checkpoints/best.pt", step=3, kind="best"),
    DevicesSampled(t=1.5, readings=[{"rank": 0, "cpu": 0.5}, {"index": 0, "uuid": "GPU-1"}]),
    StopRequested(t=1.5, reason="enough", grace=5.0),
    TrialChanged(
        t=1.5,
        number=7,
        state="complete",
        params={"optim.lr": 0.1, "model.kind": "mlp"},
        value=0.5,
        values=[0.5],
        seconds=2.0,
        reason="as an example",
        folder="trials/0007",
        best=True,
    ),
    IntermediateReported(t=1.5, number=7, step=1, value=0.25),
    FoldChanged(
        t=1.5,
        number=7,
        fold=2,
        state="complete",
        metrics={"loss": 0.5},
        seconds=2.0,
        reason="as an example",
        folder="trials/0007/fold-2",
    ),
    CommandReceived(t=1.5, op="add_trials", n=3),
    RunSubmitted(t=1.5, record=RECORD, run_id="20260101T000000-a-0001", identity="0123"),
    PlanChanged(t=1.5, plan={"processes": 1}),
    RunEnded(
        t=1.5,
        status="failed",
        seconds=2.0,
        metrics={"loss": 0.5},
        processes=2,
        checkpoint="checkpoints/last.pt",
        summary={"best": 3},
        error="ValueError: no",
        traceback="Traceback:\n",
        rank=1,
        notes=["as an example"],
    ),
]

LEAST: list[Event] = [
    RunSubmitted(),
    RunStarted(),
    PlanChanged(plan={}),
    RankPhaseChanged(rank=0, phase="started"),
    NoteAdded(text="x"),
    MetricsLogged(values={}),
    MetricsReported(values={}),
    CheckpointSaved(path="x"),
    DevicesSampled(readings=[]),
    StopRequested(reason="x"),
    TrialChanged(number=0, state="running"),
    IntermediateReported(number=0, step=0, value=0.0),
    FoldChanged(fold=0, state="running"),
    CommandReceived(op="pause"),
    RunEnded(status="completed"),
]


def fields(event: Event) -> dict[str, Any]:
    """What a line says."""
    found: dict[str, Any] = json.loads(encode(event))
    return found


def name_of(event: Event) -> str:
    return event.type


@pytest.mark.parametrize("events", [WHOLE, LEAST])
def test_every_type_is_here(events: list[Event]) -> None:
    assert {type(event) for event in events} == {*Event.__subclasses__(), RunStarted}
    assert len({event.type for event in events}) == len(events)


@pytest.mark.parametrize("event", WHOLE, ids=name_of)
def test_what_is_encoded_is_decoded(event: Event) -> None:
    line = encode(event)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert list(fields(event))[:2] == ["type", "t"]
    assert decode(line) == decode(line.decode()) == event


@pytest.mark.parametrize("event", LEAST, ids=name_of)
def test_what_is_missing_or_null_has_its_default(event: Event) -> None:
    written = fields(replace(event, t=1.5))
    known = {name: written[name] for name in ("t", *needed(event))}
    default = type(event)(**known)
    known["type"] = event.type
    assert decode(json.dumps(known)) == default
    optional = dict.fromkeys(written.keys() - known.keys())
    assert decode(json.dumps({**known, **optional, "of_another_version": [1]})) == default


@pytest.mark.parametrize("event", LEAST, ids=name_of)
def test_a_line_that_lacks_what_it_needs_is_left_out(event: Event) -> None:
    written = fields(replace(event, t=1.5))
    for name in ("t", "type", *needed(event)):
        assert decode(json.dumps({**written, name: None})) is None, name
        assert decode(json.dumps({key: written[key] for key in written if key != name})) is None


@pytest.mark.parametrize("event", WHOLE, ids=name_of)
def test_a_line_with_a_value_of_another_type_is_left_out(event: Event) -> None:
    written = fields(event)
    for name, value in written.items():
        other = {"a": 1} if isinstance(value, list) else [value]
        assert decode(json.dumps({**written, name: other})) is None, name


def needed(event: Event) -> list[str]:
    """The fields without a default."""
    found = dataclasses.fields(event)
    return [f.name for f in found if f.default is MISSING and f.default_factory is MISSING]


DAMAGED = [
    "",
    "\n",
    "{}",
    "[1]",
    "1",
    "null",
    '"run"',
    '{"t": 1, "type": "tri',
    '{"t": 1, "type": "unheard of"}',
    '{"t": 1, "type": ["run"]}',
    '{"t": "1", "type": "run"}',
    "[" * 100_000,
    "\x00",
    '{"t": ' + "1" * 5000 + ', "type": "ru',
]


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_is_left_out(line: str) -> None:
    assert decode(line) is None
    assert decode(line.encode() + b"\xff") is None


def test_a_path_that_is_no_utf_8_is_kept() -> None:
    event = CheckpointSaved(t=1.5, path="out\udcff/last.pt")
    assert decode(encode(event)) == event


def test_a_reader_passes_over_what_is_damaged_and_waits_for_half_a_line(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    good, late = encode(WHOLE[0]), encode(WHOLE[-1])
    file.write_bytes(b"".join(f"{line}\n".encode() for line in DAMAGED) + good + late[:10])
    reader = EventReader(file)
    assert list(reader.read()) == [WHOLE[0]]
    with file.open("ab") as opened:
        opened.write(late[10:])
    assert list(reader.read()) == [WHOLE[-1]]
    assert list(EventReader(file, reader.offset).read()) == []


def test_an_event_behind_a_cut_line_has_a_line_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(encode(WHOLE[0]) + encode(WHOLE[1])[:10])
    log = EventLog(file)
    log.write(WHOLE[2])
    log.close()
    assert list(EventReader(file).read()) == [WHOLE[0], WHOLE[2]]


def test_an_event_gets_its_time_when_it_is_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    event = NoteAdded(text="x")
    before = time.time()
    log.write(event)
    log.write(WHOLE[2])
    log.close()
    first, second = EventReader(tmp_path / "events.jsonl").read()
    assert before - 1e-6 <= first.t <= time.time() + 1e-6
    assert (event.t, replace(first, t=0.0)) == (0.0, event)
    assert second == WHOLE[2]


def test_an_event_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        WHOLE[2].text = "y"  # type: ignore[misc,union-attr]


def test_threads_write_whole_events(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")

    def write(name: str) -> None:
        for _ in range(200):
            log.write(NoteAdded(level=name, text=name * 500))

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    events = list(EventReader(tmp_path / "events.jsonl").read())
    assert len(events) == 600
    assert all(event.text == event.level * 500 for event in events)


def test_a_closed_log_takes_nothing_more(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.close()
    with (tmp_path / "another").open("wb"), pytest.raises(OSError, match="Bad file descriptor"):
        log.write(NoteAdded(text="late"))
    assert (tmp_path / "another").read_bytes() == b""
