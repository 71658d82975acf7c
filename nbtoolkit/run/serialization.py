"""Pack return values and exceptions in a rank, and unpack them in the kernel."""

from __future__ import annotations

import io
import os
import pickle
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from nbtoolkit.environment.installed import installed_roots
from nbtoolkit.errors import CannotPickle, WorkerError
from nbtoolkit.run.paths import reading
from nbtoolkit.run.payload import came_from_payload, in_main

_OUR_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_MAX_CHAIN = 5  # causes and contexts carried along; deeper chains are cut
_MAX_FRAMES = 100  # of a traceback; a RecursionError has a thousand


class _ValuePickler(cloudpickle.Pickler):
    """cloudpickle with device tensors moved to the CPU: the kernel must not touch a device."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)) and _is_kernels_own(obj):
            return (
                NotImplemented  # by its name: with start="fork" the kernel has the very same class
            )
        if "torch" in sys.modules:
            import torch

            if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
                moved = obj.detach().cpu()
                if isinstance(obj, torch.nn.Parameter):
                    moved = torch.nn.Parameter(moved, obj.requires_grad)
                return moved.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            if isinstance(obj, torch.Tensor) and not obj.is_leaf:
                return obj.detach().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def _is_kernels_own(obj: Any) -> bool:
    """Whether this process was forked from the kernel (or is it), and so has its very objects."""
    return in_main(obj) and not came_from_payload()


def _dumps(value: Any) -> bytes:
    file = io.BytesIO()
    _ValuePickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def pack_value(value: Any) -> bytes:
    """Pickle a return value, its tensors on the CPU and detached.

    Raises:
        CannotPickle: names the part that cannot be pickled.
    """
    try:
        return _dumps(value)
    except Exception as error:
        raise CannotPickle(
            f"the function returned something that cannot be pickled: {_part(value)}: {error}",
            allowed="numbers, strings, arrays, tensors, and other picklable objects",
            do="return plain values; save models with ctx.save(...), see result.checkpoint",
        ) from None


def _part(value: Any) -> str:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, (list, tuple))
        else ()
    )
    for key, item in items:
        try:
            _dumps(item)
        except Exception:
            return f"value[{key!r}] (a {type(item).__qualname__})"
    return f"a {type(value).__qualname__}"


def unpack_value(path: Path) -> Any:
    """Read a return value written by a rank (pickle: only from runs of your own).

    Raises:
        RunFileError: it is damaged, or what it is made of cannot be imported here.
    """
    with reading(path):
        return pickle.loads(path.read_bytes())


# --- exceptions ---


def pack_error(error: BaseException, depth: int = 0) -> dict[str, Any]:
    """An exception as plain data: its pickle (if it has one), type, text, traceback, causes."""
    import tblib

    trace = error.__traceback__
    packed: dict[str, Any] = {
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "text": _text(error),
        "traceback": "".join(traceback.format_exception(type(error), error, trace))
        if depth == 0
        else "",
        "frames": tblib.Traceback(_shortened(trace)).to_dict() if trace else None,
        "pickle": _pickle_error(error),
        "suppress": error.__suppress_context__,
    }
    if depth < _MAX_CHAIN:
        for key, linked in (("cause", error.__cause__), ("context", error.__context__)):
            packed[key] = pack_error(linked, depth + 1) if linked is not None else None
    return packed


def _shortened(trace: types.TracebackType) -> types.TracebackType:
    """The outer and inner ends of a long traceback: tblib and pickle recurse, once a frame."""
    entries: list[types.TracebackType] = []
    entry: types.TracebackType | None = trace
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    if len(entries) <= _MAX_FRAMES:
        return trace
    short: types.TracebackType | None = None
    for kept in reversed(entries[: _MAX_FRAMES // 2] + entries[-_MAX_FRAMES // 2 :]):
        short = types.TracebackType(short, kept.tb_frame, kept.tb_lasti, kept.tb_lineno)
    assert short is not None
    return short


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:
        return f"<its text cannot be made: {failure!r}>"


def _pickle_error(error: BaseException) -> bytes | None:
    """The exception's pickle: the first way that gives back the same text; None: no way does."""
    for way in _ways(error):
        try:
            data = _dumps(way())
        except Exception:  # any failure of foreign code to pickle itself: try the next way
            continue
        again = _rebuild(data)
        if again is not None and _text(again) == _text(error):
            return data
    return None


def _ways(error: BaseException) -> list[Callable[[], Any]]:
    """What to pickle of an exception; by parts where its ``__init__`` cannot be called again."""

    def whole() -> Any:
        return error

    def parts() -> Any:
        return type(error), error.args, dict(error.__dict__)

    def fewer_parts() -> Any:
        return type(error), error.args, {k: v for k, v in error.__dict__.items() if _can_dump(v)}

    own_init = isinstance(type(error).__init__, types.FunctionType)
    return [parts, whole, fewer_parts] if own_init else [whole, parts, fewer_parts]


def _can_dump(value: Any) -> bool:
    try:
        _dumps(value)
    except Exception:  # see above
        return False
    return True


def unpack_error(packed: dict[str, Any]) -> BaseException:
    """Rebuild an exception with its own type and traceback; else a :class:`WorkerError`."""
    error = _rebuild(packed.get("pickle")) or stand_in(packed)
    if packed.get("frames"):
        import tblib

        error = error.with_traceback(tblib.Traceback.from_dict(packed["frames"]).as_traceback())
    error.__cause__ = unpack_error(packed["cause"]) if packed.get("cause") else None
    error.__context__ = unpack_error(packed["context"]) if packed.get("context") else None
    error.__suppress_context__ = bool(packed.get("suppress"))
    return error


def _rebuild(data: bytes | None) -> BaseException | None:
    if data is None:
        return None
    try:
        made = pickle.loads(data)
        if isinstance(made, BaseException):
            return made
        kind, args, state = made
        error: BaseException = kind.__new__(kind, *args)
        error.args = args
        error.__dict__.update(state)
        return error
    except (
        Exception
    ):  # any failure of foreign code to rebuild itself has the same answer: the stand-in
        return None


def stand_in(packed: dict[str, Any]) -> WorkerError:
    """An error that shows another one's type, text and traceback."""
    return WorkerError(
        f"{packed['type']}: {packed['text']}\n\n{packed['traceback']}".rstrip(),
        do="read the traceback above; the exception itself could not be brought to this process",
    )


def one_line(kind: str, text: str) -> str:
    """An exception's type (dotted) and text as one line."""
    first = text.strip().splitlines()[:1]
    return ": ".join([kind.rpartition(".")[2], *first])


def add_note(error: BaseException, note: str) -> None:
    """``error.add_note(note)``, also on Python 3.10 (whose tracebacks do not print notes)."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__dict__.setdefault("__notes__", []).append(note)


def user_line(packed: dict[str, Any]) -> tuple[str, int] | None:
    """File and line of the innermost frame that is the user's: not installed, not Python's."""
    foreign = (*installed_roots(), sysconfig.get_path("stdlib"), _OUR_FOLDER, "<frozen")
    frames = packed.get("frames")
    found = None
    while frames:
        filename = frames["tb_frame"]["f_code"]["co_filename"]
        if not filename.startswith(foreign):
            found = (filename, frames["tb_lineno"])
        frames = frames["tb_next"]
    return found
