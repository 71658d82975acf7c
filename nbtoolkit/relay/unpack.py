"""unpack: go on in this session with what another one packed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from nbtoolkit.config import ConfigLike
from nbtoolkit.errors import BundleError
from nbtoolkit.relay.find import find_source
from nbtoolkit.relay.merge import merge
from nbtoolkit.relay.pack import default_output_of, output_folder, pack
from nbtoolkit.relay.reading import Bundle
from nbtoolkit.relay.result import UnpackResult
from nbtoolkit.relay.seen import changed_last, note_bundle, was_seen
from nbtoolkit.relay.worth import look_into
from nbtoolkit.runtime.disk import free_space, size_text
from nbtoolkit.runtime.host import Host, detect_host

_STAGED = ".nbtoolkit-unpacking-"


def unpack(
    where: str | os.PathLike[str] = "auto",
    *,
    into: str | os.PathLike[str] | None = None,
    config: ConfigLike = None,
    host: Host | None = None,
) -> UnpackResult:
    """Bring the runs of an earlier session into the output folder; launches then go on with them.

    The bundle is checked whole before anything is taken from it. A run that is here and further, or
    going on, stays as it is; unpacking twice changes nothing. Nothing is loaded or run. Written are
    run folders alone (see :mod:`nbtoolkit.relay.kept`); what else is in it is named.

    Args:
        where: ``"auto"`` (the newest bundle in ``/kaggle/input``, in a mounted Drive, or in the
            working directory; nothing is done where there is none), a bundle, or a folder: with a
            bundle in it, or with runs, such as the output of a session that ended before it could
            pack.
        into: the output folder; None: ``runtime.output_dir`` of ``config``.
        config: what will be launched with; None: the default configuration.
        host: where this is; None: detected.

    Raises:
        BundleError: there is no such bundle, or it is damaged, foreign, unsafe or dated in the
            future, or the folder cannot be written.
        ConfigError: ``config`` is none.
    """
    folder = output_folder(config) if into is None else Path(into).expanduser().absolute()
    source = find_source(where, host or detect_host())
    if source is None:
        return UnpackResult(bundle=None, folder=folder)
    if source.is_dir():
        return _unpack_runs(source, folder, again=where != "auto")
    bundle = Bundle.open(source)
    runs = bundle.runs()
    if where == "auto" and was_seen(folder, runs, bundle.created):
        return UnpackResult(bundle=source, folder=folder, unchanged=tuple(runs))
    done = _unpack(bundle, folder, told=source)
    place = bundle.header.place
    if into is None and place and Path(place).absolute() != folder:
        note = f"its runs lay in {place!r}: to have them there, nb.unpack(into={place!r})"
        done = replace(done, notes=(*done.notes, note))
    return done


def _unpack_runs(source: Path, folder: Path, *, again: bool) -> UnpackResult:
    """Take a folder of runs: by way of a bundle, which copies open databases as they should be."""
    base = default_output_of(source) or source
    runs = [str(run["folder"]) for run in look_into(source, base).runs]
    created = changed_last(base, runs)
    if base == folder or (not again and was_seen(folder, runs, created)):
        return UnpackResult(bundle=source, folder=folder, unchanged=tuple(runs))
    with tempfile.TemporaryDirectory(prefix="nbtoolkit-relay-") as passing:
        packed = pack(passing, source=source)
        done = _unpack(Bundle.open(packed.path), folder, told=source)
    note_bundle(folder, created)
    return done


def _unpack(bundle: Bundle, folder: Path, *, told: Path) -> UnpackResult:
    _need_room(bundle, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _staging(folder) as staged:
            bundle.extract(staged)
            merged = merge(staged, folder, Path(bundle.header.source))
            note_bundle(folder, bundle.created)
    except OSError as error:
        raise BundleError(
            f"the bundle {told} cannot be unpacked into {folder}: {error.strerror or error}",
            allowed="a folder on a disk with free space that you may write to",
            do='free some space, or choose another folder: nb.unpack(into="...")',
        ) from error
    left_out = [f"the bundle was packed without {what}" for what in bundle.header.left_out]
    return UnpackResult(
        bundle=told,
        folder=folder,
        new=tuple(merged.new),
        advanced=tuple(merged.advanced),
        unchanged=tuple(merged.unchanged),
        files=merged.files,
        tracked=tuple(merged.tracked),
        notes=(*left_out, *merged.notes),
    )


def _need_room(bundle: Bundle, folder: Path) -> None:
    needed, free = bundle.path.stat().st_size, free_space(folder)
    if needed > free:
        raise BundleError(
            f"{folder} has {size_text(free)} free, and {bundle.path} needs {size_text(needed)}",
            allowed="a disk with room for all that is in the bundle",
            do='free some space, or choose another folder: nb.unpack(into="...")',
        )


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A folder on the same disk, whose files need only be renamed; one at a time, gone in the end.

    What a process left that was killed here is removed by the next one.
    """
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left_over in folder.glob(f"{_STAGED}*"):
            shutil.rmtree(left_over, ignore_errors=True)
        staged = Path(tempfile.mkdtemp(prefix=_STAGED, dir=folder))
        try:
            yield staged
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    finally:
        os.close(lock)
