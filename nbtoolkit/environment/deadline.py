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
"""A message to the user: its level (``info`` or ``warning``) and its text."""


@dataclass(frozen=True)
class TimeLimit:
    """When a run must end, and why."""

    deadline: float | None = None
    """Unix time at which all ranks stop; None: no limit."""
    notes: tuple[Note, ...] = ()
    """Messages about the host's limit."""
    imposed: bool = False
    """Whether the host's limit ends the run, before ``runtime.time_budget`` does."""


def time_limit(
    config: Config,
    *,
    root: Path = ROOT,
    now: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> TimeLimit:
    """Return the limit of a run that starts now: its own time budget or the host's, if sooner.

    ``runtime.time_budget`` counts from the start of this attempt. ``runtime.session_limit`` counts
    from the start of the session (of the container); the run ends ``runtime.shutdown_margin``
    before it. A session older than its limit shows that the limit is not this machine's (a Jupyter
    server that has been up for weeks): the limit is ignored with a warning. A run that is launched
    inside the shutdown margin ends at its first report, so that the notebook can finish.

    Without a ``session_limit``, the end of a Slurm job is the limit (``SLURM_JOB_END_TIME``,
    https://slurm.schedmd.com/sbatch.html).

    Args:
        config: the run's configuration.
        root: parent of ``/proc``.
        now: unix time; default: the current time.
        environ: the environment variables; default: this process's.
    """
    now = time.time() if now is None else now
    budget, limit = config.runtime.time_budget, config.runtime.session_limit
    by_budget = None if budget is None else now + budget
    if limit is None:
        return _slurm_limit(config, by_budget, now, os.environ if environ is None else environ)
    age = session_age(root)
    if age is None or age >= limit:
        return TimeLimit(by_budget, (("warning", _limit_ignored(age, limit)),))
    by_session = now - age + limit - config.runtime.shutdown_margin
    if by_budget is not None and by_budget <= by_session:
        text = f"{_must_end(by_budget, now)} (runtime.time_budget; the session has more time)"
        return TimeLimit(by_budget, (("info", text),))
    return TimeLimit(by_session, (_session_note(config, age, by_session, now),), imposed=True)


def session_age(root: Path = ROOT) -> float | None:
    """Return the seconds since the container's first process started, or None if unknown.

    Outside a container this is the machine's uptime. lxcfs gives a container its own uptime, which
    does not match the start time: the result is None if the difference is negative.
    """
    try:
        fields = (root / "proc/1/stat").read_text().rpartition(")")[2].split()
        uptime = float((root / "proc/uptime").read_text().split()[0])
        age = uptime - int(fields[START_TIME]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):  # not Linux, hidden (hidepid), or truncated
        return None
    return age if age >= 0 else None


def span(seconds: float) -> str:
    """Format a duration: ``20 d 3 h``, ``3 h 20 min``, ``45 min``, ``50 s``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    parts = [(minutes // 1440, "d"), (minutes // 60 % 24, "h"), (minutes % 60, "min")]
    return " ".join([f"{count} {unit}" for count, unit in parts if count][:2])


def _slurm_limit(
    config: Config, by_budget: float | None, now: float, environ: Mapping[str, str]
) -> TimeLimit:
    """Return the limit of a Slurm job, if any; an end in the past belongs to another job."""
    end, margin = environ.get("SLURM_JOB_END_TIME", ""), config.runtime.shutdown_margin
    if not end.isdecimal() or float(end) <= now:
        return TimeLimit(by_budget)
    by_job = float(end) - margin
    if by_budget is not None and by_budget <= by_job:
        return TimeLimit(by_budget)
    text = f"{_must_end(by_job, now)} (SLURM_JOB_END_TIME minus a margin of {span(margin)})"
    return TimeLimit(by_job, (("info", f"Slurm ends this job: {text}"),), imposed=True)


def _session_note(config: Config, age: float, deadline: float, now: float) -> Note:
    limit, margin = config.runtime.session_limit or 0.0, config.runtime.shutdown_margin
    reason = f"runtime.session_limit {span(limit)} minus a margin of {span(margin)}"
    if deadline > now:
        return "info", f"the session is {span(age)} old: {_must_end(deadline, now)} ({reason})"
    return "warning", (
        f"the session is {span(age)} old, and its time for runs is used up ({reason}): "
        "the run ends at its first report (a smaller runtime.shutdown_margin gives it more)"
    )


def _must_end(deadline: float, now: float) -> str:
    clock = time.strftime("%H:%M UTC", time.gmtime(deadline))
    return f"the run must end by {clock}, in {span(deadline - now)}"


def _limit_ignored(age: float | None, limit: float) -> str:
    if age is None:
        return "runtime.session_limit is ignored: the session's age cannot be read from /proc"
    return (
        f"runtime.session_limit is ignored: the session is {span(age)} old, so its limit of "
        f"{span(limit)} is not this machine's (set the right limit, or null)"
    )
