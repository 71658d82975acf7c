"""Define the command ``nbtoolkit recipe``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from pydantic import TypeAdapter

from nbtoolkit.cli import ConfigOptions, command
from nbtoolkit.cluster.recipes import KINDS, Shape
from nbtoolkit.cluster.recipes import recipe as recipe_text
from nbtoolkit.config.fields import Seconds


@dataclass(frozen=True)
class RecipeOptions:
    """The machines of a training, and its job."""

    nodes: Annotated[int | None, typer.Option(help="Machines; default: cluster.nodes.")] = None
    devices: Annotated[
        int | None, typer.Option(help="Ranks per machine; default: cluster.devices.")
    ] = None
    cpu: Annotated[bool, typer.Option("--cpu", help="The ranks use no GPU.")] = False
    time: Annotated[str, typer.Option(help="Time limit, such as 12h.")] = ""
    name: Annotated[str, typer.Option(help="Name of the job.")] = "train"
    image: Annotated[
        str, typer.Option(help="Container image, for Kubernetes. IMAGE is a placeholder.")
    ] = "IMAGE"
    port: Annotated[int, typer.Option(help="Port of the rendezvous.")] = 29400


@command
def recipe(
    kind: Annotated[str, typer.Argument(metavar="|".join(KINDS))],
    config: ConfigOptions,
    options: RecipeOptions,
) -> None:
    """Print a script for bash, sbatch or kubectl that starts a training on several machines."""
    settings = config.load()
    shape = Shape(
        nodes=options.nodes,
        devices=options.devices,
        gpu=False if options.cpu else None,
        seconds=TypeAdapter(Seconds).validate_python(options.time) if options.time else None,
        name=options.name,
        image=options.image,
        port=options.port,
    )
    words = [str(config.config)] if config.config is not None else []
    words += [word for setting in config.override or [] for word in ("-o", setting)]
    print(recipe_text(kind, settings, shape, words), end="")
