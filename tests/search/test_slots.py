"""The slots of a search's jobs: decided from injected hardware, tried with real processes."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from kernels import SECONDS

import nbtoolkit as nb
from nbtoolkit import errors
from nbtoolkit.environment.hardware import Device, Hardware, detect_hardware
from nbtoolkit.search import submit
from nbtoolkit.search.pool import Search
from nbtoolkit.search.slots import Slot, Slots, make_slots
from nbtoolkit.search.study.sweep_config import SweepConfig
from nbtoolkit.search.submit import start_search
from nbtoolkit.search.sweep_result import SweepResult

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


# --- jobs that are too large ---


def needs_ranks(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    """A trial that fits into the memory of a number of devices."""
    began = time.time()
    time.sleep(0.2)
    if ctx.is_main:
        with (ctx.paths.folder / "times.txt").open("a") as file:
            file.write(f"{ctx.world_size} {began} {time.time()}\n")
    if ctx.world_size < ctx.params["data.ranks"]:
        raise MemoryError("too large")
    return {"val_loss": float(os.getpid())}


def test_a_trial_that_is_too_large_runs_once_on_all_devices_and_alone(
    config: nb.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        "space": {"data.ranks": {"type": "categorical", "choices": [2, 1, 3, 0]}},
    }
    given = SweepConfig.model_validate(sweep_config)
    loop = "nbtoolkit.search.loop:run_sweep"
    monkeypatch.setattr(submit, "make_slots", lambda *_, **__: slots)
    search = Search(kind="sweep", loop=loop, sweep_config=given)
    started = start_search(needs_ranks, config, search, name="large")
    folder = started.run.paths.folder
    handle = nb.SweepHandle(started.run.paths, SweepResult, started=started.process)
    handle.result(timeout=SECONDS)
    states = {e.number: e.state for e in handle.events() if e.type == "trial"}
    assert states == {0: "complete", 1: "complete", 2: "infeasible", 3: "complete"}
    notes = [e.text for e in handle.events() if e.type == "note"]
    again = "ran out of memory: it runs again on all devices"
    assert [text for text in notes if again in text] == [
        f"trials/0000 {again}",
        f"trials/0002 {again}",
    ]
    times = [times_of(folder / f"trials/000{number}") for number in range(4)]
    assert [[ranks for ranks, _, _ in rows] for rows in times] == [[1, 2], [1], [1, 2], [1]]
    rows = [row for trial in times for row in trial]
    for ranks, begin, end in rows:
        others = [row for row in rows if row[1:] != (begin, end)]
        assert ranks == 1 or all(last < begin or end < first for _, first, last in others)


def times_of(trial: Path) -> list[tuple[int, float, float]]:
    """The ranks, the begin and the end of each run of a trial."""
    rows = [line.split() for line in (trial / "times.txt").read_text().splitlines()]
    return [(int(ranks), float(begin), float(end)) for ranks, begin, end in rows]
