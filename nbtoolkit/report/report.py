"""``nb.report``: everything that lies in a folder of runs, as one HTML page."""

from __future__ import annotations

import os
from pathlib import Path

from nbtoolkit.errors import ReportFolderError
from nbtoolkit.report.contents import read_report
from nbtoolkit.report.page import page
from nbtoolkit.report.words import counted
from nbtoolkit.runtime.paths import write_whole

FILE = "report.html"


def report(
    folder: str | os.PathLike[str] = "outputs", output: str | os.PathLike[str] | None = None
) -> Path:
    """Write a page on all runs in a folder, from their files alone; nothing in them is executed.

    It holds a table of the runs, learning curves, sweeps with history, importances and slices,
    cross-validations, confusion matrices, throughput and use of the devices, and the settings in
    which the runs differ. It needs no other file and no network, and is read in light and dark.

    Args:
        folder: a run's folder, or one that holds runs.
        output: the page; None: ``report.html`` in ``folder``.

    Returns:
        The page's path.

    Raises:
        ReportFolderError: there is no such folder, or the page cannot be written.
        MissingExtra: Matplotlib is not installed.
    """
    contents = read_report(folder)
    target = contents.folder / FILE if output is None else Path(output).expanduser().absolute()
    told = f"{counted(len(contents.stories), 'run')} in {contents.folder}"
    text = page(f"Report on {contents.folder.name}", told, contents.sections)
    try:
        write_whole(target, text, durable=False)
    except OSError as error:
        raise ReportFolderError(
            f"the report {target} cannot be written: {error.strerror or error}",
            allowed="a file in a folder on a disk with free space that you may write to",
            do='choose another place: output="report.html", or --output in a shell',
        ) from error
    return target
