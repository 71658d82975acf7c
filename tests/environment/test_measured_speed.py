"""Measured speeds as evidence of the plan, and DataParallel as a strategy of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from machines import A100, P100, SCRIPT, T4, cpu_machine, machine, plan_on, says

from nbtoolkit.environment.hardware import Hardware
from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.placement import MeasuredSpeed
from nbtoolkit.environment.plan import GroupNotFormed, make_plan
from nbtoolkit.errors import PlanError

KAGGLE = machine(T4, T4)
DATE = 1_795_468_913.0


def speed(ranks: int = 2, **speeds: float) -> MeasuredSpeed:
    return MeasuredSpeed(speeds=speeds, ranks=ranks, date=DATE)


def test_without_a_measurement_two_gpus_form_a_group_and_the_plan_says_what_measures_it() -> None:
    plan = plan_on(KAGGLE)
    assert (plan.processes, plan.strategy, plan.one_device_speed) == (2, "ddp", None)
    assert says(plan, "nb.calibrate(train, config) measures")
    for one in (plan_on(machine(T4)), plan_on(cpu_machine()), plan_on(KAGGLE, speed(single=1.0))):
        assert not says(one, "calibrate(train, config) measures")


@pytest.mark.parametrize(
    ("speeds", "strategy"),
    [
        ({"single": 1000, "ddp": 900}, "single"),
        ({"single": 940, "ddp": 900}, "ddp"),  # within 5%: as without a measurement
        ({"single": 1000, "ddp": 1900}, "ddp"),
        ({"single": 1000, "ddp": 1200, "dp": 1500}, "dp"),
        ({"single": 1000, "ddp": 1450, "dp": 1500}, "ddp"),
        ({"single": 1000, "dp": 600}, "single"),  # ddp failed
        ({}, "ddp"),
    ],
)
def test_a_strategy_that_is_clearly_faster_is_used(speeds: dict[str, float], strategy: str) -> None:
    plan = plan_on(KAGGLE, speed(**speeds))
    assert plan.strategy == strategy
    placed = {"single": (1, 1), "ddp": (2, 2), "dp": (1, 2)}
    assert (plan.processes, len(plan.devices)) == placed[strategy]
    assert plan.one_device_speed == speeds.get("single")
    # never slower than the best of the table by more than 5%
    assert speeds.get(strategy, 0.0) * 1.05 >= max(speeds.values(), default=0.0)


def test_the_reason_has_both_numbers_and_the_date() -> None:
    (first, *_) = plan_on(KAGGLE, speed(single=5210, ddp=3904)).reasons
    assert "1 process on GPU 0" in first
    assert "single does 5,210 samples/s, ddp does 3,904 samples/s" in first
    assert "measured 2026-11-23" in first


@pytest.mark.parametrize(
    ("hardware", "speeds", "settings", "strategy"),
    [
        (KAGGLE, {"single": 1000, "ddp": 500}, {"distributed__strategy": "ddp"}, "ddp"),
        (KAGGLE, {"single": 1000, "ddp": 500}, {"distributed__world_size": 2}, "ddp"),
        (KAGGLE, {"single": 1000, "ddp": 500}, {"distributed__enabled": True}, "ddp"),
        (KAGGLE, {"single": 1000, "ddp": 500}, {"distributed__strategy": "measured"}, "single"),
        (KAGGLE, {"single": 1000, "ddp": 1900}, {"start": "inline"}, "single"),
        (KAGGLE, {"single": 1, "ddp": 2}, {"distributed__backend": "tensorflow"}, "tensorflow"),
        (cpu_machine(2), {"single": 1000, "ddp": 1600}, {}, "ddp"),
        (cpu_machine(2), {"single": 1000, "ddp": 1040}, {}, "single"),
    ],
)
def test_settings_come_before_a_measurement(
    hardware: Hardware, speeds: dict[str, float], settings: dict[str, Any], strategy: str
) -> None:
    plan = plan_on(hardware, speed(**speeds), **settings)
    assert (plan.strategy, plan.processes) == (strategy, 2 if strategy == "ddp" else 1)


def test_a_measurement_of_another_number_of_ranks_decides_nothing() -> None:
    plan = plan_on(cpu_machine(8), speed(ranks=4, single=1000, ddp=3000))
    assert (plan.strategy, plan.one_device_speed) == ("single", 1000)


def test_a_group_that_fails_falls_back_whatever_was_measured() -> None:
    plan = plan_on(KAGGLE, GroupNotFormed("no"), speed(single=1000, ddp=1900))
    assert (plan.processes, plan.strategy) == (1, "single")


# --- DataParallel ---


def test_data_parallel_is_one_process_with_all_equal_gpus() -> None:
    plan = plan_on(KAGGLE, distributed__strategy="dp", train__batch_size=64)
    assert (plan.strategy, plan.processes, plan.backend) == ("dp", 1, None)
    assert plan.device_names == ("Tesla T4", "Tesla T4")
    assert len(set(plan.devices)) == 2
    assert (plan.global_batch_size, plan.batch_size_per_device) == (64, 64)
    assert "(dp)" in plan.explain()
    assert says(plan, "batch norms take their statistics from each device")
    assert LaunchPlan.from_dict(plan.to_dict()) == plan
    third = plan_on(machine(A100, A100, P100), distributed__strategy="dp")
    assert third.device_names == (A100.name, A100.name)


def test_a_batch_size_per_device_counts_for_each_device_of_data_parallel() -> None:
    settings = {"train__batch_size_per_device": 16, "optim__lr_rule": "linear"}
    plans = [plan_on(KAGGLE, distributed__strategy=name, **settings) for name in ("dp", "ddp")]
    assert [plan.global_batch_size for plan in plans] == [32, 32]
    assert [plan.lr_factor for plan in plans] == [2.0, 2.0]


def test_data_parallel_on_one_gpu_is_one_process() -> None:
    plan = plan_on(machine(T4), distributed__strategy="dp")
    assert (plan.strategy, len(plan.devices)) == ("single", 1)
    assert says(plan, "there is one device")
    chosen = plan_on(KAGGLE, distributed__strategy="dp", distributed__device_ids=[1])
    assert chosen.strategy == "single"


def test_data_parallel_on_the_cpu_is_refused() -> None:
    with pytest.raises(
        PlanError,
        match=r"strategy is dp, which needs GPUs(.|\n)*Allowed: auto, single or ddp(.|\n)*Do now",
    ):
        plan_on(cpu_machine(), distributed__strategy="dp")


def test_ranks_of_another_launcher_are_not_measured() -> None:
    host = replace(SCRIPT, is_rank=True, world_size=2, local_world_size=2, rank_reason="torchrun")
    plan = make_plan({}, host, KAGGLE, (speed(single=1000, ddp=500),))
    assert (plan.processes, plan.strategy) == (2, "ddp")
