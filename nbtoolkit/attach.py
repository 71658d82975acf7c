"""Attach to a run or a search by its folder: of another kernel, detached, or ended."""

from __future__ import annotations

import os
from collections.abc import Callable

from nbtoolkit.launcher.options import check_choice
from nbtoolkit.launcher.run_handle import RunHandle
from nbtoolkit.run.attempts import first_event, kind_of
from nbtoolkit.run.events import Event
from nbtoolkit.run.output import CellOutput, Display, choose_screen, displays, find_display
from nbtoolkit.run.paths import find_run


def attach(
    folder: str | os.PathLike[str],
    *,
    display: Display = "auto",
    on_event: Callable[[Event], None] | None = None,
) -> RunHandle:
    """Return a handle to a run that another kernel started, or that has ended.

    For a sweep the handle is a :class:`~nbtoolkit.search.sweep_result.SweepHandle`, and for a
    cross-validation a :class:`~nbtoolkit.search.crossval.cross_validation.CVHandle`. The handle
    shows nothing until you call ``result()`` or a cell displays it.

    Args:
        folder: the run's folder, or its id in the folder ``outputs``.
        display: what ``result()`` shows, as for :func:`nbtoolkit.launch`.
        on_event: called with each event while ``result()`` waits.

    Raises:
        LaunchError: there is no such run, or ``display`` has an invalid value.
        RunFileError: the folder's ``events.jsonl`` or ``sweep.yaml`` cannot be read.
        FoldError: the folder's ``folds.json`` cannot be read.
        MissingExtra: ``display`` needs ipywidgets, which is not installed.
    """
    check_choice("display", display)
    screen = choose_screen(display, find_display())
    paths = find_run(folder)
    kind = kind_of(first_event(paths))
    if kind == "sweep":
        from nbtoolkit.search.sweep import handle_on_sweep

        return handle_on_sweep(paths, screen, on_event=on_event)
    if kind == "cv":
        from nbtoolkit.search.crossval.cross_validation import handle_on_folds

        return handle_on_folds(paths, screen, on_event=on_event)
    cell = displays().show(CellOutput(paths, display), paths, screen)
    return RunHandle(paths, cell=cell, on_event=on_event)
