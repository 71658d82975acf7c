"""Copying: bytes from one file to another, inside the operating system's kernel where it can."""

from __future__ import annotations

import errno
import os

# What says that these two files cannot be copied so: they lie on different disks, or on one that
# has no pages of memory, or this is no Linux (shutil.copyfile asks the same).
_NOT_SO = (
    *(errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EBADF, errno.EPERM),
    *(errno.ENOTSOCK, errno.ENOTSUP, errno.EOPNOTSUPP),
)
_BLOCK = 2**16  # what is read at once still lies in the CPU's cache when it is written


def copy_range(source: int, begin: int, target: int, size: int) -> int:
    """Copy from a place in ``source`` to where ``target`` stands.

    Args:
        source: open for reading.
        begin: the first byte.
        target: open for writing.
        size: bytes to copy.

    Returns:
        How many were copied: fewer where the source ends before.

    Raises:
        OSError: the disk is full, or the source cannot be read.
    """
    left = size
    while left and (count := _some(source, begin, target, left)):
        begin += count
        left -= count
    return size - left


def _some(source: int, begin: int, target: int, size: int) -> int:
    """Copy a part, in the first way that does anything; 0: the source ends here."""
    for way in (_by_range, _by_sendfile):
        try:
            count = way(source, begin, target, size)
        except OSError as error:
            if error.errno not in _NOT_SO:
                raise
            continue
        if count:  # some file systems say that there is nothing, which is not so
            return count
    return _by_hand(source, begin, target, min(size, _BLOCK))


def _by_range(source: int, begin: int, target: int, size: int) -> int:
    return os.copy_file_range(source, target, size, offset_src=begin)


def _by_sendfile(source: int, begin: int, target: int, size: int) -> int:
    return os.sendfile(target, source, begin, size)


def _by_hand(source: int, begin: int, target: int, size: int) -> int:
    data = os.pread(source, size, begin)
    written = 0
    while written < len(data):
        written += os.write(target, data[written:])
    return written
