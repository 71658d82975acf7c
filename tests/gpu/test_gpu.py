"""Launches on a machine with an NVIDIA GPU and a CUDA build of torch; most need one card.

Each test runs in a fresh script, since some of them use CUDA in the kernel.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_scripts import told

from nbtoolkit.environment.hardware import Hardware, detect_hardware, sample_devices

pytestmark = pytest.mark.gpu

SLACK = 64 * 2**20  # bytes by which the driver's own use of a card may move


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    found = detect_hardware(environ={})
    if not found.usable:
        pytest.skip(f"there is a GPU, but none that this torch can use: {found.reason}")
    return found


def memory_used(hardware: Hardware) -> int:
    [reading] = sample_devices([hardware.usable[0].uuid])
    return int(reading["memory_used"])


# --- the kernel and its ranks ---------------------------------------------------------------------


def test_launches_after_cuda_was_used_in_the_kernel(hardware: Hardware, tmp_path: Path) -> None:
    code = """
    mine = torch.ones(1000, 1000, device="cuda") @ torch.ones(1000, 1000, device="cuda")

    def train(config, ctx):
        x = torch.ones(1000, 1000, device=ctx.device)
        return (x @ x).max().item(), str(ctx.device)

    values = [launch(train).value for _ in range(2)]
    tell(values=values, mine=mine.max().item())
    """
    answers = told(code, tmp_path)
    assert answers == {"values": [[1000.0, "cuda:0"]] * 2, "mine": 1000.0}


def test_a_launch_leaves_the_kernel_without_cuda(hardware: Hardware, tmp_path: Path) -> None:
    code = """
    def train(config, ctx):
        return torch.arange(3, device=ctx.device)

    value = launch(train).value
    tell(value=value.tolist(), device=str(value.device), touched=torch.cuda.is_initialized())
    """
    assert told(code, tmp_path) == {"value": [0, 1, 2], "device": "cpu", "touched": False}


def test_memory_is_free_after_a_launch(hardware: Hardware, tmp_path: Path) -> None:
    """Measured by the driver while the kernel and its warm fork server still live."""
    code = """
    from nbtoolkit.environment.hardware import sample_devices

    def used():
        return sample_devices([nb.detect_hardware().usable[0].uuid])[0]["memory_used"]

    def train(config, ctx):
        x = torch.ones(2**28, device=ctx.device)  # 1 GiB
        torch.cuda.synchronize()
        return used() + 0 * int(x[0])

    before = used()
    during = launch(train).value
    tell(before=before, during=during, after=used())
    """
    answers = told(code, tmp_path)
    assert answers["during"] >= answers["before"] + 2**30
    assert abs(answers["after"] - answers["before"]) < SLACK


def test_memory_is_free_after_out_of_memory(hardware: Hardware, tmp_path: Path) -> None:
    before = memory_used(hardware)
    code = """
    def greedy(config, ctx):
        kept = []
        while True:
            kept.append(torch.ones(2**30, device=ctx.device))

    try:
        launch(greedy)
    except torch.OutOfMemoryError as error:
        notes = error.__notes__
    tell(notes=notes, then=launch(lambda config, ctx: 1 + ctx.rank).value)
    """
    answers = told(code, tmp_path)
    assert answers["then"] == 1
    assert "rank 0" in answers["notes"][0]
    assert abs(memory_used(hardware) - before) < SLACK


def test_a_device_side_assert_does_not_poison_the_kernel(
    hardware: Hardware, tmp_path: Path
) -> None:
    code = """
    def wrong(config, ctx):
        torch.nn.functional.embedding(
            torch.tensor([7], device=ctx.device), torch.ones(3, 3, device=ctx.device)
        )
        torch.cuda.synchronize()

    def right(config, ctx):
        return torch.ones(3, device=ctx.device).sum().item()

    said = ""
    try:
        launch(wrong)
    except Exception as error:  # RuntimeError, or torch.AcceleratorError from torch 2.8 on
        said = str(error)
    tell(said=said, then=launch(right).value)
    """
    answers = told(code, tmp_path)
    assert "device-side assert" in answers["said"]
    assert answers["then"] == 3.0


# --- the plan and what becomes of it --------------------------------------------------------------


def test_the_rank_has_the_planned_device(hardware: Hardware, tmp_path: Path) -> None:
    code = """
    def train(config, ctx):
        return {
            "device": str(ctx.device),
            "accelerator": str(ctx.accelerator.device),
            "current": torch.cuda.current_device(),
            "count": torch.cuda.device_count(),
            "uuid": str(torch.cuda.get_device_properties(ctx.device).uuid),
        }

    result = launch(train)
    tell(**result.value, planned=list(result.plan.devices), kind=result.plan.device_type)
    """
    answers = told(code, tmp_path)
    planned = [hardware.usable[0].uuid]
    assert (answers["planned"], answers["kind"]) == (planned, "cuda")
    assert (answers["device"], answers["current"], answers["count"]) == ("cuda:0", 0, 1)
    assert answers["accelerator"] in ("cuda", "cuda:0")
    assert planned[0].endswith(answers["uuid"])


@pytest.mark.parametrize("precision", ["auto", "fp16", "bf16", "fp32"])
def test_precision_is_as_planned(precision: str, hardware: Hardware, tmp_path: Path) -> None:
    code = f"""
    def train(config, ctx):
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = ctx.prepare(model, optimizer)
        with ctx.accelerator.autocast():
            out = model.forward(torch.ones(8, 64, device=ctx.device))
            square = torch.ones(2, 2, device=ctx.device)
            inside = str((square @ square).dtype)
        ctx.accelerator.backward(out.float().mean())
        optimizer.step()
        return {{"inside": inside, "scaler": ctx.accelerator.scaler is not None}}

    result = launch(train, config={{"train.precision": "{precision}"}})
    tell(**result.value, plan=result.plan.precision)
    """
    answers = told(code, tmp_path)
    capability = hardware.usable[0].capability
    best = "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
    assert answers["plan"] == (best if precision == "auto" else precision)
    kinds = {"fp16": "torch.float16", "bf16": "torch.bfloat16", "fp32": "torch.float32"}
    assert answers["inside"] == kinds[answers["plan"]]
    assert answers["scaler"] is (answers["plan"] == "fp16")


def test_two_processes_on_one_gpu_are_refused(hardware: Hardware, tmp_path: Path) -> None:
    code = """
    from nbtoolkit.errors import PlanError

    try:
        launch(lambda config, ctx: None, processes=2)
        said = "launched"
    except PlanError as error:
        said = error.what
    tell(said=said, one=launch(lambda config, ctx: ctx.world_size).value)
    """
    answers = told(code, tmp_path)
    assert "each needs its own GPU, and 1 can be used" in answers["said"]
    assert answers["one"] == 1


def test_two_processes_on_the_cpu_beside_a_gpu(hardware: Hardware, tmp_path: Path) -> None:
    code = """
    def train(config, ctx):
        total = ctx.accelerator.reduce(torch.ones(1) * (ctx.rank + 1)).item()
        return total, str(ctx.device), torch.cuda.is_available()

    tell(values=launch(train, processes=2).values)
    """
    assert told(code, tmp_path, cards="")["values"] == [[3.0, "cpu", False]] * 2


def test_all_gpus_train_together(hardware: Hardware, tmp_path: Path) -> None:
    cards = len(hardware.usable)
    if cards < 2 or any(not card.equals(hardware.usable[0]) for card in hardware.usable):
        pytest.skip("needs two equal GPUs")
    code = """
    import torch.distributed as dist

    def train(config, ctx):
        ours = torch.ones(1, device=ctx.device) * (ctx.rank + 1)
        dist.all_reduce(ours)
        return ours.item(), str(ctx.device), dist.get_backend()

    tell(values=launch(train).values)
    """
    values = told(code, tmp_path, cards=",".join(map(str, range(cards))))["values"]
    total = cards * (cards + 1) / 2
    assert values == [[total, f"cuda:{rank}", "nccl"] for rank in range(cards)]


def test_inline_trains_on_the_gpu(hardware: Hardware, tmp_path: Path) -> None:
    code = """
    def train(config, ctx):
        return str(ctx.device), ctx.accelerator.device.type, torch.cuda.current_device()

    tell(value=launch(train, start="inline").value)
    """
    assert told(code, tmp_path)["value"] == ["cuda:0", "cuda", 0]


def test_fit_on_the_gpu_gives_weights_for_the_cpu(hardware: Hardware, tmp_path: Path) -> None:
    code = """
    from torch.utils.data import TensorDataset

    x = torch.randn(512, 8)
    data = TensorDataset(x, (x.sum(dim=1) > 0).long())

    def train(config, ctx):
        loss = torch.nn.functional.cross_entropy
        model = torch.nn.Linear(8, 2)
        return nb.fit(ctx, config, model, data, data, loss=loss, metrics="accuracy")

    config = {"train.epochs": 5, "optim.lr": 0.05}
    result = launch(train, config=config)
    model = result.load_into(torch.nn.Linear(8, 2))
    right = (model(x).argmax(dim=1) == data.tensors[1]).float().mean().item()
    tell(reported=result.value["val_accuracy"], right=right, touched=torch.cuda.is_initialized())
    """
    answers = told(code, tmp_path)
    assert answers["reported"] > 0.9
    assert answers["right"] == pytest.approx(answers["reported"], abs=0.05)
    assert answers["touched"] is False
