"""The loop of a cross-validation, over a pool without processes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from searches import Session, SteppedPool, request

import nbtoolkit as nb
from nbtoolkit.errors import FoldError
from nbtoolkit.run.events import EventLog, EventReader, RunEnded
from nbtoolkit.run.paths import RunPaths, write_whole
from nbtoolkit.run.record import RunRecord
from nbtoolkit.search.crossval.fold_loop import CrossValidation, finished_folds, fold_key
from nbtoolkit.search.pool import JobResult, SearchJob
from nbtoolkit.wire.messages import SearchCommand

FOLDS = nb.make_folds([0, 1] * 10)
DIED = JobResult(status="failed", fault="died", error="WorkerDied: signal 9", seconds=1.0)
RAISED = JobResult(status="failed", fault="raised", error="ValueError: no", seconds=1.0)


def score(job: SearchJob) -> JobResult:
    assert job.fold is not None
    return JobResult(status="completed", metrics={"acc": 0.1 * job.fold}, seconds=job.fold + 0.5)


def begin(folder: Path, folds: nb.Folds = FOLDS) -> Session:
    pool = SteppedPool(request(folder, folds=folds))
    return Session(pool, CrossValidation(pool, RunRecord(RunPaths(folder), deadline=None)))


def drive(
    session: Session,
    folder: Path,
    ending: Callable[[SearchJob], JobResult],
    *,
    slots: int = 2,
) -> list[str]:
    """Run all jobs, ``slots`` at once, the oldest ends first; return the keys in order of start."""
    pool, loop = session.pool, session.loop
    before, pool.slots = len(pool.begun), slots
    loop.start_jobs()
    while not loop.over:
        job = next(iter(pool.running.values()))
        end = ending(job)
        if end.status == "completed":
            write_whole(RunPaths(folder / job.key).value(0), "a value")
        session.on_end(job, end)
        loop.start_jobs()
    return [job.key for job in pool.begun[before:]]


def fold_events(folder: Path) -> list[tuple[int, str]]:
    events = EventReader(RunPaths(folder).events).read()
    return [(event.fold, event.state) for event in events if event.type == "fold"]


@pytest.mark.parametrize("slots", [1, 2, 7])
def test_every_fold_is_run_once_and_in_order(tmp_path: Path, slots: int) -> None:
    session = begin(tmp_path)
    assert drive(session, tmp_path, score, slots=slots) == [f"folds/{index}" for index in range(5)]
    assert session.done
    summary = session.close("completed")
    values = [0.1 * index for index in range(5)]
    assert summary["folds"] == summary["complete"] == 5
    assert summary["scores"]["acc"] == {
        "mean": pytest.approx(statistics.fmean(values)),
        "std": pytest.approx(statistics.stdev(values)),
    }
    assert nb.Folds.load(tmp_path / "folds.json") == FOLDS
    assert fold_events(tmp_path).count((3, "complete")) == 1


def test_its_jobs_are_of_their_fold(tmp_path: Path) -> None:
    assert begin(tmp_path).next(None) == SearchJob(key="folds/0", fold=0)
    assert fold_events(tmp_path) == [(0, "running")]


def test_a_fold_that_raised_ends_it_and_is_told_with_what_is_kept(tmp_path: Path) -> None:
    session = begin(tmp_path)
    assert drive(session, tmp_path, lambda job: RAISED if job.fold == 1 else score(job)) == [
        "folds/0",
        "folds/1",
        "folds/2",
    ]
    assert session.done
    with pytest.raises(FoldError, match=r"fold 1 failed: ValueError: no\n.*2 of 5 folds are done"):
        session.close("completed")
    session.stop()
    assert session.close("stopped")["complete"] == 2


def test_a_fold_that_left_by_itself_is_left_to_the_next_session(tmp_path: Path) -> None:
    session = begin(tmp_path)
    early = JobResult(status="deadline", metrics={"acc": 0.3}, seconds=1.0)
    drive(session, tmp_path, lambda job: early if job.fold == 4 else score(job))
    assert session.close("deadline")["complete"] == 4
    assert drive(begin(tmp_path), tmp_path, score) == ["folds/4"]


def test_folds_that_are_done_are_not_run_again(tmp_path: Path) -> None:
    drive(begin(tmp_path), tmp_path, lambda job: RAISED if job.fold == 1 else score(job))
    again = begin(tmp_path)
    assert drive(again, tmp_path, score) == ["folds/1", "folds/3", "folds/4"]
    assert again.close("completed")["complete"] == 5
    assert finished_folds(tmp_path, 5) == {
        index: score(SearchJob(key=fold_key(index), fold=index)) for index in range(5)
    }


def test_a_fold_counts_as_done_by_its_own_result_when_its_event_was_not_written(
    tmp_path: Path,
) -> None:
    begin(tmp_path)
    whole = RunEnded(status="completed", metrics={"acc": 0.5}, seconds=2.0)
    ends = {2: whole, 3: replace(whole, status="stopped"), 4: replace(whole, metrics={})}
    for index, end in ends.items():
        paths = RunPaths(tmp_path / fold_key(index))
        write_whole(paths.value(0), "a value")
        log = EventLog(paths.events)
        log.write(end)
        log.close()
    assert set(finished_folds(tmp_path, 5)) == {2}
    session = begin(tmp_path)
    assert drive(session, tmp_path, score) == ["folds/0", "folds/1", "folds/3", "folds/4"]


def test_a_fold_whose_value_is_gone_is_run_again(tmp_path: Path) -> None:
    drive(begin(tmp_path), tmp_path, score)
    RunPaths(tmp_path / "folds/3").value(0).unlink()
    assert drive(begin(tmp_path), tmp_path, score) == ["folds/3"]


def test_a_fold_whose_process_died_is_tried_again_once(tmp_path: Path) -> None:
    session = begin(tmp_path)
    began = drive(session, tmp_path, lambda job: DIED if job.fold == 0 else score(job), slots=1)
    assert began == ["folds/0"] * 2
    assert fold_events(tmp_path).count((0, "waiting")) == 1
    with pytest.raises(FoldError, match="fold 0 failed: WorkerDied: signal 9"):
        session.close("completed")


def test_after_a_stop_nothing_begins_and_what_ran_counts_for_the_next_session(
    tmp_path: Path,
) -> None:
    session = begin(tmp_path)
    jobs = [session.next(None), session.next(None)]
    session.stop()
    assert not session.done
    assert session.next(None) is None
    for job in jobs:
        assert job is not None
        session.on_end(job, JobResult(status="stopped", metrics={"acc": 0.3}))
    assert session.done
    assert session.close("stopped") == {"folds": 5, "complete": 0, "scores": {}}
    assert fold_events(tmp_path)[-2:] == [(0, "stopped"), (1, "stopped")]
    assert len(drive(begin(tmp_path), tmp_path, score)) == 5


def test_paused_it_starts_nothing_until_it_goes_on(tmp_path: Path) -> None:
    session = begin(tmp_path)
    session.on_command(SearchCommand(op="pause"))
    assert session.next(None) is None
    assert not session.done
    session.on_command(SearchCommand(op="resume"))
    assert session.next(None) is not None


def test_no_fold_begins_when_the_time_is_used_up(tmp_path: Path) -> None:
    session = begin(tmp_path)
    assert session.next(0.0) is None
    assert session.next(0.1) is not None


def test_what_only_sweeps_can_do_is_told(tmp_path: Path) -> None:
    begin(tmp_path).on_command(SearchCommand(op="add_trials", n=3))
    (note,) = (e for e in EventReader(RunPaths(tmp_path).events).read() if e.type == "note")
    assert note.text == "a cross-validation has no trials: add_trials does nothing"
    assert note.level == "warning"


def test_other_folds_than_those_begun_with_are_refused_and_shown(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(FoldError, match=r"k: 5 then, 4 now; .*hash: \w+ then") as refused:
        begin(tmp_path, nb.make_folds([0, 1] * 10, k=4))
    assert "resume='never'" in str(refused.value)
    with pytest.raises(FoldError, match=r"first session: target: \w+ then, \w+ now\n"):
        begin(tmp_path, nb.make_folds(["a", "b"] * 10))
    assert nb.Folds.load(tmp_path / "folds.json") == FOLDS


def test_scores_that_not_all_folds_have_are_not_summed_up(tmp_path: Path) -> None:
    def some(job: SearchJob) -> JobResult:
        more = {"auc": 1.0} if job.fold else {}
        return JobResult(status="completed", metrics={"acc": 0.5, **more})

    session = begin(tmp_path)
    drive(session, tmp_path, some)
    assert session.close("completed")["scores"] == {"acc": {"mean": 0.5, "std": 0.0}}
