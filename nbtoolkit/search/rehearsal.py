"""Rehearsal: the books of a small sweep, kept once in the launchpad before there is a sweep.

The first study of a process takes half a second: SQLAlchemy maps Optuna's tables and compiles every
statement, alembic reads its scripts, TPE imports SciPy. Conductors are forks of the launchpad, and
so have done what was done there.

Imports Optuna: load it late.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from optuna.exceptions import OptunaError
from sqlalchemy.exc import SQLAlchemyError

from nbtoolkit.errors import NbtoolkitError
from nbtoolkit.search.program import Ending
from nbtoolkit.search.study import keep_tables
from nbtoolkit.search.sweep_program import SweepProgram, make_program
from nbtoolkit.search.wishes import Wishes

_TRIALS = 3  # TPE draws the first at random, and learns from two


class _Nobody:
    """A diary that is not kept."""

    def write(self, type: str, **fields: Any) -> None: ...

    def note(self, text: str, level: str = "info") -> None: ...


def rehearse() -> None:
    """Ask, judge and tell a few trials in a temporary folder.

    Where that cannot be written nothing is rehearsed: the sweep itself will say so.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="nbtoolkit-rehearsal-") as folder:
            keep_tables(Path(folder))
            program = make_program(_content(), _Nobody(), Path(folder))
            for _ in range(_TRIALS):
                _one_trial(program)
            program.close("completed")
    except (OSError, NbtoolkitError, OptunaError, SQLAlchemyError):
        return


def _one_trial(program: SweepProgram) -> None:
    job = program.next(None)
    assert job is not None
    metrics = {"loss": float(job.params["x"])}
    program.reported(job, metrics, 0)
    program.ended(job, Ending(status="completed", metrics=metrics, seconds=0.1))


def _content() -> dict[str, Any]:
    study = {"metric": "loss", "direction": "minimize", "sampler_options": {"n_startup_trials": 1}}
    space = {"x": {"type": "float", "low": 1e-3, "high": 0.1, "log": True}}
    wishes = Wishes.model_validate(
        {"study": study, "space": space, "budget": {"n_trials": _TRIALS}}
    )
    return {"wishes": wishes.to_dict(), "config": {"seed": 0}}
