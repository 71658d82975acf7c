"""Outcome: how a notebook's run ended, by its record: a result, or the error that was its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbtoolkit.errors import NotebookDied, NotebookFailed, NotebookTimeout
from nbtoolkit.notebooks.files import NotebookFiles
from nbtoolkit.notebooks.result import NotebookResult
from nbtoolkit.runtime.made import read_made

LAST_LINES = 12
"""Of a log or a cell, in an error's text."""

_LAST_BYTES = 4_000

_ERRORS = {"timeout": NotebookTimeout, "death": NotebookDied, "kernel": NotebookDied}


def outcome(files: NotebookFiles, record: Mapping[str, Any]) -> NotebookResult:
    """The result of a notebook that has come to its end.

    Args:
        files: of its run.
        record: what was written when it had ended.

    Raises:
        NotebookFailed: it has not come to its end; or a kind of that, as ``nb.run_notebook`` says.
    """
    if failure := record["failure"]:
        error = _ERRORS.get(failure["kind"], NotebookFailed)(**record["error"])
        error.cell, error.output = failure["cell"], files.copy
        raise error
    return NotebookResult(
        values=record["values"],
        parameters=record["parameters"],
        output=files.copy,
        html=files.html if record["html"] else None,
        log=files.log,
        runs=read_made(files.runs),
        seconds=record["seconds"],
    )


def last_lines(log: Path) -> list[str]:
    """The end of a log, as lines of an error's text; none of one that is empty, or gone."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        last = file.read().decode(errors="replace").strip()
    return ["  The last lines:", *indented(last, LAST_LINES)] if last else []


def indented(text: str, lines: int) -> list[str]:
    """The last lines of a text, indented."""
    return [f"    {line}" for line in text.strip().splitlines()[-lines:]]
