"""Tell from the times of a search's jobs which of them ran side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

_OVERLAP = 0.2  # seconds: a prepared job starts before the scheduler reports the end of the last


@dataclass
class JobSpan:
    """The time in which a trial or a fold ran.

    Attributes:
        number: the trial's number; None: a fold of a cross-validation.
        fold: the fold's number; None: a trial without folds.
        begin: unix seconds.
        end: unix seconds; None: it is running.
        state: ``"running"``, or how it ended: the trial's or fold's state; ``"stopped"`` for a
            trial that was stopped by hand, ``"waiting"`` for a job that will run again.
        metrics: a fold's scores, once it is complete.
        seconds: how long a fold took; None: it has not ended.
    """

    number: int | None
    fold: int | None
    begin: float
    end: float | None = None
    state: str = "running"
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None

    @property
    def name(self) -> str:
        """``"trial 3"``, ``"fold 2"``, or ``"trial 3, fold 2"``."""
        parts = {"trial": self.number, "fold": self.fold}
        return ", ".join(f"{what} {n}" for what, n in parts.items() if n is not None)

    def finish(self, at: float, state: str) -> None:
        """Note its end."""
        self.end, self.state = max(at, self.begin), state


def rows_of(spans: Sequence[JobSpan], now: float) -> list[list[JobSpan]]:
    """Put spans on the fewest rows on which none overlap: what each slot did.

    Args:
        spans: by begin.
        now: unix seconds, the end of the spans that are open.
    """
    rows: list[list[JobSpan]] = []
    for span in spans:
        row = next((row for row in rows if _follows(row[-1], span)), None)
        if row is None:
            rows.append(row := [])
        elif row[-1].end is not None and row[-1].end > span.begin:
            row[-1] = replace(row[-1], end=span.begin)
        row.append(span)
    for row in rows:
        if row[-1].end is None:
            row[-1] = replace(row[-1], end=max(now, row[-1].begin))
    return rows


def _follows(earlier: JobSpan, later: JobSpan) -> bool:
    """Whether two spans are one after the other; a short overlap is that of a prepared job."""
    end = math.inf if earlier.end is None else earlier.end
    return end - later.begin <= min(_OVERLAP, (end - earlier.begin) / 2)
