"""Turn the user's data into one rank's batches: arrays by blocks of rows, other data by samples."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

from nbtoolkit.errors import FitError, some_names
from nbtoolkit.wire.serialization import PackedError, add_note, pack_error, unpack_error
from nbtoolkit.worker.random_numbers import (
    GeneratorStates,
    preserve_random_state,
    seed_generators,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, Dataset

    from nbtoolkit.training.losses import Labels

Sample: TypeAlias = Any
"""One item of a data set, in the user's own form."""

Batch: TypeAlias = Any
"""What ``collate`` makes of a list of samples: tensors, or tuples, lists and dicts of tensors."""

Collate: TypeAlias = Callable[[list[Sample]], Batch]

TORCHS_IGNORED = -100
"""torch's default ``ignore_index``."""


@dataclass(frozen=True)
class Feed:
    """What ``fit`` trains or evaluates on.

    Attributes:
        data: a data set in any form but a ``DataLoader`` or a table.
        collate: makes a batch from a list of samples; None: torch's.
        dtype: of the floats of arrays; None: as they are.
        workers: ``DataLoader`` processes of each rank; 0: as ``train.num_workers`` says.
        sampler: the order or choice of the samples; None: a permutation of all.
        drop_last: whether the loader leaves out an incomplete batch.
        batch_size: the loader's; None: there was no loader.
    """

    data: object
    collate: Collate | None
    dtype: torch.dtype | None
    workers: int = 0
    sampler: Iterable[int] | None = None
    drop_last: bool = False
    batch_size: int | None = None

    @property
    def targets(self) -> Labels | None:
        """The targets of all samples, as batches have them: of a pair of arrays; None: unknown."""
        return second_array(self.data) if self.collate is None else None


def take_apart(
    data: object, *, collate: Collate | None = None, model: nn.Module | None = None
) -> Feed:
    """Return what a ``DataLoader`` is made of; tables of pandas become tensors, other data stay.

    A shuffling loader gives no sampler: the permutation of ``fit`` does the same. Nor does a
    ``DistributedSampler``: ``fit`` divides the samples among the ranks itself.

    Args:
        data: what the user passed.
        collate: the user's, in place of the loader's.
        model: the data are for it: it decides the type of their floats.

    Raises:
        FitError: the loader makes its batches by a ``batch_sampler`` of its own, or none; or a
            column of a table is not of numbers.
    """
    from torch.utils.data import DataLoader, IterableDataset, RandomSampler, default_collate
    from torch.utils.data.distributed import DistributedSampler

    dtype = _float_type(model)
    if not isinstance(data, DataLoader):
        return Feed(_without_tables(data, dtype), collate, dtype)
    if data.batch_size is None:
        batching = (
            "a batch_sampler of its own" if data.batch_sampler is not None else "batch_size=None"
        )
        raise FitError(
            f"the DataLoader has {batching}, but fit makes the batches (of train.batch_size)",
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
    return Feed(dataset, collate, dtype, data.num_workers, sampler, data.drop_last, data.batch_size)


def _float_type(model: nn.Module | None) -> torch.dtype | None:
    """Return the type of a model's weights, for the floats of its data.

    Returns:
        float32 or float64; None: the weights have other types, or several.
    """
    import torch

    parameters = [] if model is None else [*model.parameters()]
    types = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
    return types.pop() if types in ({torch.float32}, {torch.float64}) else None


def _without_tables(data: object, dtype: torch.dtype | None) -> object:
    """Return ``data`` with tensors for pandas' DataFrames and Series, also in a tuple or dict."""
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
    """Return a DataFrame as floats (n, columns).

    A Series of whole numbers as int64 (n,), else floats.

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


def second_array(data: object) -> Labels | None:
    """Return the second array of a pair of arrays; None: ``data`` is none."""
    import numpy as np
    import torch
    from torch.utils.data import TensorDataset

    parts: Any = data.tensors if type(data) is TensorDataset else data
    if not isinstance(parts, tuple) or len(parts) != 2:
        return None
    return parts[1] if isinstance(parts[1], (torch.Tensor, np.ndarray)) else None


def labels_of(data: object) -> Labels | None:
    """Return the targets of all samples: a pair's second array, or the data set's.

    None: unknown.
    """
    import numpy as np
    import torch
    from torch.utils.data import Subset

    if isinstance(data, Subset):
        whole = labels_of(data.dataset)
        return None if whole is None else torch.as_tensor(whole)[torch.as_tensor(data.indices)]
    if isinstance(data, tuple) or hasattr(data, "tensors"):
        return second_array(data)
    labels = getattr(data, "targets", getattr(data, "labels", None))
    return np.asarray(labels) if isinstance(labels, (list, tuple)) else labels


_RESIDENT = 512 * 2**20  # arrays up to this many bytes are kept on the device, not sent each step
_BLOCK = 4 * 2**20  # rows are gathered by about so many bytes: saves 8% of a small model's step


class MapDataset(Protocol):
    """A data set with samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


def make_source(
    feed: Feed, device: torch.device, *, workers: int = 0, seed: int = 0
) -> ArraySource | SampleSource:
    """Wrap the user's data set.

    Random augmentation does not depend on the process that loads a sample: before
    ``dataset[index]`` Python's, NumPy's and torch's global generators (the CPU's) are seeded with
    (seed, epoch, index); ``collate`` continues with those of the batch's last sample. Generators
    that a data set keeps for itself (``np.random.default_rng``) cannot be seeded from outside:
    create them in ``__getitem__``, from ``random.getrandbits(64)``.

    Args:
        feed: its data are a ``TensorDataset``, a tensor or array, a tuple or dict of them with
            equal first dimension (loaded by blocks of rows; by samples, if it has a ``collate``);
            or any map-style data set (loaded by samples).
        device: the device of the batches.
        workers: ``DataLoader`` processes of this rank, if the feed names none; arrays need none.
        seed: the run's, for random augmentation.

    Raises:
        FitError: the data are none of these, or their arrays differ in length.
    """
    arrays = _as_arrays(feed.data)
    if arrays is not None and feed.collate is None:
        return ArraySource(arrays, device, feed.dtype)
    dataset = _as_map_dataset(feed.data) if arrays is None else _Rows(arrays, feed.dtype)
    return SampleSource(dataset, device, feed.collate, feed.workers or workers, seed)


class Arrays(NamedTuple):
    """Tensors with one row per sample, and the form in which the user passed them."""

    tensors: list[Tensor]
    rebuild: Callable[[tuple[Tensor, ...]], Batch]
    """Rows of the tensors -> a batch (or a sample) in the user's form."""


class ArraySource:
    """Tensors in memory: a batch is a piece of one indexing operation, not a loop over samples."""

    def __init__(
        self, arrays: Arrays, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        tensors, self._rebuild = arrays
        resident = sum(tensor.nbytes for tensor in tensors) <= _RESIDENT
        self._tensors = [tensor.to(device) for tensor in tensors] if resident else tensors
        self._row = max(1, sum(tensor[:1].nbytes for tensor in tensors))
        self._device = device
        # A block at a time: the ranks share the memory of the arrays.
        self._types = [_type_in_batches(tensor, dtype) for tensor in tensors]

    def __len__(self) -> int:
        return len(self._tensors[0])

    def batches(self, indices: Tensor, sizes: Sequence[int], *, epoch: int = 0) -> Iterator[Batch]:
        """Yield the samples at ``indices``, cut into batches of ``sizes``, on the device.

        Args:
            indices: int64 of shape (sum of ``sizes``,).
            sizes: samples of each batch.
            epoch: not used: nothing is random.
        """
        indices = indices.to(self._tensors[0].device)
        for start, group in _blocks(sizes, _BLOCK // self._row):
            rows = indices[start : start + sum(group)]
            block = [
                tensor.index_select(0, rows).to(self._device, kind)
                for tensor, kind in zip(self._tensors, self._types, strict=True)
            ]
            for batch in zip(*(column.split(group) for column in block), strict=True):
                yield self._rebuild(batch)


class SampleSource:
    """A map-style data set, loaded sample by sample in worker processes or in this one.

    Batches and errors do not depend on the workers, which live as long as the source; each makes
    batches in turn, two ahead.

    Raises:
        FitError: workers could not send their batches.
    """

    def __init__(
        self,
        dataset: MapDataset,
        device: torch.device,
        collate: Collate | None,
        workers: int,
        seed: int,
    ) -> None:
        if workers:
            _check_sockets()
        self._dataset = dataset
        self._device = device
        self._workers = workers
        self._make = _BatchMaker(dataset, collate, seed)
        self._keys = _Keys()
        self._loader: DataLoader[Batch] | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def batches(self, indices: Tensor, sizes: Sequence[int], *, epoch: int = 0) -> Iterator[Batch]:
        """See :meth:`ArraySource.batches`; one iteration at a time.

        Args:
            indices: see there.
            sizes: see there.
            epoch: seeds what is drawn at random for a sample; 0: validation.

        Raises:
            Exception: of the data set or ``collate``, with its own type, traceback and notes. It
                ends the workers; the next iteration starts new ones.
        """
        from accelerate.utils import send_to_device

        keys = _batch_keys(indices, sizes, epoch)
        if not self._workers and self._device.type == "cpu":  # a DataLoader takes 20 us a batch
            for key in keys:
                yield self._make(key)
            return
        self._keys.keys = keys
        if self._loader is None:
            self._loader = self._start()
        iterator = iter(self._loader)
        for batch in iterator:
            if isinstance(batch, _Failure):
                self._loader = None
                del iterator  # else the workers would live as long as the error's traceback
                raise batch.error()
            on_cpu = self._device.type == "cpu"
            yield batch if on_cpu else send_to_device(batch, self._device, non_blocking=True)

    def _start(self) -> DataLoader[Batch]:
        import torch
        from torch.utils.data import DataLoader

        batches: object = _Batches(self._make)  # a DataLoader only indexes its data set
        return DataLoader(
            cast("Dataset[Batch]", batches),
            generator=torch.Generator(),  # else each iteration draws from the global one
            batch_size=None,
            sampler=self._keys,
            num_workers=self._workers,
            collate_fn=_identity,
            pin_memory=self._device.type == "cuda",
            persistent_workers=self._workers > 0,
        )


class _BatchKey(NamedTuple):
    epoch: int
    indices: list[int]


def _batch_keys(indices: Tensor, sizes: Sequence[int], epoch: int) -> Iterator[_BatchKey]:
    start = 0
    for size in sizes:
        yield _BatchKey(epoch, indices[start : start + size].tolist())
        start += size


class _BatchMaker:
    """Makes a batch of a data set: loads each sample with its own seed, then calls ``collate``.

    Seeding 32 samples takes as long as the step of a small model. So it begins with the first batch
    that draws, which is loaded again.
    """

    def __init__(self, dataset: MapDataset, collate: Collate | None, seed: int) -> None:
        from torch.utils.data import default_collate

        self._dataset = dataset
        self._collate = collate or default_collate
        self._seed = seed
        # As a DataLoader does; it could not seed each sample.
        self._load_many = getattr(dataset, "__getitems__", None)
        self._first = True
        self._draws = False

    def __call__(self, key: _BatchKey) -> Batch:
        if self._draws:
            return self._seeded(key)
        first = self._first
        self._first = False
        # The whole states only once: NumPy takes as long for them as a batch for its samples.
        with isolated() if first else nullcontext():
            before = GeneratorStates.now()
            batch = self._collated(key, self._load(key.indices))
            self._draws = before != GeneratorStates.now()
        if not self._draws:
            return batch
        if not first:
            before.restore()
        return self._seeded(key)

    def _seeded(self, key: _BatchKey) -> Batch:
        samples = []
        with isolated():
            for index in key.indices:
                seed_sample(self._seed, key.epoch, index)
                samples += self._load([index])
            return self._collated(key, samples)

    def _collated(self, key: _BatchKey, samples: list[Sample]) -> Batch:
        with noted(f"while loading a batch of the samples {key.indices}"):
            return self._collate(samples)

    def _load(self, indices: list[int]) -> list[Sample]:
        if self._load_many is not None:
            with noted(f"while loading the samples {indices} of the data set"):
                samples: list[Sample] = self._load_many(indices)
                return samples
        samples = []
        dataset = self._dataset
        index = 0
        try:
            for index in indices:
                samples.append(dataset[index])
        except Exception as error:
            add_note(error, f"[nbtoolkit] while loading sample {index} of the data set")
            raise
        return samples


class _Rows:
    """Arrays as a data set of samples, for a ``collate`` of the user's."""

    def __init__(self, arrays: Arrays, dtype: torch.dtype | None) -> None:
        self._tensors, self._rebuild = arrays
        self._types = [_type_in_batches(tensor, dtype) for tensor in self._tensors]

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, index: int) -> Sample:
        typed = zip(self._tensors, self._types, strict=True)
        return self._rebuild(tuple(tensor[index].to(kind) for tensor, kind in typed))


def _type_in_batches(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """``dtype`` for floats; the tensor's own for whole numbers and where there is none."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _blocks(sizes: Sequence[int], rows: int) -> Iterator[tuple[int, list[int]]]:
    """Group consecutive batches to blocks of at most ``rows`` rows (or one batch): start, sizes."""
    start = 0
    group = list[int]()
    size_of_group = 0
    for size in sizes:
        if group and size_of_group + size > rows:
            yield start, group
            start = start + size_of_group
            group = []
            size_of_group = 0
        group.append(size)
        size_of_group += size
    if group:
        yield start, group


def _as_arrays(data: object) -> Arrays | None:
    """In-memory data as tensors; None for other data sets (a list is a data set of samples)."""
    from torch.utils.data import TensorDataset

    if type(data) is TensorDataset:
        return Arrays(list(data.tensors), tuple)
    if _is_array(data):
        return Arrays(_tensors([data]), lambda rows: rows[0])
    if isinstance(data, tuple) and data and all(map(_is_array, data)):
        return Arrays(_tensors(data), tuple)
    if isinstance(data, Mapping) and data and all(map(_is_array, data.values())):
        names = list(data)
        return Arrays(_tensors(data.values()), lambda rows: dict(zip(names, rows, strict=True)))
    return None


def _is_array(value: object) -> bool:
    import numpy as np
    import torch

    return isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim > 0


def _tensors(arrays: Iterable[object]) -> list[Tensor]:
    import torch

    with warnings.catch_warnings():
        # A read-only array is never written to: its batches are copies.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensors = [torch.as_tensor(array).detach() for array in arrays]
    if len({len(tensor) for tensor in tensors}) > 1:
        raise FitError(
            "the arrays of a data set differ in length: their shapes are "
            + ", ".join(str(tuple(tensor.shape)) for tensor in tensors),
            allowed="arrays with one row per sample",
            do="check the split that made them",
        )
    return tensors


def _as_map_dataset(data: object) -> MapDataset:
    """Return ``data`` if it is a map-style data set; else raise what to pass instead."""
    from torch.utils.data import IterableDataset

    indexable = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, IterableDataset) or not indexable:
        raise FitError(
            f"fit cannot index a {type(data).__module__}.{type(data).__qualname__}",
            allowed="tensors, arrays, a tuple or dict of them, a data set with __len__ and "
            "__getitem__, an iterable without __getitem__, or a DataLoader",
            do="give it __len__ and __getitem__, or write your own loop with ctx.prepare",
        )
    return cast("MapDataset", data)


# Bytes. A Unix socket's path has at most 107 (man 7 unix), of which multiprocessing needs 32 for
# /pymp-xxxxxxxx/listener-xxxxxxxx below the temporary folder.
_LONGEST_TEMPORARY = 107 - 32


def _check_sockets() -> None:
    """Refuse a temporary folder whose path leaves no room for the workers' sockets.

    A worker that cannot create its socket reports it on stderr only, and the DataLoader waits for
    ever.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _LONGEST_TEMPORARY:
        raise FitError(
            f"DataLoader workers would hang: they send tensors over Unix sockets in {folder}, "
            "and the path of this temporary folder is too long for a socket",
            allowed=f"a path of at most {_LONGEST_TEMPORARY} bytes, or train.num_workers: 0",
            do="start Python with TMPDIR set to a shorter path, such as /tmp",
        )


def seed_sample(seed: int, epoch: int, sample: int) -> None:
    """Seed the global generators for one sample.

    Its random numbers then depend on (seed, epoch, sample), not on the process that loads it.
    """
    seed_generators(seed, "sample", epoch, sample)


def isolated() -> AbstractContextManager[None]:
    """Restore this process's random generators after a block; a worker has its own ones."""
    from torch.utils.data import get_worker_info

    return preserve_random_state() if get_worker_info() is None else nullcontext()


@contextmanager
def noted(where: str) -> Iterator[None]:
    """Add a note to an error raised inside: where it was raised."""
    try:
        yield
    except Exception as error:
        add_note(error, f"[nbtoolkit] {where}")
        raise


class _Keys:
    """A sampler whose keys are set before each iteration."""

    keys: Iterable[_BatchKey] = ()

    def __iter__(self) -> Iterator[_BatchKey]:
        return iter(self.keys)


class _Batches:
    """The batches of a data set, in the form of a data set."""

    def __init__(self, make: _BatchMaker) -> None:
        self._make = make

    def __getitem__(self, key: _BatchKey) -> Batch:
        try:
            return self._make(key)
        except Exception as error:
            return _Failure(error)


class _Failure:
    """An error in place of an item. The DataLoader's own way loses the error's traceback."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def error(self) -> BaseException:
        """Return the error to raise."""
        return self._error

    def __reduce__(self) -> tuple[type[_WorkerFailure], tuple[PackedError]]:
        return _WorkerFailure, (pack_error(self._error),)


class _WorkerFailure(_Failure):
    """A failure that a worker sent."""

    def __init__(self, packed: PackedError) -> None:
        self._packed = packed

    def error(self) -> BaseException:
        """Return the error to raise: its traceback keeps the frames in which it is made."""
        return unpack_error(self._packed)


def _identity(batch: Batch) -> Batch:
    return batch
