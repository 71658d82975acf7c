"""Pack return values and exceptions in a rank, and unpack exceptions in the kernel."""

from __future__ import annotations

import io
import pickle
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import cloudpickle

from nbtoolkit.errors import CannotPickle, WorkerError
from nbtoolkit.wire.payload import came_from_payload, in_main, type_name
from nbtoolkit.wire.tracebacks import PackedFrame, pack_traceback, rebuild_traceback, users_part

_MAX_CHAIN = 5  # causes and contexts that are packed; longer chains are cut
# Characters of an exception's text and of its printed traceback: a text may hold a whole array, and
# is written to several files.
_MAX_TEXT = 50_000


class _ValuePickler(cloudpickle.Pickler):
    """cloudpickle with device tensors moved to the CPU: the kernel must not touch a device."""

    def reducer_override(self, obj: object) -> object:
        # Pickled by name: with start="inline" it is the kernel's own class.
        if isinstance(obj, (type, types.FunctionType)) and in_main(obj) and not came_from_payload():
            return NotImplemented
        if "torch" in sys.modules:
            import torch

            if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
                moved = obj.detach().cpu()
                if isinstance(obj, torch.nn.Parameter):
                    moved = torch.nn.Parameter(moved, obj.requires_grad)
                return moved.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            if isinstance(obj, torch.Tensor) and not obj.is_leaf:
                return obj.detach().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            # A wrapped model cannot be loaded where there is no process group.
            if isinstance(obj, torch.nn.parallel.DistributedDataParallel):
                return _itself, (obj.module,)
        return super().reducer_override(obj)


def _itself(value: object) -> object:
    return value


def _dumps(value: object) -> bytes:
    file = io.BytesIO()
    _ValuePickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def pack_value(value: object) -> bytes:
    """Pickle a return value, its tensors detached and on the CPU.

    Raises:
        CannotPickle: names the part that cannot be pickled.
    """
    try:
        return _dumps(value)
    except Exception as error:
        raise CannotPickle(
            f"the function returned something that cannot be pickled: "
            f"{_unpicklable_part(value)}: {error}",
            allowed="numbers, strings, arrays, tensors, and other picklable objects",
            do="return plain values; save models with ctx.save(...), see result.checkpoint",
        ) from None


def _unpicklable_part(value: object) -> str:
    if isinstance(value, dict):
        items = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, (list, tuple)) else []
    for key, item in items:
        if not _can_dump(item):
            return f"value[{key!r}] (a {type(item).__qualname__})"
    return f"a {type(value).__qualname__}"


def _can_dump(value: object) -> bool:
    try:
        _dumps(value)
    except Exception:  # foreign code may raise anything
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class PackedError:
    """An exception as plain data.

    Attributes:
        type: its class, with the module.
        text: ``str()`` of it.
        traceback: as Python prints it, causes included; empty for a cause or context.
        stack: the frames of its traceback, outermost first.
        pickle: its pickle; None: it cannot be pickled.
        suppress: its ``__suppress_context__``.
        cause: its ``__cause__``.
        context: its ``__context__``.
        exit: whether it asks the process to end (SystemExit, KeyboardInterrupt).
        advice: what to do about it, where that is known.
        rank: the rank that raised it; None: no rank did.
        notes: sentences to add to it.
    """

    type: str
    text: str
    traceback: str = ""
    stack: Sequence[PackedFrame] = ()
    pickle: bytes | None = None
    suppress: bool = False
    cause: PackedError | None = None
    context: PackedError | None = None
    exit: bool = False
    advice: str | None = None
    rank: int | None = None
    notes: Sequence[str] = ()

    def encode(self) -> bytes:
        """Return the content of ``error.pkl``."""
        return pickle.dumps(self)

    @classmethod
    def decode(cls, data: bytes) -> PackedError:
        """Return the error that :meth:`encode` wrote (a pickle: load only your own runs).

        Raises:
            Exception: the data is damaged.
        """
        error = pickle.loads(data)
        if not isinstance(error, cls):
            raise TypeError(f"it holds a {type(error).__name__}")
        return error


def pack_error(error: BaseException, depth: int = 0) -> PackedError:
    """Pack an exception: its pickle (if it has one), type, text, traceback, causes.

    Of long texts, only both ends are kept.
    """
    trace = error.__traceback__
    printed = traceback.format_exception(type(error), error, trace) if depth == 0 else []
    inner = depth < _MAX_CHAIN
    cause = error.__cause__
    context = error.__context__
    return PackedError(
        type=type_name(error),
        text=error_text(error),
        traceback=_ends("".join(printed)),
        stack=pack_traceback(trace),
        pickle=_pickle_error(_with_short_texts(error)),
        suppress=error.__suppress_context__,
        cause=pack_error(cause, depth + 1) if inner and cause is not None else None,
        context=pack_error(context, depth + 1) if inner and context is not None else None,
        exit=isinstance(error, (SystemExit, KeyboardInterrupt)),
    )


def error_text(error: BaseException) -> str:
    """``str(error)``, also where that raises; of a long text, both ends."""
    try:
        return _ends(str(error))
    except Exception as failure:
        return f"<str() of it failed: {failure!r}>"


def _ends(text: str) -> str:
    """Both ends of a long text."""
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2 - 50  # with the line between them no longer than _MAX_TEXT
    return f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"


def _with_short_texts(error: BaseException) -> BaseException:
    """Return the error, or a copy of it if texts in it are long."""

    def short(value: object) -> object:
        return _ends(value) if isinstance(value, str) else value

    values = (*error.args, *error.__dict__.values())
    if all(short(value) is value for value in values):
        return error
    state = {name: short(value) for name, value in error.__dict__.items()}
    copy = _make(type(error), tuple(short(value) for value in error.args), state)
    return error if copy is None else copy


def _pickle_error(error: BaseException) -> bytes | None:
    """Return the exception's first pickle that restores the same text; None: there is none."""
    for make in _pickle_candidates(error):
        try:
            data = _dumps(make())
        except Exception:  # foreign code may raise anything when it is pickled: try the next one
            continue
        restored = _restore(data)
        if restored is not None and error_text(restored) == error_text(error):
            return data
    return None


def _pickle_candidates(error: BaseException) -> list[Callable[[], object]]:
    """Return what to pickle of an exception: its parts where ``__init__`` may refuse ``args``."""

    def whole() -> object:
        return error

    def parts() -> object:
        return type(error), error.args, dict(error.__dict__)

    def fewer_parts() -> object:
        return type(error), error.args, {k: v for k, v in error.__dict__.items() if _can_dump(v)}

    own_init = isinstance(type(error).__init__, types.FunctionType)
    return [parts, whole, fewer_parts] if own_init else [whole, parts, fewer_parts]


def unpack_error(packed: PackedError) -> BaseException:
    """Rebuild an exception with its own type and traceback; else a :class:`WorkerError`."""
    error = _restore(packed.pickle) or as_worker_error(packed)
    error.__traceback__ = rebuild_traceback(packed.stack)
    error.__cause__ = unpack_error(packed.cause) if packed.cause else None
    error.__context__ = unpack_error(packed.context) if packed.context else None
    error.__suppress_context__ = packed.suppress
    return error


def for_the_cell(packed: PackedError) -> PackedError:
    """Return the error with the part of its traceback that concerns the user, causes included.

    An error of nbtoolkit's own explains itself, and ends at the user's call. The rank's log keeps
    the whole traceback.
    """
    explains_itself = packed.type.startswith("nbtoolkit.errors.")
    return replace(
        packed,
        stack=users_part(packed.stack, explains_itself=explains_itself),
        cause=for_the_cell(packed.cause) if packed.cause else None,
        context=for_the_cell(packed.context) if packed.context else None,
    )


def _restore(data: bytes | None) -> BaseException | None:
    if data is None:
        return None
    try:
        content = pickle.loads(data)
    except Exception:  # foreign code may raise anything; as_worker_error then takes its place
        return None
    return content if isinstance(content, BaseException) else _make(*content)


def _make(
    kind: type[BaseException], args: tuple[object, ...], state: Mapping[str, object]
) -> BaseException | None:
    """Make an exception without its ``__init__``; None: its class does not allow it."""
    try:
        error: BaseException = kind.__new__(kind, *args)
        error.args = args
        error.__dict__.update(state)
    except Exception:  # foreign code may raise anything
        return None
    return error


def as_worker_error(packed: PackedError) -> WorkerError:
    """Return an error that shows another one's type, text and traceback."""
    return WorkerError(
        f"{packed.type}: {packed.text}\n\n{packed.traceback}".rstrip(),
        do="read the traceback above; the exception itself could not be brought to this process",
    )


def one_line(kind: str, text: str) -> str:
    """Return an exception's type (dotted) and text as one line."""
    first = text.strip().splitlines()[:1]
    return ": ".join([kind.rpartition(".")[2], *first])


def add_note(error: BaseException, note: str) -> None:
    """``error.add_note(note)``, also on Python 3.10 (whose tracebacks do not print notes)."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__dict__.setdefault("__notes__", []).append(note)
