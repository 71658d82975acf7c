"""make_plan: the decision for every machine and setting, and the sentence that explains it."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from dataclasses import replace
from typing import Any

import cloudpickle
import pytest
from machines import (
    A100,
    CU124,
    H100,
    P100,
    RTX_PRO,
    SCRIPT,
    T4,
    V100,
    Card,
    cpu_machine,
    machine,
    plan_on,
    plan_settings,
    says,
    uuid_of,
)

from nbtoolkit.config.schema import load_config
from nbtoolkit.environment.hardware import Hardware
from nbtoolkit.environment.launch_plan import BatchSplit, LaunchPlan, split_batch
from nbtoolkit.environment.plan import Evidence, GroupNotFormed, PortBusy, make_plan
from nbtoolkit.errors import GroupStartFailed, PlanError

KAGGLE = replace(SCRIPT, kind="kaggle")
TPU = replace(KAGGLE, tpu=True, tpu_reason="TPU_NAME=local")
MIG = replace(A100, slices=("MIG-1111", "MIG-2222"))
HALF_T4 = replace(T4, total=T4.total // 2)
ECC_T4 = replace(T4, total=T4.total - 2**28)
TWO_T4 = machine(T4, T4)
CPU = cpu_machine()


def test_a_dict_of_settings_is_a_configuration() -> None:
    overrides = {"distributed.world_size": 2}
    plan = make_plan(overrides, SCRIPT, cpu_machine(4))
    assert plan == make_plan(load_config(overrides=overrides), SCRIPT, cpu_machine(4))
    assert plan.processes == 2


# What a machine gets without settings: the ranks, device, precision and backend, and a reason.
MACHINES = {
    "Kaggle 2xT4": (TWO_T4, "2 cuda fp16 nccl", "2 equal, usable GPUs"),
    "Colab T4": (machine(T4), "1 cuda fp16 None", "the only usable GPU"),
    "Kaggle P100": (machine(P100), "1 cpu fp32 None", "no code for sm_60"),
    "P100, old torch": (machine(P100, build=CU124), "1 cuda fp32 None", "no tensor cores"),
    "Kaggle RTX Pro": (machine(RTX_PRO), "1 cuda bf16 None", "is sm_120"),
    "RTX, old torch": (machine(RTX_PRO, build=CU124), "1 cpu fp32 None", "no code for sm_120"),
    "V100": (machine(V100, build=CU124), "1 cuda fp16 None", "sm_70"),
    "2xH100": (machine(H100, H100), "2 cuda bf16 nccl", "natively"),
    "8xA100": (machine(*[A100] * 8), "8 cuda bf16 nccl", "8 equal"),
    "T4 + unusable": (machine(T4, P100), "1 cuda fp16 None", "GPU 1 (Tesla P100"),
    "T4 + P100": (machine(T4, P100, build=CU124), "1 cuda fp16 None", "it differs from"),
    "T4 + A100": (machine(T4, A100), "1 cuda bf16 None", "best of unequal"),
    "A100 + 2xT4": (machine(A100, T4, T4), "1 cuda bf16 None", "best of unequal"),
    "T4 + half a T4": (machine(T4, HALF_T4), "1 cuda fp16 None", "differs"),
    "ECC takes a little": (machine(T4, ECC_T4), "2 cuda fp16 nccl", "2 equal"),
    "MIG": (machine(MIG), "1 cuda bf16 None", "MIG slice cannot"),
    "one masked": (machine(T4, T4, mask="1"), "1 cuda fp16 None", "only usable"),
    "all hidden": (machine(T4, T4, mask=""), "1 cpu fp32 None", "VISIBLE_DEVICES='' shows 0"),
    "CPU": (CPU, "1 cpu fp32 None", "no NVIDIA driver answers"),
}


@pytest.mark.parametrize(("hardware", "decided", "reason"), MACHINES.values(), ids=MACHINES)
def test_what_is_there_is_used(hardware: Hardware, decided: str, reason: str) -> None:
    plan = plan_on(hardware)
    assert f"{plan.processes} {plan.device_type} {plan.precision} {plan.backend}" == decided
    assert plan.strategy == ("ddp" if plan.processes > 1 else "single")
    assert len(plan.devices) == (plan.processes if plan.device_type == "cuda" else 0)
    assert plan.global_batch_size == 128 == plan.batch_size_per_device * plan.processes
    assert says(plan, reason)


def test_the_devices_are_named_by_uuid_best_first() -> None:
    assert plan_on(TWO_T4).devices == (uuid_of(0), uuid_of(1))
    assert plan_on(machine(T4, A100)).devices == (uuid_of(1),)
    assert plan_on(machine(T4, A100), distributed__world_size=2).devices == (uuid_of(1), uuid_of(0))
    assert plan_on(machine(MIG)).devices == ("MIG-1111",)


@pytest.mark.parametrize(
    ("hardware", "settings", "processes", "reason"),
    [
        (TWO_T4, {"distributed__enabled": False}, 1, "distributed.enabled is false"),
        (TWO_T4, {"distributed__strategy": "single"}, 1, "distributed.strategy is single"),
        (TWO_T4, {"distributed__world_size": 1}, 1, "distributed.world_size is 1"),
        (TWO_T4, {"distributed__world_size": 2}, 2, "distributed.world_size is 2"),
        (TWO_T4, {"distributed__enabled": True}, 2, "2 equal, usable GPUs"),
        (TWO_T4, {"distributed__strategy": "ddp"}, 2, "2 equal, usable GPUs"),
        (TWO_T4, {"distributed__device_ids": [1]}, 1, "the only usable GPU"),
        (TWO_T4, {"distributed__device_ids": [1, 0]}, 2, "2 equal"),
        (CPU, {}, 1, "it uses all CPUs"),
        (CPU, {"distributed__enabled": True}, 2, "on 4 CPUs, auto means 2"),
        (CPU, {"distributed__strategy": "ddp"}, 2, "on 4 CPUs, auto means 2"),
        (cpu_machine(1), {"distributed__enabled": True}, 1, "on 1 CPUs, auto means 1"),
        (CPU, {"distributed__enabled": False}, 1, "distributed.enabled is false"),
        (CPU, {"distributed__world_size": 2}, 2, "world_size is 2"),
        (cpu_machine(2), {"distributed__world_size": 4}, 4, "world_size is 4"),
    ],
)
def test_settings_decide_the_number_of_processes(
    hardware: Hardware, settings: dict[str, Any], processes: int, reason: str
) -> None:
    plan = plan_on(hardware, **settings)
    assert plan.processes == processes
    assert says(plan, reason)
    if hardware is not TWO_T4:
        assert (plan.backend, plan.devices) == ("gloo" if processes > 1 else None, ())


def test_unequal_gpus_are_used_together_when_asked_for() -> None:
    plan = plan_on(machine(T4, A100), distributed__world_size=2)
    assert says(plan, "the slowest sets the pace")
    assert plan.precision == "fp16"  # what both can do


def test_memory_in_use_is_said() -> None:
    plan = plan_on(machine(T4, replace(T4, free=2 * 2**30)))
    assert says(plan, "GPU 1 (Tesla T4, 15.0 GiB, sm_75): only 2.0 GiB are free")
    assert not says(plan, "GPU 0 (Tesla T4, 15.0 GiB, sm_75): only")


REFUSED = [
    (
        TWO_T4,
        "distributed.world_size=3",
        "3 processes.* 2 can be used",
        "1 or 2 on GPUs; any number",
    ),
    (machine(T4, P100), "distributed.world_size=2", "1 can be used: GPU 0", "1 on GPUs"),
    (machine(MIG), "distributed.world_size=2", "1 can be used", "1 on GPUs"),
    (
        machine(T4),
        "distributed.device_ids=[0,2]",
        r"names \[2\], which .*cannot see",
        "GPU 0 (Tesla",
    ),
    (CPU, "distributed.device_ids=[0]", r"cannot see \(no NVIDIA driver", "null (CPU only)"),
    (machine(T4, P100), "distributed.device_ids=[1]", "GPU 1 .* no code for sm_60", "GPU 0 (Tesla"),
    (CPU, "train.precision=fp16", "fp16, but the run is on the CPU", "fp32, bf16 or auto"),
    (CPU, "distributed.backend=nccl", "is nccl, which needs one GPU", "auto or gloo"),
    (TWO_T4, "train.batch_size=129", "129 cannot be .* over 2 processes x 1", "such as 128 or 130"),
    (
        machine(*[T4] * 3),
        "train.batch_size=2 train.gradient_accumulation_steps=2",
        "2 cannot be split evenly over 3 processes x 2",
        "multiples of 6, such as 6",
    ),
]


@pytest.mark.parametrize(("hardware", "settings", "what", "allowed"), REFUSED)
def test_what_cannot_be_is_refused_and_told_what_can(
    hardware: Hardware, settings: str, what: str, allowed: str
) -> None:
    with pytest.raises(PlanError, match=what) as caught:
        make_plan(load_config(env=None, overrides=settings.split()), SCRIPT, hardware)
    assert allowed in caught.value.allowed
    assert caught.value.do


def test_a_tpu_alone_is_refused_with_a_way_out() -> None:
    with pytest.raises(
        PlanError, match=r"has a TPU \(TPU_NAME=local\) and no usable GPU"
    ) as caught:
        plan_on(CPU, host=TPU)
    assert "distributed.enabled: false to train on the CPU" in caught.value.do
    assert plan_on(CPU, host=TPU, distributed__enabled=False).device_type == "cpu"
    assert plan_on(machine(T4), host=TPU).device_type == "cuda"


@pytest.mark.parametrize(
    ("card", "setting", "precision", "sentence"),
    [
        (T4, "auto", "fp16", "fp16: Tesla T4 is sm_75, bf16 would be emulated"),
        (T4, "bf16", "bf16", "Tesla T4 is sm_75 and EMULATES it"),
        (T4, "fp32", "fp32", "fp32: train.precision is fp32"),
        (T4, "fp16", "fp16", "fp16: train.precision is fp16"),
        (A100, "auto", "bf16", "is sm_80, which computes it natively"),
        (A100, "bf16", "bf16", "computes it natively"),
        (A100, "fp16", "fp16", "train.precision is fp16"),
        (None, "auto", "fp32", "fp32: the run is on the CPU"),
        (None, "bf16", "bf16", "bf16: train.precision is bf16"),
        (None, "fp32", "fp32", "fp32: train.precision is fp32"),
    ],
)
def test_precision(card: Card | None, setting: str, precision: str, sentence: str) -> None:
    hardware = machine(card) if card else CPU
    plan = plan_on(hardware, train__precision=setting)
    assert plan.precision == precision
    assert says(plan, sentence)


@pytest.mark.parametrize(
    ("hardware", "setting", "backend"),
    [
        (TWO_T4, "auto", "nccl"),
        (TWO_T4, "nccl", "nccl"),
        (TWO_T4, "gloo", "gloo"),
        (machine(T4), "nccl", None),
        (CPU, "auto", "gloo"),
        (CPU, "gloo", "gloo"),
    ],
)
def test_backend(hardware: Hardware, setting: str, backend: str | None) -> None:
    plan = plan_on(hardware, distributed__backend=setting, distributed__enabled=True)
    assert plan.backend == backend
    assert backend is None or says(plan, f"{backend}: ")


def test_the_batch_is_global_whatever_the_number_of_processes() -> None:
    for cards, accumulate in itertools.product((1, 2, 4, 8), ("auto", 1, 2, 4)):
        settings = {"train__batch_size": 64, "train__gradient_accumulation_steps": accumulate}
        plan = plan_on(machine(*[T4] * cards), **settings)
        assert plan.global_batch_size == 64
        assert plan.batch_size_per_device * plan.processes * plan.accumulate == 64
        assert plan.lr_factor == 1.0


def test_splits_come_out_even_or_are_refused_with_sizes_that_do() -> None:
    for size, processes, accumulate in itertools.product(range(1, 50), (1, 2, 3, 8), (1, 2, 5)):
        try:
            assert split_batch(size, processes=processes, accumulate=accumulate).total == size
        except PlanError as error:
            assert size % (processes * accumulate)
            for near in error.allowed.split("such as ")[1].split(" or "):
                assert abs(int(near) - size) < processes * accumulate
                split_batch(int(near), processes=processes, accumulate=accumulate)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_a_batch_per_device_grows_with_the_devices(rule: str, factor: float) -> None:
    settings = {
        "train__batch_size_per_device": 32,
        "train__gradient_accumulation_steps": 2,
        "optim__lr_rule": rule,
    }
    plan = plan_on(TWO_T4, **settings)
    assert (plan.batch_size_per_device, plan.accumulate) == (32, 2)
    assert plan.global_batch_size == 128
    assert plan.lr_factor == factor
    assert says(plan, f"learning rate x {factor:g}")
    assert says(plan, f"optim.lr_rule is {rule}")


def test_falling_back_keeps_the_step_and_its_forward_passes() -> None:
    first = plan_on(TWO_T4)
    second = plan_on(TWO_T4, GroupNotFormed("NCCL: unhandled system error"))
    assert (second.processes, second.strategy, second.backend) == (1, "single", None)
    assert second.devices == first.devices[:1]
    assert second.global_batch_size == first.global_batch_size
    assert second.batch_size_per_device == first.batch_size_per_device == 64
    assert (first.accumulate, second.accumulate) == (1, 2)
    assert second.precision == first.precision
    assert second.reasons[0].startswith("FALLING BACK TO ONE PROCESS: 2 ranks could not form")
    assert "NCCL: unhandled system error" in second.reasons[0]
    assert says(second, "accumulation 1 -> 2 on one process")
    assert says(second, "1 process on GPU 0")
    assert not says(second, "2 processes on")


def test_falling_back_keeps_the_learning_rate() -> None:
    settings = {"train__batch_size_per_device": 32, "optim__lr_rule": "linear"}
    plan = plan_on(TWO_T4, GroupNotFormed("x"), **settings)
    assert (plan.global_batch_size, plan.lr_factor) == (64, 2.0)


def test_falling_back_on_the_cpu() -> None:
    plan = plan_on(CPU, GroupNotFormed("x"), distributed__world_size=4)
    assert (plan.processes, plan.accumulate, plan.threads_per_rank) == (1, 4, 4)


def test_without_fallback_a_failed_group_is_an_error() -> None:
    with pytest.raises(GroupStartFailed, match=r"2 ranks could not form .*: no route") as caught:
        plan_on(TWO_T4, GroupNotFormed("no route"), distributed__fallback=False)
    assert "distributed.fallback: true" in caught.value.do


def test_a_failure_means_nothing_to_one_process() -> None:
    assert plan_on(machine(T4), GroupNotFormed("x")) == plan_on(machine(T4))


def test_ports() -> None:
    two = TWO_T4
    assert plan_on(two).port is None
    assert plan_on(two, distributed__port=29500).port == 29500
    busy = plan_on(two, PortBusy(29500), distributed__port=29500)
    assert busy.port is None
    assert busy.reasons[0] == "port 29500 was busy"
    assert says(busy, "port: a free one is chosen")
    assert plan_on(machine(T4), distributed__port=29500).port is None


@pytest.mark.parametrize(("cpus", "processes", "threads"), [(4, 2, 2), (5, 2, 2), (1, 2, 1)])
def test_threads(cpus: int, processes: int, threads: int) -> None:
    plan = plan_on(cpu_machine(cpus), distributed__world_size=processes)
    assert plan.threads_per_rank == threads
    assert says(plan, f"{cpus} CPUs for {processes}")


def test_inline_leaves_room_for_one() -> None:
    plan = plan_on(TWO_T4, start="inline")
    assert (plan.start, plan.processes) == ("inline", 1)
    assert says(plan, 'start="inline" runs in this process')
    with pytest.raises(PlanError, match='world_size is 2, but start="inline" runs in this'):
        plan_on(TWO_T4, start="inline", distributed__world_size=2)


RANK = replace(
    SCRIPT,
    is_rank=True,
    rank_reason="torchrun: RANK=3, WORLD_SIZE=4",
    rank=3,
    local_rank=1,
    world_size=4,
    local_world_size=2,
)


def test_a_rank_of_torchrun_runs_in_place() -> None:
    plan = plan_on(TWO_T4, host=RANK, distributed__world_size=2)
    assert (plan.start, plan.processes, plan.strategy) == ("inline", 4, "ddp")
    assert plan.batch_size_per_device == 32  # of 128, over all four
    assert plan.threads_per_rank == 2  # 4 CPUs for the two on this machine
    assert says(plan, "in place, started by torchrun: RANK=3")
    on_cpu = plan_on(CPU, host=RANK)
    assert (on_cpu.processes, on_cpu.backend) == (4, "gloo")


def test_more_ranks_of_torchrun_than_gpus_are_refused() -> None:
    with pytest.raises(
        PlanError, match="2 ranks were started on this machine, but 1 GPUs"
    ) as caught:
        plan_on(machine(T4), host=RANK)
    assert "--nproc-per-node 1" in caught.value.do


def test_a_rank_of_torchrun_cannot_fall_back() -> None:
    with pytest.raises(GroupStartFailed, match="4 ranks could not form"):
        plan_on(TWO_T4, GroupNotFormed("x"), host=RANK)


def test_settings_pass_through() -> None:
    settings = {
        "distributed__find_unused_parameters": True,
        "distributed__bucket_cap_mb": 50,
        "distributed__timeout": 900,
        "distributed__fallback": False,
    }
    plan = plan_on(TWO_T4, **settings)
    assert dict(plan.ddp) == {
        "find_unused_parameters": True,
        "broadcast_buffers": True,
        "gradient_as_bucket_view": True,
        "bucket_cap_mb": 50,
        "static_graph": False,
    }
    assert plan.group_timeout == 900.0
    assert plan.fallback is False


SETTINGS: list[dict[str, Any]] = [
    {},
    {"distributed__enabled": True},
    {"distributed__enabled": False, "train__precision": "bf16"},
    {"train__batch_size_per_device": 16, "optim__lr_rule": "sqrt"},
]
EVIDENCE: list[tuple[Evidence, ...]] = [(), (GroupNotFormed("x"),), (PortBusy(1234),)]
EVERY = list(
    itertools.product(
        [TWO_T4, machine(T4, P100), machine(MIG), machine(RTX_PRO), CPU], SETTINGS, EVIDENCE
    )
)


def test_every_plan_is_pure_frozen_and_plain_data() -> None:
    for hardware, settings, evidence in EVERY:
        check_pure_frozen_and_plain(hardware, settings, evidence)


def check_pure_frozen_and_plain(
    hardware: Hardware, settings: dict[str, Any], evidence: tuple[Evidence, ...]
) -> None:
    asked = plan_settings(settings)
    before = copy.deepcopy((asked, KAGGLE, hardware, evidence))
    plan = make_plan(asked, KAGGLE, hardware, evidence)
    assert make_plan(asked, KAGGLE, hardware, evidence) == plan
    assert (asked, KAGGLE, hardware, evidence) == before
    assert pickle.loads(pickle.dumps(plan)) == plan
    # cloudpickle copies the code of a class's method; in a fresh supervisor that took 5 ms.
    assert b"CodeType" not in cloudpickle.dumps(plan)
    assert copy.deepcopy(plan) == plan
    assert LaunchPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert hash(plan) == hash(pickle.loads(pickle.dumps(plan)))
    assert replace(plan, start="inline").start == "inline"
    with pytest.raises(AttributeError):
        plan.processes = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        plan.ddp["static_graph"] = True  # type: ignore[index]


def test_every_plan_explains_every_decision() -> None:
    for hardware, settings, evidence in EVERY:
        check_explains_every_decision(hardware, settings, evidence)


def check_explains_every_decision(
    hardware: Hardware, settings: dict[str, Any], evidence: tuple[Evidence, ...]
) -> None:
    plan = plan_on(hardware, *evidence, **settings)
    head, *lines = plan.explain().splitlines()
    assert head.startswith("plan: ")
    assert len(lines) == len(plan.reasons) == len(set(plan.reasons))
    who = "1 process" if plan.processes == 1 else f"{plan.processes} processes"
    for told in (who, plan.precision, f"batch {plan.global_batch_size}", plan.start):
        assert told in head
    starts = [f"{who} on ", f"{plan.precision}: ", f"batch {plan.global_batch_size} = "]
    starts += ["CPU threads per process: "]
    starts += [f"{plan.backend}: ", "port: "] if plan.backend else []
    starts += ["learning rate x "] if "train__batch_size_per_device" in settings else []
    starts += ["no GPU: "] if plan.device_type == "cpu" else []
    for start in starts:
        assert any(line.startswith(f"  - {start}") for line in lines), start
    for device in hardware.devices:
        assert device.usable or f"{device} is not used" in plan.explain()


def test_html_shows_the_decisions_and_escapes() -> None:
    plan = plan_on(machine(replace(T4, name="<b>T4</b>")), train__batch_size=96)
    html = plan._repr_html_()
    assert "&lt;b&gt;T4&lt;/b&gt;" in html
    assert "<b>T4" not in html
    for told in ("fp16", "96 = 96 x 1 x 1", "single", "forkserver", "bf16 would be emulated"):
        assert told in html
    assert "color" not in html


def test_a_foreign_dict_is_no_plan() -> None:
    with pytest.raises(TypeError, match="unknown_key"):
        LaunchPlan.from_dict({**plan_on(CPU).to_dict(), "unknown_key": 1})


def test_a_batch_says_its_factors() -> None:
    batch = BatchSplit(per_device=8, processes=2, accumulate=3)
    assert str(batch) == "batch 48 = 8 x 2 processes x 3 accumulation steps"
    assert batch.on_one_process() == BatchSplit(per_device=8, processes=1, accumulate=6)


def test_a_plan_passes_through_the_environment() -> None:
    plan = plan_on(TWO_T4)
    variables = plan.to_env_dict()
    assert LaunchPlan.from_env(variables) == plan
    assert LaunchPlan.from_env({}) is None
    for damaged in ("{", "[]", '{"processes": 2}', '{"unknown": 1}'):
        with pytest.raises(PlanError, match=r"NBTOOLKIT_PLAN holds no plan(.|\n)*to_env_dict"):
            LaunchPlan.from_env({"NBTOOLKIT_PLAN": damaged})
