"""The train step on one rank and several: model placement, errors for models it cannot train."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import CPU_BUILD, machine
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, nll_loss

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import CheckpointError, ConfigError, FitError
from nbtoolkit.host import detect_host
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.record import RunRecord
from nbtoolkit.training.losses import check_labels
from nbtoolkit.training.model import find_blocks, first_compressed
from nbtoolkit.training.optim import warmup_and_decay
from nbtoolkit.training.samples import MicroBatch
from nbtoolkit.training.step import Recipe, TrainStep
from nbtoolkit.training.strategy import total_norm
from nbtoolkit.wire.payload import JobSpec
from nbtoolkit.worker.channel import RecordChannel
from nbtoolkit.worker.context import RunContext

SETTINGS = {
    "optim": {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
    "tracking": {"mlflow": False},
}
WHOLE = MicroBatch(8, 1.0, True, 8)


def configured(overrides: dict[str, Any] | None = None) -> Config:
    return Config.model_validate(SETTINGS).with_overrides(overrides or {})


def context(folder: Path, config: Config) -> RunContext:
    """A run of one rank in this process."""
    folder.mkdir(exist_ok=True)
    paths = RunPaths(folder)
    plan = make_plan(config, detect_host({}), machine(build=CPU_BUILD))
    channel = RecordChannel(RunRecord(paths, deadline=None))
    return RunContext(JobSpec(paths=paths, plan=plan, config=config), channel)


def train_step_of(
    ctx: RunContext,
    model: nn.Module,
    overrides: dict[str, Any] | None = None,
    loss: Any = cross_entropy,
    **more: Any,
) -> TrainStep:
    """A train step of this run; its settings may differ from the run's."""
    config = ctx.config.with_overrides(overrides or {})

    def pair(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        return model(batch[0]), batch[1]

    recipe = Recipe(**{"loss": loss, "forward": pair, **more})
    return TrainStep(ctx, config, model, recipe, steps=20)


Make = Callable[..., TrainStep]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Make the train step of a run of one rank in this process."""

    def make(model: nn.Module, overrides: dict[str, Any] | None = None, **more: Any) -> TrainStep:
        return train_step_of(context(tmp_path / "run", configured(overrides)), model, **more)

    return make


def points(size: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in 6 dimensions, and which of the first three is largest."""
    inputs = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs[:, :3].argmax(dim=1)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


# --- activation checkpointing ---------------------------------------------------------------------


class Block(nn.Module):
    """A residual block with everything that running twice may change; counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.runs = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.runs += 1
        return x + scale * self.drop(torch.tanh(self.norm(self.linear(x))))


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


def staged() -> nn.Module:
    return nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block()), nn.Linear(6, 3))


def plain_blocks() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(6, 3))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.2, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 3), nn.Linear(6, 3))


ARCHITECTURES = [Listed, Named, staged, plain_blocks, transformer]


@pytest.mark.parametrize("build", ARCHITECTURES)
def test_recomputed_activations_give_the_same_weights_and_statistics(
    make: Make, build: Callable[[], nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    models = [build()]
    models.append(copy.deepcopy(models[0]))
    inputs, targets = points()
    inputs = inputs[:, None] if build is transformer else inputs
    targets = targets[:, None].expand(-1, 3) if build is transformer else targets
    for switch, model in zip([False, True], models, strict=True):
        loss = partial(mse_loss) if build is transformer else cross_entropy
        answers = targets[:, None].float() if build is transformer else targets
        train_step = make(model, {"train.activation_checkpointing": switch}, loss=loss)
        torch.manual_seed(1)
        for _ in range(3):
            train_step.step((inputs, answers), WHOLE, measure_norm=False)
    expected, found = (model.state_dict() for model in models)
    assert list(expected) == list(found)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=0, rtol=0, msg=name)
    assert "activation_checkpointing" not in capsys.readouterr().out


def test_blocks_run_twice_in_training_and_once_without_gradients(make: Make) -> None:
    model = Listed()
    train_step = make(model, {"train.activation_checkpointing": True})
    train_step.step(points(), WHOLE, measure_norm=False)
    assert [block.runs for block in model.blocks] == [2, 2]
    train_step.evaluate(points(), 6)
    assert [block.runs for block in model.blocks] == [3, 3]


def test_a_copy_of_a_recomputing_model_computes_with_its_own_weights(make: Make) -> None:
    model = make(Listed(), {"train.activation_checkpointing": True}).module.eval()
    copied = copy.deepcopy(model)
    inputs = points()[0]
    before = copied(inputs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(copied(inputs), before)
    assert not torch.equal(model(inputs), before)


def test_the_blocks_are_the_outermost_layers_that_repeat() -> None:
    counts = {build.__name__: len(find_blocks(build())) for build in ARCHITECTURES}
    assert counts == {"Listed": 2, "Named": 2, "staged": 3, "plain_blocks": 2, "transformer": 3}
    assert find_blocks(nn.Sequential(Listed(), nn.Linear(3, 3)))[0].__class__ is Block
    assert find_blocks(mlp()) == []


def test_a_model_without_blocks_is_told_that_nothing_is_recomputed(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    make(mlp(), {"train.activation_checkpointing": True})
    assert "activation_checkpointing changes nothing" in capsys.readouterr().out


def test_a_model_that_can_recompute_by_itself_does_it(make: Make) -> None:
    class Own(Listed):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any) -> None:
            self.asked = gradient_checkpointing_kwargs

    model = make(Own(), {"train.activation_checkpointing": True}).module
    assert model.asked == {"use_reentrant": False}
    assert "forward" not in vars(model.blocks[0])


# --- memory by pixel ------------------------------------------------------------------------------


class Images(nn.Module):
    """A small convolutional model that notes how its inputs lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(4, 3)
        self.by_pixel: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.by_pixel.append(x.is_contiguous(memory_format=torch.channels_last))
        return self.head(self.conv(x).relu().amax(dim=(2, 3)))


def test_channels_last_changes_the_memory_and_not_the_values(make: Make) -> None:
    torch.manual_seed(0)
    plain, other = Images(), Images()
    other.load_state_dict(plain.state_dict())
    batch = torch.randn(8, 2, 5, 5), points()[1]
    for model, switch in ((plain, False), (other, True)):
        train_step = make(model, {"train.channels_last": switch})
        train_step.step(batch, WHOLE, measure_norm=False)
        train_step.evaluate(batch, 8)
    assert (plain.by_pixel, other.by_pixel) == ([False] * 2, [True] * 2)
    assert other.conv.weight.is_contiguous(memory_format=torch.channels_last)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value)


def test_channels_last_takes_batches_of_any_form_and_volumes_beside_images(make: Make) -> None:
    model = nn.ModuleDict({"image": nn.Conv2d(2, 3, 3), "volume": nn.Conv3d(1, 3, 2)})
    batch = {"image": torch.randn(8, 2, 3, 3), "volume": torch.randn(8, 1, 2, 2, 2), "y": [1] * 8}
    seen = []

    def forward(model: Any, batch: Any) -> tuple[Any, Any]:
        seen.append(batch["image"].stride())
        scores = model["image"](batch["image"]).flatten(1) + model["volume"](
            batch["volume"]
        ).flatten(1)
        return scores, torch.tensor(batch["y"])

    make(model, {"train.channels_last": True}, forward=forward).step(
        batch, WHOLE, measure_norm=False
    )
    assert seen == [(18, 1, 6, 2)]


def test_channels_last_says_when_it_has_no_effect(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    make(mlp(), {"train.channels_last": True})
    assert "channels_last changes nothing" in capsys.readouterr().out


# --- weights that can be trained ------------------------------------------------------------------


def test_trained_weights_in_float16_are_refused_by_name(make: Make) -> None:
    what = r"float16: 0\.weight, 0\.bias, 2\.weight and 1 more[\s\S]*fp16_weights: upcast"
    with pytest.raises(FitError, match=what):
        make(mlp().half())


def test_upcast_makes_trained_half_weights_fp32_and_leaves_frozen_ones(make: Make) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    model.half()
    model[0].requires_grad_(False)
    model[3].bfloat16()
    make(model, {"train.fp16_weights": "upcast"})
    kinds = [{value.dtype for value in layer.state_dict().values()} for layer in model]
    assert kinds[0] == {torch.float16}
    assert kinds[1] == kinds[3] == {torch.float32}
    assert kinds[2] == {torch.float32, torch.int64}  # the count of batches


def test_upcast_weights_are_those_that_the_optimizer_trains(make: Make) -> None:
    model = mlp().half()
    train_step = make(model, {"train.fp16_weights": "upcast"})
    before = model[0].weight.clone()
    train_step.step(points(), WHOLE, measure_norm=False)
    assert before.dtype == torch.float32
    assert not torch.equal(model[0].weight, before)


def test_frozen_float16_weights_are_nobodys_business(make: Make) -> None:
    model = nn.Sequential(nn.Linear(6, 6).half().requires_grad_(False), nn.Linear(6, 3))
    assert make(model).module[0].weight.dtype == torch.float16


def test_trained_weights_in_bfloat16_are_warned_of(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    make(mlp().bfloat16())
    assert "weights in bfloat16 are trained" in capsys.readouterr().out


def test_a_model_with_nothing_to_train_is_refused(make: Make) -> None:
    with pytest.raises(
        FitError, match=r"Sequential has no parameter .* trained[\s\S]*requires_grad"
    ):
        make(mlp().requires_grad_(False))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own
def test_a_wrapped_or_compiled_model_is_refused(make: Make) -> None:
    with pytest.raises(FitError, match=r"it is a DataParallel[\s\S]*model\.module"):
        make(nn.DataParallel(mlp()))
    with pytest.raises(FitError, match=r"OptimizedModule[\s\S]*train\.compile: true"):
        make(torch.compile(mlp()))


# --- labels ---------------------------------------------------------------------------------------

SCORES = torch.zeros(4, 3)
PIXELS = torch.zeros(2, 3, 5, 5)


@pytest.mark.parametrize(
    ("labels", "loss", "what"),
    [
        ([0, 1, 2, 7], cross_entropy, r"from 0 to 7, .* scores 3 classes[\s\S]*layer 8 outputs"),
        ([1, 2, 3, 3], nn.CrossEntropyLoss(), r"from 1 to 3[\s\S]*subtract 1 from the labels"),
        ([0, 1, -1, 2], nll_loss, r"from -1 to 2[\s\S]*those .* not to count get -100"),
        ([0, 9, 3, 2], partial(cross_entropy, ignore_index=9), r"0 to 3[\s\S]*and 9 \(ignore_ind"),
        ([0, -100, 2, 2], nn.NLLLoss(ignore_index=5), r"from -100 to 2[\s\S]*get 5"),
    ],
)
def test_labels_without_a_score_are_refused(labels: list[int], loss: Any, what: str) -> None:
    with pytest.raises(FitError, match=what):
        check_labels(SCORES, torch.tensor(labels), loss)
    with pytest.raises(FitError, match=what):
        check_labels(SCORES, torch.tensor(labels).numpy(), loss)


@pytest.mark.parametrize(
    ("outputs", "targets", "loss"),
    [
        (SCORES, torch.tensor([0, 1, -100, 2]), cross_entropy),
        (SCORES, torch.tensor([0, 1, 9, 2]), nn.CrossEntropyLoss(ignore_index=9)),
        (SCORES, torch.full((4, 3), 5.0), cross_entropy),  # probabilities, as far as torch cares
        (SCORES, torch.tensor([7, 7, 7, 7]), mse_loss),
        (SCORES, torch.tensor([-100] * 4), cross_entropy),
        (PIXELS, torch.full((2, 5, 5), 2), cross_entropy),
        (torch.zeros(3), torch.tensor(2), cross_entropy),
        ({"scores": SCORES}, torch.tensor([7]), cross_entropy),
    ],
)
def test_other_losses_and_targets_are_let_through(outputs: Any, targets: Any, loss: Any) -> None:
    check_labels(outputs, targets, loss)


def test_labels_of_pixels_are_counted_by_their_classes() -> None:
    with pytest.raises(FitError, match="from 3 to 3, but the model scores 3 classes"):
        check_labels(PIXELS, torch.full((2, 5, 5), 3), cross_entropy)


def test_the_first_batch_checks_all_labels_at_hand(make: Make) -> None:
    inputs, targets = points()
    everything = torch.cat([targets, torch.tensor([12])])
    with pytest.raises(FitError, match="labels go from 0 to 12"):
        make(mlp(), targets=everything).step((inputs, targets), WHOLE, measure_norm=False)
    with pytest.raises(FitError, match="labels go from 3 to 3"):
        make(mlp()).step((inputs, torch.full((8,), 3)), WHOLE, measure_norm=False)


def test_labels_that_a_step_of_ones_own_changes_are_judged_as_it_returns_them(
    tmp_path: Path,
) -> None:
    config = configured({"train.epochs": 1, "train.batch_size": 8, "checkpoint.enabled": False})
    inputs, targets = points()

    def from_zero(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        return model(batch[0]), batch[1] - 1

    given = {"train_data": (inputs, targets + 1), "valid_data": None, "loss": cross_entropy}
    nb.fit(context(tmp_path / "run", config), config, mlp(), **given, step=from_zero)
    with pytest.raises(FitError, match="subtract 1 from the labels"):
        nb.fit(context(tmp_path / "run", config), config, mlp(), **given)


# --- the step -------------------------------------------------------------------------------------


def test_an_error_of_the_users_keeps_its_type_and_gets_the_step(make: Make) -> None:
    calls = iter(range(9))

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and next(calls) == 2:
            raise LookupError("mine")
        return cross_entropy(outputs, targets)

    train_step = make(mlp(), loss=loss)
    for _ in range(2):
        train_step.step(points(), WHOLE, measure_norm=False)
    with pytest.raises(LookupError, match="mine") as caught:
        train_step.step(points(), WHOLE, measure_norm=False)
    notes = getattr(caught.value, "__notes__", ["in optimizer step 3 of nb.fit"])  # from 3.11 on
    assert notes == ["in optimizer step 3 of nb.fit"]


def test_one_cycle_moves_momentum_and_groups_keep_their_scale(make: Make) -> None:
    optim = {
        "schedule": "one_cycle",
        "warmup_ratio": 0.5,
        "momentum": 0.9,
        "param_groups": [{"match": "*", "lr_scale": 0.5}],
    }
    train_step, seen = make(mlp(), {"optim": optim}), []
    for _ in range(3):
        train_step.step(points(), WHOLE, measure_norm=False)
        group = train_step.optimizer.param_groups[0]
        assert group["lr"] == 0.5 * train_step.rate
        seen.append((train_step.rate, group["momentum"]))
    assert seen[0] == pytest.approx((0.004, 0.95))
    assert [rate for rate, _ in seen] == sorted({rate for rate, _ in seen})
    assert seen[-1][1] < seen[0][1]


def test_a_state_brings_back_the_schedule(make: Make) -> None:
    overrides = {"optim.schedule": "plateau", "optim.plateau_patience": 1}
    train_step, fresh = make(mlp(), overrides), make(mlp(), overrides)
    train_step.step(points(), WHOLE, measure_norm=False)
    for _ in range(2):
        train_step.schedule.end_epoch(1.0)
    fresh.restore(train_step.state(), source="here")
    assert fresh.steps_done == 1
    assert fresh.schedule.rate == train_step.schedule.rate == pytest.approx(0.01)
    fresh.schedule.end_epoch(1.0)
    assert fresh.schedule.rate == pytest.approx(0.001)


def test_the_average_is_evaluated_saved_and_brought_back(make: Make) -> None:
    overrides = {"train.weight_averaging": "ema", "train.ema_decay": 0.9}
    train_step, fresh = make(mlp(), overrides), make(mlp(), overrides)
    assert train_step.evaluated_module is train_step.module  # nothing is averaged yet
    for _ in range(5):
        train_step.step(points(), WHOLE, measure_norm=False)
    inputs, _ = batch = points()
    with torch.no_grad():
        expected = train_step.averages.module(inputs)
    assert torch.equal(train_step.evaluate(batch, 6)[0], expected)
    assert not torch.equal(train_step.module(inputs), expected)
    fresh.restore(train_step.state(), source="here")
    assert torch.equal(fresh.evaluate(batch, 6)[0], expected)
    state = train_step.state()
    del state["averages"]
    with pytest.raises(CheckpointError, match="here was not written by fit: averages is missing"):
        fresh.restore(state, source="here")


def test_swas_own_learning_rate_goes_before_the_schedules(make: Make) -> None:
    overrides = {"train.weight_averaging": "swa", "train.swa_start": 0.5, "train.swa_lr": 0.03}
    train_step = make(mlp(), overrides)
    rates = []
    for _ in range(20):
        train_step.step(points(), WHOLE, measure_norm=False)
        rates.append(train_step.optimizer.param_groups[0]["lr"])
    assert rates[9] == 0.1 * warmup_and_decay(configured(overrides), steps=20)(9)
    assert rates[-5:] == [0.03] * 5


def test_an_overflow_under_fp16_backs_off_as_the_settings_say(tmp_path: Path) -> None:
    overrides = {
        "train.scaler_init_scale": 1024.0,
        "train.scaler_backoff_factor": 0.25,
        "train.scaler_growth_factor": 8.0,
        "train.scaler_growth_interval": 2,
    }
    ctx = context(tmp_path / "run", configured(overrides))
    ctx.plan = dataclasses.replace(ctx.plan, precision="fp16")
    model = mlp()
    train_step = train_step_of(ctx, model)
    start = model[0].weight.clone()
    inputs, targets = points()
    train_step.step((inputs * torch.inf, targets), WHOLE, measure_norm=False)
    assert torch.equal(model[0].weight, start)
    scales = [train_step.state()["scaler"]["scale"]]
    for _ in range(2):
        train_step.step((inputs, targets), WHOLE, measure_norm=False)
        scales.append(train_step.state()["scaler"]["scale"])
    assert scales == [256.0, 256.0, 2048.0]
    assert train_step.keeps_weights
    for _ in range(6):
        train_step.step((inputs * torch.inf, targets), WHOLE, measure_norm=False)
    assert not train_step.keeps_weights  # a scale of 0.5: hardly a step gets through
    assert not torch.equal(model[0].weight, start)


def test_factors_of_the_scaler_that_lead_nowhere_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"scaler_growth_factor: 1\.0 .*\n.*a number above 1"):
        configured({"train.scaler_growth_factor": 1.0})
    with pytest.raises(ConfigError, match=r"scaler_backoff_factor: 1\.0 .*\n.*below 1"):
        configured({"train.scaler_backoff_factor": 1.0})


# --- several ranks --------------------------------------------------------------------------------


class Forked(nn.Module):
    """A model with a part that nobody uses, and one that some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.idle = nn.Linear(6, 3), nn.Linear(6, 3)
        self.sometimes = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.trunk(x)
        return self.sometimes(out) if x[0, 0] < 100 else out


def train_forked(config: Config, ctx: RunContext) -> list[float]:
    """Two steps with the whole model but its idle part, then two without ``sometimes``, too."""
    torch.manual_seed(0)
    train_step = train_step_of(ctx, Forked())
    inputs, targets = points()
    batches = [(inputs, targets)] * 2 + [(inputs + 200, targets)] * 2
    return [float(train_step.step(batch, WHOLE, measure_norm=True).mean) for batch in batches]


Launch = Callable[..., nb.RunResult]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Launches ranks whose run is in the test's folder."""

    def launch(train: Any, overrides: dict[str, Any] | None = None, ranks: int = 2) -> nb.RunResult:
        config = configured({"runtime.output_dir": str(tmp_path / "runs"), **(overrides or {})})
        return nb.launch(train, config, processes=ranks, resume="never", display="off")

    return launch


@pytest.mark.long
def test_parameters_without_a_part_are_named_in_the_very_step(launch: Launch) -> None:
    def one_step(config: Config, ctx: RunContext) -> None:
        train_step_of(ctx, Forked()).step(points(), WHOLE, measure_norm=False)

    what = (
        r"no part in the loss[\s\S]*idle\.weight, idle\.bias\n"
        r"[\s\S]*distributed\.find_unused_parameters: true"
    )
    with pytest.raises(FitError, match=what):
        launch(one_step)


@pytest.mark.long
def test_one_rank_and_ddp_that_looks_for_them_may_have_unused_parameters(launch: Launch) -> None:
    alone = launch(train_forked, ranks=1).value
    found = launch(train_forked, {"distributed.find_unused_parameters": True})
    assert found.values == [pytest.approx(alone, abs=1e-6)] * 2


@pytest.mark.long
def test_a_static_graph_that_changes_is_told_with_names(launch: Launch) -> None:
    what = (
        r"sometimes\.weight, sometimes\.bias; .*static_graph promised"
        r"[\s\S]*distributed\.static_graph: false and find_unused_parameters: true"
    )
    with pytest.raises(FitError, match=what):
        launch(train_forked, {"distributed.static_graph": True})


@pytest.mark.long
def test_parameters_missing_after_accumulation_are_named_by_ddps_word(launch: Launch) -> None:
    def train(config: Config, ctx: RunContext) -> None:
        model = Forked()
        model.idle.requires_grad_(False)
        train_step = train_step_of(ctx, model)
        inputs, targets = points()
        for _ in range(2):  # the first pass of a step uses what the second does not
            train_step.step((inputs, targets), MicroBatch(8, 0.5, False, 8), measure_norm=False)
            train_step.step(
                (inputs + 200, targets), MicroBatch(8, 0.5, True, 8), measure_norm=False
            )

    with pytest.raises(FitError, match=r"gradients: .*sometimes\.weight, sometimes\.bias"):
        launch(train)


Weights = dict[str, list[float]]


def weights_of(train_step: TrainStep) -> Weights:
    return {name: value.flatten().tolist() for name, value in train_step.state()["model"].items()}


def train_compressed(config: Config, ctx: RunContext) -> dict[str, Weights]:
    """Twenty steps with each compression, each rank on points of its own; the weights then."""
    found = {}
    for kind, rank in (("none", 1), ("fp16", 1), ("powersgd", 1), ("powersgd", 2)):
        overrides = {"distributed.compression": kind, "distributed.powersgd_rank": rank}
        torch.manual_seed(0)
        wide = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3))
        train_step = train_step_of(ctx, wide, overrides)
        for _ in range(20):
            train_step.step(points(8, seed=ctx.rank), WHOLE, measure_norm=False)
        found[f"{kind} {rank}"] = weights_of(train_step)
    return found


def apart(one: Weights, other: Weights) -> float:
    """The largest difference between two models' weights."""
    pairs = zip(one.values(), other.values(), strict=True)
    return max(float((torch.tensor(a) - torch.tensor(b)).abs().max()) for a, b in pairs)


@pytest.mark.long
def test_compressed_gradients_are_nearly_exact_and_equal_on_all_ranks(launch: Launch) -> None:
    mine, theirs = launch(train_compressed).values
    assert mine == theirs
    errors = {kind: apart(weights, mine["none 1"]) for kind, weights in mine.items()}
    assert 1e-7 < errors["fp16 1"] < 1e-3
    assert 1e-3 < errors["powersgd 1"] < 0.1
    assert 1e-4 < errors["powersgd 2"] < 0.7 * errors["powersgd 1"]


def test_bf16_gradients_over_gloo_are_refused(launch: Launch) -> None:
    what = r"compression is bf16, but .* gloo[\s\S]*none, fp16 or powersgd[\s\S]*compression: fp16"
    with pytest.raises(FitError, match=what):
        launch(train_forked, {"distributed.compression": "bf16"})


def test_one_rank_has_nothing_to_compress(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make(mlp(), {"distributed.compression": "powersgd"})
    assert "compression: powersgd has nothing to do: there is one rank" in capsys.readouterr().out


def test_powersgd_begins_after_a_tenth_of_the_run() -> None:
    assert [first_compressed(steps) for steps in (1, 20, 500, 10**9)] == [2, 2, 50, 1000]


def share_statistics(config: Config, ctx: RunContext) -> list[list[float]]:
    """A batch norm that saw this rank's points, and its average; as all ranks have them then."""
    train_step = train_step_of(ctx, nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)))
    averages = train_step.averages
    assert averages is not None
    for _ in range(2):
        train_step.step(points(8, seed=ctx.rank), WHOLE, measure_norm=False)
    train_step.broadcast_buffers()
    return [norm.running_mean.tolist() for norm in (train_step.module[0], averages.module[0])]


@pytest.mark.long
def test_statistics_of_the_model_and_of_its_average_are_rank_0s(launch: Launch) -> None:
    settings = {"train.weight_averaging": "ema", "distributed.broadcast_buffers": False}
    first, second = launch(share_statistics, settings).values
    assert first == second
    assert first[0] != first[1]


def train_blocks(config: Config, ctx: RunContext) -> list[Weights]:
    """Three steps with accumulation, without and with recomputed activations."""
    found = []
    for switch in (False, True):
        torch.manual_seed(0)
        train_step = train_step_of(ctx, Listed(), {"train.activation_checkpointing": switch})
        torch.manual_seed(1 + ctx.rank)
        for last in (False, True) * 3:
            train_step.step(
                points(8, seed=ctx.rank), MicroBatch(8, 0.5, last, 8), measure_norm=False
            )
        found.append(weights_of(train_step))
    return found


@pytest.mark.long
def test_recomputed_activations_change_nothing_on_two_ranks(launch: Launch) -> None:
    for plain, recomputed in launch(train_blocks).values:
        assert recomputed == plain


# --- torch.compile --------------------------------------------------------------------------------


def train_and_tell(config: Config, ctx: RunContext, *, tanh: bool = False) -> dict[str, Any]:
    """Four steps; what the compiler makes stays in the run's folder."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(ctx.paths.folder / "inductor")
    torch.manual_seed(0)
    # matrix products alone need no kernel in C++ (10 s); tanh needs one
    layers = [nn.Linear(6, 16, bias=False), nn.Linear(16, 3, bias=False)]
    train_step = train_step_of(
        ctx, nn.Sequential(*layers, *[nn.Tanh()] * tanh), {"train.compile": config.train.compile}
    )
    batch = points(8, seed=ctx.rank)
    losses = [float(train_step.step(batch, WHOLE, measure_norm=False).mean) for _ in range(4)]
    return {"losses": losses, "keys": list(train_step.state()["model"])}


def train_twice(config: Config, ctx: RunContext) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Without the compiler and with it; how much it compiled."""
    plain = train_and_tell(config, ctx)
    compiled = train_and_tell(config.with_overrides({"train.compile": True}), ctx)
    from torch._dynamo.utils import counters

    return plain, compiled, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_compiled_model_takes_the_same_steps(launch: Launch, ranks: int) -> None:
    for plain, compiled, graphs in launch(train_twice, ranks=ranks).values:
        assert compiled["losses"] == pytest.approx(plain["losses"], abs=1e-5)
        assert compiled["keys"] == plain["keys"] == ["0.weight", "1.weight"]
        assert graphs > 0


@pytest.mark.long
def test_a_model_that_cannot_be_compiled_says_which_switch_it_was(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(config: Config, ctx: RunContext) -> None:
        train_and_tell(config, ctx, tanh=True)

    # torch reads it when its compiler is imported, which may be before the ranks are forked
    monkeypatch.setenv("CXX", "/no/compiler")
    what = r"torch\.compile cannot compile this model here: [\s\S]*train\.compile: false"
    with pytest.raises(FitError, match=what):
        launch(train, {"train.compile": True}, ranks=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_norm_of_gradients_is_that_of_all_in_any_precision(dtype: torch.dtype) -> None:
    norm = total_norm([torch.full((2,), value, dtype=dtype) for value in (300.0, 400.0)])
    assert norm.item() == pytest.approx(500 * 2**0.5)
    assert norm.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
