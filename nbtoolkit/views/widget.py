"""Update a live view in a cell from a thread; static HTML is left at its end.

The thread only reads the folder, so that the view is live while the cell waits, when it does not,
and while other cells run. What a widget shows is changed by messages to the widget, which arrive
where it is whatever thread sends them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from nbtoolkit.launcher.handle import RunHandle
from nbtoolkit.views.picture import DisplayPlace, Throttle, bundle_of
from nbtoolkit.views.state import State
from nbtoolkit.views.summary import summary

if TYPE_CHECKING:
    import ipywidgets

_PATIENCE = 0.5  # seconds: what is over by then needs no widgets
_VIEW = "application/vnd.jupyter.widget-view+json"


class WidgetPicture:
    """A live view in a cell.

    Args:
        make_state: what is known of the folder, when it is first looked at.
        patience: seconds until there are widgets.
    """

    def __init__(self, make_state: Callable[[], State], *, patience: float = _PATIENCE) -> None:
        self._make_state, self._patience = make_state, patience
        self._pace = Throttle()
        self._drawing = threading.Lock()  # who waits and the thread both see the end
        self._over = threading.Event()
        self._widgets: _Widgets | None = None

    def open(self, *, waits: bool) -> None:
        """Show it in this cell, and start the thread.

        Args:
            waits: whether the cell waits. A click would then mostly be heard when it is too late,
                by version of ipykernel, and an interrupt of the kernel does the same: no button.
        """
        self._state, self._place = self._make_state(), DisplayPlace()
        self._state.look()
        self._stoppable = not waits
        self._place.put(bundle_of(self._state))
        # A daemon: a kernel that ends waits for no view.
        threading.Thread(target=self._run, name="nbtoolkit-view", daemon=True).start()

    def pump(self) -> None:
        """Nothing: the thread draws."""

    def close(self) -> None:
        """Leave static HTML in the cell: it needs no widgets, no kernel and no trust."""
        with self._drawing:
            if self._over.is_set():
                return
            self._over.set()
            self._state.look()
            if self._widgets is not None:
                self._widgets.show(self._state)  # where an output of a past cell stays as it was
            self._place.put(bundle_of(self._state))
            if self._widgets is not None:
                self._widgets.close()

    def _run(self) -> None:
        """Draw until it has ended; what goes wrong is shown, and whatever runs goes on."""
        try:
            if self._over.wait(self._patience):
                return
            while self._draw():
                self._over.wait(self._pace.seconds)
            self.close()
        except Exception as error:
            with self._drawing:
                self._over.set()
                with contextlib.suppress(Exception):  # the kernel is going, or has no output left
                    told = f"the live view ended ({type(error).__name__}: {error})"
                    self._place.put({"text/plain": told, "text/html": f"<p>{escape(told)}</p>"})

    def _draw(self) -> bool:
        """Whether there will be something to draw again."""
        with self._drawing:
            if self._over.is_set():
                return False
            with self._pace.drawing():
                self._state.look()
                if self._widgets is not None:
                    self._widgets.show(self._state)
            if self._widgets is None and self._state.live:
                self._widgets = _Widgets(self._state, stoppable=self._stoppable)
                self._place.put({**bundle_of(self._state), _VIEW: self._widgets.view})
            return self._state.live


class _Widgets:
    """The picture as HTML, and a button that stops what runs."""

    def __init__(self, state: State, *, stoppable: bool) -> None:
        import ipywidgets

        self._paths = state.paths
        self._html = ipywidgets.HTML(summary(state))
        self._buttons: list[ipywidgets.Button] = []
        if stoppable:
            tip = "All leave at their next report"
            button = ipywidgets.Button(description="Stop", icon="stop", tooltip=tip)
            button.on_click(self._stop)
            self._buttons.append(button)
        self._box = ipywidgets.VBox([self._html, *self._buttons])

    @property
    def view(self) -> dict[str, Any]:
        """What a front end finds the widgets by."""
        return {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}

    def show(self, state: State) -> None:
        """Draw; where nothing runs there is nothing to stop."""
        self._html.value = summary(state)
        if not state.live:
            self._box.children = [self._html]

    def close(self) -> None:
        """End all widgets, in kernel and front end."""
        styled = [self._html, *self._buttons]
        for one in [self._box, *styled]:
            one.layout.close()
            one.close()
        for one in styled:
            one.style.close()

    def _stop(self, button: ipywidgets.Button) -> None:
        """Runs in the kernel's main thread or in a subshell's: it only leaves a file."""
        button.disabled, button.description = True, "Stopping"
        with contextlib.suppress(FileNotFoundError):  # the folder was deleted: the view says so
            RunHandle(self._paths).stop("the Stop button of the live view")
