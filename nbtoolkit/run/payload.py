"""Pickle the function once, with its arrays, into one memfd that all ranks map.

NumPy arrays and CPU tensors captured by the function lie raw in the memfd; a rank maps the file
privately, so a write works, stays in that rank, and only then costs memory. The buffers of pickle
protocol 5 would not do: torch tensors, arrays with gaps and arrays of dates stay in the pickle.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import cloudpickle

from nbtoolkit.errors import CannotPickle

if TYPE_CHECKING:
    from nbtoolkit.environment.variables import KernelEnvironment

T = TypeVar("T")

_ALIGN = 64  # bytes; keeps every array on its own cache line, which vectorised kernels like
# Bytes; below this an array travels inside the pickle, a map entry would cost more.
_SMALL = 16 * 1024
_FOOTER = struct.Struct("<QQ")  # offset and size of the pickle, at the very end of the file


@dataclass(frozen=True, kw_only=True)
class PackedFunction:
    """The training function as an agent gets it, with where it was.

    Attributes:
        function: its pickle, and those of the cell functions it needs.
        sources: the text of cells by file name.
        environment: the kernel's.
    """

    function: bytes
    sources: dict[str, list[str]]
    environment: KernelEnvironment


class PayloadWriter:
    """Fills the memfd, which is open as long as its ``with`` block lasts."""

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
        """Append the pickle and the footer, seal the file against change, return its descriptor."""
        offset = self.put(content)
        self.put(_FOOTER.pack(offset, len(content)).rjust(_ALIGN, b"\0"))
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        return self.fd


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, with arrays put aside and the sources of cell functions collected."""

    def __init__(self, file: io.BytesIO, writer: PayloadWriter) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._writer = writer
        self._stored: dict[tuple[int, int], int] = {}
        # What was put aside must not be freed (and its address reused) while pickling.
        self.keep: list[Any] = []
        self.files: set[str] = set()
        self.of_main: dict[str, Any] = {}
        """Functions and classes of cells, by the name under which plain pickle looks for them."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)) and in_main(obj):
            self.of_main[obj.__qualname__] = obj
        if isinstance(obj, types.FunctionType):
            self.files.add(obj.__code__.co_filename)
        elif isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            return importlib.import_module, (
                obj.__name__,
            )  # a lazy package: cloudpickle knows plain modules only
        elif ("numpy" in sys.modules and (reduced := self._array(obj)) is not None) or (
            "torch" in sys.modules and (reduced := self._tensor(obj)) is not None
        ):
            return reduced
        return super().reducer_override(obj)

    def _array(self, obj: Any) -> Any:
        import numpy as np

        if type(obj) is np.memmap and isinstance(obj.base, mmap.mmap) and obj.filename:
            place = (str(obj.filename), obj.dtype, obj.offset, obj.shape, _order(obj))
            return _open_memmap, place
        if type(obj) is not np.ndarray or obj.dtype.hasobject or obj.nbytes < _SMALL:
            return None
        order = _order(obj)
        flat = np.asarray(obj, order=order)
        offset = self._store(flat.__array_interface__["data"][0], flat.nbytes, flat, order)
        return _map_array, (offset, obj.dtype, obj.shape, order)

    def _tensor(self, obj: Any) -> Any:
        import torch

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
        raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        offset = self._store(storage.data_ptr(), storage.nbytes(), raw, "C")
        place = (offset, storage.nbytes(), obj.dtype, obj.storage_offset())
        return _map_tensor, (*place, tuple(obj.shape), obj.stride(), obj.requires_grad)

    def _store(self, address: int, size: int, flat: Any, order: str) -> int:
        if (address, size) not in self._stored:
            self.keep.append(flat)
            # A 1-D byte view; reshape never copies here, since `flat` is contiguous in `order`.
            data = flat.reshape(-1, order=order).view("u1")
            self._stored[address, size] = self._writer.put(memoryview(data))
        return self._stored[address, size]


def _order(array: Any) -> Literal["C", "F"]:
    """How an array lies in memory: as it is where it is contiguous, else as it will be copied."""
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


@contextlib.contextmanager
def pack_function(
    function: Callable[..., Any] | None, environment: KernelEnvironment
) -> Iterator[int]:
    """Pickle ``function`` and ``environment`` into a sealed memfd, open as long as the block lasts.

    Args:
        function: the training function; None where the ranks are forked from this process and have
            it already.
        environment: where the function is to find itself.

    Raises:
        CannotPickle: names the global, closure variable or default that cannot travel.
    """
    main = sys.modules["__main__"]
    if main.__name__ in _MAIN[1:]:
        cloudpickle.register_pickle_by_value(main)  # by its name alone it would be the rank's own
    with PayloadWriter() as writer:
        file = io.BytesIO()
        pickler = _Pickler(file, writer)
        try:
            pickler.dump((function, pickler.of_main))  # filled while the function is pickled
        except CannotPickle:
            raise
        except Exception as error:
            assert function is not None
            raise _name_the_cause(function, error) from error
        packed = PackedFunction(
            function=file.getvalue(), sources=_sources(pickler.files), environment=environment
        )
        yield writer.finish(cloudpickle.dumps(packed))


def unpack(fd: int, kind: type[T]) -> T:
    """Read the object of this type that :func:`pack_function` or :func:`pack_content` wrote."""
    size = os.fstat(fd).st_size
    offset, length = _FOOTER.unpack(os.pread(fd, _FOOTER.size, size - _FOOTER.size))
    content = pickle.loads(os.pread(fd, length, offset))
    assert isinstance(content, kind)
    return content


@contextlib.contextmanager
def pack_content(content: object) -> Iterator[int]:
    """Pickle ``content`` into a sealed memfd, open as long as the block lasts."""
    with PayloadWriter() as writer:
        yield writer.finish(cloudpickle.dumps(content))


def load_function(fd: int, packed: PackedFunction) -> Callable[..., Any]:
    """Unpickle the function in a rank: its arrays are private maps, its cells have sources."""
    for filename, lines in packed.sources.items():
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    global _mapping
    _mapping = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    function: Callable[..., Any]
    function, of_main = pickle.loads(packed.function)
    # Plain pickle takes cell functions and classes by name: it is what pools, DataLoader workers
    # (whose batch would be lost otherwise, and waited for without end) and torch.save use.
    vars(sys.modules["__main__"]).update(of_main)
    return function


_MAIN = ("__main__", "__mp_main__")
"""What ``__main__`` is called; in a process that multiprocessing has spawned, the second."""


def in_main(obj: Any) -> bool:
    """Whether a function or class is a global of ``__main__``: of a cell or a script."""
    main = sys.modules["__main__"]
    return obj.__module__ in _MAIN and getattr(main, obj.__qualname__, None) is obj


def came_from_payload() -> bool:
    """Whether what is of the user's in this process was unpickled here."""
    return _mapping is not None


# The memfd of this rank, while and after the function is unpickled (arrays keep it alive through
# their buffers).
_mapping: mmap.mmap | None = None


def _map_array(offset: int, dtype: Any, shape: tuple[int, ...], order: Any) -> Any:
    import numpy as np

    assert _mapping is not None
    return np.ndarray(shape, dtype, buffer=_mapping, offset=offset, order=order)


def _open_memmap(filename: str, dtype: Any, offset: int, shape: tuple[int, ...], order: Any) -> Any:
    import numpy as np

    return np.memmap(filename, dtype, mode="c", offset=offset, shape=shape, order=order)


def _map_tensor(
    offset: int, size: int, dtype: Any, start: int, shape: Any, stride: Any, grad: bool
) -> Any:
    import torch

    assert _mapping is not None
    key = (offset, size)
    if key not in _storages:  # tensors that shared memory in the kernel share it in the rank
        raw = torch.frombuffer(_mapping, dtype=torch.uint8, count=size, offset=offset)
        _storages[key] = raw.untyped_storage()
    tensor = torch.empty(0, dtype=dtype).set_(_storages[key], start, shape, stride)
    return tensor.requires_grad_(grad)


_storages: dict[tuple[int, int], Any] = {}


def _sources(files: set[str]) -> dict[str, list[str]]:
    """The text of cells (files that exist only in this process), for tracebacks in the ranks."""
    return {
        name: lines
        for name in files
        if not os.path.exists(name) and (lines := linecache.getlines(name))
    }


def _name_the_cause(function: Callable[..., Any], error: Exception) -> CannotPickle:
    """Find which captured object cannot be pickled, by trying them one by one."""
    called = f"{getattr(function, '__name__', _type_name(function))}()"
    what = f"the function {called} cannot be pickled: {error}"
    for kind, name, value in _captured(function):
        try:
            cloudpickle.dumps(value)
        except Exception as cause:
            which = f"the {kind} `{name}` (a {_type_name(value)}){_inner_name(value)}"
            what = f"{which}, captured by {called}, cannot be pickled: {cause}"
            break
    return CannotPickle(
        what,
        allowed="functions, classes, arrays, CPU tensors and other picklable objects",
        do='make it inside the function, or use start="fork" (nb.doctor() says whether it works)',
    )


def _captured(function: Callable[..., Any]) -> list[tuple[str, str, Any]]:
    """(kind, name, value) of what a function refers to: closure, globals, defaults."""
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    found: list[tuple[str, str, Any]] = []
    for name, cell in zip(
        code.co_freevars, getattr(function, "__closure__", None) or (), strict=False
    ):
        with contextlib.suppress(ValueError):  # an empty cell: not assigned yet
            found.append(("closure variable", name, cell.cell_contents))
    names = _global_names(code)
    globals_ = getattr(function, "__globals__", {})
    found += [("global", name, globals_[name]) for name in sorted(names) if name in globals_]
    for index, value in enumerate(getattr(function, "__defaults__", None) or ()):
        found.append(("default value", f"argument {index}", value))
    return found


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _inner_name(value: Any) -> str:
    """Where in ``value`` the trouble sits, one level deep: an attribute, or what it captured."""
    if isinstance(value, types.FunctionType):
        parts = [(f"{kind} `{name}`", part) for kind, name, part in _captured(value)]
    else:
        parts = [
            (f"attribute `{name}`", part) for name, part in getattr(value, "__dict__", {}).items()
        ]
    for label, part in parts:
        try:
            cloudpickle.dumps(part)
        except Exception:
            return f", through its {label} (a {_type_name(part)})"
    return ""


def _type_name(value: Any) -> str:
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
