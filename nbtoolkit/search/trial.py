"""Trial: one trial of a sweep, as its events tell it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nbtoolkit.runtime.events import Event

ENDED = ("complete", "pruned", "failed", "infeasible")
"""States of a trial that has ended; the others are running and waiting (to run again)."""


@dataclass(eq=False)
class Trial:
    """What is known of a trial.

    Attributes:
        number: its number in the study.
        state: one of :data:`ENDED`, ``"running"`` or ``"waiting"``.
        params: its parameters by dotted name.
        values: its objectives' values; empty as long as it has none.
        seconds: how long it took; None: it has not ended.
        reason: why it failed or was pruned.
        began: unix seconds of its start.
        step: the step of its last report (with folds: the fold's number).
        latest: what it reported then.
        folds: the state of each of its folds.
    """

    number: int
    state: str = "waiting"
    params: dict[str, Any] = field(default_factory=dict)
    values: tuple[float, ...] = ()
    seconds: float | None = None
    reason: str | None = None
    began: float = 0.0
    step: int | None = None
    latest: float | None = None
    folds: dict[int, str] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.state in ENDED

    def take(self, event: Event) -> None:
        """Take a ``trial`` event of this trial."""
        if event["state"] == "running" and self.state != "running":
            self.began, self.step, self.latest = event["t"], None, None
            self.folds.clear()
        self.state = event["state"]
        self.params = event.get("params") or self.params
        self.values = _values(event)
        self.seconds = event.get("seconds")
        self.reason = event.get("reason")


def _values(event: Event) -> tuple[float, ...]:
    """One value or several; none of a trial that has not ended well."""
    several = event.get("values")
    if several is None:
        several = [event.get("value")]
    return tuple(value for value in several if value is not None)
