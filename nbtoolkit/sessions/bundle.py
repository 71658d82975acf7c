"""Write and read a bundle, the plain tar file that carries runs from one session to the next.

Weights do not compress, so a bundle is not compressed. Its comment (a header of the whole file, see
``pax_headers``) has the time of packing. Its last member lists what was left out; a bundle without
it was cut off. Checkpoints have digests of their own.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from nbtoolkit.errors import BundleError

FORMAT = "nbtoolkit bundle 3, packed at "
END = "nbtoolkit-left-out.txt"

# Not .tar: Kaggle extracts archives that are uploaded as a data set.
SUFFIX = ".bundle"
DEFAULT_NAME = f"nbtoolkit-relay{SUFFIX}"

BLOCK = 2**20
"""Bytes to copy at once."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOCK_SKEW = 3600.0  # seconds by which the clocks of two hosts may differ
_MAX_END = 2**20  # bytes of the last member


@contextmanager
def open_whole(path: Path) -> Iterator[tuple[IO[bytes], tarfile.TarInfo]]:
    """Open a file to copy it as it is now, and describe it.

    Of a file of lines, which a run may be writing, only whole lines are copied.

    Raises:
        OSError: it is no regular file, or cannot be read. A FIFO or a link may have replaced it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        # Not TarFile.gettarinfo, which writes the second of two hard links as a link.
        info = tarfile.TarInfo()
        info.mtime = int(status.st_mtime)
        info.size = status.st_size
        if path.suffix == ".jsonl":
            tail_start = max(0, info.size - BLOCK)
            tail = os.pread(fd, info.size - tail_start, tail_start)
            info.size = tail_start + tail.rfind(b"\n") + 1
        yield file, info


def copy_bytes(source: IO[bytes], target: IO[bytes], count: int) -> None:
    """Copy bytes; fewer if the source ends before."""
    while data := source.read(min(BLOCK, count)):
        target.write(data)
        count -= len(data)


def write_bundle(
    out: IO[bytes], folder: Path, files: Iterable[Path], left_out: Iterable[str]
) -> tuple[int, list[str]]:
    """Write a bundle into an empty file.

    Args:
        out: open for writing.
        folder: the folder that the names in the bundle begin at.
        files: the files.
        left_out: texts for the last member.

    Returns:
        The number of files in the bundle, and the names of files that cannot be read.

    Raises:
        OSError: the disk is full.
    """
    count = 0
    unreadable: list[str] = []
    comment = {"comment": f"{FORMAT}{time.time()}"}
    with tarfile.TarFile(
        fileobj=out, mode="w", encoding="utf-8", copybufsize=BLOCK, pax_headers=comment
    ) as tar:
        for path in files:
            name = path.relative_to(folder).as_posix()
            start = tar.offset
            try:
                with open_whole(path) as (file, info):
                    info.name = name
                    tar.addfile(info, file)
                    count += 1
            except FileNotFoundError:  # a checkpoint that was replaced meanwhile
                continue
            except OSError as error:
                if error.errno in DISK_FULL:
                    raise
                unreadable.append(name)  # or it has become shorter: take back the part of it
                out.seek(start)
                out.truncate()
                tar.offset = start
        text = "\n".join(left_out).encode()[:_MAX_END]
        info = tarfile.TarInfo(END)
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text))
    return count, unreadable


@contextmanager
def open_bundle(path: Path) -> Iterator[tarfile.TarFile]:
    """Open a bundle, for reading in the ``with`` block.

    Raises:
        BundleError: it cannot be read, is no bundle, or is damaged.
    """
    try:
        tar = tarfile.TarFile(path, "r", encoding="utf-8")
    except OSError as error:
        raise BundleError(
            f"the bundle {path} cannot be read: {error.strerror}",
            allowed="a file written by nb.pack",
            do="check the path; on Kaggle, attach the earlier session's output to this notebook",
        ) from error
    except (tarfile.TarError, ValueError) as error:
        raise _not_a_bundle(path, "it is not a tar file") from error
    with tar:
        if not tar.pax_headers.get("comment", "").startswith(FORMAT):
            raise _not_a_bundle(path, f"its comment does not begin with {FORMAT.strip()!r}")
        try:
            yield tar
        except tarfile.TarError as error:
            raise damaged(path, str(error)) from error


def packing_time(tar: tarfile.TarFile, path: Path) -> float:
    """Return when a bundle was packed, in unix seconds.

    Raises:
        BundleError: that is in the future: it would be taken for the newest of all.
    """
    try:
        created = float(tar.pax_headers["comment"].removeprefix(FORMAT))
    except ValueError as error:
        raise _not_a_bundle(path, "it has no time of packing") from error
    now = time.time()
    if not 0 < created <= now + _CLOCK_SKEW:
        raise BundleError(
            f"the bundle {path} is dated in the future, by {(created - now) / 86400:.3g} days",
            allowed="a date in the past (or up to an hour ahead, since clocks differ)",
            do="set this machine's clock; if it is right, pack the runs again where they are",
        )
    return created


def read_members(tar: tarfile.TarFile, path: Path) -> tuple[list[tarfile.TarInfo], list[str]]:
    """Return the files in a bundle, and what its author left out.

    Raises:
        BundleError: it is cut off, or holds something else than regular files below a folder.
    """
    members = []
    for member in tar:
        if member.size < 0:  # tarfile would read it in a circle
            raise damaged(path, f"the size of {member.name} is negative")
        # Links could lead out of the folder, whatever tarfile's filter knows of its Python.
        if not member.isreg() or member.issparse():
            raise _unsafe(path, member.name, "it is a link, a device or a folder")
        parts = PurePosixPath(member.name).parts
        if ".." in parts or "/" in parts or "\0" in member.name:
            raise _unsafe(path, member.name, "its name leads out of the folder")
        members.append(member)
    last = members.pop() if members else None
    if last is None or last.name != END or last.size > _MAX_END:
        raise damaged(path, f"{END} is not its last member: it was cut off")
    content = tar.extractfile(last)
    assert content is not None  # a regular file
    return members, content.read().decode(errors="replace").splitlines()


def check_python() -> None:
    """Refuse a Python whose tarfile cannot keep members inside of a folder (PEP 706).

    Raises:
        BundleError: it has no filters.
    """
    if not hasattr(tarfile, "data_filter"):
        raise BundleError(
            f"Python {sys.version.split()[0]} cannot unpack a bundle safely: its tarfile has no "
            "filters",
            allowed="Python 3.10.12, 3.11.4, 3.12, or newer",
            do="update Python, or unpack the folder that was packed: nb.unpack(folder)",
        )


def _unsafe(path: Path, name: str, reason: str) -> BundleError:
    return BundleError(
        f"the bundle {path} holds {name!r}, which nb.pack never writes: {reason}",
        allowed="regular files below the output folder (nothing was unpacked)",
        do="use a bundle that you packed yourself",
    )


def _not_a_bundle(path: Path, reason: str) -> BundleError:
    return BundleError(
        f"{path} is not an nbtoolkit bundle: {reason}",
        allowed="a file written by nb.pack of this version",
        do="give the path of a bundle, or of a folder that holds one",
    )


def damaged(path: Path, reason: str) -> BundleError:
    """Return the error of a bundle that is not as it was written."""
    return BundleError(
        f"the bundle {path} is damaged: {reason}",
        allowed="a file exactly as nb.pack wrote it (nothing was unpacked)",
        do="download or copy it again, or unpack an earlier bundle by its path",
    )
