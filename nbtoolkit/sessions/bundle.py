"""Read and write the tar file that carries runs from one session to the next.

A bundle is a tar file without compression (weights do not compress), which any ``tar`` lists:

    nbtoolkit-bundle.json    first: the format; when, where and from what the bundle was packed
    files/...                the files, by their path below the output folder
    nbtoolkit-manifest.json  last: its own digest on the first line, then size, modification time
                             and digest of every file

A bundle without a manifest was cut off. Digests are BLAKE2b: without SHA instructions in the CPU
it takes about half the time of SHA-256 (https://www.blake2.net). They detect damage and do not
identify the author: a bundle may hold pickled return values, as any run folder does. Unpacking
loads none of them.

This module writes the files itself instead of using ``tarfile``'s extraction. It accepts only
regular files with names below the folder, so there are no links, devices or modes to filter.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from nbtoolkit.errors import BundleError

FORMAT: Literal["nbtoolkit bundle 2"] = "nbtoolkit bundle 2"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
HEADER, MANIFEST, FILES = "nbtoolkit-bundle.json", "nbtoolkit-manifest.json", "files/"

# Not .tar: Kaggle extracts archives that are uploaded as a data set.
SUFFIX = ".bundle"
DEFAULT_NAME = f"nbtoolkit-relay{SUFFIX}"

BLOCK = 2**20
"""Bytes to copy at once."""

_DIGEST_SIZE = 32  # bytes
_ENTRY_SIZE = 115  # bytes of a file's entry in the manifest, without its name
_LONG_NAME = 100  # a longer name takes an entry of its own in a tar file
_CLOCK_SKEW = 3600.0  # seconds by which the clocks of two hosts may differ
_MAX_JSON = 2**28  # bytes of header or manifest: a million files


class PackedRun(BaseModel):
    """A run in the header."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    folder: str
    """Path below the output folder."""
    status: str
    alive: bool
    """Whether it was running when it was packed."""


class Header(BaseModel):
    """The first member of a bundle."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["nbtoolkit bundle 2"]
    created: float = Field(gt=0, allow_inf_nan=False)
    """Time of packing, in unix seconds."""
    source: str
    """The output folder that was packed."""
    place: str | None
    """The same, relative to the working directory; None: it was not below it."""
    host: str
    nbtoolkit: str
    runs: tuple[PackedRun, ...]
    left_out: tuple[str, ...]


class BundleEntry(NamedTuple):
    """A file in the manifest."""

    size: int
    mtime_ns: int
    digest: str


_ENTRIES = TypeAdapter(list[BundleEntry])  # without the names: pydantic rejects lone surrogates


class HashingReader:
    """Reads a file once; another thread hashes what was read while the caller writes it.

    Args:
        file: open for reading.
        thread: the other thread.
    """

    def __init__(self, file: IO[bytes], thread: Executor) -> None:
        self._file = file
        self._thread = thread
        self._hash = hashlib.blake2b(digest_size=_DIGEST_SIZE)
        self._last_update = thread.submit(self._hash.update, b"")

    def read(self, size: int = -1, /) -> bytes:
        """Read ``size`` bytes; fewer at the end of the file."""
        data = self._file.read(size)
        self._last_update.result()
        self._last_update = self._thread.submit(self._hash.update, data)
        return data

    def digest(self) -> str:
        """The digest of what was read, in hex."""
        self._last_update.result()
        return self._hash.hexdigest()


def digest(data: bytes) -> str:
    """The digest of a few bytes, in hex."""
    return hashlib.blake2b(data, digest_size=_DIGEST_SIZE).hexdigest()


# --- writing ---


class BundleWriter:
    """Writes a bundle into an open file.

    Args:
        out: an empty file, open for writing, buffered.
        header: the first member.
        thread: hashes what is written.
    """

    def __init__(self, out: IO[bytes], header: Header, thread: Executor) -> None:
        self._out = out
        self._thread = thread
        self._tar = tarfile.TarFile(fileobj=out, mode="w", encoding="utf-8", copybufsize=BLOCK)
        self._entries: dict[str, BundleEntry] = {}
        self._add_json(HEADER, _header_json(header))

    def add(self, name: str, source: IO[bytes], size: int, mtime_ns: int) -> bool:
        """Copy a file.

        Args:
            name: its path below the output folder, with ``/``.
            source: open for reading, buffered.
            size: bytes to copy. What a growing file gains meanwhile is not copied.
            mtime_ns: its modification time.

        Returns:
            Whether the file is in the bundle. It is not if it has become shorter meanwhile or
            cannot be read.

        Raises:
            OSError: the disk is full.
        """
        start = self._tar.offset
        reader = HashingReader(source, self._thread)
        try:
            self._tar.addfile(_member(FILES + name, size, mtime_ns // 10**9), reader)
        except OSError as error:
            if error.errno in DISK_FULL:
                raise
            self._out.seek(start)
            self._out.truncate()
            self._tar.offset = start
            return False
        self._entries[name] = BundleEntry(size, mtime_ns, reader.digest())
        return True

    def close(self) -> int:
        """Write the manifest, and return the number of files in the bundle.

        Raises:
            OSError: the disk is full.
        """
        entries = json.dumps(self._entries).encode()
        self._add_json(MANIFEST, digest(entries).encode() + b"\n" + entries)
        # The end mark of a tar file; tarfile would pad it to 10 KiB.
        self._out.write(bytes(2 * tarfile.BLOCKSIZE))
        self._out.flush()
        return len(self._entries)

    def _add_json(self, name: str, data: bytes) -> None:
        self._tar.addfile(_member(name, len(data), int(time.time())), io.BytesIO(data))


def _header_json(header: Header) -> bytes:
    return header.model_dump_json(indent=1).encode()


def _member(name: str, size: int, mtime: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    info.mtime = mtime
    return info


def size_in_bundle(name: str, size: int) -> int:
    """Bytes that a file takes in a bundle, rounded up."""
    long_name = 3 * tarfile.BLOCKSIZE if len(FILES) + len(name) > _LONG_NAME else 0
    blocks = -(-size // tarfile.BLOCKSIZE)
    return (1 + blocks) * tarfile.BLOCKSIZE + long_name + _ENTRY_SIZE + len(name)


def size_without_files(header: Header) -> int:
    """Bytes that a bundle takes besides its files."""
    return len(_header_json(header)) + 6 * tarfile.BLOCKSIZE


# --- reading ---


@dataclass(frozen=True)
class Bundle:
    """A bundle whose header was read."""

    path: Path
    header: Header

    @classmethod
    def open(cls, path: Path) -> Bundle:
        """Read the header of a bundle.

        Raises:
            BundleError: the file is not a bundle, cannot be read, or is dated in the future.
        """
        with _open_tar(path) as tar:
            first = tar.next()
            if first is None or first.name != HEADER:
                raise _not_a_bundle(path, f"its first member is not {HEADER}")
            raw = _read_json(tar, first, path)
        try:
            header = Header.model_validate_json(raw)
        except ValidationError as error:
            raise _not_a_bundle(path, _first_error(error)) from error
        if header.created > time.time() + _CLOCK_SKEW:
            raise _from_the_future(path, header.created)
        return cls(path, header)

    def runs(self) -> list[str]:
        """The folders of the runs, below the output folder.

        Raises:
            BundleError: one of them lies outside.
        """
        folders = [run.folder for run in self.header.runs]
        for folder in folders:
            _check_name(folder, self.path)
        return folders

    def extract(self, folder: Path) -> None:
        """Write all files below ``folder``, and check each against the manifest.

        Args:
            folder: an empty folder. After an error its content must not be used.

        Raises:
            BundleError: the bundle is cut off or damaged, or holds what no bundle may hold.
            OSError: the folder cannot be written.
        """
        extracted: dict[str, tuple[int, str]] = {}
        manifest: dict[str, BundleEntry] | None = None
        with _open_tar(self.path) as tar, ThreadPoolExecutor(1) as thread:
            tar.next()  # the header
            for member in iter(tar.next, None):
                if manifest is not None:
                    raise _damaged(self.path, "something follows its manifest")
                if member.name == MANIFEST:
                    manifest = _parse_manifest(_read_json(tar, member, self.path), self.path)
                    continue
                name = _safe_name(member, self.path)
                if name in extracted:
                    raise _damaged(self.path, f"it holds {name} twice")
                extracted[name] = member.size, _extract(tar, member, folder / name, thread)
        if manifest is None:
            raise _damaged(self.path, "it has no manifest: it was cut off")
        _compare(extracted, manifest, self.path)
        packed_ns = int(self.header.created * 1e9)
        for name, entry in manifest.items():
            # No later than the bundle itself: the newer of two files stays.
            mtime_ns = max(0, min(entry.mtime_ns, packed_ns))
            os.utime(folder / name, ns=(mtime_ns, mtime_ns))


def _safe_name(member: tarfile.TarInfo, path: Path) -> str:
    """The path of a member below the output folder.

    Raises:
        BundleError: it is not a regular file, or lies outside.
    """
    name = member.name.removeprefix(FILES)
    if name == member.name:
        raise _unsafe(path, member.name, f"its name does not begin with {FILES}")
    _check_name(name, path)
    if member.type != tarfile.REGTYPE or member.issparse():
        raise _unsafe(path, member.name, "it is a link, a device or a folder")
    return name


def _check_name(name: str, path: Path) -> None:
    parts = PurePosixPath(name).parts
    outside = not parts or ".." in parts or parts[0].startswith("/") or "\0" in name
    if outside or str(PurePosixPath(name)) != name:
        raise _unsafe(path, name, "its name leads out of the folder")


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, to: Path, thread: Executor) -> str:
    """Copy one file out of the bundle; returns its digest."""
    source = tar.extractfile(member)
    assert source is not None  # a regular file
    to.parent.mkdir(parents=True, exist_ok=True)
    reader = HashingReader(source, thread)
    with to.open("xb") as target:
        shutil.copyfileobj(reader, target, BLOCK)
    return reader.digest()


def _compare(
    extracted: dict[str, tuple[int, str]], manifest: dict[str, BundleEntry], path: Path
) -> None:
    if differing := sorted(extracted.keys() ^ manifest.keys()):
        raise _damaged(path, f"{differing[0]} is not in both its files and its manifest")
    for name, size_and_digest in extracted.items():
        if size_and_digest != (manifest[name].size, manifest[name].digest):
            raise _damaged(path, f"the digest of {name} differs")


@contextmanager
def _open_tar(path: Path) -> Iterator[tarfile.TarFile]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise BundleError(
            f"the bundle {path} cannot be read: {error.strerror}",
            allowed="a file written by nb.pack",
            do="check the path; on Kaggle, attach the earlier session's output to this notebook",
        ) from error
    with file:
        try:
            tar = tarfile.TarFile(fileobj=file, mode="r")
        except tarfile.TarError as error:
            raise _not_a_bundle(path, "it is not a tar file") from error
        try:
            yield tar
        except tarfile.TarError as error:
            raise _damaged(path, str(error)) from error


def _read_json(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> bytes:
    source = tar.extractfile(member)
    if source is None or member.size > _MAX_JSON:
        raise _damaged(path, f"{member.name} is not JSON")
    return source.read()


def _parse_manifest(raw: bytes, path: Path) -> dict[str, BundleEntry]:
    expected, _, listed = raw.partition(b"\n")
    if digest(listed).encode() != expected:
        raise _damaged(path, "the digest of its manifest differs")
    try:
        entries = json.loads(listed)
        return dict(zip(entries, _ENTRIES.validate_python([*entries.values()]), strict=True))
    except ValidationError as error:
        raise _damaged(path, f"its manifest: {_first_error(error)}") from error
    except (ValueError, AttributeError) as error:
        raise _damaged(path, f"its manifest is not a JSON object of files ({error})") from error


def _first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _from_the_future(path: Path, created: float) -> BundleError:
    days = (created - time.time()) / 86400
    return BundleError(
        f"the bundle {path} is dated in the future, by {days:.3g} days",
        allowed="a date in the past (or up to an hour ahead, since clocks differ)",
        do="set this machine's clock; if it is right, pack the runs again where they are",
    )


def _not_a_bundle(path: Path, reason: str) -> BundleError:
    return BundleError(
        f"{path} is not an nbtoolkit bundle: {reason}",
        allowed=f"a file written by nb.pack ({FORMAT})",
        do="give the path of a bundle, or of a folder that holds one",
    )


def _damaged(path: Path, reason: str) -> BundleError:
    return BundleError(
        f"the bundle {path} is damaged: {reason}",
        allowed="a file exactly as nb.pack wrote it (nothing was unpacked)",
        do="download or copy it again, or unpack an earlier bundle by its path",
    )


def _unsafe(path: Path, name: str, reason: str) -> BundleError:
    return BundleError(
        f"the bundle {path} holds {name!r}, which nb.pack never writes: {reason}",
        allowed="regular files below the output folder (nothing was unpacked)",
        do="use a bundle that you packed yourself",
    )
