"""The event loop that nbclient makes in a thread without one, closed when the run is over."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable


def with_its_own_loop(work: Callable[[], None]) -> None:
    """Do ``work``; close the event loop that it left in this thread, unless it is the main one.

    nbclient keeps a loop (three open files) for each thread that ever ran a notebook, in a context
    variable: in a copy of the context nobody else comes to know of it. In a thread whose loop runs,
    as in a kernel, it uses another one, which stays.
    """
    if threading.current_thread() is threading.main_thread() or _runs():
        work()
        return
    try:
        contextvars.copy_context().run(work)
    finally:
        asyncio.get_event_loop().close()
        asyncio.set_event_loop(None)


def _runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
