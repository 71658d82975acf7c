"""Decide which samples each optimizer step takes and which rank gets them.

The samples of an epoch are a permutation, or drawn by a sampler or by weights. A draw is a pure
function of (seed, epoch), the same on any number of ranks, so a resumed run continues in the same
order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from operator import index
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, cast

from nbtoolkit.errors import FitError
from nbtoolkit.training.data import labels_of, seed_sample
from nbtoolkit.worker.batch_slices import shard
from nbtoolkit.worker.collectives import broadcast
from nbtoolkit.worker.random_numbers import derive_seed, preserve_random_state

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


SampleWeights: TypeAlias = "Tensor | NDArray[np.generic] | Sequence[float] | Literal['balanced']"
"""One weight per sample, or ``"balanced"``: the inverse frequency of the sample's class."""


class MicroBatch(NamedTuple):
    """What one forward and backward pass of one rank counts for in its optimizer step."""

    samples: int
    """Samples in it; 0: the rank has none left and passes a stand-in, as collectives may need."""
    weight: float
    """Factor of its mean loss: the mean over the ranks is then the mean over the step's samples."""
    last: bool
    """Whether the optimizer steps after it."""
    rows: int
    """Rows of its batch: its samples, or those of the stand-in."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How the samples of an epoch are cut into the forward passes of one rank.

    The global batches do not depend on the ranks or on gradient accumulation; only the cuts do::

        order of the epoch    7 2 9 4 | 0 5 1 8 | 3 6    global batches of 4
        rank 0 of 2           7 2     | 0 5     | 3      a slice of each, cut into
        rank 1 of 2               9 4 |     1 8 |   6    micro-batches of ``micro``

    Attributes:
        size: samples of an epoch.
        batch: samples of one optimizer step, over all ranks.
        micro: samples of one micro-batch of one rank; ``batch`` is a multiple of ``ranks * micro``.
        rank: this rank.
        ranks: the number of ranks.
        drop_last: leave out the last step if it is smaller than ``batch``.
        smallest: samples of a micro-batch at least, 1 or 2, where that is possible (:attr:`single`
            says where not).
    """

    size: int
    batch: int
    micro: int
    rank: int = 0
    ranks: int = 1
    drop_last: bool = False
    smallest: int = 1

    @property
    def steps(self) -> int:
        """Optimizer steps of one epoch, a smaller last one included."""
        return self.size // self.batch + (self._rest > 0)

    @cached_property
    def micro_batches(self) -> list[MicroBatch]:
        """This rank's micro-batches of one epoch, in order; the same in every epoch."""
        number = self._micro_batches_per_step
        micro = self.micro
        even = [MicroBatch(micro, 1 / number, i == number - 1, micro) for i in range(number)]
        return even * (self.size // self.batch) + self._uneven_step()

    @cached_property
    def sizes(self) -> list[int]:
        """Samples to load for each of :attr:`micro_batches`, stand-ins included."""
        return [micro_batch.rows for micro_batch in self.micro_batches]

    @property
    def single(self) -> str:
        """Which forward passes of an epoch have fewer samples than :attr:`smallest`; "": none."""
        if self.smallest == 1:
            return ""
        if self.micro == 1 and self.size >= self.batch:
            passes = self._micro_batches_per_step
            return (
                f"the {self.batch} samples of a step are divided into single ones, between "
                f"{self.ranks} ranks with {passes} accumulation steps each"
            )
        if self._rest and not self._avoids_single:
            return (
                f"the last step of an epoch has a forward pass of a single sample: {self.size} "
                f"samples in batches of {self.batch} leave {self._rest}"
            )
        return ""

    def count_micro_batches(self, steps: int) -> int:
        """Return the number of :attr:`micro_batches` in the first ``steps`` optimizer steps."""
        if steps < self.steps:
            return steps * self._micro_batches_per_step
        return len(self.micro_batches)

    def indices(self, order: Tensor) -> Tensor:
        """Return this rank's samples, of shape (sum of :attr:`sizes`,).

        Args:
            order: the samples of all ranks, of shape (size,).
        """
        import torch

        even = self.size - self.size % self.batch
        steps = order[:even].view(-1, self.ranks, self.batch // self.ranks)
        slices = steps[:, self.rank].reshape(-1)
        rest = order[even : even + self._rest]
        low, high = self._share_of_rest(self.rank)
        stand_ins = [
            micro_batch.rows for micro_batch in self._uneven_step() if not micro_batch.samples
        ]
        return torch.cat([slices, rest[low:high], *(rest[:rows] for rows in stand_ins)])

    @property
    def _micro_batches_per_step(self) -> int:
        return self.batch // (self.ranks * self.micro)

    @property
    def _rest(self) -> int:
        """Samples of a last step smaller than ``batch``."""
        return 0 if self.drop_last else self.size % self.batch

    @property
    def _avoids_single(self) -> bool:
        """Whether the last, smaller step can be divided into parts of two samples or more."""
        rest = self._rest
        micro = self.micro
        possible = rest > 1 and (micro > 2 or (micro == 2 and rest % 2 == 0))
        return self.smallest == 2 and possible

    def _share_of_rest(self, rank: int) -> tuple[int, int]:
        """Return a rank's part [low, high) of the samples of a last step smaller than ``batch``."""
        rest = self._rest
        if not self._avoids_single:
            return shard(rest, rank, self.ranks)
        if self.micro == 2:
            low, high = shard(rest // 2, rank, self.ranks)
            return 2 * low, 2 * high
        sharing = min(self.ranks, rest // 2)
        return shard(rest, rank, sharing) if rank < sharing else (rest, rest)

    def _uneven_step(self) -> list[MicroBatch]:
        """Return the micro-batches of a last step smaller than ``batch``.

        Every rank has as many as the rank with the most samples: a model's forward pass may hold
        collectives (SyncBatchNorm).
        """
        rest = self._rest
        micro_batches = []
        shares = [high - low for low, high in map(self._share_of_rest, range(self.ranks))]
        number = -(-max(shares) // self.micro)
        left = shares[self.rank]
        for i in range(number):
            samples = min(self.micro, left)
            if self._avoids_single and left - samples == 1:
                samples -= 1
            left -= samples
            rows = samples or (2 if self._avoids_single else 1)
            weight = samples * self.ranks / rest
            micro_batches.append(MicroBatch(samples, weight, i == number - 1, rows))
        return micro_batches


def check_steps(passes: Passes) -> Passes:
    """Return ``passes`` if an epoch of them has a step.

    Raises:
        FitError: the data set is empty, or ``drop_last`` leaves no step.
    """
    if passes.size == 0:
        raise FitError(
            "the training set is empty",
            allowed="one sample or more",
            do="check the split or the filter that made it",
        )
    if passes.steps == 0:
        raise FitError(
            f"train.drop_last leaves no step: the training set has {passes.size} samples, fewer "
            f"than the {passes.batch} of one step",
            allowed="a whole batch or more, or train.drop_last: false",
            do="set train.drop_last: false, or a smaller train.batch_size",
        )
    return passes


@dataclass(frozen=True)
class EpochOrder:
    """The samples of every epoch.

    Attributes:
        size: samples that an epoch takes.
        draw: the epoch (from 1) -> its samples, int64 of shape (size,); called on all ranks.
        name: equal for orders that draw the same, "" of permutations; a resumed run is compared by
            it.
    """

    size: int
    draw: Callable[[int], Tensor]
    name: str


def make_order(
    data: object,
    samples: int,
    sampler: Iterable[int] | None,
    weights: SampleWeights | None,
    *,
    seed: int,
    ranks: int,
) -> EpochOrder:
    """Return the order that the user asked for; by default a permutation of all samples.

    Args:
        data: the training set, whose labels ``"balanced"`` needs.
        samples: its length.
        sampler: ``sampler=`` of ``fit``.
        weights: ``sample_weights=`` of ``fit``.
        seed: the run's.
        ranks: the number of ranks.

    Raises:
        FitError: both are given, or one of them does not fit the data.
    """
    if sampler is not None and weights is not None:
        raise FitError(
            "fit was given a sampler and sample_weights: each of them chooses the samples",
            allowed="one of sampler= and sample_weights= (train.sample_weights)",
            do="remove one of them",
        )
    if weights is not None:
        return _weighted(weights, data, samples, seed)
    if sampler is not None:
        return _sampled(sampler, samples, seed, ranks)
    return EpochOrder(samples, lambda epoch: permutation(samples, seed=seed, epoch=epoch), "")


def permutation(samples: int, *, seed: int, epoch: int) -> Tensor:
    """Return all samples in the order of ``epoch``: int64, a function of the arguments."""
    import torch

    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(samples, generator=generator)


def _weighted(weights: SampleWeights, data: object, samples: int, seed: int) -> EpochOrder:
    """Return ``samples`` draws with replacement, in proportion to the weights."""
    import torch

    if isinstance(weights, str):
        given = _balanced(weights, data)
    else:
        given = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    usable = bool(given.isfinite().all()) and bool((given >= 0).all()) and float(given.sum()) > 0
    if given.shape != (samples,) or not usable:
        fault = "are not numbers of at least 0, with one above"
        if given.shape != (samples,):
            fault = f"have the shape {tuple(given.shape)}, and the training set {samples} samples"
        raise FitError(
            f"the sample_weights {fault}",
            allowed="a 1-D array of one finite weight per sample, or 'balanced'",
            do="compute the weights from the samples that fit gets as train_data",
        )
    ends = given.cumsum(0)  # torch.multinomial allows 2**24 samples only

    def draw(epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(seed, "weights", epoch))
        points = torch.rand(samples, generator=generator, dtype=torch.float64) * ends[-1]
        return torch.searchsorted(ends, points, right=True)

    digest = hashlib.blake2b(given.numpy().tobytes(), digest_size=8).hexdigest()
    return EpochOrder(samples, draw, f"weights {digest}")


def _balanced(weights: str, data: object) -> Tensor:
    """One over the number of samples of the sample's class."""
    import torch

    targets = labels_of(data) if weights == "balanced" else None
    labels = None if targets is None else torch.as_tensor(targets).detach().cpu()
    if labels is not None and labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels is None or labels.ndim != 1 or bool((labels != labels.floor()).any()):
        raise FitError(
            f"sample_weights is {weights!r}, and fit does not find one class per sample",
            allowed="'balanced' for a pair of arrays (inputs, labels), or labels in the attribute "
            "targets or labels of the data set; or an array of weights",
            do="pass sample_weights=<one weight per sample>",
        )
    _, places, counts = labels.unique(return_inverse=True, return_counts=True)
    return cast("Tensor", 1.0 / counts[places].double())


def _sampled(sampler: Iterable[int], samples: int, seed: int, ranks: int) -> EpochOrder:
    """Rank 0 asks the sampler, and all ranks use its answer: a generator may be rank 0's own."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import BatchSampler
    from torch.utils.data.distributed import DistributedSampler

    name = type(sampler).__name__
    fault = ""
    if isinstance(sampler, BatchSampler):
        fault = "gives batches"
    elif isinstance(sampler, DistributedSampler):
        fault = "gives each rank a part"
    elif not hasattr(sampler, "__len__"):
        fault = "has no length"
    if fault or not isinstance(sampler, Sized):
        raise FitError(
            f"the sampler {name} {fault}",
            allowed="an iterable with __len__ of the indices of a whole epoch: fit makes the "
            "batches, and divides them among the ranks",
            do="remove it, pass the sampler inside it, or a list of indices",
        )
    size = len(sampler)
    asks = ranks == 1 or dist.get_rank() == 0
    if asks and _ask(sampler, 1, size, samples, seed) != _ask(sampler, 1, size, samples, seed):
        raise FitError(
            f"the sampler {name} gives another order when it is asked for the same epoch again, so "
            "a resumed run would take other samples",
            allowed="samplers that draw from torch's, NumPy's or Python's global generators, from "
            "a torch.Generator in their attribute `generator`, or by set_epoch(epoch): fit seeds "
            "these",
            do="draw with torch.randperm or random.shuffle inside __iter__",
        )

    @lru_cache(maxsize=1)
    def draw(epoch: int) -> Tensor:
        mine = _ask(sampler, epoch, size, samples, seed) if asks else None
        return torch.tensor(broadcast(mine, ranks), dtype=torch.int64)

    return EpochOrder(size, draw, f"{name} of {size}")


def _ask(sampler: Iterable[int], epoch: int, size: int, samples: int, seed: int) -> list[int]:
    """Return the indices of ``epoch``, with all generators seeded by (seed, epoch).

    Raises:
        FitError: they are not ``size`` indices of ``samples`` samples.
    """
    import torch

    generator = getattr(sampler, "generator", None)
    set_epoch = getattr(sampler, "set_epoch", None)
    with preserve_random_state():
        seed_sample(seed, epoch, -1)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(derive_seed(seed, "order", epoch))
        if callable(set_epoch):
            set_epoch(epoch)
        given = list(islice(sampler, size + 1))
    strange = [item for item in given if not hasattr(item, "__index__")]
    indices = [] if strange else [index(item) for item in given]
    beyond = [item for item in indices if not 0 <= item < samples]
    if strange:
        fault = f"gives {strange[0]!r}, which is no index"
    elif len(indices) != size:
        count = "more" if len(indices) > size else len(indices)
        fault = f"gives {count} indices, and its len() is {size}"
    elif beyond:
        fault = f"gives the index {beyond[0]}, and the training set has {samples} samples"
    else:
        return indices
    raise FitError(
        f"the sampler {type(sampler).__name__} {fault}",
        allowed=f"len(sampler) indices of samples, from 0 to {samples - 1}",
        do="make the sampler for the data set that fit gets as train_data",
    )
