"""Decide which samples every optimizer step takes, and which of them belong to this rank."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nbtoolkit.errors import FitError
from nbtoolkit.run.paths import RunPaths

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# --- order ---
# Which samples every optimizer step takes, and which of them are this rank's.
#
# permutation of (seed, epoch) 7 2 9 4 | 0 5 1 8 | 3 6 global batches of 4, the last uneven rank 0
# of 2 7 2 | 0 5 | 3 its slice of each; cut further into rank 1 of 2 9 4 | 1 8 | 6 passes when
# gradients are accumulated
#
# The global batches do not depend on the ranks or on accumulation; only the cuts do.


class MicroBatch(NamedTuple):
    """What one pass (forward and backward) of one rank counts for in its optimizer step."""

    samples: int
    """How many of the step's samples; 0: the rank has none left and passes a stand-in, in step."""
    weight: float
    """Factor of the pass's mean loss: DDP's mean over the ranks is then the samples' mean."""
    last: bool
    """Whether the optimizer steps after this pass."""


@dataclass(frozen=True, kw_only=True)
class GlobalBatchSampler:
    """The walk of one rank through the training set.

    Attributes:
        size: samples in the data set.
        batch: samples of one optimizer step, over all ranks (global).
        micro: samples of one pass of one rank; ``batch`` is a multiple of ``ranks * micro``.
        seed: decides the permutations.
        rank: this rank.
        ranks: how many there are.
        drop_last: leave out the uneven last step, and with it its samples.
    """

    size: int
    batch: int
    micro: int
    seed: int
    rank: int = 0
    ranks: int = 1
    drop_last: bool = False

    @property
    def steps(self) -> int:
        """Optimizer steps of one epoch; the last may be uneven."""
        return self.size // self.batch + (self._rest > 0)

    @cached_property
    def shares(self) -> list[MicroBatch]:
        """This rank's passes of one epoch, in order; the same in every epoch."""
        passes = self._passes_per_step
        even = [MicroBatch(self.micro, 1 / passes, i == passes - 1) for i in range(passes)]
        return even * (self.size // self.batch) + self._uneven()

    @cached_property
    def sizes(self) -> list[int]:
        """Samples that each pass of :attr:`shares` fetches (at least 1: the stand-in)."""
        return [max(share.samples, 1) for share in self.shares]

    def passes(self, steps: int) -> int:
        """How many of :attr:`shares` the first ``steps`` optimizer steps of an epoch take."""
        return steps * self._passes_per_step if steps < self.steps else len(self.shares)

    def permutation(self, epoch: int) -> Tensor:
        """All samples in the order of ``epoch``: a pure function of (seed, epoch)."""
        import torch

        generator = torch.Generator().manual_seed(mix(self.seed, "order", epoch))
        return torch.randperm(self.size, generator=generator)

    def indices(self, epoch: int) -> Tensor:
        """This rank's samples of ``epoch``, pass after pass; cut them by :attr:`sizes`."""
        return self.mine(self.permutation(epoch))

    def mine(self, order: Tensor) -> Tensor:
        """This rank's part of all samples in ``order``, of shape (size,): see :meth:`indices`."""
        import torch

        even = self.size - self.size % self.batch
        steps = order[:even].view(-1, self.ranks, self.batch // self.ranks)
        mine, rest = steps[:, self.rank].reshape(-1), order[even : even + self._rest]
        low, high = shard(len(rest), self.rank, self.ranks)
        stand_ins = sum(share.samples == 0 for share in self._uneven())
        return torch.cat([mine, rest[low:high], rest[:1].expand(stand_ins)])

    def step_ids(self, epoch: int, step: int) -> list[int]:
        """The samples of all ranks in optimizer step ``step`` (from 0) of ``epoch``."""
        if step >= self.steps:
            return []
        return self.permutation(epoch)[step * self.batch :][: self.batch].tolist()

    @property
    def _passes_per_step(self) -> int:
        return self.batch // (self.ranks * self.micro)

    @property
    def _rest(self) -> int:
        """Samples of the uneven last step."""
        return 0 if self.drop_last else self.size % self.batch

    def _uneven(self) -> list[MicroBatch]:
        """The passes of the last step, when the batch does not divide the data set.

        Every rank makes as many as the busiest: a model's forward pass may hold collectives
        (SyncBatchNorm).
        """
        rest = self._rest
        busiest = -(-rest // self.ranks)
        passes = -(-busiest // self.micro)
        low, high = shard(rest, self.rank, self.ranks)
        left, shares = high - low, []
        for i in range(passes):
            samples = min(self.micro, left)
            left -= samples
            shares.append(MicroBatch(samples, samples * self.ranks / rest, i == passes - 1))
        return shares


def check_steps(order: GlobalBatchSampler) -> GlobalBatchSampler:
    """``order``, if an epoch of it has a step.

    Raises:
        FitError: the data set is empty, or ``drop_last`` leaves nothing of it.
    """
    if order.size == 0:
        raise FitError(
            "the training set is empty",
            allowed="one sample or more",
            do="check the split or the filter that made it",
        )
    if order.steps == 0:
        raise FitError(
            f"train.drop_last leaves no step: the training set has {order.size} samples, fewer "
            f"than the {order.batch} of one step",
            allowed="a whole batch or more, or train.drop_last: false",
            do="set train.drop_last: false, or a smaller train.batch_size",
        )
    return order


def shard(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """``rank``'s contiguous part [low, high) of ``range(size)``; parts differ by at most one."""
    return size * rank // ranks, size * (rank + 1) // ranks


def mix(*parts: object) -> int:
    """A 63-bit seed from what it depends on; other parts give an unrelated seed."""
    text = ":".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


# --- samples ---
# Which samples every optimizer step took (``tracking.record_samples``), written and read again.
#
# ``samples/rank-<rank>.jsonl`` of a run has a line for each step of each rank, appended when the
# step's last batch is handed out:
#
#     {"fit": 1, "epoch": 1, "step": 0, "ranks": 2, "ids": [7, 2]}
#
# ``fit`` counts the calls of fit in the training function, ``step`` begins at 0 in each epoch,
# ``ids`` are the rank's own part of the global batch: positions in the data set or in the stream.


Pass = tuple[Any, MicroBatch, list[int]]
"""A batch, what it counts for, and the samples in it (a stand-in is none)."""

_Parts = dict[int, dict[int, list[int]]]  # one step: number of ranks -> rank -> its samples


class SampleLog:
    """The writing end: one rank's file.

    A disk that is full ends the notes, with a sentence in the rank's log, and not the training.
    """

    def __init__(self, path: Path, *, ranks: int, fit: int) -> None:
        self._path, self._about = path, {"fit": fit, "ranks": ranks}
        # The last line of an attempt that was killed may be cut short.
        self._begin = "\n" if path.exists() else ""
        self._ended = False

    def noting(
        self, epoch: int, step: int, passes: Iterable[Pass]
    ) -> Iterator[tuple[Any, MicroBatch]]:
        """Hand on ``passes``, which begin with optimizer step ``step``, and note their samples."""
        ids: list[int] = []
        for batch, share, some in passes:
            ids += some
            if share.last:
                self._write({**self._about, "epoch": epoch, "step": step, "ids": ids})
                ids, step = [], step + 1
            yield batch, share

    def _write(self, line: dict[str, Any]) -> None:
        if self._ended:
            return
        text = f"{self._begin}{json.dumps(line, separators=(',', ':'))}\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(text)
        except OSError as error:
            self._ended = True
            what = f"epoch {line['epoch']}, step {line['step']}"
            print(f"fit: from {what} on no samples are noted: {error}", file=sys.stderr)
        self._begin = ""


def read_samples(paths: RunPaths, *, fit: int = 1) -> dict[tuple[int, int], list[int]]:
    """The samples of each global batch, as the ranks noted them.

    A step that was taken again after a kill has its last line, on however many ranks; one that not
    all ranks had come to is left out.

    Args:
        paths: the run's; its ranks may be alive.
        fit: which call of fit in the training function, from 1.

    Returns:
        (epoch, step in the epoch) -> ids, in order; empty without ``tracking.record_samples``.
    """
    steps: dict[tuple[int, int], _Parts] = defaultdict(dict)
    for rank, line in _lines(paths):
        if line["fit"] == fit:
            parts = steps[line["epoch"], line["step"]]
            ranks = line["ranks"]
            if rank == 0:  # takes part in every attempt: its last line is of the newest one
                parts[ranks] = parts.pop(ranks, {})
            parts.setdefault(ranks, {})[rank] = line["ids"]
    found = {key: _newest(steps[key]) for key in sorted(steps)}
    return {key: ids for key, ids in found.items() if ids is not None}


def _lines(paths: RunPaths) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every whole line with its rank, rank by rank."""
    for rank in count():
        if not paths.samples(rank).exists():
            return
        with paths.samples(rank).open() as file:
            for text in file:
                try:
                    yield rank, json.loads(text)
                except ValueError:  # cut short by a kill, or blank: an attempt's beginning
                    continue


def _newest(parts: _Parts) -> list[int] | None:
    """One step's samples, from the newest attempt that is whole."""
    for ranks, by_rank in reversed(parts.items()):
        if len(by_rank) == ranks:
            return [one for rank in range(ranks) for one in by_rank[rank]]
    return None


# --- inexact ---


_STATISTICS = "takes its statistics from each rank's own part of a batch"
WHOLE_BATCHES = "of whole batches (train.loss_reduction: batch): depends on the number of ranks"
_RANDOM = "draws random numbers, on every rank other ones"


def inexact_layers(model: torch.nn.Module) -> dict[str, str]:
    """Why one process and several differ by more than the order of sums; empty: they do not.

    Args:
        model: the model as it trains.

    Returns:
        Name and type of the layer -> the reason.
    """
    reasons = {f"{name} ({type(one).__name__})": _why(one) for name, one in model.named_modules()}
    return {name: reason for name, reason in reasons.items() if reason}


def _why(module: torch.nn.Module) -> str:
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.dropout import _DropoutNd

    if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
        return _STATISTICS
    dropped = getattr(module, "dropout", 0.0)  # of attention and recurrent layers
    if isinstance(module, _DropoutNd):
        return _RANDOM if module.p else ""
    if isinstance(module, nn.RReLU) or (isinstance(dropped, float) and dropped > 0):
        return _RANDOM
    return ""
