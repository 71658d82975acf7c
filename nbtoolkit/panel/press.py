"""Press: a panel's button pressed without a panel, on a folder: what the command line does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from nbtoolkit.errors import LaunchError
from nbtoolkit.panel import actions
from nbtoolkit.panel.draft import Checked
from nbtoolkit.panel.rules import pressable
from nbtoolkit.runtime.result import RunHandle
from nbtoolkit.views.state import State

_COUNTED = {"add_trials": actions.add_trials, "stop_trial": actions.stop_trial}
_PLAIN = {"pause": actions.pause, "stop": actions.stop}
_STARTING: dict[str, Callable[[State], RunHandle]] = {
    "go_on": partial(actions.go_on, train=None),
    "train_best": actions.launch_best,
}


def press(wish: str, state: State) -> Path:
    """Press a button.

    Args:
        wish: its name, as in :meth:`nbtoolkit.panel.panel.Panel.press`; those that need a number
            with one: ``"add_trials=5"``, ``"stop_trial=3"``.
        state: of the folder, just looked at.

    Returns:
        The folder to be watched then: of what was started, else the same.

    Raises:
        LaunchError: it cannot be pressed now, or its number is missing or none.
    """
    button, _, number = wish.partition("=")
    can = sorted(pressable(state, Checked()) & {*_COUNTED, *_PLAIN, *_STARTING})
    if button not in can:
        raise LaunchError(
            f"{button} cannot be pressed: {state.paths.run_id} is {state.status}",
            allowed=", ".join(can) or "nothing",
            do="look at the run first",
        )
    if button in _COUNTED:
        _COUNTED[button](state, _number(button, number))
    elif button in _PLAIN:
        _PLAIN[button](state)
    elif button == "go_on" and state.status == "paused":
        actions.resume(state)
    else:
        return _STARTING[button](state).paths.folder
    return state.paths.folder


def _number(button: str, text: str) -> int:
    if not text.isdecimal():
        raise LaunchError(
            f"{button} was given {text!r}",
            allowed="a whole number",
            do=f"for example {button}=3",
        )
    return int(text)
