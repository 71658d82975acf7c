"""Samplers and sample weights: one stream of draws on any number of ranks, and on resume."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fits import Run, configured, samples
from step_samples import StepSamples, numbered, read_step_samples
from torch import nn
from torch.utils.data import (
    BatchSampler,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import nbtoolkit as nb
from nbtoolkit.errors import CheckpointError, FitError, WorkerDied
from nbtoolkit.training.samples import labels_of, make_order

INPUTS, LABELS = samples(37)
DATA = (INPUTS, LABELS)


def draw(epoch: int, *, sampler: Any = None, weights: Any = None, data: Any = DATA) -> list[int]:
    order = make_order(data, 37, sampler, weights, seed=3, ranks=1)
    drawn: list[int] = order.draw(epoch).tolist()
    assert len(drawn) == order.size
    return drawn


# --- weights -------------------------------------------------------------------------------------


def test_samples_are_drawn_in_proportion_to_their_weights() -> None:
    weights = torch.zeros(37)
    weights[4], weights[36] = 3.0, 1.0
    counts = Counter(sample for epoch in range(200) for sample in draw(epoch, weights=weights))
    assert set(counts) == {4, 36}
    assert counts[4] / counts.total() == pytest.approx(0.75, abs=0.02)
    assert draw(2, weights=weights.tolist()) == draw(2, weights=weights.numpy())
    assert draw(2, weights=weights) != draw(3, weights=weights)


class Named(Dataset[Any]):
    def __init__(self, **labels: Any) -> None:
        vars(self).update(labels)

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index], LABELS[index]

    def __len__(self) -> int:
        return 37


@pytest.mark.parametrize(
    "data",
    [
        DATA,
        (INPUTS.numpy(), LABELS.numpy()[:, None]),
        TensorDataset(*DATA),
        Named(targets=LABELS.tolist()),
        Named(labels=LABELS),
        Subset(Named(targets=torch.cat([LABELS, LABELS])), range(37)),
    ],
    ids=["pair", "arrays", "TensorDataset", "targets", "labels", "Subset"],
)
def test_balanced_draws_the_classes_equally_often(data: Any) -> None:
    drawn = [
        sample for epoch in range(200) for sample in draw(epoch, weights="balanced", data=data)
    ]
    counts = torch.bincount(LABELS[drawn]) / len(drawn)
    assert counts.tolist() == pytest.approx([1 / 3] * 3, abs=0.02)
    assert torch.bincount(LABELS).tolist() != [12, 12, 13]


def test_labels_are_found_or_not() -> None:
    assert labels_of(Named()) is None
    assert labels_of((INPUTS, LABELS, LABELS)) is None
    assert labels_of({"x": INPUTS, "y": LABELS}) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weights": [1.0] * 36}, r"have the shape \(36,\), and the training set 37 samples"),
        ({"weights": torch.ones(37, 1)}, r"have the shape \(37, 1\)"),
        ({"weights": [-1.0] * 37}, r"are not numbers of at least 0, with one above"),
        ({"weights": [0.0] * 37}, r"are not numbers of at least 0, with one above"),
        ({"weights": [torch.nan] * 37}, r"are not numbers of at least 0"),
        ({"weights": "even"}, r"sample_weights is 'even'"),
        ({"weights": "balanced", "data": Named()}, r"'balanced', and fit does not find one class"),
        (
            {"weights": "balanced", "data": (INPUTS, INPUTS[:, 0])},
            r"does not find one class per sample",
        ),
        ({"weights": [1.0] * 37, "sampler": [1]}, r"a sampler and sample_weights"),
    ],
)
def test_weights_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(FitError, match=message):
        draw(1, **given)


# --- samplers ------------------------------------------------------------------------------------


class Chosen:
    """A user's own, drawn from a generator that the case names."""

    def __init__(self, generator: str, length: int = 20) -> None:
        self.name, self.length, self.epoch = generator, length, 0
        self.own = np.random.default_rng(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        if self.name == "random":
            return iter(random.sample(range(37), 20))
        if self.name == "numpy":
            return iter(np.random.permutation(37)[:20])
        if self.name == "epoch":
            return iter(np.random.default_rng(self.epoch).permutation(37)[:20])
        return iter(self.own.permutation(37)[:20])


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(37)),
        RandomSampler(range(37), generator=torch.Generator()),
        RandomSampler(range(37), replacement=True, num_samples=50),
        SubsetRandomSampler(range(5, 30)),
        WeightedRandomSampler([1.0, 2.0] * 18, 30),
        Chosen("random"),
        Chosen("numpy"),
        Chosen("epoch"),
    ],
    ids=["random", "generator", "more", "subset", "weighted", "python", "numpy", "set_epoch"],
)
def test_a_sampler_draws_the_same_in_an_epoch_whatever_came_before(sampler: Any) -> None:
    before = draw(2, sampler=sampler)
    torch.manual_seed(9), random.seed(9), np.random.seed(9)
    state = torch.get_rng_state()
    assert draw(3, sampler=sampler) != before
    assert draw(2, sampler=sampler) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_list_and_an_order_of_its_own_are_kept() -> None:
    assert draw(1, sampler=SequentialSampler(range(37))) == list(range(37))
    assert draw(5, sampler=[3, 1, 3]) == [3, 1, 3]


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ([3, 37], r"sampler list gives the index 37, and the training set has 37 samples"),
        ([-1], r"sampler list gives the index -1"),
        (Chosen("numpy", 21), r"sampler Chosen gives 20 indices, and its len\(\) is 21"),
        (Chosen("numpy", 19), r"sampler Chosen gives more indices, and its len\(\) is 19"),
        (Chosen("own"), r"sampler Chosen gives another order when it is asked for the same"),
        (["a"], r"sampler list gives 'a', which is no index"),
        (iter([1]), r"sampler list_iterator has no length"),
        (BatchSampler(range(37), 4, False), r"sampler BatchSampler gives batches"),
        (
            DistributedSampler(range(37), num_replicas=2, rank=0),  # type: ignore[arg-type]
            r"sampler DistributedSampler gives each rank a part",
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
def test_a_sampler_that_does_not_fit_is_refused_by_name(sampler: Any, message: str) -> None:
    with pytest.raises(FitError, match=message):
        draw(1, sampler=sampler)


def test_a_stream_has_no_sampler(tmp_path: Path) -> None:
    class Stream:
        def __iter__(self) -> Any:
            return zip(*DATA, strict=True)

    config = configured(overrides={"train.max_steps": 4, "train.sample_weights": "balanced"})
    with pytest.raises(FitError, match=r"cannot choose the samples of a stream, a .*Stream"):
        Run(tmp_path / "run").fit(config=config, train_data=Stream())


def test_an_epoch_is_as_long_as_its_sampler(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    noted = StepSamples()
    given = {"train_data": (numbered(INPUTS), LABELS), "valid_data": None}
    run.fit(sampler=range(13), step=noted.step, callbacks=[noted], **given)
    assert run.saved()["step"] == 6  # 3 epochs of 13 samples in steps of 12
    found = read_step_samples(run.paths)
    assert found[1, 1] + found[1, 2] == list(range(13))
    with pytest.raises(CheckpointError, match=r"order range of 13 then, range of 14 now"):
        run.fit(sampler=range(14))
    with pytest.raises(CheckpointError, match=r"order range of 13 then, a permutation now"):
        run.fit(train_data=samples(13))


# --- ranks and resume ----------------------------------------------------------------------------


def drawn(config: Any, ctx: Any) -> dict[str, float]:
    """Trains on draws; the first attempt of a run is killed in the second epoch."""
    taken = 0
    noted = StepSamples()

    def forward(model: nn.Module, batch: Any) -> Any:
        nonlocal taken
        taken += model.training
        killed = ctx.paths.folder / "killed"
        if config.data.get("kill") and taken == 6 and not killed.exists() and ctx.is_main:
            while not any(ctx.paths.checkpoints.glob("step-*4")):
                pass
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return noted.step(model, batch)

    given: dict[str, Any] = {}
    if config.data.what == "sampler":
        given["sampler"] = RandomSampler(range(37), replacement=True, num_samples=30)
    elif config.data.what == "weights":
        given["sample_weights"] = np.arange(37.0)
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    given |= {"loss": nn.functional.cross_entropy, "step": forward, "callbacks": [noted]}
    return nb.fit(ctx, config, model, (numbered(INPUTS), LABELS), None, **given)


@pytest.mark.long
@pytest.mark.parametrize("what", ["sampler", "weights", "balanced"])
def test_draws_are_equal_on_two_ranks_and_after_a_kill(tmp_path: Path, what: str) -> None:
    settings = {
        "runtime.output_dir": str(tmp_path),
        "data.what": what,
        "checkpoint.every_steps": 2,
        "train.sample_weights": "balanced" if what == "balanced" else None,
    }
    config = configured(overrides=settings)
    one = nb.launch(drawn, config, processes=1, resume="never", display="off")
    two = nb.launch(drawn, config, processes=2, resume="never", display="off")
    killing = config.with_overrides({"data.kill": True})
    with pytest.raises(WorkerDied):
        nb.launch(drawn, killing, processes=2, display="off")
    resumed = nb.launch(drawn, killing, processes=2, display="off")
    expected = read_step_samples(one.paths)
    assert len(expected) == (9 if what == "sampler" else 12)
    assert read_step_samples(two.paths) == expected
    assert read_step_samples(resumed.paths) == expected
    first, second = nn.Linear(6, 3), nn.Linear(6, 3)
    two.load_into(first, "last"), resumed.load_into(second, "last")
    assert torch.equal(first.weight, second.weight)
