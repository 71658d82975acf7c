"""End forked processes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def run_and_exit(run: Callable[[], None]) -> NoReturn:
    """Run the main function of a forked process, and end it."""
    try:
        run()
    except BaseException as error:
        end_process(error)
    end_process(None)


def end_process(error: BaseException | None) -> NoReturn:
    """End a forked process: with the code of a SystemExit, with 1 after another exception."""
    code = 1
    try:
        if error is None:
            code = 0
        elif isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 1
        else:
            traceback.print_exception(error)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def kill_group(pid: int) -> None:
    """SIGKILL a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def close_all(fds: list[int]) -> None:
    """Close descriptors; ignores those that are already closed."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def die_with_parent(number: int) -> None:
    """Ask Linux for signal ``number`` when the parent thread ends (PR_SET_PDEATHSIG)."""
    from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

    _prctl_pr_set_pdeathsig(number)
