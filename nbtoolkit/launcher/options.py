"""Check the options of a launch."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

from nbtoolkit.environment.variables import RANK_MARK
from nbtoolkit.errors import LaunchError, NestedLaunch
from nbtoolkit.launcher.train_function import check_function
from nbtoolkit.run.remote_job import CLUSTERS

if TYPE_CHECKING:
    pass

Start = Literal["forkserver", "inline"]
Where = Literal["local", "slurm", "ray"]

CHOICES = {
    "start": ("forkserver", "inline"),
    "where": ("local", *CLUSTERS),
    "display": ("auto", "widgets", "text", "off"),
}


def check_call(train: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Validate the arguments of :func:`nbtoolkit.launch`.

    Args:
        train: the training function.
        arguments: the other arguments, by name.

    Raises:
        NestedLaunch: this process is a rank itself.
        LaunchError: an argument has an invalid value.
    """
    if RANK_MARK in os.environ:
        raise NestedLaunch(
            f"nb.launch was called inside a rank of the run {os.environ[RANK_MARK]}",
            allowed="launches from a notebook, a script or the command line",
            do="move the launch out of the training function, or behind `if __name__ == ...`",
        )
    check_function(train)
    _check_arguments(arguments)
    if arguments["start"] != "forkserver" and arguments["where"] != "local":
        raise LaunchError(
            f'start="{arguments["start"]}" ties the run to this process, and '
            f'where="{arguments["where"]}" runs it on other machines',
            allowed='where="local", or start="forkserver"',
            do="leave start out",
        )
    if arguments["start"] != "forkserver" and (arguments["detach"] or not arguments["wait"]):
        raise LaunchError(
            f'start="{arguments["start"]}" ties the run to this process: '
            "it cannot be detached or run in the background",
            allowed='wait=False and detach=True with start="forkserver"',
            do='use start="forkserver"',
        )


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    for argument in CHOICES:
        check_choice(argument, arguments[argument])
    processes, name = arguments["processes"], arguments["name"]
    resume, on_event = arguments["resume"], arguments["on_event"]
    whole = isinstance(processes, Integral) and not isinstance(processes, bool)
    counts = processes is None or (whole and processes >= 1)
    _check("processes", processes, counts, "a whole number of at least 1, or None")
    _check("name", name, name is None or isinstance(name, str), "a string, or None")
    named = isinstance(resume, (str, os.PathLike)) and resume != ""
    _check("resume", resume, named, '"auto" | "never" | a run\'s id or folder')
    listens = on_event is None or callable(on_event)
    _check("on_event", on_event, listens, "a function of one event, or None")


def check_choice(argument: str, value: object) -> None:
    """Validate an argument that has a fixed set of values.

    Args:
        argument: one of ``CHOICES``.
        value: its value.

    Raises:
        LaunchError: the value is none of the allowed ones.
    """
    known = CHOICES[argument]
    _check(argument, value, value in known, " | ".join(map(repr, known)))


def _check(argument: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise LaunchError(
            f"{argument}={reprlib.repr(value)} is not valid",
            allowed=allowed,
            do=f"choose one of these, or leave {argument} out",
        )
