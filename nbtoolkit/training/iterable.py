"""IterableFeed: a training set without an index; every rank reads it, and takes its part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from nbtoolkit.errors import FitError
from nbtoolkit.training.data import Collate
from nbtoolkit.training.loading import Loader, naming
from nbtoolkit.training.order import Order, Share, check_steps
from nbtoolkit.training.samples import Pass, SampleLog
from nbtoolkit.training.seeding import seed_sample

if TYPE_CHECKING:
    import torch

_END = object()


class IterableFeed:
    """A stream of samples, in its own order; see :class:`~nbtoolkit.training.feed.Feed`.

    Each rank reads the whole stream and makes batches of its part of every global batch only. So
    all of them see its end, and weight the uneven last step without asking each other. The stream
    must be the same on all ranks: not one that gives each rank or node a part.

    Before each epoch ``set_epoch(epoch)`` of the data set is called if it has that (a Hugging Face
    ``IterableDataset`` has), which is to shuffle it anew. A resumed epoch reads the samples that
    are done once more; they make no batches. (The ``skip(n)`` of a shuffled Hugging Face stream
    gives another order from the second epoch on: datasets 5.2.) Random numbers from Python's,
    NumPy's and torch's global streams (the CPU's) are seeded with (seed, epoch) before ``__iter__``
    and with (seed, epoch, position) before each sample: every rank draws the same.
    """

    def __init__(
        self,
        data: Any,
        order: Order,
        device: torch.device,
        *,
        length: int | None = None,
        collate: Collate | None = None,
        workers: int = 0,
        log: SampleLog | None = None,
        what: str = "training",
    ) -> None:
        """Prepare to read.

        Args:
            data: has ``__iter__``.
            order: how a step is divided; its size does not matter.
            device: where the batches go.
            length: samples in one epoch; None: not known.
            collate: makes a batch from a list of samples; default: torch's.
            workers: 0, or 1: read in a process of its own (two would mix up the order).
            log: where the samples of every step are noted.
            what: the set's name, for messages.
        """
        self._order, self._device, self._length, self._log = order, device, length, log
        self._what = what
        self._walks = 0
        self._ends: dict[int, int] = {}  # epoch -> its samples, once they are all read
        self._loader = Loader(
            _Reader(data, order, collate), workers=workers, pin=device.type == "cuda"
        )

    @property
    def steps(self) -> int | None:
        """See :class:`~nbtoolkit.training.feed.Feed`."""
        return None if self._length is None else replace(self._order, size=self._length).steps

    def walk(
        self, epoch: int, *, skip: int = 0, limit: int | None = None
    ) -> Iterator[tuple[Any, Share]]:
        """See :class:`~nbtoolkit.training.feed.Feed`.

        Raises:
            FitError: the epoch has no step, or not as many samples as the stream said.
        """
        passes = self._passes(epoch, skip, limit)
        if self._log is not None:
            return self._log.noting(epoch, skip, passes)
        return ((batch, share) for batch, share, _ in passes)

    def sample_ids(self, epoch: int, step: int) -> list[int]:
        """See :class:`~nbtoolkit.training.feed.Feed`."""
        start = step * self._order.batch
        end = start + self._order.batch
        return list(range(start, min(end, self._ends.get(epoch, end))))

    def _passes(self, epoch: int, skip: int, limit: int | None) -> Iterator[Pass]:
        from accelerate.utils import send_to_device

        self._walks += 1
        key = _Walk(self._walks, epoch, skip * self._order.batch)
        keys = repeat(key) if limit is None else repeat(key, limit)
        for number, step in enumerate(self._loader.items(keys), start=skip):
            ended = step.size < self._order.batch
            self._check(epoch, number, step.size, ended, resumed=number == skip > 0)
            shares = replace(self._order, size=step.size).shares
            for batch, share, ids in zip(step.batches, shares, step.ids, strict=True):
                yield send_to_device(batch, self._device, non_blocking=True), share, ids
            if ended:
                return

    def _check(self, epoch: int, step: int, size: int, ended: bool, *, resumed: bool) -> None:
        """Refuse what the last step, of ``size`` samples, shows the stream to be."""
        samples = step * self._order.batch + size
        if resumed and size == 0:
            return  # the epoch was done already; how long it was is not seen
        if ended:
            self._ends[epoch] = samples
        if samples == 0:
            raise FitError(
                f"the {self._what} stream gives no sample in epoch {epoch}",
                allowed="an iterable that begins anew in every epoch (a generator is used up once)",
                do="pass an object whose __iter__ makes the generator",
            )
        length = self._length
        if length is not None and (samples > length or (ended and samples < length)):
            raise FitError(
                f"the {self._what} stream gave {samples} samples in epoch {epoch}, but its len() "
                f"is {length}",
                allowed="a length that is the number of samples, or none",
                do="correct its __len__, or remove it and set train.max_steps",
            )
        check_steps(replace(self._order, size=samples))


class _Walk(NamedTuple):
    """What the reader needs to know; the same for every step of one walk."""

    number: int
    epoch: int
    skip: int  # samples


class _Step(NamedTuple):
    """This rank's part of one optimizer step."""

    size: int
    """Samples of the global batch; fewer than a whole one, or none: the stream is at its end."""
    ids: list[list[int]]
    """Their positions in the stream, pass by pass; a stand-in has none."""
    batches: list[Any]


class _Reader:
    """Reads a stream, step after step; it stays where it is between two calls."""

    def __init__(self, data: Any, order: Order, collate: Collate | None) -> None:
        from torch.utils.data import default_collate

        self._data, self._order, self._collate = data, order, collate or default_collate
        self._walk: _Walk | None = None
        self._samples: Iterator[tuple[int, Any]] = iter(())

    def __call__(self, walk: _Walk) -> _Step:
        if walk != self._walk:
            self._walk, self._samples = walk, self._opened(walk)
        return self._step(list(islice(self._samples, self._order.batch)))

    def _opened(self, walk: _Walk) -> Iterator[tuple[int, Any]]:
        """The stream's samples, with their positions, after what is to be skipped."""
        stream = self._begun(walk.epoch)
        for position in count():
            seed_sample(self._order.seed, walk.epoch, position)
            what = f"sample {position} of the stream in epoch {walk.epoch}"
            with naming(what), _not_as_a_worker():
                sample = next(stream, _END)
            if sample is _END:
                return
            if position >= walk.skip:
                yield position, sample

    def _begun(self, epoch: int) -> Iterator[Any]:
        if callable(getattr(self._data, "set_epoch", None)):
            self._data.set_epoch(epoch)
        seed_sample(self._order.seed, epoch, -1)  # __iter__ may shuffle
        with _not_as_a_worker():
            return iter(self._data)

    def _step(self, samples: list[tuple[int, Any]]) -> _Step:
        """What this rank needs of one global batch."""
        import torch

        order = replace(self._order, size=len(samples))
        mine = iter(order.mine(torch.arange(len(samples))).tolist())
        ids, batches = [], []
        for size, share in zip(order.sizes, order.shares, strict=True):
            some = [samples[i] for i in islice(mine, size)]
            ids.append([position for position, _ in some][: share.samples])
            with naming(f"a batch of the samples {ids[-1]} of the stream"):
                batches.append(self._collate([sample for _, sample in some]))
        return _Step(len(samples), ids, batches)


@contextmanager
def _not_as_a_worker() -> Iterator[None]:
    """Inside, nothing tells that this is a DataLoader's worker.

    A data set may give each worker a part; a Hugging Face stream shuffles in another order as soon
    as there is a worker (datasets 5.2). But a stream is read by one alone, or by none.
    """
    from torch.utils.data._utils import worker

    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info


def is_iterable(data: Any) -> bool:
    """Whether a training set is to be read as a stream: it can be iterated, but not indexed."""
    from torch.utils.data import DataLoader, IterableDataset

    if isinstance(data, DataLoader):
        return False
    iterable = hasattr(data, "__iter__") and not hasattr(data, "__getitem__")
    return isinstance(data, IterableDataset) or iterable  # IterableDataset has a __getitem__


def length_of(data: Any) -> int | None:
    """Samples in one epoch of an iterable; None: it does not say."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None
