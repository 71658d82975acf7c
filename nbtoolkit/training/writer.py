"""Writer: puts checkpoints on the shelf beside the training, one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nbtoolkit.errors import CheckpointError
from nbtoolkit.training.shelf import Kind, Shelf


class Writer:
    """A thread that writes while the step loop goes on; both hold the GIL for moments only.

    Args:
        shelf: where the checkpoints go.
        on_saved: called (in the thread) with path, step and kind of each one that is there.

    Attributes:
        seconds: how long the last write took; 0 before the first.
    """

    def __init__(self, shelf: Shelf, on_saved: Callable[[Path, int, Kind], None]) -> None:
        self._shelf, self._on_saved = shelf, on_saved
        self._thread: threading.Thread | None = None
        self._failure: tuple[Kind, Exception] | None = None
        self.seconds = 0.0

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written: its state must stay as it is."""
        return self._thread is not None and self._thread.is_alive()

    def put(
        self, kind: Kind, step: int, parts: Mapping[str, Mapping[str, Any]], about: dict[str, Any]
    ) -> None:
        """Begin to write a checkpoint, once the one before is there. See :meth:`Shelf.put`.

        ``parts`` must stay as they are until :attr:`busy` is false.
        """
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(kind, step, parts, about), name="nbtoolkit-writer"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until what was begun is written, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def failure(self) -> tuple[Kind, Exception] | None:
        """What could not be written since the last call, and why; None: all is there."""
        failure, self._failure = self._failure, None
        return failure

    def _write(
        self, kind: Kind, step: int, parts: Mapping[str, Mapping[str, Any]], about: dict[str, Any]
    ) -> None:
        start = time.monotonic()
        try:
            path = self._shelf.put(kind, step, parts, about)
        except (CheckpointError, OSError) as error:
            self._failure = kind, error
        else:
            self._on_saved(path, step, kind)
        self.seconds = time.monotonic() - start
