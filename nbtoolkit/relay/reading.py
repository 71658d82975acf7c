"""Reading: a bundle taken apart into an empty folder; nothing of it is trusted before its digest.

Files are written by this module, not by ``tarfile``'s extraction: there are no links, devices or
modes to filter, since only plain files whose names lie below the folder are taken at all.
"""

from __future__ import annotations

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
from typing import IO

from pydantic import TypeAdapter, ValidationError

from nbtoolkit.errors import BundleError
from nbtoolkit.relay.bundle import (
    BLOCK,
    FILES,
    FORMAT,
    HEADER,
    MANIFEST,
    Entry,
    Hashed,
    Header,
    digest,
)

_ENTRIES = TypeAdapter(list[Entry])  # names may have bytes that are no text to pydantic
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

    def extract(self, folder: Path) -> dict[str, Entry]:
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
            manifest: dict[str, Entry] | None = None
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


def _compare(found: dict[str, tuple[int, str]], manifest: dict[str, Entry], path: Path) -> None:
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


def _manifest(raw: bytes, path: Path) -> dict[str, Entry]:
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
