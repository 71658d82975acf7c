"""distributed.strategy: deepspeed on two and three real ranks over gloo, stages 1 to 3."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import close, configured, launch, samples, state_of
from torch import nn
from torch.nn.functional import cross_entropy

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.environment.installed import installed_version
from nbtoolkit.errors import FitError, PlanError, WorkerDied
from nbtoolkit.run.checkpoints.checkpoint_store import CheckpointStore
from nbtoolkit.tasks.digits import train as digits
from nbtoolkit.worker.context import RunContext

# Not imported here: it would choose a device for this process.
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        installed_version("deepspeed") is None,
        reason="NOT TESTED: DeepSpeed is not installed (make test-cluster)",
    ),
]

ADAM = {"optim.name": "adamw", "optim.lr": 0.01, "optim.weight_decay": 0.1, "optim.momentum": 0.0}
HARD = {**ADAM, "train.gradient_accumulation_steps": 3, "train.max_grad_norm": 0.5}


def zero(stage: int, offload: str = "none") -> dict[str, Any]:
    return {
        "distributed.strategy": "deepspeed",
        "distributed.zero_stage": stage,
        "distributed.offload": offload,
    }


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.linear = norm(15), nn.Linear(15, 15)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """No weight's size is a multiple of the ranks; the first layer is frozen.

    Args:
        norm: the class of the norms.
        seed: of the weights.
        wide: with a layer that is not small: stage 3 keeps small ones on all ranks.
    """

    def __init__(
        self, norm: type[nn.Module] = nn.LayerNorm, seed: int = 0, *, wide: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.frozen = nn.Linear(6, 7).requires_grad_(False)
        self.first = nn.Linear(7, 15)
        self.blocks = nn.ModuleList([Block(norm), Block(norm)])
        self.wide = nn.Sequential(nn.Linear(15, 6701), nn.Linear(6701, 15)) if wide else nn.ReLU()
        self.last = nn.Linear(15, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(self.first(self.frozen(x)))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def settings(folder: Path, **more: Any) -> Config:
    base = {"runtime.output_dir": str(folder), "distributed.fallback": False}
    return configured(overrides={**base, **more})


# --- nb.fit ---


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_digits_function_has_the_metrics_of_ddp(tmp_path: Path, stage: int) -> None:
    base = {"runtime.output_dir": str(tmp_path), "tracking.mlflow": False, "train.epochs": 3}
    config = nb.load_config(env=None, overrides=base)
    ddp, ours = launch(digits, config), launch(digits, config.with_overrides(zero(stage)))
    assert (ddp.plan.strategy, ours.plan.strategy) == ("ddp", "deepspeed")
    assert ours.metrics == pytest.approx(ddp.metrics, abs=1e-4)
    assert ours.value["predictions"] == ddp.value["predictions"]


def fitted(config: Config, ctx: RunContext) -> Any:
    """Fit; returns what it found, the weights, predictions, and what the rank kept meanwhile."""
    norm = nn.BatchNorm1d if config.train.precision == "bf16" else nn.LayerNorm
    model = Net(norm, seed=ctx.rank, wide=config.optim.name == "sgd")  # rank 0's weights count
    kept: dict[str, Any] = {}

    class Look(nb.Callback):
        def on_train_batch_end(self, state: Any) -> None:
            if ctx.plan.strategy == "deepspeed":
                (optimizer,) = state.optimizers.values()
                moments = optimizer._torch.state.values()
                name = "exp_avg" if config.optim.name == "adamw" else "momentum_buffer"
                kept["moments"] = sum(one[name].numel() for one in moments)
                kept["stage"] = optimizer._model.engine.zero_optimization_stage()
                trained = optimizer._model.trained.parameters()
                kept["weights"] = sum(one.numel() for one in trained)

    weights = torch.tensor([1.0, 2.0, 0.5])  # a mean over weights: another path of the gradients
    loss = nn.CrossEntropyLoss(weight=weights)
    # A batch norm needs two samples in each part of the last batch; rank 1 validates none.
    size = 36 if config.train.precision == "bf16" else 37
    data = samples(size), samples(1, seed=1)
    values = nb.fit(ctx, config, model, *data, loss=loss, metrics=["accuracy"], callbacks=[Look()])
    assert not any(hasattr(one, "ds_id") for one in model.parameters())
    return values, state_of(model), nb.predict(ctx, model, samples(5)[0]), kept


def grad_norms(result: nb.RunResult) -> list[float]:
    lines = map(json.loads, result.paths.events.read_text().splitlines())
    return [one["values"]["grad_norm"] for one in lines if one["type"] == "metrics"]


@pytest.mark.parametrize(
    ("stage", "offload", "more"),
    [
        (1, "none", HARD),
        (2, "optimizer", {**ADAM, "train.gradient_accumulation_steps": 3}),
        (2, "none", {"optim.lr": 0.003}),  # SGD: a wrong scale of gradients shows
        (3, "none", {"train.max_grad_norm": 0.5}),
        (3, "all", {**HARD, "train.activation_checkpointing": True}),
    ],
)
def test_it_trains_as_one_process_does(
    tmp_path: Path, stage: int, offload: str, more: dict[str, Any]
) -> None:
    config = settings(tmp_path, **more)
    one = launch(fitted, config, ranks=1)
    two = launch(fitted, config.with_overrides(zero(stage, offload)))
    (values, weights, outputs, _), (sharded, *_, kept) = one.value, two.value
    assert sharded == pytest.approx(values, abs=1e-4)
    for _, same, predicted, _ in two.values:
        close(same, weights)
        torch.testing.assert_close(predicted, outputs, atol=1e-5, rtol=0)
    assert grad_norms(one)
    assert grad_norms(two) == pytest.approx(grad_norms(one), rel=1e-3)
    wide = config.optim.name == "sgd"
    trained = sum(one.numel() for one in Net(wide=wide).parameters() if one.requires_grad)
    assert kept["stage"] == stage
    assert kept["moments"] == pytest.approx(trained / 2, rel=0.05)
    assert (kept["weights"] < trained / 10) is (stage == 3 and wide)


def test_bf16_with_batch_norms(tmp_path: Path) -> None:
    result = launch(fitted, settings(tmp_path, **zero(3), **ADAM, **{"train.precision": "bf16"}))
    (values, weights, *_), (_, others, *_) = result.values
    assert values["val_loss"] < 2.0
    close(weights, others, atol=0)
    assert {value.dtype for value in weights.values()} == {torch.float32, torch.int64}


def killed_once(config: Config, ctx: RunContext) -> Any:
    """Fit; in the first launch of ``resumed`` rank 1 is killed after step 7 of 12."""
    first = not (ctx.paths.folder / "killed").exists() and "resumed" in ctx.paths.folder.name

    class Kill(nb.Callback):
        def on_train_batch_end(self, state: Any) -> None:
            if first and state.step == 7 and ctx.rank == ctx.world_size - 1:
                newest = ctx.paths.checkpoints / "step-00000006"
                deadline = time.monotonic() + 30
                while not list(ctx.paths.checkpoints.glob("step-*6/manifest.json")):
                    assert time.monotonic() < deadline, newest
                    time.sleep(0.01)
                (ctx.paths.folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    model = Net(seed=ctx.rank)
    data = samples(37), samples(11, seed=1)
    values = nb.fit(ctx, config, model, *data, loss=cross_entropy, callbacks=[Kill()])
    return values, state_of(model)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((zero(1), 2), (zero(1), 2)),
        ((zero(2), 2), (zero(2), 2)),
        ((zero(3), 2), (zero(3), 2)),
        ((zero(3), 3), (zero(2, "optimizer"), 2)),
        ((zero(2), 2), ({"distributed.strategy": "ddp"}, 2)),
        ((zero(3), 2), ({}, 1)),
        (({}, 1), (zero(3), 2)),
    ],
)
def test_a_killed_run_resumes_exactly_also_under_another_strategy(
    tmp_path: Path, before: tuple[Any, int], after: tuple[Any, int]
) -> None:
    config = settings(tmp_path, **ADAM, **{"checkpoint.every_steps": 2})
    whole = launch(killed_once, config.with_overrides(before[0]), ranks=before[1])
    with pytest.raises(WorkerDied, match="SIGKILL"):
        launch(killed_once, config.with_overrides(before[0]), ranks=before[1], name="resumed")
    (folder,) = tmp_path.glob("*resumed*")
    newest, _ = CheckpointStore(folder / "checkpoints").good("step")
    assert newest is not None
    saved = torch.load(newest.folder / "training.pt", weights_only=True)
    assert saved["step"] == 6
    assert {type(one) for one in saved["optimizer"]["state"][0].values()} == {torch.Tensor}
    nb.load_model(newest.folder, Net(seed=5))  # plain inference
    second = config.with_overrides(after[0])
    resumed = launch(killed_once, second, ranks=after[1], resume=folder)
    assert "fit: resumes after epoch 1, 2 steps into" in (folder / "ranks/0/log.txt").read_text()
    (values, weights), (expected, wanted) = resumed.value, whole.value
    same = before == after
    assert values == (expected if same else pytest.approx(expected, abs=1e-4))
    close(weights, wanted, atol=0 if same else 1e-5)


def twice(config: Config, ctx: RunContext) -> Any:
    """The same model in two fits, the second one with the weights of its best epoch."""
    model = Net()
    data = samples(37), samples(11, seed=1)
    nb.fit(ctx, config, model, *data, loss=cross_entropy)
    hot = config.with_overrides({"optim.lr": 1.0})  # the last epoch is worse than the best
    values = nb.fit(ctx, hot, model, *data, loss=cross_entropy)
    again = nb.predict(ctx, model, samples(11, seed=1)[0])
    return values, cross_entropy(again, samples(11, seed=1)[1]).item(), state_of(model)


def test_the_model_ends_with_the_best_weights_and_can_be_fitted_again(tmp_path: Path) -> None:
    result = launch(twice, settings(tmp_path, **zero(3)))
    for values, loss, weights in result.values:
        assert values["best_epoch"] < values["epoch"]
        assert loss == pytest.approx(values["best_val_loss"], rel=1e-5)
        close(weights, result.value[2], atol=0)


# --- own loops ---


def own_loop(config: Config, ctx: RunContext) -> Any:
    """A loop with ctx.prepare, ctx.save and ctx.load; returns the weights and the last norm."""
    from torch.utils.data import DataLoader, TensorDataset

    model = Net(seed=ctx.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(*samples(36)), batch_size=12)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    for epoch in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            for part in range(2):  # accumulated
                loss = cross_entropy(model(inputs[part::2]), targets[part::2]) / 2
                ctx.accelerator.backward(loss)
            norm = ctx.accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 0:
            path = ctx.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            halfway = torch.load(path, weights_only=True)
    ctx.save({"model": model.state_dict()}, kind="end")
    state = ctx.load("last")
    assert state is not None
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    back = ctx.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, kind="back")
    again = torch.load(back, weights_only=True)
    close(again["model"], halfway["model"], atol=0)
    moments = (one["optimizer"]["state"] for one in (again, halfway))
    for one, other in zip(*(state.values() for state in moments), strict=True):
        close(one, other, atol=0)
    end = ctx.load("end")
    assert end is not None
    return end["model"], float(norm)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_own_loop_saves_and_loads_whole_states(tmp_path: Path, stage: int) -> None:
    config = settings(tmp_path)
    two, one = (
        launch(own_loop, config.with_overrides(zero(stage))),
        launch(own_loop, config, ranks=1),
    )
    close(two.value[0], one.value[0])
    assert two.value[1] == pytest.approx(one.value[1], rel=1e-3)


# --- refusals ---


def refusals(config: Config, ctx: RunContext) -> list[str]:
    """The errors of several mistakes; the ranks meet each of them together."""
    found = []

    def caught(call: Any) -> None:
        try:
            call()
        except (FitError, PlanError) as error:
            found.append(str(error))

    def fit(model: nn.Module, **more: Any) -> None:
        caught(lambda: nb.fit(ctx, config, model, samples(12), None, loss=cross_entropy, **more))

    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)

    class Fixed(Net):
        def __deepcopy__(self, memo: object) -> nn.Module:
            raise TypeError("one of a kind")

    def of_several(model: Any, batch: Any, optimizers: Any) -> Any:
        raise AssertionError("no step is made")

    outer = Net()
    fit(Net(), step=lambda model, batch: (model.last(batch[0]), batch[1]))
    fit(outer, step=lambda model, batch: (outer(batch[0]), batch[1]))
    fit(Unused())
    fit(Fixed())
    fit(Net(), optimizer=torch.optim.Adafactor)
    fit(Net(), optimizer={"a": torch.optim.SGD}, step=of_several)
    caught(lambda: ctx.prepare(Net()))
    model, optimizer = ctx.prepare(outer, torch.optim.SGD(outer.parameters(), lr=0.1))
    cross_entropy(model(samples(4)[0]), samples(4)[1]).backward()
    caught(optimizer.zero_grad)
    return found


def test_mistakes_are_refused_with_what_to_do(tmp_path: Path) -> None:
    expected = [
        "uses model.last outside of the model's forward, and distributed.strategy: deepspeed",
        "parameters took no part in the loss of a training step",
        "for their gradients: unused.weight, unused.bias",
        "this Fixed cannot be copied: one of a kind",
        "the optimizer is Adafactor, whose state",
        "several optimizers do not go with distributed.strategy: deepspeed",
        "ctx.prepare gets 1 models and 0 optimizers",
        "zero_grad() after a backward pass without step()",
    ]
    result = launch(refusals, settings(tmp_path, **zero(2)))
    for found in result.values:
        assert len(found) == len(expected), found
        for text, error in zip(expected, found, strict=True):
            assert text in error
            assert "Do now:" in error
