"""Note which settings are read, to name those that have no effect.

A rank keeps one set of names: those below `model` and `data` that code asks for, and the searched
ones that the training function reads. To read any other setting has no effect.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config

ALL = "*"
"""Among the names: all settings but those below `model` and `data` are used."""
FORKED = "forked"
"""Among the names: the function has forked, and what loader workers read is not known here."""

# The names of this process, and of the one that sent the configuration: a notebook may read a
# setting before a launch.
_names: set[str] = set()
# Whether a training function runs in this process.
_training = False


def names() -> frozenset[str]:
    """Return the names that have been read."""
    return frozenset(_names)


def note(*names: str) -> None:
    """Note names that are read; ``model.*`` stands for a whole section."""
    _names.update(names)


def note_dump(*names: str) -> None:
    """Note what is written as a whole: nbtoolkit does that, too, but not in a training function."""
    if _training:
        _names.update(names)


# Settings that take part in the plan, and so have an effect without nb.fit.
_PLANNED = """
optim.lr_rule train.batch_size train.batch_size_per_device train.gradient_accumulation_steps
train.precision
"""


def only_if_read(names: Iterable[str]) -> list[str]:
    """Return the settings that have an effect only if nb.fit or the function reads them."""
    sections = ("optim.", "train.")
    return [name for name in names if name.startswith(sections) and name not in _PLANNED.split()]


@contextmanager
def noting(config: Config, searched: Iterable[str]) -> Iterator[None]:
    """Note what a training function reads inside the block.

    Args:
        config: the run's configuration.
        searched: the parameters of its trial.
    """
    global _training
    watched = only_if_read(searched)
    _names.difference_update({ALL, FORKED, *watched})
    settings = [(type(getattr(config, name.partition(".")[0])), name) for name in watched]
    for kind, name in settings:
        setattr(kind, name.partition(".")[2], _noting(name))
    _training = True
    try:
        yield
    finally:
        _training = False
        for kind, name in settings:
            delattr(kind, name.partition(".")[2])


def _noting(name: str) -> property:
    """Return a property for a section's class; Python prefers it to the value in ``__dict__``."""

    def read(section: object) -> Any:
        note(name)
        return vars(section)[name.partition(".")[2]]

    return property(read)


os.register_at_fork(before=lambda: note_dump(FORKED))
