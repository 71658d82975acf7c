"""Define the command line, a thin layer over the functions that notebooks call.

Exit codes:

    0     done
    1     the run failed, or doctor found a problem
    2     wrong arguments or configuration, or a failed launch: nothing was trained
    3     ended early (stopped, out of time): the same command resumes it
    130   interrupted
"""

from __future__ import annotations

import inspect
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from nbtoolkit import errors
from nbtoolkit.config.schema import Config, load_config
from nbtoolkit.host import detect_host
from nbtoolkit.version import __version__

if TYPE_CHECKING:
    from nbtoolkit.launcher.run_handle import RunHandle
    from nbtoolkit.launcher.run_result import RunResult
    from nbtoolkit.run.paths import RunPaths
    from nbtoolkit.search.crossval.cv_result import CVResult
    from nbtoolkit.search.folds.folds import FoldKind, Folds
    from nbtoolkit.search.sweep_result import SweepResult
    from nbtoolkit.views.state import State

try:
    import typer
except ImportError as missing:
    raise errors.MissingExtra(
        f"the command line needs typer: {missing}", do="pip install typer"
    ) from missing

DONE = 0
FAILED = 1
WRONG_CALL = 2
EARLY = 3
INTERRUPTED = 130

# Of a view that follows a run: the seconds between two updates, and what clears the terminal.
_UPDATE_SECONDS = 1.0
_CLEAR = "\x1b[H\x1b[J"

_NOT_TRAINED = (
    errors.BundleError,
    errors.ConfigError,
    errors.FoldError,
    errors.LaunchError,
    errors.MissingExtra,
    errors.NotebookError,
    errors.PlanError,
    errors.ReportFolderError,
    errors.ResumeError,
    errors.TuningError,
)

# Plain help, without boxes and colours, for notebook cells and log files.
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"nbtoolkit {__version__}")
        raise typer.Exit(DONE)


@app.callback()
def nbtoolkit(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """One training function, any notebook, any number of devices: once, or a hundred times."""


def command(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add a function to the command line; it returns the exit code, None for 0.

    Its parameters are the command's arguments and options, as typer reads them. A parameter whose
    type is a dataclass stands for the fields of the dataclass: options that belong together. Every
    command also has ``--debug``; without it, an error is a message on stderr and an exit code.
    """
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in _parameters(function):
        kind: type = parameter.annotation
        if is_dataclass(kind):
            groups[parameter.name] = kind
            parameters += _parameters(kind)
        else:
            parameters.append(parameter)

    def run(*, debug: Debug = False, **values: object) -> None:
        for name, group in groups.items():
            given = {field.name: values.pop(field.name) for field in fields(group)}
            values[name] = group(**given)
        try:
            code = function(**values)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = INTERRUPTED
        except Exception as error:
            if debug:
                raise
            print(_message(error), file=sys.stderr)
            code = WRONG_CALL if isinstance(error, _NOT_TRAINED) else FAILED
        raise typer.Exit(code or DONE)

    # What typer reads. All by keyword: an optional parameter may come before a required one.
    parameters.append(_parameters(run)[0])
    by_keyword = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters
    ]
    run.__signature__ = inspect.Signature(by_keyword)  # type: ignore[attr-defined]
    app.command(function.__name__.replace("_", "-"), help=inspect.getdoc(function))(run)
    return function


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    return [*inspect.signature(function, eval_str=True).parameters.values()]


def _message(error: Exception) -> str:
    """Return the message of an error; of other libraries' errors also the type and the notes."""
    if isinstance(error, errors.NbtoolkitError):
        return str(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    notes = getattr(error, "__notes__", ())
    return "\n".join([text, *notes, "(--debug shows the traceback)"])


Debug = Annotated[bool, typer.Option("--debug", help="Show errors with their traceback.")]
Processes = Annotated[
    int | None, typer.Option("--processes", "-p", help="Ranks; default: one per usable device.")
]
FoldsOption = Annotated[
    str | None,
    typer.Option("--folds", metavar="K|FILE", help="The number of folds, or a file of Folds.save."),
]
Kind = Annotated[
    str, typer.Option(help="Kind of the split: stratified, kfold, time (see nb.make_folds).")
]
RunsFolder = Annotated[
    Path | None, typer.Option("--source", help="The output folder; default: runtime.output_dir.")
]


@dataclass(frozen=True)
class ConfigOptions:
    """A configuration: a file, and settings that override it."""

    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG", help="A YAML or JSON file; default: the default settings."
        ),
    ] = None
    override: Annotated[
        list[str] | None,
        typer.Option("--override", "-o", metavar="KEY=VALUE", help="A setting; repeatable."),
    ] = None

    def load(self) -> Config:
        """Load the configuration, and make modules in the working directory importable."""
        import_from_cwd()
        return load_config(self.config, overrides=self.override)


@dataclass(frozen=True)
class RunOptions:
    """The name of a run, and how it starts."""

    name: Annotated[str | None, typer.Option(help="The last part of the id of the new run.")] = None
    resume: Annotated[str, typer.Option(help="auto, never, or a run's id or folder.")] = "auto"
    detach: Annotated[
        bool, typer.Option("--detach", help="Start it, print its folder and return.")
    ] = False


def import_from_cwd() -> None:
    """Make modules in the working directory importable, as ``python -m`` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")


@command
def train(config: ConfigOptions, options: RunOptions, processes: Processes = None) -> int:
    """Train once on all usable devices. The setting "task" names the training function."""
    from nbtoolkit.launcher.launch import launch
    from nbtoolkit.tasks.find import find_task

    settings = config.load()
    handle = launch(
        find_task(settings.task),
        settings,
        processes=processes,
        name=options.name,
        resume=options.resume,
        detach=options.detach,
        wait=False,
    )
    return _finish(handle, None if options.detach else handle.result())


@command
def cv(
    config: ConfigOptions,
    options: RunOptions,
    folds: FoldsOption = "5",
    kind: Kind = "stratified",
    processes: Processes = None,
) -> int:
    """Train one model per fold, and print the mean and the spread of the scores."""
    from nbtoolkit.search.crossval.cross_validation import cross_validate
    from nbtoolkit.tasks.find import find_task

    settings = config.load()
    handle = cross_validate(
        find_task(settings.task),
        settings,
        _folds(settings, folds or "5", kind),
        processes=processes,
        name=options.name,
        resume=options.resume,
        detach=options.detach,
        wait=False,
    )
    return _finish(handle, None if options.detach else handle.result())


@command
def sweep(
    space: Annotated[
        Path,
        typer.Argument(
            metavar="SPACE", help="The sweep's YAML file, such as config/hpo/digits.yaml."
        ),
    ],
    config: ConfigOptions,
    options: RunOptions,
    trials: Annotated[
        int | None, typer.Option("--trials", "-n", help="Number of trials, over all sessions.")
    ] = None,
    timeout: Annotated[
        str | None, typer.Option(help="Time limit of the sweep, such as 2h.")
    ] = None,
    folds: FoldsOption = None,
    kind: Kind = "stratified",
) -> int:
    """Search for the best settings, and write them to best.yaml in the sweep's folder."""
    from nbtoolkit.search.sweep import sweep as search
    from nbtoolkit.tasks.find import find_task

    settings = config.load()
    handle = search(
        find_task(settings.task),
        settings,
        space,
        n_trials=trials,
        timeout=timeout,
        folds=_folds(settings, folds, kind) if folds else None,
        name=options.name,
        resume=options.resume,
        detach=options.detach,
        wait=False,
    )
    result = None if options.detach else handle.result()
    if result is not None and result.best_trial is not None:
        print(f"best configuration: {result.save_best(handle.paths.folder / 'best.yaml')}")
    return _finish(handle, result)


def _folds(config: Config, folds: str, kind: str) -> Folds:
    """Load folds from a file, or split the task's data set into a number of folds."""
    from nbtoolkit.search.folds.folds import Folds
    from nbtoolkit.search.folds.make_folds import make_folds
    from nbtoolkit.tasks.find import find_data

    if not folds.isdecimal():
        return Folds.load(folds)
    return make_folds(find_data(config.task)[1], k=int(folds), kind=cast("FoldKind", kind))


def _finish(handle: RunHandle, result: RunResult | SweepResult | CVResult | None) -> int:
    """Print the result, or the folder of a detached run; return the exit code."""
    if result is None:
        print(handle.paths.folder)
        return DONE
    if detect_host().rank == 0:  # torchrun and srun start this command once per rank
        print(result)
    return DONE if result.status in ("completed", "pruned") else EARLY


@command
def report(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A run's folder, or a folder of runs.")
    ] = Path("outputs"),
    output: Annotated[
        Path | None, typer.Option(help="The page (.html); default: report.html in FOLDER.")
    ] = None,
) -> None:
    """Write an HTML report on the runs in a folder: metrics, curves, sweeps, folds, devices."""
    from nbtoolkit.views.report import report as write_report

    print(write_report(folder, output))


@command
def doctor() -> int:
    """Report the host, its hardware, the plan of a launch, and known problems."""
    from nbtoolkit.doctor import doctor as examine

    findings = examine()
    print(findings)
    return DONE if findings.ok else FAILED


@command
def panel(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Its folder or id; default: the newest.")
    ] = None,
    source: Annotated[
        Path, typer.Option("--source", help="The output folder in which a run id is looked up.")
    ] = Path("outputs"),
    press: Annotated[
        str | None,
        typer.Option(
            metavar="BUTTON",
            help="Press pause, resume, stop, train_best, add_trials=N or stop_trial=N.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow/--once", help="Show it until it ends, or once.")
    ] = True,
) -> int:
    """Show a run, a sweep or a cross-validation until it ends. Ctrl-C ends only the view."""
    from nbtoolkit.views.state import State

    state = State(_find_run(run, source))
    state.refresh()
    if press is not None:
        state = _press(press, state)
    if follow and (state.live or state.status == "submitted"):
        _follow(state)
    print(_page(state))
    if state.status in ("stopped", "deadline", "cut off", "gone"):
        return EARLY
    return FAILED if state.status == "failed" else DONE


def _find_run(run: str | None, source: Path) -> RunPaths:
    from nbtoolkit.run.paths import find_run, runs_in

    if run is not None:
        return find_run(run, source)
    for paths in runs_in(source):
        return paths
    raise errors.LaunchError(
        f"there is no run in {source.absolute()}",
        allowed="a folder with runs",
        do="--source FOLDER, or the run's own folder",
    )


def _press(button: str, state: State) -> State:
    """Press a button of the panel; return the state of the run to show then."""
    from nbtoolkit.panel.buttons import press
    from nbtoolkit.views.state import read_state

    import_from_cwd()
    return read_state(press(button, state))


def _follow(state: State) -> None:
    """Wait until the run ends; a terminal shows as much of the page as fits."""
    try:
        while not state.over:
            if sys.stdout.isatty():
                lines = shutil.get_terminal_size().lines - 1
                print(_CLEAR + "\n".join(_page(state).splitlines()[:lines]), flush=True)
            time.sleep(_UPDATE_SECONDS)
            state.refresh()
    except KeyboardInterrupt:
        pass  # ends the view, not the run


def _page(state: State) -> str:
    from nbtoolkit.views.page import page_text

    return page_text(state)
