"""Connect a panel's widgets, its form, its folder and its thread."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nbtoolkit.config.schema import load_config
from nbtoolkit.errors import LaunchError, NbtoolkitError
from nbtoolkit.notebooks.handle import NotebookHandle
from nbtoolkit.panel import actions
from nbtoolkit.panel.board import BUTTONS, Board, Links, disabled_reason, enabled_buttons
from nbtoolkit.panel.drawing import Drawing, plan_text
from nbtoolkit.panel.form import Form, FormSnapshot, FormState, Validation, close_widget
from nbtoolkit.run.paths import write_whole
from nbtoolkit.views.markup import alert, paragraph, view
from nbtoolkit.views.state import State, read_state
from nbtoolkit.views.trials import largest_first, page_html, page_text

if TYPE_CHECKING:
    from nbtoolkit.launcher.handle import RunHandle

T = TypeVar("T")

POLL_SECONDS = 1.0
"""Between two polls."""


class WorkerThread:
    """A thread that runs tasks one after the other, and polls between them.

    Callbacks of widgets arrive in the kernel's main thread or in a subshell's, depending on
    ipykernel's version; they only submit a task here and return. So no two tasks run at once, an
    interrupt of the kernel, which goes to its main thread, does not end the panel, and a busy cell
    does not stop it.

    Args:
        poll: called every second, and after each task.
        on_error: called with what ``poll`` or a task raised.
        seconds: between two polls.
    """

    def __init__(
        self,
        poll: Callable[[], None],
        on_error: Callable[[BaseException], None],
        seconds: float = POLL_SECONDS,
    ) -> None:
        self._poll, self._on_error, self._seconds = poll, on_error, seconds
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._closed, self._lock = False, threading.Lock()
        # A daemon: the kernel's exit does not wait for a panel.
        self._thread = threading.Thread(target=self._loop, name="nbtoolkit-panel", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether this thread calls."""
        return threading.current_thread() is self._thread

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Queue a task and return at once; after :meth:`close` it is refused."""
        future: Future[T] = Future()
        with self._lock:  # nothing would run a task that is queued behind the end
            if not self._closed:
                self._tasks.put(partial(self._run, task, future))
                return future
        future.set_exception(LaunchError("the panel is closed", do="open another: nb.panel()"))
        return future

    def call(self, task: Callable[[], T]) -> T:
        """Run a task between the others, or here after :meth:`close`; return its result."""
        if self.is_current or self._closed:
            return task()
        return self.submit(task).result()

    def close(self) -> None:
        """End the thread after the queued tasks."""
        with self._lock:
            self._closed = True
            self._tasks.put(None)
        if not self.is_current:
            self._thread.join()

    def _loop(self) -> None:
        next_poll = time.monotonic()
        while True:
            try:
                task = self._tasks.get(timeout=max(next_poll - time.monotonic(), 0.0))
            except queue.Empty:
                self._run(self._poll, Future())
                next_poll = time.monotonic() + self._seconds
                continue
            if task is None:
                return
            task()
            next_poll = time.monotonic()

    def _run(self, task: Callable[[], T], future: Future[T]) -> None:
        """Run a task; any error, of a user's module or a full disk, is reported."""
        try:
            value = task()
        except BaseException as error:
            self._on_error(error)
            future.set_exception(error)
        else:
            future.set_result(value)


class BackgroundNotebooks:
    """The notebooks that a panel has started; used by the panel's thread.

    Attributes:
        last: the one that was started last; None: none was.
        starting: the one whose run does not exist yet; None: there is none.
    """

    def __init__(self) -> None:
        self.last: NotebookHandle | None = None
        self.starting: NotebookHandle | None = None
        self._run: Future[Path] = Future()
        self._running: list[NotebookHandle] = []

    def add(self, notebook: NotebookHandle) -> Future[Path]:
        """Follow another notebook; the future gets the folder of its run."""
        self.last = self.starting = notebook
        self._run = Future()
        return self._run

    def poll(self) -> Path | None:
        """Return the folder of a run that appeared since the last call; None: none did.

        Raises:
            NotebookFailed: a notebook has failed, before its run appeared or after.
        """
        for notebook in [notebook for notebook in self._running if notebook.done()]:
            self._running.remove(notebook)
            notebook.result()
        return None if self.starting is None else self._poll_run(self.starting)

    def status_text(self) -> str:
        """Describe the notebook that is starting; empty: there is none."""
        if self.starting is None:
            return ""
        return f"starting the notebook {self.starting.output}; its log: {self.starting.log}"

    def _poll_run(self, notebook: NotebookHandle) -> Path | None:
        done = notebook.done()  # first, since what it starts before its end is listed then
        if runs := notebook.runs:
            self.starting = None
            self._running.append(notebook)
            self._run.set_result(runs[-1])
            return runs[-1]
        if done:
            self.starting = None
            self._raise_failure(notebook)
        return None

    def _raise_failure(self, notebook: NotebookHandle) -> None:
        try:
            notebook.result()
            raise LaunchError(
                f"the notebook {notebook.output} ended without starting a run",
                do="look at its cells",
            )
        except BaseException as error:
            self._run.set_exception(error)
            raise


class Controller:
    """Everything behind a panel.

    Args:
        train: the training function; None: the one that ``task`` names.
        form: the form's first contents.

    Attributes:
        state: of the watched run; None: none is watched.
        board: the widgets.
        notebooks: those that were started here.
        worker: the thread in which all tasks run, and in which alone the state changes.
    """

    def __init__(self, train: actions.Train | None, form: FormState) -> None:
        self._train = train
        self.state: State | None = None
        self._handle: RunHandle | None = None
        self._validation = Validation()
        self._snapshot = FormSnapshot(form, 0, 0)
        self._stale = True
        self._pressing = threading.Lock()
        self._pressed: dict[str, Future[Future[Path] | None]] = {}
        self.board = Board(Form(form, self._on_edit))
        self._links, self.notebooks = Links(), BackgroundNotebooks()
        self._drawing = Drawing(self.board, train, self._links)
        self.worker = WorkerThread(self.poll, self._show_error)
        self._observe_widgets()
        # A first poll, so that the panel is shown complete; its errors are shown like later ones.
        self.worker.submit(self.poll).exception()

    @property
    def output_dir(self) -> str:
        """The folder of the runs, by the form."""
        config = self._validation.config
        return config.runtime.output_dir if config is not None else "outputs"

    def validate(self) -> Validation:
        """Validate what stands in the form now."""
        return self.board.form.state.copy().validate()

    def press(self, name: str) -> Future[Future[Path] | None]:
        """Submit a button's task; pressing it again before the task is done submits no other.

        Returns:
            The task's future. Its result is None, or a future of the run's folder if the task has
            started a notebook.
        """
        with self._pressing:
            if name not in self._pressed:
                if name in self.board.buttons:
                    self.board.buttons[name].disabled = True
                task = partial(self._run_button, name, self._take_snapshot())
                self._pressed[name] = self.worker.submit(task)
            return self._pressed[name]

    def close(self) -> None:
        """End the thread and the widgets."""
        self.worker.close()
        self._links.close()
        for widget in (*self.board.form.rows, self.board.root):
            close_widget(widget)

    # --- callbacks of widgets, in any thread ---

    def _observe_widgets(self) -> None:
        board = self.board
        for name, button in board.buttons.items():
            button.on_click(lambda _, name=name: self.press(name))
        board.load.on_click(lambda _: self._submit_with_file(self._load))
        board.save.on_click(lambda _: self._submit_with_file(self._save))
        for name, button in board.links.items():
            button.on_click(lambda _, name=name: self.worker.submit(partial(self._open, name)))
        board.run.observe(self._on_run_chosen, "value")
        board.sort.observe(self._on_sort_chosen, "value")
        for widget in (board.sort, board.down, board.part, board.log):
            widget.observe(self._on_view_changed, "value")
        board.tabs.observe(self._on_view_changed, "selected_index")

    def _take_snapshot(self) -> FormSnapshot:
        board = self.board
        return FormSnapshot(board.form.state.copy(), board.more.value, board.number.value)

    def _submit_with_file(self, task: Callable[[str, FormState], None]) -> None:
        board = self.board
        self.worker.submit(partial(task, board.file.value, board.form.state.copy()))

    def _on_edit(self) -> None:
        self._stale = True
        # The form calls this while it is made, before there is a thread.
        if hasattr(self, "worker") and not self.worker.is_current:
            self.worker.submit(lambda: None)  # a poll follows

    def _on_view_changed(self, _: object) -> None:
        if not self.worker.is_current:
            self._on_edit()

    def _on_sort_chosen(self, change: Mapping[str, str]) -> None:
        if not self.worker.is_current:  # that thread fills the list
            self.board.down.value = largest_first(self.state, change["new"])

    def _on_run_chosen(self, change: Mapping[str, str]) -> None:
        if not self.worker.is_current:
            folder = Path(change["new"]) if change["new"] else None
            self.worker.submit(lambda: self.watch(folder))

    # --- tasks, in the panel's thread ---

    def watch(self, folder: Path | None) -> None:
        """Watch another folder; None: none."""
        self.state = None if folder is None else read_state(folder)
        self._handle = None
        self._stale = True

    def text(self) -> str:
        """Format what is shown as text."""
        texts = [plan_text(self.validate()), self.notebooks.status_text(), page_text(self.state)]
        return "\n\n".join(text for text in texts if text)

    def html(self) -> str:
        """Render what is shown as static HTML."""
        return view(paragraph(plan_text(self.validate()))) + page_html(self.state)

    def _run_button(self, name: str, snapshot: FormSnapshot) -> Future[Path] | None:
        try:
            self._snapshot = snapshot
            self._refuse_if_disabled(name)
            self._show_message(f"{BUTTONS[name][0]} ...")
            run: Future[Path] | None = getattr(self, f"_{name}")()
            return run
        finally:
            with self._pressing:
                self._pressed.pop(name, None)
            self._stale = True

    def _refuse_if_disabled(self, name: str) -> None:
        """Check the present state, which may differ from when the button was drawn."""
        self._validation = self._snapshot.state.validate()
        if self.state is not None:
            self.state.refresh()
        starting = self.notebooks.starting is not None
        enabled = enabled_buttons(self.state, self._validation, starting)
        if name not in enabled:
            label = BUTTONS[name][0] if name in BUTTONS else name
            reason = disabled_reason(name, self.state, self._validation, starting)
            raise LaunchError(
                f"{label} cannot be pressed now{reason}",
                allowed=", ".join(button for button in BUTTONS if button in enabled) or "nothing",
                do="look at the overview and at the errors in the form",
            )

    def _launch(self) -> Future[Path] | None:
        config = self._validation.config
        assert config is not None  # else the button is disabled
        return self._follow_started(actions.start_run(self._train, config), "launched")

    def _sweep(self) -> Future[Path] | None:
        config, form = self._validation.config, self._snapshot.state
        assert config is not None
        handle = actions.start_sweep(self._train, config, form.parsed_space(), form.n_trials())
        return self._follow_started(handle, "started")

    def _go_on(self) -> None:
        state = self._watched()
        if state.status == "paused":
            actions.search_handle(state).resume()
            self._show_message("resuming")
        else:
            self._follow_started(actions.resume_unfinished(state, self._train), "resuming")

    def _train_best(self) -> Future[Path] | None:
        handle = actions.train_best(self._watched(), self._train)
        return self._follow_started(handle, "training the best")

    def _pause(self) -> None:
        actions.search_handle(self._watched()).pause()
        self._show_message("asked to pause: what runs is finished first")

    def _stop(self) -> None:
        if self.notebooks.starting is not None:
            self.notebooks.starting.stop()
            self._show_message("asked the notebook to stop")
        else:
            actions.stop(self._watched())
            self._show_message("asked to stop: all ranks stop at their next report")

    def _stop_trial(self) -> None:
        number = self._snapshot.number
        actions.stop_trial(self._watched(), number)
        self._show_message(f"asked trial {number} to stop")

    def _add_trials(self) -> None:
        count = self._snapshot.more
        actions.sweep_handle(self._watched()).add_trials(count)
        self._show_message(f"asked for {count} more trials")

    def _open(self, name: str) -> None:
        self._links.open(name, self.state, self.validate())
        self._stale = True

    def _load(self, file: str, form: FormState) -> None:
        loaded = FormState(load_config(file), form.space)
        loaded.trials = form.trials
        self.board.form.load(loaded)
        self._stale = True
        self._show_message(f"loaded {file}")

    def _save(self, file: str, form: FormState) -> None:
        config = form.validate().config
        if config is None:
            raise LaunchError("the settings are not saved: something in the form is wrong")
        path = Path(file).expanduser()
        write_whole(path, config.to_yaml())
        self._show_message(f"saved to {path.absolute()}")

    def _follow_started(self, handle: actions.Started, verb: str) -> Future[Path] | None:
        """Watch what was started; a notebook's run later, once it exists."""
        if isinstance(handle, NotebookHandle):
            self.watch(None)
            run = self.notebooks.add(handle)
            self._show_message(self.notebooks.status_text())
            return run
        self.watch(handle.paths.folder)
        self._handle = handle  # each poll reads its connection
        self._show_message(f"{verb}: {handle.paths.folder}")
        return None

    def _watched(self) -> State:
        assert self.state is not None  # else the button is disabled
        return self.state

    def _show_message(self, text: str) -> None:
        self.board.message.value = view(paragraph(text))

    def _show_error(self, error: BaseException) -> None:
        ours = isinstance(error, NbtoolkitError)
        text = str(error) if ours else f"{type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # the kernel is exiting
            self.board.message.value = view(alert(text))
            self._stale = True

    # --- drawing, in the panel's thread ---

    def poll(self) -> None:
        """Read what is new and draw it."""
        self._poll_notebooks()
        draws = self._stale
        self._stale = False
        if self._handle is not None:
            self._handle.done()  # reads its connection, so that it never fills
        if self.state is not None:
            draws = self.state.refresh() or draws or self.state.live  # times and devices change
        self._drawing.list_runs(self.state, self.output_dir)
        if draws or self._links.starting:
            form = self.board.form.state.copy()
            self._validation = form.validate()
            starting = self.notebooks.starting is not None
            self._drawing.draw(self.state, form, self._validation, self._pressed, starting)

    def _poll_notebooks(self) -> None:
        """Watch a notebook's run once it exists; show why a notebook has failed."""
        try:
            if folder := self.notebooks.poll():
                self.watch(folder)
                self._show_message(f"the notebook has started: {folder}")
        except NbtoolkitError as error:
            self._show_error(error)
