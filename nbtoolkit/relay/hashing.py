"""Hashing: digests of what lies in a bundle, made by other threads while more is copied.

The digest of a file is the BLAKE2b of its bytes; of one that is larger than a segment, the BLAKE2b
of its segments' digests, so that several threads can work on one large file: reading and hashing
let go of the interpreter's lock. BLAKE2b: without SHA instructions in the CPU it takes about half
the time of SHA-256 (https://www.blake2.net).
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

SEGMENT = 2**25
"""Bytes that are hashed by themselves: 32 MiB."""

_BLOCK = 2**18  # what is read at once still lies in the CPU's cache when it is hashed
_THREADS = 4
_SIZE = 32  # bytes of a digest


class Pending:
    """The digest of a file, of which segments may still be hashed."""

    def __init__(self, segments: list[Future[bytes]]) -> None:
        self._segments = segments

    def result(self) -> str:
        """The digest in hex, once it is there.

        Raises:
            OSError: the file could not be read.
        """
        digests = [segment.result() for segment in self._segments]
        if len(digests) == 1:
            return digests[0].hex()
        return digest(b"".join(digests))


class Hasher:
    """Hashes parts of one file, in threads.

    Args:
        fd: the file, open for reading; it stays open until the end of the ``with`` block.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._threads = ThreadPoolExecutor(
            min(_THREADS, os.cpu_count() or 1), thread_name_prefix="nbtoolkit-hash"
        )

    def hash(self, begin: int, size: int) -> Future[bytes]:
        """Have one segment hashed: ``size`` bytes from ``begin`` on."""
        return self._threads.submit(_hash, self._fd, begin, size)

    def __enter__(self) -> Hasher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._threads.shutdown(cancel_futures=True)


def digest(data: bytes) -> str:
    """The digest of a few bytes, in hex."""
    return hashlib.blake2b(data, digest_size=_SIZE).hexdigest()


def _hash(fd: int, begin: int, size: int) -> bytes:
    made = hashlib.blake2b(digest_size=_SIZE)
    buffer = memoryview(bytearray(min(size, _BLOCK)))
    while size > 0 and (count := os.preadv(fd, [buffer[:size]], begin)):
        made.update(buffer[:count])
        begin += count
        size -= count
    return made.digest()
