"""nb.fit: the same steps on any number of ranks, exact validation, checkpoints, resume."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fits import Run, check_equal_weights, configured, model_of, samples
from torch import nn

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import CheckpointError, FitError
from nbtoolkit.training.metrics import accuracy
from nbtoolkit.training.optim import warmup_and_decay
from nbtoolkit.training.samples import permutation
from nbtoolkit.worker.context import RunContext


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


@pytest.fixture
def another(tmp_path: Path) -> Run:
    return Run(tmp_path / "another")


# --- the steps -----------------------------------------------------------------------------------


def by_hand(model: nn.Module, config: Config) -> list[float]:
    """The loop one would write: returns each epoch's mean loss."""
    inputs, targets = samples(37)
    factor = warmup_and_decay(config, steps=12)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    losses, step = [], 0
    for epoch in (1, 2, 3):
        total = 0.0
        for rows in permutation(37, seed=config.seed, epoch=epoch).split(12):
            loss = nn.functional.cross_entropy(model(inputs[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.param_groups[0]["lr"] = config.optim.lr * factor(step)
            optimizer.step()
            total, step = total + loss.item() * len(rows), step + 1
        losses.append(total / 37)
    return losses


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_steps_are_those_of_a_loop_by_hand(run: Run, accumulate: int) -> None:
    mine, theirs = model_of(), model_of()
    config = configured(overrides={"train.gradient_accumulation_steps": accumulate})
    run.fit(theirs, config=config)
    losses = by_hand(mine, config)
    reported = [event["values"]["train_loss"] for event in run.events("report")]
    assert reported == pytest.approx(losses, abs=1e-6)
    check_equal_weights(mine, theirs, atol=1e-6)


def test_clipping_limits_the_gradient_and_notes_its_norm(run: Run, another: Run) -> None:
    free, clipped = model_of(), model_of()
    run.fit(free)
    another.fit(clipped, config=configured(overrides={"train.max_grad_norm": 0.01}))
    norms = [event["values"]["grad_norm"] for event in another.events("metrics")]
    assert min(norms) > 0.01  # before clipping
    start = model_of()
    moved = [
        sum((a - b).norm() for a, b in zip(m.parameters(), start.parameters(), strict=True))
        for m in (clipped, free)
    ]
    assert moved[0] < moved[1] / 5


def test_bf16_computes_in_bf16_and_keeps_fp32_weights(run: Run) -> None:
    seen = set()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.add(outputs.dtype)
        return nn.functional.cross_entropy(outputs, targets)

    model = model_of()
    run.fit(model, config=configured(overrides={"train.precision": "bf16"}), loss=loss)
    assert seen == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_max_steps_ends_in_the_middle_of_an_epoch(run: Run) -> None:
    result = run.fit(config=configured(overrides={"train.max_steps": 6}))
    assert result["epoch"] == 2
    assert run.saved()["step"] == 6
    assert [event["step"] for event in run.events("report")] == [1, 2]


# --- what is said and returned -------------------------------------------------------------------


def test_it_logs_by_step_reports_by_epoch_and_returns_the_last(run: Run) -> None:
    result = run.fit(metrics=["accuracy"])
    logged, reported = run.events("metrics"), run.events("report")
    assert [event["step"] for event in logged] == [2, 4, 6, 8, 10, 12]
    # Where the first steps take more than a second, their shares of the time are logged, too.
    names = {name for name in logged[0]["values"] if not name.endswith("_share")}
    assert names == {"loss", "lr", "grad_norm", "samples_per_second", "memory_gb_rank0"}
    assert [event["step"] for event in reported] == [1, 2, 3]
    assert {*reported[0]["values"]} == {"train_loss", "val_loss", "val_accuracy"}
    losses = [event["values"]["val_loss"] for event in reported]
    best = min(range(3), key=losses.__getitem__)
    extra = {"epoch": 3, "best_epoch": best + 1, "best_val_loss": losses[best]}
    assert result == {**reported[-1]["values"], **extra}
    assert losses[-1] < losses[0]


def test_the_rate_counts_the_time_of_all_epochs_that_its_samples_are_from(run: Run) -> None:
    def slow(model: nn.Module, batch: Any) -> Any:
        time.sleep(0.05)
        return model(batch[0]), batch[1]

    # An epoch has four steps: a log point comes after the first step of the second one.
    run.fit(config=configured(overrides={"tracking.log_every_n_steps": 5}), step=slow)
    rates = [event["values"]["samples_per_second"] for event in run.events("metrics")]
    assert len(rates) == 2
    assert all(0 < rate < 12 / 0.05 for rate in rates)


def test_validation_is_that_of_the_whole_set(run: Run) -> None:
    model = model_of()
    inputs, targets = samples(29, seed=1)
    result = run.fit(model, valid_data=(inputs, targets), metrics={"right": accuracy})
    with torch.no_grad():
        outputs = model(inputs)
    assert not model.training
    expected = nn.functional.cross_entropy(outputs, targets).item()
    assert result["val_loss"] == pytest.approx(expected, abs=1e-6)
    assert result["val_right"] == (outputs.argmax(1) == targets).sum().item() / 29


def test_without_validation_the_training_loss_decides(run: Run) -> None:
    result = run.fit(valid_data=None)
    assert {*result} == {"train_loss", "epoch", "best_epoch", "best_train_loss"}


def test_a_step_of_ones_own_takes_any_batch(run: Run) -> None:
    inputs, targets = samples(37)
    data = {"x": inputs, "y": targets}
    result = run.fit(
        train_data=data,
        valid_data=data,
        step=lambda model, batch: (model(batch["x"]), batch["y"]),
        metrics=["accuracy"],
    )
    assert 0 <= result["val_accuracy"] <= 1


def test_the_model_may_be_fitted_twice_in_one_run(run: Run) -> None:
    config = configured()
    ctx, model = run.context(config), model_of()
    data = {"train_data": samples(37), "valid_data": samples(11)}
    for _ in range(2):
        nb.fit(ctx, config, model, **data, loss=nn.functional.cross_entropy)
    assert [event["step"] for event in run.events("report")] == [1, 2, 3, 1, 2, 3]
    assert run.saved(fit="fit-2")["progress"]["epoch"] == 3
    first, second = run.saved("model"), run.saved("model", fit="fit-2")
    assert not torch.equal(first["0.bias"], second["0.bias"])


# --- checkpoints and resume ----------------------------------------------------------------------


def test_checkpoints_load_without_our_code(run: Run) -> None:
    model = model_of()
    run.fit(model)
    assert {*run.saved("model")} == {*model.state_dict()}
    assert (run.saved()["progress"]["epoch"], run.saved()["step"]) == (3, 12)
    fresh, (newest,) = model_of(), run.paths.checkpoints.glob("step-*")
    assert nb.load_model(newest, fresh) is fresh
    assert not fresh.training
    check_equal_weights(model, fresh)


def test_best_is_the_monitored_epoch(run: Run) -> None:
    overrides = {"checkpoint.monitor": "val_recall", "train.epochs": 4}
    values = iter([0.2, 0.6, 0.6, 0.1])

    def recall(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return next(values)

    result = run.fit(config=configured(overrides=overrides), metrics=[recall])
    assert (result["best_epoch"], result["best_val_recall"]) == (2, 0.6)
    assert run.best()["epoch"] == 2
    assert run.saved()["progress"]["epoch"] == 4


def test_nothing_is_saved_when_checkpoints_are_off(run: Run) -> None:
    run.fit(config=configured(overrides={"checkpoint.enabled": False}))
    assert not run.paths.checkpoints.exists()


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(run: Run, another: Run) -> None:
    config = configured(overrides={"optim.name": "adamw", "optim.weight_decay": 0.1})
    whole, halves, fresh = (model_of(nn.Dropout(0.5)) for _ in range(3))
    expected = run.fit(whole, config=config, metrics=["accuracy"])

    ctx = another.context(config)
    another.record.request_stop("stopped", "the test")
    data = {"train_data": samples(37), "valid_data": samples(11, seed=1)}
    more = {"loss": nn.functional.cross_entropy, "metrics": ["accuracy"]}
    with pytest.raises(nb.RunStopped):
        nb.fit(ctx, config, halves, **data, **more)
    assert another.saved()["progress"]["epoch"] == 0
    assert another.fit(fresh, config=config, metrics=["accuracy"]) == expected
    check_equal_weights(whole, fresh)
    assert [event["step"] for event in another.events("report")] == [1, 2, 3]


def test_a_finished_run_gives_its_values_again(run: Run) -> None:
    expected = run.fit()
    again = model_of()
    assert run.fit(again) == expected
    assert len(run.events("report")) == 3
    (newest,) = run.paths.checkpoints.glob("step-*")
    check_equal_weights(nb.load_model(newest, model_of()), again)


def test_a_checkpoint_of_another_model_is_refused(run: Run) -> None:
    run.fit()
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    what = r"step-0+12 does not fit this Sequential: 0\.weight is \(16, 6\) in the file and \(8,"
    with pytest.raises(CheckpointError, match=what):
        run.fit(other)
    with pytest.raises(CheckpointError, match=r"; and 1 more[\s\S]*config\.yaml"):
        nb.load_model(run.paths.folder, nn.Sequential(nn.Linear(6, 16)).append(nn.Linear(1, 1)))


def test_a_checkpoint_of_another_walk_through_the_data_is_refused(run: Run) -> None:
    run.fit()
    what = (
        r"made with other samples in its steps: global_batch_size 12 then, 6 now; "
        r"steps_per_epoch 4 then, 7 now[\s\S]*resume='never'"
    )
    with pytest.raises(CheckpointError, match=what):
        run.fit(config=configured(overrides={"train.batch_size": 6}))


def test_a_damaged_checkpoint_is_passed_over_and_said(run: Run, another: Run) -> None:
    """The run resumes from the checkpoint before it; the end is the same."""
    config = configured(overrides={"checkpoint.every_steps": 5, "train.epochs": 4})
    whole, again = model_of(), model_of()
    expected = run.fit(whole, config=config)
    newest = max(run.paths.checkpoints.glob("step-*"))
    data = bytearray((newest / "model.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "model.pt").write_bytes(data)
    assert run.fit(again, config=config) == expected
    check_equal_weights(whole, again)
    (note,) = (event["text"] for event in run.events("note"))
    assert "step-000000016: model.pt is damaged: its SHA-256 differs" in note
    assert "resuming from step-000000015" in note


def test_a_damaged_best_one_is_not_loaded(run: Run) -> None:
    run.fit()
    (best,) = run.paths.checkpoints.glob("best-*")
    (best / "model.pt").write_bytes(b"PK cut off")
    with pytest.raises(CheckpointError, match=r"is damaged: best-\d+: model.pt has 10 bytes of"):
        nb.load_model(run.paths.folder, model_of())


def test_a_disk_too_small_for_the_checkpoints_is_told_before_the_first_step(run: Run) -> None:
    config = configured(overrides={"checkpoint.keep_last": 10**12})
    what = r"checkpoints will need [\d.]+ GB [\s\S]* free\n[\s\S]*lower checkpoint.keep_last"
    with pytest.raises(CheckpointError, match=what):
        run.fit(config=config)
    assert not run.paths.events.exists() or run.events("report") == []


@pytest.mark.parametrize("every", [1, 3])
def test_steps_decide_when_a_checkpoint_is_due(run: Run, every: int) -> None:
    run.fit(config=configured(overrides={"checkpoint.every_steps": every}))
    steps = [event["step"] for event in run.events("checkpoint") if event["kind"] == "step"]
    assert sorted({*steps}) == list(range(every, 13, every))


def test_each_epoch_is_saved_once_and_after_its_best_weights(run: Run) -> None:
    """A checkpoint to resume from names the best epoch: its weights must be on the disk."""
    run.fit(config=configured(overrides={"checkpoint.every_epochs": 1, "optim.lr": 0.01}))
    saved = [(event["kind"], event["step"]) for event in run.events("checkpoint")]
    assert saved == [(kind, step) for step in (4, 8, 12) for kind in ("best", "step")]


def test_early_stopping_ends_when_nothing_gets_better(run: Run) -> None:
    overrides = {
        "train.epochs": 50,
        "train.early_stopping_patience": 3,
        "optim.lr": 1e-9,
        "train.min_delta": 0.1,
    }
    result = run.fit(config=configured(overrides=overrides))
    assert result["epoch"] == 4  # one that counts as better, then three
    assert run.fit(config=configured(overrides=overrides)) == result


def test_early_stopping_counts_on_in_a_resumed_run(run: Run) -> None:
    overrides = {"train.early_stopping_patience": 3, "optim.lr": 1e-9, "train.min_delta": 0.1}
    assert run.fit(config=configured(overrides={**overrides, "train.epochs": 2}))["epoch"] == 2
    assert run.fit(config=configured(overrides={**overrides, "train.epochs": 50}))["epoch"] == 4


@pytest.mark.parametrize(
    ("loss", "passes"),
    [
        (nn.functional.cross_entropy, 1),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 8.0, 0.5])), 2),
    ],
    ids=["mean", "weighted"],
)
def test_a_run_that_was_asked_to_end_leaves_in_the_middle_of_an_epoch(
    run: Run, another: Run, loss: Any, passes: int
) -> None:
    """It resumes with the next sample and the same random numbers."""
    overrides = {"train.batch_size": 2, "train.epochs": 2, "checkpoint.every_steps": 1}
    config = configured(overrides={**overrides, "train.gradient_accumulation_steps": passes})
    whole, halves, fresh = (model_of(nn.Dropout(0.5)) for _ in range(3))

    def noisy(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Draws from Python's and NumPy's generators, as augmentations do; dropout from torch's."""
        return model(batch[0] * (random.random() + float(np.random.rand()))), batch[1]

    expected = run.fit(whole, config=config, loss=loss, step=noisy)

    ctx, count = another.context(config), 0

    def forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        nonlocal count
        count += 1
        if count == 7 * passes:
            another.record.request_stop("stopped", "the test")
        return noisy(model, batch)

    data = {"train_data": samples(37), "valid_data": samples(11, seed=1)}
    with pytest.raises(nb.RunStopped):
        nb.fit(ctx, config, halves, **data, loss=loss, step=forward)
    progress = another.saved()["progress"]
    assert progress["epoch"] == 0
    assert 7 <= progress["taken"] < 19
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)  # another process has drawn other numbers
    assert another.fit(fresh, config=config, loss=loss, step=noisy) == expected
    check_equal_weights(whole, fresh)


def test_load_model_takes_a_folder_and_a_wrapped_models_state(tmp_path: Path) -> None:
    model = model_of()
    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save(wrapped, tmp_path / "last.pt")
    torch.manual_seed(5)
    (entry,) = os.scandir(tmp_path)  # an os.PathLike that is no pathlib.Path
    for path in (tmp_path, str(tmp_path), entry):
        check_equal_weights(model, nb.load_model(path, nn.Sequential(*map(_like, model))))


def _like(layer: nn.Module) -> nn.Module:
    linear = isinstance(layer, nn.Linear)
    return nn.Linear(layer.in_features, layer.out_features) if linear else layer


def test_load_model_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        nb.load_model(tmp_path, model_of())
    torch.save({"epoch": 3}, tmp_path / "best.pt")
    with pytest.raises(CheckpointError, match=r"best\.pt has no model, only epoch"):
        nb.load_model(tmp_path, model_of())
    (tmp_path / "best.pt").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(CheckpointError, match=r"best\.pt cannot be read"):
        nb.load_model(tmp_path, model_of())


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"train_data": samples(0)}, "the training set is empty"),
        ({"valid_data": samples(0)}, r"the validation set is empty[\s\S]*valid_data=None"),
        ({"train_data": samples(2)[0]}, r"not a pair .* but a Tensor[\s\S]*step="),
        ({"train_data": {"x": samples(9)[0], "y": samples(9)[1]}}, "not a pair .* but a dict"),
        ({"metrics": ["precision"]}, "no metric of the name 'precision'"),
    ],
    ids=["empty", "empty validation", "two rows", "two keys", "metric"],
)
def test_what_cannot_be_trained_is_refused(run: Run, given: dict[str, Any], what: str) -> None:
    with pytest.raises(FitError, match=what):
        run.fit(**given)


def test_an_unknown_monitored_metric_is_refused(run: Run) -> None:
    what = r"checkpoint.monitor is 'val_f1', which no epoch will have\n.*train_loss, val_loss"
    with pytest.raises(FitError, match=what):
        run.fit(config=configured(overrides={"checkpoint.monitor": "val_f1"}))
    assert not (run.paths.checkpoints / "last.pt").exists()


# --- several ranks -------------------------------------------------------------------------------

STAGES = ["uneven", "tiny", "normed"]


def on_ranks(config: Config, ctx: RunContext) -> dict[str, Any]:
    """Three fits in one run: uneven sizes, fewer samples than ranks, a batch norm."""
    from torchmetrics.classification import MulticlassAUROC

    seen: list[int] = []

    def watched(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(len(targets))
        return accuracy(outputs, targets)

    def stage(model: nn.Module, size: int, valid: int) -> dict[str, float]:
        return nb.fit(
            ctx,
            config,
            model,
            samples(size),
            samples(valid, seed=1),
            loss=nn.functional.cross_entropy,
            metrics={"accuracy": watched, "auroc": MulticlassAUROC(3)},
        )

    uneven = stage(model_of(), 37, 11)
    counted = sum(seen)
    tiny = stage(model_of(), 2, 2)
    normed = model_of(nn.BatchNorm1d(16))
    stage(normed, 36, 11)
    return {
        "uneven": uneven,
        "tiny": tiny,
        "counted": counted,
        "buffers": {name: value.tolist() for name, value in normed.named_buffers()},
    }


Ranks = tuple[nb.RunResult, list[list[dict[str, float]]]]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Ranks]]:
    """Runs of ``on_ranks`` by (ranks, passes): the result, and the reports of every stage."""
    folder, done = tmp_path_factory.mktemp("ranks"), {}

    def launch(ranks: int, passes: int) -> Ranks:
        if (ranks, passes) not in done:
            more = {"runtime.output_dir": str(folder), "train.gradient_accumulation_steps": passes}
            config = configured(overrides=more)
            result = nb.launch(on_ranks, config, processes=ranks, resume="never", display="off")
            events = map(json.loads, result.paths.events.read_text().splitlines())
            reports = [event["values"] for event in events if event["type"] == "report"]
            done[ranks, passes] = result, [reports[:3], reports[3:6], reports[6:]]
        return done[ranks, passes]

    return launch


@pytest.mark.filterwarnings("ignore:No positive samples:UserWarning")
@pytest.mark.long
@pytest.mark.parametrize(("ranks", "passes"), [(2, 2), (3, 1)])
def test_loss_curves_do_not_depend_on_the_ranks(launched: Any, ranks: int, passes: int) -> None:
    _, expected = launched(1, 1)
    _, found = launched(ranks, passes)
    for number, stage in enumerate(STAGES[:2]):
        for one, other in zip(expected[number], found[number], strict=True):
            assert other == pytest.approx(one, abs=1e-5), stage


@pytest.mark.long
def test_every_validation_sample_counts_once(launched: Any) -> None:
    for ranks, passes in [(1, 1), (2, 2), (3, 1)]:
        result, _ = launched(ranks, passes)
        assert sum(value["counted"] for value in result.values) == 11 * 3


@pytest.mark.long
def test_all_ranks_return_the_same(launched: Any) -> None:
    result, reports = launched(3, 1)
    first, *others = result.values
    for other in others:
        assert other["uneven"] == first["uneven"]
        assert other["tiny"] == first["tiny"]
        assert other["buffers"] == first["buffers"]
    assert len(reports[2]) == 4  # three epochs, and what was returned


@pytest.mark.long
def test_what_ranks_saved_is_a_plain_models_state(launched: Any) -> None:
    result, _ = launched(3, 1)
    model = result.load_into(model_of(), "last")
    inputs, targets = samples(11, seed=1)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(inputs), targets).item()
    assert result.value["uneven"]["val_loss"] == pytest.approx(loss, abs=1e-6)
    (newest,) = (result.paths.checkpoints / "fit-3").glob("step-*")
    third = torch.load(newest / "model.pt", weights_only=True)
    assert third["1.running_mean"].tolist() == result.value["buffers"]["1.running_mean"]
