"""Report settings that are set and that the training function never reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config

# The others of these sections take part in the plan, which holds for every training function.
_PLANNED = {
    "optim": ("lr_rule",),
    "train": ("batch_size", "batch_size_per_device", "precision", "gradient_accumulation_steps"),
}
# `checkpoint.every_minutes` is not here: the overlay of a host sets it, not the user.
_ONLY_FIT = {
    "checkpoint": ("every_epochs", "every_steps", "keep_last"),
    "distributed": ("compression", "powersgd_rank"),
    "tracking": ("log_every_n_steps", "record_samples"),
}

_open: list[set[str]] = []  # what was read since a training function began, of its process


def note_read(section: str, name: str) -> None:
    """Note that a setting is read, while a training function runs.

    Args:
        section: the name of the section's class, such as ``Optim``.
        name: the attribute; ``__dict__`` is the whole section (dumps, copies, comparisons).
    """
    for reads in _open:
        reads.add(f"{section.lower()}.{name}")


def note_used(names: Iterable[str] = ("*",)) -> None:
    """Note settings that are used without a look at the config; ``*``: all of them are."""
    for reads in _open:
        reads.update(names)


@contextmanager
def reads_noted() -> Iterator[set[str]]:
    """Note what is read inside the block, in any thread of this process."""
    reads: set[str] = set()
    _open.append(reads)
    try:
        yield reads
    finally:
        _open.remove(reads)


def unread(config: Config, reads: set[str], searched: Iterable[str] = ()) -> str | None:
    """The warning about settings without effect on a function that has returned; None: all had one.

    Args:
        config: the run's.
        reads: what the function read of it.
        searched: settings that are set by a search, also where it chose their defaults.
    """
    if "*" in reads:
        return None
    idle = [name for name in _set(config, {*searched}) if not reads & {name, _whole(name)}]
    if not idle:
        return None
    told = "".join(f"\n    {name} ({config.place(name)})" for name in idle)
    return (
        "settings without effect: only nb.fit uses them, and the training function has ended "
        f"without calling it and without reading them:{told}\n"
        "  Allowed: settings that nb.fit or the training function uses\n"
        f"  Do now:  read them in the function (config.{idle[0]}), call nb.fit, or delete them"
    )


def _whole(name: str) -> str:
    return f"{name.partition('.')[0]}.__dict__"


def _set(config: Config, searched: set[str]) -> Iterator[str]:
    """The names of `nb.fit`'s own settings that are searched or differ from their defaults."""
    for section in (*_PLANNED, *_ONLY_FIT):
        values: Any = getattr(config, section)
        for name in _ONLY_FIT.get(section, type(values).model_fields):
            dotted, default = f"{section}.{name}", type(values).model_fields[name].default
            is_set = dotted in searched or getattr(values, name) != default
            if is_set and name not in _PLANNED.get(section, ()):
                yield dotted
