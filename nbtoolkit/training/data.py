"""Turn a data set into one rank's batches, arrays by blocks, anything else by samples."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from nbtoolkit.errors import FitError
from nbtoolkit.run.serialization import PackedError, add_note, pack_error, unpack_error
from nbtoolkit.training.rng import seed_sample, undisturbed

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.utils.data import DataLoader


# --- loading ---
# Makes one item after the other, in this process or in workers; nobody can tell where.
#
# A ``torch.utils.data.DataLoader`` whose items, errors and effect on this process's random streams
# are the same with any number of workers.


TORCHS_IGNORED = -100
"""torch's default ``ignore_index``."""

_END = object()

# Bytes. A Unix socket's path has at most 107 (man 7 unix), of which multiprocessing needs 32 for
# /pymp-xxxxxxxx/listener-xxxxxxxx below the temporary folder.
_LONGEST_TEMPORARY = 107 - 32


class Loader:
    """Makes items by their keys; its workers live as long as it does.

    Args:
        make: ``make(key)``; each worker has a copy of its own.
        workers: processes that make the items in turns, each two ahead; 0: an item is made here,
            when it is asked for.
        pin: put tensors into page-locked memory, from where a GPU fetches them by itself.

    Raises:
        FitError: workers could not hand over what they make.
    """

    def __init__(self, make: Callable[[Any], Any], *, workers: int, pin: bool) -> None:
        if workers:
            _check_sockets()
        self._maker, self._workers, self._pin = _Maker(make), workers, pin
        self._keys = _Keys()
        self._loader: DataLoader[Any] | None = None
        # What workers draw is their own; 70 us an item are saved.
        self._around: Callable[[], AbstractContextManager[None]]
        self._around = nullcontext if workers else undisturbed

    def items(self, keys: Iterable[Any]) -> Iterator[Any]:
        """``make(key)`` for all ``keys``, in their order; one walk at a time.

        Raises:
            Exception: what ``make`` raised, of its own type, with its traceback and notes. It ends
                the workers; the next walk has others.
        """
        self._keys.keys = keys
        if self._loader is None:
            self._loader = self._start()
        with undisturbed():  # the start of a walk draws a number
            made = iter(self._loader)
        while True:
            with self._around():
                item = next(made, _END)
            if item is _END:
                return
            if isinstance(item, _Failure):
                self._loader = None
                del made  # else the workers would live as long as the error's traceback
                raise item.error()
            yield item

    def _start(self) -> DataLoader[Any]:
        from torch.utils.data import DataLoader

        maker: Any = self._maker  # indexable is all that a data set has to be here
        return DataLoader(
            maker,
            batch_size=None,
            sampler=self._keys,
            num_workers=self._workers,
            collate_fn=_as_it_is,
            pin_memory=self._pin,
            persistent_workers=self._workers > 0,
        )


def _check_sockets() -> None:
    """Refuse a temporary folder whose path leaves no room for the workers' sockets.

    A worker that cannot make its socket says so on stderr only, and the DataLoader waits for ever.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _LONGEST_TEMPORARY:
        raise FitError(
            f"DataLoader workers would hang: they hand over tensors by Unix sockets in {folder}, "
            "and that path of the temporary folder is too long for a socket",
            allowed=f"a path of at most {_LONGEST_TEMPORARY} bytes, or train.num_workers: 0",
            do="start Python with TMPDIR set to a shorter path, such as /tmp",
        )


@contextmanager
def naming(what: str) -> Iterator[None]:
    """An error inside is told, by a note, what was being loaded."""
    try:
        yield
    except Exception as error:
        add_note(error, f"[nbtoolkit] while loading {what}")
        raise


class _Keys:
    """A sampler whose keys are set before each walk."""

    keys: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys)


class _Maker:
    """``make`` in the form of a data set."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._make(key)
        except Exception as error:
            return _Failure(error)


class _Failure:
    """What came instead of an item. The DataLoader's own way loses the error's traceback."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def error(self) -> BaseException:
        """To be raised."""
        return self._error

    def __reduce__(self) -> tuple[Any, ...]:
        return _FailureElsewhere, (pack_error(self._error),)


class _FailureElsewhere(_Failure):
    """One that came from a worker."""

    def __init__(self, packed: PackedError) -> None:
        self._packed = packed

    def error(self) -> BaseException:
        """To be raised; made only now, since its traceback keeps the frames it is made in."""
        return unpack_error(self._packed)


def _as_it_is(item: Any) -> Any:
    return item


# --- data ---


Collate: TypeAlias = Callable[[list[Any]], Any]

_RESIDENT = 512 * 2**20  # arrays up to this many bytes are kept on the device, not sent each step
_BLOCK = 4 * 2**20  # rows are gathered by about so many bytes: saves 8% of a small model's step


class Source(Protocol):
    """A data set that can hand out batches by index."""

    def __len__(self) -> int:
        """Number of samples."""

    def batches(self, indices: Tensor, sizes: Sequence[int], *, epoch: int = 0) -> Iterator[Any]:
        """The samples at ``indices``, cut into batches of ``sizes``, on the device.

        ``epoch`` (0: validation) decides what is drawn at random for a sample.
        """


def make_source(
    data: Any,
    device: torch.device,
    *,
    collate: Collate | None = None,
    workers: int = 0,
    seed: int = 0,
) -> Source:
    """Wrap what the user gave as a data set.

    Random augmentation in a data set is the same whoever loads the sample: before
    ``dataset[index]`` Python's, NumPy's and torch's global random streams (the CPU's) are seeded
    with (seed, epoch, index); ``collate`` goes on with those of the batch's last sample.
    Generators that a data set keeps for itself (``np.random.default_rng``) cannot be reached: make
    them in ``__getitem__``, from ``random.getrandbits(64)``.

    Args:
        data: a ``TensorDataset``, a tensor or array, a tuple or dict of them with equal first
            dimension (fetched a block at a time); or any map-style data set (sample by sample).
        device: where the batches go.
        collate: makes a batch from a list of samples; arrays then go sample by sample, too.
        workers: ``DataLoader`` processes of this rank; arrays need none.
        seed: the run's, for random augmentation.

    Raises:
        FitError: it is none of these, or its arrays differ in length.
    """
    arrays = _as_arrays(data)
    if arrays is None:
        return LoadedSource(_as_dataset(data), device, collate, workers, seed)
    if collate is not None:
        return LoadedSource(_Rows(arrays), device, collate, workers, seed)
    return ArraySource(arrays, device)


class Arrays(NamedTuple):
    """Tensors with one row a sample, and the form in which the user gave them."""

    tensors: list[Tensor]
    rebuild: Callable[[tuple[Tensor, ...]], Any]
    """Rows of the tensors -> a batch (or a sample) in the user's form."""


class ArraySource:
    """Tensors in memory: a batch is a piece of one indexing operation, not a loop over samples."""

    def __init__(self, arrays: Arrays, device: torch.device) -> None:
        tensors, self._rebuild = arrays
        resident = sum(tensor.nbytes for tensor in tensors) <= _RESIDENT
        self._tensors = [tensor.to(device) for tensor in tensors] if resident else tensors
        self._row = max(1, sum(tensor[:1].nbytes for tensor in tensors))
        self._device = device

    def __len__(self) -> int:
        return len(self._tensors[0])

    def batches(self, indices: Tensor, sizes: Sequence[int], *, epoch: int = 0) -> Iterator[Any]:
        """See :class:`Source`; nothing is drawn."""
        indices = indices.to(self._tensors[0].device)
        for start, group in _blocks(sizes, _BLOCK // self._row):
            rows = indices[start : start + sum(group)]
            block = [tensor.index_select(0, rows).to(self._device) for tensor in self._tensors]
            for batch in zip(*(column.split(group) for column in block), strict=True):
                yield self._rebuild(batch)


class LoadedSource:
    """A map-style data set, sample by sample, in worker processes or in this one."""

    def __init__(
        self, dataset: Any, device: torch.device, collate: Collate | None, workers: int, seed: int
    ) -> None:
        self._dataset, self._device = dataset, device
        make = _Batches(dataset, collate, seed)
        self._loader = Loader(make, workers=workers, pin=device.type == "cuda")

    def __len__(self) -> int:
        return len(self._dataset)

    def batches(self, indices: Tensor, sizes: Sequence[int], *, epoch: int = 0) -> Iterator[Any]:
        """See :class:`Source`."""
        from accelerate.utils import send_to_device

        for batch in self._loader.items(_keys(indices, sizes, epoch)):
            yield send_to_device(batch, self._device, non_blocking=True)


class _Batches:
    """Makes batches of a data set: each sample with random streams of its own, then ``collate``.

    A sample is always ``dataset[index]``: ``__getitems__``, which some data sets have to load many
    at once, could not give each its streams.
    """

    def __init__(self, dataset: Any, collate: Collate | None, seed: int) -> None:
        from torch.utils.data import default_collate

        self._dataset, self._collate, self._seed = dataset, collate or default_collate, seed

    def __call__(self, key: tuple[int, list[int]]) -> Any:
        epoch, indices = key
        samples = [self._sample(epoch, index) for index in indices]
        with naming(f"a batch of the samples {indices}"):
            return self._collate(samples)

    def _sample(self, epoch: int, index: int) -> Any:
        seed_sample(self._seed, epoch, index)
        with naming(f"sample {index} of the data set"):
            return self._dataset[index]


def _keys(indices: Tensor, sizes: Sequence[int], epoch: int) -> Iterator[tuple[int, list[int]]]:
    """What :class:`_Batches` needs to know of each batch."""
    start = 0
    for size in sizes:
        yield epoch, indices[start : start + size].tolist()
        start += size


class _Rows:
    """Arrays as a data set of samples, for a ``collate`` that wants those."""

    def __init__(self, arrays: Arrays) -> None:
        self._tensors, self._rebuild = arrays

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, index: int) -> Any:
        return self._rebuild(tuple(tensor[index] for tensor in self._tensors))


def _blocks(sizes: Sequence[int], rows: int) -> Iterator[tuple[int, list[int]]]:
    """Group consecutive batches to blocks of at most ``rows`` rows (or one batch): start, sizes."""
    start, group, held = 0, list[int](), 0
    for size in sizes:
        if group and held + size > rows:
            yield start, group
            start, group, held = start + held, [], 0
        group.append(size)
        held += size
    if group:
        yield start, group


def _as_arrays(data: Any) -> Arrays | None:
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


def _is_array(value: Any) -> bool:
    import numpy as np
    import torch

    return isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim > 0


def _tensors(arrays: Iterable[Any]) -> list[Tensor]:
    import torch

    with warnings.catch_warnings():
        # A read-only array is never written to: its batches are copies.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensors = [torch.as_tensor(array).detach() for array in arrays]
    if len({len(tensor) for tensor in tensors}) > 1:
        raise FitError(
            "the arrays of a data set differ in length: their shapes are "
            + ", ".join(str(tuple(tensor.shape)) for tensor in tensors),
            allowed="arrays with one row a sample",
            do="check the split that made them",
        )
    return tensors


def _as_dataset(data: Any) -> Any:
    """``data`` when it is a map-style data set; else says what to pass instead."""
    from torch.utils.data import DataLoader, IterableDataset

    allowed = (
        "tensors, arrays, a tuple or dict of them, a data set with __len__ and __getitem__, or an "
        "iterable without __getitem__"
    )
    if isinstance(data, DataLoader):
        raise FitError(
            "fit was given a DataLoader, but makes the batches itself (of train.batch_size)",
            allowed=allowed,
            do="pass loader.dataset (and collate=loader.collate_fn)",
        )
    indexable = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, IterableDataset) or not indexable:
        raise FitError(
            f"fit cannot index a {type(data).__module__}.{type(data).__qualname__}",
            allowed=allowed,
            do="give it __len__ and __getitem__, or write a loop of your own with ctx.prepare",
        )
    return data
