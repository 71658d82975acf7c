"""Run the panel's one thread, for button presses in order, and a look every second.

Callbacks of widgets arrive in the kernel's main thread or in a subshell's, by version of ipykernel;
they only leave a task here and return. So no two tasks ever run at once, an interrupt of the kernel
(which goes to its main thread) does not end the panel, and a busy cell does not stop it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from nbtoolkit.errors import LaunchError

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
