"""nb.calibrate on this machine, and what a kept calibration changes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from machines import T4, cpu_machine, machine
from torch.nn.functional import cross_entropy

import nbtoolkit as nb
from nbtoolkit.launcher.measured import calibrate_long, measure_auto
from nbtoolkit.run.events import MetricsLogged
from nbtoolkit.run.kept_answers import CALIBRATION, calibration_key, keep_answer, measured_speed
from nbtoolkit.tasks import digits
from nbtoolkit.tuning import speed


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


def does_not_fit(config: Any, ctx: Any) -> dict[str, float]:
    return {"val_loss": 1.0}


def refuses_to_run(config: Any, ctx: Any) -> dict[str, float]:
    raise AssertionError("a kept answer is measured again")


def strategy(row: speed.SpeedRow) -> str:
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
            "samples_per_second": value,
        }
        for name, value in speeds.items()
    ]
    choice = max(range(len(rows)), key=lambda at: rows[at]["samples_per_second"])
    answer = {"rows": rows, "choice": choice, "batch_size": 64, "seconds": 1.0}
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
    assert "<table>" in result._repr_html_()


def test_measured_is_replaced_only_where_the_number_of_ranks_is_open(config: nb.Config) -> None:
    keep(config, refuses_to_run, single=1600.0, ddp=1000.0)
    asks = config.with_overrides({"distributed.strategy": "measured"})
    assert measure_auto(refuses_to_run, asks, "auto", "off").distributed.strategy == "single"
    two = asks.with_overrides({"distributed.world_size": 2, "distributed.enabled": True})
    assert measure_auto(refuses_to_run, two, "auto", "off").distributed.strategy == "auto"
    assert measure_auto(refuses_to_run, config, "auto", "off") is config


def test_a_launch_follows_a_kept_calibration_and_shows_what_it_achieved(
    config: nb.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    before = nb.launch(train, config)
    assert (before.plan.processes, before.efficiency) == (1, None)
    assert "predicted" not in capsys.readouterr().out
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
    out = capsys.readouterr().out
    assert f"speed: 1,600 samples/s predicted by nb.calibrate, {result.throughput:,.0f} ac" in out
    assert "achieved" in result._repr_html_()
    asks = config.with_overrides({"distributed.strategy": "measured"})
    assert nb.launch(train, asks, display="off").plan.strategy == "ddp"


# --- distributed.strategy: auto, on several GPUs ---


def ran_for(seconds: float, function: Any, config: nb.Config) -> nb.RunResult:
    """Launch it, and stretch its steps over so many seconds."""
    run = nb.launch(function, config, processes=1, resume="never", display="off")
    events = [json.loads(line) for line in run.paths.events.read_text().splitlines()]
    logged = [event["t"] for event in events if "samples_per_second" in event.get("values", {})]
    first, last = min(logged), max(logged)
    for event in events:
        event["t"] = first + (event["t"] - first) * seconds / (last - first)
    run.paths.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    os.utime(run.paths.events, (first + seconds, first + seconds))
    return run


def calibrated(function: Any, config: nb.Config, *, gpus: int = 2, **given: Any) -> Any:
    """What a launch on these GPUs does, of which this machine has none: it measures its CPUs."""
    facts = {
        "host": nb.detect_host(),
        "hardware": machine(*[T4] * gpus) if gpus else cpu_machine(),
        "start": "forkserver",
        "display": "text",
    }
    return calibrate_long(function, config, **{**facts, **given})


@pytest.mark.long
def test_auto_measures_what_is_known_to_train_for_long_and_keeps_it(
    config: nb.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrated(train, config) is None, "no run is known"
    run = ran_for(1500, train, config)
    assert capsys.readouterr().out == ""
    found = calibrated(train, config)
    assert found == measured_speed(train, config)
    assert set(found.speeds) == {"single", "ddp"}
    out = capsys.readouterr().out
    assert f"because {run.paths.run_id} trained for 25" in out
    assert "distributed.strategy: auto: measuring one GPU, DDP and DataParallel" in out
    assert " samples/s" in out
    assert "; measured in " in out


def test_auto_measures_nothing_that_is_short_or_not_open(
    config: nb.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    short = config.with_overrides({"model.hidden": 1})
    ran_for(300, train, short)
    ran_for(1500, train, config)
    rank = {"host": replace(nb.detect_host(), is_rank=True)}
    for changed, given in (
        (short, {}),
        (config.with_overrides({"model.hidden": 2}), {}),
        (config.with_overrides({"train.max_steps": 50}), {}),
        (config.with_overrides({"runtime.time_budget": "20m"}), {}),
        (config.with_overrides({"distributed.strategy": "single"}), {}),
        (config.with_overrides({"distributed.world_size": 2}), {}),
        (config, {"start": "inline"}),
        (config, {"gpus": 1}),
        (config, {"gpus": 0}),
        (config, rank),
    ):
        assert calibrated(train, changed, **given) is None
    assert calibrated(breaks_in_ranks, config) is None
    assert capsys.readouterr().out == ""


def test_auto_that_cannot_be_measured_launches_as_before_and_is_not_tried_again(
    config: nb.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    breaks = config.with_overrides({"data.breaks": False})

    def sometimes(config: Any, ctx: Any) -> dict[str, float]:
        if not config.checkpoint.enabled:  # in a probe
            raise OSError("only one process may read the data")
        return train(config, ctx)

    ran_for(1500, sometimes, breaks)
    assert calibrated(sometimes, breaks) is None
    assert "not measured: OSError: only one process may read the data" in capsys.readouterr().out
    assert measured_speed(sometimes, breaks) is None
    assert calibrated(sometimes, breaks) is None
    assert capsys.readouterr().out == ""


@pytest.mark.long
def test_a_measurement_within_a_time_has_ddp_and_something_to_compare_it_with(
    config: nb.Config,
) -> None:
    # DDP starts, takes longer than this, and nothing else starts.
    with pytest.raises(nb.errors.TuningError, match=r"single: not measured: 0\.01 s are over"):
        speed.calibrate_within(train, config, 0.01)
    assert measured_speed(train, config) is None
    assert " samples/s" in speed.calibrate_within(train, config, 600.0)
    assert measured_speed(train, config) is not None


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
    assert result.batch_size == 128
    assert result.seconds < 60
    assert f"distributed.strategy: {chosen}: " in capsys.readouterr().out
    # nothing is left but the answer, and it is used
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"tuning.json", "tuning.lock"}
    assert nb.calibrate(digits.train, cnn) == result
    run = nb.launch(digits.train, cnn.with_overrides({"train.epochs": 1}), display="off")
    usual, best = speeds["single"], max(speeds.values())
    assert run.plan.strategy == (chosen if best > 1.05 * usual else "single")
    assert run.plan.predicted_speed == speeds[run.plan.strategy]
    again = nb.calibrate(digits.train, cnn, force=True)
    assert again.measured > result.measured


@pytest.mark.long
def test_a_launch_measures_what_was_not_kept(config: nb.Config) -> None:
    asks = config.with_overrides({"distributed.strategy": "measured"})
    run = nb.launch(train, asks, display="off")
    kept = json.loads((run.paths.folder.parent / "tuning.json").read_text())
    (answer,) = kept[CALIBRATION].values()
    best = max(answer["rows"], key=lambda row: row["samples_per_second"])
    assert run.plan.strategy == best["settings"]["distributed.strategy"]
    assert run.efficiency is not None


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
                {**row.settings, **speed._same_batch(per_device, strategy(row))}
            ),
            nb.detect_host(),
            nb.detect_hardware(),
        )
        for row in speed._planned(per_device)
    ]
    assert [plan.global_batch_size for plan in plans] == [32, 32]
    assert [plan.batch_size_per_device for plan in plans] == [16, 16]
