"""Runs whose ranks run out of memory: more accumulation steps, the same samples and results."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fits import configured, model_of, samples
from limits import Hungry, limit_addresses, memory_cgroup
from machines import CPU_BUILD, cpu_machine, machine, plan_on
from records import first_of
from torch import nn

import nbtoolkit as nb
from nbtoolkit.environment.plan import BatchTooLarge, GroupNotFormed, LaunchPlan, make_plan
from nbtoolkit.errors import LaunchError, PlanError, WorkerDied
from nbtoolkit.host import detect_host
from nbtoolkit.launcher.out_of_memory import is_out_of_memory
from nbtoolkit.run.attempts import newest_plan
from nbtoolkit.run.events import EventReader, PlanChanged
from nbtoolkit.run.paths import RunPaths

BATCH = 64


def hungry(config: Any, ctx: nb.RunContext) -> dict[str, float]:
    """Trains a model that needs 8 MB for each sample, within the limit that the config names."""
    data = config.data.to_dict()
    above, what, marker = data.get("above"), data.get("limit"), data.get("cut")
    if ctx.rank in data["ranks"] and what == "addresses":
        limit_addresses(200)
    elif ctx.rank in data["ranks"] and what == "cgroup":
        Path(data["cgroup"], "cgroup.procs").write_text(str(os.getpid()))

    def step(model: nn.Module, batch: Any) -> Any:
        if ctx.rank in data["ranks"] and above is not None and len(batch[0]) > above:
            if what == "signal":
                os.kill(os.getpid(), signal.SIGKILL)
            raise MemoryError(f"{len(batch[0])} samples")
        if marker and not Path(marker).exists() and [*ctx.paths.checkpoints.glob("step-*3")]:
            ctx.accelerator.wait_for_everyone()
            Path(marker).touch()
            raise RuntimeError("the session ends")
        return model(batch[0]), batch[1]

    sets = samples(2 * BATCH + 8), samples(8, seed=1)
    model = model_of(Hungry(8, touches=what == "cgroup"))
    return nb.fit(ctx, config, model, *sets, loss=nn.functional.cross_entropy, step=step)


def own_loop(config: Any, ctx: nb.RunContext) -> None:
    raise MemoryError("in a loop of its own")


def start(
    folder: Path, *, processes: int = 2, train: Any = hungry, epochs: int = 1, **more: Any
) -> nb.RunResult:
    data = {"ranks": [1], **{name: value for name, value in more.items() if "." not in name}}
    settings = {
        "runtime.output_dir": str(folder),
        **({} if "train.batch_size_per_device" in more else {"train.batch_size": BATCH}),
        "train.epochs": epochs,
        "checkpoint.every_steps": 1,
        **{name: value for name, value in more.items() if "." in name},
        **{f"data.{name}": value for name, value in data.items()},
    }
    return nb.launch(train, configured(overrides=settings), processes=processes, display="off")


def notes(result: nb.RunResult) -> str:
    return result.paths.events.read_text()


def check_equal(one: nb.RunResult, other: nb.RunResult) -> None:
    for name in ("train_loss", "val_loss", "best_epoch"):
        assert one.value[name] == pytest.approx(other.value[name], abs=1e-5)


def test_an_address_space_limit_on_one_rank_leads_to_more_accumulation(tmp_path: Path) -> None:
    free = start(tmp_path / "free")
    tight = start(tmp_path / "tight", limit="addresses")
    assert free.plan.accumulate == 1 < tight.plan.accumulate
    assert tight.plan.batch_size_per_device * tight.plan.accumulate * 2 == BATCH
    assert "samples in a forward pass ran out of memory" in notes(tight)
    check_equal(free, tight)


@pytest.mark.long
def test_a_rank_that_the_kernel_kills_at_a_cgroups_limit_starts_again(tmp_path: Path) -> None:
    name = f"nbtoolkit-test-{os.getpid()}"
    with memory_cgroup(name, megabytes=200) as folder:
        tight = start(tmp_path / "tight", limit="cgroup", cgroup=str(folder))
    free = start(tmp_path / "free")
    assert tight.plan.accumulate > 1
    check_equal(free, tight)


@pytest.mark.long
def test_a_kill_that_is_not_for_memory_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match="rank 1 died with signal SIGKILL"):
        start(tmp_path, limit="signal", above=4)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"train.gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2, which"),
        pytest.param(
            {"train.batch_size_per_device": 16},
            "batch_size_per_device is 16, which",
            marks=pytest.mark.long,
        ),
        pytest.param({"train.loss_reduction": "batch"}, "", marks=pytest.mark.long),
    ],
)
def test_what_is_set_by_hand_stays(settings: Any, advice: str, tmp_path: Path) -> None:
    with pytest.raises(MemoryError, match=r"\d+ samples") as caught:
        start(tmp_path, above=4, **settings)
    assert advice in "\n".join(caught.value.__notes__)


def test_a_loop_of_the_users_is_not_started_again(tmp_path: Path) -> None:
    with pytest.raises(MemoryError, match="in a loop of its own"):
        start(tmp_path, train=own_loop)


def test_not_even_one_sample_fits(tmp_path: Path) -> None:
    match = (
        r"one sample per forward pass ran out of memory on rank 0 \(batch 4: 1 x 4 accum(.|\n)*"
        r"MemoryError: 1 samples\n  Allowed: a model (.|\n)*Do now:  use a smaller model"
    )
    with pytest.raises(PlanError, match=match) as caught:
        start(tmp_path, processes=1, above=0, ranks=[0], **{"train.batch_size": 4})
    assert isinstance(caught.value.__cause__, MemoryError)


@pytest.mark.long
def test_a_resume_on_half_the_devices_finds_its_own_micro_batch(tmp_path: Path) -> None:
    """Each rank has a limit of its own, so that one has half the memory of two."""
    free = start(tmp_path / "free", epochs=2)
    more = {"limit": "addresses", "ranks": [0, 1], "cut": str(tmp_path / "cut"), "epochs": 2}
    with pytest.raises(RuntimeError, match="the session ends"):
        start(tmp_path / "half", **more)
    (run,) = (tmp_path / "half").glob("*-hungry-*")
    before = newest_plan(RunPaths(run))
    resumed = start(tmp_path / "half", processes=1, **more)
    assert resumed.paths.folder == run
    assert before["accumulate"] > 1
    assert resumed.plan.accumulate > before["accumulate"]
    assert first_of(run).attempt == 2
    check_equal(free, resumed)


@pytest.mark.long
def test_a_resume_on_the_same_devices_starts_with_what_has_fitted(tmp_path: Path) -> None:
    more = {"above": 8, "ranks": [0, 1], "cut": str(tmp_path / "cut"), "epochs": 2}
    with pytest.raises(RuntimeError, match="the session ends"):
        start(tmp_path / "out", **more)
    events = next((tmp_path / "out").glob("*-hungry-*")) / "events.jsonl"
    changed = [event for event in EventReader(events).read() if isinstance(event, PlanChanged)]
    assert [event.plan["too_large"] for event in changed] == [32, 16]
    resumed = start(tmp_path / "out", **more)
    assert (resumed.plan.accumulate, resumed.plan.too_large) == (4, 16)
    assert events.read_text().count("new plan") == 2


# --- the plan ---


@pytest.mark.parametrize(
    ("batch", "failed", "per_device", "accumulate"),
    [(64, [], 32, 1), (64, [32], 16, 2), (64, [32, 16], 8, 4), (60, [30], 15, 2), (6, [3], 1, 3)],
)
def test_the_next_plan_has_about_twice_the_steps_and_the_same_batch(
    batch: int, failed: list[int], per_device: int, accumulate: int
) -> None:
    config = configured(overrides={"train.batch_size": batch, "distributed.world_size": 2})
    hardware = machine(build=CPU_BUILD)
    plan = make_plan(config, detect_host({}), hardware, [BatchTooLarge(size) for size in failed])
    assert (plan.batch_size_per_device, plan.accumulate) == (per_device, accumulate)
    assert plan.global_batch_size == batch
    assert plan.too_large == min(failed, default=None)
    again = LaunchPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan


@pytest.mark.parametrize(("failed", "per_device", "accumulate"), [(32, 16, 4), (128, 32, 2)])
def test_a_fallback_keeps_to_the_memory_and_never_grows_a_forward_pass(
    failed: int, per_device: int, accumulate: int
) -> None:
    evidence = BatchTooLarge(failed), GroupNotFormed("no network")
    settings = {"train__batch_size": BATCH, "distributed__world_size": 2}
    plan = plan_on(cpu_machine(), *evidence, **settings)
    assert (plan.processes, plan.batch_size_per_device) == (1, per_device)
    assert plan.accumulate == accumulate


@pytest.mark.parametrize(
    "settings", [{"train__gradient_accumulation_steps": 1}, {"train__batch_size_per_device": 64}]
)
def test_a_plan_leaves_the_steps_that_are_set_by_hand(settings: dict[str, int]) -> None:
    plan = plan_on(cpu_machine(), BatchTooLarge(64), **settings)
    assert (plan.accumulate, plan.too_large) == (1, None)


def test_a_lost_supervisor_is_not_taken_for_a_batch_that_is_too_large() -> None:
    assert not is_out_of_memory(LaunchError("the supervisor died (usual cause: out of memory)"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: ..."))
