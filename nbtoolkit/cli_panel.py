"""The verb that watches a run from a terminal, and presses the panel's buttons there."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nbtoolkit.cli import DONE, EARLY, FAILED, Debug, sentences
from nbtoolkit.cli import app as app
from nbtoolkit.errors import LaunchError

if TYPE_CHECKING:
    from nbtoolkit.run.paths import RunPaths
    from nbtoolkit.views.state import State

_SECONDS = 1.0  # between two looks
_CLEAR = "\x1b[H\x1b[J"


@app.command()
def panel(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Its folder or id; none: the newest.")
    ] = None,
    source: Annotated[
        Path, typer.Option("--source", help="The output folder, in which ids are looked for.")
    ] = Path("outputs"),
    press: Annotated[
        str | None,
        typer.Option(
            metavar="BUTTON", help="pause, go_on, stop, train_best, add_trials=N or stop_trial=N."
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow/--once", help="Look until it ends, or once.")
    ] = True,
    debug: Debug = False,
) -> None:
    """Show a run, a sweep or a cross-validation until it ends; Ctrl-C leaves it running."""
    from nbtoolkit.views.state import State

    with sentences(debug):
        state = State(_paths(run, source))
        state.refresh()
        if press is not None:
            state = _press(press, state)
        if follow and state.live:
            _follow(state)
        print(_page(state))
    raise typer.Exit(_code(state.status))


def _paths(run: str | None, source: Path) -> RunPaths:
    from nbtoolkit.run.paths import find_run, runs_in

    if run is not None:
        return find_run(run, source)
    for paths in runs_in(source):
        return paths
    raise LaunchError(
        f"there is no run in {source.absolute()}",
        allowed="a folder into which runs were written",
        do="--source FOLDER, or the run's own folder",
    )


def _press(wish: str, state: State) -> State:
    """Press a button of the panel; what is watched then."""
    from nbtoolkit.panel.actions import press
    from nbtoolkit.views.state import read_state

    if "" not in sys.path:
        sys.path.insert(0, "")  # the task's own module, as `python -m` finds it
    return read_state(press(wish, state))


def _follow(state: State) -> None:
    """Look until it ends; in a terminal, write as much of the page as it holds each time."""
    try:
        while not state.over:
            if sys.stdout.isatty():
                lines = shutil.get_terminal_size().lines - 1
                print(_CLEAR + "\n".join(_page(state).splitlines()[:lines]), flush=True)
            time.sleep(_SECONDS)
            state.refresh()
    except KeyboardInterrupt:
        pass  # whoever watches has seen enough; it goes on


def _page(state: State) -> str:
    from nbtoolkit.views.trials import page_text

    return page_text(state)


def _code(status: str) -> int:
    if status in ("stopped", "deadline", "cut off", "gone"):
        return EARLY
    return FAILED if status == "failed" else DONE
