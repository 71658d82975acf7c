"""The trials of a sweep, read from real event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nbtoolkit.run.events import (
    CommandReceived,
    EventLog,
    EventReader,
    IntermediateReported,
    NoteAdded,
    RunStarted,
    TrialChanged,
)
from nbtoolkit.run.output import Screen
from nbtoolkit.search.study.table import SweepTable
from nbtoolkit.search.sweep_result import TableLines


@pytest.fixture
def diary(tmp_path: Path) -> Any:
    log = EventLog(tmp_path / "events.jsonl")
    yield log
    log.close()


def table_of(tmp_path: Path, **settings: Any) -> SweepTable:
    table = SweepTable(metrics=["val_accuracy"], **settings)
    table.read(EventReader(tmp_path / "events.jsonl").read())
    return table


def begins(diary: EventLog, number: int, **params: Any) -> None:
    diary.write(TrialChanged(number=number, state="running", params=params))


def ends(
    diary: EventLog, number: int, value: float | None, state: str = "complete", **more: Any
) -> None:
    fields = {"seconds": 10.0, **more}
    diary.write(TrialChanged(number=number, state=state, value=value, **fields))


def some_trials(diary: EventLog) -> None:
    for number in range(4):
        begins(diary, number, **{"optim.lr": 0.1 / (number + 1), "model.hidden": 32 * number})
    ends(diary, 0, 0.91, best=True)
    ends(diary, 1, 0.95, best=True)
    ends(diary, 2, None, "pruned", reason="below the median at step 3")
    diary.write(IntermediateReported(number=3, step=2, value=0.5))


def test_a_trial_that_is_run_again_is_counted_once(diary: EventLog, tmp_path: Path) -> None:
    some_trials(diary)
    ends(diary, 3, None, "failed", reason="died")
    begins(diary, 3, **{"optim.lr": 0.025, "model.hidden": 96})
    ends(diary, 3, 0.99, best=True)
    table = table_of(tmp_path)
    assert [table.count(s) for s in ("complete", "pruned", "failed", "running")] == [3, 1, 0, 0]
    assert [trial.number for trial in table.best] == [3]
    assert [trial.number for trial in table.last(9)] == [3, 2, 1, 0]


def test_what_ran_when_the_session_died_waits_in_the_next(diary: EventLog, tmp_path: Path) -> None:
    some_trials(diary)
    diary.write(RunStarted(run_id="x"))
    table = table_of(tmp_path)
    assert (table.running, table.count("waiting")) == ([], 1)
    assert table.best[0].number == 1


def test_the_end_is_expected_at_the_pace_so_far_or_at_the_deadline() -> None:
    table = SweepTable(n_trials=8)
    assert table.ends_at(0.0) is None
    for number in range(4):
        table.update(TrialChanged(number=number, state="running"))
    for number in range(2):
        ended = {"state": "complete", "value": 1.0, "seconds": 10.0}
        table.update(TrialChanged(t=10.0, number=number, **ended))
    # 4 to start and 2 half done, 10 s each, two at a time
    assert table.ends_at(5.0) == pytest.approx(5.0 + (4 * 10 + 2 * 5) / 2)
    table.deadline = 12.0
    assert table.ends_at(5.0) == 12.0


def test_trials_that_a_handle_adds_count_too(diary: EventLog, tmp_path: Path) -> None:
    some_trials(diary)
    diary.write(CommandReceived(op="pause"))
    diary.write(CommandReceived(op="add_trials", n=5))
    assert table_of(tmp_path, n_trials=10).n_trials == 15


def test_several_objectives_have_a_front() -> None:
    table = SweepTable(metrics=["accuracy", "seconds"], directions=["maximize", "minimize"])
    for number, values in enumerate([(0.9, 5.0), (0.8, 1.0), (0.7, 2.0), (0.95, 5.0), (0.8, 1.0)]):
        table.update(TrialChanged(number=number, state="complete", values=list(values)))
    # 2 is beaten by 1, and 0 by 3; 1 and 4 are equal
    assert [trial.number for trial in table.best] == [1, 3, 4]


def test_in_a_script_each_trial_that_ends_is_a_line(
    diary: EventLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some_trials(diary)
    diary.write(NoteAdded(level="warning", text="no winner yet"))
    live = TableLines(SweepTable(metrics=["val_accuracy"]), Screen("lines", ""))
    for event in EventReader(tmp_path / "events.jsonl").read():
        live.event(event)
        live.pump()
    live.close()
    assert capsys.readouterr().out.splitlines() == [
        "trial 0  complete  val_accuracy 0.91  (best)  optim.lr=0.1  model.hidden=0  10 s",
        "trial 1  complete  val_accuracy 0.95  (best)  optim.lr=0.05  model.hidden=32  10 s",
        "trial 2  pruned  optim.lr=0.03333  model.hidden=64  10 s  below the median at step 3",
        "warning: no winner yet",
    ]


def test_display_off_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    live = TableLines(SweepTable(), Screen("off", ""))
    live.event(NoteAdded(level="warning", text="psst"))
    live.pump()
    live.close()
    assert capsys.readouterr().out == ""
