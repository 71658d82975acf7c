"""Plain pickle: reads what a run returned as far as it is plain data, and executes nothing.

A pickle may call any function (https://docs.python.org/3/library/pickle.html#restricting-globals).
A report is also made of folders that came from elsewhere, so that here only the names that arrays
and tensors need are known.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

LARGEST = 200_000_000  # bytes: a report is no place for more

_NUMPY = (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))
_KNOWN = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # bytes, in pickles of old protocols
    # NumPy 2 has renamed its core; each version reads the other's names
    *((f"numpy.{core}.{module}", name) for core in ("core", "_core") for module, name in _NUMPY),
}
_TENSORS = {"_rebuild_tensor_v2", "_rebuild_parameter"}


class NotPlain(Exception):
    """A return value holds something that is no plain data, array or tensor; names it."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return getattr(import_module(module), name)
        if module == "torch._utils" and name in _TENSORS:
            return getattr(import_module(module), name)
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise NotPlain(f"{module}.{name}")


def _storage(data: bytes) -> Any:
    """A tensor's numbers; torch's own function for that would execute what is in them."""
    import torch

    load: Callable[..., Any] = torch.load
    return load(io.BytesIO(data), weights_only=True)


def read_plain(file: Path) -> Any:
    """What a rank returned.

    Args:
        file: a pickle, as in ``values/`` of a run's folder.

    Raises:
        NotPlain: it holds other objects, is damaged, or is too large for a report.
        FileNotFoundError: there is none.
    """
    if file.stat().st_size > LARGEST:
        raise NotPlain(f"more than {LARGEST // 10**6} MB")
    try:
        return _Reader(io.BytesIO(file.read_bytes())).load()
    except NotPlain:
        raise
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise NotPlain(f"{type(error).__name__}: {error}") from error
