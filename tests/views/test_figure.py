"""Charts of results: drawn from the folder, shown by a cell, saved as SVG and HTML."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from harmless import assert_harmless
from run_folders import NOON, sweep, trained, trial, write_run

import nbtoolkit as nb
from nbtoolkit.errors import ReportFolderError, SweepError
from nbtoolkit.run.output import charts
from nbtoolkit.search.study.importance import Importance, ParameterShare


def reports(config, ctx):
    score = config.optim.lr + config.model.get("hidden", 0) * 1e-9
    for step in (1, 2, 3):
        ctx.report({"score": score * step}, step=step)
    return {"score": score}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> nb.SweepResult:
    """A real sweep of 12 trials."""
    few = {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path_factory.mktemp("out"))}
    space = {
        "optim.lr": {"type": "float", "low": 1e-3, "high": 1e-1, "log": True},
        "model.hidden": {"type": "int", "low": 8, "high": 64},
    }
    study = {"metric": "score", "sampler": "random", "pruner": "none", "direction": "maximize"}
    config = nb.load_config(env=None, overrides=few)
    return nb.sweep(reports, config, {"study": study, "space": space}, n_trials=12, display="off")


def test_a_sweeps_charts_show_all_trials_and_the_importance_of_its_parameters(
    result: nb.SweepResult, tmp_path: Path
) -> None:
    history, slices = result.plot_history(), result.plot_slices()
    assert f"trial {result.best_trial}" in history.html
    assert "best so far" in history.html
    assert "hidden" in slices.html
    importances = result.plot_importances()
    assert "importance for score" in importances.html
    assert "From 12 complete trials." in importances.html
    for chart in (history, slices, importances):
        assert_harmless(chart._repr_html_())
        image = ElementTree.parse(chart.save(tmp_path / "chart.svg")).getroot()
        assert image.tag == "{http://www.w3.org/2000/svg}svg"
        assert [*image.iter("{http://www.w3.org/2000/svg}text")]
        page = chart.save(tmp_path / "chart.html").read_text()
        assert page.startswith("<!DOCTYPE html>")
        assert chart.html in page
    assert repr(history) == f"Chart('history of {result.paths.run_id}')"


def test_a_runs_and_a_cross_validations_charts_are_their_curves(tmp_path: Path) -> None:
    few = {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path)}
    config = nb.load_config(env=None, overrides=few)
    assert "polyline" in nb.launch(reports, config, display="off").plot().html
    folds = nb.make_folds([0, 1] * 8, k=2)
    chart = nb.cross_validate(reports, config, folds, display="off").plot()
    assert chart.html.count("<polyline") == 2


def test_few_trials_have_no_importance_and_an_empty_chart_says_so(tmp_path: Path) -> None:
    paths = sweep(tmp_path, [{**trial(0, value=0.5, best=True), "t": NOON}])
    assert "trial 0" in charts().result_chart(paths, "history").html
    empty = write_run(tmp_path, "run-0001", events=[{"type": "run"}])
    assert "There is nothing to draw." in charts().result_chart(empty, "curves").html
    assert charts().result_chart(empty, "curves").save(tmp_path / "empty.svg").exists()


def test_a_chart_is_saved_as_svg_or_html_only(
    tmp_path: Path,
) -> None:
    paths = write_run(tmp_path, "run-0001", events=trained({"loss": [1.0, 0.5]}))
    chart = charts().result_chart(paths, "curves")
    with pytest.raises(
        ReportFolderError, match=r"saved as loss\.png\n  Allowed: .*\.svg or \.html"
    ):
        chart.save(tmp_path / "loss.png")
    (tmp_path / "taken.svg").mkdir()
    with pytest.raises(IsADirectoryError, match=r"taken\.svg"):
        chart.save(tmp_path / "taken.svg")


def test_marks_have_the_height_of_their_shares_and_names_are_escaped() -> None:
    shares = (
        ParameterShare("<b>optim.lr", 0.8),
        ParameterShare("model." + "x" * 60, 0.2),
    )
    chart = charts().importance_chart(Importance(shares, 12, 12, 3, ()), "<i>score")
    assert_harmless(chart.html)
    floor = 180 - 21  # below it stand the names
    heights = [floor - float(y) for y in re.findall(r'<circle[^>]* cy="([\d.]+)"', chart.html)]
    assert heights[0] == pytest.approx(4 * heights[1], abs=0.3)
    assert "0.80" in chart.html
    assert "3 pruned trials are left out" in chart.html
    assert "x" * 40 not in chart.html


def test_too_few_complete_trials_are_refused_with_their_number(tmp_path: Path) -> None:
    few = {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path)}
    space = {"study": {"metric": "score"}, "space": {"optim.lr": [0.1, 0.2]}}
    config = nb.load_config(env=None, overrides=few)
    result = nb.sweep(reports, config, space, n_trials=1, display="off")
    with pytest.raises(SweepError, match=r"1 trials are complete[^\n]*\n.*at least 10"):
        result.plot_importances()
