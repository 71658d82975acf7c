"""Read a notebook's file, prepare it for a run, and strip what was added for that."""

from __future__ import annotations

import ast
import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import NotebookError
from nbtoolkit.notebooks.parameters import Parameter, read_parameters

if TYPE_CHECKING:
    from nbformat import NotebookNode


# --- document ---


INJECTED = "injected-parameters"  # papermill's tag
SENTINEL = "nbtoolkit-sentinel"
MARK = "nbtoolkit-failure"
_TOP_LEVEL_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST


def read_notebook(path: Path) -> NotebookNode:
    """Read a notebook of any version as one of version 4.5, without outputs of an earlier run.

    Raises:
        NotebookError: there is none, or it is no notebook.
    """
    notebook = read_as_saved(path)
    for cell in _code(notebook):
        cell.outputs, cell.execution_count = [], None
    return notebook


def read_as_saved(path: Path) -> NotebookNode:
    """Read a notebook as :func:`read_notebook` does, with the outputs that were saved.

    Raises:
        NotebookError: there is none, or it is no notebook.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or str(error)) from error
    notebook = _parsed(text, path)
    notebook.cells = [cell for cell in notebook.cells if not tags(cell) & {INJECTED, MARK}]
    return notebook


def _parsed(text: str, path: Path) -> NotebookNode:
    import nbformat

    try:
        whole = json.loads(text)
        if not isinstance(whole, dict) or "nbformat" not in whole:
            raise ValueError("its JSON is not that of a notebook")
        with warnings.catch_warnings():  # ids that are missing are made
            warnings.simplefilter("ignore")
            notebook = nbformat.reads(text, as_version=4)
            _, notebook = nbformat.validator.normalize(notebook)
            nbformat.validate(notebook)
    except (ValueError, KeyError, TypeError, AttributeError, nbformat.ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise _unreadable(path, f"not a notebook: {reason}") from error
    node: NotebookNode = nbformat.from_dict(notebook)  # of an old version it is another class
    return node


def _unreadable(path: Path, reason: str) -> NotebookError:
    near = sorted(other.name for other in path.parent.glob("*.ipynb"))
    return NotebookError(
        f"the notebook {path} cannot be read: {reason}",
        allowed="a .ipynb file" + (f"; there are {', '.join(near[:9])}" if near else ""),
    )


def declared_parameters(notebook: NotebookNode, name: str) -> dict[str, Parameter]:
    """The parameters that the notebook's cell tagged ``parameters`` declares; none without one.

    Raises:
        NotebookError: there are two such cells.
        SyntaxError: it is not Python; :func:`refuse_syntax_errors` says so better.
    """
    tagged = [(n, cell.source) for n, cell in numbered(notebook) if "parameters" in tags(cell)]
    return declared_in(tagged, name)


def declared_in(tagged: Sequence[tuple[int, str]], name: str) -> dict[str, Parameter]:
    """The same, of the number and source of each cell that has the tag."""
    if len(tagged) > 1:
        numbers = " and ".join(str(number) for number, _ in tagged)
        raise NotebookError(
            f"{name} has {len(tagged)} cells tagged 'parameters': code cells {numbers}",
            allowed="one such cell, near the top",
            do="take the tag from the others (in JupyterLab: the gear at the right, Cell Tags)",
        )
    return read_parameters(as_python(tagged[0][1])) if tagged else {}


def numbered(notebook: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    """The user's own code cells with their numbers, from 1."""
    own = (cell for cell in _code(notebook) if not tags(cell) & {INJECTED, SENTINEL})
    yield from enumerate(own, start=1)


def refuse_syntax_errors(notebook: NotebookNode, name: str) -> None:
    """Parse every cell as IPython would, so that a slip in the last one is not found after hours.

    Raises:
        NotebookError: a cell is not Python (those tagged ``raises-exception`` are left alone).
    """
    for number, cell in numbered(notebook):
        if "raises-exception" in tags(cell) or _is_bare_magic(cell.source):
            continue
        try:
            with warnings.catch_warnings():  # "\d" in a text is the user's own business
                warnings.simplefilter("ignore")
                compile(as_python(cell.source), "cell", "exec", _TOP_LEVEL_AWAIT)
        except (SyntaxError, ValueError) as error:
            line = (getattr(error, "text", None) or "").strip()
            raise NotebookError(
                f"{name}: code cell {number} is not Python: {_message(error)}: {line!r}",
                do="correct the cell; nothing was run",
            ) from error


# Line magics that people write without their sign; IPython takes them so in cells of one line
# (22 of 117 public notebooks have a bare `pip install`).
_BARE = (
    "pip",
    "conda",
    "mamba",
    "cd",
    "ls",
    "mkdir",
    "rmdir",
    "cp",
    "mv",
    "cat",
    "env",
    "matplotlib",
)


def _is_bare_magic(source: str) -> bool:
    word, _, rest = source.strip().partition(" ")
    is_line = bool(rest) and not rest.lstrip().startswith("=") and "\n" not in rest
    return word in _BARE and is_line


def as_python(source: str) -> str:
    """A cell's code with its magics as the calls that IPython makes of them."""
    with contextlib.suppress(SyntaxError, ValueError):
        ast.parse(source)
        return source  # it has none, and IPython's 0.3 s are saved
    from IPython.core.inputtransformer2 import TransformerManager

    make: Callable[[], TransformerManager] = TransformerManager  # it has no annotations
    return make().transform_cell(source)


def _message(error: SyntaxError | ValueError) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.msg} in its line {error.lineno}"
    return str(error)


def made_ready(notebook: NotebookNode, values: Mapping[str, Any], sentinel: str) -> NotebookNode:
    """A copy to run: the values in a cell after the parameters, the sentinel at the end.

    Args:
        notebook: as :func:`read_notebook` returns it.
        values: checked values of parameters.
        sentinel: the code of the last cell.
    """
    from nbformat.v4 import new_code_cell

    ready = with_parameters(notebook, values)
    ready.cells.append(new_code_cell(sentinel, metadata={"tags": [SENTINEL]}))
    return ready


def with_parameters(notebook: NotebookNode, values: Mapping[str, Any]) -> NotebookNode:
    """A copy with checked values in a cell after the parameters; without values just a copy."""
    from copy import deepcopy

    from nbformat.v4 import new_code_cell

    ready = deepcopy(notebook)
    if values:
        at = next(n for n, cell in enumerate(ready.cells) if "parameters" in tags(cell))
        lines = "\n".join(f"{name} = {_written(value)}" for name, value in values.items())
        cell = new_code_cell(f"# Parameters\n{lines}\n", metadata={"tags": [INJECTED]})
        ready.cells.insert(at + 1, cell)
    return ready


def _written(value: Any) -> str:
    """A plain value as Python source; unlike ``repr`` also for ``nan`` and ``inf``."""
    if isinstance(value, float):
        return repr(value) if value - value == 0 else f"float({str(value)!r})"
    if isinstance(value, dict):
        pairs = (f"{_written(key)}: {_written(inner)}" for key, inner in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, tuple):
        return f"({''.join(f'{_written(inner)}, ' for inner in value).strip()})"
    return repr(value)


def executed_copy(notebook: NotebookNode, failure: str = "") -> str:
    """The JSON text of a notebook that has run, without the sentinel.

    Args:
        notebook: the notebook, its outputs as far as it came.
        failure: what is told at its top, in red; empty where it did not fail.
    """
    import nbformat
    from nbformat.v4 import new_markdown_cell

    cells = [cell for cell in notebook.cells if SENTINEL not in tags(cell)]
    if failure:
        text = failure.replace("&", "&amp;").replace("<", "&lt;")
        red = f'<pre style="color: #c22; white-space: pre-wrap">{text}</pre>'
        cells.insert(0, new_markdown_cell(red, metadata={"tags": [MARK]}))
    shown = nbformat.NotebookNode({**notebook, "cells": cells})
    with warnings.catch_warnings():  # papermill's metadata is all that could be warned of
        warnings.simplefilter("ignore")
        return str(nbformat.writes(shown, version=4)) + "\n"


def is_sentinel(cell: NotebookNode) -> bool:
    """Whether this is the cell that only :func:`made_ready` adds."""
    return SENTINEL in tags(cell)


def is_injected(cell: NotebookNode) -> bool:
    """Whether this is the cell with the given values."""
    return INJECTED in tags(cell)


def _code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell: NotebookNode) -> set[str]:
    """The tags of a cell."""
    return set(cell.metadata.get("tags", ()))


# --- without nbformat ---
# What a notebook's file says without nbformat, which takes up to 1.5 s to load.


@dataclass(frozen=True)
class NotebookSummary:
    """The part of a notebook that decides what a run of it computes."""

    code: tuple[str, ...]
    """Its code cells."""
    declared: Mapping[str, Parameter]
    """Its parameters, by name."""


def summarise(path: Path) -> NotebookSummary:
    """Read a notebook's code and parameters.

    Args:
        path: the notebook. One of an old version, or damaged, is read in the long way.

    Raises:
        NotebookError: there is none, it is no notebook, has two parameters cells, or one that is
            no Python.
    """
    try:
        cells = _plain_cells(json.loads(path.read_text(encoding="utf-8")))
        tagged = [(n, code) for n, (code, tags) in enumerate(cells, 1) if "parameters" in tags]
        return NotebookSummary(tuple(code for code, _ in cells), declared_in(tagged, path.name))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SyntaxError):
        return _long_way(path)


def _plain_cells(notebook: Any) -> list[tuple[str, list[str]]]:
    """Source and tags of the code cells of a notebook of version 4, as its JSON has them."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    found = [("".join(cell["source"]), cell["metadata"].get("tags", [])) for cell in cells]
    return [(code, tags) for code, tags in found if INJECTED not in tags]


def _long_way(path: Path) -> NotebookSummary:
    notebook = read_notebook(path)
    refuse_syntax_errors(notebook, path.name)
    code = tuple(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return NotebookSummary(code, declared_parameters(notebook, path.name))
