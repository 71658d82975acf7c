"""The tables of sweeps and folds, built from real event files."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

from nbtoolkit.crossval.cv_result import FoldTable
from nbtoolkit.run.events import (
    CommandReceived,
    EventLog,
    EventReader,
    FoldChanged,
    IntermediateReported,
    NoteAdded,
    RunStarted,
    TrialChanged,
)
from nbtoolkit.run.output import Screen
from nbtoolkit.search.sweep_result import TableLines
from nbtoolkit.study.table import SweepTable


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


def test_the_summary_counts_states_and_names_the_best(diary: EventLog, tmp_path: Path) -> None:
    some_trials(diary)
    table = table_of(tmp_path, n_trials=10)
    assert table.summary().startswith(
        "sweep: 3 of 10 trials; 2 complete, 1 pruned, 1 running; best val_accuracy 0.95 (trial 1);"
    )


def test_rows_are_the_best_then_what_runs_then_what_ended_last(
    diary: EventLog, tmp_path: Path
) -> None:
    some_trials(diary)
    lines = table_of(tmp_path).text().splitlines()[1:]
    names = ["trial", "state", "val_accuracy", "time", "optim.lr", "model.hidden"]
    assert lines[0].split() == names
    assert [line.lstrip("* ").split()[:2] for line in lines[1:]] == [
        ["1", "complete"],
        ["3", "running"],
        ["2", "pruned"],
        ["0", "complete"],
    ]
    assert [line.startswith("*") for line in lines[1:]] == [True, False, False, False]
    assert "0.5 (step 2)" in lines[2]


def test_a_trial_that_is_run_again_is_counted_once(diary: EventLog, tmp_path: Path) -> None:
    some_trials(diary)
    ends(diary, 3, None, "failed", reason="died")
    begins(diary, 3, **{"optim.lr": 0.025, "model.hidden": 96})
    ends(diary, 3, 0.99, best=True)
    table = table_of(tmp_path)
    assert [table.count(s) for s in ("complete", "pruned", "failed", "running")] == [3, 1, 0, 0]
    assert [trial.number for trial in table.best] == [3]
    assert [trial.number for trial in table.last()] == [3, 2, 1, 0]


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
    assert "3 of 15 trials" in table_of(tmp_path, n_trials=10).summary()


def test_several_objectives_have_a_front() -> None:
    table = SweepTable(metrics=["accuracy", "seconds"], directions=["maximize", "minimize"])
    for number, values in enumerate([(0.9, 5.0), (0.8, 1.0), (0.7, 2.0), (0.95, 5.0), (0.8, 1.0)]):
        table.update(TrialChanged(number=number, state="complete", values=list(values)))
    # 2 is beaten by 1, and 0 by 3; 1 and 4 are equal
    assert [trial.number for trial in table.best] == [1, 3, 4]
    assert "3 trials on the front" in table.summary()


def test_the_table_of_a_thousand_trials_stays_small(diary: EventLog, tmp_path: Path) -> None:
    for number in range(1000):
        begins(diary, number, x=number)
        ends(diary, number, number / 1000, best=True)
    table = table_of(tmp_path, n_trials=1000)
    assert len(table.text().splitlines()) == 7
    assert "1000 of 1000 trials" in table.summary()


def test_html_escapes_what_a_parameter_or_an_error_says() -> None:
    table = SweepTable(name="<b>mine</b>", metrics=["<i>"])
    params = {"optim.<script>": "<img src=x>"}
    table.update(TrialChanged(number=0, state="running", params=params))
    text = table.html()
    assert not re.findall(r"<(script|img|i|b)\b", text)
    assert "<img src=x>" in html.unescape(text)


def test_folds_have_scores_a_mean_and_a_spread() -> None:
    table = FoldTable(folds=3)
    for fold, score in enumerate([0.9, 0.8, 1.0]):
        table.update(FoldChanged(fold=fold, state="running"))
        scores = {"val_accuracy": score}
        table.update(FoldChanged(fold=fold, state="complete", seconds=2.0, metrics=scores))
    assert table.summary() == "cross-validation: 3 of 3 folds; val_accuracy 0.9 ± 0.1"
    assert table.text().splitlines()[2].split() == ["0", "complete", "0.9", "2.0", "s"]


def test_folds_of_trials_are_no_rows_of_a_cross_validation() -> None:
    table = FoldTable()
    table.update(FoldChanged(number=4, fold=1, state="complete"))
    assert table.text() == "cross-validation: 0 folds"


def test_a_trial_with_folds_says_how_many_are_done() -> None:
    table = SweepTable()
    table.update(TrialChanged(number=0, state="running", params={"a": 1}))
    for fold in (0, 1):
        table.update(FoldChanged(t=1.0, number=0, fold=fold, state="complete"))
    assert "2 folds" in table.text()


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
