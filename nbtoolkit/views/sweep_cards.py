"""Render the cards of a sweep with its best trial and the charts of all its trials."""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate, combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import MissingExtra, SweepError
from nbtoolkit.study.importance import LEAST, Importance, fence, importance
from nbtoolkit.study.table import SweepTable, Trial
from nbtoolkit.text_table import (
    counted,
    duration,
    metric_column,
    number,
    param,
    setting,
    shortened,
)
from nbtoolkit.views.chart import (
    BEST,
    ENDED,
    FAILED,
    PALETTE,
    RUNNING,
    Axis,
    Mark,
    Series,
    chart,
    thinned,
)
from nbtoolkit.views.markup import (
    card,
    data_table,
    headline,
    paragraph,
    property_table,
    tiles,
    view,
)
from nbtoolkit.views.runs import read_annotations
from nbtoolkit.views.state import State
from nbtoolkit.views.text import differing, fixed
from nbtoolkit.views.trial_rows import (
    View,
    colour_of,
    short_names,
    table_html,
    title_of,
    trial_page,
    value_of,
)

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

_LINES, _SELECTED = 200, 50  # learning curves; above that so many of the best and the newest
_LINE_POINTS = 4000  # points of all learning curves together
_SLICES, _COMPLETE, _OTHERS = 8, 100, 40  # slices, and the trials of each
_PAIRS = 3  # charts of two objectives
_FENCE = 3.0  # interquartile ranges: https://en.wikipedia.org/wiki/Outlier#Tukey's_fences
_DOTS = 200  # marks of a state


# --- best trial ---


def best_card(state: State, table: SweepTable) -> str:
    """Render the best trial's value and parameters."""
    title = f"Best {state.metric}"
    note = f"{'higher' if state.direction == 'maximize' else 'lower'} is better"
    if not table.best:
        return card(title, paragraph("No trial is complete yet."), note=note)
    trial = table.best[0]
    names = short_names([*trial.params])
    facts = [f"step {trial.step}"] if trial.step is not None else []
    facts += [duration(trial.seconds)] if trial.seconds is not None else []
    body = headline(fixed(value_of(trial)))
    body += paragraph(f"trial {trial.number} · {_age(table, trial)}", faint=True)
    body += paragraph(" · ".join(facts), faint=True)
    body += property_table({names[name]: param(value) for name, value in trial.params.items()})
    return card(title, body, note=note)


def _age(table: SweepTable, trial: Trial) -> str:
    """How many trials ended after the best one: a reader sees whether it still improves."""
    ended = table.last(len(table.trials))
    since = ended.index(trial) if trial in ended else 0
    return f"{counted(since, 'trial')} ago" if since else "the newest"


# --- charts of all trials ---


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
    """The values of an objective in the complete trials, by number."""
    trials = [trial for trial in table.trials.values() if trial.state == "complete"]
    values = {trial.number: value_of(trial, objective) for trial in trials}
    return {number: value for number, value in sorted(values.items()) if value is not None}


def history_card(table: SweepTable, axes: Sequence[Axis]) -> str:
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
    return card("Each trial, best so far", _titled(pictures, axes, 240), span=2)


def _titled(pictures: Sequence[str], axes: Sequence[Axis], least: int) -> str:
    """Place the charts of several objectives beside each other, each below its name."""
    if len(pictures) == 1:
        return pictures[0]
    names = [paragraph(shortened(axis.label, 40)) for axis in axes]
    return tiles([name + picture for name, picture in zip(names, pictures, strict=True)], least)


def front_card(table: SweepTable, axes: Sequence[Axis]) -> str:
    """Draw the trials by two objectives at a time, with those that no other beats marked.

    The arguments are those of :func:`history_card`.
    """
    ways = ", ".join(f"{way} {m}" for m, way in zip(table.metrics, table.directions, strict=True))
    text = f"★ {counted(len(table.best), 'trial')} that no other beats; {ways}"
    pictures = []
    for first, second in [*combinations(range(len(axes)), 2)][:_PAIRS]:
        values = {trial: value_of(trial, first) for trial in table.trials.values()}
        at = {trial: value for trial, value in values.items() if value is not None}
        marks = _marks(table, at, None, second)
        picture = chart(marks, x=axes[first], y=axes[second], legend=True)
        pictures.append(paragraph(shortened(axes[second].label, 40)) + picture)
    return card("Pareto front", paragraph(text) + tiles(pictures, 240), span=2)


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
    """A mark for each trial with a value, by state.

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


def curves_card(state: State, table: SweepTable, axis: Axis) -> str:
    """Draw all trials' reports by step; of many the best, the running and the newest ones."""
    shown, which = _with_curves(state, table)
    if not shown:
        return ""
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
    return card("Learning curves", picture, span=2, note=which)


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


# --- slices ---


def slices_card(state: State, table: SweepTable, axes: Sequence[Axis]) -> str:
    """Draw the values by each parameter; the important ones first, once they can be told.

    Args:
        state: of the sweep.
        table: its trials.
        axes: of the objectives: from :func:`value_axis`.
    """
    space = {name: written for name, written in state.space.items() if "value" not in written}
    names = [*(space or dict.fromkeys(n for t in table.trials.values() for n in t.params))]
    drawn = [trial for trial in table.trials.values() if value_of(trial) is not None]
    if not names or not drawn:
        return ""
    known = IMPORTANCES.of(state)
    shares = {share.name: share for share in known.shares} if known else {}
    names.sort(key=lambda name: -shares[name].value if name in shares else 0.0)
    complete = [trial for trial in drawn if trial.state == "complete"]
    others = [trial for trial in drawn if trial.state not in ("complete", "running")]
    trials = [*thinned(others, _OTHERS), *thinned(complete, _COMPLETE), *table.running, *table.best]
    labels = short_names(names)
    cards = []
    most = max(_SLICES // len(axes), 1)
    for name in names[:most]:
        across, at = _positions(space.get(name, {}), [t for t in trials if name in t.params], name)
        pictures = [
            chart(_marks(table, at, None, objective), x=across, y=axis, size=(240, 140))
            for objective, axis in enumerate(axes)
        ]
        share = shares.get(name)
        note = f"{share.value:.2f}" if share else ""
        cards.append(card(labels[name], _titled(pictures, axes, 150), note=note))
    notes = ["Importance of the parameters by fANOVA.", *known.notes()] if known else []
    if len(names) > most:
        notes = [*notes, f"{most} of {len(names)} parameters are drawn."]
    below = paragraph(" ".join(notes), faint=True) if notes else ""
    return view(tiles(cards, 180 * min(len(axes), 2)), below)


def _positions(
    parameter: Mapping[str, Any], trials: Sequence[Trial], name: str
) -> tuple[Axis, dict[Trial, float]]:
    """The axis of a parameter, and each trial's position on it."""
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


# --- importance ---

_GROWTH = 1.25  # recomputed when there are so many times the trials of the last time


class ImportanceCache:
    """The importance of each sweep's parameters, computed where the caller wants it to be.

    The computation imports Optuna and takes 0.4 to 2.4 s of CPU, so a panel has it computed later
    and draws the charts meanwhile.
    """

    def __init__(self) -> None:
        # Importance, the number of complete trials that it is from, and whether the sweep was live.
        self._computed: dict[Path, tuple[Importance | None, int, bool]] = {}
        self._computing: set[Path] = set()

    def of(self, state: State) -> Importance | None:
        """Return what was computed last; None: nothing yet, or it cannot be told."""
        last = self._computed.get(state.paths.folder)
        return last[0] if last else None

    def due(self, state: State) -> bool:
        """Whether a quarter more trials are complete than last time, or the sweep has ended."""
        if state.kind != "sweep" or len(state.values) < LEAST or find_spec("optuna") is None:
            return False
        last = self._computed.get(state.paths.folder)
        if last is None or len(state.values) >= last[1] * _GROWTH:
            return True
        return last[2] and not state.live and len(state.values) > last[1]

    def compute(self, state: State) -> None:
        """Compute it from the complete trials of now."""
        folder, count, live = state.paths.folder, len(state.values), state.live
        try:
            maximize = state.direction == "maximize"
            computed = importance(_optuna_trials(state), maximize=maximize)
        except (SweepError, ValueError, MissingExtra):
            computed = None  # all values are equal, sweep.yaml was changed, or no scikit-learn
        self._computed[folder] = computed, count, live

    def compute_later(self, state: State, done: Callable[[], None]) -> None:
        """Compute it in a thread if it is due, and then call ``done`` there."""
        folder = state.paths.folder
        if not self.due(state) or folder in self._computing:
            return

        def compute() -> None:
            try:
                self.compute(state)
                done()
            except RuntimeError:
                pass  # a trial ended meanwhile: the next look tries again
            finally:
                self._computing.discard(folder)

        self._computing.add(folder)
        # A daemon: the kernel's exit does not wait for it.
        threading.Thread(target=compute, name="nbtoolkit-importance", daemon=True).start()


IMPORTANCES = ImportanceCache()
"""What all views of this process share."""


def _optuna_trials(state: State) -> list[FrozenTrial]:
    """Make the complete trials, and one for each that was pruned."""
    from optuna.trial import TrialState, create_trial

    from nbtoolkit.study.space import Space

    assert isinstance(state.table, SweepTable)
    if not state.space:
        return []
    space = Space(state.space)
    trials = [create_trial(state=TrialState.PRUNED)] * state.table.count("pruned")
    for index, value in sorted(state.values.copy().items()):
        params = space.encode(state.table.trials[index].params)
        kinds: dict[str, BaseDistribution] = {name: space.distributions[name] for name in params}
        trials.append(create_trial(params=params, distributions=kinds, value=value))
    return trials


# --- table, comparison ---


def trials_card(state: State, chosen: View, now: float) -> str:
    """Render a page of the table of trials."""
    page = trial_page(state, chosen, now)
    if not page.rows:
        return card("Trials", paragraph("No trial has started yet.", faint=True), span=4)
    return card("Trials", table_html(page, chosen), span=4, note=page.text)


def compare_card(state: State, table: SweepTable, ticked: Sequence[int]) -> str:
    """Compare trials: their curves, their values and the settings that differ; empty below two."""
    trials = [table.trials[n] for n in dict.fromkeys(ticked) if n in table.trials][: len(PALETTE)]
    if len(trials) < 2:
        return ""
    lines = [
        Series(f"trial {t.number}", state.trials.get(t.number, []), colour=colour)
        for t, colour in zip(trials, PALETTE, strict=False)
    ]
    names = {name for t in trials for name in t.params}
    differ = differing([t.params for t in trials])
    rows = [
        [state.metric, *metric_column([value_of(t) for t in trials])],
        ["state", *(t.label for t in trials)],
        ["time", *("" if t.seconds is None else duration(t.seconds) for t in trials)],
        *differ,
    ]
    notes = read_annotations(state.paths.folder).notes
    if any(str(t.number) in notes for t in trials):
        rows.append(["note", *(notes.get(str(t.number), "") for t in trials)])
    body = data_table(["", *(f"trial {t.number}" for t in trials)], rows)
    if same := len(names) - len(differ):
        body += paragraph(f"{counted(same, 'setting')} of the space: equal.", faint=True)
    picture = chart(lines, y=Axis(label=state.metric), legend=True)
    return card("Compare", tiles([picture, body], 280), span=4)
