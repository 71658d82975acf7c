"""Decide which files a bundle may carry, namely those of run folders without code and credentials.

A run folder is

- the folder of a launch, a sweep or a cross-validation, with everything below it;
- the folder of a pipeline, likewise, because its notebooks write to it;
- an executed notebook with the files beside it that :class:`NotebookFiles` names, and no others;
- MLflow's database and ``mlartifacts`` beside it.

``pack`` applies these rules to an output folder. ``unpack`` applies them again to the content of a
bundle, whose author is unknown.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from nbtoolkit.run.paths import EVENTS

ARTIFACTS, LOCK, MLFLOW = "mlartifacts", "pipeline.lock", "mlflow.db"

BESIDE = ("-wal", "-shm", "-journal")
"""Suffixes of the files beside an open SQLite database."""

# Reasons to leave a file out, shown to the user.
ELSEWHERE = "not in a run folder"
NOT_REGULAR = "not a regular file"
UNREADABLE = "cannot be read"
OCCUPIED = "something else has that name here"

# What a later cell or shell would run: Python imports from the working directory.
_CODE = (".py", ".pyc", ".so", ".pth", ".sh", ".whl")
_CREDENTIALS = (
    *("kaggle.json", ".env", ".env.*", "*.env", ".netrc", ".pypirc", ".git-credentials"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "id_ecdsa*", "id_ed25519*"),
    *("credentials", "credentials.*", "client_secret*.json", "service_account*.json", "secrets.*"),
    # not tokens.txt and tokenizer.json, which belong to models
    *("token", "token.*", "*.token", "*[-_]token", "*[-_]token.*", "stored_tokens"),
)
_NOTEBOOK_SUFFIXES = (".run.json", ".run.log", ".runs.txt", ".done.json", ".ipynb", ".html")
_MAX_NAMES = 50  # names listed for one reason


def may_hold_credentials(name: str) -> bool:
    """Whether a file's name suggests that it holds credentials."""
    return any(fnmatch(name.lower(), pattern) for pattern in _CREDENTIALS)


def refusal(name: str) -> str | None:
    """The reason why no bundle carries a file, by its path below the output folder, or None."""
    path = PurePosixPath(name)
    if may_hold_credentials(path.name):
        return "may hold credentials"
    if any(part.startswith(".") for part in path.parts):
        return "hidden"
    if path.name.endswith(".lock"):
        return "a lock"
    return "code" if path.name.lower().endswith(_CODE) else None


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's. MLflow's copies of a run's files are not."""
    return os.path.isfile(folder / EVENTS)


def is_pipeline(folder: Path) -> bool:
    """Whether a folder is a pipeline's."""
    steps = folder / "steps"
    return os.path.isfile(folder / LOCK) or any(map(_is_executed, steps.glob("[!.]*.run.*")))


def runs_below(folder: Path) -> Iterator[str]:
    """Yield the paths of the uppermost runs below a folder, without those in hidden folders."""
    for parent, folders, _ in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if is_run(Path(parent)):
            folders.clear()
            yield Path(parent).relative_to(folder).as_posix()


def run_folder_of(file: Path, base: Path) -> Path | None:
    """The run folder of a file below an output folder; None: it is in none."""
    parents = [base / folder for folder in reversed(file.relative_to(base).parents)]
    if runs := [folder for folder in parents if is_run(folder)]:
        return runs[0]
    pipelines = [folder for folder in parents if is_pipeline(folder)]
    candidates = [folder for folder in pipelines if folder != base]
    candidates += [folder / ARTIFACTS for folder in parents if _is_artifact(file, folder)]
    candidates += [file] if file.name == MLFLOW or _is_executed(file) else []
    return next(iter([*candidates, *pipelines]), None)


def may_write(target: Path, run_folder: Path, staged: Path, into: Path) -> bool:
    """Whether unpacking may write a file: nothing of another kind has its name.

    Args:
        target: the file, below ``into``.
        run_folder: its run folder, below ``staged``.
        staged: the folder with the unpacked files.
        into: the output folder.
    """
    if target.parent.resolve() != into.resolve() / target.parent.relative_to(into):
        return False  # through a link
    existing = into / run_folder.relative_to(staged)
    if not existing.is_dir():
        stem = _notebook_stem(existing)
        names = [f"{stem}{suffix}" for suffix in _NOTEBOOK_SUFFIXES] if stem else [existing]
        free = not any(map(os.path.lexists, names))
        return free or existing.name == MLFLOW or _is_executed(existing)
    if is_run(run_folder):
        return (existing / EVENTS).is_file()
    # The lock shows that a pipeline ran here or was unpacked here before: no bundle holds a lock.
    same_kind = (existing / LOCK).is_file() or existing.name == ARTIFACTS
    return same_kind or not any(existing.glob("[!.]*"))


def is_database(path: Path) -> bool:
    """Whether a file is an SQLite database."""
    if path.suffix != ".db":
        return False
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"


def size_of(database: Path) -> int:
    """Bytes that a copy may have: those of the file and of its write-ahead log."""
    log = Path(f"{database}-wal")
    return database.stat().st_size + (log.stat().st_size if log.exists() else 0)


def describe(left_out: Mapping[str, Sequence[str]]) -> list[str]:
    """A text for each reason, with the names of the files."""
    return [f"{_listed(names)} ({reason})" for reason, names in left_out.items()]


def printable(text: str) -> str:
    """A path as text that can be printed and sent: names of files may hold any bytes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return printable(", ".join(sorted(names)[:_MAX_NAMES])) + more


def _is_artifact(file: Path, folder: Path) -> bool:
    return file.is_relative_to(folder / ARTIFACTS) and os.path.isfile(folder / MLFLOW)


def _is_executed(file: Path) -> bool:
    """Whether a file is an executed notebook's: its log or its record lies beside it."""
    stem = _notebook_stem(file)
    return bool(stem) and any(os.path.isfile(stem + suffix) for suffix in (".run.log", ".run.json"))


def _notebook_stem(file: Path) -> str:
    """The path of an executed notebook's file without its suffix; empty for any other file."""
    suffix = next((suffix for suffix in _NOTEBOOK_SUFFIXES if file.name.endswith(suffix)), None)
    return str(file)[: -len(suffix)] if suffix else ""
