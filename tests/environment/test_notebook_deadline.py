"""nb.set_deadline: one limit for all calls of a kernel, with real processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbtoolkit as nb
from nbtoolkit.environment.deadline import check_deadline, time_limit
from nbtoolkit.errors import ConfigError, DeadlinePassed


@pytest.fixture(autouse=True)
def removed() -> Iterator[None]:
    yield
    nb.set_deadline(None)


def until_stopped(config: Any, ctx: Any) -> None:
    for step in range(10_000):
        ctx.report({"val_loss": 1.0}, step=step)
        time.sleep(0.01)


# --- what counts ---


def left(now: float, **runtime: Any) -> float:
    config = nb.load_config(env=None, overrides={"runtime": runtime})
    deadline = time_limit(config, root=Path("/nowhere"), now=now, environ={}).deadline
    assert deadline is not None
    return deadline - now


NO_TIMES = ["soon", "", -1, 0, True, [8]]


def test_a_time_is_seconds_a_text_or_a_moment() -> None:
    now = time.time()
    for limit in (7200, "2h", datetime.now() + timedelta(hours=2)):
        moment = nb.set_deadline(limit, reserve="15m")
        assert moment is not None
        assert moment.tzinfo is timezone.utc
        assert moment.timestamp() == pytest.approx(now + 7200, abs=5)
        assert left(now) == pytest.approx(7200 - 900, abs=5)
    assert nb.set_deadline(None) is None
    assert time_limit(nb.Config(), root=Path("/nowhere"), environ={}).deadline is None


def test_the_reserve_is_a_share_and_no_more_than_ten_minutes() -> None:
    now = time.time()
    nb.set_deadline(100)
    assert left(now) == pytest.approx(90, abs=1)
    nb.set_deadline("20h")
    assert left(now) == pytest.approx(72_000 - 600, abs=1)


def test_the_sooner_limit_counts_and_both_are_said() -> None:
    nb.set_deadline("2h", reserve="10m")
    assert left(time.time(), time_budget="30m") == pytest.approx(1800, abs=1)
    config = nb.load_config(env=None, overrides={"runtime.time_budget": "30m"})
    limit = time_limit(config, root=Path("/nowhere"), environ={})
    assert not limit.imposed
    assert "in 2 h (nb.set_deadline); this run may take 30 min" in limit.notes[-1][1]
    limit = time_limit(nb.Config(), root=Path("/nowhere"), environ={})
    assert limit.imposed
    assert limit.notes[-1][1].endswith(
        "in 2 h (nb.set_deadline): this run may take 1 h 50 min, 10 min are reserved for "
        "predictions"
    )
    nb.set_deadline("20m")
    assert left(time.time(), deadline="10000d") == pytest.approx(18 * 60, abs=1)


@pytest.mark.parametrize(
    ("limit", "reserve", "message"),
    [
        *((limit, None, "was given .* as limit(.|\n)*as 8h or") for limit in NO_TIMES),
        ("1h", "much", "was given 'much' as reserve"),
        ("1h", "2h", "a reserve of 2 h leaves no time of 1 h"),
    ],
)
def test_what_is_no_time_is_refused(limit: Any, reserve: Any, message: str) -> None:
    nb.set_deadline("1h")
    with pytest.raises(ConfigError, match=message):
        nb.set_deadline(limit, reserve=reserve)
    assert left(time.time()) > 3000  # the deadline before stays


# --- what runs ---


@pytest.mark.long
def test_a_launch_says_what_is_left_and_ends_in_time(
    config: nb.Config, capfd: pytest.CaptureFixture[str]
) -> None:
    nb.launch(lambda config, ctx: None, config)  # the fork server's start takes seconds
    deadline = nb.set_deadline(5, reserve=3)
    assert deadline is not None
    result = nb.launch(until_stopped, config, display="text")
    assert result.status == "deadline"
    assert time.time() < deadline.timestamp()
    assert "(nb.set_deadline): this run may take 2 s, 3 s are reserved" in capfd.readouterr().out
    # It has begun before the deadline; the next one would begin inside the reserve.
    output_dir = Path(config.runtime.output_dir)
    folders = set(output_dir.iterdir())
    with pytest.raises(DeadlinePassed, match=r"is in \d s, which are reserved: nothing new starts"):
        check_deadline(nb.Config())
    check_deadline(nb.Config(), uses_reserve=True)
    time.sleep(max(0.0, deadline.timestamp() - time.time()))
    everything = (
        lambda: nb.launch(until_stopped, config),
        lambda: nb.launch(until_stopped, config, start="inline"),
        lambda: nb.cross_validate(until_stopped, config, nb.make_folds([0, 1] * 6)),
        lambda: nb.sweep(until_stopped, config, {"optim.lr": [0.1, 0.2]}, n_trials=2),
    )
    match = r"the notebook's deadline, .*UTC, was \d+ s ago: nothing(.|\n)*Allowed(.|\n)*set_deadl"
    for call in everything:
        with pytest.raises(DeadlinePassed, match=match):
            call()
    assert set(output_dir.iterdir()) == folders  # nothing was begun
    nb.set_deadline(None)
    assert nb.launch(lambda config, ctx: 3, config).value == 3


@pytest.mark.long
def test_a_sweep_shares_the_deadline(config: nb.Config) -> None:
    nb.launch(lambda config, ctx: None, config)  # the fork server's start takes seconds
    deadline = nb.set_deadline(8, reserve=1)
    assert deadline is not None
    space = {"study": {"metric": "val_loss"}, "space": {"optim.lr": [0.1, 0.2]}}
    result = nb.sweep(until_stopped, config, space, n_trials=2, display="off")
    assert result.status == "deadline"
    # Where two others use the machine, the end alone takes seconds; both trials take 200 s.
    assert time.time() < deadline.timestamp() + 60


def second_fold_waits(config: Any, ctx: Any) -> dict[str, Any]:
    if ctx.fold.index == 1:
        until_stopped(config, ctx)
    return {"score": 1.0, "predictions": [0.5] * len(ctx.fold.valid_indices)}


@pytest.mark.long
def test_a_deadline_in_the_second_fold_keeps_the_first(
    config: nb.Config, capfd: pytest.CaptureFixture[str]
) -> None:
    folds = nb.make_folds([0, 1] * 6, k=3)
    nb.set_deadline(6, reserve=1)
    # One after the other: all devices for each fold.
    cv = nb.cross_validate(second_fold_waits, config, folds, processes=2, display="off")
    assert cv.status == "deadline"
    assert cv.finished == [0]
    nb.set_deadline(None)
    ones = cv.predict(np.ones(3), predict=lambda run, test: test, display="text")
    assert ones.tolist() == [1.0] * 3
    assert (
        "predicting with the models of 1 fold (folds that are not done, and are left out: 2)"
        in capfd.readouterr().out
    )
    with pytest.raises(nb.errors.FoldError, match="'only' has NaN among its predictions"):
        nb.blend({"only": cv}, [0, 1] * 6, metric=lambda y, p: 0.0, direction="maximize")
