"""Make the errors that end a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nbtoolkit.errors import SweepError


def too_many_failures(failed: int, allowed: int, last: str) -> SweepError:
    """More trials have failed in this session than are allowed; ``last`` tells of the last one."""
    return SweepError(
        f"too many trials have failed ({failed}); the last: {last}",
        allowed=f"budget.max_failures: {allowed}",
        do="look into its folder, fix the cause, and sweep again: the study resumes",
    )


def unread_parameters(names: Sequence[str]) -> SweepError:
    """Return the first trial has ended without reading parameters: no trial depends on them."""
    return SweepError(
        f"the space has {', '.join(names)}, and the first trial has ended without reading it",
        allowed="parameters that the function reads in every trial; `when` names the choices "
        "for which it reads them",
        do=f"read config.{names[0]} or ctx.params, correct the name, or remove it",
    )


def no_such_metric(metric: str, available: str, near: str | None) -> SweepError:
    """Make the error of a metric that the first trial lacks: no trial will have a value."""
    do = f"report or return {metric}, or name another one under study.metric"
    return SweepError(
        f"study.metric is {metric!r}, but the first trial has the metrics: {available}",
        allowed="a metric that every trial reports or returns",
        do=do if near is None else f"set study.metric: {near}",
    )


def no_value(counts: Mapping[str, int], last_failure: str) -> SweepError:
    """All trials have ended, and none has a value."""
    text = ", ".join(f"{count} {state}" for state, count in counts.items())
    last = f"; the last failure: {last_failure}" if last_failure else ""
    return SweepError(
        f"no trial of the sweep has a value: {text or 'none has ended'}{last}",
        allowed="one complete trial or more",
        do="look into the trials' folders, fix the cause, and sweep again, or sweep with more "
        "time: the study resumes",
    )
