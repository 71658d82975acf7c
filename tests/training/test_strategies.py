"""distributed.strategy: fsdp and the names that mean it, on two and four real ranks over gloo."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Run, close, configured, launch, samples, state_of
from frameworks import needs_torch
from machines import CPU_BUILD, T4, machine
from torch import nn
from torch.nn.functional import cross_entropy

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.environment.plan import LaunchPlan, make_plan
from nbtoolkit.errors import CheckpointError, ConfigError, FitError, PlanError, WorkerDied
from nbtoolkit.host import detect_host
from nbtoolkit.run.checkpoints.checkpoint_store import CheckpointStore
from nbtoolkit.search.slots import make_slots
from nbtoolkit.training.step import by_name, by_number
from nbtoolkit.training.strategy import ShardedModule, gathered, prepare_optimizer
from nbtoolkit.worker.context import RunContext
from nbtoolkit.worker.prepare import make_accelerator

pytestmark = needs_torch(2, 7)

FSDP = {"distributed.strategy": "fsdp"}
ADAM = {"optim.name": "adamw", "optim.lr": 0.01, "optim.momentum": 0.0}


class Block(nn.Module):
    """A residual layer; FSDP gathers each by itself."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.linear = norm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Blocks between two layers; its first weight has an odd number of rows per rank."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList([Block(norm), Block(norm)])
        self.last = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def settings(folder: Path, **more: Any) -> Config:
    base = {"runtime.output_dir": str(folder), "distributed.fallback": False}
    return configured(overrides={**base, **more})


# --- fsdp ---


def fitted(config: Config, ctx: RunContext) -> Any:
    """Fit, and look at the model during the steps and afterwards."""
    from torch.distributed.tensor import DTensor

    seen: dict[str, Any] = {}
    norm = nn.BatchNorm1d if config.train.precision == "bf16" else nn.LayerNorm
    model = Net(norm, seed=ctx.rank)  # rank 0's weights count

    def step(wrapped: nn.Module, batch: Any) -> Any:
        if wrapped.training and ctx.plan.strategy == "fsdp":
            own = sum(one.to_local().numel() for one in model.parameters())
            seen["share"] = own / sum(one.numel() for one in model.parameters())
        return wrapped(batch[0]), batch[1]

    weights = torch.tensor([1.0, 2.0, 0.5])  # a mean over weights: another path of the gradients
    loss = nn.CrossEntropyLoss(weight=weights)
    # A batch norm needs two samples in each part of the last batch; rank 1 validates none.
    size = 36 if config.train.precision == "bf16" else 37
    data = samples(size), samples(1, seed=1)
    values = nb.fit(ctx, config, model, *data, loss=loss, metrics=["accuracy"], step=step)
    assert not any(isinstance(one, DTensor) for one in model.parameters())
    assert type(model) is Net
    outputs = nb.predict(ctx, model, samples(5)[0])
    return values, state_of(model), outputs, seen.get("share")


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="sgd", marks=pytest.mark.long),
        pytest.param(
            {**ADAM, "train.gradient_accumulation_steps": 3, "train.max_grad_norm": 0.5},
            id="adamw-accumulated-clipped",
        ),
        pytest.param(
            {**ADAM, "train.activation_checkpointing": True},
            id="checkpointed",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {**ADAM, "train.gradient_accumulation_steps": 3, "distributed.zero_stage": 2},
            id="without-resharding",
        ),
    ],
)
def test_fsdp_trains_as_one_process_does(tmp_path: Path, more: dict[str, Any]) -> None:
    stage = {name: value for name, value in more.items() if name.startswith("distributed.")}
    config = settings(tmp_path, **{name: more[name] for name in more.keys() - stage.keys()})
    one = launch(fitted, config, ranks=1)
    two = launch(fitted, config.with_overrides({**FSDP, **stage}))
    assert (one.plan.strategy, two.plan.strategy) == ("single", "fsdp")
    (values, weights, outputs, _), (sharded, *_, share) = one.value, two.value
    assert sharded == pytest.approx(values, abs=1e-4)
    assert share == pytest.approx(0.5, abs=0.06)
    for _, same, predicted, _ in two.values:
        close(same, weights, atol=1e-6)
        torch.testing.assert_close(predicted, outputs, atol=1e-5, rtol=0)
    logged = [
        [event["values"].get("grad_norm") for event in events(result)] for result in (one, two)
    ]
    assert logged[0]
    assert logged[1] == pytest.approx(logged[0], rel=1e-3)


def events(result: nb.RunResult) -> list[dict[str, Any]]:
    lines = map(json.loads, result.paths.events.read_text().splitlines())
    return [event for event in lines if event["type"] == "metrics"]


def test_hybrid_trains_two_copies_of_the_model_divided_over_two_ranks_each(tmp_path: Path) -> None:
    config = settings(tmp_path, **ADAM, **{"train.max_grad_norm": 0.5})
    one = launch(fitted, config, ranks=1)
    four = launch(fitted, config.with_overrides({"distributed.strategy": "hybrid"}), ranks=4)
    assert dict(four.plan.fsdp)["replicas"] == 2
    assert four.value[3] == pytest.approx(0.5, abs=0.06)  # a quarter without replicas
    for _, weights, *_ in four.values:
        close(weights, one.value[1], atol=1e-6)


@pytest.mark.long
def test_fsdp_in_bf16_with_batch_norms(tmp_path: Path) -> None:
    """Units with batch norms keep fp32 weights; the others compute in bf16."""
    result = launch(fitted, settings(tmp_path, **FSDP, **{"train.precision": "bf16"}))
    (values, weights, *_), (_, others, *_) = result.values
    assert values["val_loss"] < 1.5
    close(weights, others, atol=0)
    assert {value.dtype for value in weights.values()} == {torch.float32, torch.int64}


def stops_once(config: Config, ctx: RunContext) -> Any:
    """Fit, but stop after step 7 of 12 in the first launch: in the middle of an epoch."""
    first = not (ctx.paths.folder / "stopped").exists()
    model = Net(seed=ctx.rank)

    class Stop(nb.Callback):
        def on_train_batch_end(self, state: Any) -> None:
            if first and state.step == 7:
                raise KeyboardInterrupt

    try:
        values = nb.fit(
            ctx,
            config,
            model,
            samples(37),
            samples(11, seed=1),
            loss=cross_entropy,
            callbacks=[Stop()] if first else [],
        )
    except KeyboardInterrupt:
        if ctx.is_main:
            (ctx.paths.folder / "stopped").touch()
        raise RuntimeError("stopped here") from None
    return values, state_of(model)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(("fsdp", 2), ("auto", 2)),
        pytest.param(("fsdp", 2), ("auto", 1), marks=pytest.mark.long),
        pytest.param(("auto", 1), ("fsdp", 2), marks=pytest.mark.long),
        pytest.param(("fsdp", 2), ("ddp", 2), marks=pytest.mark.long),
        pytest.param(("fsdp", 3), ("fsdp", 2), marks=pytest.mark.long),
        pytest.param(("hybrid", 4), ("fsdp", 2), marks=pytest.mark.long),
        pytest.param(("auto", 2), ("hybrid", 4), marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_resumes_under_another_strategy(
    tmp_path: Path, before: tuple[str, int], after: tuple[str, int]
) -> None:
    config = settings(tmp_path, **ADAM, **{"checkpoint.every_steps": 2})
    whole = launch(uninterrupted, config, ranks=1)
    first = config.with_overrides({"distributed.strategy": before[0]})
    with pytest.raises(RuntimeError, match="stopped here"):
        launch(stops_once, first, ranks=before[1], name="resumed")
    (folder,) = tmp_path.glob("*resumed*")
    newest, _ = CheckpointStore(folder / "checkpoints").good("step")
    assert newest is not None
    saved = torch.load(newest.folder / "training.pt", weights_only=True)
    assert saved["step"] == 6
    by_name = saved["optimizer"]["state"]
    assert list(by_name) == [name for name, _ in Net().named_parameters()]
    assert {type(value) for state in by_name.values() for value in state.values()} == {torch.Tensor}
    nb.load_model(newest.folder, Net(seed=5))  # plain inference
    second = config.with_overrides({"distributed.strategy": after[0]})
    resumed = launch(stops_once, second, ranks=after[1], resume=folder)
    assert "fit: resumes after epoch 1, 2 steps into" in (folder / "ranks/0/log.txt").read_text()
    (values, weights), (expected, wanted) = resumed.value, whole.value
    assert values == pytest.approx(expected, abs=1e-4)
    close(weights, wanted)


def uninterrupted(config: Config, ctx: RunContext) -> Any:
    model = Net()
    data = samples(37), samples(11, seed=1)
    return nb.fit(ctx, config, model, *data, loss=cross_entropy), state_of(model)


def killed_once(config: Config, ctx: RunContext) -> Any:
    """Fit; in the first launch rank 1 kills itself after step 7 of 12, within an epoch."""
    first = not (ctx.paths.folder / "killed").exists()
    model = Net(seed=ctx.rank)

    class Kill(nb.Callback):
        def on_train_batch_end(self, state: Any) -> None:
            if first and state.step == 7 and ctx.rank == 1:
                (ctx.paths.folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    data = samples(37), samples(11, seed=1)
    values = nb.fit(ctx, config, model, *data, loss=cross_entropy, callbacks=[Kill()])
    return values, state_of(model)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({**ADAM, **FSDP, "train.max_grad_norm": 0.5}, id="adamw"),
        # SGD without momentum has no state
        pytest.param({**FSDP, "optim.momentum": 0.0}, id="sgd", marks=pytest.mark.long),
    ],
)
def test_a_run_that_was_killed_ends_with_the_same_bits(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    config = settings(tmp_path, **more, **{"checkpoint.every_steps": 2})
    whole = launch(uninterrupted, config)
    with pytest.raises(WorkerDied):
        launch(killed_once, config, name="killed")
    (folder,) = tmp_path.glob("*killed*")
    resumed = launch(killed_once, config, resume=folder)
    assert "fit: resumes after epoch 1, 2 steps into" in (folder / "ranks/0/log.txt").read_text()
    (values, weights), (expected, wanted) = resumed.value, whole.value
    assert values == expected
    close(weights, wanted, atol=0)


def test_a_state_by_name_is_refused_for_other_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    state = by_name(optimizer.state_dict(), names)
    reordered = torch.optim.Adam(reversed(list(model.parameters())))
    reordered.load_state_dict(by_number(state, names[::-1]))
    for parameter in model.parameters():
        moments = optimizer.state[parameter], reordered.state[parameter]
        torch.testing.assert_close(*[moment["exp_avg"] for moment in moments], atol=0, rtol=0)
    with pytest.raises(CheckpointError, match=r"trained other parameters: 1\.bias"):
        by_number(state, names[:-1])


def test_a_scaler_divides_the_gradients_of_an_optimizer_that_is_no_longer_fused() -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, fused=True)
    prepare_optimizer(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(model.weight.detach(), before - 0.5)


def gathers_then_trains(config: Config, ctx: RunContext) -> Any:
    """The whole state of a sharded model before and after its parameters and buffers change."""
    states = []
    for replicas in (1, ctx.world_size):  # as replicas, each rank has a single shard: all rows
        ctx.plan = replace(ctx.plan, fsdp={**ctx.plan.fsdp, "replicas": replicas})
        model = nn.Sequential(Net(), nn.BatchNorm1d(3))
        ShardedModule(ctx, model)
        whole = gathered(model.state_dict(), keep=True)
        before = {name: value.clone() for name, value in whole.items()}
        with torch.no_grad():
            for value in (*model.parameters(), *model.buffers()):
                value.fill_(7)
        states.append((before, whole))
    return states


def test_a_gathered_state_does_not_change_with_the_training(tmp_path: Path) -> None:
    result = launch(gathers_then_trains, settings(tmp_path, **FSDP))
    for states in result.values:
        for before, whole in states:
            expected = nn.Sequential(Net(), nn.BatchNorm1d(3)).state_dict()
            assert {name: value.shape for name, value in whole.items()} == {
                name: value.shape for name, value in expected.items()
            }
            close(whole, before, atol=0)


def goes_on(config: Config, ctx: RunContext) -> Any:
    model = Net()
    return nb.fit(ctx, config, model, samples(37), samples(11, seed=1), loss=cross_entropy)


def reported(events: Path) -> bool:
    return events.exists() and '"report"' in events.read_text()


def test_a_stop_request_saves_on_all_ranks(tmp_path: Path) -> None:
    config = settings(tmp_path, **FSDP, **{"train.epochs": 100_000})
    handle = launch(goes_on, config, wait=False)
    deadline = time.monotonic() + 60
    while not reported(handle.paths.events) and time.monotonic() < deadline:
        time.sleep(0.05)
    handle.stop()
    result = handle.result()
    assert result.status == "stopped"
    store = CheckpointStore(result.paths.checkpoints)
    newest, damages = store.good("step")
    assert newest is not None
    assert not damages
    assert nb.load_model(result.paths.folder, Net(seed=5)) is not None


def twice(config: Config, ctx: RunContext) -> Any:
    """The same model in two fits, the second one with the weights of its best epoch."""
    model = Net()
    data = samples(37), samples(11, seed=1)
    nb.fit(ctx, config, model, *data, loss=cross_entropy)
    hot = config.with_overrides({"optim.lr": 1.0})  # the last epoch is worse than the best
    values = nb.fit(ctx, hot, model, *data, loss=cross_entropy)
    again = nb.predict(ctx, model, samples(11, seed=1)[0])
    loss = cross_entropy(again, samples(11, seed=1)[1]).item()
    return values, loss, state_of(model)


def test_the_model_ends_whole_with_the_best_weights_and_can_be_fitted_again(tmp_path: Path) -> None:
    result = launch(twice, settings(tmp_path, **FSDP))
    for values, loss, weights in result.values:
        assert values["best_epoch"] < values["epoch"]
        assert loss == pytest.approx(values["best_val_loss"], rel=1e-5)
        close(weights, result.value[2], atol=0)


def own_loop(config: Config, ctx: RunContext) -> Any:
    """A loop with ctx.prepare, ctx.save and ctx.load; returns the losses and the weights."""
    from torch.utils.data import DataLoader, TensorDataset

    model = Net(seed=ctx.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(*samples(36)), batch_size=12)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    sharded = any(hasattr(one, "placements") for one in model.parameters())
    for epoch in range(2):
        for inputs, targets in loader:
            loss = cross_entropy(model(inputs), targets)
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
    moment, before = (one["optimizer"]["state"][0]["exp_avg"] for one in (again, halfway))
    assert torch.equal(moment, before)
    end = ctx.load("end")
    assert end is not None
    return sharded, end["model"], float(norm)


def test_an_own_loop_is_sharded_and_saves_whole_states(tmp_path: Path) -> None:
    config = settings(tmp_path)
    two, one = launch(own_loop, config.with_overrides(FSDP)), launch(own_loop, config, ranks=1)
    assert [sharded for sharded, *_ in two.values] == [True, True]
    assert not one.value[0]
    close(two.value[1], one.value[1])


def test_own_loops_cannot_clip_gradients_in_cpu_memory(tmp_path: Path) -> None:
    ctx = Run(tmp_path / "run").context(configured())
    ctx.plan = replace(ctx.plan, fsdp={"offload": True})
    with pytest.raises(PlanError, match=r"with distributed.offload(.|\n)*train with nb.fit"):
        make_accelerator(ctx).clip_grad_norm_([], 1.0)


def refusals(config: Config, ctx: RunContext) -> list[str]:
    """The errors of several mistakes; the ranks meet each of them together."""
    found = []

    def caught(model: nn.Module, **more: Any) -> None:
        try:
            nb.fit(ctx, config, model, samples(12), None, loss=cross_entropy, **more)
        except FitError as error:
            found.append(str(error))

    def by_parts(model: Any, batch: Any) -> Any:
        return model.last(batch[0]), batch[1]

    def past_the_guard(model: Any, batch: Any) -> Any:
        return model.module.last(batch[0]), batch[1]

    class Scalar(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

    model = Net()
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    caught(Net(), step=by_parts)
    caught(Net(), step=past_the_guard)
    caught(Scalar())
    caught(model, optimizer=before)
    caught(Net(), optimizer=torch.optim.Adafactor)
    return found


def test_mistakes_are_refused_with_what_to_do(tmp_path: Path) -> None:
    expected = [
        "uses model.last outside of the model's forward",
        "uses a part of the model outside of the model's forward",
        "FSDP cannot shard this Scalar",
        "was made before the model was moved or replaced",
        "the optimizer is Adafactor, whose state",
    ]
    result = launch(refusals, settings(tmp_path, **FSDP))
    for found in result.values:
        assert len(found) == len(expected), found
        for text, error in zip(expected, found, strict=True):
            assert text in error
            assert "Do now:" in error


# --- the configuration and the plan ---


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({**FSDP, "train.compile": True}, r"fsdp conflicts with train.compile: true"),
        ({**FSDP, "train.weight_averaging": "ema"}, r"fsdp conflicts with .*averaging: ema"),
        ({**FSDP, "distributed.compression": "fp16"}, r"conflicts with .*compression: fp16"),
        ({**FSDP, "distributed.static_graph": True}, r"conflicts with .*static_graph"),
        ({**FSDP, "distributed.enabled": False}, r"fsdp conflicts with distributed.enabled: false"),
        (
            {**FSDP, "distributed.backend": "tensorflow"},
            r"strategy: fsdp conflicts with distributed.backend: tensorflow",
        ),
        (
            {"distributed.zero_stage": 3, "train.compile": True},
            r"zero_stage: 3 conflicts with train.compile: true",
        ),
        (
            {"distributed.strategy": "hybrid", "train.weight_averaging": "ema"},
            r"hybrid conflicts with .*averaging: ema",
        ),
        (
            {"distributed.strategy": "ddp", "distributed.zero_stage": 3},
            r"zero_stage: 3 conflicts with distributed.strategy: ddp(.|\n)*set strategy: fsdp",
        ),
        ({"distributed.zero_stage": 4}, r"zero_stage: 4 is not allowed(.|\n)*1, 2, 3 or null"),
        (
            {"distributed.strategy": "pipeline"},
            r"a pipeline is a loop of your own(.|\n)*pipeline.md",
        ),
        (
            {"distributed.strategy": "local_sgd"},
            r"local SGD is a loop of your own(.|\n)*pipeline.md",
        ),
        ({"distributed.local_sgd_steps": 8}, r"is a loop of your own(.|\n)*pipeline.md"),
    ],
)
def test_conflicts_are_refused_when_the_configuration_is_read(
    more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        nb.load_config(env=None, overrides=more)


def plan(gpus: int = 2, **more: Any) -> LaunchPlan:
    own = {"train.batch_size": 48, **{f"distributed.{name}": value for name, value in more.items()}}
    config = configured(overrides=own)
    return make_plan(config, detect_host({}), machine(*[T4] * gpus))


def test_fsdp_is_for_several_ranks() -> None:
    alone = plan(0, strategy="fsdp", world_size=1)
    assert (alone.strategy, alone.processes) == ("single", 1)
    assert "distributed.strategy: fsdp trains as single: there is one process" in alone.reasons
    both = plan(0, strategy="fsdp")
    assert (both.strategy, both.processes) == ("fsdp", 2)
    assert dict(both.fsdp) == {"reshard_after_forward": True, "offload": False, "replicas": 1}


@pytest.mark.parametrize(
    ("more", "expected", "said"),
    [
        ({"strategy": "deepspeed"}, (False, False, 1), "deepspeed trains with torch's fsdp"),
        ({"strategy": "deepspeed", "zero_stage": 3}, (True, False, 1), "as ZeRO stage 3 does"),
        ({"zero_stage": 2}, (False, False, 1), "zero_stage: 2 trains with torch's fsdp"),
        ({"zero_stage": 3}, (True, False, 1), "zero_stage: 3 trains with torch's fsdp"),
        ({"zero_stage": 1}, (False, False, 1), "zero_stage 1 trains as stage 2"),
        ({"offload": "optimizer"}, (True, True, 1), "offload: weights, gradients and"),
        ({"strategy": "fsdp", "offload": "all"}, (True, True, 1), "in CPU memory"),
        ({"strategy": "hybrid"}, (True, False, 1), "hybrid needs an even number of ranks from 4"),
        ({"strategy": "hybrid", "gpus": 4}, (True, False, 2), "2 groups of 2 ranks each have"),
        ({"strategy": "hybrid", "gpus": 3}, (True, False, 1), "3 ranks are one group"),
        ({"offload": "all", "gpus": 0}, (True, False, 1), "offload has nothing to do"),
    ],
)
def test_names_of_other_tools_mean_fsdp_and_the_plan_says_so(
    more: dict[str, Any], expected: tuple[bool, bool, int], said: str
) -> None:
    made = plan(**more)
    assert made.strategy == "fsdp"
    assert tuple(made.fsdp.values()) == expected
    assert said in made.explain()
    assert LaunchPlan.from_dict(made.to_dict()) == made


def test_offload_has_no_loss_scale_for_fp16() -> None:
    assert plan(strategy="fsdp").precision == "fp16"
    assert plan(strategy="fsdp", offload="all").precision == "fp32"
    config = configured(overrides={"distributed.offload": "all", "train.precision": "fp16"})
    with pytest.raises(PlanError, match=r"no loss scale(.|\n)*fp32, bf16 or auto"):
        make_plan(config, detect_host({}), machine(T4, T4))


def test_trials_of_a_sweep_are_sharded_over_all_devices_or_refused() -> None:
    config, two = configured(overrides=FSDP), machine(T4, T4, build=CPU_BUILD)
    slots = make_slots(config, two)
    assert (len(slots.slots), slots.why) == (1, "distributed.strategy: fsdp")
    with pytest.raises(PlanError, match=r"fsdp, and placement gives each trial one device"):
        make_slots(config, two, "device_per_trial")
