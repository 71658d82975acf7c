"""Order: which samples every optimizer step takes, and which of them are this rank's.

    permutation of (seed, epoch)   7 2 9 4 | 0 5 1 8 | 3 6    global batches of 4, the last uneven
    rank 0 of 2                    7 2     | 0 5     | 3      its slice of each; cut further into
    rank 1 of 2                        9 4 |     1 8 |   6    passes when gradients are accumulated

The global batches do not depend on the ranks or on accumulation; only the cuts do.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from nbtoolkit.errors import FitError

if TYPE_CHECKING:
    from torch import Tensor


class Share(NamedTuple):
    """What one pass (forward and backward) of one rank counts for in its optimizer step."""

    samples: int
    """How many of the step's samples; 0: the rank has none left and passes a stand-in, in step."""
    weight: float
    """Factor of the pass's mean loss: DDP's mean over the ranks is then the samples' mean."""
    last: bool
    """Whether the optimizer steps after this pass."""


@dataclass(frozen=True, kw_only=True)
class Order:
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
    def shares(self) -> list[Share]:
        """This rank's passes of one epoch, in order; the same in every epoch."""
        passes = self._passes_per_step
        even = [Share(self.micro, 1 / passes, i == passes - 1) for i in range(passes)]
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

    def _uneven(self) -> list[Share]:
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
            shares.append(Share(samples, samples * self.ranks / rest, i == passes - 1))
        return shares


def check_steps(order: Order) -> Order:
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
