"""What is read of a folder: status, progress, times, jobs, devices. Nothing in it is executed."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from run_folders import NOON, SWEEP_CONFIG, hold_lock, sweep, trained, trial, write_run

from nbtoolkit.panel.buttons import offered_buttons
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.search.study.table import SweepTable
from nbtoolkit.views.state import State, read_state
from nbtoolkit.views.text import explanation

ENDED = {"type": "ended", "status": "completed", "seconds": 9.0}


def append(paths: RunPaths, *events: dict[str, Any]) -> None:
    with paths.events.open("a") as log:
        log.writelines(json.dumps({"t": NOON, **event}) + "\n" for event in events)


def submit(paths: RunPaths, number: str) -> None:
    """Write what a launch on a cluster writes when the cluster has taken its job."""
    paths.remote.parent.mkdir(exist_ok=True)
    size = paths.events.stat().st_size
    job = {"where": "slurm", "job": {"number": number}, "events_size": size}
    paths.remote.write_text(json.dumps(job))


def report(number: int, step: int, value: float, at: float = 0.0) -> dict[str, Any]:
    event = {"type": "intermediate", "number": number, "step": step, "value": value}
    return {**event, "t": NOON + at}


def begun(number: int, at: float) -> Any:
    return {**trial(number, "running"), "seconds": None, "t": NOON + at}


def ended(number: int, at: float, state: str = "complete", **more: Any) -> Any:
    value = 0.5 if state == "complete" else None
    return {**trial(number, state, value, **more), "t": NOON + at}


# --- status ---


def test_a_run_whose_process_died_is_cut_off_and_can_be_resumed(tmp_path: Path) -> None:
    paths = write_run(tmp_path, "one", events=trained({"loss": [1.0]}))
    state = State(paths)
    with hold_lock(paths):
        state.refresh()
        assert (state.status, state.live, state.over) == ("running", True, False)
    assert state.refresh()  # that alone is new
    assert (state.status, state.live, state.over) == ("cut off", False, True)
    assert state.resumable


def test_a_run_whose_job_has_not_begun_is_submitted_and_not_over(tmp_path: Path) -> None:
    paths = write_run(tmp_path, "one", events=[])
    submit(paths, "7")
    state = read_state(paths.folder)
    assert (state.status, state.live, state.over) == ("submitted", False, False)
    assert not state.resumable
    assert "has not begun" in explanation(state)
    assert offered_buttons(state) == set()  # neither Resume nor Stop
    with hold_lock(paths):
        append(paths, {"type": "run", "t": time.time()})
        assert state.refresh()
        assert state.status == "running"
    assert state.refresh()
    assert state.status == "cut off"
    # Submitted again.
    submit(paths, "8")
    assert read_state(paths.folder).status == "submitted"


def test_a_copy_of_a_run_that_a_job_has_ended_is_not_submitted(tmp_path: Path) -> None:
    paths = write_run(tmp_path, "one", events=[])
    submit(paths, "7")
    append(paths, {"type": "run"}, ENDED)
    # Without the times of the files, as scp copies a folder.
    copy = shutil.copytree(paths.folder, tmp_path / "copy", copy_function=shutil.copyfile)
    assert read_state(copy).status == "completed"


def test_a_supervisor_that_starts_while_the_log_is_read_is_no_death(tmp_path: Path) -> None:
    locked = iter([False, True])

    class TakenMeanwhile(RunPaths):
        def owned(self) -> bool:
            return next(locked)

    paths = write_run(tmp_path, "one", events=[{"type": "run"}])
    state = State(TakenMeanwhile(paths.folder))
    state.refresh()
    assert state.status == "running"


def test_trials_of_a_sweep_that_was_cut_off_wait(tmp_path: Path) -> None:
    paths = sweep(tmp_path, [ended(0, 1), begun(1, 2), report(1, 1, 0.5, at=3)])
    state = State(paths)
    with hold_lock(paths):
        state.refresh()
        assert isinstance(state.table, SweepTable)
        assert [one.number for one in state.table.running] == [1]
        assert state.spans()[-1].end is None
    state.refresh()
    assert state.table.running == []
    assert (state.table.count("complete"), state.table.count("waiting")) == (1, 1)
    assert (state.spans()[-1].end, state.spans()[-1].state) == (NOON + 3, "waiting")
    with hold_lock(paths):
        append(paths, {"type": "run"})
        state.refresh()
        assert state.status == "running"


def test_a_folder_that_was_deleted_is_gone_and_what_was_read_stays(tmp_path: Path) -> None:
    paths = sweep(tmp_path, [trial(0, value=0.5)])
    state = read_state(paths.folder)
    shutil.rmtree(paths.folder)
    assert state.refresh()
    assert (state.status, state.values) == ("gone", {0: 0.5})


def test_a_paused_search_has_no_end_until_it_is_resumed(tmp_path: Path) -> None:
    events = [begun(0, 0), ended(0, 1), begun(1, 1)]
    paths = sweep(tmp_path, [*events, {"type": "command", "op": "pause"}])
    with hold_lock(paths):
        state = read_state(paths.folder)
        assert (state.status, state.seconds_left(NOON)) == ("paused", None)
        append(paths, {"type": "command", "op": "resume"})
        state.refresh()
        assert state.status == "running"
        assert state.seconds_left(NOON)


def test_damaged_lines_and_settings_are_skipped(tmp_path: Path) -> None:
    paths = sweep(tmp_path, [trial(0, value=0.5)])
    with paths.events.open("a") as log:
        log.write('{"t": 1, "type": "tri\n[1]\n{"type": "trial"}\n')
        log.write('{"t": 2, "type": "trial", "number": 1, "state": "complete", "value": "x"}\n')
        log.write('{"t": 3, "type": "device", "readings": [7]}\n{"t": 2, "type": "ended"')
    (paths.folder / "sweep.yaml").write_text("study: [")
    state = read_state(paths.folder)
    assert (state.values, state.ended) == ({0: 0.5}, None)
    assert state.devices() == []


# --- progress and time ---


def test_the_time_left_of_a_run_is_the_rest_at_its_pace(tmp_path: Path) -> None:
    events = trained({"loss": [3.0, 2.0, 1.0]}, {"train": {"epochs": 10}})
    paths = write_run(tmp_path, "one", events=events)
    with hold_lock(paths):
        state = read_state(paths.folder)
        assert state.seconds_left(NOON) == 3 + 7  # 7 epochs, one per second
        assert state.share() == pytest.approx(0.3)
    assert state.config == {"train": {"epochs": 10}}


def test_returned_numbers_belong_to_the_last_step(tmp_path: Path) -> None:
    returned = {"type": "report", "values": {"best": 0.25}, "step": None}
    events = trained({"val_loss": [0.5, 0.25]}, {"train": {"epochs": 2}})
    state = read_state(write_run(tmp_path, "one", events=[*events, returned, ENDED]).folder)
    assert state.points()["best"] == [(2.0, 0.25)]


def test_the_elapsed_time_counts_all_attempts(tmp_path: Path) -> None:
    first = trained({"loss": [1.0, 2.0]})  # 2 s, and then its process dies
    second = [{"type": "run", "t": NOON + 100}, {**ENDED, "t": NOON + 105, "seconds": 5.0}]
    third = [{"type": "run", "t": NOON + 200}]
    paths = write_run(tmp_path, "one", events=[*first, *second, *third])
    with hold_lock(paths):
        assert read_state(paths.folder).elapsed(NOON + 203) == 2 + 5 + 3
    assert read_state(paths.folder).elapsed(NOON + 999) == 2 + 5 + 0


def test_the_speed_is_that_of_the_newest_steps(tmp_path: Path) -> None:
    events = trained({"loss": [3.0, 2.0]}, {"train": {"epochs": 12}})
    state = read_state(write_run(tmp_path, "one", events=events).folder)
    assert state.speed() == {"epoch": "2/12", "samples/s": "200", "steps/s": "1"}
    other = {"type": "report", "values": {"loss": 1.0}, "step": 12345}
    own = read_state(write_run(tmp_path, "own", events=[{"type": "run"}, other]).folder)
    assert own.speed() == {"step": "12345"}


def test_what_a_run_does_before_its_first_report(tmp_path: Path) -> None:
    paths = write_run(tmp_path, "one", events=[{"type": "run"}])
    with hold_lock(paths):
        state = read_state(paths.folder)
        assert state.activity(NOON + 3) == "starting: importing torch, 3.0 s"
        for phase, text in {
            "started": "starting: importing torch",
            "group": "rank 0 loading the function, waiting for the first report",
            "ready": "rank 0 ready, waiting for the first report",
        }.items():
            append(paths, {"type": "rank", "rank": 0, "phase": phase})
            state.refresh()
            assert state.activity(NOON + 12) == f"{text}, 12 s"
        append(paths, {"type": "report", "values": {"loss": 1.0}, "step": 1})
        state.refresh()
        assert state.activity(NOON + 12) == ""
    assert read_state(paths.folder).activity() == ""  # nothing happens in it any more


def test_what_a_sweep_does_before_its_first_report(tmp_path: Path) -> None:
    paths = sweep(tmp_path, [])
    with hold_lock(paths):
        state = read_state(paths.folder)
        assert state.activity(NOON + 2) == "starting: importing torch, 2.0 s"
        append(paths, begun(0, 2), begun(1, 2))
        state.refresh()
        text = "2 trials started, waiting for the first report, 12 s"
        assert state.activity(NOON + 12) == text
        append(paths, report(1, 1, 0.5))
        state.refresh()
        assert state.activity(NOON + 12) == ""


def test_a_later_session_with_more_trials_is_seen(tmp_path: Path) -> None:
    paths = sweep(tmp_path, [trial(0, value=0.5)], count=10)
    state = read_state(paths.folder)
    assert state.counts() == (1, 10)
    append(paths, {"type": "command", "op": "add_trials", "n": 5})
    state.refresh()
    assert state.counts() == (1, 15)
    (paths.folder / "sweep.yaml").write_text(SWEEP_CONFIG.format(metric="score", count=20))
    state.refresh()
    assert state.counts() == (1, 25) == read_state(paths.folder).counts()


def test_settings_that_are_written_after_the_first_look_count(tmp_path: Path) -> None:
    paths = sweep(tmp_path, [])
    text = (paths.folder / "sweep.yaml").read_text()
    (paths.folder / "sweep.yaml").unlink()
    state = read_state(paths.folder)
    (paths.folder / "sweep.yaml").write_text(text)
    append(paths, trial(0, value=0.5))
    state.refresh()
    assert (state.metric, state.counts()) == ("score", (1, 10))


# --- trials ---


def test_a_trial_that_resumes_keeps_its_curve_up_to_there(tmp_path: Path) -> None:
    first = [begun(0, 0), *(report(0, step, 0.1 * step) for step in (1, 2, 3))]
    again = [{"type": "run"}, begun(0, 9), report(0, 3, 0.9), report(0, 4, 0.95)]
    state = read_state(sweep(tmp_path, [*first, *again]).folder)
    assert state.trials[0] == [(1.0, 0.1), (2.0, 0.2), (3.0, 0.9), (4.0, 0.95)]


def test_pruning_saved_the_steps_that_pruned_trials_did_not_take(tmp_path: Path) -> None:
    def reports(number: int, steps: int) -> list[dict[str, Any]]:
        return [report(number, step, 0.5) for step in range(steps)]

    events = [
        *(begun(n, 0) for n in range(4)),
        *reports(0, 10),
        *reports(1, 2),
        *reports(2, 4),
        *reports(3, 1),
        ended(0, 1),
        ended(1, 1, "pruned"),
    ]
    state = read_state(sweep(tmp_path / "a", events).folder)
    assert state.planned_steps() == 10
    assert state.saved_by_pruning() == pytest.approx(8 / 20)
    # One that was stopped by hand, or that still runs, was not saved by the pruner.
    stopped = ended(3, 1, "pruned", reason="stopped by hand")
    state = read_state(sweep(tmp_path / "b", [*events, stopped]).folder)
    assert state.saved_by_pruning() == pytest.approx(8 / 21)
    assert isinstance(state.table, SweepTable)
    labels = [one.label for one in state.table.trials.values()]
    assert labels == ["complete", "pruned", "waiting", "stopped"]
    assert read_state(sweep(tmp_path / "c", [ended(0, 1)]).folder).saved_by_pruning() is None


def test_the_mark_of_the_best_trial_keeps_its_times(tmp_path: Path) -> None:
    events = [begun(0, 0), ended(0, 5, seconds=5.0), begun(1, 5), ended(1, 9, seconds=4.0)]
    winner = {**trial(0, value=0.6, best=True), "seconds": None, "t": NOON + 20}
    state = read_state(sweep(tmp_path, [*events, winner]).folder)
    assert isinstance(state.table, SweepTable)
    best = state.table.best[0]
    assert (best.seconds, best.ended_at, best.values) == (5.0, NOON + 5, (0.6,))
    assert [span.end for span in state.spans()] == [NOON + 5, NOON + 9]


# --- jobs ---


def test_spans_lie_on_the_fewest_rows_without_overlap(tmp_path: Path) -> None:
    events = [
        *(begun(0, 0), begun(1, 0)),
        *(ended(1, 3, "pruned"), begun(2, 3)),
        *(begun(3, 6.875), ended(0, 7)),  # prepared: it begins before the end is reported
        *(ended(2, 8, "failed"), begun(4, 9)),
    ]
    paths = sweep(tmp_path, events)
    with hold_lock(paths):
        state = read_state(paths.folder)
        rows = state.workers(NOON + 12)
    assert [[span.number for span in row] for row in rows] == [[0, 3], [1, 2, 4]]
    assert [[span.state for span in row] for row in rows] == [
        ["complete", "running"],
        ["pruned", "failed", "running"],
    ]
    assert rows[0][0].end == rows[0][1].begin
    assert rows[1][-1].end == NOON + 12
    assert [span.begin - NOON for span in state.spans()] == [0, 0, 3, 6.875, 9]
    assert state.job(rows[0][1]).folder == state.trial(3).folder


def test_short_trials_side_by_side_have_rows_of_their_own(tmp_path: Path) -> None:
    events = [begun(0, 0), begun(1, 0.01), ended(0, 0.1), ended(1, 0.11)]
    state = read_state(sweep(tmp_path, events).folder)
    assert len(state.workers()) == 2


def test_a_trial_with_folds_has_a_span_per_fold(tmp_path: Path) -> None:
    def fold(index: int, state: str, at: float) -> dict[str, Any]:
        event = {"type": "fold", "number": 7, "fold": index, "state": state, "t": NOON + at}
        return {**event, "metrics": {"f1": 0.5}, "seconds": 2.0} if state == "complete" else event

    events = [begun(7, 0), fold(0, "running", 0), fold(1, "running", 1), fold(0, "complete", 2)]
    paths = sweep(tmp_path, events)
    with hold_lock(paths):
        state = read_state(paths.folder)
    spans = [(span.number, span.fold, span.state) for span in state.spans()]
    assert spans == [(7, 0, "complete"), (7, 1, "running")]
    assert state.job(state.spans()[1]).folder == state.trial(7).folder / "fold-1"
    table = state.folds(7)
    assert [(one.state, one.metrics) for one in table] == [
        ("complete", {"f1": 0.5}),
        ("running", {}),
    ]


def test_folds_have_states_scores_and_curves_that_grow(tmp_path: Path) -> None:
    running = {"type": "fold", "state": "running"}
    done = {"type": "fold", "fold": 0, "state": "complete", "metrics": {"f1": 0.5}, "seconds": 2.0}
    events = [{"type": "run"}, {**running, "fold": 0}, {**done, "t": NOON + 2}]
    events.append({**running, "fold": 1, "t": NOON + 2})
    paths = write_run(tmp_path, "cv", kind="cv", events=events)
    (paths.folder / "folds.json").write_text(json.dumps({"k": 3, "repeats": 1}))
    write_run(paths.folder / "folds", "0", events=trained({"f1": [0.1, 0.5]}))
    fold = write_run(paths.folder / "folds", "1", events=trained({"f1": [0.2]}))
    with hold_lock(paths):
        state = read_state(paths.folder)
        table = state.folds()
        assert [one.state for one in table] == ["complete", "running", "waiting"]
        assert [one.seconds for one in table] == [2.0, None, None]
        assert state.fold_runs()[0].curves["f1"] == [(1.0, 0.1), (2.0, 0.5)]
        assert state.counts() == (1, 3)
        append(fold, {"type": "report", "values": {"f1": 0.4}, "step": 2})
        assert state.fold_runs()[1].curves["f1"] == [(1.0, 0.2), (2.0, 0.4)]
        assert [len(row) for row in state.workers(NOON + 3)] == [2]


# --- devices ---


def device(at: float, *readings: dict[str, Any]) -> dict[str, Any]:
    return {"type": "device", "t": NOON + at, "readings": list(readings)}


def test_a_live_run_shows_its_newest_readings_and_a_minute_of_them(tmp_path: Path) -> None:
    gpu = {"index": 0, "utilization": 87, "memory_used": 11_200_000_000}
    rank = {"rank": 0, "cpu": 1.4, "memory": 300_000_000}
    events = [device(5.0 * n, rank, {**gpu, "utilization": n}) for n in range(30)]
    paths = write_run(tmp_path, "one", events=[{"type": "run"}, *events, device(150, rank, gpu)])
    with hold_lock(paths):
        state = read_state(paths.folder)
        uses = {device.name: (device.history[-1][1], device.text) for device in state.devices()}
        assert uses == {"GPU 0": (0.87, "87 %, 11.2 GB"), "rank 0": (1.0, "CPU 140 %, 0.3 GB")}
        history = state.devices()[0].history
        assert [at - NOON for at, _ in history] == [90.0 + 5 * n for n in range(13)]
        assert history[-2:] == [(NOON + 145, 0.29), (NOON + 150, 0.87)]
        hot = {**gpu, "utilization": None, "memory_total": 16 * 10**9, "temperature": 71}
        append(paths, device(155, hot))
        state.refresh()
        assert state.devices()[0].text == "11.2 of 16.0 GB, 71 °C"


def test_an_ended_sweep_shows_what_its_trials_used_on_the_mean(tmp_path: Path) -> None:
    events = [begun(0, 0), begun(1, 0), ended(0, 20), begun(2, 20), ended(1, 30), ended(2, 40)]
    paths = sweep(tmp_path, [*events, {**ENDED, "t": NOON + 40}])
    for number, cpu in ((0, 0.2), (2, 0.4)):  # on the same slot
        logged = [device(20.0 * (number == 2) + at, {"rank": 0, "cpu": cpu}) for at in (5, 10)]
        write_run(paths.folder / "trials", f"{number:04d}", events=logged)
    state = read_state(paths.folder)
    [slot] = state.devices()
    assert (slot.name, slot.text) == ("slot 0", "mean CPU 30 %")
    assert [share for _, share in slot.history] == [0.2, 0.2, 0.4, 0.4]


# --- size ---


def test_ten_thousand_trials_are_read_once_and_refreshed_at_once(tmp_path: Path) -> None:
    events = []
    for number in range(10_000):
        events += [begun(number, number)]
        events += [report(number, step, 1 / step, number + step / 20) for step in range(1, 13)]
        events += [ended(number, number + 0.9, seconds=0.9)]
    paths = sweep(tmp_path, events, count=20_000)
    with hold_lock(paths):
        state = State(paths)
        seconds = {}

        def timed(name: str, work: Any) -> None:
            start = time.process_time()
            work()
            seconds[name] = time.process_time() - start

        timed("first", state.refresh)
        timed("second", state.refresh)
        append(paths, begun(10_000, 10_000), report(10_000, 1, 0.5), ended(3, 10_000))
        timed("third", state.refresh)
        timed("left", lambda: state.seconds_left(NOON + 10_001))
        timed("workers", lambda: state.workers(NOON + 10_001))
        timed("saved", state.saved_by_pruning)
        timed("devices", state.devices)
    print(seconds)
    # The figures themselves are in the benchmark; here by the time of the first read, which the
    # machine's load makes longer too.
    assert seconds["second"] + seconds["third"] < 0.02 * seconds["first"]
    assert seconds["left"] + seconds["workers"] + seconds["saved"] < 0.2 * seconds["first"]
