"""Unpack the bundle of an earlier session, or a folder of runs."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nbtoolkit.cards import properties_html
from nbtoolkit.config.schema import ConfigLike
from nbtoolkit.errors import BundleError
from nbtoolkit.host import Host, detect_host
from nbtoolkit.sessions.find_bundle import find_source
from nbtoolkit.sessions.merge import Merger
from nbtoolkit.sessions.pack import output_folder, runs_text
from nbtoolkit.sessions.sources import open_source

_STAGING = ".nbtoolkit-unpacking-"


@dataclass(frozen=True, kw_only=True, repr=False)
class UnpackResult:
    """The result of :func:`nbtoolkit.unpack`."""

    bundle: Path | None
    """The bundle or the folder of runs that was unpacked; None if none was found."""
    folder: Path
    """The output folder."""
    new: tuple[str, ...] = ()
    """The folders of the runs that the output folder did not contain before."""
    advanced: tuple[str, ...] = ()
    """The folders of the runs that were replaced by a newer state from the bundle."""
    unchanged: tuple[str, ...] = ()
    """The folders of the runs that stayed as they are: an active run, or a run that is as new as in
    the bundle, or newer."""
    conflicting: tuple[str, ...] = ()
    """The folders of the runs that were resumed in both sessions; they stayed as they are here."""
    files: int = 0
    """The number of written files that belong to no run."""
    tracked: tuple[str, ...] = ()
    """The folders of the runs that this call added to the database of MLflow."""
    notes: tuple[str, ...] = ()
    """Notes about what the bundle lacks, and about what was not unpacked and why."""

    def __repr__(self) -> str:
        if self.bundle is None:
            return f"UnpackResult(nothing found to unpack into {self.folder})"
        return f"UnpackResult({self._written()}, from {self.bundle}, in {self.folder})"

    def _repr_html_(self) -> str:
        if self.bundle is None:
            return properties_html("unpacked: nothing was found", [("folder", str(self.folder))])
        rows = [("bundle", self.bundle), ("folder", self.folder), ("wrote", self._written())]
        return properties_html("unpacked", rows, self.notes)

    def _written(self) -> str:
        groups = {
            "new": self.new,
            "advanced": self.advanced,
            "unchanged": self.unchanged,
            "conflicting": self.conflicting,
        }
        counts = [f"{len(runs)} {name}" for name, runs in groups.items() if runs]
        mlflow = f"; MLflow: {runs_text(self.tracked)}" if self.tracked else ""
        return f"runs: {', '.join(counts) or 'none'}; other files: {self.files}{mlflow}"


def unpack(
    where: str | os.PathLike[str] = "auto",
    *,
    into: str | os.PathLike[str] | None = None,
    config: ConfigLike = None,
    trust: bool = False,
    host: Host | None = None,
) -> UnpackResult:
    """Write the runs of an earlier session into the output folder; later launches resume them.

    The function unpacks everything beside the output folder before it changes anything there. A run
    that is newer in the output folder, or that is running, stays as it is; a second call changes
    nothing. No content is loaded or executed. Only the kinds of files that carried_files.py lists
    are written, and only in folders of runs and pipelines; the result lists all other content of
    the bundle.

    Args:
        where: a bundle, or a folder that contains a bundle or runs, such as the output of a version
            that Kaggle attaches. ``"auto"``: the newest bundle in ``/kaggle/input``, a mounted
            Drive or the working directory, or else runs in ``/kaggle/input``; if there are none,
            nothing happens.
        into: the output folder; None: ``runtime.output_dir`` of ``config``.
        config: the configuration of later launches; None: the default configuration.
        trust: also unpack pickles of code and of classes, such as models that a training function
            returned: for bundles that you packed yourself. False: only pickles of plain data,
            arrays and tensors.
        host: the host of this process; None: detected.

    Raises:
        BundleError: there is no such bundle; it is damaged, unsafe, dated in the future or not made
            by nbtoolkit; or the folder cannot be written.
        ConfigError: ``config`` is not a configuration.
    """
    folder = output_folder(config) if into is None else Path(into).expanduser().absolute()
    path = find_source(where, host or detect_host())
    if path is None:
        return UnpackResult(bundle=None, folder=folder)
    try:
        with open_source(path) as source:
            if where == "auto" and not source.has_news(folder, trust=trust):
                return UnpackResult(bundle=path, folder=folder, unchanged=tuple(source.runs))
            folder.mkdir(parents=True, exist_ok=True)
            with _staging(folder) as staged:
                source.extract(staged)
                merger = Merger(staged, folder, source.refused)
                merger.merge(trust=trust)
    except OSError as error:
        raise BundleError(
            f"the bundle {path} cannot be unpacked into {folder}: {error.strerror or error}",
            allowed="a folder on a disk with free space that you may write to",
            do='free some space, or choose another folder: nb.unpack(into="...")',
        ) from error
    return UnpackResult(
        bundle=path,
        folder=folder,
        new=tuple(merger.new),
        advanced=tuple(merger.advanced),
        unchanged=tuple(merger.unchanged),
        conflicting=tuple(merger.conflicting),
        files=merger.files,
        tracked=tuple(merger.tracked),
        notes=(*source.notes, *merger.notes),
    )


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder on the same disk, whose files need only be renamed; one at a time.

    It first removes what a killed process left.
    """
    lock = os.open(folder / ".unpack.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for abandoned in folder.glob(f"{_STAGING}*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        staged = Path(tempfile.mkdtemp(prefix=_STAGING, dir=folder))
        try:
            yield staged
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    finally:
        os.close(lock)
