"""Warn of settings that have had no effect on a training function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from nbtoolkit.config import reads
from nbtoolkit.config.aliases import similar_name
from nbtoolkit.config.fields import FREE, flat_settings

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config


def unread_names(config: Config, searched: Iterable[str] = ()) -> dict[str, str]:
    """Return the user's own settings, and the searched ones, that the training function ignores.

    Args:
        config: the run's configuration.
        searched: the parameters of its trial.

    Returns:
        Their dotted names, each with the similar name that was asked for in vain, or "". After a
        fork, as for the workers of a ``DataLoader``, only those with a similar name.
    """
    read = reads.names()
    user_settings: list[str] = []
    for section in FREE:
        user_settings += flat_settings(getattr(config, section).to_dict(), f"{section}.")
    asked = [name for name in read if name.partition(".")[0] in FREE and name not in user_settings]
    unread = {}
    for name in user_settings + ([] if reads.ALL in read else reads.only_if_read(searched)):
        parts = name.split(".")
        wholes = {".".join([*parts[:length], "*"]) for length in range(1, len(parts))}
        if read & {name, *wholes}:
            continue
        section = name.rpartition(".")[0]
        near = similar_name(name, [other for other in asked if other.rpartition(".")[0] == section])
        if near or reads.FORKED not in read:
            unread[name] = near or ""
    return unread


def warning(config: Config, unread: Mapping[str, str]) -> str | None:
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
        "  Allowed: settings that the notebook, the training function or nb.fit reads\n"
        f"  Do now:  correct the names, read them (config.{first}), or delete them"
    )
