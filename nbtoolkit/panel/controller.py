"""Connect a panel's widgets, its form, its folder and its thread."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.config.schema import load_config
from nbtoolkit.errors import LaunchError, NbtoolkitError
from nbtoolkit.notebooks.handle import NotebookHandle
from nbtoolkit.panel import actions
from nbtoolkit.panel.board import BUTTONS, Board, Links, close, pressable, why_not
from nbtoolkit.panel.drawing import Drawing, plan_text
from nbtoolkit.panel.form import Checked, Draft, Entered, Form
from nbtoolkit.run.paths import write_whole
from nbtoolkit.views.markup import boxed, said, wrong
from nbtoolkit.views.state import State, read_state
from nbtoolkit.views.trials import largest_first, page_html, page_text

if TYPE_CHECKING:
    from nbtoolkit.launcher.handle import RunHandle


# Callbacks of widgets arrive in the kernel's main thread or in a subshell's, by version of
# ipykernel; they only leave a task here and return. So no two tasks ever run at once, an interrupt
# of the kernel (which goes to its main thread) does not end the panel, and a busy cell does not
# stop it.


SECONDS = 1.0
"""Between two looks."""


class Clock:
    """Runs tasks one after the other, and ``look`` between them.

    Args:
        look: called every second, and after each task.
        failed: called with what ``look`` or a task raised.
        seconds: between two looks.
    """

    def __init__(
        self,
        look: Callable[[], None],
        failed: Callable[[BaseException], None],
        seconds: float = SECONDS,
    ) -> None:
        self._look, self._failed, self._seconds = look, failed, seconds
        self._tasks: queue.Queue[tuple[Callable[[], Any], Future[Any]] | None]
        self._tasks = queue.Queue()
        self._closed, self._lock = False, threading.Lock()
        # A daemon: a kernel that ends waits for no panel.
        self._thread = threading.Thread(target=self._run, name="nbtoolkit-panel", daemon=True)
        self._thread.start()

    @property
    def here(self) -> bool:
        """Whether the caller is the clock's own thread."""
        return threading.current_thread() is self._thread

    def do(self, task: Callable[[], Any]) -> Future[Any]:
        """Have a task done; returns at once. After :meth:`close` nothing is done any more."""
        future: Future[Any] = Future()
        with self._lock:  # a task put behind the end would never be done
            if not self._closed:
                self._tasks.put((task, future))
                return future
        future.set_exception(LaunchError("the panel is closed", do="open another: nb.panel()"))
        return future

    def ask(self, task: Callable[[], Any]) -> Any:
        """What a task returns, between the others; after :meth:`close` there are none."""
        if self.here or self._closed:
            return task()
        return self.do(task).result()

    def close(self) -> None:
        """End the thread, after the tasks that wait."""
        with self._lock:
            self._closed = True
            self._tasks.put(None)
        if not self.here:
            self._thread.join()

    def _run(self) -> None:
        next_look = time.monotonic()
        while True:
            try:
                entry = self._tasks.get(timeout=max(next_look - time.monotonic(), 0.0))
            except queue.Empty:
                self._call(self._look)
                next_look = time.monotonic() + self._seconds
                continue
            if entry is None:
                return
            task, future = entry
            self._call(task, future)
            next_look = time.monotonic()

    def _call(self, task: Callable[[], Any], future: Future[Any] | None = None) -> None:
        """Whatever a user's module or a full disk raises is told, and the panel goes on."""
        try:
            value = task()
        except BaseException as error:
            self._failed(error)
            if future is not None:
                future.set_exception(error)
        else:
            if future is not None:
                future.set_result(value)


# --- background notebooks ---
# The notebooks that a panel has started, until their run is there, and to their own end.


class BackgroundNotebooks:
    """Notebooks in the background; looked at by the clock's thread.

    Attributes:
        last: the one that was started last; None: none was.
        starting: the one whose run is not there yet; None: there is none.
        run: the folder of the run that was started last, once it is there.
    """

    def __init__(self) -> None:
        self.last: NotebookHandle | None = None
        self.starting: NotebookHandle | None = None
        self.run: Future[Path] = Future()
        self._at_work: list[NotebookHandle] = []

    def add(self, notebook: NotebookHandle) -> Future[Path]:
        """Follow another notebook; its run's folder, once it is there."""
        self.last = self.starting = notebook
        self.run = Future()
        return self.run

    def look(self) -> Path | None:
        """The folder of a run that has come since the last look; None: none has.

        Raises:
            NotebookFailed: a notebook has failed, before its run came or after.
        """
        for notebook in [one for one in self._at_work if one.done()]:
            self._at_work.remove(notebook)
            notebook.result()
        return None if self.starting is None else self._arrived(self.starting)

    def said(self) -> str:
        """What is waited for, in words; empty: nothing is."""
        if self.starting is None:
            return ""
        return f"starting the notebook {self.starting.output}; its log: {self.starting.log}"

    def _arrived(self, notebook: NotebookHandle) -> Path | None:
        done = notebook.done()  # asked first: what it starts before its end is in the list then
        if runs := notebook.runs:
            self.starting = None
            self._at_work.append(notebook)
            self.run.set_result(runs[-1])
            return runs[-1]
        if done:
            self.starting = None
            self._failed(notebook)
        return None

    def _failed(self, notebook: NotebookHandle) -> None:
        try:
            notebook.result()
            raise LaunchError(
                f"the notebook {notebook.output} came to its end, and started nothing",
                do="look at its cells",
            )
        except BaseException as error:
            self.run.set_exception(error)
            raise


# --- the controller ---


class Controller:
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
        self._entry = Entered(draft, 0, 0)
        self._stale = True
        self._pressing = threading.Lock()
        self._pressed: dict[str, Future[Any]] = {}
        self.board = Board(Form(draft, self._typed))
        self._links, self._begun = Links(), BackgroundNotebooks()
        self._drawing = Drawing(self.board, train, self._links)
        self.clock = Clock(self.look, self._failed)
        self._listen()
        # The first look, so that it is shown complete; what it raises is told as later on.
        self.clock.do(self.look).exception()

    @property
    def notebook(self) -> NotebookHandle | None:
        """What was started last of those that run in the background; None: nothing was."""
        return self._begun.last

    @property
    def output_dir(self) -> str:
        """Where the runs lie, by the form."""
        config = self._checked.config
        return config.runtime.output_dir if config is not None else "outputs"

    def check(self) -> Checked:
        """What stands in the form now."""
        return self.board.form.draft.copy().check()

    def press(self, name: str) -> Future[Any]:
        """Have a button's task done, once for all presses until it is.

        Returns:
            None, once it is done; of what a notebook is going to start: the folder, once it is
            there.
        """
        with self._pressing:
            if name not in self._pressed:
                if name in self.board.buttons:
                    self.board.buttons[name].disabled = True
                self._pressed[name] = self.clock.do(partial(self._do, name, self._entered()))
            return self._pressed[name]

    def watch(self, folder: Path | None) -> None:
        """Show another folder; None: nothing."""
        self.state = None if folder is None else read_state(folder)
        self._handle = None
        self._stale = True

    def text(self) -> str:
        """What is shown, as text."""
        return str(self.clock.ask(self._text))

    def html(self) -> str:
        """What is shown, as a static picture."""
        return str(self.clock.ask(self._html))

    def close(self) -> None:
        """End the thread and the widgets."""
        self.clock.close()
        self._links.close()
        for widget in (*self.board.form.rows, self.board.root):
            close(widget)

    # --- in the clock's thread, in which alone the state changes ---

    def _text(self) -> str:
        parts = [plan_text(self.check()), self._begun.said(), page_text(self.state)]
        return "\n\n".join(part for part in parts if part)

    def _html(self) -> str:
        return boxed(said(plan_text(self.check()))) + page_html(self.state)

    # --- in any thread ---

    def _entered(self) -> Entered:
        board = self.board
        return Entered(board.form.draft.copy(), board.more.value, board.number.value)

    def _listen(self) -> None:
        board = self.board
        for name, button in board.buttons.items():
            button.on_click(lambda _, name=name: self.press(name))
        for task, button in ((self._load, board.load), (self._save, board.save)):
            button.on_click(
                lambda _, task=task: self.clock.do(partial(task, board.file.value, self._entered()))
            )
        for name, button in board.links.items():
            button.on_click(lambda _, name=name: self.clock.do(partial(self._open, name)))
        board.run.observe(self._chosen, "value")
        board.sort.observe(self._sorted, "value")
        for widget in (board.sort, board.down, board.part, board.log):
            widget.observe(self._turned, "value")
        board.tabs.observe(self._turned, "selected_index")

    def _typed(self) -> None:
        self._stale = True
        if hasattr(self, "clock") and not self.clock.here:
            self.clock.do(lambda: None)

    def _sorted(self, change: dict[str, Any]) -> None:
        if not self.clock.here:  # there the list is filled anew
            self.board.down.value = largest_first(self.state, change["new"])

    def _turned(self, _: Any) -> None:
        if not self.clock.here:
            self._typed()

    def _chosen(self, change: dict[str, Any]) -> None:
        if not self.clock.here:
            folder = Path(change["new"]) if change["new"] else None
            self.clock.do(lambda: self.watch(folder))

    # --- in the clock's thread ---

    def _do(self, name: str, entered: Entered) -> Future[Path] | None:
        try:
            self._entry = entered
            self._refuse(name)
            self._say(f"{BUTTONS[name][0]} ...")
            coming: Future[Path] | None = getattr(self, f"_{name}")()
            return coming
        finally:
            with self._pressing:
                self._pressed.pop(name, None)
            self._stale = True

    def _refuse(self, name: str) -> None:
        """What is true now counts, not what was when the button was drawn."""
        self._checked = self._entry.draft.check()
        if self.state is not None:
            self.state.look()
        can = pressable(self.state, self._checked, self._begun.starting is not None)
        if name not in can:
            raise LaunchError(
                f"{BUTTONS[name][0] if name in BUTTONS else name} cannot be pressed now"
                + why_not(name, self.state, self._checked, self._begun.starting is not None),
                allowed=", ".join(one for one in BUTTONS if one in can) or "nothing",
                do="look at the overview and at the errors in the form",
            )

    def _launch(self) -> Future[Path] | None:
        config = self._checked.config
        assert config is not None  # else it could not be pressed
        return self._started(actions.start_run(self._train, config), "launched")

    def _sweep(self) -> Future[Path] | None:
        config, draft = self._checked.config, self._entry.draft
        assert config is not None
        handle = actions.start_sweep(self._train, config, draft.searched(), draft.count())
        return self._started(handle, "started")

    def _go_on(self) -> None:
        state = self._watched()
        if state.status == "paused":
            actions.resume(state)
            self._say("going on")
        else:
            self._started(actions.go_on(state, self._train), "going on")

    def _train_best(self) -> Future[Path] | None:
        return self._started(actions.train_best(self._watched(), self._train), "training the best")

    def _pause(self) -> None:
        actions.pause(self._watched())
        self._say("asked to pause: what runs is finished first")

    def _stop(self) -> None:
        if self._begun.starting is not None:
            self._begun.starting.stop()
            self._say("asked the notebook to end")
        else:
            actions.stop(self._watched())
            self._say("asked to stop: all leave at their next report")

    def _stop_trial(self) -> None:
        actions.stop_trial(self._watched(), self._entry.number)
        self._say(f"asked trial {self._entry.number} to end")

    def _add_trials(self) -> None:
        actions.add_trials(self._watched(), self._entry.more)
        self._say(f"asked for {self._entry.more} more trials")

    def _open(self, name: str) -> None:
        self._links.open(name, self.state, self.check())
        self._stale = True

    def _load(self, file: str, entered: Entered) -> None:
        draft = Draft(load_config(file), entered.draft.space)
        draft.trials = entered.draft.trials
        self.board.form.load(draft)
        self._stale = True
        self._say(f"loaded {file}")

    def _save(self, file: str, entered: Entered) -> None:
        checked = entered.draft.check()
        if checked.config is None:
            raise LaunchError("the settings are not saved: something in the form is wrong")
        path = Path(file).expanduser()
        write_whole(path, checked.config.to_yaml())
        self._say(f"saved to {path.absolute()}")

    def _started(self, handle: actions.Started, how: str) -> Future[Path] | None:
        if isinstance(handle, NotebookHandle):
            self.watch(None)  # until there is a run of it
            coming = self._begun.add(handle)
            self._say(self._begun.said())
            return coming
        self.watch(handle.paths.folder)
        self._handle = handle  # its line is open: it is listened to at each look
        self._say(f"{how}: {handle.paths.folder}")
        return None

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
        self._follow()
        news = self._stale
        self._stale = False
        if self._handle is not None:
            self._handle.done()  # takes what its supervisor says, so that the line never fills
        if self.state is not None:
            news = self.state.look() or news or self.state.live  # times and devices change
        self._drawing.offer_runs(self.state, self.output_dir)
        if news or self._links.starting:
            draft = self.board.form.draft.copy()
            self._checked = draft.check()
            pressed, starting = self._pressed, self._begun.starting is not None
            self._drawing.draw(self.state, draft, self._checked, pressed, starting)

    def _follow(self) -> None:
        """Watch the run of a notebook when it is there; tell how a notebook has failed."""
        try:
            if folder := self._begun.look():
                self.watch(folder)
                self._say(f"the notebook has started: {folder}")
        except NbtoolkitError as error:
            self._failed(error)
