"""Define the command line, a thin layer over the functions that notebooks call.

Exit codes:

    0     done
    1     the run failed, or doctor found a problem
    2     the call or the configuration is wrong, or the launch failed: nothing was trained
    3     ended early (stopped, out of time): the same call goes on with it
    130   interrupted
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from nbtoolkit.config.schema import Config, load_config
from nbtoolkit.errors import (
    BundleError,
    ConfigError,
    FoldError,
    LaunchError,
    MissingExtra,
    NbtoolkitError,
    NotebookError,
    PlanError,
    ReportFolderError,
    ResumeError,
)
from nbtoolkit.launcher.handle import RunHandle, RunResult

if TYPE_CHECKING:
    from nbtoolkit.crossval.cv_result import CVResult
    from nbtoolkit.folds.folds import FoldKind, Folds
    from nbtoolkit.search.sweep_result import SweepResult

try:
    import typer
except ImportError as missing:
    raise MissingExtra(
        f"the command line needs typer: {missing}", do="pip install typer"
    ) from missing

DONE, FAILED, WRONG_CALL, EARLY, INTERRUPTED = 0, 1, 2, 3, 130

_NOT_TRAINED = (
    BundleError,
    ConfigError,
    FoldError,
    LaunchError,
    MissingExtra,
    NotebookError,
    PlanError,
    ReportFolderError,
    ResumeError,
)

# Plain help: a notebook's cell and a log file show it as it is, without boxes and colours.
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="One training function, any notebook, any number of devices: once, or a hundred times.",
)

ConfigPath = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="A YAML or JSON file; none: the defaults.")
]
Override = Annotated[
    list[str] | None,
    typer.Option("--override", "-o", metavar="KEY=VALUE", help="A setting; may be repeated."),
]
Processes = Annotated[
    int | None, typer.Option("--processes", "-p", help="Ranks; none: one a usable device.")
]
Name = Annotated[str | None, typer.Option(help="A part of the run's id.")]
Resume = Annotated[str, typer.Option(help="auto, never, or the id or folder of a run.")]
Detach = Annotated[bool, typer.Option("--detach", help="Start it, print its folder, and return.")]
SpacePath = Annotated[
    Path, typer.Argument(metavar="SPACE", help="What is searched, and how: config/hpo/digits.yaml.")
]
FoldsWish = Annotated[
    str | None,
    typer.Option("--folds", metavar="K|FILE", help="How many, or a file written by Folds.save."),
]
Kind = Annotated[
    str, typer.Option(help="How K folds are split: stratified, kfold, time (see nb.make_folds).")
]
Trials = Annotated[int | None, typer.Option("--trials", "-n", help="Trials, over all sessions.")]
Timeout = Annotated[str | None, typer.Option(help="Time for the sweep, such as 2h.")]
NotebookPath = Annotated[Path, typer.Argument(metavar="NOTEBOOK", help="A .ipynb file.")]
ParameterWish = Annotated[
    list[str] | None,
    typer.Option("--parameter", "-p", metavar="NAME=VALUE", help="May be repeated."),
]
ParametersFile = Annotated[
    Path | None,
    typer.Option("--parameters-file", "-f", help="A YAML or JSON file of names and values."),
]
OutputPath = Annotated[
    Path | None, typer.Option("--output", help="The executed copy (.ipynb); none: in outputs/.")
]
KernelName = Annotated[str | None, typer.Option(help="A kernel spec; none: the notebook's own.")]
Seconds = Annotated[float | None, typer.Option(metavar="SECONDS", help="None: no limit.")]
PipelinePath = Annotated[
    Path, typer.Argument(metavar="FILE", help="The steps: config/pipeline/digits.yaml.")
]
StepWish = Annotated[
    list[str] | None,
    typer.Option("--override", "-o", metavar="STEP.NAME=VALUE", help="A step's parameter."),
]
PipelineFolderPath = Annotated[
    Path | None, typer.Option("--folder", help="Where everything goes; none: as the file says.")
]
Again = Annotated[
    list[str] | None,
    typer.Option("--again", metavar="STEP", help="Run it though nothing has changed."),
]
BundleOutput = Annotated[
    Path | None,
    typer.Argument(metavar="OUTPUT", help="A .bundle or a folder; none: the host's kept folder."),
]
RunsFolder = Annotated[
    Path | None, typer.Option("--source", help="The output folder; none: runtime.output_dir.")
]
SizeLimit = Annotated[
    str | None, typer.Option(help="The bundle's largest size, such as 15GB; none: the disk's.")
]
BundlePlace = Annotated[
    str, typer.Argument(metavar="WHERE", help="auto, a bundle, or a folder with one or with runs.")
]
IntoFolder = Annotated[
    Path | None, typer.Option("--into", help="The output folder; none: `runtime.output_dir`.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show errors with their traceback.")]


@app.callback()
def _verbs() -> None:
    """There are several verbs, even while one alone is registered."""


@app.command()
def train(
    config: ConfigPath = None,
    override: Override = None,
    processes: Processes = None,
    name: Name = None,
    resume: Resume = "auto",
    detach: Detach = False,
    debug: Debug = False,
) -> None:
    """Train once, on every usable device: the function that the setting "task" names."""
    from nbtoolkit.launcher.launch import launch
    from nbtoolkit.tasks.find import find_task

    with sentences(debug):
        settings = _settings(config, override)
        function = find_task(settings.task)
        handle = launch(
            function,
            settings,
            processes=processes,
            name=name,
            resume=resume,
            detach=detach,
            wait=False,
        )
        ended = None if detach else handle.result()
    _finish(handle, ended)


@app.command()
def cv(
    config: ConfigPath = None,
    override: Override = None,
    folds: FoldsWish = "5",
    kind: Kind = "stratified",
    processes: Processes = None,
    name: Name = None,
    resume: Resume = "auto",
    detach: Detach = False,
    debug: Debug = False,
) -> None:
    """Train once on every fold, side by side; scores, their mean and their spread."""
    from nbtoolkit.crossval.cross_validation import cross_validate
    from nbtoolkit.tasks.find import find_task

    with sentences(debug):
        settings = _settings(config, override)
        handle = cross_validate(
            find_task(settings.task),
            settings,
            _folds(settings, folds or "5", kind),
            processes=processes,
            name=name,
            resume=resume,
            detach=detach,
            wait=False,
        )
        ended = None if detach else handle.result()
    _finish(handle, ended)


@app.command()
def sweep(
    space: SpacePath,
    config: ConfigPath = None,
    override: Override = None,
    trials: Trials = None,
    timeout: Timeout = None,
    folds: FoldsWish = None,
    kind: Kind = "stratified",
    name: Name = None,
    resume: Resume = "auto",
    detach: Detach = False,
    debug: Debug = False,
) -> None:
    """Search for the best settings; writes best.yaml into the sweep's folder, for train."""
    from nbtoolkit.search.sweep import sweep as search
    from nbtoolkit.tasks.find import find_task

    with sentences(debug):
        settings = _settings(config, override)
        handle = search(
            find_task(settings.task),
            settings,
            space,
            n_trials=trials,
            timeout=timeout,
            folds=_folds(settings, folds, kind) if folds else None,
            name=name,
            resume=resume,
            detach=detach,
            wait=False,
        )
        ended = None if detach else handle.result()
    if ended is not None and ended.best_trial is not None:
        print(f"best configuration: {ended.save_best(handle.paths.folder / 'best.yaml')}")
    _finish(handle, ended)


@app.command()
def run(
    notebook: NotebookPath,
    parameter: ParameterWish = None,
    parameters_file: ParametersFile = None,
    output: OutputPath = None,
    kernel: KernelName = None,
    timeout: Seconds = None,
    cell_timeout: Seconds = None,
    html: Annotated[bool, typer.Option(help="Write the executed copy as a page too.")] = True,
    detach: Annotated[
        bool, typer.Option("--detach", help="Start it, print its executed copy, and return.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Run a notebook as a program; prints what it published with nb.publish, as YAML."""
    from nbtoolkit.notebooks.handle import NotebookHandle
    from nbtoolkit.notebooks.job import skip_slow_imports
    from nbtoolkit.notebooks.parameters import parameters_from_shell
    from nbtoolkit.notebooks.run import run_notebook

    skip_slow_imports()
    with sentences(debug):
        result = run_notebook(
            notebook,
            output,
            parameters_from_shell(parameter or []),
            parameters_file=parameters_file,
            kernel=kernel,
            timeout=timeout,
            cell_timeout=cell_timeout,
            html=html,
            wait=not detach,
        )
    if isinstance(result, NotebookHandle):
        print(result.output)
        return
    print(result.values_as_yaml(), end="")
    print(f"executed copy: {result.output}", file=sys.stderr)


@app.command()
def pipeline(
    file: PipelinePath,
    override: StepWish = None,
    folder: PipelineFolderPath = None,
    again: Again = None,
    html: Annotated[bool, typer.Option(help="Write executed copies as pages too.")] = True,
    debug: Debug = False,
) -> None:
    """Run notebooks one after the other; what is done is skipped. Prints what they published."""
    from nbtoolkit.notebooks.job import skip_slow_imports
    from nbtoolkit.pipeline.runner import run_pipeline

    skip_slow_imports()
    with sentences(debug):
        result = run_pipeline(
            file, overrides=override or [], folder=folder, again=again or [], html=html
        )
    print(result.values_as_yaml(), end="")
    print(f"{result.status}, everything is in {result.folder}", file=sys.stderr)
    raise typer.Exit(DONE if result.status == "completed" else EARLY)


@app.command()
def report(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A run's folder, or one that holds runs.")
    ] = Path("outputs"),
    output: Annotated[
        Path | None, typer.Option(help="The page (.html); none: report.html in FOLDER.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a page on all runs in a folder: metrics, curves, sweeps, folds, device use."""
    from nbtoolkit.report.report import report as write_report

    with sentences(debug):
        page = write_report(folder, output)
    print(page)


@app.command()
def pack(
    output: BundleOutput = None,
    source: RunsFolder = None,
    size_limit: SizeLimit = None,
    debug: Debug = False,
) -> None:
    """Put the runs of an output folder into one file, for another session to go on with."""
    from nbtoolkit.archive.pack import pack as write_bundle

    with sentences(debug):
        packed = write_bundle(output, source=source, size_limit=size_limit)
    print(packed.path)
    print("\n".join([repr(packed), *packed.notes]), file=sys.stderr)


@app.command()
def unpack(where: BundlePlace = "auto", into: IntoFolder = None, debug: Debug = False) -> None:
    """Bring in the runs that another session packed; the next launch or sweep goes on."""
    from nbtoolkit.archive.unpack import unpack as read_bundle

    with sentences(debug):
        unpacked = read_bundle(where, into=into)
    print("\n".join([repr(unpacked), *unpacked.notes]))


@app.command()
def doctor(debug: Debug = False) -> None:
    """Say what is here, what a launch would do, and what may go wrong."""
    from nbtoolkit.doctor import doctor as examine

    with sentences(debug):
        report = examine()
    print(report)
    raise typer.Exit(DONE if report.ok else FAILED)


@contextlib.contextmanager
def sentences(debug: bool) -> Iterator[None]:
    """Turn what is raised inside into a text on stderr and an exit code.

    Args:
        debug: let exceptions pass with their traceback instead.
    """
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if debug:
            raise
        print(_sentence(error), file=sys.stderr)
        raise typer.Exit(WRONG_CALL if isinstance(error, _NOT_TRAINED) else FAILED) from None


def _sentence(error: Exception) -> str:
    """An error of ours as it is; another one with its type, its notes, and how to see more."""
    if isinstance(error, NbtoolkitError):
        return str(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    notes = getattr(error, "__notes__", ())
    return "\n".join([text, *notes, "(--debug shows the traceback)"])


def _settings(path: Path | None, overrides: list[str] | None) -> Config:
    """The configuration; modules in the working directory become importable, for its task."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does; a console script does not
    return load_config(path, overrides=overrides)


def _folds(config: Config, wish: str, kind: str) -> Folds:
    """Folds from a file, or so many of the task's own data set."""
    from nbtoolkit.folds.folds import Folds
    from nbtoolkit.folds.make_folds import make_folds
    from nbtoolkit.tasks.find import find_data

    if not wish.isdecimal():
        return Folds.load(wish)
    return make_folds(find_data(config.task)[1], k=int(wish), kind=cast("FoldKind", kind))


def _finish(handle: RunHandle, ended: RunResult | SweepResult | CVResult | None) -> None:
    """Print the folder of what goes on, or how it ended; end with the exit code for that."""
    if ended is None:
        print(handle.paths.folder)
        raise typer.Exit(DONE)
    print(ended)
    raise typer.Exit(DONE if ended.status in ("completed", "pruned") else EARLY)
