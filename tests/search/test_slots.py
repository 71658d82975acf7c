"""The slots of a search's jobs: decided from injected hardware, tried with real processes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from kernels import SECONDS

import nbtoolkit as nb
from nbtoolkit import errors
from nbtoolkit.environment.hardware import Device, Hardware, detect_hardware
from nbtoolkit.run.events import Event
from nbtoolkit.search.algorithm import JobResult, Search, SearchJob
from nbtoolkit.search.slots import Slot, SlotAllocator, Slots, make_slots
from nbtoolkit.search.submit import start_search
from nbtoolkit.search.sweep_result import SweepResult
from nbtoolkit.study.sweep_config import SweepConfig

GIB = 2**30


def t4(index: int) -> Device:
    memory = 15 * GIB
    return Device(
        index=index,
        uuid=f"GPU-{index}",
        name="Tesla T4",
        memory_total=memory,
        memory_free=memory,
        capability=(7, 5),
    )


CPU = Hardware(cpu_count=2, memory=24 * GIB)
KAGGLE = Hardware(devices=(t4(0), t4(1)), cpu_count=4, memory=30 * GIB)


@pytest.fixture
def config(tmp_path: Path) -> nb.Config:
    overrides = {"runtime.output_dir": str(tmp_path / "out"), "tracking.mlflow": False}
    return nb.load_config(env=None, overrides=overrides)


def test_two_t4s_are_two_slots(config: nb.Config) -> None:
    slots = make_slots(config, KAGGLE)
    assert [slot.name for slot in slots.slots] == ["cuda:0", "cuda:1"]
    plans = [
        nb.make_plan(config.with_overrides(slot.overrides), nb.detect_host({}), slot.hardware)
        for slot in slots.slots
    ]
    assert [plan.devices for plan in plans] == [("GPU-0",), ("GPU-1",)]
    assert [(plan.processes, plan.threads_per_rank) for plan in plans] == [(1, 2), (1, 2)]
    assert "one device per trial" in slots.explain()


def test_trials_share_a_device_where_that_is_wished(config: nb.Config) -> None:
    slots = make_slots(config, KAGGLE, "device_per_trial", per_device=2)
    names = [slot.name for slot in slots.slots]
    assert names == ["cuda:0 (1)", "cuda:1 (1)", "cuda:0 (2)", "cuda:1 (2)"]
    with pytest.raises(errors.PlanError, match=r"trials_per_device is 0\n.*1 and more"):
        make_slots(config, KAGGLE, per_device=0)


def test_fewer_trials_than_devices_get_all_of_them(config: nb.Config) -> None:
    slots = make_slots(config, KAGGLE, jobs=1)
    assert slots.placement == "all_devices_per_trial"
    assert "1 to run, and 2 devices" in slots.why
    assert len(make_slots(config, KAGGLE, jobs=2).slots) == 2


@pytest.mark.parametrize(("memory", "count"), [(24 * GIB, 2), (2 * GIB, 1), (0, 2)])
def test_on_the_cpu_memory_counts_too(config: nb.Config, memory: int, count: int) -> None:
    assert len(make_slots(config, replace(CPU, memory=memory)).slots) == count


def test_ranks_that_were_asked_for_get_all_devices(config: nb.Config) -> None:
    two = config.with_overrides({"distributed.world_size": 2, "distributed.enabled": True})
    assert make_slots(two, CPU).placement == "all_devices_per_trial"
    assert len(make_slots(two, CPU, "device_per_trial").slots) == 2


@pytest.mark.parametrize("strategy", ["ddp", "dp", "measured"])
def test_a_trial_on_one_device_runs_with_any_strategy_of_the_run(
    config: nb.Config, strategy: str
) -> None:
    base = config.with_overrides({"distributed.strategy": strategy})
    for slot in (*make_slots(base, KAGGLE).slots, *make_slots(base, CPU).slots):
        settings = base.with_overrides(slot.overrides)
        plan = nb.make_plan(settings, nb.detect_host({}), slot.hardware)
        assert (plan.strategy, plan.processes) == ("single", 1)


# --- what is seen changes what auto does ---


class Notes:
    """An event log that keeps its notes."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, event: Event) -> None:
        """Nothing that these tests ask for."""

    def note(self, text: str, level: str = "info") -> None:
        self.texts.append(text)


def room(config: nb.Config) -> tuple[SlotAllocator, Notes]:
    notes = Notes()
    return SlotAllocator(make_slots(config, KAGGLE), notes), notes


def named(places: list[tuple[SearchJob, Slot]]) -> list[tuple[str, str]]:
    return [(job.key, slot.name) for job, slot in places]


A, B = SearchJob(key="a"), SearchJob(key="b")
OOM = JobResult(status="failed", fault="oom")


def test_the_only_job_left_gets_all_devices_unless_they_were_slower(config: nb.Config) -> None:
    one, notes = room(config)
    ((_, slot),) = one.assign([A])
    assert (slot.name, one.free) == ("all devices", 0)
    assert "is the last job" in notes.texts[0]
    one.release(slot)
    assert not one.should_retry(A, slot, JobResult(status="completed", seconds=9.0))
    places = one.assign([A, B])
    assert named(places) == [("a", "cuda:0"), ("b", "cuda:1")]
    for job, slot in places:
        one.release(slot)
        assert not one.should_retry(job, slot, JobResult(status="completed", seconds=5.0))
    assert named(one.assign([A])) == [("a", "cuda:0")]


def test_a_job_too_large_for_one_device_gets_all_of_them_once(config: nb.Config) -> None:
    one, notes = room(config)
    (a, first), (b, second) = one.assign([A, B])
    one.release(first)
    assert one.should_retry(a, first, OOM)
    assert (one.free, one.assign([])) == (0, [])  # the other device is still taken
    one.release(second)
    assert not one.should_retry(b, second, JobResult(status="completed"))
    (again,) = one.assign([])
    assert named([again]) == [("a", "all devices")]
    assert "ran out of memory: it runs again on all devices" in notes.texts[0]
    one.release(again[1])
    assert not one.should_retry(a, again[1], OOM)
    assert one.free == 2


def needs_two(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    """A trial that fits into the memory of two devices only."""
    if ctx.world_size == 1 and ctx.params["data.large"]:
        raise MemoryError("too large")
    return {"val_loss": float(os.getpid())}


def test_a_trial_that_is_too_large_runs_on_all_devices(config: nb.Config) -> None:
    hardware = detect_hardware()
    alone = {"distributed.enabled": False, "distributed.world_size": 1}
    both = {"distributed.enabled": True, "distributed.world_size": 2}
    slots = Slots(
        slots=tuple(Slot(name=f"cpu {n}", hardware=hardware, overrides=alone) for n in range(2)),
        placement="device_per_trial",
        why="the test says so",
        together=Slot(name="all devices", hardware=hardware, overrides=both),
    )
    sweep_config = {
        "study": {"sampler": "grid", "metric": "val_loss", "direction": "minimize"},
        "space": {"data.large": {"type": "categorical", "choices": [False, True]}},
    }
    program = "nbtoolkit.search.sweep_algorithm:make_algorithm"
    given = SweepConfig.model_validate(sweep_config)
    search = Search(kind="sweep", algorithm=program, sweep_config=given, slots=slots)
    started = start_search(needs_two, config, search, name="large")
    handle = nb.SweepHandle(started.run.paths, SweepResult, started=started.process)
    handle.result(timeout=SECONDS)
    states = {e.number: e.state for e in handle.events() if e.type == "trial"}
    assert states == {0: "complete", 1: "complete"}
    notes = [e.text for e in handle.events() if e.type == "note"]
    assert any("ran out of memory: it runs again on all devices" in text for text in notes)
