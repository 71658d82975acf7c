"""Pickle the function once, with its arrays, into one memfd that all ranks map.

The memfd holds the captured NumPy arrays and CPU tensors as raw bytes. A rank maps the file
privately, so a write stays in that rank, and only then costs memory. The buffers of pickle protocol
5 are not enough: torch tensors, non-contiguous arrays and arrays of dates stay in the pickle.
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
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from nbtoolkit.environment.variables import KernelEnvironment

T = TypeVar("T")

_ALIGN = 64  # bytes; every array starts on its own cache line, for vectorised kernels
_SMALL = 16 * 1024  # bytes; smaller arrays stay in the pickle, since an entry would cost more
_FOOTER = struct.Struct("<QQ")  # offset and size of the pickle, at the very end of the file


@dataclass(frozen=True, kw_only=True)
class PackedFunction:
    """The training function, for an agent.

    Attributes:
        function: its pickle, with the functions and classes of cells that it needs.
        sources: the source lines of cells, by file name.
        environment: the kernel's environment.
    """

    function: bytes
    sources: dict[str, list[str]]
    environment: KernelEnvironment


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
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._writer = writer
        self._stored: dict[tuple[int, int], int] = {}
        # Stored arrays must not be freed (and their addresses reused) while pickling.
        self._kept: list[NDArray[Any]] = []
        self.files: set[str] = set()
        self.of_main: dict[str, type | types.FunctionType] = {}
        """Functions and classes of cells, by the name under which plain pickle looks for them."""

    def reducer_override(self, obj: object) -> object:
        if isinstance(obj, (type, types.FunctionType)) and in_main(obj):
            self.of_main[obj.__qualname__] = obj
        if isinstance(obj, types.FunctionType):
            self.files.add(obj.__code__.co_filename)
        elif isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            # A lazy package: cloudpickle only knows plain modules.
            return importlib.import_module, (obj.__name__,)
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
        order = _memory_order(obj)
        contiguous = np.asarray(obj, order=order)
        address = contiguous.__array_interface__["data"][0]
        offset = self._store(address, contiguous.nbytes, contiguous, order)
        return _map_array, (offset, obj.dtype, obj.shape, order)

    def _tensor(self, obj: object) -> tuple[object, ...] | None:
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
        source = (offset, storage.nbytes(), obj.dtype, obj.storage_offset())
        return _map_tensor, (*source, tuple(obj.shape), obj.stride(), obj.requires_grad)

    def _store(self, address: int, size: int, array: NDArray[Any], order: Literal["C", "F"]) -> int:
        """The offset of an array that is contiguous in ``order``; writes it the first time."""
        if (address, size) not in self._stored:
            self._kept.append(array)
            data = array.reshape(-1, order=order).view("u1")  # a view: nothing is copied
            self._stored[address, size] = self._writer.put(data.data)
        return self._stored[address, size]


def _memory_order(array: NDArray[Any]) -> Literal["C", "F"]:
    """The order of a contiguous array in memory; of any other, the order of its copy."""
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


@contextlib.contextmanager
def pack_function(
    function: Callable[..., Any] | None, environment: KernelEnvironment
) -> Iterator[int]:
    """Pickle ``function`` and ``environment`` into a sealed memfd, open until the block ends.

    Args:
        function: the training function; None if the ranks are forked from this process and have it.
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
            assert function is not None
            raise _cannot_pickle(function, error) from error
        packed = PackedFunction(
            function=file.getvalue(), sources=_sources(pickler.files), environment=environment
        )
        yield writer.finish(cloudpickle.dumps(packed))


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
    """Unpickle the function in a rank; its arrays are private maps, tracebacks show its cells."""
    for filename, lines in packed.sources.items():
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    global _mapping
    _mapping = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    function: Callable[..., Any]
    function, of_main = pickle.loads(packed.function)
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
    _storages.clear()


_MAIN = ("__main__", "__mp_main__")
"""The names of ``__main__``; the second one in a process that multiprocessing has spawned."""


def in_main(obj: type | types.FunctionType) -> bool:
    """Whether a function or class is a global of ``__main__``: defined in a cell or a script."""
    main = sys.modules["__main__"]
    return obj.__module__ in _MAIN and getattr(main, obj.__qualname__, None) is obj


def came_from_payload() -> bool:
    """Whether this process has unpickled the user's function."""
    return _mapping is not None


# The memfd of this rank, from the unpickling of the function on.
_mapping: mmap.mmap | None = None


def _map_array(
    offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], order: Literal["C", "F"]
) -> NDArray[Any]:
    import numpy as np

    assert _mapping is not None
    return np.ndarray(shape, dtype, buffer=_mapping, offset=offset, order=order)


def _open_memmap(
    filename: str,
    dtype: np.dtype[Any],
    offset: int,
    shape: tuple[int, ...],
    order: Literal["C", "F"],
) -> NDArray[Any]:
    import numpy as np

    return np.memmap(filename, dtype, mode="c", offset=offset, shape=shape, order=order)


def _map_tensor(
    offset: int,
    size: int,
    dtype: torch.dtype,
    start: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    import torch

    assert _mapping is not None
    key = (offset, size)
    if key not in _storages:  # tensors that share memory in the kernel also share it in the rank
        raw = torch.frombuffer(_mapping, dtype=torch.uint8, count=size, offset=offset)
        _storages[key] = raw.untyped_storage()
    tensor = torch.empty(0, dtype=dtype).set_(_storages[key], start, shape, stride)
    return tensor.requires_grad_(requires_grad)


# Of the function that is loaded: shared memory of its tensors, and what __main__ got.
_storages: dict[tuple[int, int], torch.UntypedStorage] = {}
_of_main: dict[str, type | types.FunctionType] = {}


def _sources(files: set[str]) -> dict[str, list[str]]:
    """The source lines of cells (files that exist only in this process), for tracebacks."""
    return {
        name: lines
        for name in files
        if not os.path.exists(name) and (lines := linecache.getlines(name))
    }


def _cannot_pickle(function: Callable[..., Any], error: Exception) -> CannotPickle:
    """The error that names the captured object that cannot be pickled, found by trying each."""
    called = f"{getattr(function, '__name__', _type_name(function))}()"
    what = f"the function {called} cannot be pickled: {error}"
    for label, value in _captured(function):
        if cause := _pickle_failure(value):
            which = f"the {label} (a {_type_name(value)}){_inner_part(value)}"
            what = f"{which}, captured by {called}, cannot be pickled: {cause}"
            break
    return CannotPickle(
        what,
        allowed="functions, classes, arrays, CPU tensors and other picklable objects",
        do='create it inside the function, or use start="fork" (nb.doctor() says whether it works)',
    )


def _pickle_failure(value: object) -> Exception | None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        return error
    return None


def _captured(function: Callable[..., Any]) -> list[tuple[str, object]]:
    """The objects that a function refers to, with labels: closure, globals, defaults."""
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    captured: list[tuple[str, object]] = []
    for name, cell in zip(
        code.co_freevars, getattr(function, "__closure__", None) or (), strict=False
    ):
        with contextlib.suppress(ValueError):  # an empty cell: not assigned yet
            captured.append((f"closure variable `{name}`", cell.cell_contents))
    globals_ = getattr(function, "__globals__", {})
    for name in sorted(_global_names(code) & globals_.keys()):
        captured.append((f"global `{name}`", globals_[name]))
    for index, value in enumerate(getattr(function, "__defaults__", None) or ()):
        captured.append((f"default value `argument {index}`", value))
    return captured


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _inner_part(value: object) -> str:
    """The attribute or captured object of ``value`` that cannot be pickled, one level deep."""
    if isinstance(value, types.FunctionType):
        parts = _captured(value)
    else:
        attributes = getattr(value, "__dict__", {})
        parts = [(f"attribute `{name}`", part) for name, part in attributes.items()]
    for label, part in parts:
        if _pickle_failure(part):
            return f", through its {label} (a {_type_name(part)})"
    return ""


def _type_name(value: object) -> str:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"
