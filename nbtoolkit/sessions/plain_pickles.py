"""Tell whether a pickle holds plain data only, without calling anything that it names.

A pickle may call any function (https://docs.python.org/3/library/pickle.html#restricting-globals).
The reader here knows a few names, and gives an inert object for each of them.
"""

from __future__ import annotations

import io
import pickle
import re
import tarfile
import zipfile
from pathlib import Path
from typing import IO

_PICKLES = (".pkl", ".pt", ".pth", ".ckpt")

_PLAIN = re.compile(
    r"collections\.(OrderedDict|defaultdict|Counter|deque)"
    r"|builtins\.(set|frozenset|complex|bytearray|slice|range|int|float|str|bool|list|dict|tuple)"
    r"|datetime\.(date|time|datetime|timedelta|timezone)|decimal\.Decimal|fractions\.Fraction"
    r"|pathlib\.\w*Path|uuid\.UUID|_codecs\.encode"
    r"|numpy\.(ndarray|dtype|bool_|float64|int64)|numpy\._?core\.multiarray\.(_reconstruct|scalar)"
    r"|numpy\._?core\.numeric\._frombuffer"
    r"|torch\._utils\._rebuild_(tensor|tensor_v2|parameter)|torch\.(Size|device|Tensor)"
    r"|torch\.\w+Storage|torch\.storage\.\w+Storage|torch\.(b?float|u?int|complex)\d+|torch\.bool"
    r"|torch\.serialization\._get_layout"
)


class NotPlain(Exception):
    """A pickle names something else than plain data, arrays and tensors; says what."""


class _Inert:
    """Takes the place of any object, and ignores what is done with it."""

    def __new__(cls, *_: object, **__: object) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass

    def __setitem__(self, _: object, __: object) -> None:
        pass

    def append(self, _: object) -> None:
        """Ignore an item."""

    def add(self, _: object) -> None:
        """Ignore an item."""

    def extend(self, _: object) -> None:
        """Ignore items."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _check_tensor
        if _PLAIN.fullmatch(f"{module}.{name}"):
            return _Inert
        raise NotPlain(f"{module}.{name}")

    def persistent_load(self, _: object) -> object:
        return _Inert()  # the numbers of a tensor, in another member of a checkpoint


def check_plain(file: Path) -> None:
    """Refuse a pickle, or a checkpoint of torch, that holds more than plain data.

    Args:
        file: any file.

    Raises:
        NotPlain: it does, or it is damaged.
        OSError: it cannot be read.
    """
    if file.suffix.lower() not in _PICKLES:
        return
    try:
        with file.open("rb") as opened:
            if file.suffix.lower() == ".pkl":
                _Reader(opened).load()
            else:
                _check_archive(opened)
    except (NotPlain, OSError):
        raise
    except Exception as error:  # a damaged pickle may raise any type
        raise NotPlain(f"{type(error).__name__}: {error}") from error


def _check_archive(file: IO[bytes]) -> None:
    """Check what ``torch.save`` writes; TorchScript, which is code, names classes of its own."""
    if file.read(4) != b"PK\x03\x04":  # torch.load decides by these
        raise NotPlain("a format before torch 1.6")
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.filename.endswith(".pkl"):
                _Reader(io.BytesIO(archive.read(member))).load()


def _check_tensor(data: bytes) -> _Inert:
    """Check a tensor within a pickle: five pickles, and then its numbers."""
    file = io.BytesIO(data)
    if tarfile.is_tarfile(file):  # torch would read it in another way
        raise NotPlain("a tar file as a tensor")
    file.seek(0)
    for _ in range(5):
        _Reader(file).load()
    return _Inert()
