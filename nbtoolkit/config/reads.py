"""Note which settings the code of this process asks for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# One set of read settings for each open `record_reads` block.
_recordings: list[set[str]] = []

# Names below `model` and `data` that code outside of training functions has asked for, of this
# process or of the one that sent the configuration: a notebook may read a setting before a launch.
_asked: set[str] = set()

FORKED = "forked"
"""Among the reads: the function has forked, and what loader workers read is not known here."""


def mark_read(section: str, name: str) -> None:
    """Record that a setting is read, if a training function runs in this process.

    Args:
        section: the name of the section's class, such as ``Optim``.
        name: the attribute; ``__dict__`` is the whole section (dumps, copies, comparisons).
    """
    for reads in _recordings:
        reads.add(f"{section.lower()}.{name}")


def mark_asked(section: str, name: str, *, only_recorded: bool = False) -> None:
    """Record that code asks for a name in a section of the user's own.

    Args:
        section: its dotted name, such as ``model`` or ``model.block``.
        name: it need not exist; ``*`` stands for the whole section.
        only_recorded: not outside a training function: nbtoolkit itself writes whole sections.
    """
    dotted = f"{section}.{name}"
    for reads in _recordings:
        reads.add(dotted)
    if not _recordings and not only_recorded:
        _asked.add(dotted)


def names_asked() -> frozenset[str]:
    """The names that code outside of training functions has asked for so far."""
    return frozenset(_asked)


def add_asked(names: Iterable[str]) -> None:
    """Add the names that another process has asked for."""
    _asked.update(names)


def mark_used(names: Iterable[str] = ("*",)) -> None:
    """Record settings that are used without reading the config; ``*`` stands for all settings."""
    for reads in _recordings:
        reads.update(names)


@contextmanager
def record_reads() -> Iterator[set[str]]:
    """Record the settings that any thread of this process reads inside the block."""
    reads = {*_asked}
    _recordings.append(reads)
    try:
        yield reads
    finally:
        _recordings.remove(reads)


def _note_fork() -> None:
    mark_used([FORKED])


os.register_at_fork(before=_note_fork)
