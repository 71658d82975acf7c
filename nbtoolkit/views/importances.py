"""Importances: how much of the values' variation each parameter explains, by Optuna, as bars."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from yaml import YAMLError

from nbtoolkit.errors import SpaceError
from nbtoolkit.search.space import Space
from nbtoolkit.search.sweep_result import load_yaml
from nbtoolkit.search.table import SweepTable
from nbtoolkit.views.markup import bar, boxed, said
from nbtoolkit.views.state import State

if TYPE_CHECKING:
    import optuna

_LEAST = 4  # Optuna calls all parameters equal with fewer
_TRIALS = 300  # of the newest: 60 ms of CPU; 1,000 take 230
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
    """The bars of a sweep as HTML, of its newest complete trials; Optuna is imported for it."""
    if len(state.values) < _LEAST or find_spec("optuna") is None:
        return ""
    shares = _shares(state)
    if not shares:
        return ""
    ordered = sorted(shares.items(), key=lambda pair: -pair[1])
    lines = [bar(share, f"{name}: {share:.2f}") for name, share in ordered]
    return boxed(said(f"Importance for {state.metric}", strong=True), *lines)


def _shares(state: State) -> dict[str, float]:
    """Parameter -> share of the variation; empty where it cannot be told."""
    from optuna.importance import get_param_importances

    try:
        trials = _trials(state)
        if len({trial.value for trial in trials}) < 2:
            return {}  # all are equally good
        study = _study(state.direction)
        study.add_trials(trials)
        return dict(get_param_importances(study))
    except (
        ValueError,
        RuntimeError,
    ):  # sweep.yaml was changed, or there is too little to tell from
        return {}


def _study(direction: str) -> optuna.Study:
    """A study in memory: the sweep's file is left in peace, and no line of Optuna's is shown."""
    import optuna
    from optuna.study import StudyDirection

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(direction=StudyDirection[direction.upper()])
    finally:
        optuna.logging.set_verbosity(before)


def _trials(state: State) -> list[optuna.trial.FrozenTrial]:
    from optuna.trial import create_trial

    assert isinstance(state.table, SweepTable)
    try:
        space = Space(load_yaml(state.paths.folder / "sweep.yaml")["space"])
    except (OSError, YAMLError, SpaceError, KeyError, TypeError):  # gone, or damaged
        return []
    known, found = space.distributions(), []
    for number, value in sorted(state.values.items())[-_TRIALS:]:
        params = space.stored(state.table.trials[number].params)
        kinds = {name: known[name] for name in params}
        found.append(create_trial(params=params, distributions=kinds, value=value))
    return found
