"""The learning rate of every optimizer step, equal to torch's schedulers where they exist."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.training.optim.schedule import Schedule, make_schedule
from nbtoolkit.worker.context import RunContext

EVERY_KIND = ["cosine", "linear", "constant", "one_cycle", "plateau"]


def configured(kind: str, **more: Any) -> Config:
    optim = {"lr": 0.1, "warmup_ratio": 0.0, "schedule": kind, **more}
    return Config().with_overrides({"optim": optim})


def schedule_of(kind: str, *, steps: int = 6, factor: float = 1.0, **more: Any) -> Schedule:
    return make_schedule(configured(kind, **more), steps=steps, factor=factor)


def rates(schedule: Schedule) -> list[float]:
    return [schedule.rate(step) for step in range(schedule.total)]


def optimizer() -> SGD:
    """What torch's schedulers act on."""
    return SGD([torch.zeros(1)], lr=0.1, momentum=0.9)


# --- the curves ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.1, 0.2, 0.2, 0.2, 0.2, 0.2]),
        ("linear", [0.1, 0.2, 0.2, 0.15, 0.1, 0.05]),
        ("cosine", [0.1, 0.2, 0.2, 0.17071, 0.1, 0.02929]),
        ("plateau", [0.1, 0.2, 0.2, 0.2, 0.2, 0.2]),
    ],
)
def test_the_learning_rate_of_every_step(kind: str, expected: list[float]) -> None:
    schedule = schedule_of(kind, factor=2.0, warmup_ratio=1 / 3)
    assert rates(schedule) == pytest.approx(expected, abs=1e-5)
    assert schedule.momentum(3) is None


@pytest.mark.parametrize(("kind", "middle"), [("linear", 0.06), ("cosine", 0.06)])
def test_the_floor_is_where_the_way_down_ends(kind: str, middle: float) -> None:
    schedule = schedule_of(kind, min_lr_ratio=0.2)
    assert schedule.rate(3) == pytest.approx(middle)
    assert schedule.rate(6) == schedule.rate(60) == pytest.approx(0.02)


@pytest.mark.parametrize(("steps", "warmup"), [(20, 0.3), (20, 0.25), (7, 0.35), (101, 0.5)])
@pytest.mark.parametrize("floor", [0.0, 0.01])
def test_one_cycle_is_torchs_in_every_step(steps: int, warmup: float, floor: float) -> None:
    schedule = schedule_of("one_cycle", steps=steps, warmup_ratio=warmup, min_lr_ratio=floor)
    sgd = optimizer()
    theirs = OneCycleLR(
        sgd,
        max_lr=0.1,
        total_steps=steps,
        pct_start=warmup,
        final_div_factor=math.inf if floor == 0 else 1 / (25 * floor),
    )
    for step in range(steps):
        group = sgd.param_groups[0]
        assert schedule.rate(step) == pytest.approx(group["lr"], abs=1e-12)
        assert schedule.momentum(step) == pytest.approx(group["momentum"], abs=1e-12)
        sgd.step()
        if step < steps - 1:
            theirs.step()


def test_one_cycle_without_a_warmup_only_falls() -> None:
    schedule = schedule_of("one_cycle", min_lr_ratio=0.1)
    assert rates(schedule)[0] == 0.1
    assert rates(schedule) == sorted(rates(schedule), reverse=True)
    assert schedule.rate(5) == pytest.approx(0.01)
    assert (schedule.momentum(0), schedule.momentum(5)) == (0.85, 0.95)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_warmup_may_be_the_whole_run(kind: str) -> None:
    schedule = schedule_of(kind, warmup_ratio=1.0)
    assert rates(schedule) == sorted(set(rates(schedule)))
    assert rates(schedule)[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("warmup", [0.0, 0.05, 1.0])
def test_a_run_may_have_one_step(kind: str, warmup: float) -> None:
    assert rates(schedule_of(kind, steps=1, warmup_ratio=warmup)) == pytest.approx([0.1])


# --- plateau -------------------------------------------------------------------------------------

VALUES = [3.0, 2.0, 2.5, 2.5, 2.5, 1.0, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 0.5, 0.7]


@pytest.mark.parametrize(("patience", "floor"), [(1, 0.0), (2, 0.0), (3, 0.2), (20, 0.0)])
def test_a_plateau_drops_when_torchs_does(patience: int, floor: float) -> None:
    more = {"plateau_patience": patience, "plateau_factor": 0.5, "min_lr_ratio": floor}
    schedule = schedule_of("plateau", **more)
    sgd = optimizer()
    theirs = ReduceLROnPlateau(
        sgd, factor=0.5, patience=patience - 1, threshold=0.0, min_lr=0.1 * floor, eps=0.0
    )
    best = math.inf
    for value in VALUES:
        schedule.observe(value, value < best)
        best = min(best, value)
        theirs.step(value)
        assert schedule.rate(3) == pytest.approx(sgd.param_groups[0]["lr"])


def test_a_value_that_is_no_number_is_never_better() -> None:
    schedule = schedule_of("plateau", plateau_patience=2)
    for _ in range(2):
        schedule.observe(math.nan, True)
    assert schedule.rate(0) == pytest.approx(0.01)


def test_a_plateau_goes_on_where_it_was() -> None:
    whole, half = (schedule_of("plateau", plateau_patience=3) for _ in range(2))
    for _ in range(5):
        whole.observe(1.0, False)
    state = json.loads(json.dumps(whole.state()))
    half.restore(state)
    assert half.rate(0) == whole.rate(0) == pytest.approx(0.01)
    half.observe(1.0, False)
    assert half.rate(0) == pytest.approx(0.001)


@pytest.mark.parametrize("kind", EVERY_KIND[:-1])
def test_the_others_depend_on_the_step_alone(kind: str) -> None:
    schedule = schedule_of(kind)
    before = rates(schedule)
    for _ in range(9):
        schedule.observe(1.0, False)
    schedule.restore(schedule.state())
    assert rates(schedule) == before
    assert schedule.state() == {}


# --- in a run ------------------------------------------------------------------------------------


def every_curve(config: Config, ctx: RunContext) -> None:
    """A fit of 9 steps with each kind of schedule."""
    data = torch.randn(36, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(36, 1)
    loss = torch.nn.functional.mse_loss
    for kind in EVERY_KIND:
        one = config.with_overrides({"optim.schedule": kind})
        nb.fit(ctx, one, torch.nn.Linear(3, 1), data, None, loss=loss)


def launch(folder: Path, ranks: int, **more: Any) -> list[float]:
    """The learning rates of all steps of :func:`every_curve`, as logged."""
    settings = {
        "optim": {"lr": 0.1, "warmup_ratio": 0.2, **more.pop("optim", {})},
        "train": {"epochs": 3, **more},
        "tracking": {"mlflow": False, "log_every_n_steps": 1},
        "runtime.output_dir": str(folder),
    }
    config = Config().with_overrides(settings)
    result = nb.launch(every_curve, config, processes=ranks, resume="never", display="off")
    events = map(json.loads, result.paths.events.read_text().splitlines())
    return [event["values"]["lr"] for event in events if event["type"] == "metrics"]


def every_rate(factor: float) -> list[float]:
    """What :func:`launch` is to give."""
    schedules = [schedule_of(kind, steps=9, warmup_ratio=0.2, factor=factor) for kind in EVERY_KIND]
    return [rate for schedule in schedules for rate in rates(schedule)]


def test_the_curve_depends_neither_on_ranks_nor_on_accumulation(tmp_path: Path) -> None:
    alone = launch(tmp_path, 1, batch_size=12)
    assert (
        alone
        == launch(tmp_path, 2, batch_size=12, gradient_accumulation_steps=3)
        == every_rate(1.0)
    )


@pytest.mark.long
def test_the_rate_follows_the_rule_when_the_batch_is_one_devices(tmp_path: Path) -> None:
    found = launch(tmp_path, 2, batch_size_per_device=6, optim={"lr_rule": "linear"})
    assert found == every_rate(2.0)
