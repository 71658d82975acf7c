"""The verbs that take a notebook to another host: lint, kaggle-kernel, bundle."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from nbtoolkit.cli import DONE, FAILED, Debug, NotebookPath, ParameterWish, sentences
from nbtoolkit.cli import app as app

NotebookPaths = Annotated[list[Path], typer.Argument(metavar="NOTEBOOK...", help=".ipynb files.")]


@app.command()
def lint(
    notebooks: NotebookPaths,
    json: Annotated[bool, typer.Option("--json", help="The hazards as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Say what will go wrong in notebooks on other machines, or in several ranks; runs nothing."""
    from nbtoolkit.lint.linter import find_all, report

    with sentences(debug):
        found = find_all(notebooks)
        print(report(found, as_json=json))
    raise typer.Exit(FAILED if any(found.values()) else DONE)


@app.command()
def kaggle_kernel(
    notebook: NotebookPath,
    output: Annotated[
        Path | None, typer.Option(help="The folder; none: outputs/kaggle/<slug>.")
    ] = None,
    user: Annotated[str | None, typer.Option(help="Your name on Kaggle.")] = None,
    title: Annotated[str | None, typer.Option(help="None: the file's name.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="t4 (two of them), l4, p100, a100, h100, rtx6000, none.")
    ] = None,
    internet: Annotated[
        bool | None, typer.Option("--internet/--no-internet", help="None: as it was, else off.")
    ] = None,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="None: as it was, else private.")
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(metavar="USER/SLUG", help="May be repeated.")
    ] = None,
    competition: Annotated[
        list[str] | None, typer.Option(metavar="SLUG", help="May be repeated.")
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(metavar="USER/SLUG", help="A notebook whose output is attached."),
    ] = None,
    parameter: ParameterWish = None,
    debug: Debug = False,
) -> None:
    """Write a folder with a notebook, ready for Kaggle's client; prints how it is sent."""
    from nbtoolkit.kaggle.kernel import KernelSettings, write_kernel
    from nbtoolkit.notebooks.parameters import parameters_from_shell

    with sentences(debug):
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
    output: Annotated[Path | None, typer.Option(help="None: outputs/<host>-wheels.")] = None,
    image: Annotated[
        Path | None,
        typer.Option(help="What the host holds: # python 3.12, and pip freeze's lines."),
    ] = None,
    wheel: Annotated[Path | None, typer.Option(help="nbtoolkit's; none: made here.")] = None,
    user: Annotated[
        str | None, typer.Option(help="Your name on Kaggle: writes dataset-metadata.json.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Fill a folder with wheels, so that nbtoolkit installs on a host without internet."""
    from nbtoolkit.kaggle.bundle import make_bundle

    with sentences(debug):
        made = make_bundle(host, output, image=image, wheel=wheel, user=user)
    print(made.folder)
    print(made.explain(), file=sys.stderr)
