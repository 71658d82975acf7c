"""Importances: how much of the values' variance each parameter explains, as bars."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.errors import MissingExtra, RunFileError, SweepError
from nbtoolkit.search.importance import LEAST, importance
from nbtoolkit.search.sweep_result import read_wishes
from nbtoolkit.search.table import SweepTable
from nbtoolkit.views.markup import bar, boxed, said, wrong
from nbtoolkit.views.state import State

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

_GROWN = 1.25  # times as many trials as when it was last computed


class Importances:
    """The bars of a sweep, computed anew when there are a quarter more trials, and at its end."""

    def __init__(self) -> None:
        self._of: tuple[Path, bool, int] | None = None
        self._html = ""

    def html(self, state: State | None) -> str:
        """The bars as HTML; empty where there are none to show."""
        if state is None or not isinstance(state.table, SweepTable):
            return ""
        here = (state.paths.folder, state.live, len(state.values))
        if self._of is None or self._of[:2] != here[:2] or here[2] >= self._of[2] * _GROWN:
            self._html, self._of = importances(state), here
        return self._html


def importances(state: State) -> str:
    """The bars of a sweep as HTML; Optuna is imported for it. Empty below ten complete trials."""
    if len(state.values) < LEAST or find_spec("optuna") is None:
        return ""
    try:
        found = importance(_trials(state), maximize=state.direction == "maximize")
    except (SweepError, ValueError):  # equally good trials; sweep.yaml was changed
        return ""
    except MissingExtra as error:
        return boxed(wrong(str(error)))
    lines = [bar(one.value, f"{one.name}: {one.text}") for one in found.shares]
    heading = said(f"Importance for {state.metric}", strong=True)
    return boxed(heading, *lines, *(said(note) for note in found.notes()))


def _trials(state: State) -> list[FrozenTrial]:
    """The trials that have ended well, and one for each that was pruned."""
    from optuna.trial import TrialState, create_trial

    assert isinstance(state.table, SweepTable)
    try:
        space = read_wishes(state.paths.folder).make_space()
    except RunFileError:  # gone, or damaged
        return []
    known = space.distributions()
    found = [create_trial(state=TrialState.PRUNED)] * state.table.count("pruned")
    for number, value in sorted(state.values.items()):
        params = space.stored(state.table.trials[number].params)
        kinds = {name: known[name] for name in params}
        found.append(create_trial(params=params, distributions=kinds, value=value))
    return found
