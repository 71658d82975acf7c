"""The questions of a person who looks at a run: the static page answers them without a click."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from page_folders import NOON, cross_validation, folder, run, started, sweep
from run_folders import hold_lock

from nbtoolkit.run.events import (
    CommandReceived,
    DevicesSampled,
    EventLog,
    RankPhaseChanged,
    RunEnded,
    StopRequested,
)
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.views.page import page_html
from nbtoolkit.views.state import read_state

PRESSED = "what can I press"
"""The one question whose answer is not on the static page; see tests/panel."""

Case = tuple[str, Callable[[Path], RunPaths], bool, float, tuple[str, ...]]
"""Question, folder, whether it is live, seconds after noon, texts that answer it."""


def _stopping(parent: Path) -> RunPaths:
    stop = StopRequested(t=NOON + 22.5, reason="the Stop button")
    paths = run(parent)
    return _appended(paths, stop)


def _appended(paths: RunPaths, *events: object) -> RunPaths:
    log = EventLog(paths.events)
    for event in events:
        log.write(event)  # type: ignore[arg-type]
    log.close(durable=False)
    return paths


def _ready(parent: Path) -> RunPaths:
    phases = [RankPhaseChanged(t=NOON + 1, rank=0, phase=p) for p in ("started", "group", "ready")]
    return folder(parent, "20260101T000000-train-0001", [started({"train.epochs": 5}), *phases])


def _failed(parent: Path) -> RunPaths:
    trace = 'Traceback:\n  File "train.py", line 31, in train\nRuntimeError: shapes 3 and 4 differ'
    error = "RuntimeError: shapes 3 and 4 differ"
    return run(parent, reported=2, status="failed", error=error, traceback=trace)


def _idle_gpu(parent: Path) -> RunPaths:
    gpus = [
        {"index": 0, "utilization": 93, "memory_used": 11.2e9},
        {"index": 1, "utilization": 2, "memory_used": 0.4e9},
    ]
    return _appended(run(parent), DevicesSampled(t=NOON + 22.5, readings=gpus))  # type: ignore[arg-type]


def _paused(parent: Path) -> RunPaths:
    paths = sweep(parent, ended=12, status=None, slots=2)
    return _appended(paths, CommandReceived(t=NOON + 149, op="pause"))


QUESTIONS: list[Case] = [
    (
        "on what does it run",
        lambda parent: sweep(parent, ended=12, status=None),
        True, 150, ("devices CPU, fp32", "2 slots (cpu 0, cpu 1), device_per_trial"),
    ),
    (
        "what was I doing last",
        sweep,
        False, 900, ("friedman-843e", "✓ completed", "20/20", "ended 2026-01-01 00:0", "best 0."),
    ),
    (
        "what differs from the defaults",
        run,
        True, 23, ("changed settings model.hidden 64, optim.lr 0.02, train.epochs 12",),
    ),
    (
        "what is wrong, and where",
        _failed,
        False, 60, ("✕ failed", "⚠ RuntimeError: shapes 3 and 4 differ", "line 31, in train"),
    ),
    (
        "did it hear me",
        _stopping,
        True, 23, ("Stopping: waiting for each worker's next report (the Stop button).",),
    ),
    (
        "is it alive, what is it doing now",
        _ready,
        True, 4, ("● running", "rank 0 ready, waiting for the first report, 4.0 s"),
    ),
    (
        "how far, how long still",
        run,
        True, 23, ("epoch 7/12", "23 s, about 14 s left"),
    ),
    (
        "how far are the folds",
        cross_validation,
        True, 43, ("3/5 folds", "mean of 3 folds", "0.3700 ± 0.0100"),
    ),
    (
        "how good so far",
        lambda parent: sweep(parent, ended=12, status=None),
        True, 150, ("best 0.3798 trial 8", "Best val_rmse", "lower is better"),
    ),
    (
        "is it still improving",
        lambda parent: sweep(parent, ended=12, status=None),
        True, 150, ("trial 8 · 2 trials ago", "Each trial, best so far", "Learning curves"),
    ),
    (
        "what do the workers do",
        lambda parent: sweep(parent, ended=12, status=None),
        True, 150, ("slot 0 trial 12, step", "slot 1 trial 13, step", "trials/min"),
    ),
    (
        "is a device idle",
        _idle_gpu,
        True, 23, ("GPU 0", "93 %, 11.2 GB", "GPU 1", "2 %, 0.4 GB"),
    ),
    (
        "has it stopped",
        _paused,
        True, 150, ("❙❙ paused", "Pausing: 2 trials still finishing, then paused, 6 left."),
    ),
    (
        "is my work lost",
        lambda parent: sweep(parent, ended=8, status=None),
        False, 900,
        (
            "✕ interrupted",
            "Interrupted: its process died. 8 of 20 trials are done and kept. Resume continues it.",
        ),
    ),
    (
        "which settings won, and why",
        lambda parent: sweep(parent, ended=30, planned=30),
        False, 900,
        ("lr 0.0", "hidden 128", "complete trials", "Importance for val_rmse", "Δ best"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("question", "write", "live", "after", "answers"), QUESTIONS)
def test_a_look_answers(
    question: str,
    write: Callable[[Path], RunPaths],
    live: bool,
    after: float,
    answers: tuple[str, ...],
    tmp_path: Path,
) -> None:
    paths = write(tmp_path)
    if live:
        with hold_lock(paths):
            page = page_html(read_state(paths.folder), now=NOON + after)
    else:
        page = page_html(read_state(paths.folder), now=NOON + after)
    seen = _seen(page)
    missing = [answer for answer in answers if answer not in seen]
    assert not missing, f"{question}: {missing} not in: {seen[:1500]}"


def test_at_least_eleven_of_the_fourteen_are_asked() -> None:
    folds = 1  # asked of a cross-validation as well
    assert len(QUESTIONS) - folds >= 11
    assert PRESSED not in [question for question, *_ in QUESTIONS]


def test_a_sweep_that_stopped_says_that_it_can_be_resumed(tmp_path: Path) -> None:
    seen = _seen(page_html(read_state(sweep(tmp_path, ended=9, status="stopped").folder)))
    assert "■ stopped" in seen
    assert "Stopped. 9 of 20 trials are done and kept. Resume continues it." in seen


def test_a_stop_of_the_attempt_before_is_over_once_it_is_resumed(tmp_path: Path) -> None:
    stopped = RunEnded(t=NOON + 24, status="stopped", seconds=24.0)
    paths = _appended(_stopping(tmp_path), stopped, started({"train.epochs": 12}))
    with hold_lock(paths):
        seen = _seen(page_html(read_state(paths.folder), now=NOON + 30))
    assert "● running" in seen
    assert "Stopping:" not in seen


def test_an_idle_slot_is_said_to_be_idle(tmp_path: Path) -> None:
    paths = sweep(tmp_path, ended=19, planned=20, status=None)
    with hold_lock(paths):
        seen = _seen(page_html(read_state(paths.folder), now=NOON + 400))
    assert re.search(r"slot \d idle", seen)
    assert seen.count(" idle") == 1


def _seen(page: str) -> str:
    """What a person reads without a click: neither tags nor what only a pointer shows."""
    page = re.sub(r"<title>.*?</title>", "", page, flags=re.DOTALL)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    return text.replace("&#x27;", "'").replace("&quot;", '"')
