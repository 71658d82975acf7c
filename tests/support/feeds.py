"""Contexts of ranks without processes, and data sets that draw at random, for tests of loaders."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machines import CPU_BUILD, machine
from torch.utils.data import Dataset, IterableDataset

from nbtoolkit.config.schema import Config
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.host import detect_host
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.record import RunRecord
from nbtoolkit.wire.payload import JobSpec
from nbtoolkit.worker.channel import RecordChannel
from nbtoolkit.worker.context import RunContext

Draws = tuple[float, float, float]


def contexts(folder: Path, *, ranks: int = 1, **overrides: Any) -> list[RunContext]:
    """What each of some ranks would see; ``train__num_workers=2`` overrides ``train.num_workers``.

    Iterating over a training set needs no message from the other ranks, so they need not run.
    """
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    distributed = {"distributed.enabled": ranks > 1, "distributed.world_size": ranks}
    config = Config().with_overrides({"train.batch_size": 12, **distributed, **dotted})
    plan = make_plan(config, detect_host({}), machine(build=CPU_BUILD))
    assert plan.processes == ranks
    paths = RunPaths(folder)
    folder.mkdir(exist_ok=True)
    channel = RecordChannel(RunRecord(paths, deadline=None))
    job = JobSpec(paths=paths, plan=plan, config=config)
    return [RunContext(job, channel, rank=rank, world_size=ranks) for rank in range(ranks)]


def draws() -> Draws:
    """A number from each of the global random streams."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


class Augmented(Dataset[Any]):
    """Each sample: its index and what was drawn for it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, Draws]:
        return index, draws()


class AugmentedStream(IterableDataset[Any]):
    """The same as a stream, in an order that it draws by itself when it begins."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[tuple[int, Draws]]:
        order = list(range(self.size))
        random.shuffle(order)
        return ((index, draws()) for index in order)


class Known(AugmentedStream):
    """A stream that says how long it is."""

    def __len__(self) -> int:
        return self.size


def listed(samples: list[Any]) -> list[Any]:
    """A collate that leaves the samples as they are."""
    return samples


def steps_of(feed: Any, epoch: int, **more: Any) -> list[list[Any]]:
    """The samples of a loader that collates with ``listed``, by optimizer step."""
    found: list[list[Any]] = [[]]
    for batch, share in feed.batches(epoch, **more):
        found[-1] += batch[: share.samples]
        if share.last:
            found.append([])
    assert found.pop() == []
    return found


def together(ranks: list[list[list[Any]]]) -> list[list[Any]]:
    """The global batches of the walks of all ranks."""
    return [[one for part in parts for one in part] for parts in zip(*ranks, strict=True)]
