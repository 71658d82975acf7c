"""Iterable training sets: the same steps for all ranks, to the end of the stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from feeds import AugmentedStream, Known, contexts, listed, steps_of, together
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import FitError, PlanError
from nbtoolkit.training.data import take_apart
from nbtoolkit.training.loader import make_train_loader
from nbtoolkit.worker.context import RunContext

# samples, ranks, passes a step; a step takes 12
WALKS = [(24, 1, 1), (37, 1, 3), (24, 2, 1), (37, 3, 2), (13, 3, 1), (2, 3, 2), (29, 2, 3)]


class Numbers:
    """0, 1, 2, ...: iterable, and nothing else."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


class Shuffled(Numbers):
    """Has its order by the epoch, and a way to skip that forgets it, like Hugging Face's."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def skip(self, n: int) -> Iterator[int]:
        return iter(range(n, self.size))

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(self.size, generator=generator).tolist())


def feed_of(folder: Path, data: Any, *, collate: Any = listed, **more: Any) -> Any:
    [ctx] = contexts(folder, train__max_steps=99, **more)
    return make_train_loader(ctx, ctx.config, take_apart(data, collate=collate))


def feeds_of(folder: Path, data: Any, ranks: int, passes: int, **more: Any) -> list[Any]:
    options = {"train__gradient_accumulation_steps": passes, "train__max_steps": 99, **more}
    return [
        make_train_loader(ctx, ctx.config, take_apart(data, collate=listed))
        for ctx in contexts(folder, ranks=ranks, **options)
    ]


@pytest.mark.parametrize(("size", "ranks", "passes"), WALKS)
def test_a_step_takes_the_next_samples_of_the_stream(
    tmp_path: Path, size: int, ranks: int, passes: int
) -> None:
    feeds = feeds_of(tmp_path, Numbers(size), ranks, passes)
    expected = [list(range(size))[i : i + 12] for i in range(0, size, 12)]
    assert together([steps_of(feed, 1) for feed in feeds]) == expected
    assert [feeds[-1].sample_ids(1, step) for step in range(len(expected))] == expected


@pytest.mark.parametrize(("size", "ranks", "passes"), WALKS)
def test_the_weights_make_the_mean_over_the_steps_samples(
    tmp_path: Path, size: int, ranks: int, passes: int
) -> None:
    feeds = feeds_of(tmp_path, Numbers(size), ranks, passes)
    walks = [list(feed.batches(1)) for feed in feeds]
    assert len({tuple(share.last for _, share in walk) for walk in walks}) == 1  # in step
    means, part = [], 0.0
    for passes_of_all in zip(*walks, strict=True):
        part += sum(share.weight * sum(batch) / len(batch) for batch, share in passes_of_all)
        if passes_of_all[0][1].last:
            means.append(part / ranks)  # DDP's mean over the ranks
            part = 0.0
    expected = [torch.arange(size)[i : i + 12].double().mean().item() for i in range(0, size, 12)]
    assert means == pytest.approx(expected, abs=1e-12)


def test_what_makes_no_whole_batch_is_dropped_by_choice(tmp_path: Path) -> None:
    feeds = feeds_of(tmp_path, Numbers(29), 2, 3, train__drop_last=True)
    assert together([steps_of(feed, 1) for feed in feeds]) == [[*range(12)], [*range(12, 24)]]
    assert feeds[0].steps is None
    assert feed_of(tmp_path, Known(29), train__drop_last=True).steps == 2
    assert feed_of(tmp_path, Known(29)).steps == 3


@pytest.mark.parametrize("data", [Numbers(29), Shuffled(29), AugmentedStream(29)], ids=type)
def test_what_is_skipped_and_what_is_left_make_the_epoch(tmp_path: Path, data: Any) -> None:
    feed = feed_of(tmp_path, data)
    for epoch in (1, 2):
        whole = steps_of(feed, epoch)
        assert [len(step) for step in whole] == [12, 12, 5]
        for done in range(4):
            assert steps_of(feed, epoch, limit=done) == whole[:done]
            assert steps_of(feed, epoch, skip=done) == whole[done:]
            assert steps_of(feed, epoch, skip=done, limit=1) == whole[done : done + 1]


@pytest.mark.parametrize("data", [Known(29), AugmentedStream(29)], ids=["known", "unknown"])
def test_an_epoch_that_was_done_has_nothing_left(tmp_path: Path, data: Any) -> None:
    """A checkpoint may be of an epoch's very end, which a stream does not tell."""
    feed = feed_of(tmp_path, data)
    assert steps_of(feed, 1, skip=3) == []
    assert len(steps_of(feed, 2)) == 3


def test_each_epoch_is_told_to_the_data_set(tmp_path: Path) -> None:
    feed = feed_of(tmp_path, Shuffled(12))
    epochs = [steps_of(feed, epoch) for epoch in (1, 2, 1)]
    assert epochs[0] == epochs[2] != epochs[1]


def test_what_is_skipped_is_read_but_makes_no_batch(tmp_path: Path) -> None:
    made = []

    def collate(samples: list[int]) -> list[int]:
        made.append(samples)
        return samples

    feed = feed_of(tmp_path, Numbers(30), collate=collate)
    next(feed.batches(1, skip=2))
    assert made == [[24, 25, 26, 27, 28, 29]]


def test_a_walk_that_was_left_does_not_mix_with_the_next(tmp_path: Path) -> None:
    feed = feed_of(tmp_path, Numbers(99))
    for _ in range(2):
        batch, _ = next(feed.batches(1))
        assert batch == list(range(12))


def test_batches_are_collated_as_usual(tmp_path: Path) -> None:
    data = [(torch.full((2,), float(i)), i) for i in range(12)]
    inputs, targets = next(feed_of(tmp_path, iter(data), collate=None).batches(1))[0]
    assert inputs.shape == (12, 2)
    assert targets.tolist() == list(range(12))


def test_a_stream_is_read_without_workers_and_says_so(tmp_path: Path, capsys: Any) -> None:
    class Aware(Numbers):
        def __iter__(self) -> Iterator[int]:
            for number in range(self.size):
                yield number if get_worker_info() is None else -number

    feed_of(tmp_path, Numbers(9))
    assert capsys.readouterr().out == ""
    feed = feed_of(tmp_path, Aware(24), train__num_workers=4)
    assert "no DataLoader workers: the training set is a stream" in capsys.readouterr().out
    assert steps_of(feed, 1) == [[*range(12)], [*range(12, 24)]]


# --- what goes wrong -----------------------------------------------------------------------------


def test_an_epoch_without_a_sample_is_refused(tmp_path: Path) -> None:
    feed = feed_of(tmp_path, (n for n in range(24)))
    assert len(steps_of(feed, 1)) == 2
    with pytest.raises(FitError, match=r"no sample in epoch 2\n.*used up[\s\S]*whose __iter__"):
        steps_of(feed, 2)


def test_a_stream_of_less_than_a_batch_cannot_drop_it(tmp_path: Path) -> None:
    feed = feed_of(tmp_path, Numbers(11), train__drop_last=True)
    with pytest.raises(
        FitError, match=r"drop_last leaves no step: .* 11 samples, fewer than the 12"
    ):
        steps_of(feed, 1)


@pytest.mark.parametrize(("length", "real", "said"), [(30, 29, 29), (36, 40, 40), (12, 24, 24)])
def test_a_length_that_is_not_true_is_refused(
    tmp_path: Path, length: int, real: int, said: int
) -> None:
    data = Known(length)
    feed = feed_of(tmp_path, data)
    data.size = real
    what = rf"gave {said} samples in epoch 1, but its len\(\) is {length}\n[\s\S]*max_steps"
    with pytest.raises(FitError, match=what):
        steps_of(feed, 1)


def test_an_error_of_the_stream_names_the_place(tmp_path: Path) -> None:
    class Broken(Numbers):
        def __iter__(self) -> Iterator[int]:
            yield from range(14)
            raise LookupError("a shard is missing")

    walk = feed_of(tmp_path, Broken(99)).batches(1)
    next(walk)
    with pytest.raises(LookupError, match="a shard is missing") as caught:
        next(walk)
    assert caught.value.__notes__ == [
        "[nbtoolkit] while loading sample 14 of the stream in epoch 1"
    ]


# --- streams that differ between the ranks ---


class Points(IterableDataset[Any]):
    """32 points with their class; ``divided``: each rank reads its own."""

    def __init__(self, *, divided: bool) -> None:
        self.divided = divided

    def __iter__(self) -> Iterator[Any]:
        first, step = (dist.get_rank(), dist.get_world_size()) if self.divided else (0, 1)
        for number in range(first, 32, step):
            yield {"x": np.full(2, number, dtype=np.float32), "y": number % 2}


def of_streams(config: Config, ctx: RunContext) -> list[str]:
    def step(model: nn.Module, batch: Any) -> Any:
        return model(batch["x"]), batch["y"]

    whole, divided = Points(divided=False), Points(divided=True)
    messages = []
    for train_data, valid_data in [(whole, whole), (divided, None), (whole, divided)]:
        try:
            loss = nn.functional.cross_entropy
            nb.fit(ctx, config, nn.Linear(2, 2), train_data, valid_data, loss=loss, step=step)
            messages.append("trained")
        except PlanError as error:
            messages.append(str(error))
    try:
        nb.predict(ctx, nn.Linear(2, 2), divided, step=step)
    except PlanError as error:
        messages.append(str(error))
    return messages


def test_a_stream_that_divides_itself_among_the_ranks_is_refused(tmp_path: Path) -> None:
    settings = {
        "train.max_steps": 4,
        "train.batch_size": 16,
        "checkpoint.enabled": False,
        "tracking.mlflow": False,
        "runtime.output_dir": str(tmp_path),
    }
    config = nb.load_config(env=None, overrides=settings)
    result = nb.launch(of_streams, config, processes=2, display="off")
    for messages in result.values:
        assert messages[0] == "trained"
        for message in messages[1:]:
            assert "the ranks read different batches" in message
            assert "give nb.fit and ctx.prepare the whole stream" in message
