"""Connect a panel's widgets, its form, its folder and its thread."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.config.loading import parse_settings
from nbtoolkit.errors import LaunchError, NbtoolkitError
from nbtoolkit.launcher.train_function import Train
from nbtoolkit.panel import buttons
from nbtoolkit.panel.board import Board, SavedPage
from nbtoolkit.panel.cost import cost_text, count_slots, place_text, training_seconds
from nbtoolkit.panel.form import FormState, Validation
from nbtoolkit.panel.setup import Setup
from nbtoolkit.panel.widgets import set_error, set_text
from nbtoolkit.run.attempts import run_config
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.search.sweep import SWEEP_CONFIG_FILE
from nbtoolkit.views import runs
from nbtoolkit.views.page import page_html, page_text
from nbtoolkit.views.state import State, read_state
from nbtoolkit.views.trial_rows import View
from nbtoolkit.views.watcher import Watcher

if TYPE_CHECKING:
    from nbtoolkit.launcher.run_handle import RunHandle
    from nbtoolkit.search.folds.folds import Folds

_CPU_SHARE = 0.2  # of a core, for the looks at a large sweep
_MESSAGE_SECONDS = 20.0  # that a message stands; errors stand until the next press

_HEARD = {
    "stop": "Stopping: waiting for each worker's next report",
    "pause": "Pausing: what runs is finished, nothing more is started",
    "stop_trial": "Stopping the trial: waiting for its next report",
    "resume": "Resuming",
    "add_trials": "More trials: requested",
}
"""What is shown when a request was sent, by button."""


class Controller:
    """Everything behind a panel.

    Args:
        train: the training function; None: the one that ``task`` names.
        form: the form's first contents.
        folds: for cross-validations; None: there are none.
        given: whether the form's contents are a configuration that the cell names: then those of
            an ended run do not replace them.

    Attributes:
        board: the widgets.
        state: of the watched run; None: none is watched.
        chosen: what the person chose to see.
        output_dir: the folder of the runs: the form's when the panel was opened, later that of what
            was started.
        watcher: the thread in which all tasks run, and in which alone the state changes.
        saved: the page for saved notebooks.
    """

    def __init__(
        self,
        train: Train | None,
        form: FormState,
        folds: Folds | None = None,
        *,
        given: bool = True,
    ) -> None:
        self._train = train
        self._folds = folds
        self.state: State | None = None
        self.chosen = View()
        self.output_dir = "outputs"
        self._handle: RunHandle | None = None
        self._was_live = False
        self._message_ends = 0.0
        self._stale = True  # whether the next look draws
        self._validated: tuple[FormState, Validation] | None = None
        self._planned: object = None
        self._explained: Path | None = None  # the sweep whose importances are computed
        self._cost = ""
        self._pressed: dict[str, Future[None]] = {}  # the buttons whose task is not done yet
        self._pressing = threading.Lock()
        css_class = f"nbtoolkit-saved-{uuid.uuid4().hex[:8]}"
        self.board = Board(Setup(form, self._on_edit), self, css_class)
        if (config := self.validate().config) is not None:
            self.output_dir = config.runtime.output_dir
        self.saved = SavedPage(css_class, self.html)
        closed = LaunchError("the panel is closed", do="open another: nb.panel()")
        self.watcher = Watcher(self.look, self._show_error, share=_CPU_SHARE, closed=closed)
        # So that the panel is shown complete; errors are shown like later ones.
        self.watcher.submit(partial(self._attach, given)).exception()
        self.watcher.submit(self.look).exception()

    def validate(self) -> Validation:
        """Validate what stands in the form now."""
        form = self.board.setup.state
        if self._validated is None or self._validated[0] != form:
            validation = form.validate()
            assert validation.form is not None
            self._validated = validation.form, validation
        return self._validated[1]

    def press(self, button: str) -> Future[None]:
        """Submit a button's task; pressing it again before the task is done submits no other."""
        with self._pressing:
            if button not in self._pressed:
                if button in self.board.buttons:
                    self.board.buttons[button].disabled = True
                    self._show_message(f"{buttons.BUTTONS[button][0]} ...")
                task = partial(self._run_button, button, self.validate(), self.board.more.value)
                self._pressed[button] = self.watcher.submit(task)
            return self._pressed[button]

    def close(self) -> None:
        """End the thread and the widgets."""
        self.watcher.close()
        self.board.close()

    def on_button(self, name: str) -> None:
        """Press a button."""
        self.press(name)

    def on_choice(self, **changes: object) -> None:
        """Change what the page shows."""
        self._submit(partial(self._choose, **changes))

    def on_run(self, folder: str) -> None:
        """Show another run."""
        self._submit(partial(self.watch, Path(folder) if folder else None))

    def on_load(self) -> None:
        """Put the settings of the run that is shown into the form."""
        self._submit(self._load_run)

    def _on_edit(self) -> None:
        if hasattr(self, "watcher"):  # the form calls this while it is made, before the thread
            self._submit(lambda: None)

    def _submit(self, task: Callable[[], object]) -> None:
        """Submit a task, after which everything is drawn; the panel's thread fills widgets."""

        def act() -> None:
            task()
            self._stale = True  # only now: a look that comes before the task would reset it

        if not self.watcher.is_current:
            self.watcher.submit(act)

    def watch(self, folder: Path | None) -> None:
        """Watch another folder; None: none."""
        self.state = None if folder is None else read_state(folder)
        self._handle = None
        self.chosen = View()
        self._stale = True
        self._was_live = self.state is not None and self.state.live

    def text(self) -> str:
        """Format what is shown as text."""
        self._refresh_state()
        return f"{place_text(self.validate())}\n\n{page_text(self.state, self.chosen)}"

    def html(self) -> str:
        """Render what is shown as static HTML, as a notebook stores it."""
        self._refresh_state()
        return f"{self.board.place.value}{page_html(self.state, self.chosen)}"

    def _refresh_state(self) -> None:
        """Read what was written since the last look: a kernel may end before the next one."""
        if self.state is not None and self.state.refresh():
            self._stale = True

    def _attach(self, given: bool) -> None:
        """Watch what runs, else the newest, and load its settings."""
        folder = runs.newest(self.output_dir)
        if folder is None:
            self.board.open_set_up(True)
            return
        self.watch(folder)
        if self._was_live or not given:
            with contextlib.suppress(NbtoolkitError):  # a run of an older version
                self._load_run()

    def _run_button(self, button: str, validation: Validation, more: int) -> None:
        try:
            name, number = buttons.parsed_button(button, more)
            self._refresh_state()  # it may differ from when the button was drawn
            offered = buttons.offered_buttons(self.state, validation, self._folds)
            enabled = buttons.enabled_buttons(offered, validation)
            if name not in enabled:
                raise buttons.refusal(name, self.state, validation, enabled)
            known = [entry.folder for entry in runs.list_runs(self.output_dir)]
            handle = self._act(name, number, validation)
            # What was started is on display now; a line about it would move the page.
            text = _HEARD.get(name, "")
            if name == "sweep" and handle is not None and handle.paths.folder in known:
                text = f"Sweep continues {handle.paths.run_id}, which has these settings"
            self._show_message(text)
        finally:
            with self._pressing:
                self._pressed.pop(button, None)
            self._stale = True

    def _act(self, name: str, number: int, validation: Validation) -> RunHandle | None:
        """Do what a button says; return a handle on what it has started."""
        if name in buttons.STARTS:
            # The fork server may need seconds: the run before must not look like this one.
            self.board.clear("Starting: waiting for the first process")
            handle: RunHandle | None = buttons.start(name, self._train, validation, self._folds)
            assert handle is not None
            self.output_dir = str(handle.paths.folder.parent)
        else:
            assert self.state is not None  # else the button is not offered
            handle = buttons.control(name, self.state, self._train, number)
        if handle is not None:
            self.watch(handle.paths.folder)
            self._handle = handle  # each look reads its connection
            self.board.open_set_up(False)
        return handle

    def _choose(self, **changes: object) -> None:
        self.chosen = replace(self.chosen, **changes)  # type: ignore[arg-type] # its own fields

    def _load_run(self) -> None:
        """Put the settings of the watched run, and its space, into the form."""
        if self.state is None:
            raise LaunchError("no run is shown", do="choose one in the list of runs")
        paths: RunPaths = self.state.paths
        file = paths.folder / SWEEP_CONFIG_FILE
        sweep = parse_settings(file.read_text(), file.name) if file.is_file() else None
        self.board.setup.load(FormState(run_config(paths), sweep))
        self._show_message(f"Set up has the settings of {paths.run_id}")

    def _show_message(self, text: str) -> None:
        self._message_ends = time.monotonic() + _MESSAGE_SECONDS
        set_text(self.board.message, text)

    def _show_error(self, error: BaseException) -> None:
        ours = isinstance(error, NbtoolkitError)
        text = str(error) if ours else f"{type(error).__name__}: {error}"
        self._message_ends = float("inf")
        with contextlib.suppress(Exception):  # the kernel is exiting
            set_error(self.board.message, text)
            self._stale = True

    def look(self) -> None:
        """Read what is new and draw it."""
        draws = self._stale
        self._stale = False
        if self._handle is not None:
            self._handle.done()  # reads its connection, so that it never fills
        live = self.state is not None and self.state.live
        if self.state is not None:
            draws = self.state.refresh() or draws
        if time.monotonic() > self._message_ends:
            set_text(self.board.message, "")
        # Another user's folder: a launch reports that.
        with contextlib.suppress(OSError, NbtoolkitError):
            watched = "" if self.state is None else str(self.state.paths.folder)
            self.board.draw_runs(runs.list_runs(self.output_dir), watched)
        if draws:
            self._draw()
        elif live:
            self.board.draw_strip(self.state)  # times change
        self.saved.update(changed=draws or live, now=self.state is not None and self.state.over)

    def _draw(self) -> None:
        """Draw everything but the list of runs."""
        state = self.state
        validation = self.validate()
        offered = buttons.offered_buttons(state, validation, self._folds)
        enabled = buttons.enabled_buttons(offered, validation) - set(self._pressed)
        self.board.draw_strip(state)
        self.board.draw_buttons(offered, enabled)
        self._draw_setup(validation)
        ended = state is not None and state.kind == "sweep" and state.over
        folder = None if state is None else state.paths.folder
        if not ended or self._explained != folder:
            self.board.draw_body(state, self.chosen, importance=False)
        if ended:
            self._explained = folder
            self.board.draw_body(state, self.chosen, importance=True)

    def _draw_setup(self, validation: Validation) -> None:
        """Draw what depends on the form; the plan reads the hardware, which takes time."""
        state = self.state
        seconds = training_seconds(self.state)
        planned = (validation.form, None if state is None else state.paths.folder, seconds)
        if planned != self._planned:
            self._planned = planned
            folds = None if self._folds is None else len(self._folds)
            slots, gpus = count_slots(validation)
            self._cost = cost_text(validation, seconds, slots, folds, gpus)
            self.board.draw_place(place_text(validation))
        code = buttons.code_of_form(validation, self._train)
        self.board.setup.show(validation, self._cost, code)
