"""Summarise a cross-validation from its events (the scores of folds, their mean)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from html import escape

from nbtoolkit.run.events import Event, FoldChanged, RunEnded, RunStarted
from nbtoolkit.study.table import short
from nbtoolkit.text_table import html_columns, text_columns


class FoldTable:
    """A cross-validation as a table, for a cell (HTML) or as text.

    Args:
        name: what it is called.
        folds: how many folds there are; None: not known.
    """

    def __init__(self, *, name: str = "cross-validation", folds: int | None = None) -> None:
        self.name, self.folds = name, folds
        self.status = "running"
        """How it ended, once it has."""
        self._folds: dict[int, FoldChanged] = {}

    def read(self, events: Iterable[Event]) -> None:
        """Take new events, in their order."""
        for event in events:
            self.take(event)

    def take(self, event: Event) -> None:
        """Take one event; those of other kinds change nothing."""
        match event:
            case FoldChanged(number=None):
                self._folds[event.fold] = event
            case RunStarted():
                self.status = "running"
            case RunEnded():
                self.status = event.status

    def summary(self) -> str:
        """One line: how many folds are done, and the mean and standard deviation of each score."""
        done = [fold for fold in self._folds.values() if fold.state == "complete"]
        of = f" of {self.folds}" if self.folds is not None else ""
        scores = [f"{name} {_spread(self._scores(name))}" for name in self._names()]
        ended = [self.status] if self.status != "running" else []
        return f"{self.name}: " + "; ".join([f"{len(done)}{of} folds", *scores, *ended])

    def text(self) -> str:
        """Summary and table as lines of text."""
        header, rows = self._columns()
        return self.summary() + ("\n" + text_columns(header, rows) if rows else "")

    def html(self) -> str:
        """Summary and table for a cell; all values escaped."""
        header, rows = self._columns()
        return f"<p>{escape(self.summary())}</p>" + (html_columns(header, rows) if rows else "")

    def line(self, event: Event) -> str | None:
        """An event as a line of text: a fold that ended; None for every other event."""
        if not isinstance(event, FoldChanged) or event.state == "running":
            return None
        scores = [f"{name} {short(value)}" for name, value in event.metrics.items()]
        return "  ".join([f"fold {event.fold}", event.state, *scores])

    def _columns(self) -> tuple[list[str], list[list[str]]]:
        names = self._names()
        folds = sorted(self._folds.items())
        rows = [self._row(number, fold, names) for number, fold in folds]
        return ["fold", "state", *names, "seconds"], rows

    def _row(self, number: int, fold: FoldChanged, names: Sequence[str]) -> list[str]:
        values = [short(fold.metrics[name]) if name in fold.metrics else "" for name in names]
        seconds = "" if fold.seconds is None else f"{fold.seconds:.1f}"
        return [str(number), fold.state, *values, seconds]

    def _names(self) -> list[str]:
        """The scores of all folds, in the order in which they came."""
        return list(dict.fromkeys(name for fold in self._folds.values() for name in fold.metrics))

    def _scores(self, name: str) -> list[float]:
        """The score of the folds that are done."""
        done = (fold for fold in self._folds.values() if fold.state == "complete")
        return [fold.metrics[name] for fold in done if name in fold.metrics]


def _spread(scores: Sequence[float]) -> str:
    if len(scores) < 2:
        return short(scores[0]) if scores else "-"
    return f"{short(statistics.fmean(scores))} ± {short(statistics.stdev(scores))}"
