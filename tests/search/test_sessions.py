"""The display of a search's second session, and the report of a cross-validation's folds."""

from __future__ import annotations

from pathlib import Path

import pytest

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.worker.context import RunContext

SPACE = {
    "space": {"model.x": {"type": "float", "low": 0.0, "high": 1.0}},
    "study": {"metric": "loss"},
}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path), "model.x": 0.5}
    return Config().with_overrides(settings)


def train(config: Config, ctx: RunContext) -> None:
    for step in range(1, 4):
        ctx.log({"samples_per_second": 100.0 * step}, step=step)
        ctx.report({"loss": config.model["x"] / step}, step=step)


def test_a_resumed_sweep_counts_what_is_done_and_repeats_nothing(
    config: Config, capfd: pytest.CaptureFixture[str]
) -> None:
    said = []
    for trials in (2, 3, 4):
        nb.sweep(train, config, SPACE, n_trials=trials, display="text")
        said.append(capfd.readouterr().out)
    assert "trial 0 " in said[0]
    assert "the study already has 2 trials" in said[1]
    assert "the study already has 3 trials" in said[2]
    assert "the study already has 2 trials" not in said[2]
    assert "trial 3 " in said[2]
    assert not any(f"trial {number} " in said[2] for number in range(3))
    assert "4 of 4 trials" in said[2]


def test_a_report_has_the_curves_and_the_throughput_of_the_folds(config: Config) -> None:
    cv = nb.cross_validate(train, config, nb.make_folds([0, 1] * 6, k=2), display="off")
    page = nb.report(cv.paths.folder).read_text()
    assert "mean ± sd" in page
    for number in range(2):
        assert f", fold {number}" in page
    assert ">200<" in page
