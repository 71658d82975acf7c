"""Plots of real Optuna studies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from nbtoolkit.errors import SweepError
from nbtoolkit.study.plots import COLOURS, plot_history, plot_importances, plot_slices
from nbtoolkit.study.storage import FILE, open_journal

SPACE = {
    "optim.lr": optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True),
    "optim.name": optuna.distributions.CategoricalDistribution(["adamw", "sgd"]),
    "model.hidden": optuna.distributions.IntDistribution(32, 512),
}


@pytest.fixture(autouse=True)
def _no_window(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = matplotlib.get_backend()
    matplotlib.use("Agg")
    yield
    matplotlib.use(before)


def trial(
    lr: float, value: float | None, state: TrialState = TrialState.COMPLETE, **more: Any
) -> FrozenTrial:
    params = {"optim.lr": lr, "optim.name": "adamw" if lr < 1e-2 else "sgd", "model.hidden": 64}
    return create_trial(state=state, params=params, distributions=SPACE, value=value, **more)


def study_of(*trials: Any, direction: str = "maximize", folder: Path | None = None) -> optuna.Study:
    storage = open_journal(folder / FILE) if folder else None
    study = optuna.create_study(storage=storage, study_name="digits", direction=direction)
    study.add_trials(trials)
    return study


def test_the_history_has_every_value_the_best_so_far_and_the_pruned(tmp_path: Path) -> None:
    pruned = trial(0.05, None, TrialState.PRUNED, intermediate_values={0: 0.1, 3: 0.3})
    study = study_of(
        trial(0.001, 0.8), trial(0.02, 0.6), pruned, trial(0.003, 0.9), folder=tmp_path
    )
    figure = plot_history(study, metric="val_accuracy")
    [panel] = figure.axes
    lines = {str(line.get_label()): line for line in panel.lines}
    assert list(lines["complete"].get_ydata()) == [0.8, 0.6, 0.9]
    assert list(lines["complete"].get_xdata()) == [0, 1, 3]
    assert list(lines["best"].get_ydata()) == [0.8, 0.8, 0.9]
    assert (list(lines["pruned"].get_xdata()), list(lines["pruned"].get_ydata())) == ([2], [0.3])
    assert panel.get_ylabel() == "val_accuracy"
    assert all(float(tick).is_integer() for tick in panel.get_xticks())
    assert {str(line.get_color()) for line in panel.lines} == {*COLOURS[:2], "#888"}


def test_the_best_so_far_goes_down_when_less_is_better() -> None:
    values = [trial(0.01, value) for value in (3.0, 1.0, 2.0)]
    figure = plot_history(study_of(*values, direction="minimize"))
    assert list(figure.axes[0].lines[-1].get_ydata()) == [3.0, 1.0, 1.0]


def test_a_trial_that_breaks_a_constraint_is_never_the_best() -> None:
    broken = trial(0.01, 0.99, system_attrs={"constraints": [-1.0, 0.5]})
    kept = trial(0.01, 0.7, system_attrs={"constraints": [-1.0, 0.0]})
    figure = plot_history(study_of(kept, broken))
    assert list(figure.axes[0].lines[-1].get_ydata()) == [0.7]


def test_importances_are_bars_by_size() -> None:
    trials = [trial(10 ** (-4 + 0.3 * i), 0.1 * i) for i in range(10)]
    [panel] = plot_importances(study_of(*trials)).axes
    names = [label.get_text().split()[0] for label in panel.get_yticklabels()]
    assert sorted(names) == sorted(SPACE)
    widths = [bar.get_width() for bar in panel.patches]
    assert widths == sorted(widths)
    assert sum(widths) == pytest.approx(1.0)


def test_importances_of_one_of_several_objectives() -> None:
    study = optuna.create_study(directions=["maximize", "minimize"])
    space = {name: optuna.distributions.FloatDistribution(0, 1) for name in "ab"}
    for i in range(30):
        params = {"a": i / 30, "b": (i * 7 % 30) / 30}
        values = [params["a"], params["b"]]
        study.add_trial(create_trial(params=params, distributions=space, values=values))
    for objective, leader in enumerate("ab"):
        [panel] = plot_importances(study, objective=objective).axes
        assert panel.get_yticklabels()[-1].get_text().split()[0] == leader


def test_slices_have_a_panel_for_each_parameter_with_its_own_scale() -> None:
    figure = plot_slices(study_of(*(trial(0.001 * 2**i, 0.1 * i) for i in range(6))))
    scales = {panel.get_xlabel(): panel.get_xscale() for panel in figure.axes}
    assert scales == {"optim.lr": "log", "optim.name": "linear", "model.hidden": "linear"}
    assert len(figure.axes[0].collections[0].get_offsets()) == 6


def test_five_parameters_take_two_rows_without_an_empty_panel() -> None:
    names = [f"model.x{i}" for i in range(5)]
    space = {name: optuna.distributions.FloatDistribution(0, 1) for name in names}
    one = create_trial(params=dict.fromkeys(names, 0.5), distributions=space, value=1.0)
    assert len(plot_slices(study_of(one)).axes) == 5


def test_an_unknown_parameter_is_refused_with_those_that_are_there() -> None:
    study = study_of(trial(0.01, 0.5))
    with pytest.raises(SweepError, match=r"no trial has a parameter 'lr'\n.*optim.lr, optim.name"):
        plot_slices(study, params=["lr"])


@pytest.mark.parametrize("plot", [plot_history, plot_importances, plot_slices])
def test_a_study_without_values_says_so_instead_of_an_empty_plot(plot: Any) -> None:
    study = study_of(trial(0.01, None, TrialState.FAIL))
    with pytest.raises(SweepError, match=r"0 trials (of the study 'digits' )?are complete"):
        plot(study)


def test_figures_are_not_kept_by_pyplot(tmp_path: Path) -> None:
    from matplotlib import pyplot

    figure = plot_history(study_of(trial(0.01, 0.5)))
    figure.savefig(tmp_path / "history.png")
    assert (tmp_path / "history.png").stat().st_size > 1000
    assert pyplot.get_fignums() == []


LONG = "model.backbone_with_a_very_long_name_of_the_setting"
CHOICES = ["efficientnet_b0_pretrained", "convnext_tiny_in22k", "[64, 128, 256]"]


def test_long_names_are_shortened_and_none_is_a_formula() -> None:
    space: dict[str, Any] = {
        LONG: optuna.distributions.CategoricalDistribution(CHOICES),
        "model.$a$": optuna.distributions.FloatDistribution(0, 1),
    }
    trials = [
        create_trial(params={LONG: one, "model.$a$": 0.05 * i}, distributions=space, value=float(i))
        for i, one in enumerate(CHOICES * 4)
    ]
    study = study_of(*trials)
    [history] = plot_history(study, metric="m" * 60).axes
    assert history.get_ylabel() == f"{'m' * 14}…{'m' * 13}"
    [importances] = plot_importances(study).axes
    names = {label.get_text().split()[0] for label in importances.get_yticklabels()}
    assert names == {"model.backbone…f_the_setting", r"model.\$a\$"}
    long, short = plot_slices(study).axes
    assert long.get_xlabel() == "model.backbone…f_the_setting"
    assert {label.get_rotation() for label in long.get_xticklabels()} == {30.0}
    assert "efficientn…retrained" in [label.get_text() for label in long.get_xticklabels()]
    assert {label.get_rotation() for label in short.get_xticklabels()} == {0.0}


def test_short_choices_stand_upright() -> None:
    panel = plot_slices(study_of(trial(0.001, 1.0), trial(0.02, 2.0)), params=["optim.name"]).axes[
        0
    ]
    assert {label.get_rotation() for label in panel.get_xticklabels()} == {0.0}


def test_the_legend_lies_beside_the_panel_over_no_trial() -> None:
    [panel] = plot_history(study_of(trial(0.001, 1.0))).axes
    panel.figure.canvas.draw()
    assert panel.get_legend().get_window_extent().x0 >= panel.get_window_extent().x1


def test_equal_values_have_no_importances() -> None:
    study = study_of(*(trial(10 ** (-4 + 0.3 * i), 0.5) for i in range(10)))
    with pytest.raises(SweepError, match="all 10 trials have the same value"):
        plot_importances(study)


def test_a_parameter_with_one_value_has_a_slice() -> None:
    space = {"seed": optuna.distributions.IntDistribution(3, 3)}
    trials = [create_trial(params={"seed": 3}, distributions=space, value=v) for v in (1.0, 2.0)]
    [panel] = plot_slices(study_of(*trials)).axes
    assert panel.collections[0].get_offsets().tolist() == [[3.0, 1.0], [3.0, 2.0]]
