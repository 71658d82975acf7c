"""Read and write the tar file that carries runs from one session to the next.

Files are written by this module, not by ``tarfile``'s extraction: there are no links, devices or
modes to filter, since only plain files whose names lie below the folder are taken at all.
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
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from nbtoolkit.errors import BundleError

# --- bundle ---
# The file that carries runs from one session to the next.
#
# A tar file without compression (weights do not compress), which any ``tar`` lists:
#
#     nbtoolkit-bundle.json    first: format, when, where and of what it was made
#     files/...                the files, by their path below the output folder
#     nbtoolkit-manifest.json  last: its own digest in the first line, then size, time and digest of
#                              every file
#
# A digest is the BLAKE2b of a file's bytes: without SHA instructions in the CPU it takes about half
# the time of SHA-256 (https://www.blake2.net).
#
# What has no manifest was cut off. The digests tell damage, not who wrote it: a bundle may hold
# pickled return values, as any run folder does. Unpacking loads none of them.


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


class PackedRun(BaseModel):
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
    runs: tuple[PackedRun, ...]
    left_out: tuple[str, ...]


class BundleEntry(NamedTuple):
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
        self._files: dict[str, BundleEntry] = {}
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
        self._files[name] = BundleEntry(size, mtime_ns, hashed.digest())
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


# --- reading ---


_ENTRIES = TypeAdapter(list[BundleEntry])  # names may have bytes that are no text to pydantic
_SKEW = 3600.0  # seconds that the clocks of two hosts may differ by
_LARGEST_TEXT = 2**28  # bytes of header or manifest: a million files


@dataclass(frozen=True)
class Bundle:
    """A bundle whose header was read."""

    path: Path
    header: Header

    @classmethod
    def open(cls, path: Path) -> Bundle:
        """Read the header of a bundle.

        Raises:
            BundleError: the file is no bundle, cannot be read, or is dated in the future.
        """
        with _opened(path) as tar:
            first = tar.next()
            if first is None or first.name != HEADER:
                raise _foreign(path, "its first member is not a bundle's")
            raw = _text(tar, first, path)
        try:
            header = Header.model_validate_json(raw)
        except ValidationError as error:
            raise _foreign(path, _wrong(error)) from error
        if header.created > time.time() + _SKEW:
            raise _future(path, header.created)
        return cls(path, header)

    @property
    def created(self) -> float:
        """When it was packed, in unix seconds."""
        return self.header.created

    def runs(self) -> list[str]:
        """The folders of its runs, below the output folder.

        Raises:
            BundleError: one of them lies outside.
        """
        folders = [run.folder for run in self.header.runs]
        for folder in folders:
            _check_name(folder, self.path)
        return folders

    def extract(self, folder: Path) -> dict[str, BundleEntry]:
        """Write all files below ``folder``, and check each against the manifest.

        Args:
            folder: empty; after an error what is in it must not be used.

        Returns:
            What the manifest says, by name.

        Raises:
            BundleError: the bundle is cut off, damaged, or holds what no bundle holds.
            OSError: the folder cannot be written.
        """
        with _opened(self.path) as tar, ThreadPoolExecutor(1) as thread:
            found: dict[str, tuple[int, str]] = {}
            manifest: dict[str, BundleEntry] | None = None
            tar.next()  # the header
            for member in iter(tar.next, None):
                if manifest is not None:
                    raise _damaged(self.path, "something follows its manifest")
                if member.name == MANIFEST:
                    manifest = _manifest(_text(tar, member, self.path), self.path)
                    continue
                name = safe_name(member, self.path)
                if name in found:
                    raise _damaged(self.path, f"{name} is in it twice")
                found[name] = member.size, _extract(tar, member, folder / name, thread)
        if manifest is None:
            raise _damaged(self.path, "it has no manifest: it was cut off")
        _compare(found, manifest, self.path)
        for name, entry in manifest.items():  # no later than the bundle: the newer file stays
            changed = max(0, min(entry.mtime_ns, int(self.created * 1e9)))
            os.utime(folder / name, ns=(changed, changed))
        return manifest


def safe_name(member: tarfile.TarInfo, path: Path) -> str:
    """The path of a member below the output folder.

    Raises:
        BundleError: it is not a plain file, or lies outside.
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
    assert source is not None  # a plain file
    to.parent.mkdir(parents=True, exist_ok=True)
    hashed = Hashed(source, thread)
    with to.open("xb") as target:
        shutil.copyfileobj(hashed, target, BLOCK)
    return hashed.digest()


def _compare(
    found: dict[str, tuple[int, str]], manifest: dict[str, BundleEntry], path: Path
) -> None:
    if differing := sorted(found.keys() ^ manifest.keys()):
        raise _damaged(path, f"{differing[0]} is not in both its files and its manifest")
    for name, about in found.items():
        if about != (manifest[name].size, manifest[name].digest):
            raise _damaged(path, f"the digest of {name} differs")


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    try:
        file: IO[bytes] = path.open("rb")
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
            raise _foreign(path, "it is no tar file") from error
        try:
            yield tar
        except tarfile.TarError as error:
            raise _damaged(path, str(error)) from error


def _text(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> bytes:
    source = tar.extractfile(member)
    if source is None or member.size > _LARGEST_TEXT:
        raise _damaged(path, f"{member.name} is no text")
    return source.read()


def _manifest(raw: bytes, path: Path) -> dict[str, BundleEntry]:
    told, _, listed = raw.partition(b"\n")
    if digest(listed).encode() != told:
        raise _damaged(path, "the digest of its manifest differs")
    try:
        entries = json.loads(listed)
        return dict(zip(entries, _ENTRIES.validate_python([*entries.values()]), strict=True))
    except ValidationError as error:
        raise _damaged(path, f"its manifest: {_wrong(error)}") from error
    except (ValueError, AttributeError) as error:
        raise _damaged(path, f"its manifest is no JSON of files ({error})") from error


def _wrong(error: ValidationError) -> str:
    """The first thing that a schema does not allow."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _future(path: Path, created: float) -> BundleError:
    days = (created - time.time()) / 86400
    return BundleError(
        f"the bundle {path} is dated in the future, by {days:.3g} days",
        allowed="a time of packing that has been (up to an hour: clocks differ)",
        do="set this machine's clock; if that is right, pack it again where its runs are",
    )


def _foreign(path: Path, why: str) -> BundleError:
    return BundleError(
        f"{path} is no bundle of nbtoolkit: {why}",
        allowed=f"a file written by nb.pack ({FORMAT})",
        do="give the path of one, or of a folder with one in it",
    )


def _damaged(path: Path, why: str) -> BundleError:
    return BundleError(
        f"the bundle {path} is damaged: {why}",
        allowed="a file as nb.pack wrote it, byte by byte (nothing of it was unpacked)",
        do="download or copy it again; else unpack an earlier one, by its path",
    )


def _unsafe(path: Path, name: str, why: str) -> BundleError:
    return BundleError(
        f"the bundle {path} holds {name!r}, which no bundle of nbtoolkit holds: {why}",
        allowed="plain files below the output folder (nothing of it was unpacked)",
        do="use a bundle that you packed yourself",
    )
