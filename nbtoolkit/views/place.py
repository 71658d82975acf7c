"""Place: an output of a cell that is written anew, from any thread; front ends find it by its id.

Since ipykernel 7 what a thread prints or displays goes to whatever cell runs; an update of an
output that has an id goes to where that output is.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping
from typing import Any


class Place:
    """One output of the running cell."""

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._there = False

    def put(self, bundle: Mapping[str, Any]) -> None:
        """Show this here; the first time in the cell that runs, hence from its thread.

        Args:
            bundle: mime type -> content.
        """
        from IPython.display import display

        display(  # type: ignore[no-untyped-call] # not annotated
            dict(bundle), raw=True, display_id=self._id, update=self._there
        )
        self._there = True


def running_cell() -> int | None:
    """The number of the cell that runs; None: there is no kernel."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    return int(shell.execution_count) if hasattr(shell, "kernel") else None
