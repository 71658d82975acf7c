"""Record when each job of a search ran, and which ran side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from nbtoolkit.run.events import (
    Event,
    FoldChanged,
    IntermediateReported,
    RunEnded,
    RunStarted,
    TrialChanged,
)
from nbtoolkit.study.table import STOPPED_BY_HAND
from nbtoolkit.views.chart import Points

_OVERLAP = 0.2  # seconds: a prepared job starts before the scheduler reports the end of the last


@dataclass
class FoldInfo:
    """What is known of a fold.

    Attributes:
        number: the fold's number.
        state: ``"waiting"``, ``"running"``, ``"complete"``, or how it ended.
        metrics: its scores, once it is complete.
        seconds: how long it took; None: it has not ended.
        curves: its reported values by step; of a trial's fold empty.
    """

    number: int
    state: str = "waiting"
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    curves: dict[str, Points] = field(default_factory=dict)


@dataclass
class JobSpan:
    """The time in which a trial or a fold ran.

    Attributes:
        number: the trial's number; of a cross-validation the fold's.
        fold: the fold's number; None: a trial without folds.
        begin: unix seconds.
        end: unix seconds; None: it is running.
        state: ``"running"``, or how it ended: the trial's or fold's state; ``"stopped"`` for a
            trial that was stopped by hand, ``"waiting"`` for a job that will run again.
    """

    number: int
    fold: int | None
    begin: float
    end: float | None = None
    state: str = "running"


class Timeline:
    """The spans of all jobs of a search, from its events.

    Attributes:
        last: unix seconds of the last event; 0 before the first.
    """

    def __init__(self) -> None:
        self.last = 0.0
        self._spans: dict[int, JobSpan] = {}
        self._open: dict[tuple[int, int | None], JobSpan] = {}
        self._rows: list[list[JobSpan]] = []  # empty: the spans have changed

    @property
    def spans(self) -> list[JobSpan]:
        """All spans, by begin."""
        return [*self._spans.values()]

    def update(self, event: Event) -> None:
        """Process one event; those of other types change only :attr:`last`."""
        match event:
            case IntermediateReported():  # the first case: most events are reports
                pass
            case TrialChanged():
                state = "stopped" if event.reason == STOPPED_BY_HAND else event.state
                self._change(event.number, None, state, event.t)
            case FoldChanged():
                number = event.fold if event.number is None else event.number
                if (trial := self._open.pop((number, None), None)) is not None:
                    del self._spans[id(trial)]  # the slots run its folds
                self._change(number, event.fold, event.state, event.t)
            case RunStarted():
                self.close(self.last)
            case RunEnded():
                self.close(event.t)
        self.last = event.t

    def close(self, at: float) -> None:
        """End all spans that are open."""
        self._rows = self._rows if not self._open else []
        for span in self._open.values():
            span.end, span.state = max(at, span.begin), "waiting"
        self._open.clear()

    def _change(self, number: int, fold: int | None, state: str, at: float) -> None:
        self._rows = []
        if state == "running":
            if (number, fold) not in self._open:
                span = self._open[number, fold] = JobSpan(number, fold, at)
                self._spans[id(span)] = span
        elif (ended := self._open.pop((number, fold), None)) is not None:
            ended.end, ended.state = max(at, ended.begin), state

    def rows(self, now: float) -> list[list[JobSpan]]:
        """Put the spans on the fewest rows on which none overlap: what each slot did.

        Args:
            now: unix seconds, the end of the spans that are open.
        """
        if not self._rows:
            self._rows = self._arranged()
        rows = [[*row] for row in self._rows]
        for row in rows:
            if row[-1].end is None:
                row[-1] = replace(row[-1], end=max(now, row[-1].begin))
        return rows

    def _arranged(self) -> list[list[JobSpan]]:
        rows: list[list[JobSpan]] = []
        for span in self._spans.values():
            row = next((row for row in rows if _follows(row[-1], span)), None)
            if row is None:
                rows.append(row := [])
            elif row[-1].end is not None and row[-1].end > span.begin:
                row[-1] = replace(row[-1], end=span.begin)
            row.append(span)
        return rows


def _follows(earlier: JobSpan, later: JobSpan) -> bool:
    """Whether two spans are one after the other; a short overlap is that of a prepared job."""
    end = math.inf if earlier.end is None else earlier.end
    return end - later.begin <= min(_OVERLAP, (end - earlier.begin) / 2)
