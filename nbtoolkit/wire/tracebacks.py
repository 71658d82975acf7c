"""Pack the frames of a traceback, choose those that concern the user, and rebuild the traceback."""

from __future__ import annotations

import ast
import itertools
import os
import sys
import sysconfig
import types
from collections.abc import Sequence
from functools import partial
from typing import TypedDict, cast

from nbtoolkit.environment.installed import installed_roots
from nbtoolkit.errors import NbtoolkitError

_OUR_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_NOT_OUTSIDE = (_OUR_FOLDER, "<frozen")
_CALLS_FUNCTION = "/nbtoolkit/worker/main.py"
_MAX_FRAMES = 100  # of a traceback; a RecursionError has a thousand


class PackedFrame(TypedDict):
    """A frame of a traceback, as plain data."""

    file: str
    module: str
    function: str
    """Its qualified name; before Python 3.11 the name alone."""
    first_line: int
    """Of the function."""
    line: int
    """At which the frame raised."""
    end_line: int
    columns: tuple[int, int]
    """First and last one of the expression that raised, in bytes; (-1, -1): unknown."""


def pack_traceback(trace: types.TracebackType | None) -> list[PackedFrame]:
    """Pack a traceback, outermost frame first; of a long one, both ends."""
    frames = []
    while trace is not None:
        frames.append(_pack_frame(trace))
        trace = trace.tb_next
    if len(frames) <= _MAX_FRAMES:
        return frames
    return frames[: _MAX_FRAMES // 2] + frames[-_MAX_FRAMES // 2 :]


def _pack_frame(trace: types.TracebackType) -> PackedFrame:
    code = trace.tb_frame.f_code
    line = trace.tb_lineno or code.co_firstlineno  # None: of an instruction without a line
    end_line = line
    columns = (-1, -1)
    if sys.version_info >= (3, 11):
        # An instruction has two bytes.
        positions = itertools.islice(code.co_positions(), trace.tb_lasti // 2, None)
        first, last, start, end = next(positions, (None, None, None, None))
        if first == line and last is not None and start is not None and end is not None:
            end_line = last
            columns = (start, end)
    return PackedFrame(
        file=code.co_filename,
        module=trace.tb_frame.f_globals.get("__name__", ""),
        function=getattr(code, "co_qualname", code.co_name),
        first_line=code.co_firstlineno,
        line=line,
        end_line=end_line,
        columns=columns,
    )


def rebuild_traceback(frames: Sequence[PackedFrame]) -> types.TracebackType | None:
    """Make a traceback of these frames, for printers and debuggers; its frames have no variables.

    Printers read the source around the line of the entry, around the first line of the function
    (IPython 9.13), or at the columns. So the code of each frame has the lines and columns of the
    original.
    """
    trace = None
    for frame in reversed(frames):
        trace = _entry(frame, trace)
    return trace


def _entry(frame: PackedFrame, inner: types.TracebackType | None) -> types.TracebackType:
    tree = ast.parse("lambda: 1 / 0", mode="eval")
    function = tree.body
    assert isinstance(function, ast.Lambda)
    function.lineno = function.end_lineno = frame["first_line"]
    for node in ast.walk(function.body):
        if isinstance(node, ast.expr):
            node.lineno = frame["line"]
            node.end_lineno = frame["end_line"]
            node.col_offset, node.end_col_offset = frame["columns"]
    code: types.CodeType = eval(compile(tree, "<rebuilt>", "eval")).__code__
    name = frame["function"]
    code = code.replace(co_filename=frame["file"], co_name=name.rpartition(".")[2])
    if sys.version_info >= (3, 11):
        code = code.replace(co_qualname=name)
    variables = {"__name__": frame["module"], "__file__": frame["file"]}
    try:
        types.FunctionType(code, variables)()
    except ZeroDivisionError as error:
        outer = cast("types.TracebackType", error.__traceback__)
    trace = cast("types.TracebackType", outer.tb_next)
    trace.tb_next = inner
    return trace


def user_line(frames: Sequence[PackedFrame]) -> tuple[str, int] | None:
    """File and line of the innermost frame in the user's code."""
    users = [frame for frame in frames if is_users(frame["file"])]
    return (users[-1]["file"], users[-1]["line"]) if users else None


def users_part(frames: Sequence[PackedFrame], *, explains_itself: bool) -> list[PackedFrame]:
    """Return the frames that a cell shows; the log has all of them.

    Args:
        frames: of the whole traceback.
        explains_itself: whether the error is nbtoolkit's own, and so ends at the user's line.
    """
    files = [frame["file"] for frame in frames]
    return [frames[index] for index in _shown(files, explains_itself=explains_itself)]


def show_users_part(error: BaseException) -> None:
    """Have IPython show the part of an exception's traceback that concerns the user."""
    if (ipython := sys.modules.get("IPython")) is not None and ipython.get_ipython() is not None:
        # IPython calls it. Errors of nbtoolkit have it as a method.
        error.__dict__["_render_traceback_"] = partial(ipython_lines, error)


def ipython_lines(error: BaseException) -> list[str]:
    """Return what IPython shows of an exception raised in the kernel, and of its causes.

    The exceptions keep all their frames, for ``%debug``.
    """
    tracebacks = [(each, each.__traceback__) for each in _chain(error)]
    shell = sys.modules["IPython"].get_ipython()
    try:
        for each, trace in tracebacks:
            each.__traceback__ = _users_traceback(
                trace, explains_itself=isinstance(each, NbtoolkitError)
            )
        lines: list[str] = shell.InteractiveTB.structured_traceback(
            type(error), error, error.__traceback__, tb_offset=0
        )
    finally:
        for each, trace in tracebacks:
            each.__traceback__ = trace
    return lines


def _chain(error: BaseException) -> list[BaseException]:
    """Return the error, its cause or context, and so on."""
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__
    return chain


def _users_traceback(
    trace: types.TracebackType | None, *, explains_itself: bool
) -> types.TracebackType | None:
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    files = [entry.tb_frame.f_code.co_filename for entry in entries]
    for index in reversed(_shown(files, explains_itself=explains_itself)):
        entry = entries[index]
        trace = types.TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace


def _shown(files: Sequence[str], *, explains_itself: bool) -> list[int]:
    """Choose the frames that a user needs, by their files.

    They begin in the user's code. If nbtoolkit is among the callees, they are those of the user's
    code, and the innermost one of a library.
    """
    users = [index for index, file in enumerate(files) if is_users(file)]
    below = list(range(users[0] if users else 0, len(files)))
    if not any(files[index].startswith(_OUR_FOLDER) for index in below):
        return below
    outside = [index for index in below if not files[index].startswith(_NOT_OUTSIDE)]
    ends_there = explains_itself and users
    shown = users if ends_there else sorted({*users, *outside[-1:]})
    return shown or ([] if explains_itself else below)


def is_users(file: str) -> bool:
    """Return whether a file is in no installed package, not in Python and not in nbtoolkit."""
    foreign = (*installed_roots(), sysconfig.get_path("stdlib"), *_NOT_OUTSIDE)
    return not file.startswith(foreign)


def without_launcher(stack: str) -> str:
    """Return a stack, innermost call first, without the callers of the user's function."""
    lines = itertools.takewhile(
        lambda line: _CALLS_FUNCTION not in line, stack.strip().splitlines()
    )
    return "\n".join(lines)
