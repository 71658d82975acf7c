"""Every setting of nb.fit has an effect: two values differ in what a run leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_field import PROVEN, proves
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, get_worker_info

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import FitError
from nbtoolkit.run.events import EventReader
from nbtoolkit.worker.context import RunContext

Settings = dict[str, Any]

SAMPLES, BATCH, EPOCHS = 10, 4, 3
STEPS = EPOCHS * 3  # an epoch's last step has 2 samples
BASE: Settings = {
    "train.epochs": EPOCHS,
    "optim.lr": 0.05,
    "checkpoint.enabled": False,
    "tracking.mlflow": False,
}
DIFFER = ("*", "*")


def points(*shape: int) -> torch.Tensor:
    drawn = torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(1))
    return drawn + 0.1


class Block(nn.Module):
    """A layer that counts its forward passes for gradients."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Block.calls += torch.is_grad_enabled()
        return torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.Sequential(Block(), Block()), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(x))


class Rising:
    """A metric that is one higher each time it is asked for."""

    def __init__(self, by: float = 1.0) -> None:
        self._value, self._by = 0.0, by

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        self._value += self._by
        return self._value


class Told(Dataset[tuple[torch.Tensor, ...]]):
    """Samples that tell whether a DataLoader's worker made them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, at: int) -> tuple[torch.Tensor, ...]:
        return points(2)[at], points(1)[at], torch.tensor(get_worker_info() is not None)


def fit(ctx: RunContext, settings: Settings, **options: Any) -> tuple[dict[str, float], nn.Module]:
    torch.manual_seed(0)
    model = options.pop("model", Net)()
    config = Config().with_overrides({**BASE, **settings})
    data = options.pop("data", (points(2), points(1)))
    options = {"loss": F.mse_loss, **options}
    valid = options.pop("valid", (points(2), points(1)))
    return nb.fit(ctx, config, model, data, valid, **options), model


# --- what is looked at: each from outside of fit ---


def weights(ctx: RunContext, settings: Settings) -> list[float]:
    """The trained parameters. Two metrics: one rises, one stays."""
    metrics = {"rise": Rising(), "same": Rising(0.0)}
    _, model = fit(ctx, settings, metrics=metrics)
    return [round(number, 7) for one in model.parameters() for number in one.flatten().tolist()]


def steps(ctx: RunContext, settings: Settings) -> int:
    """Training batches that the step was called with."""
    taken = []

    def step(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        taken.append(torch.is_grad_enabled())
        return model(batch[0]), batch[1]

    metrics = {"fall": Rising(-1.0), "same": Rising(0.0)}
    fit(ctx, settings, step=step, metrics=metrics)
    return sum(taken)


def repeated(ctx: RunContext, settings: Settings) -> bool:
    """Whether a sample comes twice in an epoch."""
    taken: list[float] = []

    def step(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        taken.extend(batch[0][:, 0].tolist())
        return model(batch[0]), batch[1].float()

    labels = torch.arange(SAMPLES)[:, None] % 3
    fit(ctx, settings, step=step, data=(points(2), labels), valid=None)
    return len({*taken[:SAMPLES]}) < SAMPLES


def given_model(ctx: RunContext, settings: Settings) -> str:
    """The class of the model that the step gets. It is not called: to compile takes seconds."""
    seen = []

    def step(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(type(model).__name__)
        return getattr(model, "_orig_mod", model)(batch[0]), batch[1]

    fit(ctx, settings, step=step, valid=None)
    return seen[0]


def by_pixel(ctx: RunContext, settings: Settings) -> bool:
    """Whether a batch of images lies in memory by pixel."""
    seen = []

    def step(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(batch[0].is_contiguous(memory_format=torch.channels_last))
        return model(batch[0]).flatten(1).mean(1, keepdim=True), batch[1]

    data = points(3, 4, 4), points(1)
    fit(ctx, settings, step=step, data=data, valid=None, model=lambda: nn.Conv2d(3, 2, 2))
    return all(seen)


def passes(ctx: RunContext, settings: Settings) -> int:
    """Forward passes of both blocks in training."""
    Block.calls = 0
    fit(ctx, settings, valid=None)
    return Block.calls


def by_workers(ctx: RunContext, settings: Settings) -> bool:
    """Whether the samples were made in another process."""
    seen = []

    def step(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(bool(batch[2].all()))
        return model(batch[0]), batch[1]

    fit(ctx, {**settings, "train.epochs": 1}, step=step, data=Told(), valid=None)
    return all(seen)


def half_weights(ctx: RunContext, settings: Settings) -> str:
    return refused(lambda: fit(ctx, settings, model=lambda: Net().half(), valid=None))


def pairs_loss(ctx: RunContext, settings: Settings) -> str:
    """A loss that compares each output with the targets of all samples."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().mean()

    return refused(lambda: fit(ctx, settings, loss=loss, data=(points(2), points()), valid=None))


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except FitError as error:
        return f"refused: {error.do}"
    return "trained"


def loss_scale(ctx: RunContext, settings: Settings) -> float:
    """The loss scale in the checkpoint that fp16 on a GPU would leave; here on the CPU."""
    before, plan = {*ctx.paths.checkpoints.rglob("*")}, ctx.plan
    ctx.plan = dataclasses.replace(plan, precision="fp16")
    try:
        fit(ctx, {**settings, "checkpoint.enabled": True}, valid=None)
    finally:
        ctx.plan = plan
    new = {*ctx.paths.checkpoints.rglob("*")} - before
    (file,) = (one for one in new if one.name.startswith("training"))
    scaler = torch.load(file, weights_only=True)["scaler"]
    return float(scaler["scale"])


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    first: Any
    second: Any
    look: Callable[[RunContext, Settings], Any]
    found: tuple[Any, Any] = DIFFER
    common: Settings = dataclasses.field(default_factory=dict)


SGD = {"optim.name": "sgd"}
SAME = {"checkpoint.monitor": "val_same", "checkpoint.mode": "min"}
# The first epoch stays the best one: its weights were trained before the first drop.
PLATEAU = {**SAME, "optim.schedule": "plateau", "checkpoint.weights": "last"}
SWA, EMA = {"train.weight_averaging": "swa"}, {"train.weight_averaging": "ema"}
FALL = {
    "checkpoint.monitor": "val_fall",
    "checkpoint.mode": "min",
    "train.early_stopping_patience": 1,
}
SCALE, GROWING = {"train.scaler_init_scale": 1024.0}, {"train.scaler_growth_interval": 4}
OVERFLOW = {"train.scaler_init_scale": 2.0**30}

CASES = [
    Case("optim.name", "adamw", "sgd", weights),
    Case("optim.options", {}, {"betas": [0.5, 0.9]}, weights),
    Case("optim.param_groups", [], [{"match": "last.*", "lr_scale": 0.5}], weights),
    Case("optim.lr", 0.05, 0.06, weights),
    Case("optim.weight_decay", 0.0, 0.5, weights),
    Case("optim.decay_all", False, True, weights, common={"optim.weight_decay": 0.5}),
    Case("optim.momentum", 0.0, 0.5, weights, common=SGD),
    Case("optim.schedule", "cosine", "constant", weights),
    Case("optim.warmup_ratio", 0.0, 0.5, weights),
    Case("optim.min_lr_ratio", 0.0, 0.5, weights),
    Case("optim.plateau_patience", 1, 5, weights, common=PLATEAU),
    Case(
        "optim.plateau_factor", 0.1, 0.5, weights, common={**PLATEAU, "optim.plateau_patience": 1}
    ),
    Case("train.epochs", 3, 2, steps, (9, 6)),
    Case("train.max_steps", None, 2, steps, (9, 2)),
    Case("train.drop_last", False, True, steps, (9, 6)),
    Case("train.early_stopping_patience", None, 1, steps, (9, 6), SAME),
    Case("train.min_delta", 0.0, 10.0, steps, (9, 6), FALL),
    Case("train.sample_weights", None, "balanced", repeated, (False, True)),
    Case("train.loss_reduction", "auto", "batch", pairs_loss, ("refused", "trained")),
    Case("train.max_grad_norm", None, 0.01, weights, common=SGD),
    Case("train.num_workers", 0, 1, by_workers, (False, True)),
    Case("train.compile", False, True, given_model, ("Net", "OptimizedModule")),
    Case("train.channels_last", False, True, by_pixel, (False, True)),
    Case("train.activation_checkpointing", False, True, passes, (2 * STEPS, 4 * STEPS)),
    Case("train.fp16_weights", "refuse", "upcast", half_weights, ("refused", "trained")),
    Case("train.weight_averaging", "none", "ema", weights),
    Case("train.ema_decay", 0.1, 0.9, weights, common=EMA),
    Case("train.swa_start", 0.2, 0.7, weights, common=SWA),
    Case("train.swa_lr", None, 0.5, weights, common=SWA),
    Case("train.scaler_init_scale", 1024.0, 2048.0, loss_scale, (1024.0, 2048.0)),
    Case("train.scaler_growth_interval", 4, 100, loss_scale, (4096.0, 1024.0), SCALE),
    Case(
        "train.scaler_growth_factor", 2.0, 4.0, loss_scale, (4096.0, 16384.0), {**SCALE, **GROWING}
    ),
    Case("train.scaler_backoff_factor", 0.5, 0.25, loss_scale, common=OVERFLOW),
]
PROVEN.extend(case.name for case in CASES)


def looks(config: Config, ctx: RunContext) -> dict[str, list[Any]]:
    """What is found with the first value, with it again, and with the second one."""
    torch.set_num_threads(1)  # these models are too small for two, which wait for each other
    found = {}
    for case in CASES:
        values = (case.first, case.first, case.second)
        found[case.name] = [case.look(ctx, {**case.common, case.name: one}) for one in values]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    out = tmp_path_factory.mktemp("every-field")
    settings = {
        "train.batch_size": BATCH,
        "tracking.mlflow": False,
        "runtime.output_dir": str(out),
        "tracking.device_metrics": False,
    }
    result = nb.launch(looks, settings, processes=1, display="off")
    value: dict[str, list[Any]] = result.value
    return value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_values_train_differently(case: Case, found: dict[str, list[Any]]) -> None:
    first, again, second = found[case.name]
    assert again == first
    if case.found is DIFFER:
        assert second != first
    elif isinstance(case.found[0], str):
        assert (first.partition(":")[0], second.partition(":")[0]) == case.found
    else:
        assert (first, second) == case.found


# --- what a run's folder shows: checkpoints, logged metrics, samples ---


def one_fit(config: Config, ctx: RunContext) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x, y = Net(), points(2), points(1)
    metrics = {"rise": Rising()}
    values = nb.fit(ctx, config, model, (x, y), (x, y), loss=F.mse_loss, metrics=metrics)
    return {**values, "weights": [one.tolist() for one in model.parameters()]}


Run = Callable[..., nb.RunResult]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def launch(**settings: Any) -> nb.RunResult:
        named = {name.replace("__", "."): value for name, value in settings.items()}
        base = {
            **BASE,
            "train.batch_size": BATCH,
            "checkpoint.enabled": True,
            "checkpoint.every_minutes": None,
            "runtime.output_dir": str(tmp_path),
        }
        return nb.launch(one_fit, {**base, **named}, start="inline", display="off", resume="never")

    return launch


def saved(result: nb.RunResult) -> list[int]:
    """The steps of the checkpoints that were written to go on from."""
    events = EventReader(result.paths.events).read()
    return [one.step for one in events if one.type == "checkpoint" and one.kind == "step"]


def kept(result: nb.RunResult) -> int:
    return len([*result.paths.checkpoints.glob("*step*")])


@proves(
    "checkpoint.enabled",
    "checkpoint.every_epochs",
    "checkpoint.every_steps",
    "checkpoint.every_minutes",
    "checkpoint.keep_last",
)
def test_checkpoints_are_written_and_kept_as_set(run: Run) -> None:
    assert saved(run()) == saved(run()) == [STEPS]
    assert saved(run(checkpoint__enabled=False)) == []
    assert saved(run(checkpoint__every_steps=2)) == [2, 4, 6, 8, 9]
    assert len(saved(run(checkpoint__every_minutes=1e-9))) > 1  # how many depends on the disk
    two, three = (
        run(checkpoint__every_epochs=1),
        run(checkpoint__every_epochs=1, checkpoint__keep_last=3),
    )
    assert saved(two) == saved(three) == [3, 6, 9]
    assert (kept(two), kept(three)) == (2, 3)


@proves("checkpoint.monitor", "checkpoint.mode", "checkpoint.weights")
def test_the_best_epoch_is_the_one_that_is_set(run: Run) -> None:
    by_loss = run()
    assert by_loss.value == run().value
    assert "best_val_loss" in by_loss.metrics
    lowest = run(checkpoint__monitor="val_rise", checkpoint__mode="min")
    highest = run(checkpoint__monitor="val_rise", checkpoint__mode="max")
    assert (lowest.metrics["best_epoch"], highest.metrics["best_epoch"]) == (1, 3)
    assert lowest.value["weights"] != highest.value["weights"]
    last = run(checkpoint__monitor="val_rise", checkpoint__mode="min", checkpoint__weights="last")
    assert last.value["weights"] == highest.value["weights"]


@proves("tracking.log_every_n_steps", "train.profile")
def test_steps_are_logged_and_profiled_as_set(run: Run) -> None:
    def logged(result: nb.RunResult) -> list[int]:
        events = EventReader(result.paths.events).read()
        return [one.step for one in events if one.type == "metrics"]

    every, third = run(tracking__log_every_n_steps=1), run(tracking__log_every_n_steps=3)
    assert logged(every) == [*range(1, 10)]
    assert logged(third) == [3, 6, 9]
    assert not every.paths.trace(0).exists()
    assert run(train__profile=True).paths.trace(0).exists()
