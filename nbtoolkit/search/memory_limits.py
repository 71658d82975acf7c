"""Learn which parameters of a sweep need more memory than there is."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SIZE = re.compile(
    r"size|width|height|depth|hidden|layers?|channels|filters|dims?|units|neurons|features|blocks"
    r"|length|resolution|embed(ding)?|d_model|multiplier"
)
# Larger values of these need no more memory, or less.
_NO_SIZE = re.compile(r"patch|stride|kernel|pool|groups?|chunk|bucket|accumulat|dropout|decay|rate")
_NO_MEMORY = re.compile(r"optim\.(?!name$)|seed$|train\.(epochs|max_steps)$")


class MemoryLimits:
    """The parameters of trials that ran out of memory, and which others would, too.

    A trial is expected to run out of memory if its parameters are no smaller than those of one
    that did:

    - sizes (numbers whose name has a word such as ``batch_size``, ``hidden``, ``layers`` or
      ``width``) are as large or larger: memory is assumed to grow with each of them;
    - other whole numbers, texts and lists are equal, and so is the set of parameters;
    - other floats, ``optim.*`` but ``optim.name``, ``seed``, ``train.epochs`` and
      ``train.max_steps`` do not count: memory is assumed not to depend on them.

    Only what has run out of memory in this session counts: the next one may have other devices.
    """

    def __init__(self) -> None:
        self._failed: dict[int, dict[str, object]] = {}

    def add(self, number: int, params: Mapping[str, object]) -> None:
        """Note that a trial has run out of memory; one without a size says nothing on others."""
        if any(map(_is_size, params)):
            self._failed[number] = dict(params)

    def why_not(self, params: Mapping[str, object]) -> str | None:
        """Return why a trial with these parameters would not fit; None if it may."""
        for number, failed in self._failed.items():
            if failed.keys() == params.keys() and all(
                _no_smaller(name, params[name], value) for name, value in failed.items()
            ):
                sizes = [f"{name} {value}" for name, value in failed.items() if _is_size(name)]
                least = ", ".join(sizes)
                return f"not started: trial {number} ran out of memory with no more ({least})"
        return None


def _is_size(name: str) -> bool:
    last = name.rpartition(".")[2]
    return bool(_SIZE.search(last)) and not _NO_SIZE.search(last)


def _no_smaller(name: str, value: object, failed: object) -> bool:
    if _NO_MEMORY.match(name):
        return True
    if isinstance(value, bool) or not _is_size(name):
        return value == failed or (isinstance(value, float) and isinstance(failed, float))
    if isinstance(value, (int, float)) and isinstance(failed, (int, float)):
        return value >= failed
    return value == failed
