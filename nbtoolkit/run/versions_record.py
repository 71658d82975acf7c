"""Read a run's ``versions.json``, and compare the code that made the run with today's."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, cast

from nbtoolkit.errors import ResumeError, RunFileError
from nbtoolkit.run.checkpoints.checkpoint_store import has_checkpoint
from nbtoolkit.run.fingerprint import function_name, source_hash
from nbtoolkit.run.paths import KIND_NAMES, Kind, RunPaths, kind_of, runs_in, typed_record
from nbtoolkit.version import __version__

_LIBRARIES = ("torch", "accelerate", "numpy", "pydantic", "mlflow", "transformers")


class VersionsRecord(TypedDict, total=False):
    """The content of ``versions.json``; ``kind`` and ``total`` are a search's.

    ``submitted``: the attempt waits for its job, which will write its first event.
    """

    run_id: str
    attempt: int
    created: float
    fingerprint: str
    function: str
    source: str
    settings: str
    host: str
    versions: dict[str, str]
    kind: str
    total: int | None
    submitted: bool


def read_versions(paths: RunPaths) -> VersionsRecord:
    """The content of ``versions.json``; empty if it is missing, damaged or cannot be read."""
    try:
        return cast("VersionsRecord", typed_record(paths.versions, VersionsRecord) or {})
    except RunFileError:
        return {}


def why_not_resumed(
    output_dir: str | Path, kind: Kind, settings: str, train: Callable[..., Any]
) -> str | None:
    """Say why the newest run of the function, which is unfinished, is not resumed.

    Args:
        output_dir: the folder of the runs.
        kind: of the run.
        settings: the hash of the settings that decide its result.
        train: the training function.

    Returns:
        A sentence if its code has changed, or if it has no checkpoint, as when it did not fit into
        a bundle. None if it has other settings, is complete, runs, has failed without a checkpoint,
        or can be resumed.
    """
    name, source = function_name(train), source_hash(train)
    for paths in runs_in(Path(output_dir)):
        record = read_versions(paths)
        if record.get("function") != name or kind_of(record) != kind:
            continue
        runs = paths.owned() or record.get("submitted")
        if record.get("settings") != settings or runs or paths.completed():
            return None
        run = f"not resumed: the unfinished {KIND_NAMES[kind]} {paths.run_id} has these settings"
        same_code = record.get("source") == source
        saved = kind != "run" or has_checkpoint(paths.checkpoints)
        if saved and not same_code:
            return (
                f"{run}, but the code of {name}, or of what it calls, has changed since; "
                f"resume={paths.run_id!r} resumes it with the code as it is now"
            )
        if same_code and not saved and not paths.error.exists():
            return f"{run} and this code, but no checkpoint; this run starts at the beginning"
        return None
    return None


def changed_code(paths: RunPaths, train: Callable[..., Any]) -> str | None:
    """Say that the function's code is not that of the run's last attempt; None if it is."""
    if read_versions(paths).get("source") == source_hash(train):
        return None
    return (
        f"the code of {function_name(train)}, or of what it calls, has changed since the last "
        f"attempt of {paths.run_id}; it resumes with the code as it is now"
    )


def refuse_other_function(paths: RunPaths, train: Callable[..., Any]) -> None:
    """Refuse to resume a run or search that a function of another name has made.

    Raises:
        ResumeError: the names differ.
    """
    before, now = read_versions(paths).get("function", ""), function_name(train)
    # The module of a notebook's function is __main__, and another one in a script.
    if before.rpartition(".")[2] != now.rpartition(".")[2]:
        raise ResumeError(
            f"{paths.run_id} was made by another function: {before}, not {now}",
            allowed="the function that made it, whose code may have changed",
            do="launch that function, or start anew with resume='never'",
        )


def refuse_old_run(paths: RunPaths) -> None:
    """Refuse to resume a run or search of version 0.1, whose settings have other names.

    Raises:
        ResumeError: version 0.1 made it.
    """
    version = str(read_versions(paths).get("versions", {}).get("nbtoolkit", ""))
    if version.startswith("0.1."):
        raise ResumeError(
            f"{paths.run_id} was made by nbtoolkit {version}; version {__version__} cannot resume "
            "it",
            allowed="nb.attach and nb.report show it, nb.load_model reads its weights",
            do="start a new one with resume='never'",
        )


@functools.lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions of Python, the platform and the libraries that matter to a result."""
    known = {"python": platform.python_version(), "platform": platform.platform()}
    known["nbtoolkit"] = __version__  # the distribution of that name on PyPI is another project's
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            known[name] = importlib.metadata.version(name)
    return known
