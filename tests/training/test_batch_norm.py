"""Batch norms and passes of a single sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Run, check_equal_weights, close, configured, launch, model_of, samples
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import FitError
from nbtoolkit.worker.context import RunContext

BATCHES = configured(overrides={"train.batch_size": 32, "checkpoint.enabled": False})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


class Frozen(nn.BatchNorm1d):
    """Needs no second sample, and depends on no other: exact on any number of ranks."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def normed() -> nn.Module:
    return model_of(nn.BatchNorm1d(16))


def test_a_step_that_cannot_be_divided_is_refused_before_the_first_one(run: Run) -> None:
    model, before = normed(), normed()
    what = (
        r"batch norms over the samples \(BatchNorm1d\), and the last step of an epoch has a "
        r"forward pass of a single sample: 65 samples in batches of 32 leave 1[\s\S]*"
        r"set train\.drop_last: true"
    )
    with pytest.raises(FitError, match=what):
        run.fit(model, config=BATCHES, train_data=samples(65))
    check_equal_weights(before, model)


def test_without_the_last_step_it_trains(run: Run) -> None:
    config = BATCHES.with_overrides({"train.drop_last": True})
    assert run.fit(normed(), config=config, train_data=samples(65))["epoch"] == 3


def test_passes_of_single_samples_are_refused_with_the_batch_size(run: Run) -> None:
    overrides = {"train.batch_size": 2, "train.gradient_accumulation_steps": 2}
    what = r"the 2 samples of a step are divided into single ones[\s\S]*a larger train.batch_size"
    with pytest.raises(FitError, match=what):
        run.fit(normed(), config=BATCHES.with_overrides(overrides), train_data=samples(64))


def test_a_batch_norm_of_images_takes_a_single_sample(run: Run) -> None:
    layers = [nn.Unflatten(1, (1, 2, 3)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(6, 3)]
    assert run.fit(nn.Sequential(*layers), config=BATCHES, train_data=samples(65))["epoch"] == 3


def test_a_frozen_batch_norm_takes_a_single_sample(run: Run) -> None:
    model = model_of(Frozen(16))
    assert run.fit(model, config=BATCHES, train_data=samples(65))["epoch"] == 3


def test_a_stream_of_unknown_length_says_it_where_it_ends(run: Run) -> None:
    class Points(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return zip(*samples(65), strict=True)

    config = BATCHES.with_overrides({"train.max_steps": 6})
    what = r"a batch norm got a single sample: Expected more[\s\S]*set train.drop_last: true"
    with pytest.raises(FitError, match=what):
        run.fit(normed(), config=config, train_data=Points())


# --- two ranks ---


def one_loss_each(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def on_ranks(config: Config, ctx: RunContext) -> dict[str, Any]:
    states = {}
    for size in (67, 66, 35):
        nb.fit(ctx, config, normed(), samples(size), None, loss=nn.functional.cross_entropy)
        exact = model_of(Frozen(16))
        nb.fit(ctx, config, exact, samples(size), None, loss=one_loss_each)
        states[str(size)] = torch.cat([one.flatten() for one in exact.parameters()]).detach()
    return states


def test_the_rest_is_divided_without_single_samples_and_exactly(tmp_path: Path) -> None:
    config = BATCHES.with_overrides({"runtime.output_dir": str(tmp_path), "train.epochs": 2})
    one, two = (launch(on_ranks, config, ranks).value for ranks in (1, 2))
    close(one, two)
