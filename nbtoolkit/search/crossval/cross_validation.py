"""Cross-validate the training function, several folds at once if there are devices for them."""

from __future__ import annotations

import os
import reprlib
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from nbtoolkit.config.aliases import refuse_other_launchers_names
from nbtoolkit.config.schema import Config, ConfigLike, as_config
from nbtoolkit.environment.kernel_mlflow import tracking_place, with_kernel_uri
from nbtoolkit.errors import FoldError, LaunchError
from nbtoolkit.launcher.options import (
    LaunchOptions,
    SharedOptions,
    check_call,
    takes_options,
)
from nbtoolkit.launcher.train_function import Train, task_name
from nbtoolkit.run.attempts import failed
from nbtoolkit.run.events import Event, EventReader, FoldChanged, RunStarted
from nbtoolkit.run.failure import raise_failure
from nbtoolkit.run.output import RunDisplay, Screen, choose_screen, displays, find_display
from nbtoolkit.run.paths import RunPaths, find_run
from nbtoolkit.run.resume import resumable_first_event
from nbtoolkit.search.crossval.cv_result import CVResult, FoldTable
from nbtoolkit.search.crossval.fold_loop import FOLDS_FILE, check_same, fold_key
from nbtoolkit.search.folds.folds import Folds
from nbtoolkit.search.pool import Search
from nbtoolkit.search.slots import Placement
from nbtoolkit.search.submit import start_or_submit
from nbtoolkit.search.sweep_result import SearchHandle, TableLines
from nbtoolkit.wire.serialization import add_note

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CVHandle(SearchHandle[CVResult]):
    """A running cross-validation, from ``wait=False`` or ``nb.attach(folder)``.

    Args:
        paths: its folder.
        options: as for :class:`~nbtoolkit.launcher.run_handle.RunHandle`.
    """

    def __init__(self, paths: RunPaths, **options: Any) -> None:
        super().__init__(paths, CVResult, **options)

    def _outcome(self) -> Any:
        __tracebackhide__ = True
        if self._lost is None and failed(self.paths):
            _raise_failed_fold(self.paths)
        return super()._outcome()


def _raise_failed_fold(paths: RunPaths) -> None:
    """Raise what the failed fold raised; does nothing if no fold left an exception."""
    __tracebackhide__ = True
    failed: list[int] = []  # in this session
    for event in EventReader(paths.events).read():
        if isinstance(event, RunStarted):
            failed.clear()
        elif isinstance(event, FoldChanged) and event.state == "failed":
            failed.append(event.fold)
    for index in failed[:1]:
        fold = RunPaths(paths.folder / fold_key(index))
        if fold.error_pickle.exists():
            try:
                raise_failure(fold)
            except BaseException as error:
                add_note(error, f"[nbtoolkit] fold {index}; the folds that are done are kept")
                raise


@overload
def cross_validate(
    train: Train,
    config: ConfigLike,
    folds: Folds,
    *,
    processes: int | None = None,
    wait: Literal[True] = True,
    **shared: Unpack[SharedOptions],
) -> CVResult: ...


@overload
def cross_validate(
    train: Train,
    config: ConfigLike,
    folds: Folds,
    *,
    processes: int | None = None,
    wait: Literal[False],
    **shared: Unpack[SharedOptions],
) -> CVHandle: ...


@refuse_other_launchers_names
@takes_options
def cross_validate(
    train: Train,
    config: ConfigLike,
    folds: Folds,
    *,
    processes: int | None = None,
    wait: bool = True,
    **shared: Unpack[SharedOptions],
) -> CVResult | CVHandle:
    """Run ``train(config, ctx)`` once per fold, with several folds at once on several devices.

    In the function, ``ctx.fold`` has ``index``, ``train_indices`` and ``valid_indices``. All folds
    have the seed of the configuration. Each fold is a run of its own, in the subfolder
    ``folds/<index>``.

    Args:
        train: the training function. If it returns a dict with ``"predictions"``, one for each
            validation sample in their order, the result has predictions for the whole data set.
        config: a Config, a path to a YAML file, or a dict; None: the defaults.
        folds: the folds, from :func:`nbtoolkit.make_folds`.
        processes: the number of ranks of each fold. None: the folds run side by side, with one
            device each; if there are fewer folds than devices, they run one after the other, on all
            devices.
        name: the end of the folder's name; default: ``<name of the function>_cv``.
        resume: ``"auto"`` resumes the newest cross-validation that has the same configuration,
            function and folds, is unfinished, and is not running. Its finished folds do not run
            again, and its other folds resume from their checkpoints. ``"never"`` starts a new one.
            The folder of a cross-validation, or the folder's name, resumes this cross-validation.
        where: ``"local"``: on this machine. ``"slurm"``: in one job on one machine, whose devices
            the folds share. ``"ray"``: on all machines of Ray (see docs/cluster.md).
        wait: False returns a :class:`CVHandle` at once.
        detach: whether the cross-validation outlives this process; see :func:`nbtoolkit.attach`.
        display: how to show the progress. ``"html"``: a live page in the cell. ``"text"``: a line
            per fold that ends, and one per minute. ``"auto"``: the page in a notebook, lines
            elsewhere and under papermill, which also gets the page at the end. ``"off"``: nothing.
        on_event: called with each event of the cross-validation while this process waits for it.

    Returns:
        The :class:`~nbtoolkit.search.crossval.cv_result.CVResult`; with ``wait=False`` a
        :class:`CVHandle`.

    Raises:
        FoldError: ``folds`` is not a ``Folds``, or not that of the run to resume.
        NbtoolkitError: the cross-validation could not be planned or started, or a rank of one fold
            died or hung twice.
        KeyboardInterrupt: the wait was interrupted; all processes have ended.
        Exception: the exception of the training function, with its own type. Finished folds are
            kept.
    """
    __tracebackhide__ = True
    options = LaunchOptions(processes=processes, wait=wait, **shared)
    check_call(train, options)
    _check_folds(folds)
    screen = choose_screen(options.display, find_display())
    config = as_config(config, processes).with_overrides({"task": task_name(train)})
    config = with_kernel_uri(config)
    _check_resumed(options.resume, config, folds)
    now = time.time()
    search = _search(folds, processes)
    label = options.name or f"{getattr(train, '__name__', 'run')}_cv"
    again = partial(cross_validate, train, config, folds, processes=processes)
    started = start_or_submit(train, config, search, options, name=label, again=again)
    run = started.run
    cell = _output(run.paths, len(folds), screen, since=now)
    place = tracking_place(config)
    cell.say(f"cross-validation, {len(folds)} folds -> {run.paths.folder}{place}")
    if run.resumed:
        cell.say(f"resuming it (attempt {run.attempt}; resume='never' starts a new one)")
    handle = CVHandle(run.paths, started=started.process, cell=cell, on_event=options.on_event)
    if not wait:
        cell.open(waits=False)
    return handle.result() if wait else handle


def handle_on_folds(
    paths: RunPaths, screen: Screen, *, on_event: Callable[[Event], None] | None = None
) -> CVHandle:
    """Make a handle on a cross-validation for :func:`nbtoolkit.attach`.

    Args:
        paths: its folder.
        screen: where ``result()`` shows its output.
        on_event: called with each event while ``result()`` waits.
    """
    file = paths.folder / FOLDS_FILE
    count = len(Folds.load(file)) if file.exists() else None
    return CVHandle(paths, cell=_output(paths, count, screen), on_event=on_event)


def _output(
    paths: RunPaths, folds: int | None, screen: Screen, *, since: float = 0.0
) -> RunDisplay:
    lines = TableLines(FoldTable(folds=folds), screen, since=since)
    return displays().show(lines, paths, screen, folds=folds)


def _search(folds: Folds, processes: int | None) -> Search:
    """Return the search that a scheduler runs."""
    if processes is None:
        placement: Placement = "auto"
    else:
        placement = "device_per_trial" if processes == 1 else "all_devices_per_trial"
    return Search(
        kind="cv",
        loop="nbtoolkit.search.crossval.fold_loop:run_folds",
        identity={"folds": folds.hash, "target": folds.target},
        placement=placement,
        jobs=len(folds),
        folds=folds,
    )


def _check_folds(folds: object) -> None:
    if not isinstance(folds, Folds):
        raise FoldError(
            f"cross_validate was given {reprlib.repr(folds)} as folds",
            allowed="the return value of nb.make_folds",
            do="nb.make_folds(y, k=5); for pairs of your own kind='predefined', predefined=pairs",
        )


def _check_resumed(resume: str | os.PathLike[str], config: Config, folds: Folds) -> None:
    """Refuse to resume a named cross-validation with other folds."""
    if resume in ("auto", "never"):
        return
    try:
        paths = find_run(resume, config.runtime.output_dir)
    except LaunchError:  # there is none: start_search raises
        return
    file = paths.folder / FOLDS_FILE
    if file.exists():  # else it is something else, or was cut off before it began
        resumable_first_event(paths)
        check_same(Folds.load(file), folds)
