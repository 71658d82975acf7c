"""Compute when a run must end, by its own time budget or by the end of the host's session."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.environment.resources import START_TIME
from nbtoolkit.host import ROOT

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config

Note = tuple[str, str]
"""A sentence for the user: its level (``info`` or ``warning``) and its text."""


@dataclass(frozen=True)
class TimeLimit:
    """When a run must end, and what is to be said about it."""

    deadline: float | None = None
    """Unix time at which all ranks are to leave; None: no limit."""
    notes: tuple[Note, ...] = ()
    """Why, where the session's limit has a say."""
    imposed: bool = False
    """Whether the host ends it, before what was wished."""


def time_limit(
    config: Config,
    *,
    root: Path = ROOT,
    now: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> TimeLimit:
    """The earlier one of two limits of a run that starts now.

    ``runtime.time_budget`` counts from the start of this attempt. ``runtime.session_limit`` counts
    from the start of the session, that is of the container, and
    ``runtime.shutdown_margin`` is kept back.
    A session older than its limit shows that the limit is not this machine's (a Jupyter server that
    has been up for weeks): it is not kept, and a warning says so. Inside the reserve it is kept: a
    run that is launched then ends at its first report, so that the notebook comes to its end.

    Slurm says itself when a job ends (``SLURM_JOB_END_TIME``, https://slurm.schedmd.com/sbatch.html):
    without a ``session_limit`` that is kept, too.

    Args:
        config: its section ``runtime`` is used.
        root: where ``/proc`` is looked for.
        now: unix time; default: the clock's.
        environ: the environment variables; default: this process's.
    """
    now = time.time() if now is None else now
    budget, limit = config.runtime.time_budget, config.runtime.session_limit
    by_budget = None if budget is None else now + budget
    if limit is None:
        return _by_job(config, by_budget, now, os.environ if environ is None else environ)
    age = session_age(root)
    if age is None or age >= limit:
        return TimeLimit(by_budget, (("warning", _not_kept(age, limit)),))
    by_session = now - age + limit - config.runtime.shutdown_margin
    if by_budget is not None and by_budget <= by_session:
        text = f"{_ends(by_budget, now)} (runtime.time_budget; the session has more time)"
        return TimeLimit(by_budget, (("info", text),))
    return TimeLimit(by_session, (_by_session(config, age, by_session, now),), imposed=True)


def session_age(root: Path = ROOT) -> float | None:
    """Seconds since the container's first process started; None where that cannot be told.

    Where there is no container that is the machine's age. Under lxcfs, which gives a container an
    uptime of its own, the two clocks do not fit together: None where that shows.
    """
    try:
        fields = (root / "proc/1/stat").read_text().rpartition(")")[2].split()
        uptime = float((root / "proc/uptime").read_text().split()[0])
        age = uptime - int(fields[START_TIME]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):  # no Linux, hidden (hidepid), or cut off
        return None
    return age if age >= 0 else None


def span(seconds: float) -> str:
    """A length of time for people: ``20 d 3 h``, ``3 h 20 min``, ``45 min``, ``50 s``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    parts = [(minutes // 1440, "d"), (minutes // 60 % 24, "h"), (minutes % 60, "min")]
    return " ".join([f"{count} {unit}" for count, unit in parts if count][:2])


def _by_job(
    config: Config, by_budget: float | None, now: float, environ: Mapping[str, str]
) -> TimeLimit:
    """The limit of a Slurm job, where there is one; a time that is past is another job's."""
    end = environ.get("SLURM_JOB_END_TIME", "")
    by_job = float(end) - config.runtime.shutdown_margin if end.isdecimal() else 0.0
    if not end.isdecimal() or float(end) <= now or (by_budget is not None and by_budget <= by_job):
        return TimeLimit(by_budget)
    kept = f"SLURM_JOB_END_TIME, less {span(config.runtime.shutdown_margin)} in reserve"
    note = "info", f"Slurm ends this job: {_ends(by_job, now)} ({kept})"
    return TimeLimit(by_job, (note,), imposed=True)


def _by_session(config: Config, age: float, deadline: float, now: float) -> Note:
    limit, reserve = config.runtime.session_limit or 0.0, config.runtime.shutdown_margin
    shown = f"runtime.session_limit {span(limit)}, less {span(reserve)} in reserve"
    if deadline > now:
        return "info", f"the session is {span(age)} old: {_ends(deadline, now)} ({shown})"
    return "warning", (
        f"the session is {span(age)} old, and its time for runs is used up ({shown}): "
        "the run ends at its first report (a smaller runtime.shutdown_margin gives it more)"
    )


def _ends(deadline: float, now: float) -> str:
    clock = time.strftime("%H:%M UTC", time.gmtime(deadline))
    return f"the run must end by {clock}, in {span(deadline - now)}"


def _not_kept(age: float | None, limit: float) -> str:
    if age is None:
        return "runtime.session_limit is not kept: the session's age cannot be read from /proc"
    return (
        f"runtime.session_limit is not kept: the session is {span(age)} old and has outlived its "
        f"limit of {span(limit)}, which therefore is not this machine's (set it, or null)"
    )
