"""Importance of parameters: one rule for plot, panel and report; ranges and doubts."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import optuna
import pytest
from harmless import assert_harmless
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial
from run_folders import NOON, write_run

from nbtoolkit.errors import SweepError
from nbtoolkit.report.run_summary import read_run_summary
from nbtoolkit.report.section import Picture
from nbtoolkit.report.sections import sweeps
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.study.plots import plot_importances
from nbtoolkit.study.storage import FILE, open_journal
from nbtoolkit.views.state import read_state
from nbtoolkit.views.tabs import ImportanceCache, importances

SPACE: dict[str, BaseDistribution] = {
    "optim.lr": FloatDistribution(1e-4, 1e-1, log=True),
    "model.hidden": IntDistribution(8, 128, log=True),
    "model.dropout": FloatDistribution(0.0, 0.5),
}
SWEEP_CONFIG = """
study: {name: mine, metric: rmse, direction: minimize, sampler: random, pruner: median}
budget: {n_trials: 40}
space:
  optim.lr: {type: float, low: 1.0e-4, high: 1.0e-1, log: true}
  model.hidden: {type: int, low: 8, high: 128, log: true}
  model.dropout: {type: float, low: 0.0, high: 0.5}
"""
Params = Mapping[str, Any]


@pytest.fixture(autouse=True)
def _no_window() -> Iterator[None]:
    before = matplotlib.get_backend()
    matplotlib.use("Agg")
    yield
    matplotlib.use(before)


def by_rate(params: Params) -> float:
    """The learning rate decides; the rest adds a little; dropout does nothing."""
    return abs(math.log10(params["optim.lr"]) + 2) + 0.002 * params["model.hidden"]


def by_both(params: Params) -> float:
    """Two parameters decide alike; a third does nothing."""
    hidden = math.log(params["model.hidden"] / 8) / math.log(16)
    return (math.log10(params["optim.lr"]) + 4) / 3 + hidden


def study_of(
    value: Callable[[Params], float],
    complete: int,
    *,
    pruned: int = 0,
    space: Mapping[str, BaseDistribution] = SPACE,
    storage: Any = None,
    seed: int = 0,
) -> optuna.Study:
    """A real study of random trials; the pruned ones come last."""
    sampler = optuna.samplers.RandomSampler(seed=seed)
    study = optuna.create_study(sampler=sampler, storage=storage)
    for number in range(complete + pruned):
        trial = study.ask(dict(space))
        if number < complete:
            study.tell(trial, value(trial.params))
        else:
            trial.report(1.0, 0)
            study.tell(trial, state=TrialState.PRUNED)
    return study


def folder_of(home: Path, study: optuna.Study, metric: str = "rmse") -> RunPaths:
    """The folder of a sweep with the study's trials, as its scheduler would have written it."""
    events: list[dict[str, Any]] = [{"type": "run"}]
    for one in study.trials:
        state = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned"}[one.state]
        event = {"type": "trial", "number": one.number, "state": state, "value": one.value}
        events.append({**event, "params": one.params, "seconds": 1.0})
    paths = write_run(home, "sweep-0001", about={"kind": "sweep"}, events=events)
    (paths.folder / "sweep.yaml").write_text(SWEEP_CONFIG.replace("rmse", metric))
    return paths


def below(study: optuna.Study, **options: Any) -> str:
    """What stands below the plot, in one line."""
    [panel] = plot_importances(study, **options).axes
    return " ".join(panel.get_xlabel().split())


def leaders(study: optuna.Study) -> list[str]:
    """The names of the plot, the largest first."""
    [panel] = plot_importances(study).axes
    return [label.get_text().split()[0] for label in panel.get_yticklabels()][::-1]


# --- the plot ---


def test_nine_trials_have_no_importances_and_ten_have() -> None:
    with pytest.raises(SweepError, match=r"9 trials are complete[^\n]*\n.*at least 10"):
        plot_importances(study_of(by_rate, 9, pruned=5))
    assert "From 10 complete trials." in below(study_of(by_rate, 10))


def test_how_many_trials_it_is_from_and_that_pruned_ones_are_left_out_is_said() -> None:
    told = below(study_of(by_rate, 12, pruned=3), metric="rmse")
    assert told.startswith("importance for rmse")
    assert "From 12 complete trials; 3 pruned trials are left out." in told
    assert "pruned" not in below(study_of(by_rate, 12))


def test_each_share_has_its_range_and_one_that_leads_alone_is_not_doubted() -> None:
    [panel] = plot_importances(study_of(by_rate, 40)).axes
    shares = [label.get_text() for label in panel.get_yticklabels()][::-1]
    assert shares[0].startswith("optim.lr")
    for text, bar in zip(shares[::-1], panel.patches, strict=True):
        share, low, _, high = text.split()[1:]
        assert float(low.strip("(")) <= float(share) <= float(high.strip(")"))
        assert bar.get_width() == pytest.approx(float(share), abs=0.006)
    told = below(study_of(by_rate, 40))
    assert "the range over 20 resamples" in told
    assert "optim.lr" not in told


def test_ranges_that_overlap_are_said_to_tell_nothing_yet() -> None:
    told = below(study_of(by_both, 15))
    assert "Cannot tell yet which matters more: " in told
    doubted = told.partition("which matters more: ")[2].partition(".  ")[0]
    assert "optim.lr" in doubted
    assert "model.hidden" in doubted


def test_the_parameter_that_does_nothing_is_never_first_of_a_few_trials() -> None:
    """Optuna 5's default, PED-ANOVA, puts it first in some of these."""
    for seed in range(6):
        assert leaders(study_of(by_rate, 14, seed=seed))[0] == "optim.lr"


def test_a_logarithmic_parameter_counts_on_the_scale_it_is_searched_on() -> None:
    """Linearly, the lower two of its three decades would be a tenth of the range."""
    space = {"a": FloatDistribution(1e-4, 1e-1, log=True), "b": FloatDistribution(0.0, 1.0)}
    study = study_of(lambda p: (p["a"] > 1e-3) + 0.3 * p["b"], 40, space=space)
    assert leaders(study) == ["a", "b"]
    assert "Cannot tell" not in below(study)


def test_one_diverged_trial_is_not_all_of_the_variance() -> None:
    study = study_of(by_rate, 30)
    params = {"optim.lr": 0.01, "model.hidden": 64, "model.dropout": 0.49}
    study.add_trial(create_trial(params=params, distributions=SPACE, value=1e9))
    assert leaders(study)[0] == "optim.lr"


def test_parameters_that_only_some_trials_have_are_said_to_be_left_out() -> None:
    study = study_of(by_rate, 12)
    space = {**SPACE, "model.$x": FloatDistribution(0.0, 1.0)}
    more = study_of(by_rate, 12, space=space, seed=1)
    study.add_trials(more.trials)
    assert r"Not searched by all trials in one range, and left out: model.\$x." in below(study)
    assert sorted(leaders(study)) == sorted(SPACE)


def test_of_very_many_trials_some_are_drawn_and_it_is_said() -> None:
    study = study_of(by_rate, 0)
    rng = random.Random(0)
    for _ in range(130):
        params = {"optim.lr": 10 ** rng.uniform(-4, -1), "model.hidden": 8, "model.dropout": 0.1}
        study.add_trial(create_trial(params=params, distributions=SPACE, value=by_rate(params)))
    assert "From 100 of 130 complete trials." in below(study)


# --- the panel ---


def test_the_panel_shows_nothing_below_ten_trials_and_the_same_shares_from_ten_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nine = read_state(folder_of(tmp_path / "a", study_of(by_rate, 9, pruned=9)).folder)
    assert importances(nine) == ""
    study = study_of(by_both, 12, pruned=2)
    state = read_state(folder_of(tmp_path / "b", study).folder)
    page = importances(state)
    assert "Importance for rmse" in page
    assert "From 12 complete trials; 2 pruned trials are left out." in page
    assert "the range over 20 resamples" in page
    assert "Cannot tell yet which matters more: " in page
    [panel] = plot_importances(study).axes
    for label in panel.get_yticklabels():  # one rule: the same digits in both
        name, _, text = label.get_text().partition("  ")
        assert f"{name}: {text}" in page
    assert capfd.readouterr() == ("", "")  # Optuna says nothing in the cell


def test_names_are_escaped(tmp_path: Path) -> None:
    name = "<b>$x$"
    state = read_state(folder_of(tmp_path, study_of(by_rate, 12), metric=name).folder)
    assert "&lt;b&gt;" in importances(state)
    assert_harmless(importances(state))


def test_the_bars_are_drawn_anew_when_a_quarter_more_trials_are_there(tmp_path: Path) -> None:
    study = study_of(by_rate, 13)
    paths = folder_of(tmp_path, study)
    lines = paths.events.read_text().splitlines(keepends=True)
    paths.events.write_text("".join(lines[:-3]))
    state, bars = read_state(paths.folder), ImportanceCache()
    ten = bars.html(state)
    assert "From 10 complete" in ten
    with paths.events.open("a") as diary:
        diary.writelines(lines[-3:-1])
        diary.flush()
        state.refresh()
        assert bars.html(state) is ten
        diary.write(json.dumps({**json.loads(lines[-1]), "t": NOON}) + "\n")
    state.refresh()
    assert "From 13 complete" in bars.html(state)


# --- the report ---


def test_the_report_draws_them_and_says_what_there_is_too_little_of(tmp_path: Path) -> None:
    found = []
    for name, count in (("few", 9), ("many", 11)):
        storage = open_journal(tmp_path / FILE)
        paths = folder_of(tmp_path / name, study_of(by_rate, count, pruned=2, storage=storage))
        (tmp_path / FILE).rename(paths.folder / FILE)
        found.append(sweeps([read_run_summary(paths)]).parts)
    few, many = found
    assert any("No plot of its importances: 9 trials are complete" in str(one) for one in few)
    pictures = {one.alt.split()[0]: one for one in many if isinstance(one, Picture)}
    [panel] = pictures["importances"].figure.axes
    assert "From 11 complete trials; 2 pruned trials are left out." in panel.get_xlabel()
