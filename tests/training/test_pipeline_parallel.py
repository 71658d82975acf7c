"""distributed.strategy: pipeline, on real ranks over gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import close, configured, launch, samples, state_of
from frameworks import needs_torch
from machines import CPU_BUILD, T4, machine
from torch import nn
from torch.nn.functional import cross_entropy

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import ConfigError, FitError, PlanError
from nbtoolkit.host import detect_host
from nbtoolkit.run.checkpoints.checkpoint_store import CheckpointStore
from nbtoolkit.training.strategies.pipeline import split
from nbtoolkit.worker.context import RunContext

pytestmark = needs_torch(2, 7)

PIPELINE = {"distributed.strategy": "pipeline"}
ADAM = {"optim.name": "adamw", "optim.lr": 0.01, "optim.momentum": 0.0, "optim.weight_decay": 0.1}


def net(seed: int = 0, norm: type[nn.Module] = nn.LayerNorm) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(inplace=True), norm(16), nn.Linear(16, 16), nn.Tanh(),
        nn.Linear(16, 3),
    )  # fmt: skip


def settings(folder: Path, **more: Any) -> Config:
    base = {"runtime.output_dir": str(folder), "distributed.fallback": False}
    return configured(overrides={**base, "train.gradient_accumulation_steps": 4, **more})


def share_of_labels(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return float((outputs.argmax(1) == targets).double().mean())


def fitted(config: Config, ctx: RunContext) -> Any:
    """Fit, and look at this rank's layers during the steps."""
    own: list[int] = []

    class Look(nb.Callback):
        def on_fit_start(self, state: Any) -> None:
            own.append(sum(one.numel() for one in state.model.parameters()))

    norm = nn.BatchNorm1d if config.model.to_dict().get("norm") == "batch" else nn.LayerNorm
    model = net(ctx.rank, norm)  # rank 0's weights count
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))
    if config.model.to_dict().get("loss") == "plain":
        loss = nn.CrossEntropyLoss()
    values = nb.fit(
        ctx, config, model, samples(37), samples(11, seed=1), loss=loss,
        metrics={"accuracy": "accuracy", "whole": nb.epoch_metric(share_of_labels)},
        callbacks=[Look()],
    )  # fmt: skip
    return values, state_of(model), nb.predict(ctx, model, samples(5)[0]), own[0]


def logged(result: nb.RunResult) -> list[dict[str, Any]]:
    lines = map(json.loads, result.paths.events.read_text().splitlines())
    kept = ("loss", "lr", "grad_norm")
    return [
        {name: event["values"][name] for name in kept if name in event["values"]}
        for event in lines
        if event["type"] == "metrics"
    ]


@pytest.mark.parametrize(
    ("more", "ranks"),
    [
        pytest.param({**ADAM, "train.max_grad_norm": 0.5}, 2, id="adamw-clipped-weighted"),
        pytest.param({"model.loss": "plain"}, 2, id="sgd", marks=pytest.mark.long),
        pytest.param(
            {
                "model.norm": "batch",
                "train.batch_size": 15,
                "train.gradient_accumulation_steps": 3,
                "model.loss": "plain",
            },
            2,
            id="batch-norm",
            marks=pytest.mark.long,
        ),
        pytest.param(ADAM, 3, id="three-ranks", marks=pytest.mark.long),
        pytest.param(
            {**ADAM, "train.gradient_accumulation_steps": 2}, 3, id="gpipe", marks=pytest.mark.long
        ),
    ],
)
def test_pipeline_trains_as_one_process_does(
    tmp_path: Path, more: dict[str, Any], ranks: int
) -> None:
    config = settings(tmp_path, **more)
    one = launch(fitted, config, ranks=1)
    several = launch(fitted, config.with_overrides(PIPELINE), ranks=ranks)
    assert (one.plan.strategy, several.plan.strategy) == ("single", "pipeline")
    assert several.plan.batch_size_per_device == one.plan.batch_size_per_device
    values, weights, outputs, size = one.value
    for same_values, same, predicted, _ in several.values:
        assert same_values == pytest.approx(values, abs=1e-4)
        close(same, weights)
        torch.testing.assert_close(predicted, outputs, atol=1e-5, rtol=0)
    own = [rank[3] for rank in several.values]
    assert sum(own) == size
    assert max(own) < size
    expected = logged(one)
    assert expected
    for line, other in zip(expected, logged(several), strict=True):
        assert other == pytest.approx(line, rel=1e-3)


def stops_once(config: Config, ctx: RunContext) -> Any:
    """Fit, but stop after step 7 of 12 in the first launch: in the middle of an epoch."""
    first = not (ctx.paths.folder / "stopped").exists()
    model = net(ctx.rank)

    class Stop(nb.Callback):
        def on_train_batch_end(self, state: Any) -> None:
            if first and state.step == 7:
                raise KeyboardInterrupt

    data = samples(37), samples(11, seed=1)
    callbacks = [Stop()] if first else []
    try:
        values = nb.fit(ctx, config, model, *data, loss=cross_entropy, callbacks=callbacks)
    except KeyboardInterrupt:
        if ctx.is_main:
            (ctx.paths.folder / "stopped").touch()
        raise RuntimeError("stopped here") from None
    return values, state_of(model)


def uninterrupted(config: Config, ctx: RunContext) -> Any:
    model = net()
    data = samples(37), samples(11, seed=1)
    return nb.fit(ctx, config, model, *data, loss=cross_entropy), state_of(model)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(("pipeline", 2), ("pipeline", 2), marks=pytest.mark.long),
        pytest.param(("pipeline", 2), ("auto", 1)),
        pytest.param(("auto", 1), ("pipeline", 2), marks=pytest.mark.long),
        pytest.param(("pipeline", 3), ("fsdp", 2), marks=pytest.mark.long),
        pytest.param(("pipeline", 3), ("pipeline", 2), marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_resumes_under_another_strategy(
    tmp_path: Path, before: tuple[str, int], after: tuple[str, int]
) -> None:
    several = {"train.gradient_accumulation_steps": 2, "checkpoint.every_steps": 2}
    config = settings(tmp_path, **ADAM, **several)
    whole = launch(uninterrupted, config, ranks=1)
    first = config.with_overrides({"distributed.strategy": before[0]})
    with pytest.raises(RuntimeError, match="stopped here"):
        launch(stops_once, first, ranks=before[1], name="resumed")
    (folder,) = tmp_path.glob("*resumed*")
    newest, _ = CheckpointStore(folder / "checkpoints").good("step")
    assert newest is not None
    saved = torch.load(newest.folder / "training.pt", weights_only=True)
    assert (saved["step"], len(saved["optimizer"]["state"])) == (6, 8)
    nb.load_model(newest.folder, net(5))  # plain inference
    second = config.with_overrides({"distributed.strategy": after[0]})
    resumed = launch(stops_once, second, ranks=after[1], resume=folder)
    assert "fit: resumes after epoch 1, 2 steps into" in (folder / "ranks/0/log.txt").read_text()
    (values, weights), (expected, wanted) = resumed.value, whole.value
    assert values == pytest.approx(expected, abs=1e-4)
    close(weights, wanted)


def twice(config: Config, ctx: RunContext) -> Any:
    """The same model in two fits, the second one with the weights of its best epoch."""
    model, data = net(), (samples(37), samples(11, seed=1))
    nb.fit(ctx, config, model, *data, loss=cross_entropy)
    hot = config.with_overrides({"optim.lr": 5.0})  # the last epoch is worse than the best
    values = nb.fit(ctx, hot, model, *data, loss=cross_entropy)
    loss = cross_entropy(model(samples(11, seed=1)[0]), samples(11, seed=1)[1]).item()
    return values, loss, state_of(model)


@pytest.mark.long
def test_the_model_ends_whole_with_the_best_weights_and_can_be_fitted_again(tmp_path: Path) -> None:
    result = launch(twice, settings(tmp_path, **PIPELINE))
    for values, loss, weights in result.values:
        assert values["best_epoch"] < values["epoch"]
        assert loss == pytest.approx(values["best_val_loss"], rel=1e-5)
        close(weights, result.value[2], atol=0)


def not_finite(config: Config, ctx: RunContext) -> Any:
    inputs, labels = samples(37)
    inputs[5] = float("nan")
    return nb.fit(ctx, config, net(), (inputs, labels), None, loss=cross_entropy)


@pytest.mark.long
def test_a_loss_that_is_not_finite_names_its_step_and_samples(tmp_path: Path) -> None:
    config = settings(tmp_path, **PIPELINE, **{"tracking.record_samples": True})
    with pytest.raises(FitError, match=r"step 1 .*epoch 1\) is nan(.|\n)*samples .*\b5\b"):
        launch(not_finite, config.with_overrides({"train.batch_size": 36}))


def refusals(config: Config, ctx: RunContext) -> list[str]:
    """The errors of several mistakes; the ranks meet each of them together."""
    found = []

    def caught(model: nn.Module, data: Any = None, **more: Any) -> None:
        data = data or samples(12)
        try:
            nb.fit(ctx, config, model, data, None, loss=cross_entropy, **more)
        except FitError as error:
            found.append(str(error))

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

    class Residual(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    class Two(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), x

    shared = nn.Linear(6, 6)
    inputs, labels = samples(12)
    pairs = [((x, x), int(y)) for x, y in zip(inputs, labels, strict=True)]
    caught(Own())
    caught(Residual(nn.Linear(6, 6), nn.Linear(6, 6)))
    caught(nn.Sequential(nn.Linear(6, 3), nn.ReLU()))
    caught(nn.Sequential(shared, nn.ReLU(), shared))
    caught(nn.Sequential(Two(6, 6), nn.Linear(6, 3)))
    caught(net(), step=lambda model, batch: (model(batch[0]), batch[1]))
    caught(net(), pairs)
    caught(net(), optimizer={"a": torch.optim.SGD}, step=lambda model, batch, optimizers: None)
    return found


def test_mistakes_are_refused_with_what_to_do(tmp_path: Path) -> None:
    expected = [
        "pipeline, and this Own is no Sequential",
        "pipeline, and this Residual has more than layers",
        "pipeline on 2 ranks, and the model has 1 layers with trained parameters",
        "0.weight and 2.weight are one tensor",
        "the last layer of rank 0 returns a tuple",
        "step= is a function of your own, and distributed.strategy is pipeline",
        "the inputs of a batch are a list",
        "several optimizers do not go with distributed.strategy: pipeline",
    ]
    config = settings(tmp_path, **PIPELINE, **{"train.gradient_accumulation_steps": 1})
    result = launch(refusals, config)
    for found in result.values:
        assert len(found) == len(expected), found
        for text, error in zip(expected, found, strict=True):
            assert text in error
            assert "Allowed:" in error
            assert "Do now:" in error


def own_loop(config: Config, ctx: RunContext) -> None:
    ctx.prepare(net())


@pytest.mark.long
def test_own_loops_refuse_a_pipeline(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"pipeline is set, and ctx.prepare cannot(.|\n)*nb.fit"):
        launch(own_loop, settings(tmp_path, **PIPELINE))


def test_layers_are_divided_by_their_bytes() -> None:
    def stages(ranks: int, *layers: nn.Module) -> list[list[str]]:
        return split({str(number): one for number, one in enumerate(layers)}, ranks)

    wide, thin, relu = nn.Linear(64, 64), nn.Linear(8, 8), nn.ReLU()
    assert stages(2, thin, relu, thin, wide, relu) == [["0", "1", "2"], ["3", "4"]]
    assert stages(2, wide, thin, thin) == [["0"], ["1", "2"]]
    frozen = nn.Linear(64, 64).requires_grad_(False)
    # A stage begins with a trained layer, the first one also with what comes before.
    assert stages(2, frozen, relu, wide, frozen, nn.Linear(8, 8)) == [["0", "1", "2", "3"], ["4"]]
    with pytest.raises(FitError, match=r"on 3 ranks, and the model has 1 (.|\n)*world_size: 1"):
        stages(3, relu, thin, frozen)


def test_the_plan_and_the_configuration_of_a_pipeline() -> None:
    def plan(gpus: int, **more: Any) -> Any:
        config = configured(overrides={"train.batch_size": 24, **PIPELINE, **more})
        return make_plan(config, detect_host({}), machine(*[T4] * gpus, build=CPU_BUILD))

    both = plan(0, **{"train.gradient_accumulation_steps": 8})
    assert (both.strategy, both.processes, both.data_ranks) == ("pipeline", 2, 1)
    assert (both.batch_size_per_device, both.accumulate, both.global_batch_size) == (3, 8, 24)
    assert "A BATCH HAS" not in both.explain()
    assert "gradient_accumulation_steps: 8" in plan(0).explain()
    alone = plan(0, **{"distributed.world_size": 1})
    assert any("there is one process: it trains as single" in one for one in alone.reasons)
    for more, text in [
        ({"train.compile": True}, "pipeline conflicts with train.compile: true"),
        ({"distributed.sync_batchnorm": True}, "pipeline conflicts with .*sync_batchnorm: true"),
        ({"distributed.local_sgd_steps": 2}, "pipeline conflicts with .*local_sgd_steps: 2"),
    ]:
        with pytest.raises(ConfigError, match=text):
            nb.load_config(env=None, overrides={**PIPELINE, **more})
    mode = nb.load_config(env=None, overrides={"distributed.mode": "HYBRID"})
    assert mode.distributed.strategy == "pipeline"
    with pytest.raises(ConfigError, match=r"enable_hybrid(.|\n)*strategy: pipeline"):
        nb.load_config(env=None, overrides={"enable_hybrid": True})
