"""Curves: what was reported by step, and the values of trials by their number."""

from __future__ import annotations

from itertools import accumulate

from nbtoolkit.report.curves import group
from nbtoolkit.report.story import Points
from nbtoolkit.search.plots import COLOURS
from nbtoolkit.search.table import SweepTable
from nbtoolkit.views.markup import boxed
from nbtoolkit.views.state import State
from nbtoolkit.views.svg import Mark, Series, chart

_PANELS, _LINES = 6, len(COLOURS) - 2  # the last two are too near to the third and the second


def curves(state: State | None) -> str:
    """A run's metrics, or the reports of a sweep's newest and best trials, as HTML with SVG."""
    if state is None or state.kind == "cv":
        return ""
    if isinstance(state.table, SweepTable):
        return boxed(chart(f"{state.metric} while training", _trial_lines(state, state.table)))
    groups: dict[str, list[Series]] = {}
    for name, points in state.points().items():
        mark: Mark = "dashed" if name.startswith("train_") else "line"
        groups.setdefault(group(name), []).append(Series(name, points, mark))
    shown = list(groups.items())[:_PANELS]
    return boxed(*(chart(name, lines) for name, lines in shown))


def history(state: State | None) -> str:
    """Each trial's value by its number, with the best so far, as HTML with SVG."""
    if state is None or not isinstance(state.table, SweepTable):
        return ""
    pruned = [
        (float(number), points[-1][1])
        for number, points in sorted(state.trials.items())
        if points and state.table.trials[number].state == "pruned"
    ]
    values = sorted((float(number), value) for number, value in state.values.items())
    lines = [
        Series("complete", values, "dots", COLOURS[0]),
        Series("pruned, as last reported", pruned, "crosses", COLOURS[4]),
        Series("best so far", _best_so_far(values, state.direction), "steps", COLOURS[1]),
    ]
    return boxed(chart(f"{state.metric} of each trial", lines, along="trial"))


def _best_so_far(values: Points, direction: str) -> Points:
    best = accumulate((value for _, value in values), max if direction == "maximize" else min)
    return list(zip((number for number, _ in values), best, strict=True))


def _trial_lines(state: State, table: SweepTable) -> list[Series]:
    """The best trial, those that run, and those that ended last."""
    wanted = [*table.best[:1], *table.running, *table.last(_LINES)]
    numbers = dict.fromkeys(one.number for one in wanted if state.trials.get(one.number))
    return [Series(f"trial {n}", list(state.trials[n])) for n in list(numbers)[:_LINES]]
