"""Loader: makes one item after the other, in this process or in workers; nobody can tell where.

A ``torch.utils.data.DataLoader`` whose items, errors and effect on this process's random streams
are the same with any number of workers.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import FitError
from nbtoolkit.runtime.crossing import add_note, pack_error, unpack_error
from nbtoolkit.training.seeding import undisturbed

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

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
            allowed=f"a path of at most {_LONGEST_TEMPORARY} bytes, or train.workers: 0",
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

    def __init__(self, packed: dict[str, Any]) -> None:
        self._packed = packed

    def error(self) -> BaseException:
        """To be raised; made only now, since its traceback keeps the frames it is made in."""
        return unpack_error(self._packed)


def _as_it_is(item: Any) -> Any:
    return item
