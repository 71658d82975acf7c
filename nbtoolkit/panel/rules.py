"""Rules: which buttons can be pressed, by what the folder and the form say."""

from __future__ import annotations

from nbtoolkit.panel.draft import Checked
from nbtoolkit.search.table import SweepTable
from nbtoolkit.views.state import State

BUTTONS = {
    "launch": ("Launch", "Train once with these settings, on every device"),
    "sweep": ("Sweep", "Search for the best settings; it goes on when the kernel ends"),
    "pause": ("Pause", "Finish what runs and start nothing more"),
    "go_on": ("Go on", "Take a paused or unfinished run up where it was"),
    "stop": ("Stop", "Let everything leave at its next report; Go on takes it up again"),
    "add_trials": ("Add trials", "Run as many more as the number beside says"),
    "stop_trial": ("Stop trial", "Let the trial of the number beside end at its next report"),
    "train_best": ("Train the best", "Train once with the best settings of the sweep"),
}
"""Name -> label and tooltip."""


def pressable(state: State | None, checked: Checked, starting: bool = False) -> set[str]:
    """The names of the buttons that can be pressed.

    A panel starts one thing at a time: a second press, even a fast one, finds that something runs.

    Args:
        state: of what is watched; None: nothing is.
        checked: of the form.
        starting: whether a notebook is at work whose run is not there yet.
    """
    if starting:
        return {"stop"}
    free = state is None or not state.live
    names = {
        "launch": free and checked.config is not None,
        "sweep": free and checked.wishes is not None,
    }
    if state is not None:
        lost = state.gone or bool(state.unreadable)
        going = state.kind == "sweep" and state.live
        ended = isinstance(state.table, SweepTable) and state.ended is not None
        names |= {
            "pause": state.kind != "run" and state.status == "running",
            "go_on": state.status == "paused" or state.unfinished,
            "stop": state.live,
            "add_trials": going,
            "stop_trial": going,
            "train_best": ended and not lost and bool(_best(state)),
        }
    return {name for name, can in names.items() if can}


def why_not(name: str, state: State | None, checked: Checked, starting: bool) -> str:
    """Why nothing can be started now, to follow a sentence; empty: there is no telling.

    Args:
        name: the button's.
        state: see :func:`pressable`.
        checked: the same.
        starting: the same.
    """
    if name not in ("launch", "sweep"):
        return ""
    if starting:
        return ": a notebook is starting"
    if state is not None and state.live:
        return f": {state.paths.run_id} is {state.status}; watch(None) leaves it running"
    wrong = [f"{setting}: {text}" for setting, text in checked.errors.items()]
    wrong += [text for text in (checked.together, checked.space_error) if text]
    if not wrong and name == "sweep" and checked.wishes is None:
        wrong = ["there is no space to search"]
    return "".join(f": {text}" for text in wrong[:1])


def _best(state: State) -> bool:
    return isinstance(state.table, SweepTable) and bool(state.table.best)
