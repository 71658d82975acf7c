"""Define the commands that run notebooks, and those that prepare another host or session."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from nbtoolkit.cli import DONE, EARLY, FAILED, RunsFolder, command

NotebookPath = Annotated[Path, typer.Argument(metavar="NOTEBOOK", help="A .ipynb file.")]
Parameters = Annotated[
    list[str] | None,
    typer.Option("--parameter", "-p", metavar="NAME=VALUE", help="A parameter; repeatable."),
]
Seconds = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Time limit; default: no limit.")
]


@dataclass(frozen=True)
class NotebookOptions:
    """How a notebook runs, and where its executed copy goes."""

    parameter: Parameters = None
    parameters_file: Annotated[
        Path | None,
        typer.Option("--parameters-file", "-f", help="A YAML or JSON file of names and values."),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option("--output", help="The executed copy (.ipynb); default: in outputs/."),
    ] = None
    kernel: Annotated[str | None, typer.Option(help="A kernel spec; default: the notebook's.")] = (
        None
    )
    timeout: Seconds = None
    cell_timeout: Seconds = None
    html: Annotated[bool, typer.Option(help="Also write the executed copy as HTML.")] = True
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Start it, print the path of its executed copy and return."),
    ] = False


@command
def run(notebook: NotebookPath, options: NotebookOptions) -> None:
    """Run a notebook as a program. Print the values that it publishes, in the form of YAML."""
    from nbtoolkit.notebooks.parameters import parameters_from_shell
    from nbtoolkit.notebooks.run import run_notebook

    start = partial(
        run_notebook,
        notebook,
        options.output,
        parameters_from_shell(options.parameter or []),
        parameters_file=options.parameters_file,
        kernel=options.kernel,
        timeout=options.timeout,
        cell_timeout=options.cell_timeout,
        html=options.html,
    )
    if options.detach:
        print(start(wait=False).output)
        return
    result = start()
    print(result.values_as_yaml(), end="")
    print(f"executed copy: {result.output}", file=sys.stderr)


@command
def pipeline(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="The pipeline's YAML file, such as config/pipeline/digits.yaml."
        ),
    ],
    override: Annotated[
        list[str] | None,
        typer.Option(
            "--override", "-o", metavar="STEP.NAME=VALUE", help="A step's parameter; repeatable."
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Output folder; default: as the pipeline's file says."),
    ] = None,
    again: Annotated[
        list[str] | None,
        typer.Option("--again", metavar="STEP", help="A step to run even if nothing has changed."),
    ] = None,
    html: Annotated[bool, typer.Option(help="Also write executed copies as HTML.")] = True,
) -> int:
    """Run the notebooks of a pipeline, skip completed steps, and print the published values."""
    from nbtoolkit.notebooks.pipeline import run_pipeline

    result = run_pipeline(
        file, overrides=override or [], folder=folder, again=again or [], html=html
    )
    print(result.values_as_yaml(), end="")
    print(f"{result.status}, everything is in {result.folder}", file=sys.stderr)
    return DONE if result.status == "completed" else EARLY


@command
def lint(
    notebooks: Annotated[list[Path], typer.Argument(metavar="NOTEBOOK...", help=".ipynb files.")],
    json: Annotated[bool, typer.Option("--json", help="Print the hazards as JSON.")] = False,
) -> int:
    """Report code in notebooks that would fail on other devices or with several ranks."""
    from nbtoolkit.notebooks.lint import find_hazards, report

    hazards = {path: find_hazards(path) for path in notebooks}
    print(report(hazards, as_json=json))
    return FAILED if any(hazards.values()) else DONE


@dataclass(frozen=True)
class KernelOptions:
    """Settings of a notebook on Kaggle."""

    user: Annotated[str | None, typer.Option(help="Your name on Kaggle.")] = None
    title: Annotated[str | None, typer.Option(help="Default: the file's name.")] = None
    gpu: Annotated[
        str | None, typer.Option(help="t4 (two of them), l4, p100, a100, h100, rtx6000, none.")
    ] = None
    internet: Annotated[
        bool | None,
        typer.Option(
            "--internet/--no-internet",
            help="Default: as in the last call; in the first call, off.",
        ),
    ] = None
    private: Annotated[
        bool | None,
        typer.Option(
            "--private/--public", help="Default: as in the last call; in the first call, private."
        ),
    ] = None
    dataset: Annotated[
        list[str] | None,
        typer.Option(metavar="USER/SLUG", help="A data set to attach; repeatable."),
    ] = None
    competition: Annotated[
        list[str] | None, typer.Option(metavar="SLUG", help="A competition to attach; repeatable.")
    ] = None
    kernel: Annotated[
        list[str] | None,
        typer.Option(metavar="USER/SLUG", help="Attach the output of this notebook; repeatable."),
    ] = None


@command
def kaggle_kernel(
    notebook: NotebookPath,
    options: KernelOptions,
    output: Annotated[
        Path | None, typer.Option(help="The folder; default: outputs/kaggle/<slug>.")
    ] = None,
    parameter: Parameters = None,
) -> None:
    """Write a folder with a notebook for Kaggle's client, and print the upload command."""
    from nbtoolkit.notebooks.parameters import parameters_from_shell
    from nbtoolkit.sessions.kernel import KernelSettings, write_kernel

    settings = KernelSettings(
        user=options.user,
        title=options.title,
        gpu=options.gpu,
        internet=options.internet,
        private=options.private,
        datasets=options.dataset or (),
        competitions=options.competition or (),
        kernels=options.kernel or (),
    )
    folder = write_kernel(notebook, output, settings, parameters_from_shell(parameter or []))
    print(f"kaggle kernels push -p {shlex.quote(str(folder))}")


@command
def bundle(
    host: Annotated[str, typer.Option(help="kaggle or colab.")] = "kaggle",
    output: Annotated[Path | None, typer.Option(help="Default: outputs/<host>-wheels.")] = None,
    image: Annotated[
        Path | None,
        typer.Option(help="A list of the host's packages (see the docs); default: a stored list."),
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option(help="nbtoolkit's wheel; default: built here.")
    ] = None,
    user: Annotated[
        str | None,
        typer.Option(help="Your Kaggle user name; the command then writes dataset-metadata.json."),
    ] = None,
) -> None:
    """Write the wheels that nbtoolkit needs on a host without internet."""
    from nbtoolkit.sessions.wheels import explain, make_bundle

    wheels = make_bundle(host, output, image=image, wheel=wheel, user=user)
    print(wheels[0].parent)
    print(explain(wheels), file=sys.stderr)


@command
def pack(
    output: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUTPUT",
            help="A .bundle file or a folder; default: the folder that the host keeps.",
        ),
    ] = None,
    source: RunsFolder = None,
    size_limit: Annotated[
        str | None,
        typer.Option(
            help="Largest size of the bundle, such as 15GB; default: the free disk space."
        ),
    ] = None,
) -> None:
    """Pack the runs of an output folder into one file, so that another session can resume them."""
    from nbtoolkit.sessions.pack import pack as write_bundle

    packed = write_bundle(output, source=source, size_limit=size_limit)
    print(packed.path)
    print("\n".join([repr(packed), *packed.notes]), file=sys.stderr)


@command
def unpack(
    where: Annotated[
        str,
        typer.Argument(metavar="WHERE", help="auto, a bundle, or a folder with a bundle or runs."),
    ] = "auto",
    into: Annotated[
        Path | None, typer.Option("--into", help="The output folder; default: runtime.output_dir.")
    ] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Also unpack pickles with code: for your own bundles only."),
    ] = False,
) -> None:
    """Unpack the runs of an earlier session, so that the next launch or sweep resumes them."""
    from nbtoolkit.sessions.unpack import unpack as read_bundle

    unpacked = read_bundle(where, into=into, trust=trust)
    print("\n".join([repr(unpacked), *unpacked.notes]))
