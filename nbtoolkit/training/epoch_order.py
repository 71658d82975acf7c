"""Take the data set, and the order of its samples, from what the user passed to ``fit``.

The samples of an epoch are drawn by a sampler or by weights, the same on any number of ranks. A
draw is a pure function of (seed, epoch), so a resumed run continues in the same order.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from operator import index
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from nbtoolkit.errors import FitError, some_names
from nbtoolkit.training.samples import seed_sample
from nbtoolkit.worker.collectives import broadcast
from nbtoolkit.worker.random_numbers import derive_seed, preserve_random_state

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from nbtoolkit.training.data import Collate
    from nbtoolkit.training.losses import Labels

SampleWeights: TypeAlias = "Tensor | NDArray[np.generic] | Sequence[float] | Literal['balanced']"
"""One weight per sample, or ``"balanced"``: the inverse frequency of the sample's class."""


@dataclass(frozen=True)
class Feed:
    """What ``fit`` trains or evaluates on.

    Attributes:
        data: a data set in any form but a ``DataLoader``.
        collate: makes a batch from a list of samples; None: torch's.
        workers: ``DataLoader`` processes of each rank.
        sampler: the order or choice of the samples; None: a permutation of all.
        drop_last: whether the loader leaves out an incomplete batch.
        batch_size: the loader's; None: there was no loader.
    """

    data: object
    collate: Collate | None
    workers: int
    sampler: Iterable[int] | None = None
    drop_last: bool = False
    batch_size: int | None = None


def take_apart(
    data: object, *, collate: Collate | None, workers: int, dtype: torch.dtype | None = None
) -> Feed:
    """What a ``DataLoader`` is made of; tables of pandas become tensors, other data stay.

    A shuffling loader gives no sampler: the permutation of ``fit`` does the same. Nor does a
    ``DistributedSampler``: ``fit`` divides the samples among the ranks itself.

    Args:
        data: what the user passed.
        collate: the user's, in place of the loader's.
        workers: in place of a loader's 0.
        dtype: of the floats of a table; None: float32.

    Raises:
        FitError: the loader makes its batches by a ``batch_sampler`` of its own, or none; or a
            column of a table is not of numbers.
    """
    from torch.utils.data import DataLoader, IterableDataset, RandomSampler, default_collate
    from torch.utils.data.distributed import DistributedSampler

    if not isinstance(data, DataLoader):
        return Feed(_without_tables(data, dtype), collate, workers)
    if data.batch_size is None:
        own = "a batch_sampler of its own" if data.batch_sampler is not None else "batch_size=None"
        raise FitError(
            f"the DataLoader has {own}, but fit makes the batches (of train.batch_size)",
            allowed="a DataLoader with batch_size, and with shuffle or a sampler",
            do="pass the data set, or a DataLoader with the sampler inside (not one that "
            "ctx.prepare returned)",
        )
    dataset: Any = data.dataset
    sampler: Any = data.sampler
    shuffles = (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(dataset)
    )
    if isinstance(dataset, IterableDataset) or shuffles or isinstance(sampler, DistributedSampler):
        sampler = None
    if collate is None and data.collate_fn is not default_collate:
        collate = data.collate_fn
    workers = data.num_workers or workers
    return Feed(dataset, collate, workers, sampler, data.drop_last, data.batch_size)


def _without_tables(data: object, dtype: torch.dtype | None) -> object:
    """``data`` with tensors in place of pandas' DataFrames and Series, also in a tuple or dict."""
    pandas = sys.modules.get("pandas")  # not imported: then there are none
    if pandas is None:
        return data
    if isinstance(data, (pandas.DataFrame, pandas.Series)):
        return _tensor_of_table(data, dtype)
    if type(data) is tuple:
        return tuple(_without_tables(part, dtype) for part in data)
    if type(data) is dict:
        return {name: _without_tables(part, dtype) for name, part in data.items()}
    return data


def _tensor_of_table(table: Any, dtype: torch.dtype | None) -> Tensor:
    """A DataFrame as floats (n, columns); a Series of whole numbers as int64 (n,), else floats.

    Raises:
        FitError: a column is not of numbers.
    """
    import torch
    from pandas.api.types import is_bool_dtype, is_integer_dtype, is_numeric_dtype

    columns = table.dtypes.items() if table.ndim == 2 else [(table.name, table.dtype)]
    others = [f"{name!r} ({kind})" for name, kind in columns if not is_numeric_dtype(kind)]
    if others:
        raise FitError(
            f"columns of the {type(table).__name__} are not numbers: {some_names(others)}",
            allowed="columns of numbers; fit makes floats of a DataFrame, and int64 of a Series "
            "of whole numbers (class labels)",
            do="encode them (features: pd.get_dummies(df); labels: pd.factorize(labels)[0]), or "
            "leave them out: df.select_dtypes('number')",
        )
    labels = table.ndim == 1 and (is_integer_dtype(table.dtype) or is_bool_dtype(table.dtype))
    if labels and not table.isna().any():
        return torch.from_numpy(table.to_numpy("int64", copy=True))
    kind = "float64" if dtype is torch.float64 else "float32"
    return torch.from_numpy(table.to_numpy(kind, copy=True, na_value=float("nan")))


# --- order ---


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
    """``samples`` draws with replacement, in proportion to the weights."""
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

    found = labels_of(data) if weights == "balanced" else None
    labels = None if found is None else torch.as_tensor(found).detach().cpu()
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


def known_targets(data: object) -> Labels | None:
    """The targets of all samples, as batches have them: of a pair of arrays; None: not known."""
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, TensorDataset, default_collate

    if isinstance(data, DataLoader) and data.collate_fn is default_collate:
        data = data.dataset
    parts: Any = data.tensors if type(data) is TensorDataset else data
    if not isinstance(parts, tuple) or len(parts) != 2:
        return None
    targets: Any = _without_tables(parts[1], None)
    return targets if isinstance(targets, (torch.Tensor, np.ndarray)) else None


def labels_of(data: object) -> Labels | None:
    """The targets of all samples: a pair's second array, or the data set's; None: unknown."""
    import numpy as np
    import torch
    from torch.utils.data import Subset

    if isinstance(data, Subset):
        whole = labels_of(data.dataset)
        return None if whole is None else torch.as_tensor(whole)[torch.as_tensor(data.indices)]
    if isinstance(data, tuple) or hasattr(data, "tensors"):
        return known_targets(data)
    found = getattr(data, "targets", getattr(data, "labels", None))
    return np.asarray(found) if isinstance(found, (list, tuple)) else found


# --- samplers ---


def _sampled(sampler: Iterable[int], samples: int, seed: int, ranks: int) -> EpochOrder:
    """Rank 0 asks the sampler, and all ranks use its answer: a generator may be rank 0's own."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import BatchSampler
    from torch.utils.data.distributed import DistributedSampler

    name, fault = type(sampler).__name__, ""
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
    size, asks = len(sampler), ranks == 1 or dist.get_rank() == 0
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
    """The indices of ``epoch``, with all generators seeded by (seed, epoch).

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
    strange = [one for one in given if not hasattr(one, "__index__")]
    indices = [] if strange else [index(one) for one in given]
    beyond = [one for one in indices if not 0 <= one < samples]
    if strange:
        fault = f"gives {strange[0]!r}, which is no index"
    elif len(indices) != size:
        found = "more" if len(indices) > size else len(indices)
        fault = f"gives {found} indices, and its len() is {size}"
    elif beyond:
        fault = f"gives the index {beyond[0]}, and the training set has {samples} samples"
    else:
        return indices
    raise FitError(
        f"the sampler {type(sampler).__name__} {fault}",
        allowed=f"len(sampler) indices of samples, from 0 to {samples - 1}",
        do="make the sampler for the data set that fit gets as train_data",
    )
