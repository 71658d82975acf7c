"""A DataLoader as the data of nb.fit and nb.predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Run, check_equal_weights, configured, model_of, samples
from step_samples import StepSamples, numbered, read_step_samples
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import FitError

DATA = TensorDataset(*samples(37))
NUMBERED = TensorDataset(numbered(DATA.tensors[0]), DATA.tensors[1])
CONFIG = configured(overrides={"train.epochs": 1})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


@pytest.fixture
def another(tmp_path: Path) -> Run:
    return Run(tmp_path / "another")


def steps_of(run: Run, loader: DataLoader[Any], config: Config = CONFIG) -> list[list[int]]:
    """Fit with a loader of numbered samples, and return the samples of each step."""
    noted = StepSamples()
    given = {"train_data": loader, "valid_data": None}
    run.fit(config=config, step=noted.step, callbacks=[noted], **given)
    return [*read_step_samples(run.paths).values()]


@pytest.mark.parametrize("how", ["shuffle", "distributed"])
def test_a_shuffling_loader_is_its_data_set(run: Run, another: Run, how: str) -> None:
    sampler = DistributedSampler(DATA, 2, 0) if how == "distributed" else None
    loader = DataLoader(DATA, 12, shuffle=sampler is None, sampler=sampler)
    mine, theirs = model_of(), model_of()
    run.fit(mine, config=CONFIG, train_data=loader, valid_data=DataLoader(DATA, 5))
    another.fit(theirs, config=CONFIG, valid_data=samples(37))
    check_equal_weights(mine, theirs)
    assert run.events("report")[0]["values"] == another.events("report")[0]["values"]


def test_its_sampler_chooses_and_it_drops_the_last_batch(run: Run, another: Run) -> None:
    whole = steps_of(run, DataLoader(NUMBERED, 12, drop_last=True))
    assert whole == [[*range(12)], [*range(12, 24)], [*range(24, 36)]]
    sampler = WeightedRandomSampler([0.0] * 30 + [1.0] * 7, 15)
    first, last = steps_of(another, DataLoader(NUMBERED, 12, sampler=sampler))
    assert (len(first), len(last)) == (12, 3)
    assert min(first + last) >= 30


def test_a_validation_loader_chooses_its_samples(run: Run, another: Run) -> None:
    half = DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(10, 30)))
    given = {"config": CONFIG, "metrics": ["accuracy"]}
    inputs, targets = DATA.tensors
    one = run.fit(valid_data=half, **given)
    other = another.fit(valid_data=(inputs[10:30], targets[10:30]), **given)
    assert one == pytest.approx(other, abs=1e-6)


def collate(rows: list[Any]) -> Any:
    inputs, targets = zip(*rows, strict=True)
    return torch.stack(inputs) * 0, torch.stack(targets)


def test_its_collate_and_its_workers_are_used(run: Run, another: Run) -> None:
    seen = []

    def forward(model: Any, batch: Any) -> Any:
        seen.append(float(batch[0].abs().max()))
        return model(batch[0]), batch[1]

    loader = DataLoader(DATA, 12, shuffle=True, collate_fn=collate, num_workers=1)
    run.fit(config=CONFIG, train_data=loader, valid_data=None, step=forward)
    assert seen == [0.0] * 4
    mine = torch.utils.data.default_collate
    another.fit(config=CONFIG, train_data=loader, valid_data=None, step=forward, collate=mine)
    assert min(seen[4:]) > 1


def test_the_batch_size_is_the_configurations(run: Run, capsys: Any) -> None:
    steps = steps_of(run, DataLoader(NUMBERED, 7, shuffle=True))
    text = "fit: an optimizer step takes train.batch_size = 12 samples, not the 7 of the DataLoader"
    assert text in capsys.readouterr().out
    assert [len(step) for step in steps] == [12, 12, 12, 1]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, False)),
            r"the DataLoader has a batch_sampler of its own",
        ),
        (DataLoader(DATA, batch_size=None), r"the DataLoader has batch_size=None"),
        (DataLoader(DATA, 4, sampler=[40]), r"sampler list gives the index 40"),
    ],
    ids=["batches", "none", "beyond"],
)
@pytest.mark.parametrize("place", ["train_data", "valid_data"])
def test_a_loader_that_fit_cannot_use_is_refused(
    run: Run, loader: Any, message: str, place: str
) -> None:
    with pytest.raises(FitError, match=message):
        run.fit(config=CONFIG, **{place: loader})


def test_a_loader_of_a_stream_is_the_stream(run: Run) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(NUMBERED)

    config = CONFIG.with_overrides({"train.max_steps": 3})
    steps = steps_of(run, DataLoader(Stream(), 12), config)
    assert steps == [[*range(12)], [*range(12, 24)], [*range(24, 36)]]


def test_predict_takes_one_in_its_order(run: Run) -> None:
    model = model_of()
    inputs, _ = DATA.tensors
    given = (
        DataLoader(DATA, 4, sampler=[5, 3, 8]),
        DataLoader(DATA, 4, sampler=SequentialSampler(DATA)),
    )
    few, all_rows = (nb.predict(run.context(CONFIG), model, loader) for loader in given)
    with torch.no_grad():
        torch.testing.assert_close(few, model(inputs[[5, 3, 8]]))
        torch.testing.assert_close(all_rows, model(inputs))
