"""The learning rate of every optimizer step, equal to torch's schedulers where they exist."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.training.optim import Schedule, make_schedule, warmup_and_decay
from nbtoolkit.worker.context import RunContext

EVERY_KIND = ["cosine", "linear", "constant", "one_cycle", "plateau"]


def configured(kind: str, **more: Any) -> Config:
    optim = {"lr": 0.1, "warmup_ratio": 0.0, "schedule": kind, **more}
    return Config().with_overrides({"optim": optim})


def optimizer() -> SGD:
    return SGD([torch.zeros(1)], lr=0.1, momentum=0.9)


def schedule_of(
    kind: str, sgd: SGD, *, steps: int = 6, factor: float = 1.0, **more: Any
) -> Schedule:
    return make_schedule(configured(kind, **more), sgd, steps=steps, factor=factor)


def groups(kind: str, *, steps: int = 6, **more: Any) -> list[tuple[float, float]]:
    """The learning rate and the momentum of every step."""
    sgd = optimizer()
    schedule = schedule_of(kind, sgd, steps=steps, **more)
    seen = []
    for step in range(steps):
        schedule.begin_step(step)
        assert schedule.rate == sgd.param_groups[0]["lr"]
        seen.append((schedule.rate, sgd.param_groups[0]["momentum"]))
        sgd.step()
        schedule.end_step()
    return seen


def rates(kind: str, **more: Any) -> list[float]:
    return [rate for rate, _ in groups(kind, **more)]


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
    seen = groups(kind, factor=2.0, warmup_ratio=1 / 3)
    assert [rate for rate, _ in seen] == pytest.approx(expected, abs=1e-5)
    assert {momentum for _, momentum in seen} == {0.9}


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_the_floor_is_where_the_way_down_ends(kind: str) -> None:
    factor = warmup_and_decay(configured(kind, min_lr_ratio=0.2), 6)
    assert factor(3) == pytest.approx(0.6)
    assert factor(6) == factor(60) == pytest.approx(0.2)


@pytest.mark.parametrize(("steps", "warmup"), [(20, 0.3), (20, 0.25), (7, 0.35), (101, 0.5)])
@pytest.mark.parametrize("floor", [0.0, 0.01])
def test_one_cycle_goes_from_a_25th_to_the_peak_and_to_the_floor(
    steps: int, warmup: float, floor: float
) -> None:
    sgd = optimizer()
    theirs = OneCycleLR(
        sgd,
        max_lr=0.1,
        total_steps=steps,
        pct_start=warmup,
        final_div_factor=math.inf if floor == 0 else 1 / (25 * floor),
    )
    expected = []
    for step in range(steps):
        expected.append((sgd.param_groups[0]["lr"], sgd.param_groups[0]["momentum"]))
        sgd.step()
        if step < steps - 1:
            theirs.step()
    seen = groups("one_cycle", steps=steps, warmup_ratio=warmup, min_lr_ratio=floor)
    assert seen == expected
    assert seen[0] == pytest.approx((0.004, 0.95))
    assert seen[-1] == pytest.approx((0.1 * floor, 0.95))


@pytest.mark.parametrize(("steps", "warmup"), [(6, 0.0), (20, 0.05)])
def test_one_cycle_with_a_warmup_of_a_step_at_most_only_falls(steps: int, warmup: float) -> None:
    seen = groups("one_cycle", steps=steps, warmup_ratio=warmup, min_lr_ratio=0.1)
    assert seen == sorted(seen, key=lambda group: -group[0])
    assert seen[0][0] > 0.09
    assert seen[0][1] < 0.86
    assert seen[-1] == pytest.approx((0.01, 0.95))


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_warmup_may_be_the_whole_run(kind: str) -> None:
    seen = rates(kind, warmup_ratio=1.0)
    assert seen == sorted(set(seen))
    assert seen[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("warmup", [0.0, 0.05, 1.0])
def test_a_run_may_have_one_step(kind: str, warmup: float) -> None:
    (rate,) = rates(kind, steps=1, warmup_ratio=warmup)
    assert 0 < rate <= 0.1 if kind == "one_cycle" else rate == pytest.approx(0.1)


@pytest.mark.parametrize("kind", EVERY_KIND[:-1])
def test_the_rate_of_a_curve_depends_on_the_step_alone(kind: str) -> None:
    """Also the rates of a run that is resumed to be longer."""
    expected, sgd = rates(kind, steps=9, warmup_ratio=0.5), optimizer()
    schedule = schedule_of(kind, sgd, steps=9, warmup_ratio=0.5)
    for _ in range(9):
        schedule.end_epoch(1.0)
    assert schedule.state() == {}
    for step in (7, 2, 8, 0):
        schedule.begin_step(step)
        assert schedule.rate == expected[step]


def test_a_first_step_that_fp16_skips_is_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    schedule = schedule_of("cosine", optimizer())
    for step in range(2):
        schedule.begin_step(step)
        schedule.end_step()
    assert not recwarn.list


# --- plateau -------------------------------------------------------------------------------------

VALUES = [3.0, 2.0, 2.5, 2.5, 2.5, 1.0, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 0.5, 0.7]


@pytest.mark.parametrize(("patience", "floor"), [(1, 0.0), (2, 0.0), (3, 0.2), (20, 0.0)])
def test_a_plateau_drops_after_so_many_epochs_without_a_better_value(
    patience: int, floor: float
) -> None:
    more = {"plateau_patience": patience, "plateau_factor": 0.5, "min_lr_ratio": floor}
    schedule = schedule_of("plateau", optimizer(), **more)
    rate, best, worse = 0.1, math.inf, 0
    for value in VALUES:
        schedule.end_epoch(value)
        best, worse = min(best, value), 0 if value < best else worse + 1
        if worse == patience:
            rate, worse = max(rate * 0.5, 0.1 * floor), 0
        assert schedule.rate == pytest.approx(rate)


def test_a_plateau_of_a_metric_that_is_to_rise() -> None:
    config = configured("plateau", plateau_patience=1)
    sgd, config = optimizer(), config.with_overrides({"checkpoint.monitor": "val_accuracy"})
    schedule = make_schedule(config, sgd, steps=6)
    seen = []
    for value in (0.5, 0.6, 0.6):
        schedule.end_epoch(value)
        seen.append(schedule.rate)
    assert seen == pytest.approx([0.1, 0.1, 0.01])


def test_a_value_that_is_no_number_is_never_better() -> None:
    schedule = schedule_of("plateau", optimizer(), plateau_patience=2)
    for _ in range(2):
        schedule.end_epoch(math.nan)
    assert schedule.rate == pytest.approx(0.01)


def test_a_drop_in_the_warmup_stays() -> None:
    sgd = optimizer()
    schedule = schedule_of("plateau", sgd, plateau_patience=1, warmup_ratio=0.5, steps=8)
    seen = []
    for step in range(8):
        schedule.begin_step(step)
        seen.append(schedule.rate)
        sgd.step()
        schedule.end_step()
        if step < 2:
            schedule.end_epoch(1.0)
    assert seen == pytest.approx([0.025, 0.05, 0.0075, *[0.01] * 5])


def test_a_plateau_goes_on_where_it_was() -> None:
    of_whole, of_half = optimizer(), optimizer()
    whole, half = (schedule_of("plateau", sgd, plateau_patience=3) for sgd in (of_whole, of_half))
    for _ in range(6):
        whole.end_epoch(1.0)
    state = json.loads(json.dumps(whole.state()))
    half.restore(state)
    of_half.load_state_dict(of_whole.state_dict())
    assert half.rate == whole.rate == pytest.approx(0.01)
    half.end_epoch(1.0)
    assert half.rate == pytest.approx(0.001)


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
    curves = [rates(kind, steps=9, warmup_ratio=0.2, factor=factor) for kind in EVERY_KIND]
    return [rate for curve in curves for rate in curve]


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
