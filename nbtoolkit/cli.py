"""Define the command line, a thin layer over the functions that notebooks call.

Exit codes:

    0     done
    1     the run failed, or doctor found a problem
    2     wrong arguments or configuration, or a failed launch: nothing was trained
    3     ended early (stopped, out of time): the same command resumes it
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
    TuningError,
)

if TYPE_CHECKING:
    from nbtoolkit.crossval.cv_result import CVResult
    from nbtoolkit.folds.folds import FoldKind, Folds
    from nbtoolkit.launcher.handle import RunHandle, RunResult
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
    TuningError,
)

# Plain help, without boxes and colours, for notebook cells and log files.
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="One training function, any notebook, any number of devices: once, or a hundred times.",
)

ConfigPath = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG", help="A YAML or JSON file; default: the default settings."),
]
Override = Annotated[
    list[str] | None,
    typer.Option("--override", "-o", metavar="KEY=VALUE", help="A setting; repeatable."),
]
Processes = Annotated[
    int | None, typer.Option("--processes", "-p", help="Ranks; default: one per usable device.")
]
Name = Annotated[str | None, typer.Option(help="A part of the run's id.")]
Resume = Annotated[str, typer.Option(help="auto, never, or a run's id or folder.")]
Detach = Annotated[bool, typer.Option("--detach", help="Start it, print its folder and return.")]
SpacePath = Annotated[
    Path, typer.Argument(metavar="SPACE", help="The sweep's file: config/hpo/digits.yaml.")
]
FoldsOption = Annotated[
    str | None,
    typer.Option("--folds", metavar="K|FILE", help="The number of folds, or a file of Folds.save."),
]
Kind = Annotated[
    str, typer.Option(help="Kind of the split: stratified, kfold, time (see nb.make_folds).")
]
Trials = Annotated[
    int | None, typer.Option("--trials", "-n", help="Number of trials, over all sessions.")
]
Timeout = Annotated[str | None, typer.Option(help="Time limit of the sweep, such as 2h.")]
NotebookPath = Annotated[Path, typer.Argument(metavar="NOTEBOOK", help="A .ipynb file.")]
Parameters = Annotated[
    list[str] | None,
    typer.Option("--parameter", "-p", metavar="NAME=VALUE", help="A parameter; repeatable."),
]
ParametersFile = Annotated[
    Path | None,
    typer.Option("--parameters-file", "-f", help="A YAML or JSON file of names and values."),
]
OutputPath = Annotated[
    Path | None, typer.Option("--output", help="The executed copy (.ipynb); default: in outputs/.")
]
KernelName = Annotated[str | None, typer.Option(help="A kernel spec; default: the notebook's.")]
Seconds = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Time limit; default: no limit.")
]
PipelinePath = Annotated[
    Path, typer.Argument(metavar="FILE", help="The pipeline's file: config/pipeline/digits.yaml.")
]
StepOverride = Annotated[
    list[str] | None,
    typer.Option(
        "--override", "-o", metavar="STEP.NAME=VALUE", help="A step's parameter; repeatable."
    ),
]
PipelineFolderPath = Annotated[
    Path | None, typer.Option("--folder", help="Folder of all results; default: the file's.")
]
ForcedSteps = Annotated[
    list[str] | None,
    typer.Option("--again", metavar="STEP", help="A step to run even if nothing has changed."),
]
BundleOutput = Annotated[
    Path | None,
    typer.Argument(
        metavar="OUTPUT", help="A .bundle or a folder; default: the host's kept folder."
    ),
]
RunsFolder = Annotated[
    Path | None, typer.Option("--source", help="The output folder; default: runtime.output_dir.")
]
SizeLimit = Annotated[
    str | None, typer.Option(help="Largest size of the bundle, such as 15GB; default: the disk's.")
]
QuotaHours = Annotated[
    float | None, typer.Option(help="GPU hours of a week's quota; default: runtime.quota_hours.")
]
BundleSource = Annotated[
    str, typer.Argument(metavar="WHERE", help="auto, a bundle, or a folder with a bundle or runs.")
]
IntoFolder = Annotated[
    Path | None, typer.Option("--into", help="The output folder; default: runtime.output_dir.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show errors with their traceback.")]


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
    """Train once on every usable device; the setting "task" names the function."""
    from nbtoolkit.launcher.launch import launch
    from nbtoolkit.tasks.find import find_task

    with report_errors(debug):
        settings = _settings(config, override)
        handle = launch(
            find_task(settings.task),
            settings,
            processes=processes,
            name=name,
            resume=resume,
            detach=detach,
            wait=False,
        )
        result = None if detach else handle.result()
    _finish(handle, result)


@app.command()
def cv(
    config: ConfigPath = None,
    override: Override = None,
    folds: FoldsOption = "5",
    kind: Kind = "stratified",
    processes: Processes = None,
    name: Name = None,
    resume: Resume = "auto",
    detach: Detach = False,
    debug: Debug = False,
) -> None:
    """Train on every fold in parallel; print the scores, their mean and spread."""
    from nbtoolkit.crossval.cross_validation import cross_validate
    from nbtoolkit.tasks.find import find_task

    with report_errors(debug):
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
        result = None if detach else handle.result()
    _finish(handle, result)


@app.command()
def sweep(
    space: SpacePath,
    config: ConfigPath = None,
    override: Override = None,
    trials: Trials = None,
    timeout: Timeout = None,
    folds: FoldsOption = None,
    kind: Kind = "stratified",
    name: Name = None,
    resume: Resume = "auto",
    detach: Detach = False,
    debug: Debug = False,
) -> None:
    """Search for the best settings; write best.yaml to the sweep's folder, for train."""
    from nbtoolkit.search.sweep import sweep as search
    from nbtoolkit.tasks.find import find_task

    with report_errors(debug):
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
        result = None if detach else handle.result()
    if result is not None and result.best_trial is not None:
        print(f"best configuration: {result.save_best(handle.paths.folder / 'best.yaml')}")
    _finish(handle, result)


@app.command()
def run(
    notebook: NotebookPath,
    parameter: Parameters = None,
    parameters_file: ParametersFile = None,
    output: OutputPath = None,
    kernel: KernelName = None,
    timeout: Seconds = None,
    cell_timeout: Seconds = None,
    html: Annotated[bool, typer.Option(help="Also write the executed copy as HTML.")] = True,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Start it, print the path of its executed copy and return."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Run a notebook as a program; print the values of nb.publish as YAML."""
    from nbtoolkit.notebooks.handle import NotebookHandle
    from nbtoolkit.notebooks.job import skip_slow_imports
    from nbtoolkit.notebooks.parameters import parameters_from_shell
    from nbtoolkit.notebooks.run import run_notebook

    skip_slow_imports()
    with report_errors(debug):
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
    override: StepOverride = None,
    folder: PipelineFolderPath = None,
    again: ForcedSteps = None,
    html: Annotated[bool, typer.Option(help="Also write executed copies as HTML.")] = True,
    debug: Debug = False,
) -> None:
    """Run notebooks in order, skipping completed steps; print their published values."""
    from nbtoolkit.notebooks.job import skip_slow_imports
    from nbtoolkit.pipeline.runner import run_pipeline

    skip_slow_imports()
    with report_errors(debug):
        result = run_pipeline(
            file, overrides=override or [], folder=folder, again=again or [], html=html
        )
    print(result.values_as_yaml(), end="")
    print(f"{result.status}, everything is in {result.folder}", file=sys.stderr)
    raise typer.Exit(DONE if result.status == "completed" else EARLY)


@app.command()
def report(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A run's folder, or a folder of runs.")
    ] = Path("outputs"),
    output: Annotated[
        Path | None, typer.Option(help="The page (.html); default: report.html in FOLDER.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write an HTML report on the runs in a folder: metrics, curves, sweeps, folds, devices."""
    from nbtoolkit.report.report import report as write_report

    with report_errors(debug):
        page = write_report(folder, output)
    print(page)


@app.command()
def pack(
    output: BundleOutput = None,
    source: RunsFolder = None,
    size_limit: SizeLimit = None,
    debug: Debug = False,
) -> None:
    """Pack the runs of an output folder into one file, to resume them in another session."""
    from nbtoolkit.archive.pack import pack as write_bundle

    with report_errors(debug):
        packed = write_bundle(output, source=source, size_limit=size_limit)
    print(packed.path)
    print("\n".join([repr(packed), *packed.notes]), file=sys.stderr)


@app.command()
def unpack(where: BundleSource = "auto", into: IntoFolder = None, debug: Debug = False) -> None:
    """Unpack the runs of another session; the next launch or sweep resumes them."""
    from nbtoolkit.archive.unpack import unpack as read_bundle

    with report_errors(debug):
        unpacked = read_bundle(where, into=into)
    print("\n".join([repr(unpacked), *unpacked.notes]))


@app.command()
def quota(source: RunsFolder = None, hours: QuotaHours = None, debug: Debug = False) -> None:
    """Print the device-hours of the runs of an output folder, by host and week."""
    from nbtoolkit.tuning.quota import quota as count

    with report_errors(debug):
        print(count(source, hours=hours))


@app.command()
def bench(
    config: ConfigPath = None,
    override: Override = None,
    task: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Default: the config's task.")
    ] = None,
    sections: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Some sections, such as launch,step.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="After this time nothing new starts.")] = 5.0,
    csv: Annotated[Path | None, typer.Option(help="Also write the rows to this file.")] = None,
    debug: Debug = False,
) -> None:
    """Measure launch, step, scaling, communication, memory and others; print the table."""
    from nbtoolkit.tasks.find import find_task
    from nbtoolkit.tuning.benchmark import benchmark

    with report_errors(debug):
        settings = _settings(config, override)
        function = find_task(task or settings.task)
        chosen = None if sections is None else [name.strip() for name in sections.split(",")]
        result = benchmark(function, settings, sections=chosen, minutes=minutes)
        print(result.table())
        if csv is not None:
            print(f"rows: {result.to_csv(csv)}", file=sys.stderr)
    raise typer.Exit({"interrupted": INTERRUPTED, "time": EARLY}.get(result.status, DONE))


@app.command()
def doctor(debug: Debug = False) -> None:
    """Report the host, its hardware, what a launch would do, and known problems."""
    from nbtoolkit.doctor import doctor as examine

    with report_errors(debug):
        report = examine()
    print(report)
    raise typer.Exit(DONE if report.ok else FAILED)


@contextlib.contextmanager
def report_errors(debug: bool) -> Iterator[None]:
    """Turn an exception into a message on stderr and an exit code.

    Args:
        debug: raise the exception instead.
    """
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if debug:
            raise
        print(_message(error), file=sys.stderr)
        raise typer.Exit(WRONG_CALL if isinstance(error, _NOT_TRAINED) else FAILED) from None


def _message(error: Exception) -> str:
    """Return the message of an error; of other libraries' errors also the type and the notes."""
    if isinstance(error, NbtoolkitError):
        return str(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    notes = getattr(error, "__notes__", ())
    return "\n".join([text, *notes, "(--debug shows the traceback)"])


def _settings(path: Path | None, overrides: list[str] | None) -> Config:
    """Load the configuration, and make modules in the working directory importable."""
    import_from_cwd()
    return load_config(path, overrides=overrides)


def import_from_cwd() -> None:
    """Make modules in the working directory importable, as ``python -m`` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def _folds(config: Config, folds: str, kind: str) -> Folds:
    """Load folds from a file, or split the task's data set into a number of folds."""
    from nbtoolkit.folds.folds import Folds
    from nbtoolkit.folds.make_folds import make_folds
    from nbtoolkit.tasks.find import find_data

    if not folds.isdecimal():
        return Folds.load(folds)
    return make_folds(find_data(config.task)[1], k=int(folds), kind=cast("FoldKind", kind))


def _finish(handle: RunHandle, result: RunResult | SweepResult | CVResult | None) -> None:
    """Print the result, or the folder of a detached run, and exit with its exit code."""
    if result is None:
        print(handle.paths.folder)
        raise typer.Exit(DONE)
    print(result)
    raise typer.Exit(DONE if result.status in ("completed", "pruned") else EARLY)
