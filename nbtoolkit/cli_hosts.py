"""Define the commands that prepare a notebook for another host: lint, kaggle-kernel, bundle."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from nbtoolkit.cli import DONE, FAILED, Debug, NotebookPath, Parameters, report_errors
from nbtoolkit.cli import app as app

NotebookPaths = Annotated[list[Path], typer.Argument(metavar="NOTEBOOK...", help=".ipynb files.")]


@app.command()
def lint(
    notebooks: NotebookPaths,
    json: Annotated[bool, typer.Option("--json", help="Print the hazards as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Report code in notebooks that will fail on other hosts or in several ranks."""
    from nbtoolkit.lint.linter import find_all, report

    with report_errors(debug):
        hazards = find_all(notebooks)
        print(report(hazards, as_json=json))
    raise typer.Exit(FAILED if any(hazards.values()) else DONE)


@app.command()
def kaggle_kernel(
    notebook: NotebookPath,
    output: Annotated[
        Path | None, typer.Option(help="The folder; default: outputs/kaggle/<slug>.")
    ] = None,
    user: Annotated[str | None, typer.Option(help="Your name on Kaggle.")] = None,
    title: Annotated[str | None, typer.Option(help="Default: the file's name.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="t4 (two of them), l4, p100, a100, h100, rtx6000, none.")
    ] = None,
    internet: Annotated[
        bool | None, typer.Option("--internet/--no-internet", help="Default: unchanged, else off.")
    ] = None,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Default: unchanged, else private.")
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(metavar="USER/SLUG", help="A data set to attach; repeatable."),
    ] = None,
    competition: Annotated[
        list[str] | None, typer.Option(metavar="SLUG", help="A competition to attach; repeatable.")
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(metavar="USER/SLUG", help="A notebook whose output to attach; repeatable."),
    ] = None,
    parameter: Parameters = None,
    debug: Debug = False,
) -> None:
    """Write a folder for Kaggle's client with a notebook; print the command that sends it."""
    from nbtoolkit.kaggle.kernel import KernelSettings, write_kernel
    from nbtoolkit.notebooks.parameters import parameters_from_shell

    with report_errors(debug):
        settings = KernelSettings(
            user=user,
            title=title,
            gpu=gpu,
            internet=internet,
            private=private,
            datasets=dataset or (),
            competitions=competition or (),
            kernels=kernel or (),
        )
        folder = write_kernel(notebook, output, settings, parameters_from_shell(parameter or []))
    print(f"kaggle kernels push -p {shlex.quote(str(folder))}")


@app.command()
def bundle(
    host: Annotated[str, typer.Option(help="kaggle or colab.")] = "kaggle",
    output: Annotated[Path | None, typer.Option(help="Default: outputs/<host>-wheels.")] = None,
    image: Annotated[
        Path | None,
        typer.Option(help="The host's packages: # python 3.12, then the lines of pip freeze."),
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option(help="nbtoolkit's wheel; default: built here.")
    ] = None,
    user: Annotated[
        str | None, typer.Option(help="Your name on Kaggle: writes dataset-metadata.json.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write the wheels that nbtoolkit needs on a host without internet."""
    from nbtoolkit.kaggle.bundle import make_bundle

    with report_errors(debug):
        wheels = make_bundle(host, output, image=image, wheel=wheel, user=user)
    print(wheels.folder)
    print(wheels.explain(), file=sys.stderr)
