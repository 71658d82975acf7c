"""Raise the exception of a failed run in the kernel."""

from __future__ import annotations

import re
import sys
from typing import NoReturn

from nbtoolkit.errors import NbtoolkitError, RunFileError
from nbtoolkit.run.attempts import last_event
from nbtoolkit.run.events import RunEnded
from nbtoolkit.run.paths import RunPaths, reading
from nbtoolkit.wire.serialization import (
    PackedError,
    add_note,
    as_worker_error,
    for_the_cell,
    unpack_error,
)
from nbtoolkit.wire.tracebacks import show_users_part, user_line


def raise_failure(paths: RunPaths) -> NoReturn:
    """Raise the exception of a failed run, with its own type, and rank, cell line and log as notes.

    If it cannot be unpickled, raise a :class:`WorkerError` with its text.

    Raises:
        RunFileError: neither can be read.
    """
    __tracebackhide__ = True
    try:
        error = _failure(paths)
    except RunFileError:
        ended = last_event(paths)
        if ended is None or ended.error is None:
            raise
        error = as_worker_error(_recorded_error(ended))
    _show_notes(error)
    show_users_part(error)
    raise error


def _show_notes(error: BaseException) -> None:
    """Print the exception's notes; the traceback of IPython 7 (Kaggle, Colab) omits them."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.version_info[0] < 8 and ipython.get_ipython() is not None:
        print(*getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)


def _failure(paths: RunPaths) -> BaseException:
    with reading(paths.error_pickle):
        packed = PackedError.decode(paths.error_pickle.read_bytes())
        error = unpack_error(for_the_cell(packed))
        _name_cells(error)
        if packed.rank is not None:
            location = user_line(packed.stack)
            where = f"rank {packed.rank}" + (f", {cell_name(*location)}" if location else "")
            add_note(error, f"[nbtoolkit] {where}; log: {paths.log(packed.rank)}")
        for note in packed.notes:
            add_note(error, f"[nbtoolkit] {note}")
    return error


def _name_cells(error: BaseException) -> None:
    """Name cells instead of their temporary files in the text of an error of nbtoolkit."""
    if isinstance(error, NbtoolkitError):
        problem, allowed, do = (with_cells(text) for text in (error.what, error.allowed, error.do))
        NbtoolkitError.__init__(error, problem, allowed=allowed, do=do)


_FILE_AND_LINE = re.compile(r"(<ipython-input[^>]*>|/[^\s:]+\.py):(\d+)")


def with_cells(text: str) -> str:
    """Return a text with the cells of this kernel in place of their temporary files."""
    return _FILE_AND_LINE.sub(lambda match: cell_name(match[1], int(match[2])), text)


def cell_name(filename: str, line: int) -> str:
    """Return ``Cell In[3], line 5`` for code of a cell of this kernel, else ``file:line``."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    compiler = getattr(shell, "compile", None)
    if compiler is not None and hasattr(compiler, "format_code_name"):
        name = compiler.format_code_name(filename)
        if name is not None:
            return f"{name[0]} {name[1]}, line {line}"
    elif shell is not None and compiler is not None:
        # IPython 7 (Kaggle, Colab) derives a cell's file name from its text. The history lacks the
        # text's last newline.
        cells = list(enumerate(shell.history_manager.input_hist_raw))
        for number, text in reversed(cells):
            names = (compiler.get_code_name(f"{text}{end}", text, number) for end in ("", "\n"))
            if filename in names:
                return f"Cell In[{number}], line {line}"
    return f"{filename}:{line}"


def _recorded_error(ended: RunEnded) -> PackedError:
    """Return the error of a failed run as its last event has it: without its pickle."""
    kind, _, text = (ended.error or "").partition(": ")
    trace = ended.traceback
    rank = ended.rank
    return PackedError(type=kind, text=text, traceback=trace, rank=rank, notes=ended.notes)
