"""A handle on a search by its folder: another kernel's, a detached one, or one that has ended."""

from __future__ import annotations

from collections.abc import Callable

from nbtoolkit.runtime.events import Event
from nbtoolkit.runtime.paths import RunPaths, read_record
from nbtoolkit.runtime.screen import Screen
from nbtoolkit.search.handle import SearchHandle


def attach_search(
    paths: RunPaths, *, screen: Screen, on_event: Callable[[Event], None] | None = None
) -> SearchHandle:
    """The handle that fits the kind of search in a folder.

    Args:
        paths: the search's folder.
        screen: what ``result()`` is shown on.
        on_event: called with each event while ``result()`` waits.
    """
    kind = (read_record(paths.versions) or {}).get("kind")
    if kind == "sweep":
        from nbtoolkit.search.sweep import handle_on_sweep

        return handle_on_sweep(paths, screen, on_event=on_event)
    from nbtoolkit.search.cross_validation import handle_on_folds

    return handle_on_folds(paths, screen, on_event=on_event)
