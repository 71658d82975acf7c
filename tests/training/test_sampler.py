"""The sample order and its batches: the same steps for any ranks and gradient accumulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from nbtoolkit.errors import FitError
from nbtoolkit.training.data import make_source, take_apart
from nbtoolkit.training.samples import Passes, permutation
from nbtoolkit.worker.batch_slices import shard
from nbtoolkit.worker.random_numbers import derive_seed

CPU = torch.device("cpu")

# samples, global batch, ranks, passes a step
WALKS = [
    (24, 12, 1, 1),
    (24, 12, 2, 1),
    (37, 12, 3, 2),
    (37, 12, 2, 3),
    (13, 12, 3, 1),  # one sample in the last step: two ranks have none
    (2, 12, 3, 2),  # a data set smaller than the ranks
    (5, 6, 2, 3),
]


def orders(size: int, batch: int, ranks: int, passes: int) -> list[Passes]:
    micro = batch // (ranks * passes)
    make = {"size": size, "batch": batch, "micro": micro, "ranks": ranks}
    return [Passes(**make, rank=rank) for rank in range(ranks)]


def drawn(order: Passes, epoch: int) -> torch.Tensor:
    return permutation(order.size, seed=0, epoch=epoch)


def steps(order: Passes, epoch: int) -> list[list[tuple[list[int], float]]]:
    """By optimizer step: the samples that count and the weight of each pass."""
    indices = order.indices(drawn(order, epoch)).tolist()
    found: list[list[tuple[list[int], float]]] = [[]]
    for end, size, share in zip(
        accumulate(order.sizes), order.sizes, order.micro_batches, strict=True
    ):
        found[-1].append((indices[end - size : end][: share.samples], share.weight))
        if share.last:
            found.append([])
    assert found.pop() == []
    assert sum(order.sizes) == len(indices)
    return found


def test_the_permutation_is_a_function_of_seed_and_epoch() -> None:
    torch.manual_seed(1)
    one = permutation(100, seed=7, epoch=3)
    torch.manual_seed(2)
    assert torch.equal(one, permutation(100, seed=7, epoch=3))
    assert torch.equal(one.sort().values, torch.arange(100))
    others = [(7, 4), (8, 3)]
    for seed, epoch in others:
        assert not torch.equal(one, permutation(100, seed=seed, epoch=epoch))


def test_the_permutation_is_the_one_of_other_versions() -> None:
    assert permutation(8, seed=0, epoch=1).tolist() == [1, 3, 4, 6, 5, 2, 0, 7]
    assert derive_seed(0, "order", 1) == 4672741961019256271


@pytest.mark.parametrize(("size", "batch", "ranks", "passes"), WALKS)
def test_a_step_takes_the_same_samples_on_any_ranks(
    size: int, batch: int, ranks: int, passes: int
) -> None:
    all_ranks = orders(size, batch, ranks, passes)
    walks = [steps(order, epoch=2) for order in all_ranks]
    expected = [block.tolist() for block in drawn(all_ranks[0], 2).split(batch)]
    assert all_ranks[0].steps == len(expected)
    for number, samples in enumerate(expected):
        taken = [index for walk in walks for part, _ in walk[number] for index in part]
        assert sorted(taken) == sorted(samples)


@pytest.mark.parametrize(("size", "batch", "ranks", "passes"), WALKS)
def test_the_weights_make_the_mean_over_the_steps_samples(
    size: int, batch: int, ranks: int, passes: int
) -> None:
    values = torch.rand(size, dtype=torch.float64)
    all_ranks = orders(size, batch, ranks, passes)
    walks = [steps(order, epoch=1) for order in all_ranks]
    for number, samples in enumerate(drawn(all_ranks[0], 1).split(batch)):
        parts = [pair for walk in walks for pair in walk[number] if pair[0]]
        # DDP takes the mean over the ranks of what each rank has added up over its passes
        mean = sum(values[part].mean() * weight for part, weight in parts) / ranks
        assert mean == pytest.approx(values[samples].mean().item(), abs=1e-12)


@pytest.mark.parametrize(("size", "batch", "ranks", "passes"), WALKS)
def test_every_rank_makes_as_many_passes(size: int, batch: int, ranks: int, passes: int) -> None:
    walks = [steps(order, epoch=1) for order in orders(size, batch, ranks, passes)]
    assert len({tuple(len(step) for step in walk) for walk in walks}) == 1


def test_passes_of_some_steps() -> None:
    order = Passes(size=37, batch=12, micro=3, rank=1, ranks=2)
    assert [order.count_micro_batches(steps) for steps in (0, 1, 3, 4, 99)] == [0, 2, 6, 7, 7]


@pytest.mark.parametrize(("size", "batch", "ranks", "passes"), WALKS)
def test_drop_last_ends_before_the_uneven_step(
    size: int, batch: int, ranks: int, passes: int
) -> None:
    for order in orders(size, batch, ranks, passes):
        kept = replace(order, drop_last=True)
        even = size // batch
        assert kept.steps == even
        assert (steps(kept, epoch=1) if even else []) == steps(order, epoch=1)[:even]
        assert len(kept.indices(drawn(kept, 1))) == even * batch // ranks


@pytest.mark.parametrize(
    ("ranks", "micro"), [(1, 24), (2, 12), (3, 4), (4, 3), (2, 2), (4, 2), (2, 1)]
)
def test_no_pass_has_a_single_sample_where_that_is_possible(ranks: int, micro: int) -> None:
    for size in range(1, 48):
        all_ranks = [
            Passes(size=size, batch=24, micro=micro, rank=rank, ranks=ranks, smallest=2)
            for rank in range(ranks)
        ]
        single = micro == 1 or size % 24 == 1 or (micro == 2 and size % 2 == 1)
        walks = [steps(order, epoch=1) for order in all_ranks]
        assert bool(all_ranks[0].single) == single
        assert len({tuple(len(step) for step in walk) for walk in walks}) == 1
        rows = [one.rows for order in all_ranks for one in order.micro_batches]
        assert (min(rows) == 1) == single
        assert max(rows) <= micro
        for order in all_ranks:
            assert len(order.indices(drawn(order, 1))) == sum(order.sizes)
        values = torch.rand(size, dtype=torch.float64)
        for number, samples in enumerate(drawn(all_ranks[0], 1).split(24)):
            parts = [pair for walk in walks for pair in walk[number] if pair[0]]
            assert sorted(i for part, _ in parts for i in part) == sorted(samples.tolist())
            mean = sum(values[part].mean() * weight for part, weight in parts) / ranks
            assert mean == pytest.approx(values[samples].mean().item(), abs=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [0, 1, 4, 359])
def test_shards_cover_everything_once(size: int, ranks: int) -> None:
    parts = [range(*shard(size, rank, ranks)) for rank in range(ranks)]
    assert [index for part in parts for index in part] == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


# --- batches -------------------------------------------------------------------------------------

INPUTS = torch.arange(40, dtype=torch.float32).reshape(20, 2)
TARGETS = torch.arange(20)
INDICES = torch.tensor([3, 0, 19, 7, 7, 12, 5])
SIZES = [3, 1, 3]


class Samples(Dataset[Any]):
    """A map-style data set without any arrays to index."""

    def __len__(self) -> int:
        return len(TARGETS)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return INPUTS[index], int(TARGETS[index])


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def check_pairs(batches: list[Any]) -> None:
    expected = INDICES.split(SIZES)
    assert len(batches) == len(expected)
    for (inputs, targets), indices in zip(batches, expected, strict=True):
        assert torch.equal(inputs, INPUTS[indices])
        assert targets.tolist() == TARGETS[indices].tolist()


@pytest.mark.parametrize(
    "data",
    [
        (INPUTS, TARGETS),
        (INPUTS.numpy(), TARGETS.numpy()),
        TensorDataset(INPUTS, TARGETS),
        Samples(),
        list(zip(INPUTS, TARGETS, strict=True)),
    ],
    ids=["tensors", "arrays", "TensorDataset", "Dataset", "list"],
)
def test_pairs_come_in_the_asked_order(data: Any) -> None:
    source = make_source(take_apart(data), CPU)
    assert len(source) == 20
    for _ in range(2):
        check_pairs(list(source.batches(INDICES, SIZES)))


def test_dicts_and_single_arrays_keep_their_form() -> None:
    batches = list(
        make_source(take_apart({"x": INPUTS, "y": TARGETS}), CPU).batches(INDICES, SIZES)
    )
    check_pairs([(batch["x"], batch["y"]) for batch in batches])
    assert next(make_source(take_apart(TARGETS), CPU).batches(INDICES, SIZES)).tolist() == [
        3,
        0,
        19,
    ]


def test_workers_and_collate_change_nothing_of_the_order() -> None:
    source = make_source(take_apart(Samples()), CPU, workers=2)
    check_pairs(list(source.batches(INDICES, SIZES)))
    check_pairs(list(source.batches(INDICES, SIZES)))

    def collate(samples: list[Any]) -> Any:
        inputs, targets = zip(*samples, strict=True)
        return torch.stack(inputs), torch.tensor(targets)

    check_pairs(
        list(
            make_source(take_apart((INPUTS, TARGETS), collate=collate), CPU).batches(INDICES, SIZES)
        )
    )


def test_large_rows_are_gathered_in_several_blocks() -> None:
    rows = torch.arange(6, dtype=torch.float32)[:, None].expand(6, 2**19).contiguous()  # 2 MiB each
    batches = list(
        make_source(take_apart(rows), CPU).batches(torch.tensor([5, 0, 3, 1, 2]), [1, 1, 2, 1])
    )
    assert [batch[:, 0].tolist() for batch in batches] == [[5], [0], [3, 1], [2]]


def test_a_read_only_array_is_read_and_not_written_to() -> None:
    array = INPUTS.numpy().copy()
    array.setflags(write=False)
    for batch in make_source(take_apart(array), CPU).batches(torch.arange(20), [20]):
        batch += 1
    assert np.array_equal(array, INPUTS.numpy())


def test_arrays_of_different_length_are_refused() -> None:
    with pytest.raises(FitError, match=r"differ in length: their shapes are \(20, 2\), \(19,\)"):
        make_source(take_apart((INPUTS, TARGETS[:19])), CPU)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (Endless(), r"cannot index a .*Endless[\s\S]*ctx\.prepare"),
        (3, r"cannot index a builtins\.int"),
    ],
    ids=["iterable", "number"],
)
def test_what_cannot_be_indexed_is_refused(data: Any, what: str) -> None:
    with pytest.raises(FitError, match=what):
        make_source(take_apart(data), CPU)
