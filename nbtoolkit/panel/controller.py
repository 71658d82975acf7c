"""Connect a panel's widgets, its form, its folder and its thread."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nbtoolkit.errors import LaunchError, NbtoolkitError
from nbtoolkit.launcher.train_function import Train
from nbtoolkit.panel import actions
from nbtoolkit.panel.board import Board, SavedPage, TrialTable
from nbtoolkit.panel.form import FormState, Validation, drop_edits, kept_edits
from nbtoolkit.panel.setup import Setup, cost_text, count_slots, place_text, training_seconds
from nbtoolkit.panel.widgets import set_text, set_trait, show
from nbtoolkit.run.attempts import run_config
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.search.sweep import SWEEP_CONFIG_FILE
from nbtoolkit.text_table import ago
from nbtoolkit.views import runs
from nbtoolkit.views.chart import as_images
from nbtoolkit.views.markup import alert
from nbtoolkit.views.page import page_html
from nbtoolkit.views.state import State, read_state
from nbtoolkit.views.sweep_cards import IMPORTANCES
from nbtoolkit.views.text import page_text
from nbtoolkit.views.trial_rows import View

if TYPE_CHECKING:
    from nbtoolkit.folds.folds import Folds
    from nbtoolkit.launcher.run_handle import RunHandle

T = TypeVar("T")

POLL_SECONDS = 1.0
"""Between two polls; more if a poll takes long."""

_POLL_SHARE = 0.2  # of a core, for the polls of a large sweep
_MESSAGE_SECONDS = 20.0  # that a message stands; errors stand until the next press

_HEARD = {
    "stop": "Stopping: waiting for each worker's next report",
    "pause": "Pausing: what runs is finished, nothing more is started",
    "stop_trial": "Stopping the trial: waiting for its next report",
}
"""What is shown when a request was sent, by button."""


Answer = tuple[str, Callable[[], object]]
"""The label of a button that answers a question, and what it does."""


def _nothing() -> None:
    pass


class WorkerThread:
    """A thread that runs tasks one after the other, and polls between them.

    Callbacks of widgets arrive in the kernel's main thread or in a subshell's, depending on
    ipykernel's version; they only submit a task here and return. So no two tasks run at once, an
    interrupt of the kernel, which goes to its main thread, does not end the panel, and a busy cell
    does not stop it.

    Args:
        poll: called every second, and after each task.
        on_error: called with what ``poll`` or a task raised.
    """

    def __init__(self, poll: Callable[[], None], on_error: Callable[[BaseException], None]) -> None:
        self._poll, self._on_error = poll, on_error
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
                before = time.thread_time()
                self._run(self._poll, Future())
                cost = time.thread_time() - before
                next_poll = time.monotonic() + max(POLL_SECONDS, cost / _POLL_SHARE)
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


class Controller:
    """Everything behind a panel.

    Args:
        train: the training function; None: the one that ``task`` names.
        form: the form's first contents.
        folds: for cross-validations; None: there are none.
        given: whether the form's contents are a configuration that the cell names: then those of
            an ended run do not replace them.
        notify: whether the browser's tab is marked at the end of a run.

    Attributes:
        board: the widgets.
        state: of the watched run; None: none is watched.
        chosen: what the person chose to see.
        output_dir: the folder of the runs: the form's when the panel was opened, later that of what
            was started.
        worker: the thread in which all tasks run, and in which alone the state changes.
        saved: the page for saved notebooks.
    """

    def __init__(
        self,
        train: Train | None,
        form: FormState,
        folds: Folds | None = None,
        *,
        given: bool = True,
        notify: bool = False,
    ) -> None:
        self._train, self._folds = train, folds
        self.state: State | None = None
        self.chosen, self.output_dir = View(), "outputs"
        self._handle: RunHandle | None = None
        self._was_live, self._message_ends = False, 0.0
        self._stale = True  # whether the next poll draws
        self._planned: object = None
        self._cost = ""
        self._pressed: dict[str, Future[None]] = {}  # the buttons whose task is not done yet
        self._pressing = threading.Lock()
        self._answers: dict[bool, Callable[[], object]] = {}
        setup = Setup(form, self._on_edit, task=train is None)
        table = TrialTable(
            on_sort=lambda name: self._submit(partial(self._sort, name)),
            on_tick=lambda number, on: self._submit(partial(self._tick, number, on)),
            on_stop=lambda number: self.press(f"stop_trial={number}"),
        )
        css_class = f"nbtoolkit-saved-{uuid.uuid4().hex[:8]}"
        self.board = Board(setup, table, css_class)
        if (config := self.validate().config) is not None:
            self.output_dir = config.runtime.output_dir
        self.board.notify.value = notify
        self.saved = SavedPage(css_class, self.html)
        self.worker = WorkerThread(self.poll, self._show_error)
        self._observe_widgets()
        # So that the panel is shown complete; errors are shown like later ones.
        self.worker.submit(partial(self._attach, given)).exception()
        self.worker.submit(self.poll).exception()

    def validate(self) -> Validation:
        """Validate what stands in the form now."""
        return self.board.setup.state.validate()

    def press(self, button: str) -> Future[None]:
        """Submit a button's task; pressing it again before the task is done submits no other."""
        with self._pressing:
            if button not in self._pressed:
                if button in self.board.buttons:
                    self.board.buttons[button].disabled = True
                    self._show_message(f"{actions.BUTTONS[button][0]} ...")
                task = partial(self._run_button, button, self.validate(), self.board.more.value)
                self._pressed[button] = self.worker.submit(task)
            return self._pressed[button]

    def close(self) -> None:
        """End the thread and the widgets."""
        self.worker.close()
        self.board.close()

    # --- callbacks of widgets, in any thread ---

    def _observe_widgets(self) -> None:
        board = self.board
        for name, button in board.buttons.items():
            button.on_click(lambda _, name=name: self._on_click(name))
        for widget, task in (
            (board.errors, self._open_error),
            (board.previous, partial(self._turn, -1)),
            (board.next, partial(self._turn, 1)),
            (board.load_run, self._load_run),
            (board.rename, self._rename),
            (board.delete, self._ask_delete),
            (board.csv, self._write_trials),
            (board.yes, partial(self._answer, True)),
            (board.no, partial(self._answer, False)),
            *((heading, _nothing) for heading in board.sections.headings.values()),
        ):
            widget.on_click(lambda _, task=task: self._submit(task))
        for field, take in (
            (board.run, lambda value: self.watch(Path(value) if value else None)),
            (board.filter, lambda value: self._choose(show=value, page=0)),
            (board.log, lambda value: self._choose(log=value)),
            (board.note, self._set_note),
            (board.more, lambda _: None),
        ):
            field.observe(
                lambda change, take=take: self._submit(partial(take, change["new"])), "value"
            )

    def _submit(self, task: Callable[[], object]) -> None:
        """Submit a task, after which everything is drawn; the panel's thread fills widgets."""

        def act() -> None:
            task()
            self._stale = True  # only now: a poll that comes before the task would reset it

        if not self.worker.is_current:
            self.worker.submit(act)

    def _on_edit(self) -> None:
        self._stale = True
        if hasattr(self, "worker"):  # the form calls this while it is made, before the thread
            self._submit(_nothing)

    def _on_click(self, name: str) -> None:
        question = actions.question_before(name, self.state)
        if not question:
            self.press(name)
            return
        stop, keep = ("Stop", partial(self.press, name)), ("Keep running", _nothing)
        self._submit(partial(self._ask, question, stop, keep))

    # --- tasks, in the panel's thread ---

    def watch(self, folder: Path | None) -> None:
        """Watch another folder; None: none."""
        self.state = None if folder is None else read_state(folder)
        self._handle, self.chosen, self._stale = None, View(), True
        self._was_live = self.state is not None and self.state.live
        title = "" if folder is None else runs.read_annotations(folder).title
        set_trait(self.board.name, "value", title)
        show(self.board.note, False)

    def text(self) -> str:
        """Format what is shown as text."""
        self._refresh_state()
        return f"{place_text(self.validate())}\n\n{page_text(self.state)}"

    def html(self) -> str:
        """Render what is shown as static HTML, as a notebook stores it."""
        self._refresh_state()
        return f"{self.board.place.value}{as_images(page_html(self.state, self.chosen))}"

    def _refresh_state(self) -> None:
        """Read what was written since the last poll: a kernel may end before the next one."""
        if self.state is not None and self.state.refresh():
            self._stale = True

    def _attach(self, given: bool) -> None:
        """Watch what runs, else the newest; load its settings; offer edits of an earlier kernel."""
        folder = runs.newest(self.output_dir)
        if folder is None:
            self.board.sections.open("Set up")
        else:
            self.watch(folder)
            if self._was_live or not given:
                with contextlib.suppress(NbtoolkitError):  # a run of an older version
                    self._load_run()
        setup = self.board.setup
        kept, saved = kept_edits(self.output_dir) or (setup.state, 0.0)
        if kept != setup.state:
            self.board.sections.open("Set up")
            text = f"Unsaved edits from {ago(max(time.time() - saved, 0.0))}:"
            discard = "Discard", partial(drop_edits, self.output_dir)
            self._ask(text, ("Restore", partial(setup.load, kept)), discard)

    def _run_button(self, button: str, validation: Validation, more: int) -> None:
        try:
            name, number = actions.parsed_button(button, more)
            self._refresh_state()  # it may differ from when the button was drawn
            offered = actions.offered_buttons(self.state, validation, self._folds)
            enabled = actions.enabled_buttons(offered, validation)
            if name not in enabled:
                raise actions.refusal(name, self.state, validation, enabled)
            handle: RunHandle | None
            if name in actions.STARTS:
                # The fork server may need seconds: the run before must not look like this one.
                self.board.clear("Starting: waiting for the first process")
                handle = actions.start(name, self._train, validation, self._folds)
                drop_edits(self.output_dir)
                self.board.setup.edited, self.output_dir = False, str(handle.paths.folder.parent)
            else:
                assert self.state is not None  # else the button is not offered
                handle = actions.control(name, self.state, self._train, number)
            if handle is not None:
                self.watch(handle.paths.folder)
                self._handle = handle  # each poll reads its connection
                if self.board.sections.opened == "Set up":
                    self.board.sections.open("")
            # What was started is on display now; a line about it would move the page.
            text = "" if handle is not None else f"{actions.BUTTONS[name][0]}: requested"
            self._show_message(_HEARD.get(name, text))
        finally:
            with self._pressing:
                self._pressed.pop(button, None)
            self._stale = True

    def _choose(self, **changes: object) -> None:
        self.chosen = replace(self.chosen, **changes)  # type: ignore[arg-type] # its own fields

    def _sort(self, name: str) -> None:
        again = name == self.chosen.sort
        self._choose(sort=name, reverse=again and not self.chosen.reverse, page=0)

    def _turn(self, pages: int) -> None:
        self._choose(page=max(self.chosen.page + pages, 0))

    def _tick(self, number: int, on: bool) -> None:
        ticked = [other for other in self.chosen.ticked if other != number]
        self._choose(ticked=(*ticked, number) if on else tuple(ticked))
        ticked = list(self.chosen.ticked)
        show(self.board.note, bool(ticked))
        if ticked and self.state is not None:
            notes = runs.read_annotations(self.state.paths.folder).notes
            set_trait(self.board.note, "description", f"note on trial {ticked[-1]}")
            set_trait(self.board.note, "value", notes.get(str(ticked[-1]), ""))
        if len(ticked) > 1:
            self.board.sections.open("Compare")

    @property
    def _folder(self) -> Path:
        """The watched folder, for what a person does with it."""
        if self.state is None:
            raise LaunchError("no run is shown", do="choose one in the list of runs")
        return self.state.paths.folder

    def _set_note(self, text: str) -> None:
        if self.chosen.ticked:
            runs.set_note(self._folder, self.chosen.ticked[-1], text)

    def _ask(self, text: str, yes: Answer, no: Answer) -> None:
        board = self.board
        set_text(board.question, text)
        for button, answer, (label, act) in ((board.yes, True, yes), (board.no, False, no)):
            button.description, self._answers[answer] = label, act
        show(board.asking, True)

    def _answer(self, yes: bool) -> None:
        show(self.board.asking, False)
        self._answers.pop(yes, _nothing)()

    def _rename(self) -> None:
        runs.rename(self._folder, self.board.name.value)

    def _ask_delete(self) -> None:
        folder = self._folder
        text = f"Move {folder.name} to {folder.parent / '.trash'}?"
        self._ask(text, ("Delete", partial(self._delete, folder)), ("Keep", _nothing))

    def _delete(self, folder: Path) -> None:
        trash = runs.move_to_trash(folder)
        self.watch(None)
        self._show_message(f"moved to {trash}")

    def _write_trials(self) -> None:
        if self.state is not None:
            self._show_message(f"written: {actions.write_trials(self.state)}")

    def _open_error(self) -> None:
        self.board.sections.open("Set up")
        for name in [*self.validate().mistakes][:1]:
            self.board.setup.open_at(name)

    def _load_run(self) -> None:
        """Put the settings of the watched run, and its space, into the form."""
        paths = RunPaths(self._folder)
        file = paths.folder / SWEEP_CONFIG_FILE
        space = file.read_text() if file.is_file() else self.board.setup.state.space
        self.board.setup.load(FormState(run_config(paths), space))
        self._show_message(f"Set up has the settings of {paths.run_id}")

    def _show_message(self, text: str) -> None:
        self._message_ends = time.monotonic() + _MESSAGE_SECONDS
        set_text(self.board.message, text)

    def _show_error(self, error: BaseException) -> None:
        ours = isinstance(error, NbtoolkitError)
        text = str(error) if ours else f"{type(error).__name__}: {error}"
        self._message_ends = float("inf")
        with contextlib.suppress(Exception):  # the kernel is exiting
            set_text(self.board.message, text, alert)
            self._stale = True

    # --- drawing, in the panel's thread ---

    def poll(self) -> None:
        """Read what is new and draw it."""
        draws, self._stale = self._stale, False
        if self._handle is not None:
            self._handle.done()  # reads its connection, so that it never fills
        if self.state is not None:
            draws = self.state.refresh() or draws or self.state.live  # times and devices change
            ended = self._was_live and self.state.over
            self._was_live = self.state.live
            if ended and self.board.notify.value:
                self.board.mark_tab(self.state.status)
        if time.monotonic() > self._message_ends:
            set_text(self.board.message, "")
        # Another user's folder: a launch reports that.
        with contextlib.suppress(OSError, NbtoolkitError):
            watched = "" if self.state is None else str(self.state.paths.folder)
            self.board.draw_runs(runs.list_runs(self.output_dir), watched)
        self.board.setup.keep(self.output_dir)
        if draws:
            self._draw()
        self.saved.update(changed=draws, now=self.state is not None and self.state.over)

    def _draw(self) -> None:
        """Draw everything but the list of runs."""
        state, validation = self.state, self.validate()
        offered = actions.offered_buttons(state, validation, self._folds)
        enabled = actions.enabled_buttons(offered, validation) - set(self._pressed)
        with self.board.batched():
            self.board.draw_buttons(offered, enabled, [*validation.mistakes])
            self.board.draw(state, self.chosen)
            self._draw_setup(validation)
        if state is not None:
            IMPORTANCES.compute_later(state, self._redraw)

    def _draw_setup(self, validation: Validation) -> None:
        """Draw what depends on the form; the plan reads the hardware, which takes time."""
        board, state = self.board, self.state
        seconds = training_seconds(state)
        status = None if state is None else (state.paths.folder, state.status, state.resumable)
        planned = (validation.form, status, actions.best_trial(state), seconds, board.listed)
        if planned != self._planned:
            self._planned = planned
            folds = None if self._folds is None else len(self._folds)
            slots, gpus = count_slots(validation)
            cost, unfinished = cost_text(validation, seconds, slots, folds, gpus), None
            with contextlib.suppress(NbtoolkitError):  # there is no such task: a press says so
                unfinished = actions.continued_sweep(self._train, validation, self._folds)
            best = ""
            with contextlib.suppress(NbtoolkitError):  # deleted, or of another version
                best = actions.code_of_best(state, self._train)
            label, tooltip = actions.sweep_button(state, unfinished)
            self._cost = cost if unfinished is None else f"{cost}\nSweep: {tooltip}".lstrip()
            set_trait(board.buttons["sweep"], "description", label)
            set_trait(board.buttons["sweep"], "tooltip", tooltip)
            board.draw_plan(place_text(validation), actions.code_of_form(validation, self._train))
            board.draw_best_code(best)
        board.setup.show(validation, self._cost)

    def _redraw(self) -> None:
        """Let the next poll draw."""
        self._stale = True
