"""Two ranks over NCCL on one card: each takes itself for a machine with one GPU.

The communication goes through sockets, so nothing here says how fast two GPUs are.
"""

from __future__ import annotations

import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gpu_scripts import IMAGES, told, told_by_two_nodes

pytestmark = pytest.mark.gpu

# A batch norm, which several ranks synchronise, and a share of the samples for each rank.
NORMED = IMAGES + textwrap.dedent("""
    import torch.distributed as dist

    def normed(config, ctx):
        torch.manual_seed(ctx.rank)  # rank 0's weights count
        layers = [nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()]
        model, loss = nn.Sequential(*layers, nn.Linear(576, 2)), nn.functional.cross_entropy
        weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
        found = nb.fit(ctx, config, model, data, data, loss=weighted, metrics="accuracy")
        backend = dist.get_backend() if ctx.world_size > 1 else "none"
        total = sum(one.detach().double().abs().sum().item() for one in model.parameters())
        outputs = nb.predict(ctx, model, images[:3]).float().flatten().tolist()
        return {**found, "backend": backend, "total": total, "outputs": outputs}

    exact = {**small, "optim.name": "sgd", "optim.lr": 0.1, "train.precision": "fp32"}
    exact |= {"distributed.sync_batchnorm": True, "train.max_grad_norm": 1.0}

    def go(**more):
        result = launch(normed, config={**exact, **more}, resume="never")
        kind = [result.plan.strategy, result.plan.device_type, result.plan.processes]
        tell(plan=kind, reasons=result.plan.reasons, **result.value)
""")

FUSED = {"optim.name": "adamw", "optim.lr": 0.01}  # its kernel takes the loss scale itself


def on_one(tmp_path: Path, **more: Any) -> dict[str, Any]:
    (tmp_path / "one").mkdir()
    return told(NORMED + f"\ngo(**{more})\n", tmp_path / "one")


def on_two(tmp_path: Path, **more: Any) -> dict[str, Any]:
    (tmp_path / "two").mkdir()
    answers = told_by_two_nodes(NORMED + f"\ngo(**{more})\n", tmp_path / "two")
    assert answers["plan"][1:] == ["cuda", 2]
    assert answers["backend"] == "nccl"
    return answers


@pytest.mark.parametrize("steps", [1, 2])
def test_two_ranks_over_nccl_train_as_one_does(steps: int, tmp_path: Path) -> None:
    more = {"train.gradient_accumulation_steps": steps}
    if steps > 1:  # then a batch norm sees other parts of a batch
        more["train.max_steps"] = 20
    one, two = on_one(tmp_path, **more), on_two(tmp_path, **more)
    assert one["plan"] == ["single", "cuda", 1]
    assert two["plan"][0] == "ddp"
    # convolutions may use TF32 (torch's default): 10 bits of mantissa
    near = {"abs": 1e-2 if steps == 1 else 5e-2}
    assert two["val_loss"] == pytest.approx(one["val_loss"], **near)
    assert two["val_accuracy"] == pytest.approx(one["val_accuracy"], **near)
    assert two["total"] == pytest.approx(one["total"], rel=5e-3)


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("ddp", {"train.precision": "bf16"}),
        ("ddp", {"train.precision": "fp16"}),
        ("ddp", {"train.weight_averaging": "swa"}),
        ("ddp", {"distributed.compression": "bf16"}),
        ("ddp", {"distributed.compression": "powersgd"}),
        ("ddp", {"train.compile": True}),
        ("fsdp", {"distributed.strategy": "fsdp"}),
        ("fsdp", {"distributed.strategy": "fsdp", "train.precision": "bf16"}),
        ("fsdp", {"distributed.strategy": "fsdp", "train.precision": "fp16"}),
        ("fsdp", {**FUSED, "distributed.strategy": "fsdp", "train.precision": "fp16"}),
        ("fsdp", {"distributed.zero_stage": 2}),
        ("fsdp", {"distributed.offload": "all", "train.precision": "bf16"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_it_learns_over_nccl(strategy: str, more: dict[str, Any], tmp_path: Path) -> None:
    if strategy == "fsdp":
        more = {**more, "distributed.sync_batchnorm": False}
    answers = on_two(tmp_path, **more)
    assert answers["plan"][0] == strategy
    assert answers["val_accuracy"] > 0.9


def test_a_contrastive_loss_sees_the_embeddings_of_both_ranks(tmp_path: Path) -> None:
    code = """
    from nbtoolkit.extras import metric_learning

    stages = {"model.stage1": {"train": {"epochs": 6}, "optim": {"lr": 3e-3}}}
    more = {**settings, **stages, "train.precision": "fp32"}
    base = nb.load_config(METRIC_LEARNING, env=None)
    result = nb.launch(metric_learning.train, base.with_overrides(more), display="off")
    tell(map=result.value["val_map"], accuracy=result.value["val_accuracy"])
    """
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    two, one = told_by_two_nodes(code, tmp_path / "two"), told(code, tmp_path / "one")
    assert two["map"] == pytest.approx(one["map"], abs=0.03)
    assert two["accuracy"] > 0.9


def test_a_loop_of_ones_own_is_ddp_over_nccl(tmp_path: Path) -> None:
    code = """
    def own(config, ctx):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(data, batch_size=ctx.plan.batch_size_per_device)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for epoch in range(3):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), targets)
                ctx.accelerator.backward(loss)
                optimizer.step()
            ctx.report({"loss": loss.item()}, step=epoch + 1)
        ctx.save({"model": ctx.unwrap(model).state_dict()})
        hits = ctx.accelerator.gather_for_metrics(loss.detach().reshape(1))
        return {"type": type(model).__name__, "gathered": len(hits), "loss": hits.mean().item()}

    result = launch(own, config={"train.precision": "fp32", "train.batch_size": 64})
    tell(**result.value, device=str(result.plan.device_type))
    """
    answers = told_by_two_nodes(IMAGES + textwrap.dedent(code), tmp_path)
    assert (answers["type"], answers["gathered"]) == ("DistributedDataParallel", 2)
    assert answers["loss"] < 0.6
    assert answers["device"] == "cuda"


@pytest.mark.parametrize("framework", ["lightning_in_15_minutes", "transformers_fine_tuning"])
def test_a_framework_trains_over_nccl(framework: str, tmp_path: Path) -> None:
    if find_spec(framework.partition("_")[0]) is None:
        pytest.skip(f"NOT TESTED: {framework}'s package is not installed")
    code = f"""
    import sys
    sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
    import framework_scripts

    more = {{"train.epochs": 2, "train.batch_size": 8, "data": {{"seconds": 0.0, "kill_at": 0}}}}
    result = launch(framework_scripts.{framework}, config=more)
    weights = [value["weights"] for value in result.values if value]
    tell(weights=weights, kind=result.plan.device_type, status=result.status)
    """
    answers = told_by_two_nodes(code, tmp_path)
    assert (answers["kind"], answers["status"]) == ("cuda", "completed")
