"""Which search a call is: a new one, or one to go on with. Who holds its lock owns the folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.config import load_config
from nbtoolkit.errors import LaunchError, ResumeError
from nbtoolkit.runtime.choose import ChosenRun, lock_run, put_aside, source_hash
from nbtoolkit.runtime.paths import (
    RunPaths,
    decides_result,
    fingerprint,
    read_or_empty,
    read_record,
    runs_in,
)
from nbtoolkit.runtime.result import find_run

if TYPE_CHECKING:
    from nbtoolkit.config import Config


def choose_search(
    config: Config, identity: Mapping[str, Any], name: str, resume: str | os.PathLike[str]
) -> ChosenRun:
    """Find or make the folder of a search, and lock it.

    Args:
        config: the configuration all jobs start from.
        identity: of :func:`identity_of`.
        name: the end of a new folder's name.
        resume: see :func:`~nbtoolkit.search.start.start_search`.

    Raises:
        ResumeError: the named search differs, or is owned.
        RunFolderError: the output folder cannot be written.
    """
    if resume == "auto":
        chosen = _to_go_on_with(Path(config.runtime.output_dir), identity)
    elif resume == "never":
        chosen = None
    else:
        chosen = _named(resume, config, identity)
    if chosen is not None:
        put_aside(chosen.paths)
        return chosen
    paths = RunPaths.create(config.runtime.output_dir, name)
    lock = lock_run(paths)
    assert lock is not None
    return ChosenRun(paths, lock, 1)


def identity_of(
    train: Callable[..., Any], config: Config, kind: str, own: Mapping[str, Any], total: int | None
) -> dict[str, Any]:
    """What a search's folder remembers, to be found and checked by.

    Args:
        train: the training function.
        config: the configuration all jobs start from.
        kind: ``"sweep"`` or ``"cv"``.
        own: what else makes it another search when it differs.
        total: how much is asked for, over all sessions.
    """
    return {
        "kind": kind,
        "fingerprint": fingerprint({**config.to_dict(), kind: dict(own)}, train),
        "source": source_hash(train),
        "total": total,
    }


def _to_go_on_with(output_dir: Path, identity: Mapping[str, Any]) -> ChosenRun | None:
    for paths in runs_in(output_dir):
        about = read_or_empty(paths.versions)
        fits = all(about.get(key) == identity[key] for key in ("kind", "fingerprint"))
        more = (identity["total"] or 0) > (about.get("total") or sys.maxsize)
        if fits and (more or not paths.completed()) and (lock := lock_run(paths)) is not None:
            return ChosenRun(paths, lock, int(about["attempt"]) + 1)
    return None


def _differences(paths: RunPaths, config: Config) -> dict[str, tuple[Any, Any]]:
    """What decides results and is not as it was."""
    settings = config.to_dict()
    before = load_config(paths.config, env=None).differences(config)
    return {key: pair for key, pair in before.items() if decides_result(key, settings)}


def _named(run: str | os.PathLike[str], config: Config, identity: Mapping[str, Any]) -> ChosenRun:
    kind, output_dir = identity["kind"], Path(config.runtime.output_dir)
    try:
        paths = find_run(run, output_dir)
    except LaunchError as error:
        allowed = f'"auto", "never", {error.allowed}'
        raise ResumeError(error.what, allowed=allowed, do=error.do) from None
    about = read_record(paths.versions) or {}
    if about.get("kind") != kind:
        raise ResumeError(
            f"{paths.folder} is no {kind}, but a {about.get('kind', 'run')}",
            allowed=f"the folder of a {kind}",
            do="look into the folders' versions.json for their kind",
        )
    if about.get("source") != identity["source"]:
        raise ResumeError(
            f"the {kind} {paths.run_id} was made by another function: the source of "
            f"{about.get('function')} differs",
            allowed="the same training function",
            do="start a new one with resume='never'",
        )
    if differences := _differences(paths, config):
        shown = "; ".join(f"{key}: {a!r} then, {b!r} now" for key, (a, b) in differences.items())
        raise ResumeError(
            f"the {kind} {paths.run_id} was made with another configuration: {shown}",
            allowed="other output, tracking, checkpoint and distributed settings",
            do="load its own config.yaml, or start a new one with resume='never'",
        )
    lock = lock_run(paths)
    if lock is None:
        raise ResumeError(
            f"the {kind} {paths.run_id} is going on",
            allowed="one owner at a time",
            do="attach to it with nb.attach(folder)",
        )
    return ChosenRun(paths, lock, int(about["attempt"]) + 1)
