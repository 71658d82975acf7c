"""Define the command ``nbtoolkit recipe``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from nbtoolkit.cli import ConfigOptions, command
from nbtoolkit.extras.cluster.recipes import TEMPLATES
from nbtoolkit.extras.cluster.recipes import recipe as recipe_text


@dataclass(frozen=True)
class RecipeOptions:
    """The machines of a training, and its job."""

    nodes: Annotated[int | None, typer.Option(help="Machines; default: cluster.nodes.")] = None
    devices: Annotated[
        int | None, typer.Option(help="Ranks per machine; default: cluster.devices.")
    ] = None
    cpu: Annotated[bool, typer.Option("--cpu", help="The ranks use no GPU.")] = False
    time: Annotated[str | None, typer.Option(help="Time limit, such as 12h.")] = None
    name: Annotated[str, typer.Option(help="Name of the job.")] = "train"
    image: Annotated[
        str, typer.Option(help="Container image, for Kubernetes. IMAGE is a placeholder.")
    ] = "IMAGE"
    port: Annotated[int, typer.Option(help="Port of the rendezvous.")] = 29400


@command
def recipe(
    kind: Annotated[str, typer.Argument(metavar="|".join(TEMPLATES))],
    config: ConfigOptions,
    options: RecipeOptions,
) -> None:
    """Print a script for bash, sbatch or kubectl that starts a training on several machines."""
    cluster = {
        "cluster.nodes": options.nodes,
        "cluster.devices": options.devices,
        "cluster.gpu": False if options.cpu else None,
        "cluster.time_limit": options.time,
    }
    given = {setting: value for setting, value in cluster.items() if value is not None}
    words = [str(config.config)] if config.config is not None else []
    words += [word for setting in config.override or [] for word in ("-o", setting)]
    text = recipe_text(
        kind,
        config.load().with_overrides(given),
        words,
        name=options.name,
        image=options.image,
        port=options.port,
    )
    print(text, end="")
