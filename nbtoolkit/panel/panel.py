"""Build the panel (``nb.panel``) to set, launch, watch, stop and resume from a cell."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nbtoolkit.config.schema import Config, ConfigLike, as_config
from nbtoolkit.errors import LaunchError, MissingExtra
from nbtoolkit.panel.actions import space_text
from nbtoolkit.panel.controller import Controller
from nbtoolkit.panel.form import Draft
from nbtoolkit.run.paths import find_run

# --- a cell that is run again ---
# A cell that is run again replaces its panel.
#
# Else the one before would go on looking and drawing, for widgets that nobody sees: ten runs of a
# cell, and the browser gets every table ten times a second.


class Closes(Protocol):
    """What can be closed."""

    def close(self) -> None:
        """End it."""


_MADE: dict[str, tuple[int, list[Closes]]] = {}
"""Cell -> which run of a cell made panels in it last, and those."""


def replace(panel: Closes, modules: Mapping[str, Any] | None = None) -> None:
    """Keep a new panel, and close those that an earlier run of the same cell has made.

    Args:
        panel: made in the cell that runs now.
        modules: the modules imported so far; default: this process's.
    """
    cell, number = _running(sys.modules if modules is None else modules)
    if not cell:
        return
    before, panels = _MADE.get(cell, (number, []))
    _MADE[cell] = (number, [*panels, panel] if before == number else [panel])
    for other in panels if before != number else []:
        other.close()


def _running(modules: Mapping[str, Any]) -> tuple[str, int]:
    """The id of the cell that runs, and the number of its run; empty where no front end tells."""
    ipython = modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    if not hasattr(shell, "get_parent"):
        return "", 0
    return str(shell.get_parent().get("metadata", {}).get("cellId", "")), shell.execution_count


# --- panel ---


if TYPE_CHECKING:
    from nbtoolkit.notebooks.handle import NotebookHandle
    from nbtoolkit.panel.actions import Train

    Source = str | os.PathLike[str] | Mapping[str, Any]

_SECONDS = 300.0  # to wait for a notebook's first run: its first cell may install packages
_LOOK = 0.1  # seconds between two looks meanwhile


def panel(
    train: Train | None = None,
    config: ConfigLike = None,
    space: Source | None = None,
) -> Panel:
    """A control panel for a cell: a form of all settings, buttons, and views of what runs.

    What it starts is detached: it goes on when the kernel ends, and another panel can watch it.
    Where nothing shows widgets (papermill, a terminal, a saved notebook) it is text and a picture.

    Args:
        train: the training function, as for :func:`nbtoolkit.launch`; None: the one that
            ``config.task`` names.
        config: what the form begins with: a Config, a path to YAML, or a dict; None: the defaults.
        space: what is searched, as for :func:`nbtoolkit.sweep`; None: it may be typed.

    Returns:
        The panel; a cell shows it when it is its last value. ``close()`` ends it, and so does
        running its cell again, which makes another.

    Raises:
        MissingExtra: ipywidgets is not installed.
        ConfigError: the configuration, or the file of the space, is wrong.
    """
    if find_spec("ipywidgets") is None:
        raise MissingExtra("the panel needs ipywidgets", do="pip install 'nbtoolkit-torch[panel]'")
    made = Panel(train, Draft(as_config(config, None), _text(space)))
    replace(made)
    return made


class Panel:
    """A panel; made by :func:`panel`."""

    def __init__(self, train: Callable[..., Any] | None, draft: Draft) -> None:
        self._desk = Controller(train, draft)

    @property
    def folder(self) -> Path | None:
        """The folder that is watched; ``nb.attach`` takes it. None: nothing is."""
        state = self._desk.state
        return None if state is None else state.paths.folder

    @property
    def notebook(self) -> NotebookHandle | None:
        """The notebook that was started last; None: none was (a panel of a cell's function)."""
        return self._desk.notebook

    @property
    def config(self) -> Config | None:
        """The configuration that stands in the form; None: something in it is wrong."""
        return self._desk.check().config

    @property
    def widget(self) -> Any:
        """The widget itself, to be put beside others."""
        return self._desk.board.root

    def press(self, button: str) -> None:
        """Do what a button does, and wait until it is done: until a run has a folder, too.

        Args:
            button: ``"launch"``, ``"sweep"``, ``"pause"``, ``"go_on"``, ``"stop"``,
                ``"add_trials"``, ``"stop_trial"`` or ``"train_best"``.

        Raises:
            LaunchError: the button cannot be pressed now, or there is none of that name; a notebook
                that was started has started no run after five minutes (it goes on).
            NbtoolkitError: what was started could not be.
        """
        coming = self._desk.press(button).result()
        if coming is not None:
            self._wait_for(coming)

    def _wait_for(self, run: Future[Path], seconds: float = _SECONDS) -> None:
        """Look more often than the clock does; between two looks it does what else is pressed."""
        end = time.monotonic() + seconds
        while not run.done() and time.monotonic() < end:
            futures.wait([run], _LOOK)
            self.refresh()
        if not run.done():
            raise LaunchError(
                f"no run has begun after {seconds:.0f} s; the notebook goes on",
                do="look at its log: print(panel)",
            )
        run.result()

    def watch(self, run: str | os.PathLike[str] | None) -> None:
        """Show another run.

        Args:
            run: its folder, or its id in the output folder; None: show none.

        Raises:
            LaunchError: there is none.
        """
        folder = None if run is None else find_run(run, self._desk.output_dir).folder
        self._desk.clock.do(lambda: self._desk.watch(folder)).result()

    def refresh(self) -> None:
        """Look at the folder now instead of within a second."""
        self._desk.clock.do(self._desk.look).result()

    def close(self) -> None:
        """End the panel's thread and its widgets; what runs goes on."""
        self._desk.close()

    def text(self) -> str:
        """What the panel shows now, as text."""
        return self._desk.text()

    def html(self) -> str:
        """What the panel shows now, as a static picture: tables and curves, without buttons."""
        return self._desk.html()

    def __repr__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        """The widget for who can show it, HTML and text for all others."""
        bundle = self.widget._repr_mimebundle_()
        shown: dict[str, Any] = dict(bundle[0] if isinstance(bundle, tuple) else bundle or {})
        return {**shown, "text/plain": self.text(), "text/html": self.html()}


def _text(space: Source | None) -> str:
    """A space as the YAML text that is edited."""
    if space is None:
        return ""
    if isinstance(space, Mapping):
        return space_text(space)
    from nbtoolkit.config.layers import file_layer

    return space_text(file_layer(space).values)
