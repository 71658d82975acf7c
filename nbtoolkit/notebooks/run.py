"""Run a notebook as a program (``nb.run_notebook``), here or in a background process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Literal, overload

from nbtoolkit.errors import NotebookError
from nbtoolkit.notebooks.background import start_notebook
from nbtoolkit.notebooks.execution import MAX_OUTPUT, Display, Limits
from nbtoolkit.notebooks.handle import NotebookHandle, NotebookResult
from nbtoolkit.notebooks.job import prepare_job
from nbtoolkit.notebooks.parameters import given_layer


@overload
def run_notebook(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    parameters: Mapping[str, object] | None = None,
    *,
    parameters_file: str | os.PathLike[str] | None = None,
    kernel: str | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    cell_timeout: float | None = None,
    max_output: int = MAX_OUTPUT,
    html: bool = True,
    display: Display = "auto",
    wait: Literal[True] = True,
) -> NotebookResult: ...


@overload
def run_notebook(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    parameters: Mapping[str, object] | None = None,
    *,
    parameters_file: str | os.PathLike[str] | None = None,
    kernel: str | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    cell_timeout: float | None = None,
    max_output: int = MAX_OUTPUT,
    html: bool = True,
    display: Display = "auto",
    wait: Literal[False],
) -> NotebookHandle: ...


@overload
def run_notebook(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    parameters: Mapping[str, object] | None = None,
    *,
    parameters_file: str | os.PathLike[str] | None = None,
    kernel: str | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    cell_timeout: float | None = None,
    max_output: int = MAX_OUTPUT,
    html: bool = True,
    display: Display = "auto",
    wait: bool,
) -> NotebookResult | NotebookHandle: ...


def run_notebook(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    parameters: Mapping[str, object] | None = None,
    *,
    parameters_file: str | os.PathLike[str] | None = None,
    kernel: str | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    cell_timeout: float | None = None,
    max_output: int = MAX_OUTPUT,
    html: bool = True,
    display: Display = "auto",
    wait: bool = True,
) -> NotebookResult | NotebookHandle:
    """Run a notebook from its first cell to its last, in a kernel of its own.

    Parameters are checked against the notebook's ``parameters`` cell, and all cells are parsed,
    before the kernel starts. A run succeeds if it reaches a last cell that is added to detect the
    end; the outputs in the executed copy do not matter. Built on papermill
    (https://papermill.readthedocs.io).

    Args:
        path: the notebook; it is not changed.
        output: path of the executed copy, ending in ``.ipynb``; HTML, record and log are written
            beside it. Default: ``outputs/<UTC time>-<name>-<4 hex>.ipynb``.
        parameters: name -> value, for names that the ``parameters`` cell assigns.
        parameters_file: a YAML or JSON file with the same; ``parameters`` override it.
        kernel: name of the kernel spec; default: the notebook's own, else ``python3``.
        cwd: the kernel's working directory; default: this process's.
        timeout: seconds for the whole notebook, including the kernel's start; None: no limit.
        cell_timeout: seconds for each cell; None: no limit.
        max_output: characters of output that the executed copy keeps of each cell; the log keeps
            all of it.
        html: whether to write the executed copy as a page too.
        display: one line per cell: ``"auto"`` (live on a terminal), ``"text"``, ``"off"``.
        wait: False returns a handle at once. The notebook then runs in a process of its own, which
            outlives this one and shows nothing.

    Returns:
        The published values and the files (with ``wait=False``, a :class:`NotebookHandle`).

    Raises:
        ParameterError: a parameter is unknown, missing or of another type.
        NotebookError: the notebook cannot be run: it is unreadable or not Python, there is no such
            kernel, or the output is in use.
        NotebookFailed: a cell raised an exception, or ended the notebook early.
        NotebookDied: the kernel died (a subclass of NotebookFailed).
        NotebookTimeout: a time limit was exceeded (a subclass of NotebookFailed).
        MissingExtra: papermill, or nbconvert for the page, is not installed.
    """
    for name, seconds in {"cell_timeout": cell_timeout, "timeout": timeout}.items():
        if seconds is not None and not seconds > 0:
            raise NotebookError(
                f"{name} is {seconds}", allowed="seconds above 0, or None: no limit"
            )
    limits = Limits(cell_timeout=cell_timeout, timeout=timeout, max_output=max_output)
    given = given_layer(parameters, parameters_file)
    job, notebook = prepare_job(path, output, given, kernel=kernel, cwd=cwd, html=html)
    with contextlib.closing(job.files.open()) as log:
        if wait:
            return job.run(notebook, log, limits, display)
        return start_notebook(job, notebook, log, limits, os.environ)
