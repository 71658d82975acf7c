"""Decide how a run is shown where it was started, by widgets, a progress bar, or lines.

Imports point one way: what draws imports what runs. What runs asks for the module by its name.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, Protocol, cast

from nbtoolkit.errors import LaunchError, MissingExtra
from nbtoolkit.host import in_kernel
from nbtoolkit.run.output import CellOutput, Display, Shown
from nbtoolkit.run.paths import RunPaths

# --- screen ---
# How a run is shown where it was started, and why: widgets, a bar in a terminal, lines.


Shape = Literal["widgets", "html", "minutes", "bar", "lines", "off"]
"""``"html"``: a picture that the waiting cell writes anew; ``"minutes"``: a line a minute."""


@dataclass(frozen=True)
class DisplayFacts:
    """What there is to show something on.

    Attributes:
        kernel: whether this is a Jupyter kernel.
        front_end: whether a person's front end sent the cell; None: the kernel does not say.
        widgets: whether ipywidgets is installed.
        terminal: whether stderr is a terminal.
    """

    kernel: bool = False
    front_end: bool | None = None
    widgets: bool = False
    terminal: bool = False


@dataclass(frozen=True)
class Screen:
    """What was chosen, and why."""

    shape: Shape
    reason: str


def choose_screen(display: Display, around: DisplayFacts) -> Screen:
    """Choose how a run is shown; a pure function.

    Args:
        display: what the user asked for.
        around: what there is.

    Raises:
        LaunchError: widgets are asked for outside a notebook.
        MissingExtra: widgets are asked for, and ipywidgets is not installed.
    """
    if display == "off":
        return Screen("off", 'display="off"')
    if display == "text":
        return Screen("lines", 'display="text"')
    if display == "widgets":
        _check_widgets(around)
        return Screen("widgets", 'display="widgets"')
    if not around.kernel:
        if around.terminal:
            return Screen("bar", "a terminal")
        return Screen("lines", "neither a notebook nor a terminal")
    if around.front_end is False:
        return Screen("minutes", "a notebook that nobody looks at (papermill, nbclient, nbval)")
    if around.widgets:
        return Screen("widgets", "a notebook, and ipywidgets is installed")
    return Screen("html", "a notebook without ipywidgets (pip install 'nbtoolkit-torch[panel]')")


def _check_widgets(around: DisplayFacts) -> None:
    if not around.kernel:
        raise LaunchError(
            'display="widgets" was asked for outside a notebook',
            allowed='"auto", "text", "off"',
            do='leave display out: "auto" shows a bar in a terminal, and lines elsewhere',
        )
    if not around.widgets:
        raise MissingExtra(
            'display="widgets" needs ipywidgets', do="pip install 'nbtoolkit-torch[panel]'"
        )


def find_display() -> DisplayFacts:
    """What there is to show something on, here and now; imports nothing."""
    kernel = in_kernel(sys.modules)
    return DisplayFacts(
        kernel=kernel,
        front_end=_front_end() if kernel else None,
        widgets=find_spec("ipywidgets") is not None,
        terminal=sys.stderr is not None and sys.stderr.isatty(),
    )


def _front_end() -> bool | None:
    """Whether the running cell was sent by who could answer an ``input()``.

    nbclient (and so papermill and nbconvert) and nbval say in each request that they cannot;
    JupyterLab, Notebook, VS Code, Colab and Kaggle's editor say that they can.
    """
    kernel: Any = sys.modules["IPython"].get_ipython().kernel
    request = kernel.get_parent("shell") or {}
    answer = request.get("content", {}).get("allow_stdin")
    return answer if isinstance(answer, bool) else None


# --- displays ---


_MODULE = "nbtoolkit.views.live"


class Displays(Protocol):
    """The functions of the module that draws."""

    def show_run(self, cell: CellOutput, paths: RunPaths, screen: Screen) -> Shown:
        """What is shown of a run: rank 0's lines, and how far it is."""

    def show_search(
        self,
        lines: Shown,
        paths: RunPaths,
        screen: Screen,
        *,
        deadline: float | None = None,
        folds: int | None = None,
    ) -> Shown:
        """What is shown of a sweep or of folds: notes, and how far it is."""

    def show_handle(self, paths: RunPaths, shown: Shown | None) -> None:
        """Show a handle that is a cell's value."""

    def static(self, paths: RunPaths) -> str:
        """How far a run is now, as HTML."""


def displays() -> Displays:
    """The module that draws, imported when something is to be shown."""
    return cast("Displays", import_module(_MODULE))
