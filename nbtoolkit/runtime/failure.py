"""A failed run's exception, raised in the kernel as its own type, with rank, cell line and log."""

from __future__ import annotations

import pickle
import sys
from typing import NoReturn

from nbtoolkit.errors import RunFileError
from nbtoolkit.runtime.crossing import add_note, stand_in, unpack_error, user_line
from nbtoolkit.runtime.paths import RunPaths, read_record, reading


def raise_failure(paths: RunPaths) -> NoReturn:
    """Raise what ended the run; where the exception cannot be read, one with its text.

    Raises:
        RunFileError: neither can be read.
    """
    __tracebackhide__ = True
    try:
        error = _failure(paths)
    except RunFileError:
        told = read_record(paths.error)
        with reading(paths.error):
            error = stand_in(told or {})
    _show_notes(error)
    raise error


def _show_notes(error: BaseException) -> None:
    """IPython 7, which Kaggle and Colab have, leaves an exception's notes out of its traceback."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.version_info[0] < 8 and ipython.get_ipython() is not None:
        print(*getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)


def _failure(paths: RunPaths) -> BaseException:
    with reading(paths.error_pickle):
        packed = pickle.loads(paths.error_pickle.read_bytes())
        error = unpack_error(packed)
        if packed["rank"] is not None:
            place = user_line(packed)
            where = f"rank {packed['rank']}" + (f", {cell_name(*place)}" if place else "")
            add_note(error, f"[nbtoolkit] {where}; log: {paths.log(packed['rank'])}")
        for note in packed["notes"]:
            add_note(error, f"[nbtoolkit] {note}")
    return error


def cell_name(filename: str, line: int) -> str:
    """``Cell In[3], line 5`` for code of a cell of this kernel, else file and line."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    compiler = getattr(shell, "compile", None)
    if compiler is not None and hasattr(compiler, "format_code_name"):
        name = compiler.format_code_name(filename)
        if name is not None:
            return f"{name[0]} {name[1]}, line {line}"
    elif shell is not None and compiler is not None:
        # IPython 7 (Kaggle, Colab) names a cell's file after its text; the history has lost the
        # text's last newline.
        cells = list(enumerate(shell.history_manager.input_hist_raw))
        for number, text in reversed(cells):
            names = (compiler.get_code_name(f"{text}{end}", text, number) for end in ("", "\n"))
            if filename in names:
                return f"Cell In[{number}], line {line}"
    return f"{filename}:{line}"
