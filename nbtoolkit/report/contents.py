"""Contents: a report's sections, made from the folders of runs alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from nbtoolkit.errors import ReportFolderError
from nbtoolkit.report.confusion import confusion
from nbtoolkit.report.curves import curves
from nbtoolkit.report.differences import differences
from nbtoolkit.report.folds import folds
from nbtoolkit.report.overview import overview
from nbtoolkit.report.section import Section
from nbtoolkit.report.story import Story, read_story
from nbtoolkit.report.sweeps import sweeps
from nbtoolkit.report.throughput import throughput
from nbtoolkit.runtime.paths import RunPaths, by_age

DEPTH = 4  # folders below the one that is reported on


class Report:
    """What the folders of runs tell; each section is made when it is first asked for.

    Attributes:
        folder: what is reported on.
        stories: the runs, sweeps and cross-validations in it, oldest first.
    """

    def __init__(self, folder: Path, stories: Sequence[Story]) -> None:
        self.folder, self.stories = folder, list(stories)

    @cached_property
    def overview(self) -> Section:
        """All runs in one table."""
        return overview(self.stories)

    @cached_property
    def curves(self) -> Section:
        """Learning curves of the newest runs."""
        return curves(self.stories)

    @cached_property
    def sweeps(self) -> Section:
        """Best trials, history, importances and slices of the newest sweeps."""
        return sweeps(self.stories)

    @cached_property
    def folds(self) -> Section:
        """Scores of the newest cross-validations, fold by fold."""
        return folds(self.stories)

    @cached_property
    def confusion(self) -> Section:
        """Which class was taken for which."""
        return confusion(self.stories)

    @cached_property
    def throughput(self) -> Section:
        """Samples a second, and use of the devices."""
        return throughput(self.stories)

    @cached_property
    def differences(self) -> Section:
        """Settings that are not the same in all runs."""
        return differences(self.stories)

    @property
    def sections(self) -> list[Section]:
        """All of them, in the order of the page."""
        names = ("overview", "curves", "sweeps", "folds", "confusion", "throughput", "differences")
        return [getattr(self, name) for name in names]

    def __repr__(self) -> str:
        return f"Report({len(self.stories)} runs, {self.folder})"


def read_report(folder: str | os.PathLike[str]) -> Report:
    """Read the runs in a folder.

    Args:
        folder: a run's folder, or one that holds runs, at most four folders below it.

    Raises:
        ReportFolderError: there is no such folder, or it is another user's.
    """
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise ReportFolderError(
            f"there is no folder {path} to report on",
            allowed="a run's folder, or one that holds runs: runtime.output_dir",
            do='name it: nb.report("outputs"), or nbtoolkit report outputs',
        )
    try:
        os.listdir(path)
    except OSError as error:
        raise ReportFolderError(
            f"the folder {path} cannot be read: {error.strerror}",
            allowed="a folder that this user may read; a run's is its owner's alone",
            do=f"let its owner share it: chmod go+rX {path}",
        ) from error
    return Report(path, [read_story(paths) for paths in runs_below(path)])


def runs_below(folder: Path) -> list[RunPaths]:
    """The runs in a folder, oldest first; not the trials and folds inside."""
    return sorted(_found(folder, DEPTH), key=lambda paths: (by_age(paths.folder), paths.folder))


def _found(folder: Path, depth: int) -> Iterator[RunPaths]:
    # both: MLflow keeps a copy of the first among a run's artifacts
    if all(os.path.isfile(folder / name) for name in ("versions.json", "events.jsonl")):
        yield RunPaths(folder)
        return
    try:
        inside = [
            Path(entry) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)
        ]
    except OSError:  # somebody else's
        return
    for one in inside if depth else []:
        yield from _found(one, depth - 1)
