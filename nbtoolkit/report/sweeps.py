"""Sweeps: the best trials of each, its history, what matters, and where good values lie."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.errors import RunFileError, SweepError
from nbtoolkit.report.picture import Picture
from nbtoolkit.report.section import Section
from nbtoolkit.report.story import Story
from nbtoolkit.search.labels import shortened
from nbtoolkit.search.plots import plot_history, plot_importances, plot_slices
from nbtoolkit.search.sweep_result import STUDY_FILE, read_wishes
from nbtoolkit.search.table import SweepTable
from nbtoolkit.search.wishes import Wishes

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from optuna import Study
    from optuna.storages import RDBStorage

_SWEEPS = 3  # the newest
_PLOTS: dict[str, Callable[..., Figure]] = {
    "history": plot_history,
    "importances": plot_importances,
    "slices": plot_slices,
}


def sweeps(stories: Sequence[Story]) -> Section:
    """The newest sweeps, with plots of their studies."""
    section = Section("Sweeps")
    found = [story for story in stories if story.kind == "sweep"]
    for story in reversed(found[-_SWEEPS:]):
        section.head(story.label)
        _add(section, story)
    if len(found) > _SWEEPS:
        section.say(f"The newest {_SWEEPS} of {len(found)} sweeps are shown.")
    return section if found else section.say("There is no sweep in this folder.")


def _add(section: Section, story: Story) -> None:
    try:
        wishes = read_wishes(story.paths.folder)
    except RunFileError as error:
        section.say(f"Its sweep.yaml cannot be read: {shortened(str(error.__cause__), 200)}")
        return
    section.html(_table(story, wishes).html())
    if find_spec("optuna") is None:
        section.say("Its plots need Optuna: pip install optuna")
        return
    try:
        with opened_study(story.paths.folder / STUDY_FILE) as study:
            _add_plots(section, story, study, wishes.metrics)
    except SweepError as error:
        section.say(f"Its plots are missing: {error.what}.")


def _table(story: Story, wishes: Wishes) -> SweepTable:
    table = SweepTable.of(wishes)
    table.read(story.events)
    return table


def _add_plots(section: Section, story: Story, study: Study, metrics: Sequence[str]) -> None:
    for objective, metric in enumerate(metrics):
        for name, plot in _PLOTS.items():
            try:
                figure = plot(study, metric=metric, objective=objective)
            except SweepError as error:
                section.say(f"No plot of its {name}: {error.what}; it takes {error.allowed}.")
                continue
            alt = f"{name} of the sweep {story.label}, {metric}"
            section.picture(Picture(figure, alt))


@contextmanager
def opened_study(file: Path) -> Iterator[Study]:
    """An Optuna study, read from a copy.

    So a sweep that goes on is left in peace; and SQLite needs to write beside what it reads, which
    an attached folder does not allow.

    Raises:
        SweepError: there is none, or it is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="nbtoolkit-report-") as folder:
        storage = _opened(_copied(file, Path(folder)))
        try:
            yield _only_study(storage)
        finally:
            storage.remove_session()
            storage.engine.dispose()


def _opened(copy: Path) -> RDBStorage:
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    from nbtoolkit.search.study import open_storage

    try:
        return open_storage(copy)
    except (SQLAlchemyError, StorageInternalError, RuntimeError) as error:
        raise _unreadable(copy, error) from error


def _only_study(storage: RDBStorage) -> Study:
    import optuna

    names = optuna.get_all_study_names(storage)
    if len(names) != 1:
        raise SweepError(
            f"its study file holds {len(names)} studies", allowed="the one that a sweep writes"
        )
    return optuna.load_study(study_name=names[0], storage=storage)


def _copied(file: Path, folder: Path) -> Path:
    from nbtoolkit.search.study import copy_study

    if not file.is_file():  # SQLite would make it
        raise _unreadable(file, "there is none")
    copy = folder / file.name
    try:
        copy_study(file, copy)
    except sqlite3.OperationalError:  # a folder that cannot be written; its log is copied as it is
        try:
            for one in (file, file.with_name(f"{file.name}-wal")):
                if one.exists():
                    shutil.copyfile(one, folder / one.name)
        except OSError as error:
            raise _unreadable(file, error) from error
    except sqlite3.DatabaseError as error:
        raise _unreadable(file, error) from error
    return copy


def _unreadable(file: Path, error: object) -> SweepError:
    return SweepError(
        f"its study {file.name} cannot be read: {error}",
        allowed="the SQLite file that a sweep writes",
    )
