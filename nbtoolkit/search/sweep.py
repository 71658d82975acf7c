"""Run the training function with many sets of parameters, on every device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, overload

from nbtoolkit.config.aliases import refuse_other_launchers_names
from nbtoolkit.config.schema import Config, ConfigLike, as_config
from nbtoolkit.environment.installed import install_line
from nbtoolkit.environment.kernel_mlflow import tracking_place, with_kernel_uri
from nbtoolkit.errors import ConfigError, FoldError, MissingExtra
from nbtoolkit.launcher.options import (
    LaunchOptions,
    SharedOptions,
    check_call,
    takes_options,
)
from nbtoolkit.launcher.train_function import Train, task_name
from nbtoolkit.run.events import Event
from nbtoolkit.run.output import RunDisplay, Screen, choose_screen, displays, find_display
from nbtoolkit.run.paths import RunPaths, folder_error, write_whole
from nbtoolkit.search.folds.folds import Folds
from nbtoolkit.search.folds.make_folds import make_folds
from nbtoolkit.search.pool import Search
from nbtoolkit.search.study.sweep_config import SweepConfig, load_sweep_config
from nbtoolkit.search.study.table import SweepTable
from nbtoolkit.search.submit import WantedSearch, complete, start_or_submit, unfinished
from nbtoolkit.search.sweep_result import SweepHandle, SweepResult, TableLines, read_sweep_config
from nbtoolkit.tasks.find import find_data

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nbtoolkit.search.study.sweep_config import FoldConfig

    Source = str | os.PathLike[str] | Mapping[str, Any]

# Settings that may change when a sweep resumes: how many trials, and where they run.
_NOT_IDENTITY = ("budget", "placement", "trials_per_device", "warm_start")

_BY_NUMBER = ("kfold", "time")
"""Kinds of folds that need only the number of samples."""

SWEEP_CONFIG_FILE = "sweep.yaml"
FOLDS_FILE = "folds.json"


@overload
def sweep(
    train: Train,
    config: ConfigLike,
    space: Source,
    *,
    n_trials: int | None = None,
    timeout: float | str | None = None,
    folds: Folds | None = None,
    targets: Any = None,
    groups: Any = None,
    wait: Literal[True] = True,
    **shared: Unpack[SharedOptions],
) -> SweepResult: ...


@overload
def sweep(
    train: Train,
    config: ConfigLike,
    space: Source,
    *,
    n_trials: int | None = None,
    timeout: float | str | None = None,
    folds: Folds | None = None,
    targets: Any = None,
    groups: Any = None,
    wait: Literal[False],
    **shared: Unpack[SharedOptions],
) -> SweepHandle: ...


@refuse_other_launchers_names
@takes_options
def sweep(
    train: Train,
    config: ConfigLike,
    space: Source,
    *,
    n_trials: int | None = None,
    timeout: float | str | None = None,
    folds: Folds | None = None,
    targets: Any = None,
    groups: Any = None,
    wait: bool = True,
    **shared: Unpack[SharedOptions],
) -> SweepResult | SweepHandle:
    """Search for the settings with which ``train(config, ctx)`` gives the best result.

    Each trial calls the function with other settings, which are in ``config`` and in
    ``ctx.params``. The setting ``placement`` of the sweep decides where trials run: side by side,
    with one device each, or one after the other on all devices.

    The reports of a trial (by ``ctx.report``, which ``nb.fit`` calls) decide whether it is pruned.
    The value of a trial is its last reported metric. If the function returns a dict of numbers, it
    counts as the last report; if it returns one number, this is the metric. If a trial raises,
    hangs, dies or runs out of memory, only this trial fails, and the sweep continues.

    Args:
        train: the training function, as for :func:`nbtoolkit.launch`.
        config: the base configuration: a Config, a path to a YAML file, or a dict; None: the
            defaults.
        space: the search space and the other settings of the sweep, as a YAML file (see
            ``config/hpo``) or as a dict of the same form; or a dict of the space only, such as
            ``{"optim.lr": {"low": 1e-4, "high": 0.1, "log": True}}``.
        n_trials: the number of trials over all sessions; replaces ``budget.n_trials``.
        timeout: the time limit, in seconds or as a string such as ``"2h"``; replaces
            ``budget.timeout``.
        folds: the folds (``ctx.fold``). Each trial trains on each of them, and its value is the
            mean. None: the folds that the file of ``space`` asks for, if any.
        targets: the data set's targets, shape (samples,), for the folds that the file asks for (see
            :func:`nbtoolkit.make_folds`). For the kinds ``kfold`` and ``time``, the number of
            samples is enough. None: write a function ``load()`` in the module of ``train`` that
            returns (inputs, targets) or (inputs, targets, groups).
        groups: the group of each sample, shape (samples,), for the kinds of folds with groups.
            ``folds.kind`` is ``"group"`` then, unless the file sets it.
        name: the end of the folder's name; default: the study's name.
        resume: ``"auto"`` looks for sweeps that have the same configuration, function, space and
            folds. If the newest of them is complete, it is shown again and nothing runs. Otherwise,
            the newest one that is unfinished or has fewer trials than ``n_trials`` is resumed.
            ``"never"`` starts a new sweep. A sweep's id or folder resumes this sweep.
        where: ``"local"``: on this machine. ``"slurm"``: in one job on one machine, whose devices
            the trials share. ``"ray"``: on all machines of Ray (see docs/cluster.md). A job
            outlives this process.
        wait: False returns a :class:`~nbtoolkit.search.sweep_result.SweepHandle` at once.
        detach: whether the sweep outlives this process; see :func:`nbtoolkit.attach`.
        display: how to show the progress. ``"html"``: a live page in the cell. ``"text"``: a line
            per trial that ends, and one per minute. ``"auto"``: the page in a notebook, lines
            elsewhere and under papermill, which also gets the page at the end. ``"off"``: nothing.
        on_event: called with each event of the sweep while this process waits for the sweep.

    Returns:
        The :class:`~nbtoolkit.search.sweep_result.SweepResult`; with ``wait=False`` a
        :class:`~nbtoolkit.search.sweep_result.SweepHandle`.

    Raises:
        SpaceError: the space or the settings are invalid. The message lists all mistakes.
        FoldError: the folds of the file cannot be made, for example because there are no targets.
        SweepError: too many trials failed, or the study belongs to another search.
        MissingExtra: Optuna is not installed.
        KeyboardInterrupt: the wait was interrupted; the trials have stopped and can be resumed.
    """
    __tracebackhide__ = True
    options = LaunchOptions(wait=wait, **shared)
    check_call(train, options)
    if find_spec("optuna") is None:
        raise MissingExtra("a sweep needs Optuna", do=install_line("search"))
    screen = choose_screen(options.display, find_display())
    config = with_kernel_uri(as_config(config).with_overrides({"task": task_name(train)}))
    count = None if folds is None else len(folds)
    again = partial(sweep, train, config, space, n_trials=n_trials, timeout=timeout)
    again = partial(again, folds=folds, targets=targets, groups=groups)
    sweep_config = load_sweep_config(space, config, n_trials=n_trials, timeout=timeout, folds=count)
    if folds is None:
        folds = configured_folds(sweep_config.folds, config.task, targets, groups)
    search = _search(sweep_config, folds)
    if options.resume == "auto":
        wanted = WantedSearch.of(train, config, search)
        if (done := complete(config.runtime.output_dir, wanted)) is not None:
            shown = _show_again(done, screen, options.on_event)
            return shown.result() if wait else shown
    label = options.name or sweep_config.study.name
    now = time.time()
    started = start_or_submit(train, config, search, options, name=label, again=again)
    run = started.run
    paths = started.run.paths
    _keep(paths, sweep_config, folds)
    cell = _shown(paths, sweep_config, screen, started.deadline, since=now)
    cell.say(f"sweep -> {paths.folder}{tracking_place(config)}")
    if run.resumed:
        session = f"session {run.attempt}; resume='never' starts a new one"
        cell.say(f"resuming the sweep {paths.run_id} ({session})")
    # on_event: from the first event on, since the table covers all sessions
    process = started.process
    handle = SweepHandle(paths, SweepResult, started=process, cell=cell, on_event=options.on_event)
    if not wait:
        cell.open(waits=False)
    return handle.result() if wait else handle


def _show_again(
    paths: RunPaths, screen: Screen, on_event: Callable[[Event], None] | None
) -> SweepHandle:
    """Return a handle on a sweep that is complete, after a line that says so."""
    cell = _shown(paths, read_sweep_config(paths.folder), screen)
    cell.say(f"sweep -> {paths.folder}")
    cell.say("it is complete and shown again; resume='never' runs a new one")
    return SweepHandle(paths, SweepResult, cell=cell, on_event=on_event)


def sweep_to_resume(
    train: Train, config: Config, space: Source, folds: Folds | None = None
) -> RunPaths | None:
    """Return the sweep that :func:`sweep` would resume; None: it would start a new one.

    Args:
        train: as for :func:`sweep`, and so are the others.
        config: the base configuration.
        space: the search space and the sweep's settings.
        folds: the folds; None: there are none, and the space asks for none.

    Raises:
        SpaceError: the space or the settings are invalid.
    """
    config = config.with_overrides({"task": task_name(train)})
    count = None if folds is None else len(folds)
    search = _search(load_sweep_config(space, config, folds=count), folds)
    wanted = WantedSearch.of(train, config, search)
    candidates = unfinished(config.runtime.output_dir, wanted)
    return next((paths for paths in candidates if not paths.owned()), None)


def _search(sweep_config: SweepConfig, folds: Folds | None) -> Search:
    split = None if folds is None else {"count": len(folds), "hash": folds.hash}
    whole = sweep_config.to_dict()
    n_trials = sweep_config.budget.n_trials
    return Search(
        kind="sweep",
        loop="nbtoolkit.search.loop:run_sweep",
        sweep_config=sweep_config,
        identity={**{k: v for k, v in whole.items() if k not in _NOT_IDENTITY}, "split": split},
        placement=sweep_config.placement,
        per_device=sweep_config.trials_per_device,
        jobs=None if n_trials is None else n_trials * len(folds or [0]),
        total=n_trials,
        folds=folds,
        timeout=sweep_config.budget.timeout,
    )


def _keep(paths: RunPaths, sweep_config: SweepConfig, folds: Folds | None) -> None:
    """Save the sweep's settings and folds, for people and for the next session."""
    try:
        write_whole(paths.folder / SWEEP_CONFIG_FILE, sweep_config.to_yaml())
    except OSError as error:
        raise folder_error(paths.folder, error) from error
    if folds is not None and not (paths.folder / FOLDS_FILE).exists():  # else they are checked
        folds.save(paths.folder / FOLDS_FILE)


def handle_on_sweep(
    paths: RunPaths, screen: Screen, *, on_event: Callable[[Event], None] | None = None
) -> SweepHandle:
    """Return a handle on a sweep's folder, for :func:`nbtoolkit.attach`."""
    sweep_config = read_sweep_config(paths.folder)
    cell = _shown(paths, sweep_config, screen)
    return SweepHandle(paths, SweepResult, cell=cell, on_event=on_event)


def _shown(
    paths: RunPaths,
    sweep_config: SweepConfig,
    screen: Screen,
    deadline: float | None = None,
    *,
    since: float = 0.0,
) -> RunDisplay:
    table = SweepTable.of(sweep_config, deadline=deadline)
    lines = TableLines(table, screen, since=since)
    return displays().show(lines, paths, screen, deadline=deadline)


def configured_folds(settings: FoldConfig, task: str, targets: Any, groups: Any) -> Folds | None:
    """Make or load the folds of a sweep; None if its file asks for none.

    Args:
        settings: section ``folds`` of the sweep's file.
        task: name of the training function, whose module may provide the targets.
        targets: the call's ``targets``: shape (samples,), or the number of samples.
        groups: the call's ``groups``: shape (samples,).

    Raises:
        FoldError: there are no targets, or the folds cannot be made from them.
    """
    if settings.file is not None:
        return Folds.load(settings.file)
    if settings.k is None:
        if targets is not None or groups is not None:
            raise FoldError(
                "targets or groups were passed to a sweep without folds",
                allowed="targets= and groups= together with folds of the sweep's file",
                do="set folds: {k: 5} beside the space, or take targets= out",
            )
        return None
    if targets is None:
        targets, groups = _of_task(task, settings, groups)
    kind = settings.kind or ("stratified" if groups is None else "group")
    if isinstance(targets, int):
        if kind not in _BY_NUMBER:
            raise FoldError(
                f"folds.kind is {kind!r}, which needs each sample's target, not a number",
                allowed=f"a number for {' and '.join(_BY_NUMBER)}",
                do="pass targets=y, or set folds.kind: kfold",
            )
        targets = range(targets)
    return make_folds(
        targets,
        k=settings.k,
        kind=kind,
        groups=groups if "group" in kind else None,
        seed=settings.seed,
        repeats=settings.repeats,
    )


def _of_task(task: str, settings: FoldConfig, groups: Any) -> tuple[Any, Any]:
    try:
        data: Sequence[Any] = find_data(task)
    except ConfigError as error:
        raise FoldError(
            f"folds.k is {settings.k}, and there are no targets for the folds: {error.what}",
            allowed="targets= of the call, folds=nb.make_folds(...), folds.file, or a module whose "
            "load() returns (inputs, targets)",
            do="pass them: nb.sweep(..., targets=y), with groups=g where folds.kind has groups",
        ) from None
    return data[1], data[2] if groups is None and len(data) > 2 else groups
