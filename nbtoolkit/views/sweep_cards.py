"""Render the cards of a sweep with its best trial and the charts of all its trials."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate, combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.cards import BEST, ENDED, FAILED, RUNNING, Card, Part, Properties, Text, Tiles
from nbtoolkit.errors import MissingExtra, SweepError
from nbtoolkit.search.study.importance import LEAST, Importance, fence, importance
from nbtoolkit.search.study.table import SweepTable, Trial
from nbtoolkit.text_table import counted, duration, number, param, setting, shortened
from nbtoolkit.views.chart import Axis, Mark, Series, chart, thinned
from nbtoolkit.views.state import State
from nbtoolkit.views.text import fixed
from nbtoolkit.views.trial_rows import (
    View,
    colour_of,
    short_names,
    title_of,
    trial_page,
    value_of,
)

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

# learning curves; above that so many of the best and the newest
_LINES = 200
_SELECTED = 50
_LINE_POINTS = 4000  # points of all learning curves together
# slices, and the trials of each
_SLICES = 8
_COMPLETE = 100
_OTHERS = 40
_PAIRS = 3  # charts of two objectives
_FENCE = 3.0  # interquartile ranges: https://en.wikipedia.org/wiki/Outlier#Tukey's_fences
_DOTS = 200  # marks of a state


def best_card(state: State, table: SweepTable) -> Card:
    """Show the best trial's value and parameters."""
    title = f"Best {state.metric}"
    note = f"{'higher' if state.direction == 'maximize' else 'lower'} is better"
    if not table.best:
        return Card(title, [Text("No trial is complete yet.")], note=note)
    trial = table.best[0]
    names = short_names([*trial.params])
    facts = [f"step {trial.step}"] if trial.step is not None else []
    facts += [duration(trial.seconds)] if trial.seconds is not None else []
    parts: list[Part] = [
        Text(fixed(value_of(trial)), "headline"),
        Text(f"trial {trial.number} · {_age(table, trial)}", "faint"),
        Text(" · ".join(facts), "faint"),
        Properties({names[name]: param(value) for name, value in trial.params.items()}),
    ]
    return Card(title, parts, note=note)


def _age(table: SweepTable, trial: Trial) -> str:
    """How many trials ended after the best one: a reader sees whether it still improves."""
    ended = table.last(len(table.trials))
    since = ended.index(trial) if trial in ended else 0
    return f"{counted(since, 'trial')} ago" if since else "the newest"


def value_axis(state: State, table: SweepTable, objective: int = 0) -> Axis:
    """Return the axis of a metric: to the worst complete value and 15 % of the range beyond.

    A complete trial that diverged counts as Tukey's outer fence. What lies beyond is drawn on the
    edge.
    """
    label = table.metrics[objective]
    sign = -1.0 if table.directions[objective] == "maximize" else 1.0
    costs = sorted(sign * value for value in _complete(table, objective).values())
    if len(costs) < 2 or costs[0] == costs[-1]:
        return Axis(label=label)
    worst = min(costs[-1], fence(costs, _FENCE)) if len(costs) >= 8 else costs[-1]
    # A trial may have been better before its end; of many trials the ends are enough.
    few = len(state.trials) <= _LINES
    reports = (points if few else points[-1:] for points in state.trials.values())
    seen = [sign * value for points in reports for _, value in points]
    best = min([costs[0], *filter(math.isfinite, seen)])
    width = worst - best
    low, high = sorted((sign * (best - 0.05 * width), sign * (worst + 0.15 * width)))
    return Axis(label=label, low=low, high=high)


def _complete(table: SweepTable, objective: int) -> dict[int, float]:
    """Return the values of an objective in the complete trials, by number."""
    trials = [trial for trial in table.trials.values() if trial.state == "complete"]
    values = {trial.number: value_of(trial, objective) for trial in trials}
    return {number: value for number, value in sorted(values.items()) if value is not None}


def history_card(table: SweepTable, axes: Sequence[Axis]) -> Card:
    """Draw each trial's value by its number, with the best value so far; a chart per objective.

    Args:
        table: the trials.
        axes: of the objectives, which all charts share: from :func:`value_axis`.
    """
    pictures = []
    numbers = {trial: float(trial.number) for trial in table.trials.values()}
    for objective, axis in enumerate(axes):
        values = _complete(table, objective)
        better = max if table.directions[objective] == "maximize" else min
        best = accumulate(values.values(), better)
        so_far = [(float(n), value) for n, value in zip(values, best, strict=True)]
        so_far += [(max(numbers.values()), so_far[-1][1])] if so_far else []
        marks = _marks(table, numbers, axis.high, objective)
        lines = [Series("best so far", so_far, "steps", BEST), *marks]
        pictures.append(chart(lines, x=Axis("trial", integer=True), y=axis, legend=True))
    return Card("Each trial, best so far", _titled(pictures, axes, 240), span=2)


def _titled(pictures: Sequence[Part], axes: Sequence[Axis], least: int) -> list[Part]:
    """Place the charts of several objectives beside each other, each below its name."""
    if len(pictures) == 1:
        return [*pictures]
    names = [Text(shortened(axis.label, 40)) for axis in axes]
    return [Tiles([*zip(names, pictures, strict=True)], least)]


def front_card(table: SweepTable, axes: Sequence[Axis]) -> Card:
    """Draw the trials by two objectives at a time, with those that no other beats marked.

    The arguments are those of :func:`history_card`.
    """
    ways = ", ".join(f"{way} {m}" for m, way in zip(table.metrics, table.directions, strict=True))
    text = f"★ {counted(len(table.best), 'trial')} that no other beats; {ways}"
    groups = []
    for first, second in [*combinations(range(len(axes)), 2)][:_PAIRS]:
        values = {trial: value_of(trial, first) for trial in table.trials.values()}
        at = {trial: value for trial, value in values.items() if value is not None}
        marks = _marks(table, at, None, second)
        picture = chart(marks, x=axes[first], y=axes[second], legend=True)
        groups.append([Text(shortened(axes[second].label, 40)), picture])
    return Card("Pareto front", [Text(text), Tiles(groups, 240)], span=2)


_MARKS: dict[str, tuple[Mark, str]] = {
    "complete": ("dots", ENDED),
    "pruned": ("crosses", ENDED),
    "failed": ("crosses", FAILED),
    "running": ("dots", RUNNING),
    "best": ("ring", BEST),
}
"""Mark and colour of each state; those that matter most are drawn last."""


def _marks(
    table: SweepTable, at: Mapping[Trial, float], edge: float | None, objective: int
) -> list[Series]:
    """Return a mark for each trial with a value, by state.

    Args:
        table: the trials.
        at: each trial's position.
        edge: the value at which failed trials are drawn; None: they are not.
        objective: whose value is drawn, from 0.
    """
    groups: dict[str, list[tuple[float, float, Trial]]] = {name: [] for name in _MARKS}
    for trial, x in at.items():
        name = "best" if trial in table.best else trial.state
        y = edge if name == "failed" else value_of(trial, objective)
        if y is not None and name in groups:
            groups[name].append((x, y, trial))
    series = []
    for name, (mark, colour) in _MARKS.items():
        shown = thinned(groups[name], _DOTS)
        titles = [title_of(trial) for *_, trial in shown]
        series.append(Series(name, [(x, y) for x, y, _ in shown], mark, colour, titles))
    return series


def curves_card(state: State, table: SweepTable, axis: Axis) -> Card | None:
    """Draw all trials' reports by step; of many the best, the running and the newest ones."""
    shown, which = _with_curves(state, table)
    if not shown:
        return None
    most = max(_LINE_POINTS // len(shown), 12)
    lines = []
    for trial in sorted(shown, key=lambda t: (t in table.best, t.state == "running")):
        title = f"trial {trial.number}: {number(value_of(trial))}, {trial.label}"
        colour = colour_of(table, trial)
        name = {BEST: "best", RUNNING: "running", FAILED: "failed"}.get(colour, "ended")
        points = thinned(state.trials[trial.number], most)
        lines.append(Series(name, points, "line", colour, [title], faint=colour == ENDED))
    steps = Axis("step", integer=True)
    picture = chart(lines, x=steps, y=axis, legend=True)
    return Card("Learning curves", [picture], span=2, note=which)


def _with_curves(state: State, table: SweepTable) -> tuple[list[Trial], str]:
    trials = [table.trials[n] for n, points in state.trials.items() if points and n in table.trials]
    if len(trials) <= _LINES:
        return trials, f"all {counted(len(trials), 'trial')}"
    sign = -1.0 if state.direction == "maximize" else 1.0
    best = heapq.nsmallest(_SELECTED, state.values, key=lambda n: sign * state.values[n])
    numbers = {*best, *(t.number for t in [*table.running, *table.best, *table.last(_SELECTED)])}
    shown = [trial for trial in trials if trial.number in numbers]
    note = f"the best {_SELECTED}, the running and the newest {_SELECTED} of {len(trials)} trials"
    return shown, note


def slices_card(state: State, table: SweepTable, axes: Sequence[Axis]) -> Card | None:
    """Draw the values by each parameter, in the order of the space.

    Args:
        state: of the sweep.
        table: its trials.
        axes: of the objectives: from :func:`value_axis`.
    """
    space = {name: written for name, written in state.space.items() if "value" not in written}
    names = [*(space or dict.fromkeys(n for t in table.trials.values() for n in t.params))]
    drawn = [trial for trial in table.trials.values() if value_of(trial) is not None]
    if not names or not drawn:
        return None
    complete = [trial for trial in drawn if trial.state == "complete"]
    others = [trial for trial in drawn if trial.state not in ("complete", "running")]
    trials = [*thinned(others, _OTHERS), *thinned(complete, _COMPLETE), *table.running, *table.best]
    labels = short_names(names)
    groups: list[list[Part]] = []
    most = max(_SLICES // len(axes), 1)
    for name in names[:most]:
        across, at = _positions(space.get(name, {}), [t for t in trials if name in t.params], name)
        pictures = [
            chart(_marks(table, at, None, objective), x=across, y=axis, size=(240, 140))
            for objective, axis in enumerate(axes)
        ]
        groups.append([Text(labels[name], "bold"), *_titled(pictures, axes, 150)])
    note = f"{most} of {len(names)} parameters" if len(names) > most else ""
    tiles = Tiles(groups, 180 * min(len(axes), 2))
    return Card("Values by parameter", [tiles], span=4, note=note)


def _positions(
    parameter: Mapping[str, Any], trials: Sequence[Trial], name: str
) -> tuple[Axis, dict[Trial, float]]:
    """Return the axis of a parameter, and each trial's position on it."""
    values = {trial: trial.params[name] for trial in trials}
    numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values.values())
    if numeric and "choices" not in parameter:
        axis = Axis(
            low=parameter.get("low"),
            high=parameter.get("high"),
            log=parameter.get("log", False),
            integer=parameter.get("type") == "int",
        )
        return axis, {trial: float(value) for trial, value in values.items()}
    texts = {trial: _choice(value) for trial, value in values.items()}
    choices = map(_choice, parameter.get("choices", ()))
    order = {
        text: float(index) for index, text in enumerate(dict.fromkeys([*choices, *texts.values()]))
    }
    return Axis(choices=tuple(order)), {trial: order[text] for trial, text in texts.items()}


def _choice(value: object) -> str:
    return setting(list(value) if isinstance(value, tuple) else value)


_computed: dict[tuple[Path, int], Importance | None] = {}
"""By the folder of a sweep and its number of complete trials; None: it cannot be told."""


def importance_card(state: State, table: SweepTable) -> Card | None:
    """Show the importance of each parameter of a sweep that has ended; None: it has not.

    The computation imports Optuna and takes 0.4 to 2.4 s of CPU, so no page of a live sweep has it.
    """
    if state.live or len(table.metrics) > 1 or find_spec("optuna") is None:
        return None
    title = f"Importance for {shortened(state.metric, 40)}"
    complete = len(state.values)
    if complete < LEAST:
        return Card(title, [Text(f"Cannot tell yet: {complete} of {LEAST} complete trials.")])
    key = (state.paths.folder, complete)
    if key not in _computed:
        _computed[key] = _importance(state, table)
    told = _computed[key]
    if told is None:
        return None
    shares = {shortened(share.name, 40): f"{share.value:.2f}" for share in told.shares}
    return Card(title, [Properties(shares), Text(" ".join(told.notes()), "faint")], note="fANOVA")


def _importance(state: State, table: SweepTable) -> Importance | None:
    try:
        return importance(_optuna_trials(state, table), maximize=state.direction == "maximize")
    except (SweepError, ValueError, MissingExtra):
        return None  # all values are equal, sweep.yaml was changed, or no scikit-learn


def _optuna_trials(state: State, table: SweepTable) -> list[FrozenTrial]:
    """Make the complete trials, and one for each that was pruned."""
    from optuna.trial import TrialState, create_trial

    from nbtoolkit.search.study.space import Space

    if not state.space:
        return []
    space = Space(state.space)
    trials = [create_trial(state=TrialState.PRUNED)] * table.count("pruned")
    for index, value in sorted(state.values.items()):
        params = space.encode(table.trials[index].params)
        kinds: dict[str, BaseDistribution] = {name: space.distributions[name] for name in params}
        trials.append(create_trial(params=params, distributions=kinds, value=value))
    return trials


def trials_card(state: State, chosen: View, now: float) -> Card:
    """Show a page of the table of trials."""
    page = trial_page(state, chosen, now)
    if not page.table.rows:
        return Card("Trials", [Text("No trial has started yet.", "faint")], span=4)
    return Card("Trials", [page.table], span=4, note=page.text)
