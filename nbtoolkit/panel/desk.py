"""Desk: where a panel's widgets, its form, its folder and its thread meet; it decides nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yaml import safe_load

from nbtoolkit.config import load_config
from nbtoolkit.errors import LaunchError, NbtoolkitError
from nbtoolkit.panel import actions
from nbtoolkit.panel.board import TABS, Board
from nbtoolkit.panel.clock import Clock
from nbtoolkit.panel.curves import curves, history
from nbtoolkit.panel.devices import devices, devices_text
from nbtoolkit.panel.draft import Checked, Draft
from nbtoolkit.panel.equal import command_line, differences, python_cell
from nbtoolkit.panel.form import Form
from nbtoolkit.panel.log import log, log_names
from nbtoolkit.panel.machine import plan_text
from nbtoolkit.panel.markup import boxed, preformatted, said, wrong
from nbtoolkit.panel.overview import overview, overview_text
from nbtoolkit.panel.rules import BUTTONS, pressable
from nbtoolkit.panel.state import State
from nbtoolkit.panel.trials import Order, column_names, pages, trials, trials_text
from nbtoolkit.runtime.paths import RunPaths, runs_in, write_whole

if TYPE_CHECKING:
    from nbtoolkit.config import Config
    from nbtoolkit.runtime.result import RunHandle

_RUNS = 50  # of the newest that can be chosen


class Desk:
    """Everything behind a panel.

    Args:
        train: the training function; None: the one that ``task`` names.
        draft: what the form begins with.

    Attributes:
        state: what is watched; None: nothing is.
        board: the widgets.
        clock: the thread in which all this happens.
    """

    def __init__(self, train: actions.Train | None, draft: Draft) -> None:
        self._train = train
        self.state: State | None = None
        self._handle: RunHandle | None = None
        self._checked = Checked()
        self._planned: Config | None = None
        self._stale = True
        self._pressing = threading.Lock()
        self._pressed: dict[str, Future[Any]] = {}
        self.board = Board(Form(draft, self._typed))
        self.clock = Clock(self.look, self._failed)
        self._listen()
        self.clock.do(self.look).result()  # the first look, so that it is shown complete

    @property
    def output_dir(self) -> str:
        """Where the runs lie, by the form."""
        config = self._checked.config
        return config.runtime.output_dir if config is not None else "outputs"

    def check(self) -> Checked:
        """What stands in the form now."""
        return self.board.form.draft.check()

    def press(self, name: str) -> Future[Any]:
        """Have a button's task done, once for all presses until it is."""
        with self._pressing:
            if name not in self._pressed:
                if name in self.board.buttons:
                    self.board.buttons[name].disabled = True
                self._pressed[name] = self.clock.do(partial(self._do, name))
            return self._pressed[name]

    def watch(self, folder: Path | None) -> None:
        """Show another folder; None: nothing."""
        self.state = None if folder is None else State(RunPaths(folder))
        self._handle = None
        self._stale = True

    def text(self) -> str:
        """What is shown, as text."""
        parts = [plan_text(self.check()), overview_text(self.state)]
        parts += [trials_text(self.state), devices_text(self.state)]
        return "\n\n".join(part for part in parts if part)

    def html(self) -> str:
        """What is shown, as a static picture."""
        plan = boxed(said(plan_text(self.check())))
        views = (overview, trials, history, curves, devices)
        return plan + "".join(view(self.state) for view in views)

    def close(self) -> None:
        """End the thread and the widgets."""
        self.clock.close()
        _close(self.board.root)

    # --- in any thread ---

    def _listen(self) -> None:
        board = self.board
        for name, button in board.buttons.items():
            button.on_click(lambda _, name=name: self.press(name))
        board.load.on_click(lambda _: self.clock.do(self._load))
        board.save.on_click(lambda _: self.clock.do(self._save))
        board.run.observe(self._chosen, "value")
        for widget in (board.sort, board.down, board.part, board.log):
            widget.observe(self._turned, "value")
        board.tabs.observe(self._turned, "selected_index")

    def _typed(self) -> None:
        self._stale = True
        if hasattr(self, "clock") and not self.clock.here:
            self.clock.do(lambda: None)

    def _turned(self, _: Any) -> None:
        if not self.clock.here:
            self._typed()

    def _chosen(self, change: dict[str, Any]) -> None:
        if not self.clock.here:
            folder = Path(change["new"]) if change["new"] else None
            self.clock.do(lambda: self.watch(folder))

    # --- in the clock's thread ---

    def _do(self, name: str) -> None:
        try:
            self._refuse(name)
            self._say(f"{BUTTONS[name][0]} ...")
            getattr(self, f"_{name}")()
        finally:
            with self._pressing:
                self._pressed.pop(name, None)
            self._stale = True

    def _refuse(self, name: str) -> None:
        """What is true now counts, not what was when the button was drawn."""
        self._checked = self.check()
        if self.state is not None:
            self.state.look()
        can = pressable(self.state, self._checked)
        if name not in can:
            raise LaunchError(
                f"{BUTTONS[name][0] if name in BUTTONS else name} cannot be pressed now",
                allowed=", ".join(one for one in BUTTONS if one in can) or "nothing",
                do="look at the overview and at the errors in the form",
            )

    def _launch(self) -> None:
        config = self._checked.config
        assert config is not None  # else it could not be pressed
        self._started(actions.start_run(self._train, config), "launched")

    def _sweep(self) -> None:
        config, draft = self._checked.config, self.board.form.draft
        assert config is not None
        trials = int(draft.trials) if draft.trials.strip() else None
        space = safe_load(draft.space)
        self._started(actions.start_sweep(self._train, config, space, trials), "started")

    def _go_on(self) -> None:
        state = self._watched()
        if state.status == "paused":
            actions.resume(state)
            self._say("going on")
        else:
            self._started(actions.go_on(state, self._train), "going on")

    def _train_best(self) -> None:
        self._started(actions.train_best(self._watched(), self._train), "training the best")

    def _pause(self) -> None:
        actions.pause(self._watched())
        self._say("asked to pause: what runs is finished first")

    def _stop(self) -> None:
        actions.stop(self._watched())
        self._say("asked to stop: all leave at their next report")

    def _stop_trial(self) -> None:
        actions.stop_trial(self._watched(), self.board.number.value)
        self._say(f"asked trial {self.board.number.value} to end")

    def _add_trials(self) -> None:
        actions.add_trials(self._watched(), self.board.more.value)
        self._say(f"asked for {self.board.more.value} more trials")

    def _load(self) -> None:
        config = load_config(self.board.file.value)
        old = self.board.form.draft
        draft = Draft(config, old.space)
        draft.trials = old.trials
        self.board.form.load(draft)
        self._stale = True
        self._say(f"loaded {self.board.file.value}")

    def _save(self) -> None:
        checked = self.check()
        if checked.config is None:
            raise LaunchError("the settings are not saved: something in the form is wrong")
        path = Path(self.board.file.value).expanduser()
        write_whole(path, checked.config.to_yaml())
        self._say(f"saved to {path.absolute()}")

    def _started(self, handle: RunHandle, how: str) -> None:
        self.watch(handle.paths.folder)
        self._handle = handle  # its line is open: it is listened to at each look
        self._say(f"{how}: {handle.paths.folder}")

    def _watched(self) -> State:
        assert self.state is not None  # else nothing could be pressed
        return self.state

    def _say(self, text: str) -> None:
        self.board.message.value = boxed(said(text))

    def _failed(self, error: BaseException) -> None:
        told = (
            str(error) if isinstance(error, NbtoolkitError) else f"{type(error).__name__}: {error}"
        )
        with contextlib.suppress(Exception):  # the kernel's end: nobody is there to be told
            self.board.message.value = boxed(wrong(told))
            self._stale = True

    # --- drawing, in the clock's thread ---

    def look(self) -> None:
        """Take what is new and draw it; called by the clock."""
        news = self._stale
        self._stale = False
        if self._handle is not None:
            self._handle.done()  # takes what its owner says, so that the line never fills
        if self.state is not None:
            news = self.state.look() or news or self.state.live  # times and devices change
        self._offer_runs()
        if news:
            self._draw()

    def _draw(self) -> None:
        board, state = self.board, self.state
        self._checked = self.check()
        board.form.show(self._checked)
        self._draw_plan()
        can = pressable(state, self._checked)
        for name, button in board.buttons.items():
            _set(button, "disabled", name not in can or name in self._pressed)
        self._offer_orders()
        _set(board.pages[board.page], "value", self._view(board.page))

    def _draw_plan(self) -> None:
        """Only when the configuration is another: the hardware is asked for it."""
        if self._planned is None or self._planned != self._checked.config:
            _set(self.board.plan, "value", boxed(said(plan_text(self._checked))))
            self._planned = self._checked.config

    def _view(self, page: str) -> str:
        board, state = self.board, self.state
        order = Order(board.sort.value, board.down.value, board.part.value)
        views: dict[str, Callable[[], str]] = {
            "Overview": lambda: overview(state),
            "Trials": lambda: trials(state, order),
            "Curves": lambda: history(state) + curves(state),
            "Devices": lambda: devices(state),
            "Log": lambda: log(log_names(state).get(board.log.value)),
            "Files": self._equal,
        }
        return views[page]() if page in views else ""

    def _equal(self) -> str:
        config, draft = self._checked.config, self.board.form.draft
        if config is None:
            return boxed(wrong("something in the settings is wrong"))
        overrides = draft.overrides()
        wishes = self._checked.wishes
        space = safe_load(draft.space) if wishes is not None else None
        text = draft.space if wishes is not None else ""
        name = "" if self._train is None else getattr(self._train, "__name__", "train")
        shell = command_line(overrides, text, draft.trials, task=self._train is None)
        cell = python_cell(overrides, space, draft.trials, train=name)
        parts = [said("The same from a shell", strong=True), preformatted(shell)]
        parts += [said("The same in a cell", strong=True), preformatted(cell)]
        return differences(config) + boxed(*parts)

    def _offer_runs(self) -> None:
        found = [(paths.run_id, str(paths.folder)) for paths in runs_in(self.output_dir)[:_RUNS]]
        here = "" if self.state is None else str(self.state.paths.folder)
        if here and here not in [folder for _, folder in found]:
            found.insert(0, (Path(here).name, here))
        options = (("(none)", ""), *found)
        if tuple(self.board.run.options) != options:
            self.board.run.options = options
        _set(self.board.run, "value", here)

    def _offer_orders(self) -> None:
        board = self.board
        names = tuple(column_names(self.state))
        if tuple(board.sort.options) != names:
            kept = board.sort.value
            board.sort.options = names
            board.sort.value = kept if kept in names else "trial"
        _set(board.part, "max", pages(self.state))
        logs = tuple(log_names(self.state)) if board.page == TABS[4] else board.log.options
        if tuple(board.log.options) != logs:
            kept = board.log.value
            board.log.options = logs
            board.log.value = kept if kept in logs else (logs[0] if logs else None)


def _close(widget: Any) -> None:
    """Close a widget and all that is in it."""
    for child in getattr(widget, "children", ()):
        _close(child)
    widget.close()


def _set(widget: Any, name: str, value: Any) -> None:
    """Set a widget's trait if it is another: each change is a message to the browser."""
    if getattr(widget, name) != value:
        setattr(widget, name, value)
