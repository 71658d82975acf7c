"""Copying: bytes from one file to another, inside the operating system's kernel where it can."""

from __future__ import annotations

import errno
import os

# What says that these two files cannot be copied by sendfile: a file system that has no pages, or
# no Linux (shutil.copyfile asks the same).
_NOT_SO = (errno.EINVAL, errno.ENOSYS, errno.ENOTSOCK, errno.ENOTSUP, errno.EOPNOTSUPP)
_BLOCK = 2**20


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
    while left:
        try:
            count = os.sendfile(target, source, begin, left)
        except OSError as error:
            if error.errno not in _NOT_SO:
                raise
            count = _by_hand(source, begin, target, min(left, _BLOCK))
        if not count:
            break
        begin += count
        left -= count
    return size - left


def _by_hand(source: int, begin: int, target: int, size: int) -> int:
    data = os.pread(source, size, begin)
    written = 0
    while written < len(data):
        written += os.write(target, data[written:])
    return written
