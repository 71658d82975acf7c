"""Define the commands ``nbtoolkit quota`` and ``nbtoolkit bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from nbtoolkit.cli import DONE, EARLY, INTERRUPTED, ConfigOptions, RunsFolder, command


@command
def quota(
    source: RunsFolder = None,
    hours: Annotated[
        float | None,
        typer.Option(help="GPU hours of a week's quota; default: runtime.quota_hours."),
    ] = None,
) -> None:
    """Print the device-hours that the runs of an output folder used, by host and week."""
    from nbtoolkit.extras.tuning.quota import quota as count

    print(count(source, hours=hours))


@command
def bench(
    config: ConfigOptions,
    task: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Default: the config's task.")
    ] = None,
    sections: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Measure only these sections, such as memory."),
    ] = None,
    minutes: Annotated[float, typer.Option(help="After this time nothing new starts.")] = 5.0,
    csv: Annotated[Path | None, typer.Option(help="Also write the rows to this file.")] = None,
) -> int:
    """Measure the speed and the memory of a training on this machine, and print a table."""
    from nbtoolkit.extras.tuning.benchmark import benchmark
    from nbtoolkit.tasks.find import find_task

    settings = config.load()
    function = find_task(task or settings.task)
    chosen = None if sections is None else [name.strip() for name in sections.split(",")]
    result = benchmark(function, settings, sections=chosen, minutes=minutes)
    print(result.table())
    if csv is not None:
        print(f"rows: {result.to_csv(csv)}", file=sys.stderr)
    return {"interrupted": INTERRUPTED, "time": EARLY}.get(result.status, DONE)
