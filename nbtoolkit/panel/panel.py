"""Build the panel (``nb.panel``) to set, launch, watch, stop and resume from a cell."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.config.loading import file_layer
from nbtoolkit.config.schema import Config, ConfigLike, as_config
from nbtoolkit.environment.installed import install_line
from nbtoolkit.errors import MissingExtra
from nbtoolkit.panel.form import FormState
from nbtoolkit.run.paths import find_run

if TYPE_CHECKING:
    import ipywidgets

    from nbtoolkit.launcher.train_function import Train
    from nbtoolkit.panel.controller import Controller
    from nbtoolkit.search.folds.folds import Folds

    Source = str | os.PathLike[str] | Mapping[str, object]


def panel(
    train: Train | None = None,
    config: ConfigLike = None,
    space: Source | None = None,
    folds: Folds | None = None,
) -> Panel:
    """Open a control panel: the live page of a run, buttons, and the settings of the next run.

    The panel first shows a live run of the output folder, or else the newest run. A run that you
    start in the panel is detached: it continues when the kernel ends, and another panel can watch
    it. Without widgets (under papermill, in a terminal or a saved notebook), the panel is text and
    static HTML.

    Args:
        train: the training function, as for :func:`nbtoolkit.launch`; None: the function that
            ``config.task`` names.
        config: the first values of the form: a Config, a path to a YAML file, or a dict. None: the
            values of the run that is shown, or else the defaults. If the run that is shown is
            active, the form begins with its values, even if you pass a config.
        space: the search space, as for :func:`nbtoolkit.sweep`; None: you can type it in the form.
        folds: the folds from :func:`nbtoolkit.make_folds`, for the button *Cross-validate*, and for
            sweeps whose space asks for folds.

    Returns:
        The panel. A cell displays it if it is the last value of the cell. ``close()`` ends it. If
        you run the same cell again, the new panel replaces the old one.

    Raises:
        MissingExtra: ipywidgets is not installed.
        ConfigError: the configuration, or the file of the space, is wrong.
    """
    if find_spec("ipywidgets") is None:
        raise MissingExtra("the panel needs ipywidgets", do=install_line("panel"))
    from nbtoolkit.panel.controller import Controller

    if space is not None and not isinstance(space, Mapping):
        space = file_layer(space).values
    form = FormState(as_config(config, None), space)
    opened = Panel(Controller(train, form, folds, given=config is not None))
    _close_previous(opened)
    return opened


class Panel:
    """A control panel; made by :func:`panel`."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    @property
    def folder(self) -> Path | None:
        """The folder of the watched run, for ``nb.attach``, or None if no run is watched."""
        state = self._controller.state
        return None if state is None else state.paths.folder

    @property
    def config(self) -> Config | None:
        """The configuration in the form, or None if the form has a mistake."""
        return self._controller.validate().config

    @property
    def widget(self) -> ipywidgets.VBox:
        """The panel's widget, which you can place beside other widgets."""
        return self._controller.board.root

    def press(self, button: str) -> None:
        """Press a button and wait until its task is done.

        Args:
            button: ``"launch"``, ``"sweep"``, ``"cross_validate"``, ``"pause"``, ``"resume"``,
                ``"stop"``, ``"train_best"``, ``"add_trials"``, ``"add_trials=5"`` (5 trials) or
                ``"stop_trial=3"`` (trial 3).

        Raises:
            LaunchError: the button does nothing now, or there is no button of this name.
            NbtoolkitError: the task has failed.
        """
        self._controller.press(button).result()

    def watch(self, run: str | os.PathLike[str] | None) -> None:
        """Watch another run.

        Args:
            run: the run's folder, or its id in the output folder; None: watch no run.

        Raises:
            LaunchError: there is no such run.
        """
        controller = self._controller
        folder = None if run is None else find_run(run, controller.output_dir).folder
        controller.watcher.submit(lambda: controller.watch(folder)).result()

    def refresh(self) -> None:
        """Read the run's folder now; without this call the panel reads it every second."""
        self._controller.watcher.submit(self._controller.look).result()

    def close(self) -> None:
        """Close the panel's widgets and end its thread; its runs continue."""
        self._controller.close()

    def text(self) -> str:
        """Return the text form of what the panel shows now."""
        return self._controller.watcher.call(self._controller.text)

    def html(self) -> str:
        """Return static HTML of what the panel shows now, without buttons."""
        return self._controller.watcher.call(self._controller.html)

    def __repr__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, **_: object) -> dict[str, object]:
        """Return the widget, and HTML and text for front ends that cannot show it."""
        bundle: Any = self.widget._repr_mimebundle_()  # with metadata in some versions
        data = bundle[0] if isinstance(bundle, tuple) else bundle or {}
        return {**data, "text/plain": self.text(), "text/html": self.html()}

    def _ipython_display_(self) -> None:
        """Show the widget, and below it the page for a saved notebook.

        Where both are one output, nbconvert prefers the widget, which it cannot show. The widget
        hides the page while it is alive.
        """
        from IPython.display import display

        bundle = {**self._repr_mimebundle_(), "text/html": "<div></div>"}
        display(bundle, raw=True)  # type: ignore[no-untyped-call] # not annotated
        self._controller.saved.show(self.html())


_OPENED: list[tuple[str, int, Panel]] = []
"""The id of a cell, the number of its execution, and a panel that it opened then."""


def _close_previous(opened: Panel) -> None:
    """Keep a new panel, and close those that an earlier execution of the same cell opened.

    Nobody sees their widgets, but they would continue to read and draw: after ten executions of a
    cell, the browser gets every table ten times a second.
    """
    cell, execution = _running_cell()
    earlier = [entry for entry in _OPENED if cell and entry[0] == cell and entry[1] != execution]
    for entry in earlier:
        _OPENED.remove(entry)
        entry[2].close()
    if cell:
        _OPENED.append((cell, execution, opened))


def _running_cell() -> tuple[str, int]:
    """Return the id of the running cell and its execution count; empty where it has no id."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    if not hasattr(shell, "get_parent"):
        return "", 0
    return str(shell.get_parent().get("metadata", {}).get("cellId", "")), shell.execution_count
