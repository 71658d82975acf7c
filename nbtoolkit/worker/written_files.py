"""Note the files that a job of a search writes outside its folder: parallel jobs may share them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

_MOST = 1000  # files of one job
_WRITES = os.O_WRONLY | os.O_RDWR
_SYSTEM = ("/dev/", "/proc/", "/sys/")

# Receives the path of each file that Python code of this process opens for writing.
_note: Callable[[object], None] | None = None
_hooked = False


@contextmanager
def written_files(folder: Path) -> Iterator[list[str]]:
    """Collect the files that this process writes inside the block, but not below ``folder``.

    Notes what Python code opens, and ``torch.save``, which opens files in C++. Leaves out devices,
    hidden files and folders (caches), and files that are appended to (logs).
    """
    import torch

    global _note, _hooked
    if not _hooked:
        _hooked = True
        sys.addaudithook(_on_event)  # for the life of the process; a hook cannot be removed
    files: list[str] = []
    prefix = os.path.join(folder, "")
    process = os.getpid()
    save = torch.save

    def note(file: object) -> None:
        if not isinstance(file, (str, os.PathLike)) or os.getpid() != process:
            return
        path = os.path.abspath(os.fsdecode(file))
        hidden = "/." in path or "/__pycache__/" in path
        if not (hidden or path.startswith((prefix, *_SYSTEM)) or path in files):
            files.append(path)
            del files[_MOST:]

    @wraps(save)
    def saved(obj: object, f: Any, *args: Any, **options: Any) -> None:
        note(f)
        save(obj, f, *args, **options)

    _note = note
    setattr(torch, "save", saved)  # noqa: B010
    try:
        yield files
    finally:
        _note = None
        setattr(torch, "save", save)  # noqa: B010


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _note is not None:
        path, _, flags = args
        if isinstance(flags, int) and flags & _WRITES and not flags & os.O_APPEND:
            _note(path)
