"""Find out whether this rank waits in a collective, from the frames of its main thread."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from nbtoolkit.wire.tracebacks import is_users

_CALLER = "nbtoolkit.worker.main"  # calls the training function


def waiting_place() -> tuple[str, list[str]]:
    """Return where the main thread waits for other ranks; ``("", [])`` if it does not.

    Returns:
        File and line of the innermost frame in the user's code, and all frames as text, from the
        training function on.
    """
    frames = _main_frames()
    if not in_collective([frame.f_globals.get("__name__", "") for frame in frames]):
        return "", []
    users = (frame for frame in frames if is_users(frame.f_code.co_filename))
    innermost = next(users, frames[-1])
    stack = [f"{_line(frame)} in {frame.f_code.co_name}" for frame in reversed(frames)]
    return _line(innermost), stack


def in_collective(modules: Sequence[str]) -> bool:
    """Return whether a stack ends in a call that waits for other ranks.

    DDP waits for its buckets inside the backward call. Its own module counts as the innermost one
    only: the model's forward is called from there.

    Args:
        modules: the module of each frame, innermost first.
    """
    torchs = list(itertools.takewhile(lambda name: name.startswith("torch."), modules))
    if torchs[:1] == ["torch.nn.parallel.distributed"]:
        return True
    return any(
        name.startswith("torch.distributed.") or name == "torch.autograd.graph" for name in torchs
    )


def _main_frames() -> list[FrameType]:
    """Return the main thread's frames, innermost first, down to the training function."""
    frames = []
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_globals.get("__name__") != _CALLER:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
