"""Define the command that shows a run in a terminal and presses the panel's buttons."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nbtoolkit.cli import DONE, EARLY, FAILED, Debug, import_from_cwd, report_errors
from nbtoolkit.cli import app as app
from nbtoolkit.errors import LaunchError

if TYPE_CHECKING:
    from nbtoolkit.run.paths import RunPaths
    from nbtoolkit.views.state import State

_SECONDS = 1.0  # between two updates
_CLEAR = "\x1b[H\x1b[J"


@app.command()
def panel(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Its folder or id; default: the newest.")
    ] = None,
    source: Annotated[
        Path, typer.Option("--source", help="The output folder with the run ids.")
    ] = Path("outputs"),
    press: Annotated[
        str | None,
        typer.Option(
            metavar="BUTTON", help="pause, resume, stop, train_best, add_trials=N or stop_trial=N."
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow/--once", help="Show it until it ends, or once.")
    ] = True,
    debug: Debug = False,
) -> None:
    """Show a run, a sweep or a cross-validation until it ends; Ctrl-C does not stop it."""
    from nbtoolkit.views.state import State

    with report_errors(debug):
        state = State(_find_run(run, source))
        state.refresh()
        if press is not None:
            state = _press(press, state)
        if follow and state.live:
            _follow(state)
        print(_page(state))
    raise typer.Exit(_exit_code(state.status))


def _find_run(run: str | None, source: Path) -> RunPaths:
    from nbtoolkit.run.paths import find_run, runs_in

    if run is not None:
        return find_run(run, source)
    for paths in runs_in(source):
        return paths
    raise LaunchError(
        f"there is no run in {source.absolute()}",
        allowed="a folder with runs",
        do="--source FOLDER, or the run's own folder",
    )


def _press(button: str, state: State) -> State:
    """Press a button of the panel; return the state of the run to show then."""
    from nbtoolkit.panel.actions import press
    from nbtoolkit.views.state import read_state

    import_from_cwd()
    return read_state(press(button, state))


def _follow(state: State) -> None:
    """Wait until the run ends; a terminal shows as much of the page as fits."""
    try:
        while not state.over:
            if sys.stdout.isatty():
                lines = shutil.get_terminal_size().lines - 1
                print(_CLEAR + "\n".join(_page(state).splitlines()[:lines]), flush=True)
            time.sleep(_SECONDS)
            state.refresh()
    except KeyboardInterrupt:
        pass  # ends the view, not the run


def _page(state: State) -> str:
    from nbtoolkit.views.text import page_text

    return page_text(state)


def _exit_code(status: str) -> int:
    if status in ("stopped", "deadline", "cut off", "gone"):
        return EARLY
    return FAILED if status == "failed" else DONE
