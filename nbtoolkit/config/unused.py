"""Warn of settings that have had no effect on a training function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel

from nbtoolkit.config.aliases import FREE, similar_name
from nbtoolkit.config.reads import FORKED

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config

# Settings that take part in the plan, and so have an effect without nb.fit.
_PLANNED = {
    "optim": ("lr_rule",),
    "train": ("batch_size", "batch_size_per_device", "precision", "gradient_accumulation_steps"),
}
# Settings of other sections that only nb.fit uses. `checkpoint.every_minutes` is not listed: the
# host's overlay sets it, not the user.
_ONLY_FIT = {
    "checkpoint": ("every_epochs", "every_steps", "keep_last"),
    "distributed": ("compression", "powersgd_rank"),
    "tracking": ("log_every_n_steps", "record_samples"),
}


def unused_names(config: Config, reads: set[str], searched: Iterable[str] = ()) -> list[str]:
    """The settings of ``nb.fit`` that a function without it did not read.

    Args:
        config: the run's configuration.
        reads: the settings that the function read.
        searched: settings that a search sets, even to their defaults.
    """
    if "*" in reads:
        return []
    return [
        name
        for name in _fit_settings(config, {*searched})
        if not reads & {name, f"{name.partition('.')[0]}.__dict__"}
    ]


def unused_settings(config: Config, unused: Sequence[str]) -> str | None:
    """Return a warning about :func:`unused_names`, or None."""
    if not unused:
        return None
    listed = "".join(f"\n    {name} ({config.place(name)})" for name in unused)
    return (
        "settings without effect: only nb.fit uses them, and the training function has ended "
        f"without calling it and without reading them:{listed}\n"
        "  Allowed: settings that nb.fit or the training function uses\n"
        f"  Do now:  read them in the function (config.{unused[0]}), call nb.fit, or delete them"
    )


def unread_names(config: Config, reads: set[str]) -> dict[str, str]:
    """The settings below ``model`` and ``data`` that no code has read by the end of the function.

    Args:
        config: the run's configuration.
        reads: the settings that the function and the code before it read.

    Returns:
        Their dotted names, each with the similar name that was asked for in vain, or "". After a
        fork, as for the workers of a ``DataLoader``, only those with a similar name.
    """
    names = [name for section in FREE for name in _names(config, section)]
    asked = [name for name in reads if name.partition(".")[0] in FREE and name not in names]
    unread = {}
    for name in names:
        parts = name.split(".")
        wholes = {".".join([*parts[:length], "*"]) for length in range(1, len(parts))}
        if "config.__dict__" in reads or reads & {name, *wholes}:
            continue
        section = name.rpartition(".")[0]
        near = similar_name(name, [one for one in asked if one.rpartition(".")[0] == section])
        if near or FORKED not in reads:
            unread[name] = near or ""
    return unread


def unread_settings(config: Config, unread: Mapping[str, str]) -> str | None:
    """Return a warning about :func:`unread_names`, or None."""
    if not unread:
        return None
    listed = "".join(
        f"\n    {name} ({config.place(name)})" + (f": did you mean {near}?" if near else "")
        for name, near in unread.items()
    )
    first = next(iter(unread))
    return (
        f"settings without effect: nobody has read them, in the function or before it:{listed}\n"
        "  Allowed: settings that the notebook or the training function reads\n"
        f"  Do now:  correct the names, read them (config.{first}), or delete them"
    )


def _names(config: Config, section: str) -> list[str]:
    """The dotted names of the values in a section of the user's own; overlays set none there."""
    from nbtoolkit.config.schema import flat_settings

    return [*flat_settings(getattr(config, section).to_dict(), f"{section}.")]


def _fit_settings(config: Config, searched: set[str]) -> Iterator[str]:
    """Yield the names of nb.fit's settings that are searched or differ from their defaults."""
    for section in (*_PLANNED, *_ONLY_FIT):
        values: BaseModel = getattr(config, section)
        fields_of = type(values).model_fields
        for name in _ONLY_FIT.get(section, fields_of):
            dotted = f"{section}.{name}"
            is_set = dotted in searched or getattr(values, name) != fields_of[name].default
            if is_set and name not in _PLANNED.get(section, ()):
                yield dotted
