"""Bundle: the file that carries runs from one session to the next.

A tar file without compression (weights do not compress), which any ``tar`` lists:

    nbtoolkit-bundle.json    first: format, when, where and of what it was made
    files/...                the files, by their path below the output folder
    nbtoolkit-manifest.json  last: its own digest in the first line, then size, time and digest of
                             every file (see hashing.py)

What has no manifest was cut off. The digests tell damage, not who wrote it: a bundle may hold
pickled return values, as any run folder does. Unpacking loads none of them.
"""

from __future__ import annotations

import errno
import json
import os
import tarfile
import time
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from nbtoolkit.relay.copying import copy_range
from nbtoolkit.relay.hashing import SEGMENT, Hasher, Pending, digest

FORMAT = "nbtoolkit bundle 1"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
HEADER, MANIFEST, FILES = "nbtoolkit-bundle.json", "nbtoolkit-manifest.json", "files/"

# Not .tar: Kaggle takes archives apart when they are uploaded as a data set.
SUFFIX = ".bundle"
DEFAULT_NAME = f"nbtoolkit-relay{SUFFIX}"

_PER_FILE = 115  # a file's entry in the manifest, without its name
_LONG_NAME = 100  # longer names take an entry of their own in a tar file


class Run(BaseModel):
    """What the header says of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    folder: str
    """Below the output folder."""
    status: str
    alive: bool
    """Whether it was going on."""


class Header(BaseModel):
    """What a bundle says of itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["nbtoolkit bundle 1"]
    created: float = Field(gt=0, allow_inf_nan=False)
    """When it was packed, in unix seconds."""
    source: str
    """The output folder that was packed."""
    place: str | None
    """The same, below the working directory of then; None: it was not below it."""
    host: str
    nbtoolkit: str
    runs: tuple[Run, ...]
    left_out: tuple[str, ...]


class Entry(NamedTuple):
    """What the manifest says of a file."""

    size: int
    mtime_ns: int
    digest: str


class BundleWriter:
    """Writes a bundle into an open file.

    Args:
        fd: an empty file, open for writing and reading.
        about: what the header is to say besides the format.
        hasher: hashes what has been written to it.
    """

    def __init__(self, fd: int, about: Mapping[str, Any], hasher: Hasher) -> None:
        self._fd, self._hasher = fd, hasher
        self._files: dict[str, tuple[int, int, Pending]] = {}
        self._put(HEADER, json.dumps({"format": FORMAT, **about}, indent=1).encode())

    def add(self, name: str, source: int, size: int, mtime_ns: int) -> bool:
        """Copy a file.

        Args:
            name: its path below the output folder, with ``/``.
            source: open for reading.
            size: bytes to copy; a file that grows meanwhile is cut there.
            mtime_ns: when it was last changed.

        Returns:
            Whether it is in the bundle: left out is one that has become shorter meanwhile, or
            cannot be read.

        Raises:
            OSError: the disk is full.
        """
        before = os.lseek(self._fd, 0, os.SEEK_CUR)
        self._begin(FILES + name, size, mtime_ns // 10**9)
        segments = []
        for begin in range(0, size, SEGMENT) or (0,):
            length = min(SEGMENT, size - begin)
            place = os.lseek(self._fd, 0, os.SEEK_CUR)
            if not _copied(source, begin, self._fd, length):
                os.ftruncate(self._fd, before)
                os.lseek(self._fd, before, os.SEEK_SET)
                return False
            segments.append(self._hasher.hash(place, length))
        self._pad(size)
        self._files[name] = size, mtime_ns, Pending(segments)
        return True

    def close(self) -> int:
        """Write the manifest; returns how many files are in the bundle.

        Raises:
            OSError: the disk is full.
        """
        entries = {
            name: Entry(size, mtime_ns, pending.result())
            for name, (size, mtime_ns, pending) in self._files.items()
        }
        listed = json.dumps(entries).encode()
        self._put(MANIFEST, digest(listed).encode() + b"\n" + listed)
        _write(self._fd, bytes(2 * tarfile.BLOCKSIZE))  # a tar file's end
        return len(entries)

    def _put(self, name: str, data: bytes) -> None:
        self._begin(name, len(data), int(time.time()))
        _write(self._fd, data)
        self._pad(len(data))

    def _begin(self, name: str, size: int, mtime: int) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mtime = size, mtime
        _write(self._fd, info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))

    def _pad(self, size: int) -> None:
        _write(self._fd, bytes(-size % tarfile.BLOCKSIZE))


def _copied(source: int, begin: int, target: int, size: int) -> bool:
    """Copy a part; where the target cannot be written for other reasons, the manifest says so."""
    try:
        return copy_range(source, begin, target, size) == size
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        return False


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def size_in_bundle(name: str, size: int) -> int:
    """Bytes that a file takes in a bundle, rounded up."""
    long = 3 * tarfile.BLOCKSIZE if len(FILES) + len(name) > _LONG_NAME else 0
    blocks = -(-size // tarfile.BLOCKSIZE)
    return (1 + blocks) * tarfile.BLOCKSIZE + long + _PER_FILE + len(name)


def size_of_frame(about: Mapping[str, Any]) -> int:
    """Bytes that a bundle takes besides its files."""
    return len(json.dumps(about, indent=1)) + 6 * tarfile.BLOCKSIZE
