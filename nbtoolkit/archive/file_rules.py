"""Decide which files a bundle carries and unpacking writes: those of run folders, without code.

A run folder is

- the folder of a launch, a sweep or a cross-validation, with all that is below it;
- the folder of a pipeline, likewise: its notebooks are given it to write to;
- an executed notebook with the files beside it that :class:`NotebookFiles` names, and no others;
- MLflow's database and ``mlartifacts`` beside it.

``pack`` applies these rules to an output folder, ``unpack`` once more to what a bundle holds: who
wrote that is not known.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from nbtoolkit.archive.mlflow_databases import MLFLOW

ARTIFACTS, LOCK = "mlartifacts", "pipeline.lock"
ELSEWHERE = "in no run folder"
NOT_PLAIN = "no plain file"
UNREADABLE = "cannot be read"
OCCUPIED = "something else has that name here"

# What a later cell or shell would run: Python imports from the working directory.
_CODE = (".py", ".pyc", ".so", ".pth", ".sh", ".whl")
_SECRET = (
    *("kaggle.json", ".env", ".env.*", "*.env", ".netrc", ".pypirc", ".git-credentials"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "id_ecdsa*", "id_ed25519*"),
    *("credentials", "credentials.*", "client_secret*.json", "service_account*.json", "secrets.*"),
    # not tokens.txt and tokenizer.json, which belong to models
    *("token", "token.*", "*.token", "*[-_]token", "*[-_]token.*", "stored_tokens"),
)
_NOTEBOOK = (".run.json", ".run.log", ".runs.txt", ".done.json", ".ipynb", ".html")
_SHOWN = 50  # names of one reason


def is_secret(name: str) -> bool:
    """Whether a file's name says that it may hold credentials."""
    return any(fnmatch(name.lower(), pattern) for pattern in _SECRET)


def refusal(name: str) -> str | None:
    """Why a file is in no bundle, by its path below the output folder; None: it may be."""
    path = PurePosixPath(name)
    if is_secret(path.name):
        return "may hold credentials"
    if any(part.startswith(".") for part in path.parts):
        return "hidden"
    if path.name.endswith(".lock"):
        return "a lock"
    return "code" if path.name.lower().endswith(_CODE) else None


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's; MLflow's copies of a run's files are not."""
    return all(os.path.isfile(folder / name) for name in ("versions.json", "events.jsonl"))


def is_pipeline(folder: Path) -> bool:
    """Whether a folder is a pipeline's."""
    steps = folder / "steps"
    return os.path.isfile(folder / LOCK) or any(map(_is_executed, steps.glob("[!.]*.run.*")))


def runs_below(folder: Path) -> Iterator[str]:
    """The uppermost runs below a folder, by their paths below it."""
    for place, folders, _ in os.walk(folder):
        folders.sort()
        if is_run(Path(place)):
            folders.clear()
            yield Path(place).relative_to(folder).as_posix()


def home_of(file: Path, base: Path) -> Path | None:
    """The run folder that a file below an output folder is in; None: it is in none."""
    upper = [base / folder for folder in reversed(file.relative_to(base).parents)]
    if runs := [folder for folder in upper if is_run(folder)]:
        return runs[0]
    pipelines = [folder for folder in upper if is_pipeline(folder)]
    homes = [folder for folder in pipelines if folder != base]
    homes += [folder / ARTIFACTS for folder in upper if _in_artifacts(file, folder)]
    homes += [file] if file.name == MLFLOW or _is_executed(file) else []
    return next(iter([*homes, *pipelines]), None)


def may_hold(place: Path, home: Path, staged: Path, into: Path) -> bool:
    """Whether a file of a run folder may be written: nothing of another kind is there.

    Args:
        place: the file, below ``into``.
        home: its run folder, below ``staged``.
        staged: what was unpacked.
        into: the output folder.
    """
    if place.parent.resolve() != into.resolve() / place.parent.relative_to(into):
        return False  # through a link
    there = into / home.relative_to(staged)
    if not there.is_dir():
        beside = [Path(f"{_stem(there)}{end}") for end in _NOTEBOOK] if _stem(there) else [there]
        free = not any(map(os.path.lexists, beside))
        return free or there.name == MLFLOW or _is_executed(there)
    if is_run(home):
        return (there / "versions.json").is_file()
    # The lock says that a pipeline ran here, or was unpacked here before: no bundle brings one.
    ours = (there / LOCK).is_file() or there.name == ARTIFACTS
    return ours or not any(there.glob("[!.]*"))


def named(left: Mapping[str, Sequence[str]]) -> list[str]:
    """What was left out, in words: for every reason the names."""
    return [f"{_listed(names)} ({why})" for why, names in left.items()]


def plain(text: str) -> str:
    """A path as text that can be printed and sent: names of files may hold any bytes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return plain(", ".join(sorted(names)[:_SHOWN])) + more


def _in_artifacts(file: Path, folder: Path) -> bool:
    return file.is_relative_to(folder / ARTIFACTS) and os.path.isfile(folder / MLFLOW)


def _is_executed(file: Path) -> bool:
    """Whether it is of an executed notebook: the log or the record of that lies beside it."""
    stem = _stem(file)
    return bool(stem) and any(os.path.isfile(f"{stem}{end}") for end in (".run.log", ".run.json"))


def _stem(file: Path) -> str:
    """The path of an executed notebook's file without its end; empty: that of another file."""
    end = next((end for end in _NOTEBOOK if file.name.endswith(end)), None)
    return str(file)[: -len(end)] if end else ""
