"""Compute when a run must end, by its own budget, the notebook's deadline or the session's."""

from __future__ import annotations

import os
import reprlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.environment.grace import EXIT_GRACE
from nbtoolkit.environment.resources import START_TIME, process_fields
from nbtoolkit.errors import ConfigError, DeadlinePassed
from nbtoolkit.host import ROOT

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config

# Seconds: a search that the deadline has ended may return some milliseconds before it.
_LEAST = 0.5

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
    """Whether the notebook's or the host's limit ends it, before ``runtime.time_budget`` does."""
    grace: float = EXIT_GRACE
    """Seconds that the jobs of a search get to report after it; then they are killed."""


@dataclass(frozen=True)
class NotebookDeadline:
    """The deadline that all calls of a kernel share."""

    ends: float
    """Seconds of the monotonic clock, which nobody sets."""
    reserve: float
    """Seconds before it that are kept for predictions and for the rest of the notebook."""
    source: str
    """What set it: ``nb.set_deadline`` or ``runtime.deadline``."""

    @property
    def at(self) -> float:
        """Unix time, by the clock as it is now."""
        return time.time() + self.ends - time.monotonic()


def on_monotonic_clock(deadline: float | None) -> float | None:
    """Return a deadline in unix time as seconds of the monotonic clock; None: no limit.

    Each process converts a deadline once, when it gets it: somebody may set the clock later.
    """
    return None if deadline is None else time.monotonic() + deadline - time.time()


def set_deadline(
    limit: float | str | datetime | None, *, reserve: float | str | None = None
) -> datetime | None:
    """Set the time at which this notebook must be done, for all later calls in this kernel.

    The last part of the time is a reserve, for predictions and the rest of the notebook. When the
    reserve begins, launches, cross-validations and sweeps end with the status ``"deadline"``; at
    their start they print how long they may take. After the reserve has begun, each such call
    raises :class:`~nbtoolkit.errors.DeadlinePassed`. Only ``cv.predict`` may use the reserve. Runs
    that have already started keep their limit.

    The setting ``runtime.deadline`` does the same, but counts from the start of the process. If
    both are set, the earlier deadline applies.

    Args:
        limit: the time from now on, in seconds or as a string such as ``"8h"`` or ``"1h30m"``; or
            a ``datetime`` (in local time if it has no time zone). None removes the deadline.
        reserve: the length of the reserve, in seconds or as a string. Default: 10% of the time, but
            at most 10 minutes.

    Returns:
        The deadline, in UTC; None if it was removed.

    Raises:
        ConfigError: ``limit`` or ``reserve`` is not a time, or the reserve is as long as the time
            to the deadline, or longer.
    """
    global _deadline
    if limit is None:
        _deadline = None
        return None
    seconds = (
        limit.timestamp() - time.time() if isinstance(limit, datetime) else _seconds("limit", limit)
    )
    kept = _usual_reserve(seconds) if reserve is None else _seconds("reserve", reserve)
    if kept >= seconds > 0:
        raise ConfigError(
            f"nb.set_deadline: a reserve of {span(kept)} leaves no time of {span(seconds)}",
            allowed="a reserve that is shorter than the time to the deadline",
            do="pass a smaller reserve=",
        )
    _deadline = NotebookDeadline(time.monotonic() + seconds, kept, "nb.set_deadline")
    return datetime.fromtimestamp(_deadline.at, timezone.utc)


_deadline: NotebookDeadline | None = None
"""What :func:`set_deadline` has set in this process."""


def check_deadline(config: Config, *, uses_reserve: bool = False) -> None:
    """Refuse to start anything once the notebook's deadline leaves no time for it.

    Args:
        config: its ``runtime.deadline`` counts, too.
        uses_reserve: whether the call may use the time that is reserved for predictions.

    Raises:
        DeadlinePassed: there is no time left.
    """
    deadline = _notebook_deadline(config)
    if deadline is None:
        return
    left = deadline.ends - time.monotonic()
    if left - (0.0 if uses_reserve else deadline.reserve) > _LEAST:
        return
    state = f"is in {span(left)}, which are reserved" if left > 0 else f"was {span(-left)} ago"
    also = " (cv.predict may use the reserve)" if left > 0 else ""
    raise DeadlinePassed(
        f"the notebook's deadline, {_clock(deadline.at)}, {state}: nothing new starts "
        f"({deadline.source})",
        allowed=f"calls that begin before the deadline and its reserve{also}",
        do="use the finished folds and trials; nb.set_deadline('1h') sets a later one, "
        "nb.set_deadline(None) removes it"
        if deadline.source == "nb.set_deadline"
        else "use the finished folds and trials; or set a larger runtime.deadline",
    )


def _notebook_deadline(config: Config) -> NotebookDeadline | None:
    """Return the earlier one of what was set by call and in the configuration."""
    limit = config.runtime.deadline
    deadlines = [] if _deadline is None else [_deadline]
    if limit is not None:
        ends = time.monotonic() - _process_age() + limit
        deadlines.append(NotebookDeadline(ends, _usual_reserve(limit), "runtime.deadline"))
    return min(deadlines, key=lambda deadline: deadline.ends, default=None)


def _process_age() -> float:
    """Return the seconds since this process has started."""
    fields = process_fields(os.getpid())
    assert fields is not None
    started = int(fields[START_TIME]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _usual_reserve(seconds: float) -> float:
    return min(max(0.1 * seconds, 0.0), 600.0)


def _seconds(name: str, value: object) -> float:
    from pydantic import TypeAdapter, ValidationError

    from nbtoolkit.config.fields import Seconds

    try:
        seconds: float = TypeAdapter(Seconds).validate_python(value)
    except ValidationError:
        raise ConfigError(
            f"nb.set_deadline was given {reprlib.repr(value)} as {name}",
            allowed="seconds above 0, a text such as 8h or 1h30m"
            + (", a datetime, or None" if name == "limit" else ""),
            do="nb.set_deadline('8h')",
        ) from None
    return seconds


def time_limit(
    config: Config,
    *,
    root: Path = ROOT,
    now: float | None = None,
    environ: Mapping[str, str] | None = None,
    uses_reserve: bool = False,
) -> TimeLimit:
    """Return the limit of a run that starts now: its own, the notebook's or the host's, if sooner.

    Args:
        config: the run's configuration.
        root: parent of ``/proc``.
        now: unix time; default: the current time.
        environ: the environment variables; default: this process's.
        uses_reserve: whether the run may use the notebook deadline's reserve.
    """
    now = time.time() if now is None else now
    limit = _run_limit(config, root, now, os.environ if environ is None else environ)
    deadline = _notebook_deadline(config)
    if deadline is None:
        return limit
    end = deadline.at - (0.0 if uses_reserve else deadline.reserve)
    whole = f"the notebook must be done by {_clock(deadline.at)}, in {span(deadline.at - now)}"
    if limit.deadline is not None and limit.deadline <= end:
        note = f"{whole} ({deadline.source}); this run may take {span(limit.deadline - now)}"
        return TimeLimit(limit.deadline, (*limit.notes, ("info", note)), limit.imposed)
    kept = "" if uses_reserve else f", {span(deadline.reserve)} are reserved for predictions"
    note = f"{whole} ({deadline.source}): this run may take {span(end - now)}{kept}"
    warnings = tuple(each for each in limit.notes if each[0] == "warning")
    grace = min(TimeLimit.grace, deadline.reserve / 2)
    return TimeLimit(end, (*warnings, ("info", note)), imposed=True, grace=grace)


def _run_limit(config: Config, root: Path, now: float, environ: Mapping[str, str]) -> TimeLimit:
    """Return the run's own time budget or the host's limit, if sooner.

    ``runtime.time_budget`` counts from the start of this attempt. ``runtime.session_limit`` counts
    from the start of the session (of the container); the run ends ``runtime.shutdown_margin``
    before it. A session older than its limit shows that the limit is not this machine's (a Jupyter
    server that has been up for weeks): the limit is ignored with a warning. A run that is launched
    inside the shutdown margin ends at its first report, so that the notebook can finish.

    Without a ``session_limit``, the end of a Slurm job is the limit (``SLURM_JOB_END_TIME``,
    https://slurm.schedmd.com/sbatch.html).
    """
    budget = config.runtime.time_budget
    limit = config.runtime.session_limit
    by_budget = None if budget is None else now + budget
    if limit is None:
        return _slurm_limit(config, by_budget, now, environ)
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
    end = environ.get("SLURM_JOB_END_TIME", "")
    margin = config.runtime.shutdown_margin
    if not end.isdecimal() or float(end) <= now:
        return TimeLimit(by_budget)
    by_job = float(end) - margin
    if by_budget is not None and by_budget <= by_job:
        return TimeLimit(by_budget)
    text = f"{_must_end(by_job, now)} (SLURM_JOB_END_TIME minus a margin of {span(margin)})"
    return TimeLimit(by_job, (("info", f"Slurm ends this job: {text}"),), imposed=True)


def _session_note(config: Config, age: float, deadline: float, now: float) -> Note:
    limit = config.runtime.session_limit or 0.0
    margin = config.runtime.shutdown_margin
    reason = f"runtime.session_limit {span(limit)} minus a margin of {span(margin)}"
    if deadline > now:
        return "info", f"the session is {span(age)} old: {_must_end(deadline, now)} ({reason})"
    return "warning", (
        f"the session is {span(age)} old, and its time for runs is used up ({reason}): "
        "the run ends at its first report (a smaller runtime.shutdown_margin gives it more)"
    )


def _must_end(deadline: float, now: float) -> str:
    return f"the run must end by {_clock(deadline)}, in {span(deadline - now)}"


def _clock(moment: float) -> str:
    return time.strftime("%H:%M UTC", time.gmtime(moment))


def _limit_ignored(age: float | None, limit: float) -> str:
    if age is None:
        return "runtime.session_limit is ignored: the session's age cannot be read from /proc"
    return (
        f"runtime.session_limit is ignored: the session is {span(age)} old, so its limit of "
        f"{span(limit)} is not this machine's (set the right limit, or null)"
    )
