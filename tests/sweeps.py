"""What the tests of sweeps look at from outside: the study's file, while others write it."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from kernels import SECONDS, until

_COMPLETE = """
select number, value from trials join trial_values using (trial_id) where state = 'COMPLETE'
"""


def finished(folder: Path) -> dict[int, float]:
    """Number and value of the trials that the study holds as complete."""
    if not (folder / "study.db").exists():
        return {}
    file = f"file:{folder / 'study.db'}?mode=ro"
    with contextlib.closing(sqlite3.connect(file, uri=True, timeout=SECONDS)) as db:
        if not db.execute("select 1 from sqlite_master where name = 'trial_values'").fetchall():
            return {}  # it is being made
        return dict(db.execute(_COMPLETE).fetchall())


def sweep_folder(home: Path) -> Path:
    """The one sweep's folder, once it is there."""
    (folder,) = until(lambda: list(home.glob("out/*-sweep-*")), "the sweep's folder")
    return Path(folder)


def begun(folder: Path) -> int:
    """How often a trial has begun."""
    return sum(file.read_text().count("\n") for file in folder.glob("trials/*/begun.txt"))
