"""Page: all that is told of a folder, one view below the other, as text and as HTML."""

from __future__ import annotations

from nbtoolkit.views.curves import curves, history
from nbtoolkit.views.devices import devices, devices_text
from nbtoolkit.views.overview import overview, overview_text
from nbtoolkit.views.state import State
from nbtoolkit.views.trials import trials, trials_text


def page_text(state: State | None) -> str:
    """How it is, its trials or folds and its devices, as lines of text.

    Args:
        state: of the folder; None: nothing is watched.
    """
    parts = [overview_text(state), trials_text(state), devices_text(state)]
    return "\n\n".join(part for part in parts if part)


def page_html(state: State | None) -> str:
    """The same as HTML, with curves."""
    return "".join(view(state) for view in (overview, trials, history, curves, devices))
