"""Losses that are not a plain mean: the same steps on any number of ranks, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Run
from torch import Tensor, nn
from torch.nn import functional as F

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import FitError
from nbtoolkit.training.samples import permutation
from nbtoolkit.worker.context import RunContext

SETTINGS = {
    "optim": {"name": "sgd", "lr": 0.5, "momentum": 0.0, "weight_decay": 0.0, "warmup_ratio": 0.0},
    "train": {"epochs": 2, "batch_size": 12},
    "checkpoint": {"enabled": False, "weights": "last"},
    "tracking": {"mlflow": False},
}
CONSTANT = {"optim.schedule": "constant"}
WEIGHTS = torch.tensor([1.0, 8.0, 0.5])
Batch = dict[str, Tensor]


def points(size: int, seed: int = 0) -> Batch:
    """Points in 6 dimensions, classes that are not alike often, and what is to be ignored."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator)
    y = (x[:, :3] + torch.tensor([1.0, 0.0, 0.0])).argmax(dim=1)
    ignored = torch.rand(size, generator=generator) < 0.4
    # Like y in the first half of a step of 12 samples, of which rank 0 of 2 takes its batches.
    like = y.clone()
    late = torch.cat([step[6:] for step in permutation(size, seed=0, epoch=1).split(12)])
    like[late] = (y[late] + 1) % 3
    return {
        "like": like,
        "x": x,
        "y": y,
        "void": y.masked_fill(ignored, 255),
        "hole": y.masked_fill(ignored, -100),
    }


class Rows:
    """A data set without direct access to its targets; only the last samples are ignored."""

    def __init__(self, data: Batch) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data["x"])

    def __getitem__(self, index: int) -> Batch:
        return {name: column[index] for name, column in self._data.items()}


def scores(target: str) -> Callable[..., Any]:
    return lambda model, batch: (model(batch["x"]), batch[target])


def masked(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A loss of one's own with a mask: two sums."""
    mask = targets != 255
    each = F.cross_entropy(outputs, targets.where(mask, 0), reduction="none")
    return (each * mask).sum(), mask.sum()


def twice(outputs: Tensor, targets: Tensor) -> Tensor:
    """As segmentation models with an auxiliary head are trained."""
    loss = nn.CrossEntropyLoss(ignore_index=255)
    return loss(outputs, targets) + 0.4 * loss(outputs.flip(1), targets)


def both(model: nn.Module, batch: Batch) -> tuple[Tensor, Batch]:
    return model(batch["x"]), {"y": batch["y"], "like": batch["like"]}


def of_both(outputs: Tensor, targets: Batch) -> Tensor:
    return F.cross_entropy(outputs, targets["y"]) + F.cross_entropy(outputs, targets["like"])


def inside(model: nn.Module, batch: Batch) -> tuple[Tensor, None]:
    """As models of Hugging Face do: the forward pass gives the loss."""
    return F.cross_entropy(model(batch["x"]), batch["hole"]), None


# name: step, loss, the same of a whole batch in plain torch
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any] | None]] = {
    "class weights": (scores("y"), nn.CrossEntropyLoss(weight=WEIGHTS), None),
    "smoothed": (
        scores("y"),
        lambda out, y: F.cross_entropy(out, y, weight=WEIGHTS, label_smoothing=0.1),
        None,
    ),
    "nll": (scores("y"), lambda out, y: F.nll_loss(out.log_softmax(1), y, WEIGHTS), None),
    "ignored": (scores("void"), nn.CrossEntropyLoss(ignore_index=255), None),
    "holes": (scores("hole"), F.cross_entropy, None),
    "mask": (
        scores("void"),
        masked,
        lambda out, y: masked(out, y)[0] / masked(out, y)[1].clamp(min=1),
    ),
    "class weights, ignored": (
        scores("void"),
        nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=255),
        None,
    ),
    "auxiliary": (scores("void"), twice, None),
    "two targets": (both, of_both, None),
    "inside": (inside, lambda loss, _: loss, None),
    "each": (
        scores("y"),
        nn.CrossEntropyLoss(weight=WEIGHTS, reduction="none"),
        lambda out, y: F.cross_entropy(out, y, WEIGHTS, reduction="none").mean(),
    ),
    "plain": (scores("y"), F.cross_entropy, None),
}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def fitted(config: Config, ctx: RunContext) -> dict[str, tuple[dict[str, float], Tensor]]:
    found = {}
    for name, (step, loss, _) in CASES.items():
        model = model_of()
        data = Rows(points(37)) if name in ("holes", "inside", "two targets") else points(37)
        values = nb.fit(ctx, config, model, data, points(23, seed=1), loss=loss, step=step)
        found[name] = values, nn.utils.parameters_to_vector(model.parameters()).detach()
    return found


def in_plain_torch(name: str) -> tuple[float, Tensor]:
    """The validation loss and the weights of a loop over whole batches on one device."""
    step, loss, whole = CASES[name]
    loss, model, data, held_out = whole or loss, model_of(), points(37), points(23, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in (1, 2):
        for batch in permutation(37, seed=0, epoch=epoch).split(12):
            optimizer.zero_grad()
            loss(*step(model, {key: column[batch] for key, column in data.items()})).backward()
            optimizer.step()
    with torch.no_grad():
        value = float(loss(*step(model, held_out)))
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    return value, weights


LONG = [pytest.param(pair, marks=pytest.mark.long) for pair in ((1, 1), (1, 3), (2, 1))]


@pytest.fixture(scope="module", params=[*LONG, (2, 3)], ids=str)
def launched(request: Any, tmp_path_factory: pytest.TempPathFactory) -> nb.RunResult:
    ranks, passes = request.param
    folder = str(tmp_path_factory.mktemp("losses"))
    config = Config.model_validate(SETTINGS).with_overrides(
        {**CONSTANT, "train.gradient_accumulation_steps": passes, "runtime.output_dir": folder}
    )
    return nb.launch(fitted, config, processes=ranks, display="off")


@pytest.mark.parametrize("name", CASES)
def test_steps_and_validation_are_those_of_whole_batches(launched: nb.RunResult, name: str) -> None:
    values, weights = launched.value[name]
    expected_loss, expected = in_plain_torch(name)
    assert (weights - expected).abs().max() < 1e-5
    assert values["val_loss"] == pytest.approx(expected_loss, abs=1e-5)


def test_the_training_loss_is_the_mean_over_the_steps_by_samples(
    launched: nb.RunResult,
) -> None:
    model, data = model_of(), points(37)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in (1, 2):
        total = 0.0
        for batch in permutation(37, seed=0, epoch=epoch).split(12):
            loss = F.cross_entropy(model(data["x"][batch]), data["y"][batch], WEIGHTS)
            total += loss.item() * len(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = launched.value["class weights"][0]["train_loss"]
    assert found == pytest.approx(total / 37, abs=1e-5)


# --- what cannot be computed in parts ---


def dice(outputs: Tensor, targets: Tensor) -> Tensor:
    chances, right = outputs.softmax(1), F.one_hot(targets, 3)
    return (1 - 2 * (chances * right).sum(0) / (chances.sum(0) + right.sum(0))).mean()


def own_mask(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.div(*masked(outputs, targets))


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def of_two(outputs: Tensor, targets: Tensor) -> Tensor:
    if len(outputs) < 6:
        raise ValueError("give me six")
    return F.cross_entropy(outputs, targets)


def regularised(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, WEIGHTS) + outputs.square().mean()


def two_heads(outputs: Tensor, targets: Tensor) -> Tensor:
    """Targets of their own for each head, which may be ignored in one of them only."""
    loss = nn.CrossEntropyLoss(ignore_index=255)
    return loss(outputs, targets) + loss(outputs.flip(1), targets.flip(0))


def fit_here(tmp_path: Any, loss: Any, target: str = "y", **overrides: Any) -> nb.RunResult:
    config = Config.model_validate(SETTINGS).with_overrides(
        {"runtime.output_dir": str(tmp_path), "train.max_steps": 2, **overrides}
    )

    def train(config: Config, ctx: RunContext) -> dict[str, float]:
        data = points(37)
        return nb.fit(ctx, config, model_of(), data, points(23), loss=loss, step=scores(target))

    return nb.launch(train, config, start="inline", display="off")


IN_PARTS = {"train.gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("loss", "target", "why"),
    [
        (dice, "y", "for the whole batch it is"),
        (own_mask, "void", "for the whole batch it is"),
        (contrastive, "y", "for 2 and 4 of them"),
        (regularised, "y", "it adds a mean over weights"),
        (of_two, "y", "for a part of them it raises ValueError: give me six"),
        (two_heads, "void", "it adds a mean over weights"),
    ],
)
def test_a_loss_that_its_parts_do_not_give_is_refused_before_the_first_step(
    tmp_path: Any, loss: Any, target: str, why: str
) -> None:
    asked = r"number of devices: .*" + why + r"[\s\S]*loss_reduction: batch"
    with pytest.raises(FitError, match=asked):
        fit_here(tmp_path, loss, target, **IN_PARTS)


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


@pytest.mark.parametrize("overrides", [{}, IN_PARTS, {**IN_PARTS, "train.batch_size": 2}])
def test_a_sum_over_the_samples_is_refused_with_the_mean(tmp_path: Any, overrides: Any) -> None:
    with pytest.raises(FitError, match=r"is a sum over the samples[\s\S]*return the mean"):
        fit_here(tmp_path, summed, **overrides)


@pytest.mark.parametrize("loss", [dice, contrastive, regularised])
def test_on_one_rank_a_step_of_one_part_takes_any_loss_as_it_is(tmp_path: Any, loss: Any) -> None:
    values = fit_here(tmp_path, loss, **CONSTANT, **{"train.max_steps": 6}).value
    model, data = model_of(), points(37)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    total = 0.0
    epochs = [permutation(37, seed=0, epoch=epoch).split(12) for epoch in (1, 2)]
    for batch in [*epochs[0], *epochs[1]][:6]:
        value = loss(model(data["x"][batch]), data["y"][batch])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        total = total + value.item() * len(batch) if len(batch) > 1 else 0.0
    assert values["train_loss"] == pytest.approx(total / 24, abs=1e-5)


def test_class_weights_beside_a_mean_are_refused_whatever_the_values(tmp_path: Path) -> None:
    def hardly(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, WEIGHTS) + 1e-6 * outputs.square().mean()

    with pytest.raises(FitError, match="it adds a mean over weights"):
        fit_here(tmp_path, hardly, **IN_PARTS)


def distilled(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) + outputs.square().mean()


def shifted(outputs: Tensor, targets: Tensor) -> Tensor:
    """Two sets of targets, of which the second has none that are ignored."""
    others = torch.where(targets == -100, 0, (targets + 1) % 3)
    return F.cross_entropy(outputs, targets) + F.cross_entropy(outputs, others)


def clamped(outputs: Tensor, targets: Tensor) -> Tensor:
    """Two sets of targets, equal as long as none is ignored."""
    return F.cross_entropy(outputs, targets) + F.cross_entropy(outputs, targets.clamp(min=0))


@pytest.mark.parametrize("loss", [distilled, shifted, clamped])
def test_targets_that_are_ignored_later_are_refused_in_a_loss_with_other_terms(
    tmp_path: Path, loss: Any
) -> None:
    order = permutation(36, seed=0, epoch=1)
    data = points(36)
    data["y"][order[30]] = -100  # in the last step of the epoch

    def train(config: Config, ctx: RunContext) -> dict[str, float]:
        more = {"loss": loss, "step": scores("y")}
        return nb.fit(ctx, config, model_of(), Rows(data), None, **more)

    config = Config.model_validate(SETTINGS).with_overrides(
        {"runtime.output_dir": str(tmp_path), "train.epochs": 1, **IN_PARTS}
    )
    with pytest.raises(FitError, match="targets of which some are ignored"):
        nb.launch(train, config, start="inline", display="off")
    data["y"] = points(36)["y"]
    nb.launch(train, config, start="inline", display="off", resume="never")


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_outputs_of_another_shape_than_the_targets_are_named(tmp_path: Path) -> None:
    run, data = Run(tmp_path / "run"), (torch.randn(24, 8), torch.randn(24))
    match = r"of outputs \(\d+, 1\) and targets \(\d+,\)[\s\S]*Do now:  let the model return"
    with pytest.raises(FitError, match=match):
        run.fit(nn.Linear(8, 1), train_data=data, valid_data=data, loss=F.mse_loss)


@pytest.mark.parametrize(
    ("loss", "do"),
    [
        (nn.CrossEntropyLoss, "call the class"),
        ("mse", "pass the function"),
        (None, "pass the function"),
    ],
)
def test_a_loss_that_is_no_function_is_refused(tmp_path: Path, loss: Any, do: str) -> None:
    run = Run(tmp_path / "run")
    with pytest.raises(FitError, match=r"is not a function of outputs[\s\S]*" + do):
        run.fit(loss=loss)


@pytest.mark.parametrize("loss", [dice, contrastive, regularised])
def test_a_loss_of_whole_batches_is_allowed_by_name(tmp_path: Any, loss: Any) -> None:
    values = fit_here(tmp_path, loss, **{"train.loss_reduction": "batch"}).value
    assert 0 < values["train_loss"] < 10


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda out, y: F.cross_entropy(out, y).item(), "a float"),
        (lambda out, y: out.sum(0), r"a tensor of shape \(3,\) for 12 samples"),
        (lambda out, y: (F.cross_entropy(out, y), {"logged": 1}), "a tuple"),
    ],
)
def test_what_is_no_loss_is_refused_with_what_is_allowed(
    tmp_path: Any, loss: Any, what: str
) -> None:
    with pytest.raises(FitError, match=rf"the loss returned {what}[\s\S]*pair \(total, weight\)"):
        fit_here(tmp_path, loss)


def test_judging_draws_no_random_numbers_of_the_training(tmp_path: Any) -> None:
    def noisy(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + 0 * torch.rand(1).sum()

    drawn = []

    def train(config: Config, ctx: RunContext) -> None:
        for reduction in ("auto", "batch"):
            mine = config.with_overrides({"train.loss_reduction": reduction})
            nb.fit(ctx, mine, model_of(), points(12), None, loss=noisy, step=scores("y"))
            drawn.append(torch.rand(1))

    config = Config.model_validate(SETTINGS).with_overrides(
        {"runtime.output_dir": str(tmp_path), "train.epochs": 1}
    )
    nb.launch(train, config, start="inline", display="off")
    assert drawn[0] == drawn[1]


# --- what says so ---


def test_plan_and_parity_say_that_a_loss_of_whole_batches_depends_on_the_ranks(
    tmp_path: Any,
) -> None:
    config = Config.model_validate(SETTINGS).with_overrides(
        {"train.loss_reduction": "batch", "train.max_steps": 2}
    )

    def train(config: Config, ctx: RunContext) -> dict[str, float]:
        return nb.fit(ctx, config, model_of(), points(37), None, loss=dice, step=scores("y"))

    told = "depends on the number of ranks"
    assert told in make_plan(config, nb.detect_host(), nb.detect_hardware()).explain()
    found = nb.verify.parity(train, config)
    assert not found.passed
    assert found.inexact == {"loss": f"of whole batches (train.loss_reduction: batch): {told}"}
    assert told in found.explain()
