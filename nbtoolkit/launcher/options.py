"""The options that ``nb.launch``, ``nb.sweep`` and ``nb.cross_validate`` share."""

from __future__ import annotations

import functools
import inspect
import os
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from inspect import Parameter
from numbers import Integral
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar

from nbtoolkit.config.aliases import similar_name
from nbtoolkit.environment.variables import RANK_MARK
from nbtoolkit.errors import LaunchError, NestedLaunch
from nbtoolkit.launcher.train_function import check_function
from nbtoolkit.run.events import Event
from nbtoolkit.run.output import Display
from nbtoolkit.run.remote_job import CLUSTERS

P = ParamSpec("P")
T = TypeVar("T")

Start = Literal["forkserver", "inline"]
Where = Literal["local", "slurm", "ray"]

CHOICES = {
    "start": ("forkserver", "inline"),
    "where": ("local", *CLUSTERS),
    "display": ("auto", "html", "text", "off"),
}


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The options of a call, with their defaults; :func:`nbtoolkit.launch` describes them."""

    processes: int | None = None
    start: Start = "forkserver"
    where: Where = "local"
    name: str | None = None
    resume: str | os.PathLike[str] = "auto"
    wait: bool = True
    detach: bool = False
    display: Display = "auto"
    on_event: Callable[[Event], None] | None = None


class SharedOptions(TypedDict, total=False):
    """Those that each of the three functions takes, for type checkers and editors (PEP 692).

    The functions name ``wait`` themselves, which decides what they return.
    """

    where: Where
    name: str | None
    resume: str | os.PathLike[str]
    detach: bool
    display: Display
    on_event: Callable[[Event], None] | None


def takes_options(function: Callable[P, T]) -> Callable[P, T]:
    """Show the shared options in a function's signature, and refuse all that are not in it.

    Args:
        function: has ``**options: Unpack[SharedOptions]``.
    """
    signature = _with_shared_options(inspect.signature(function))

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        __tracebackhide__ = True
        _refuse_unknown(function.__name__, signature, options)
        return function(*args, **options)

    call.__signature__ = signature  # type: ignore[attr-defined] # inspect and editors read it
    return call


def _with_shared_options(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature with the shared options in place of ``**options``."""
    named = [each for each in signature.parameters.values() if each.kind != Parameter.VAR_KEYWORD]
    shared = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(LaunchOptions)
        if field.name in SharedOptions.__optional_keys__
    ]
    return signature.replace(parameters=[*named, *shared])


def _refuse_unknown(function: str, signature: inspect.Signature, given: Iterable[str]) -> None:
    known = list(signature.parameters)
    for name in given:
        if name in known:
            continue
        do = (
            "set a setting in the config; give the function an argument of its own with "
            "functools.partial(train, ...)"
        )
        if (meant := similar_name(name, known)) is not None:
            do = f"pass {meant}"
        raise LaunchError(f"{function} has no argument {name!r}", allowed=", ".join(known), do=do)


def check_call(train: Callable[..., Any], options: LaunchOptions) -> None:
    """Validate the training function and the options of a call.

    Raises:
        NestedLaunch: this process is a rank itself.
        LaunchError: the function cannot be launched, or an option has an invalid value.
    """
    if RANK_MARK in os.environ:
        raise NestedLaunch(
            f"nb.launch was called inside a rank of the run {os.environ[RANK_MARK]}",
            allowed="launches from a notebook, a script or the command line",
            do="move the launch out of the training function, or behind `if __name__ == ...`",
        )
    check_function(train)
    _check_values(options)
    if options.start == "forkserver":
        return
    if options.where != "local":
        raise LaunchError(
            f'start="{options.start}" ties the run to this process, and where="{options.where}" '
            "runs it on other machines",
            allowed='where="local", or start="forkserver"',
            do="leave start out",
        )
    if options.detach or not options.wait:
        raise LaunchError(
            f'start="{options.start}" ties the run to this process: '
            "it cannot be detached or run in the background",
            allowed='wait=False and detach=True with start="forkserver"',
            do='use start="forkserver"',
        )


def _check_values(options: LaunchOptions) -> None:
    for choice in CHOICES:
        check_choice(choice, getattr(options, choice))
    processes = options.processes
    name = options.name
    resume = options.resume
    whole = isinstance(processes, Integral) and not isinstance(processes, bool)
    counts = processes is None or (whole and processes >= 1)
    _check("processes", processes, counts, "a whole number of at least 1, or None")
    _check("name", name, name is None or isinstance(name, str), "a string, or None")
    named = isinstance(resume, (str, os.PathLike)) and resume != ""
    _check("resume", resume, named, '"auto" | "never" | a run\'s id or folder')
    listens = options.on_event is None or callable(options.on_event)
    _check("on_event", options.on_event, listens, "a function of one event, or None")


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
