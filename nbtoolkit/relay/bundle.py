"""Bundle: the file that carries runs from one session to the next.

A tar file without compression (weights do not compress), which any ``tar`` lists:

    nbtoolkit-bundle.json    first: format, when, where and of what it was made
    files/...                the files, by their path below the output folder
    nbtoolkit-manifest.json  last: its own digest in the first line, then size, time and digest of
                             every file

A digest is the BLAKE2b of a file's bytes: without SHA instructions in the CPU it takes about half
the time of SHA-256 (https://www.blake2.net).

What has no manifest was cut off. The digests tell damage, not who wrote it: a bundle may hold
pickled return values, as any run folder does. Unpacking loads none of them.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import tarfile
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import IO, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

FORMAT = "nbtoolkit bundle 2"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
HEADER, MANIFEST, FILES = "nbtoolkit-bundle.json", "nbtoolkit-manifest.json", "files/"

# Not .tar: Kaggle takes archives apart when they are uploaded as a data set.
SUFFIX = ".bundle"
DEFAULT_NAME = f"nbtoolkit-relay{SUFFIX}"

_PER_FILE = 115  # a file's entry in the manifest, without its name
_LONG_NAME = 100  # longer names take an entry of their own in a tar file

BLOCK = 2**20
"""Bytes that are copied at once."""
_DIGEST = 32  # bytes


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

    format: Literal["nbtoolkit bundle 2"]
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


class Hashed:
    """A file that is read once: what was read is hashed by another thread while it is written.

    Args:
        file: open for reading.
        thread: the other thread.
    """

    def __init__(self, file: IO[bytes], thread: Executor) -> None:
        self._file, self._thread = file, thread
        self._hash = hashlib.blake2b(digest_size=_DIGEST)
        self._last = thread.submit(self._hash.update, b"")

    def read(self, size: int = -1, /) -> bytes:
        """The next ``size`` bytes; fewer at the end of the file."""
        data = self._file.read(size)
        self._last.result()
        self._last = self._thread.submit(self._hash.update, data)
        return data

    def digest(self) -> str:
        """The digest of what was read, in hex."""
        self._last.result()
        return self._hash.hexdigest()


def digest(data: bytes) -> str:
    """The digest of a few bytes, in hex."""
    return hashlib.blake2b(data, digest_size=_DIGEST).hexdigest()


class BundleWriter:
    """Writes a bundle into an open file.

    Args:
        out: an empty file, open for writing, buffered.
        about: what the header is to say besides the format.
        thread: hashes what is written.
    """

    def __init__(self, out: IO[bytes], about: Mapping[str, Any], thread: Executor) -> None:
        self._out, self._thread = out, thread
        self._tar = tarfile.TarFile(fileobj=out, mode="w", encoding="utf-8", copybufsize=BLOCK)
        self._files: dict[str, Entry] = {}
        self._put(HEADER, json.dumps({"format": FORMAT, **about}, indent=1).encode())

    def add(self, name: str, source: IO[bytes], size: int, mtime_ns: int) -> bool:
        """Copy a file.

        Args:
            name: its path below the output folder, with ``/``.
            source: open for reading, buffered.
            size: bytes to copy; a file that grows meanwhile is cut there.
            mtime_ns: when it was last changed.

        Returns:
            Whether it is in the bundle: left out is one that has become shorter meanwhile, or
            cannot be read.

        Raises:
            OSError: the disk is full.
        """
        before, hashed = self._tar.offset, Hashed(source, self._thread)
        try:
            self._tar.addfile(_member(FILES + name, size, mtime_ns // 10**9), hashed)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            self._out.seek(before)
            self._out.truncate()
            self._tar.offset = before
            return False
        self._files[name] = Entry(size, mtime_ns, hashed.digest())
        return True

    def close(self) -> int:
        """Write the manifest; returns how many files are in the bundle.

        Raises:
            OSError: the disk is full.
        """
        listed = json.dumps(self._files).encode()
        self._put(MANIFEST, digest(listed).encode() + b"\n" + listed)
        self._out.write(bytes(2 * tarfile.BLOCKSIZE))  # a tar file's end; tarfile's own has 10 KiB
        self._out.flush()
        return len(self._files)

    def _put(self, name: str, data: bytes) -> None:
        self._tar.addfile(_member(name, len(data), int(time.time())), io.BytesIO(data))


def _member(name: str, size: int, mtime: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mtime = size, mtime
    return info


def size_in_bundle(name: str, size: int) -> int:
    """Bytes that a file takes in a bundle, rounded up."""
    long = 3 * tarfile.BLOCKSIZE if len(FILES) + len(name) > _LONG_NAME else 0
    blocks = -(-size // tarfile.BLOCKSIZE)
    return (1 + blocks) * tarfile.BLOCKSIZE + long + _PER_FILE + len(name)


def size_of_frame(about: Mapping[str, Any]) -> int:
    """Bytes that a bundle takes besides its files."""
    return len(json.dumps(about, indent=1)) + 6 * tarfile.BLOCKSIZE
