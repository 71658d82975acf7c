"""Read a bundle and a folder of runs in one way, to unpack them."""

from __future__ import annotations

import os
import tarfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from nbtoolkit.run.paths import EVENTS
from nbtoolkit.sessions.bundle import (
    DISK_FULL,
    check_python,
    copy_bytes,
    damaged,
    open_bundle,
    open_whole,
    packing_time,
    read_members,
)
from nbtoolkit.sessions.carried_files import UNREADABLE, refusal
from nbtoolkit.sessions.contents import contents_of
from nbtoolkit.sessions.merge import compare
from nbtoolkit.sessions.pack import base_of


class Source(ABC):
    """Files to unpack.

    Attributes:
        times: path below the output folder -> modification time; of all files that may be unpacked.
        refused: reason -> files that are not unpacked.
        notes: what it lacks.
    """

    def __init__(self) -> None:
        self.times: dict[str, int] = {}
        self.refused: dict[str, list[str]] = {}
        self.notes: list[str] = []

    @abstractmethod
    def open(self, name: str) -> AbstractContextManager[tuple[IO[bytes], int]]:
        """Open a file; gives its size, too."""

    @abstractmethod
    def extract(self, staged: Path) -> None:
        """Write all files below an empty folder.

        Raises:
            BundleError: the bundle is damaged, or holds what no bundle may hold.
            OSError: the folder cannot be written.
        """

    @property
    def runs(self) -> list[str]:
        """The folders of the uppermost runs, below the output folder."""
        folders = {PurePosixPath(name).parent for name in self.times if name.endswith(f"/{EVENTS}")}
        return sorted(str(run) for run in folders if folders.isdisjoint(run.parents))

    def has_news(self, folder: Path, *, trust: bool) -> bool:
        """Whether anything in it is newer than in an output folder. This reads only the events.

        Args:
            folder: the output folder.
            trust: whether pickles that an earlier call left out are news.
        """
        runs = {PurePosixPath(run) for run in self.runs}
        for name, modified in self.times.items():
            path = PurePosixPath(name)
            here = folder / name
            if path.name != EVENTS and not runs.isdisjoint(path.parents):
                # A file of a run is as new as the events.
                if trust and path.suffix == ".pkl" and not here.exists():
                    return True
                continue
            if not here.is_file():
                return True
            if path.name == EVENTS:
                if self._goes_on(name, here):
                    return True
            elif int(here.stat().st_mtime) < modified:
                return True
        return False

    def _goes_on(self, name: str, here: Path) -> bool:
        with self.open(name) as (file, size), here.open("rb") as existing:
            return compare(file, size, existing, here.stat().st_size) in ("newer", "diverged")


class BundleSource(Source):
    """The files of an open bundle.

    Raises:
        BundleError: it is cut off, unsafe, or dated in the future.
    """

    def __init__(self, tar: tarfile.TarFile, path: Path) -> None:
        super().__init__()
        self._tar = tar
        self._path = path
        created = int(packing_time(tar, path))
        members, left_out = read_members(tar, path)
        self.notes = [f"the bundle was packed without {text}" for text in left_out]
        self._members = {}
        for member in members:
            if reason := refusal(member.name):
                self.refused.setdefault(reason, []).append(member.name)
                continue
            # No later than the bundle itself: the newer of two files stays.
            member.mtime = max(0, min(int(member.mtime), created))
            member.mode = 0o644
            self._members[member.name] = member
            self.times[member.name] = int(member.mtime)

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[IO[bytes], int]]:
        """Open a file; gives its size, too."""
        member = self._members[name]
        file = self._tar.extractfile(member)
        assert file is not None  # a regular file
        with file:
            yield file, member.size

    def extract(self, staged: Path) -> None:
        """Write all files below an empty folder; no name leads out of it (PEP 706)."""
        self._tar.extractall(staged, list(self._members.values()), filter="data")


class FolderSource(Source):
    """The files of a folder of runs, selected as for a bundle."""

    def __init__(self, folder: Path, base: Path) -> None:
        super().__init__()
        self._folder = base
        contents = contents_of(folder, base)
        self.refused = contents.left_out
        now = int(time.time())
        for file in contents.files:
            name = file.relative_to(base).as_posix()
            self.times[name] = min(int(file.stat().st_mtime), now)

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[IO[bytes], int]]:
        """Open a file; gives its size, too."""
        with open_whole(self._folder / name) as (file, info):
            yield file, info.size

    def extract(self, staged: Path) -> None:
        """Copy all files below an empty folder."""
        for name, modified in self.times.items():
            target = staged / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open_whole(self._folder / name) as (file, info), target.open("wb") as copy:
                    copy_bytes(file, copy, info.size)
            except OSError as error:
                if error.errno in DISK_FULL:
                    raise
                target.unlink(missing_ok=True)
                self.refused.setdefault(UNREADABLE, []).append(name)
                continue
            os.utime(target, (modified, modified))


@contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """Open a bundle, or a folder of runs.

    Raises:
        BundleError: it cannot be read, is no bundle, is damaged or unsafe; or this Python cannot
            unpack bundles.
    """
    if path.is_dir():
        yield FolderSource(path, base_of(path))
        return
    check_python()
    with open_bundle(path) as tar:
        try:
            source = BundleSource(tar, path)
        except (ValueError, OverflowError) as error:  # numbers in headers, a time that is none
            raise damaged(path, str(error)) from error
        yield source
