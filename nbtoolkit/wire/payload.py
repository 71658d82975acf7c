"""Pickle what supervisor, agent and ranks receive, once, each into a memfd that all ranks map.

The memfd of the function also holds the buffers of pickle protocol 5: captured NumPy arrays and CPU
tensors. A rank maps the file privately, so a write stays in that rank, and only then costs memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import io
import linecache
import mmap
import os
import pickle
import struct
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import cloudpickle

from nbtoolkit.errors import CannotPickle, some_names

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from nbtoolkit.config.schema import Config
    from nbtoolkit.environment.deadline import Note
    from nbtoolkit.environment.hardware import Hardware
    from nbtoolkit.environment.launch_plan import LaunchPlan
    from nbtoolkit.environment.placement import MeasuredSpeed
    from nbtoolkit.environment.variables import KernelEnvironment
    from nbtoolkit.host import Host
    from nbtoolkit.run.events import RunStarted
    from nbtoolkit.run.paths import RunPaths
    from nbtoolkit.search.folds.folds import Fold

T = TypeVar("T")

_ALIGN = 64  # bytes; every array starts on its own cache line, for vectorised kernels
_SMALL = 16 * 1024  # bytes; smaller arrays stay in the pickle, since an entry would cost more
_FOOTER = struct.Struct("<QQ")  # offset and size of the pickle, at the very end of the file


@dataclass(frozen=True, kw_only=True)
class PackedFunction:
    """The training function, for an agent.

    Attributes:
        function: its pickle, with the functions and classes of cells that it needs.
        buffers: offset and size in the memfd of each buffer of the pickle, in its order.
        sources: the source lines of cells, by file name.
        environment: the kernel's environment.
    """

    function: bytes
    buffers: Sequence[tuple[int, int]] = ()
    sources: dict[str, list[str]]
    environment: KernelEnvironment


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One run of the training function, for its ranks.

    Attributes:
        paths: its folder.
        plan: how many ranks, on which devices.
        config: the resolved configuration.
        deadline: unix time at which the run is asked to stop; None: no limit.
        params: a trial's parameters.
        fold: the value of ``ctx.fold``.
        synchronous_reports: whether every report waits for an answer.
        in_search: whether it is a job of a search.
        port: where the ranks meet; their supervisor chooses it.
    """

    paths: RunPaths
    plan: LaunchPlan
    config: Config
    deadline: float | None = None
    params: Mapping[str, object] = field(default_factory=dict)
    fold: Fold | None = None
    synchronous_reports: bool = False
    in_search: bool = False
    port: int = 0


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A planned run, for its supervisor.

    Attributes:
        job: for its ranks.
        host: where it runs, to make another plan.
        hardware: what it may use, to make another plan.
        header: its first event.
        notes: for the user, at the start.
        speed: how fast each strategy was when it was measured, to make another plan.
    """

    job: JobSpec
    host: Host
    hardware: Hardware
    header: RunStarted
    notes: tuple[Note, ...] = ()
    speed: MeasuredSpeed | None = None


class PayloadWriter:
    """Writes the memfd, which is open until the end of the ``with`` block."""

    def __init__(self, name: str = "nbtoolkit") -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._end = 0

    def __enter__(self) -> PayloadWriter:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def put(self, data: memoryview | bytes) -> int:
        """Append raw bytes, aligned; return their offset."""
        offset = -(-self._end // _ALIGN) * _ALIGN
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += os.pwrite(self.fd, view[done : done + (1 << 30)], offset + done)
        self._end = offset + len(view)
        return offset

    def finish(self, content: bytes) -> int:
        """Append the pickle and the footer, seal the file, return its descriptor."""
        offset = self.put(content)
        self.put(_FOOTER.pack(offset, len(content)).rjust(_ALIGN, b"\0"))
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        return self.fd


class _Pickler(cloudpickle.Pickler):
    """cloudpickle that writes arrays to the memfd and collects the source files of functions."""

    def __init__(self, file: io.BytesIO, writer: PayloadWriter) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL, buffer_callback=self._store)
        self._writer = writer
        self._stored: dict[tuple[int, int], int] = {}
        # Stored arrays must not be freed (and their addresses reused) while pickling.
        self._kept: list[pickle.PickleBuffer] = []
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}
        self.buffers: list[tuple[int, int]] = []
        self.files: set[str] = set()
        self.of_main: dict[str, type | types.FunctionType] = {}
        """Functions and classes of cells, by the name under which plain pickle looks for them."""
        self.modules: set[types.ModuleType] = set()
        """Modules that the function refers to; the ranks import them anew."""

    def reducer_override(self, obj: object) -> object:
        if isinstance(obj, (type, types.FunctionType)) and in_main(obj):
            self.of_main[obj.__qualname__] = obj
        if isinstance(obj, types.FunctionType):
            self.files.add(obj.__code__.co_filename)
        elif isinstance(obj, types.ModuleType):
            self.modules.add(obj)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            # A lazy package: cloudpickle only knows plain modules.
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, types.CodeType):
            # From 3.1.3 on, cloudpickle replaces the file that errors and stacks name.
            make, arguments = self.dispatch_table[types.CodeType](obj)
            return _code_of_file, (make, arguments, obj.co_filename)
        reduced = self._array(obj) if "numpy" in sys.modules else None
        if reduced is None and "torch" in sys.modules:
            reduced = self._tensor(obj)
        return super().reducer_override(obj) if reduced is None else reduced

    def _array(self, obj: object) -> tuple[object, ...] | None:
        import numpy as np

        if type(obj) is np.memmap and isinstance(obj.base, mmap.mmap) and obj.filename:
            return _open_memmap, (
                str(obj.filename),
                obj.dtype,
                obj.offset,
                obj.shape,
                _memory_order(obj),
            )
        if type(obj) is not np.ndarray or obj.dtype.hasobject or obj.nbytes < _SMALL:
            return None
        # NumPy itself has no buffer for these two, and would copy them into the pickle.
        if not (obj.flags.c_contiguous or obj.flags.f_contiguous):
            return np.asarray, (np.ascontiguousarray(obj),)
        if obj.dtype.kind in "mM":
            return np.ndarray.view, (obj.view(np.int64), obj.dtype)
        return None

    def _tensor(self, obj: object) -> tuple[object, ...] | None:
        import torch

        if type(obj) is torch.UntypedStorage and obj.device.type == "cpu":
            return _make_storage, (torch.empty(0, dtype=torch.uint8).set_(obj).numpy(),)
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_quantized:
            return None
        if obj.device.type not in ("cpu", "meta"):
            raise CannotPickle(
                f"the function captures a tensor on {obj.device}, of shape {tuple(obj.shape)}",
                allowed="CPU tensors, arrays and plain Python objects; devices belong to the ranks",
                do="move it with .cpu() before the launch, or make it inside the function",
            )
        if not obj.is_leaf or obj.is_conj() or obj.is_neg() or obj.device.type == "meta":
            return None
        storage = obj.untyped_storage()
        if storage.nbytes() < _SMALL or vars(obj):
            return None
        # One object for all tensors that share memory, so that they also share it in the rank.
        storage = self._storages.setdefault((storage.data_ptr(), storage.nbytes()), storage)
        place = obj.storage_offset(), tuple(obj.shape), obj.stride()
        return _make_tensor, (storage, obj.dtype, *place, obj.requires_grad)

    def _store(self, buffer: pickle.PickleBuffer) -> bool:
        """Write a buffer to the memfd the first time; True: a small one stays in the pickle."""
        import numpy as np

        data = buffer.raw()
        if data.nbytes < _SMALL:
            return True
        memory = np.frombuffer(data, np.uint8).ctypes.data, data.nbytes
        if memory not in self._stored:
            self._kept.append(buffer)
            self._stored[memory] = self._writer.put(data)
        self.buffers.append((self._stored[memory], data.nbytes))
        return False


def _code_of_file(
    make: Callable[..., types.CodeType], arguments: tuple[object, ...], file: str
) -> types.CodeType:
    return make(*arguments).replace(co_filename=file)


def _memory_order(array: NDArray[Any]) -> Literal["C", "F"]:
    """Return the order of a contiguous array in memory; of any other, the order of its copy."""
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


@contextlib.contextmanager
def pack_function(function: Callable[..., Any], environment: KernelEnvironment) -> Iterator[int]:
    """Pickle ``function`` and ``environment`` into a sealed memfd, open until the block ends.

    Args:
        function: the training function.
        environment: the environment that the ranks reproduce.

    Raises:
        CannotPickle: names the global, closure variable or default that cannot be pickled.
    """
    main = sys.modules["__main__"]
    if main.__name__ in _MAIN[1:]:
        cloudpickle.register_pickle_by_value(main)  # a name would refer to the rank's own module
    with PayloadWriter() as writer:
        file = io.BytesIO()
        pickler = _Pickler(file, writer)
        try:
            pickler.dump((function, pickler.of_main))  # pickling the function fills of_main
        except CannotPickle:
            raise
        except Exception as error:
            raise _cannot_pickle(function, error) from error
        _warn_of_replaced(pickler.modules)
        packed = PackedFunction(
            function=file.getvalue(),
            buffers=pickler.buffers,
            sources=_sources(pickler.files),
            environment=environment,
        )
        yield writer.finish(cloudpickle.dumps(packed))


def _warn_of_replaced(modules: Iterable[types.ModuleType]) -> None:
    """Warn of functions and classes of cells that a cell has set on a module."""
    names = sorted(
        f"{module.__name__}.{name}"
        for module in modules
        if module.__name__ not in _MAIN
        for name, value in tuple(vars(module).items())
        if _is_cells(value)
    )
    if names:
        warnings.warn(
            f"a cell has set {some_names(names)}, and the ranks do not have it: they import the "
            "module again\n  Allowed: modules as they are imported\n"
            f"  Do now:  set {names[0]} at the beginning of the training function",
            stacklevel=2,
        )


def _is_cells(value: object) -> bool:
    # isinstance() would look at the attribute __class__: torch.distributed.reduce_op warns then.
    if not issubclass(type(value), (type, types.FunctionType)):
        return False
    return in_main(cast("type | types.FunctionType", value))


def unpack(fd: int, kind: type[T]) -> T:
    """Read an object of this type, written by :func:`pack_function` or :func:`pack_content`."""
    size = os.fstat(fd).st_size
    offset, length = _FOOTER.unpack(os.pread(fd, _FOOTER.size, size - _FOOTER.size))
    content = pickle.loads(os.pread(fd, length, offset))
    assert isinstance(content, kind)
    return content


@contextlib.contextmanager
def pack_content(pickled: bytes) -> Iterator[int]:
    """Write a pickle into a sealed memfd, open until the block ends."""
    with PayloadWriter() as writer:
        yield writer.finish(pickled)


def load_function(fd: int, packed: PackedFunction) -> Callable[..., Any]:
    """Unpickle the function in a rank; its arrays are private maps, tracebacks show its cells.

    The process gets the kernel's settings first: modules that are imported here may read them.
    """
    packed.environment.settings.apply()
    for filename, lines in packed.sources.items():
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    global _came_from_payload
    _came_from_payload = True
    private = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    view = memoryview(private)
    buffers = [view[offset : offset + size] for offset, size in packed.buffers]
    function: Callable[..., Any]
    function, of_main = pickle.loads(packed.function, buffers=buffers)
    # Plain pickle finds the functions and classes of cells by name. Pools and torch.save use it,
    # and DataLoader workers, which otherwise lose the batch that the rank waits for.
    vars(sys.modules["__main__"]).update(of_main)
    _of_main.update(of_main)
    return function


def unload_function() -> None:
    """Forget the function, so that its memory is freed and the next job gets it unchanged."""
    names = vars(sys.modules["__main__"])
    for name, value in _of_main.items():
        if names.get(name) is value:
            del names[name]
    _of_main.clear()


_MAIN = ("__main__", "__mp_main__")
"""The names of ``__main__``; the second one in a process that multiprocessing has spawned."""


def in_main(obj: type | types.FunctionType) -> bool:
    """Whether a function or class is a global of ``__main__``: defined in a cell or a script."""
    main = sys.modules["__main__"]
    return obj.__module__ in _MAIN and getattr(main, obj.__qualname__, None) is obj


def came_from_payload() -> bool:
    """Whether this process has unpickled the user's function."""
    return _came_from_payload


_came_from_payload = False
_of_main: dict[str, type | types.FunctionType] = {}
"""What ``__main__`` got for the function that is loaded."""


def _open_memmap(
    filename: str,
    dtype: np.dtype[Any],
    offset: int,
    shape: tuple[int, ...],
    order: Literal["C", "F"],
) -> NDArray[Any]:
    import numpy as np

    return np.memmap(filename, dtype, mode="c", offset=offset, shape=shape, order=order)


def _make_storage(memory: NDArray[np.uint8]) -> torch.UntypedStorage:
    import torch

    return torch.from_numpy(memory).untyped_storage()


def _make_tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    start: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    import torch

    tensor = torch.empty(0, dtype=dtype).set_(storage, start, shape, stride)
    return tensor.requires_grad_(requires_grad)


def _sources(files: set[str]) -> dict[str, list[str]]:
    """Return the source lines of cells (files that exist only in this process), for tracebacks."""
    return {
        name: lines
        for name in files
        if not os.path.exists(name) and (lines := linecache.getlines(name))
    }


def _cannot_pickle(function: Callable[..., Any], error: Exception) -> CannotPickle:
    """Return the error of the captured object that cannot be pickled, found by trying each."""
    called = f"{getattr(function, '__name__', type_name(function))}()"
    problem = f"the function {called} cannot be pickled: {error}"
    for label, value in _captured(function):
        if cause := _pickle_failure(value):
            which = f"the {label} (a {type_name(value)}){_inner_part(value)}"
            problem = f"{which}, captured by {called}, cannot be pickled: {cause}"
            break
    return CannotPickle(
        problem,
        allowed="functions, classes, arrays, CPU tensors and other picklable objects",
        do='create it inside the function, or use start="inline"',
    )


def _pickle_failure(value: object) -> Exception | None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        return error
    return None


def _captured(function: Callable[..., Any]) -> list[tuple[str, object]]:
    """Return the objects that a function refers to, with labels: closure, globals, defaults."""
    code = getattr(function, "__code__", None)
    if code is None:
        inner = getattr(function, "__wrapped__", None)  # nb.verify wraps the user's function
        return [] if inner is None else _captured(inner)
    captured = [(f"closure variable `{name}`", value) for name, value in closure_values(function)]
    globals_ = getattr(function, "__globals__", {})
    for name in sorted(global_names(code) & globals_.keys()):
        captured.append((f"global `{name}`", globals_[name]))
    for index, value in enumerate(getattr(function, "__defaults__", None) or ()):
        captured.append((f"default value `argument {index}`", value))
    return captured


def closure_values(function: object) -> Iterator[tuple[str, object]]:
    """Yield names and values of the closure variables of a function that are assigned."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell
            yield name, cell.cell_contents


def global_names(code: types.CodeType) -> set[str]:
    """Return the names that a function's code, and the functions in it, look up outside of it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= global_names(constant)
    return names


def _inner_part(value: object) -> str:
    """Return the attribute or captured object of ``value`` that cannot be pickled."""
    if isinstance(value, types.FunctionType):
        parts = _captured(value)
    else:
        attributes = getattr(value, "__dict__", {})
        parts = [(f"attribute `{name}`", part) for name, part in attributes.items()]
    for label, part in parts:
        if _pickle_failure(part):
            return f", through its {label} (a {type_name(part)})"
    return ""


def type_name(value: object) -> str:
    """Return the name of a value's type with its module, unless it is a builtin."""
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"
