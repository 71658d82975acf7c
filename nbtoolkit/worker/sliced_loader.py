"""Iterate over one rank's slices of the batches of a loader.

Imports torch and accelerate; import it inside functions only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import DataLoaderShard

from nbtoolkit.worker.even_steps import EvenSteps, Reading, Shares, Uneven


class SlicedLoader(DataLoaderShard):  # type: ignore[misc]
    """A loader of one rank's slices, which tells how even the loop's present batch is.

    Args:
        dataset: of the slices, or of samples.
        name: the user's loader, for error messages.
        shares: how the ranks share its batches; filled while they are sliced.
        steps: is told which batch the loop has.
        options: of ``DataLoaderShard``.
    """

    def __init__(
        self, dataset: object, name: str, shares: Shares, steps: EvenSteps, **options: Any
    ) -> None:
        super().__init__(dataset, **options)
        self._name, self._shares, self._steps = name, shares, steps

    def __iter__(self) -> Iterator[object]:
        reading = Reading(self._name, self._shares.expected)
        sliced: deque[Uneven | None] | None = None
        try:
            for batch in super().__iter__():
                if sliced is None:
                    # The slices of this iteration; another one may begin before this one ends.
                    sliced = self._shares.sliced
                self._steps.read(reading, sliced.popleft())
                yield batch
        finally:
            self._steps.end(reading)
