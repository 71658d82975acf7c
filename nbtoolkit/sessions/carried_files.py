"""Decide which files go from one session to the next: the only list of what a bundle may hold.

``pack`` applies it to an output folder. ``unpack`` applies it again to a bundle, whose author is
unknown. A file is carried if its name has an accepted form, if it belongs to one of the three units
below, and if a pickle in it holds plain data only (see plain_pickles.py):

- the folder of a launch, a sweep or a cross-validation, with everything below it;
- the folder of a pipeline, likewise, because its notebooks write to it;
- an executed notebook with the files of the same name beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Literal

from nbtoolkit.run.paths import EVENTS

ACCEPTED: Mapping[str, Sequence[str]] = {
    "records and text": (
        "*.json",
        "*.jsonl",
        "*.yaml",
        "*.yml",
        "*.toml",
        "*.txt",
        "*.log",
        "*.md",
    ),
    "tables and arrays": ("*.csv", "*.tsv", "*.parquet", "*.feather", "*.npy", "*.npz", "*.gz"),
    "weights and models": (
        "*.pt",
        "*.ckpt",
        "*.safetensors",
        "*.onnx",
        "*.model",
        "*.ubj",
        "*.cbm",
        "*.skops",
    ),
    "models of Keras": ("*.keras", "*.h5"),
    "states of generators": ("rng_state*.pth",),
    "pickles of plain data": ("*.pkl",),
    "pages and pictures": (
        "*.ipynb",
        "*.html",
        "*.svg",
        "*.png",
        "*.jpg",
        "*.jpeg",
        "*.gif",
        "*.pdf",
    ),
    "TensorBoard and W&B": ("*.tfevents.*", "*.wandb"),
}
"""What a bundle may hold: patterns of file names. Code is not among them, and neither is what holds
code by its nature (``*.pth`` in site-packages, ``*.joblib``, databases with triggers)."""

CREDENTIALS = (
    *("kaggle.json", ".env", ".env.*", "*.env", ".netrc", ".pypirc", ".git-credentials"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "id_ecdsa*", "id_ed25519*"),
    *("credentials", "credentials.*", "client_secret*.json", "service_account*.json", "secrets.*"),
    # not tokens.txt and tokenizer.json, which belong to models
    *("token", "token.*", "*.token", "*[-_]token", "*[-_]token.*", "stored_tokens"),
)

# Files and folders that belong to one process or host. MLflow's database has absolute paths in it,
# and unpack writes the runs to the database there. An exception is pickled with its class; its text
# is in the events.
_OF_ONE_SESSION = (
    *(".*", "*.lock", "stop", "commands", "job.pkl", "error.pkl", "elastic", "*.bundle"),
    *("mlflow.db", "mlartifacts", "*-wal", "*-shm", "*-journal"),
)

# Reasons to leave a file out, shown to the user.
SECRET = "may hold credentials"
UNKNOWN_KIND = "not a kind of file that a bundle may hold"
PICKLED_CODE = "a pickle of code or classes: trust=True unpacks it from a bundle of your own"
ELSEWHERE = "not in a run folder"
NOT_REGULAR = "not a regular file"
UNREADABLE = "cannot be read"

_NOTEBOOK_SUFFIXES = (".run.json", ".run.log", ".runs.txt", ".done.json", ".ipynb", ".html")
_MAX_NAMES = 50  # names listed for one reason


@dataclass(frozen=True)
class Unit:
    """What is carried as a whole.

    Attributes:
        kind: what it is.
        path: its folder; of a notebook, the path without a suffix.
    """

    kind: Literal["run", "pipeline", "notebook"]
    path: Path

    def exists(self) -> bool:
        """Whether there is such a unit at this path."""
        if self.kind == "notebook":
            return _is_executed(self.path)
        return is_run(self.path) if self.kind == "run" else is_pipeline(self.path)

    def may_be_new(self) -> bool:
        """Whether nothing else has its name."""
        if self.kind == "notebook":
            return not any(os.path.lexists(f"{self.path}{end}") for end in _NOTEBOOK_SUFFIXES)
        return not os.path.lexists(self.path)


def of_one_session(name: str) -> bool:
    """Whether a file or folder is useless in another session, by its name. Nobody lists these."""
    return any(fnmatch(name, pattern) for pattern in _OF_ONE_SESSION) and not _is_secret(name)


def refusal(path: str) -> str | None:
    """Return why no bundle holds a file, by its path below the output folder; None: it may."""
    *folders, name = PurePosixPath(path).parts
    if _is_secret(name):
        return SECRET
    accepted = any(fnmatch(name.lower(), form) for forms in ACCEPTED.values() for form in forms)
    return None if accepted and not any(map(of_one_session, [*folders, name])) else UNKNOWN_KIND


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's."""
    return os.path.isfile(folder / EVENTS)


def is_pipeline(folder: Path) -> bool:
    """Whether a folder is a pipeline's: one of its steps has run."""
    return any((folder / "steps").glob("[!.]*.run.json"))


def unit_files(folder: Path, base: Path) -> Iterator[tuple[Path, Unit | None]]:
    """Yield the files below a folder, each with the unit that it belongs to; None: to none.

    It leaves out what is of one session. Links are not followed. What cannot be read is yielded, a
    folder too.

    Args:
        folder: the folder, which is a unit itself if it lies below ``base``.
        base: the output folder, which is none.
    """
    yield from _walk(folder, None if folder == base else _unit_of_folder(folder, None))


def _walk(folder: Path, unit: Unit | None) -> Iterator[tuple[Path, Unit | None]]:
    try:
        with os.scandir(folder) as scanned:
            entries = sorted(scanned, key=attrgetter("name"))
    except FileNotFoundError:
        return
    except OSError:
        yield folder, unit
        return
    for entry in entries:
        path = Path(entry.path)
        if of_one_session(entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(path, _unit_of_folder(path, unit))
        else:
            yield path, unit or _notebook_of(path)


def _unit_of_folder(folder: Path, above: Unit | None) -> Unit | None:
    """Return the unit of a folder's files. Trials and folds belong to the run above them."""
    if (above is None or above.kind == "pipeline") and is_run(folder):
        return Unit("run", folder)
    return Unit("pipeline", folder) if above is None and is_pipeline(folder) else above


def _notebook_of(file: Path) -> Unit | None:
    for suffix in _NOTEBOOK_SUFFIXES:
        if file.name.endswith(suffix):
            stem = Path(str(file).removesuffix(suffix))
            return Unit("notebook", stem) if _is_executed(stem) else None
    return None


def _is_executed(stem: Path) -> bool:
    return os.path.isfile(f"{stem}.run.json") or os.path.isfile(f"{stem}.run.log")


def _is_secret(name: str) -> bool:
    return any(fnmatch(name.lower(), pattern) for pattern in CREDENTIALS)


def describe(left_out: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a text for each reason, with the names of the files."""
    return [f"{_listed(sorted(names))} ({reason})" for reason, names in left_out.items() if names]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    # Names of files may hold any bytes, which can be neither printed nor sent.
    return ", ".join(names[:_MAX_NAMES]).encode("utf-8", "backslashreplace").decode() + more
