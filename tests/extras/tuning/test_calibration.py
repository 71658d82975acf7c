"""nb.calibrate on this machine, and what a kept calibration changes."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import nbtoolkit as nb
from nbtoolkit.errors import TuningError
from nbtoolkit.extras.tuning import calibration
from nbtoolkit.extras.tuning.answer import Subject, keep_answer
from nbtoolkit.extras.tuning.compare import SpeedRow
from nbtoolkit.extras.tuning.probe import probe
from nbtoolkit.run.events import MetricsLogged
from nbtoolkit.run.kept_answers import CALIBRATION, calibration_key, measured_speed
from nbtoolkit.tasks import digits


def train(config: Any, ctx: Any) -> dict[str, float]:
    torch.manual_seed(0)
    data = torch.randn(256, 8), torch.randint(0, 2, (256,))
    return nb.fit(ctx, config, torch.nn.Linear(8, 2), data, None, loss=cross_entropy)


def breaks_in_ranks(config: Any, ctx: Any) -> dict[str, float]:
    if ctx.world_size > 1:
        raise ValueError("no ranks please")
    return train(config, ctx)


def always_breaks(config: Any, ctx: Any) -> dict[str, float]:
    raise ValueError("the data are not here")


def counts_ranks(config: Any, ctx: Any) -> dict[str, float]:
    return {"ranks": float(ctx.world_size)}


def does_not_fit(config: Any, ctx: Any) -> dict[str, float]:
    return {"val_loss": 1.0}


def refuses_to_run(config: Any, ctx: Any) -> dict[str, float]:
    raise AssertionError("a kept answer is measured again")


def strategy(row: SpeedRow) -> str:
    return str(row.settings["distributed.strategy"])


@pytest.fixture
def config(tmp_path: Path) -> nb.Config:
    return nb.load_config(
        env=None,
        overrides={
            "runtime.output_dir": str(tmp_path / "out"),
            "tracking.mlflow": False,
            "tracking.log_every_n_steps": 2,
            "train.batch_size": 64,
            "train.epochs": 5,
        },
    )


def keep(config: nb.Config, function: Any, **speeds: float) -> None:
    """Keep a calibration of this machine that was never measured."""
    rows = [
        {
            "settings": {"distributed.strategy": name},
            "processes": 2 if name == "ddp" else 1,
            "batch_size": 64,
            "samples_per_second": value,
        }
        for name, value in speeds.items()
    ]
    choice = max(range(len(rows)), key=lambda at: rows[at]["samples_per_second"])
    answer = {"rows": rows, "choice": choice, "seconds": 1.0}
    keep_answer(config, CALIBRATION, calibration_key(function, config), answer)


# --- without measuring ---


def test_a_kept_calibration_is_evidence_for_launches_of_the_same_function_and_model(
    config: nb.Config,
) -> None:
    assert measured_speed(train, config) is None
    keep(config, train, single=1000.0, ddp=1600.0)
    found = measured_speed(train, config)
    assert found is not None
    assert (found.speeds, found.ranks) == ({"single": 1000.0, "ddp": 1600.0}, 2)
    longer = config.with_overrides({"train.epochs": 50, "distributed.world_size": 2})
    assert measured_speed(train, longer) == found
    for change in ({"model.hidden": 64}, {"train.batch_size": 32}, {"distributed.port": 23456}):
        same = measured_speed(train, config.with_overrides(change)) is not None
        assert same is ("distributed.port" in change)
    assert measured_speed(always_breaks, config) is None


def test_a_kept_calibration_is_not_measured_again(
    config: nb.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(config, refuses_to_run, single=1000.0, ddp=1600.0)
    result = nb.calibrate(refuses_to_run, config)
    assert (
        "distributed.strategy: ddp: 1600 samples/s, 1.60 x distributed.strategy: single, at "
        "batch 64 on 2 ranks; measured in 1.0 s, kept; force=True"
    ) in capsys.readouterr().out
    assert config.with_overrides(result.settings).distributed.strategy == "ddp"
    assert result.relative(result.chosen) == 1.6
    assert "* distributed.strategy: ddp" in repr(result)
    assert "<table" in result._repr_html_()


def test_a_launch_follows_a_kept_calibration(config: nb.Config) -> None:
    before = nb.launch(train, config)
    assert (before.plan.processes, before.efficiency) == (1, None)
    keep(config, train, single=1000.0, ddp=1600.0)
    result = nb.launch(train, config)
    assert (result.plan.strategy, result.plan.processes) == ("ddp", 2)
    logged = [
        event.values["samples_per_second"]
        for event in nb.attach(result.paths.folder).events()
        if isinstance(event, MetricsLogged) and "samples_per_second" in event.values
    ]
    assert len(logged) >= 8
    assert result.throughput == median(logged[len(logged) // 2 :])
    assert result.efficiency == pytest.approx(result.throughput / 1000.0)
    asks = config.with_overrides({"distributed.strategy": "measured"})
    assert nb.launch(train, asks, display="off").plan.strategy == "ddp"


NOT_CALIBRATED = r"(?s)no calibration of this function.*Allowed: .*Do now: +call nb.calibrate\("


def test_measured_without_a_calibration_is_an_error_before_anything_starts(
    config: nb.Config, tmp_path: Path
) -> None:
    asks = config.with_overrides({"distributed.strategy": "measured"})
    folds = nb.make_folds(list(range(8)), k=2, kind="kfold")
    with pytest.raises(TuningError, match=NOT_CALIBRATED):
        nb.launch(refuses_to_run, asks)
    with pytest.raises(TuningError, match=NOT_CALIBRATED):
        nb.cross_validate(refuses_to_run, asks, folds)
    with pytest.raises(TuningError, match=NOT_CALIBRATED):
        nb.sweep(refuses_to_run, asks, {"optim.lr": [0.1, 0.2]}, n_trials=1)
    assert not [*tmp_path.glob("out/*/events.jsonl")]


def test_measured_needs_no_calibration_where_other_settings_decide(config: nb.Config) -> None:
    two = {"distributed.strategy": "measured", "distributed.world_size": 2}
    assert measured_speed(train, config.with_overrides(two)) is None
    asks = config.with_overrides({"distributed.strategy": "measured"})
    assert measured_speed(train, asks, "inline") is None


def test_trials_on_all_devices_follow_a_kept_calibration(config: nb.Config) -> None:
    asks = config.with_overrides({"distributed.strategy": "measured", "train.epochs": 1})
    keep(asks, counts_ranks, single=1000.0, ddp=1600.0)
    space = {
        "study": {"metric": "ranks", "direction": "maximize"},
        "placement": "all_devices_per_trial",
        "space": {"optim.lr": [0.1, 0.2]},
    }
    swept = nb.sweep(counts_ranks, asks, space, n_trials=1, display="off")
    assert swept.best_value == 2
    (trial,) = swept.paths.folder.glob("trials/*")
    assert nb.attach(trial).result().plan.one_device_speed is None, "another model"
    keep(asks, counts_ranks, single=1600.0, ddp=1000.0)
    again = nb.sweep(counts_ranks, asks, space, n_trials=1, resume="never", display="off")
    assert again.best_value == 1


def test_a_calibration_of_a_configuration_with_measured_uses_no_kept_answer(
    config: nb.Config,
) -> None:
    asks = config.with_overrides({"distributed.strategy": "measured"})
    assert probe(Subject(train, asks), {}, steps=2).status == "measured"


# --- measured on this machine ---


@pytest.mark.long
def test_the_choice_is_the_fastest_of_the_table(
    config: nb.Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cnn = config.with_overrides({"model.kind": "cnn", "train.batch_size": 128})
    result = nb.calibrate(digits.train, cnn)
    assert [strategy(row) for row in result.rows] == ["single", "ddp"]
    assert [row.processes for row in result.rows] == [1, 2]
    speeds = {strategy(row): row.samples_per_second for row in result.rows}
    assert min(speeds.values()) > 0
    assert all(row.memory > 0.05 for row in result.rows)
    chosen = max(speeds, key=lambda name: speeds[name])
    assert result.settings == {"distributed.strategy": chosen}
    assert result.relative(result.rows[1]) == speeds["ddp"] / speeds["single"]
    assert [row.batch_size for row in result.rows] == [128, 128]
    assert result.seconds < 60
    assert f"distributed.strategy: {chosen}: " in capsys.readouterr().out
    # nothing is left but the answer, and it is used
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"tuning.json", "tuning.lock"}
    assert nb.calibrate(digits.train, cnn) == result
    run = nb.launch(digits.train, cnn.with_overrides({"train.epochs": 1}), display="off")
    usual, best = speeds["single"], max(speeds.values())
    assert run.plan.strategy == (chosen if best > 1.05 * usual else "single")
    assert run.plan.one_device_speed == usual
    again = nb.calibrate(digits.train, cnn, force=True)
    assert again.measured > result.measured


@pytest.mark.long
def test_a_candidate_that_fails_is_a_row_with_its_reason(config: nb.Config) -> None:
    result = nb.calibrate(breaks_in_ranks, config)
    single, ddp = result.rows
    assert (single.reason, ddp.samples_per_second) == ("", 0.0)
    assert "no ranks please" in ddp.reason
    assert result.chosen == single
    assert "no ranks please" in repr(result)
    odd = nb.calibrate(train, config.with_overrides({"train.batch_size": 63}))
    assert "cannot be split evenly over 2 processes" in odd.rows[1].reason


@pytest.mark.long
def test_a_function_that_cannot_be_measured_raises(config: nb.Config) -> None:
    with pytest.raises(ValueError, match="the data are not here"):
        nb.calibrate(always_breaks, config)
    with pytest.raises(nb.errors.TuningError, match=r"did no optimizer step of nb.fit"):
        nb.calibrate(does_not_fit, config)
    assert measured_speed(always_breaks, config) is None


def test_all_candidates_have_the_global_batch_of_a_batch_size_per_device(
    config: nb.Config,
) -> None:
    per_device = nb.load_config(
        env=None, overrides={"train.batch_size_per_device": 16, "distributed.world_size": 2}
    )
    plans = [
        nb.make_plan(
            per_device.with_overrides(
                {**row.settings, **calibration._same_batch(per_device, strategy(row))}
            ),
            nb.detect_host(),
            nb.detect_hardware(),
        )
        for row in calibration._planned(per_device)
    ]
    assert [plan.global_batch_size for plan in plans] == [32, 32]
    assert [plan.batch_size_per_device for plan in plans] == [16, 16]
