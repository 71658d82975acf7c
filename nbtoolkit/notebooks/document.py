"""Read a notebook file, add cells for a run, and write the executed copy without them."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.errors import NotebookError
from nbtoolkit.notebooks.parameters import Parameter, read_parameters

if TYPE_CHECKING:
    from nbformat import NotebookNode

# Tags of the cells that a run adds; the first is papermill's.
INJECTED = "injected-parameters"
SENTINEL = "nbtoolkit-sentinel"
FAILURE = "nbtoolkit-failure"

_TOP_LEVEL_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST

# Line magics that people write without the percent sign. IPython accepts that in cells of one line
# (22 of 117 public notebooks have a bare `pip install`), but not before an assignment.
_BARE_MAGIC = re.compile(r"(pip|conda|mamba|cd|ls|mkdir|rmdir|cp|mv|cat|env|matplotlib) (?! *=).+")


def read_notebook(path: Path) -> NotebookNode:
    """Read a notebook of any format version as version 4.5, without stored outputs.

    Raises:
        NotebookError: the file is missing or is not a notebook.
    """
    notebook = read_as_saved(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
            cell.execution_count = None
    return notebook


def read_as_saved(path: Path) -> NotebookNode:
    """Read a notebook like :func:`read_notebook`, with its stored outputs.

    Raises:
        NotebookError: the file is missing or is not a notebook.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or str(error)) from error
    notebook = _parse(text, path)
    added = {INJECTED, SENTINEL, FAILURE}
    notebook.cells = [cell for cell in notebook.cells if not tags(cell) & added]
    return notebook


def _parse(text: str, path: Path) -> NotebookNode:
    import nbformat

    try:
        content = json.loads(text)
        if not isinstance(content, dict) or "nbformat" not in content:
            raise ValueError("its JSON is not that of a notebook")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nbformat warns of missing ids, and adds them
            notebook = nbformat.reads(text, as_version=4)
            _, notebook = nbformat.validator.normalize(notebook)
            nbformat.validate(notebook)
    except (ValueError, KeyError, TypeError, AttributeError, nbformat.ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise _unreadable(path, f"not a notebook: {reason}") from error
    # A notebook of an old format version has another class.
    node: NotebookNode = nbformat.from_dict(notebook)
    return node


def _unreadable(path: Path, reason: str) -> NotebookError:
    others = sorted(other.name for other in path.parent.glob("*.ipynb"))
    return NotebookError(
        f"the notebook {path} cannot be read: {reason}",
        allowed="a .ipynb file" + (f"; there are {', '.join(others[:9])}" if others else ""),
    )


def declared_parameters(notebook: NotebookNode, name: str) -> dict[str, Parameter]:
    """Return the parameters that the cell tagged ``parameters`` declares; {} without such a cell.

    Raises:
        NotebookError: two cells have the tag.
        SyntaxError: the cell is not Python; :func:`refuse_syntax_errors` gives a better message.
    """
    tagged = {n: cell.source for n, cell in numbered(notebook) if "parameters" in tags(cell)}
    if len(tagged) > 1:
        numbers = " and ".join(map(str, tagged))
        raise NotebookError(
            f"{name} has {len(tagged)} cells tagged 'parameters': code cells {numbers}",
            allowed="one such cell, near the top",
            do="remove the tag from the others (in JupyterLab: the gear at the right, Cell Tags)",
        )
    return read_parameters(as_python("\n".join(tagged.values())))


def numbered(notebook: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    """Yield the user's own code cells with their numbers, from 1."""
    yield from enumerate(filter(is_own_code, notebook.cells), start=1)


def is_own_code(cell: NotebookNode) -> bool:
    """Whether this is one of the user's own code cells, not one that a run adds."""
    return cell.cell_type == "code" and not tags(cell) & {INJECTED, SENTINEL}


def refuse_syntax_errors(notebook: NotebookNode, name: str) -> None:
    """Parse every cell as IPython does, so that an error in the last cell shows before the run.

    Raises:
        NotebookError: a cell is not Python; cells tagged ``raises-exception`` are not checked.
    """
    for number, cell in numbered(notebook):
        if "raises-exception" in tags(cell) or _BARE_MAGIC.fullmatch(cell.source.strip()):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes such as "\d" are allowed
                compile(as_python(cell.source), "cell", "exec", _TOP_LEVEL_AWAIT)
        except (SyntaxError, ValueError) as error:
            raise NotebookError(
                f"{name}: code cell {number} is not Python: {_message(error)}",
                do="correct the cell; no cell has run",
            ) from error


def as_python(source: str) -> str:
    """Return a cell's code with its magics as the calls that IPython makes of them."""
    # Code without magics does not need IPython, whose import takes 0.3 s.
    with contextlib.suppress(SyntaxError, ValueError):
        ast.parse(source)
        return source
    from IPython.core.inputtransformer2 import TransformerManager

    make: Callable[[], TransformerManager] = TransformerManager  # it has no annotations
    return make().transform_cell(source)


def _message(error: SyntaxError | ValueError) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.msg} in its line {error.lineno}: {(error.text or '').strip()!r}"
    return str(error)


def with_parameters(
    notebook: NotebookNode, values: Mapping[str, object], *, sentinel: str = ""
) -> NotebookNode:
    """Return a copy with values in a cell after the parameters cell.

    Args:
        notebook: from :func:`read_notebook`.
        values: checked values of parameters; without values no cell is added.
        sentinel: code of a cell to add at the end; empty: none.
    """
    from nbformat.v4 import new_code_cell

    copy = deepcopy(notebook)
    if values:
        index = next(n for n, cell in enumerate(copy.cells) if "parameters" in tags(cell))
        lines = "\n".join(f"{name} = {_as_source(value)}" for name, value in values.items())
        cell = new_code_cell(f"# Parameters\n{lines}\n", metadata={"tags": [INJECTED]})
        copy.cells.insert(index + 1, cell)
    if sentinel:
        copy.cells.append(new_code_cell(sentinel, metadata={"tags": [SENTINEL]}))
    return copy


def _as_source(value: object) -> str:
    """Return a plain value as Python source; unlike ``repr`` also for ``nan`` and ``inf``."""
    if isinstance(value, float):
        return repr(value) if value - value == 0 else f"float({str(value)!r})"
    if isinstance(value, dict):
        pairs = (f"{_as_source(key)}: {_as_source(inner)}" for key, inner in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_as_source, value))}]"
    if isinstance(value, tuple):
        return f"({''.join(f'{_as_source(inner)}, ' for inner in value).strip()})"
    return repr(value)


def executed_copy(notebook: NotebookNode, failure: str = "") -> str:
    """Return the JSON text of a notebook that has run, without the sentinel cell.

    Args:
        notebook: the notebook with its outputs so far.
        failure: text to show at its top, in red; empty if the run did not fail.
    """
    import nbformat
    from nbformat.v4 import new_markdown_cell

    cells = [cell for cell in notebook.cells if SENTINEL not in tags(cell)]
    if failure:
        text = failure.replace("&", "&amp;").replace("<", "&lt;")
        red = f'<pre style="color: #c22; white-space: pre-wrap">{text}</pre>'
        cells.insert(0, new_markdown_cell(red, metadata={"tags": [FAILURE]}))
    shown = nbformat.NotebookNode({**notebook, "cells": cells})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nbformat warns of papermill's metadata
        return str(nbformat.writes(shown, version=4)) + "\n"


def tags(cell: NotebookNode) -> set[str]:
    """Return a cell's tags."""
    return set(cell.metadata.get("tags", ()))
