"""A clock that is set while something runs changes neither budgets nor durations."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from launches import inline, settings_in

import nbtoolkit as nb
from nbtoolkit.environment.deadline import check_deadline
from nbtoolkit.errors import DeadlinePassed

HOUR = 3600.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """By how many seconds the machine's clock is set; the test changes it."""
    offset, clock = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: clock() + offset[0])
    return offset


@pytest.mark.parametrize("hours", [-1.0, 1.0])
def test_a_budget_ends_when_its_time_is_used(
    clock: list[float], tmp_path: Path, hours: float
) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> None:
        clock[0] = hours * HOUR
        for step in range(1000):
            ctx.report({"loss": 1.0}, step=step)
            time.sleep(0.01)

    began = time.monotonic()
    result = inline(train, settings_in(tmp_path, **{"runtime.time_budget": 1.0}))
    took = time.monotonic() - began
    assert result.status == "deadline"
    assert 0.9 < result.seconds <= took < 120.0


@pytest.mark.parametrize("hours", [-1.0, 1.0])
def test_the_deadline_of_a_notebook_passes_once(clock: list[float], hours: float) -> None:
    config = nb.load_config(env=None)
    try:
        nb.set_deadline(1800.0)
        clock[0] = hours * HOUR
        check_deadline(config)
        nb.set_deadline(0.1, reserve=0.01)
        clock[0] = -HOUR
        time.sleep(0.2)
        with pytest.raises(DeadlinePassed):
            check_deadline(config)
    finally:
        nb.set_deadline(None)


def test_the_deadline_in_the_settings_counts_from_the_start_of_the_process(
    clock: list[float],
) -> None:
    check_deadline(nb.load_config(env=None, overrides={"runtime.deadline": 10 * HOUR}))
    clock[0] = -HOUR
    with pytest.raises(DeadlinePassed):
        check_deadline(nb.load_config(env=None, overrides={"runtime.deadline": 0.01}))
