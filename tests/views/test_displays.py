"""Progress as a page and as lines."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harmless import assert_harmless
from kernels import until
from run_folders import NOON, sweep, trial

from nbtoolkit.run.events import (
    DevicesSampled,
    EventLog,
    MetricsLogged,
    MetricsReported,
    RunEnded,
    RunStarted,
)
from nbtoolkit.run.output import CellOutput, error_lines
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.views.page import page_html
from nbtoolkit.views.state import State
from nbtoolkit.views.text import summary_line
from nbtoolkit.views.watcher import (
    DisplayPlace,
    LineDisplay,
    LiveView,
    PageDisplay,
    Watcher,
    static,
)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    """Of a folder whose lock is held."""
    paths = RunPaths(tmp_path)
    with paths.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield State(paths)


@pytest.fixture
def diary(tmp_path: Path) -> Iterator[EventLog]:
    log = EventLog(tmp_path / "events.jsonl")
    yield log
    log.close()


def ends(diary: EventLog, state: State, **fields: Any) -> None:
    """Write the last event, as the supervisor does."""
    diary.write(RunEnded(**fields))


def test_names_and_errors_are_text_in_html_and_no_orders_to_a_terminal(
    diary: EventLog, state: State
) -> None:
    diary.write(RunStarted(config={"train": {"epochs": 4}}))
    for step in (1, 2, 3):
        values = {"<script>ü\x1b[2J\n": step / 2, '"><img src=x>': 1.0, "nan": float("nan")}
        diary.write(MetricsReported(values=values, step=step))
    ends(diary, state, status="failed", error="<b>no</b>", seconds=1.0)
    state.refresh()
    assert_harmless(page_html(state))
    assert "&lt;b&gt;no&lt;/b&gt;" in page_html(state)
    assert "<script>ü [2J" in summary_line(state)
    assert "\x1b" not in summary_line(state)


def test_a_folder_that_cannot_be_read_is_neither_live_nor_over(
    diary: EventLog, state: State
) -> None:
    diary.write(RunStarted(config={}))
    state.refresh()
    assert (state.status, state.live, state.over) == ("running", True, False)
    aside = state.paths.events.rename(state.paths.folder / "aside")
    state.paths.events.mkdir()
    assert state.refresh()
    assert (state.status, state.live, state.over) == ("unreadable", False, False)
    assert "it is not a regular file" in page_html(state)
    assert ": unreadable, " in summary_line(state)
    state.paths.events.rmdir()
    aside.rename(state.paths.events)
    diary.write(MetricsReported(values={"loss": 0.5}, step=1))
    assert state.refresh()
    assert (state.status, state.live, state.over) == ("running", True, False)
    assert state.points() == {"loss": [(1.0, 0.5)]}
    shutil.rmtree(state.paths.folder)
    state.refresh()
    assert (state.status, state.over) == ("gone", True)


def test_what_was_logged_is_drawn_where_nothing_was_reported(diary: EventLog, state: State) -> None:
    diary.write(RunStarted(config={}))
    for step in range(10_000):
        diary.write(MetricsLogged(values={"loss": 1 / (step + 1)}, step=step))
    state.refresh()
    assert "loss" in page_html(state)
    assert len(state.logged["loss"]) <= 4000
    assert state.logged["loss"][-1][0] == 9999
    diary.write(MetricsReported(values={"val_loss": 0.5}, step=1))
    state.refresh()
    assert set(state.points()) == {"val_loss"}


def test_looks_take_a_share_of_a_core_at_most() -> None:
    looks: list[float] = []

    def look() -> None:
        looks.append(time.monotonic())
        used = time.thread_time()
        while time.thread_time() - used < 0.05:
            pass

    watcher = Watcher(look, pytest.fail, share=0.02, closed=RuntimeError("it is closed"))
    until(lambda: len(looks) >= 2, "two looks")
    watcher.close()
    assert looks[1] - looks[0] > 1.5  # 0.05 s of CPU are 2 % of 2.5 s; above SECONDS in any case
    with pytest.raises(RuntimeError, match="it is closed"):
        watcher.submit(looks.clear).result()


def test_steps_that_are_no_epochs_have_no_end_in_sight(diary: EventLog, state: State) -> None:
    diary.write(RunStarted(config={"train": {"epochs": 10}}))
    for step in (100, 200):
        diary.write(MetricsReported(values={"loss": 1.0}, step=step))
    state.refresh()
    assert "step 200, " in summary_line(state)
    assert "left" not in summary_line(state)
    assert state.share() is None
    assert "progressbar" not in page_html(state)


def test_a_line_of_ours_does_not_tear_a_bar_of_rank_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path)
    paths.log(0).parent.mkdir(parents=True)
    paths.log(0).write_text("\rbar 10%")
    cell = CellOutput(paths, "text")
    cell.pump()
    cell.say("step 3 of 10")
    paths.log(0).write_text("\rbar 10%\rbar 20%\n")
    cell.close()
    assert capsys.readouterr().out == "\rbar 10%\nstep 3 of 10\nbar 20%\n"


def test_the_exception_in_a_log_is_left_to_the_cell_that_raises_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path)
    paths.log(0).parent.mkdir(parents=True)
    error = error_lines("Traceback\nValueError: here\n")
    paths.log(0).write_text(f"first\n\rbar 10%{error}of another attempt\n")
    cell = CellOutput(paths, "text")
    cell.close()
    assert capsys.readouterr().out == "first\nbar 10%\nof another attempt\n"


class Broken(PageDisplay):
    """A page that cannot be shown."""

    def open(self, *, waits: bool) -> None:
        """Work so far."""

    def pump(self) -> None:
        """Fail."""
        raise ValueError("no ink")

    def close(self) -> None:
        """Fail."""
        raise AssertionError("it was given up")


def test_a_page_that_fails_ends_only_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path)
    live = LiveView(CellOutput(paths, "text"), Broken(partial(State, paths)))
    live.open(waits=True)
    live.pump()
    live.say("going on")
    live.close()
    assert capsys.readouterr().out == "the live view ended (ValueError: no ink)\ngoing on\n"


class BrokenLines(CellOutput):
    """Lines that cannot be shown."""

    def pump(self) -> None:
        """Fail."""
        raise ValueError("no ink")


def test_lines_that_fail_end_only_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = LiveView(BrokenLines(RunPaths(tmp_path), "text"), None)
    live.open(waits=True)
    live.say("a line")
    live.pump()
    live.pump()
    live.close()
    assert capsys.readouterr().out == "a line\nthe live view ended (ValueError: no ink)\n"


def test_a_line_a_minute_says_how_far_it_is(diary: EventLog, state: State) -> None:
    said: list[str] = []
    lines = LineDisplay(lambda: state, said.append, in_notebook=False, seconds=0.0)
    lines.open(waits=True)
    diary.write(RunStarted(config={"train": {"epochs": 4}}))
    both = time.time()  # no time between two steps: what is left takes none
    for step in (1, 2):
        diary.write(MetricsReported(t=both, values={"val_loss": 1 / step}, step=step))
    diary.write(DevicesSampled(readings=[{"rank": 0, "cpu": 0.98, "memory": 2**30}]))
    lines.pump()
    ends(diary, state, status="completed", seconds=3.0)
    lines.close()
    first, last = said
    assert "epoch 2/4" in first
    assert "about 0.0 s left, best val_loss 0.5000 (at epoch 2), rank 0: CPU 98 %" in first
    assert ": completed, " in last
    assert "val_loss 0.5" in last
    lines = LineDisplay(lambda: state, said.append, in_notebook=False)
    lines.open(waits=True)
    lines.pump()
    assert len(said) == 2  # a minute is not over


def test_an_output_is_written_only_when_it_has_changed(capsys: pytest.CaptureFixture[str]) -> None:
    place = DisplayPlace()
    for text in ("one", "one", "two", "two"):
        place.put({"text/plain": text})
    assert capsys.readouterr().out.count("text/plain") == 2


def sweep_of(folder: Path, count: int) -> RunPaths:
    """A completed sweep of trials with 12 reports each."""
    events: list[dict[str, Any]] = []
    for number in range(count):
        began = NOON + number
        events.append({**trial(number, "running"), "t": began})
        for step in range(12):
            report = {"type": "intermediate", "number": number, "step": step, "value": step / 10}
            events.append({**report, "t": began + step / 20})
        ended = trial(number, value=1 / (number + 1), best=not number)
        events.append({**ended, "t": began + 1})
    over = {"type": "ended", "status": "completed", "seconds": float(count), "t": NOON + count}
    return sweep(folder, [*events, over], count=count)


def test_the_output_of_a_sweep_of_20_trials_is_below_60_kb(tmp_path: Path) -> None:
    paths = sweep_of(tmp_path, 20)
    text = static(paths)
    assert len(text) < 60_000
    assert "20/20" in text
    assert_harmless(text)
