"""Sweeps with real processes, a real study and real folders."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import SECONDS, until

import nbtoolkit as nb
from nbtoolkit import errors

LR = {"optim.lr": {"type": "float", "low": 1e-4, "high": 1e-1, "log": True}}
RANDOM = {"study": {"sampler": "random", "pruner": "none"}, "space": LR}


@pytest.fixture
def config(tmp_path: Path) -> nb.Config:
    """The defaults, into a folder of the test's own."""
    overrides = {"runtime.output_dir": str(tmp_path / "out"), "tracking.mlflow": False}
    return nb.load_config(env=None, overrides=overrides)


def swept(train: Any, config: nb.Config, space: Any = LR, **options: Any) -> nb.SweepResult:
    result: nb.SweepResult = nb.sweep(train, config, space, display="off", **options)
    return result


def bowl(config: nb.Config, ctx: nb.RunContext) -> None:
    """Best at 0.01."""
    ctx.report({"val_loss": (math.log10(config.optim.lr) + 2) ** 2}, step=1)


# --- one after the other, and what is found ---


def test_a_sweep_finds_the_best_and_says_with_what(config: nb.Config, tmp_path: Path) -> None:
    result = swept(bowl, config, n_trials=8)
    values = result.trials["value"].dropna()
    assert len(result.trials) == 8
    assert result.status == "completed"
    assert result.best_value == values.min()
    assert result.best_trial == values.idxmin()
    best = result.trials.loc[result.best_trial, "optim.lr"]
    assert result.best_config.optim.lr == result.best_params["optim.lr"] == best
    again = nb.load_config(result.save_best(tmp_path / "best.yaml"), env=None)
    assert again.optim.lr == best
    assert nb.launch(bowl, again, display="off").metrics["val_loss"] == result.best_value


@pytest.mark.long
def test_a_trial_sees_the_stored_values_bit_for_bit(config: nb.Config) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        assert config.optim.lr == ctx.params["optim.lr"]
        return {"val_loss": config.optim.lr}

    result = swept(train, config, RANDOM, n_trials=4)
    for trial in result.study.trials:
        assert trial.params["optim.lr"].hex() == trial.value.hex()


@pytest.mark.long
def test_every_rank_of_a_trial_has_the_same_values(config: nb.Config) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        import torch.distributed as dist

        boxes: list[Any] = [None] * ctx.world_size
        dist.all_gather_object(boxes, ctx.params["optim.lr"].hex())
        assert len(set(boxes)) == 1
        return {"val_loss": ctx.world_size}

    two = config.with_overrides({"distributed.world_size": 2, "distributed.enabled": True})
    sweep_config = {**RANDOM, "placement": "all_devices_per_trial"}
    result = swept(train, two, sweep_config, n_trials=3)
    assert list(result.trials["value"]) == [2.0, 2.0, 2.0]


def test_a_trial_that_fails_on_one_of_two_ranks_leaves_the_others_alone(config: nb.Config) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        if ctx.params["data.which"] == 1 and ctx.rank == 1:
            raise ValueError("on rank 1 only")
        print("rank", ctx.rank, "of", ctx.params)
        return {"val_loss": 1.0}

    two = config.with_overrides({"distributed.world_size": 2, "distributed.enabled": True})
    grid = {"data.which": {"type": "categorical", "choices": [0, 1, 2, 3]}}
    first = [{"data.which": number} for number in range(4)]
    sweep_config = {
        "study": {"sampler": "random", "pruner": "none"},
        "placement": "all_devices_per_trial",
        "first_trials": first,
        "space": grid,
    }
    result = swept(train, two, sweep_config, n_trials=4)
    assert list(result.trials["state"]) == ["complete", "failed", "complete", "complete"]
    assert "on rank 1 only" in result.trials.loc[1, "reason"]
    log = result.paths.folder / "trials/0003/ranks/1/log.txt"
    assert log.read_text() == "rank 1 of {'data.which': 3}\n"


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "sampler", ["random", pytest.param("qmc", marks=LONG), pytest.param("grid", marks=LONG)]
)
def test_the_same_trials_whatever_the_number_of_slots(config: nb.Config, sampler: str) -> None:
    grid = {"optim.lr": {"type": "categorical", "choices": [0.1, 0.01, 0.001, 0.0001, 1e-5]}}
    space = grid if sampler == "grid" else LR
    sweep_config = {"study": {"sampler": sampler, "pruner": "none"}, "space": space}
    alone = {**sweep_config, "placement": "all_devices_per_trial"}
    found = [swept(bowl, config, one, n_trials=5, resume="never") for one in (sweep_config, alone)]
    rows = [one.trials[["optim.lr", "value"]].values.tolist() for one in found]
    assert rows[0] == rows[1]


@pytest.mark.long
def test_tpe_on_one_slot_searches_the_same_from_scratch(config: nb.Config) -> None:
    study = {"sampler": "tpe", "pruner": "none"}
    sweep_config = {"study": study, "placement": "all_devices_per_trial", "space": LR}
    found = [swept(bowl, config, sweep_config, n_trials=13, resume="never") for _ in range(2)]
    rows = [one.trials[["optim.lr", "value"]].values.tolist() for one in found]
    assert rows[0] == rows[1]


def test_placements_and_a_plain_launch_agree(config: nb.Config) -> None:
    config = config.with_overrides(
        {"distributed.world_size": 2, "train.epochs": 2, "train.batch_size": 16}
    )

    def train(config: nb.Config, ctx: nb.RunContext) -> None:
        made = torch.Generator().manual_seed(0)
        data = torch.randn(64, 4, generator=made), torch.randn(64, 1, generator=made)
        torch.manual_seed(1)
        loss = torch.nn.functional.mse_loss
        nb.fit(ctx, config, torch.nn.Linear(4, 1), data, data, loss=loss)

    placements = ("device_per_trial", "all_devices_per_trial")
    results = [
        swept(train, config, {**RANDOM, "placement": one}, n_trials=2, resume="never")
        for one in placements
    ]
    plain = nb.launch(train, results[0].best_config, processes=1, display="off", resume="never")
    values = [result.best_value for result in results]
    assert values == pytest.approx([plain.metrics["val_loss"]] * 2, abs=1e-5)


def test_folds_of_a_trial_give_its_value(config: nb.Config) -> None:
    folds = nb.make_folds([0, 1] * 10, k=4)

    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        assert len(ctx.fold.valid_indices) == 5
        return {"val_loss": ctx.fold.index + config.optim.lr}

    result = swept(train, config, RANDOM, n_trials=2, folds=folds)
    for _, row in result.trials.iterrows():
        assert row["value"] == pytest.approx(1.5 + row["optim.lr"])
    assert (result.paths.folder / "folds.json").exists()


# --- early ends ---


def test_hopeless_trials_are_ended_on_all_ranks(config: nb.Config) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> None:
        for step in range(50):
            ctx.report({"val_loss": config.optim.lr * 50}, step=step)

    sweep_config = {
        "study": {"sampler": "random", "pruner": "median"},
        "placement": "all_devices_per_trial",
        "space": LR,
    }
    two = config.with_overrides({"distributed.world_size": 2, "distributed.enabled": True})
    result = swept(train, two, sweep_config, n_trials=14)
    states = list(result.trials["state"])
    assert set(states) == {"complete", "pruned"}
    assert states[:5] == ["complete"] * 5  # the pruner's start


@pytest.mark.long
def test_a_trial_that_takes_too_long_has_failed(config: nb.Config) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        if ctx.params["data.slow"]:
            time.sleep(600)
        return {"val_loss": 1.0}

    sweep_config = {
        "study": {"sampler": "grid"},
        "budget": {"trial_timeout": 0.5},
        "space": {"data.slow": {"type": "categorical", "choices": [True, False]}},
    }
    result = swept(train, config, sweep_config)
    slow = result.trials[result.trials["data.slow"]]
    assert list(slow["state"]) == ["failed"]
    assert "time of 0.5 s is used up" in slow["reason"].item()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        pytest.param(None, r"the first trial has the metrics: none", id="missing", marks=LONG),
        pytest.param(math.nan, r"no trial .* has a value: 2 failed; .*val_loss is nan", id="nan"),
        pytest.param("high", r"the first trial has the metrics: none", id="text", marks=LONG),
    ],
)
def test_a_value_that_is_none_is_never_zero(config: nb.Config, value: Any, reason: str) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, Any]:
        return {} if value is None else {"val_loss": value}

    with pytest.raises(errors.SweepError, match=reason):
        swept(train, config, n_trials=2)


def test_a_sweep_without_a_feasible_trial_returns_its_result(
    config: nb.Config, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        return {"val_loss": config.optim.lr, "latency": 25.0}

    limited = {**RANDOM, "constraints": {"latency": {"max": 20}}}
    result = nb.sweep(train, config, limited, n_trials=1, display="text")
    assert (result.status, result.best_params, result.best_value) == ("completed", {}, None)
    assert list(result.trials["state"]) == ["infeasible"]
    nearest = "the nearest is trial 0: latency is 25, max 20"
    assert nearest in capfd.readouterr().out
    with pytest.raises(errors.SweepError, match=f"no best trial: no trial .*{nearest}"):
        _ = result.best_config


def test_several_metrics_have_a_front_in_place_of_best_params(config: nb.Config) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        return {"val_loss": config.optim.lr, "latency": 1 - config.optim.lr}

    two = {"metric": ["val_loss", "latency"], "direction": "minimize", "sampler": "random"}
    result = swept(train, config, {"study": two, "space": LR}, n_trials=2)
    assert result.best_value is None
    for name in ("best_params", "best_config"):
        with pytest.raises(
            errors.SweepError,
            match=r"several metrics \(val_loss, latency\)(.|\n)*front: 0, 1\n.*result.trials.loc",
        ):
            getattr(result, name)


def test_a_sweep_that_was_stopped_before_its_first_value_has_no_best(config: nb.Config) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> None:
        while True:
            ctx.raise_if_stopped()
            time.sleep(0.01)

    handle = nb.sweep(train, config, RANDOM, n_trials=2, wait=False, display="off")
    handle.stop()
    result = handle.result()
    assert (result.status, result.best_value) == ("stopped", None)
    with pytest.raises(errors.SweepError, match=r"no trial is complete\n.*\n.*reasons"):
        _ = result.best_config


# --- handles ---


def test_a_handle_pauses_adds_and_stops(config: nb.Config) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        while not Path(config.data.gate).exists():
            ctx.report({"val_loss": 1.0})
            time.sleep(0.01)
        return {"val_loss": 1.0}

    gate = Path(config.runtime.output_dir).parent / "gate"
    config = config.with_overrides({"data.gate": str(gate)})
    handle = nb.sweep(train, config, RANDOM, n_trials=2, wait=False, display="off")
    handle.pause()
    handle.add_trials(2)
    gate.touch()
    until(lambda: ended(handle) == 2, "two trials' end")
    assert not handle.done()
    handle.resume()
    result = handle.result(timeout=SECONDS)
    assert list(result.trials["state"]) == ["complete"] * 4
    with pytest.raises(errors.LaunchError, match=r"cannot pause .* it has ended"):
        handle.pause()


def test_a_sweep_that_was_stopped_goes_on(config: nb.Config) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        for step in range(3):
            while not Path(config.data.gate).exists():
                ctx.report({"val_loss": 9.0}, step=step)
                time.sleep(0.01)
        return {"val_loss": config.optim.lr}

    gate = Path(config.runtime.output_dir).parent / "gate"
    config = config.with_overrides({"data.gate": str(gate)})
    handle = nb.sweep(train, config, RANDOM, n_trials=3, wait=False, display="off")
    until(lambda: len(running(handle)) >= 2, "two trials")
    handle.stop()
    handle.stop()
    first = handle.result(timeout=SECONDS)
    assert first.status == "stopped"
    gate.touch()
    second = swept(train, config, RANDOM, n_trials=3)
    assert second.paths.folder == first.paths.folder
    assert list(second.trials["state"]) == ["complete"] * 3
    before = [trial.params for trial in first.study.trials]
    after = [trial.params for trial in second.study.trials if trial.value is not None]
    assert all(params in after for params in before)


@pytest.mark.long
def test_a_larger_number_of_trials_goes_on_with_a_complete_sweep(config: nb.Config) -> None:
    first = swept(bowl, config, RANDOM, n_trials=2)
    more = swept(bowl, config, RANDOM, n_trials=3)
    assert (more.paths.folder, len(more.trials)) == (first.paths.folder, 3)
    assert more.trials["value"].tolist()[:2] == first.trials["value"].tolist()[:2]
    again = swept(bowl, config, RANDOM, n_trials=3)
    assert again.paths.folder == first.paths.folder  # what is complete is shown again
    anew = swept(bowl, config, RANDOM, n_trials=3, resume="never")
    assert anew.paths.folder != first.paths.folder


def test_a_detached_sweep_is_attached_to_and_stopped(config: nb.Config) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> None:
        while True:
            ctx.report({"val_loss": 1.0})
            time.sleep(0.01)

    mine = nb.sweep(train, config, RANDOM, n_trials=99, wait=False, detach=True, display="off")
    until(lambda: len(running(mine)) >= 2, "two trials")
    handle = nb.attach(mine.paths.folder)
    assert isinstance(handle, nb.SweepHandle)
    handle.stop_trial(0)
    until(lambda: 0 not in running(mine), "the end of trial 0")
    handle.stop()
    assert handle.result(timeout=SECONDS).status == "stopped"


def test_a_second_owner_is_refused(config: nb.Config) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> None:
        while True:
            ctx.report({"val_loss": 1.0})
            time.sleep(0.01)

    handle = nb.sweep(train, config, RANDOM, n_trials=99, wait=False, display="off")
    with pytest.raises(errors.ResumeError, match=r"is running\n[\s\S]*nb.attach"):
        swept(train, config, RANDOM, n_trials=99, resume=handle.paths.run_id)
    handle.stop()
    handle.result(timeout=SECONDS)


@pytest.mark.long
def test_two_sweeps_at_once_in_one_kernel(config: nb.Config) -> None:
    handles = [
        nb.sweep(bowl, config, RANDOM, n_trials=4, wait=False, display="off", resume="never")
        for _ in range(2)
    ]
    for handle in handles:
        assert list(handle.result(timeout=SECONDS).trials["state"]) == ["complete"] * 4


def running(handle: nb.SweepHandle) -> list[int]:
    """Numbers of the trials that run."""
    states = {e.number: e.state for e in handle.events() if e.type == "trial"}
    return [number for number, state in states.items() if state == "running"]


def ended(handle: nb.SweepHandle) -> int:
    trials = (e for e in handle.events() if e.type == "trial")
    done = {e.number for e in trials if e.state in ("complete", "failed")}
    return len(done)


def test_a_trial_whose_metric_is_no_number_is_ended_at_once(config: nb.Config) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> None:
        while True:
            ctx.report({"val_loss": math.nan}, step=1)
            time.sleep(0.01)

    with pytest.raises(errors.SweepError, match=r"trial 0, val_loss is nan at step 1"):
        swept(train, config, RANDOM, n_trials=1)


def test_a_sweep_in_one_rank_of_several_is_refused(
    config: nb.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    for name, value in {**variables, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.PlanError, match=r"one rank of several[\s\S]*without torchrun"):
        swept(bowl, config, n_trials=1)


def test_a_sweep_of_another_configuration_is_not_gone_on_with(config: nb.Config) -> None:
    first = swept(bowl, config, n_trials=1)
    other = config.with_overrides({"train.epochs": 77})
    with pytest.raises(errors.ResumeError, match=r"train.epochs: \d+ then, 77 now"):
        swept(bowl, other, n_trials=2, resume=first.paths.run_id)
    more = swept(bowl, config, n_trials=2, resume=first.paths.run_id)
    assert (more.paths.folder, len(more.trials)) == (first.paths.folder, 2)


def test_a_sweep_ends_in_its_time_and_goes_on_later(config: nb.Config) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        step = 0
        while step < 10 or not config.data.short:
            ctx.report({"val_loss": config.optim.lr}, step=(step := step + 1))
            time.sleep(0.01)
        return {"val_loss": config.optim.lr}

    space = {**RANDOM, "space": {**LR, "data.short": {"type": "categorical", "choices": [True]}}}
    endless = {**space, "space": {**LR, "data.short": {"type": "categorical", "choices": [False]}}}
    swept(bowl, config, n_trials=1)  # what a kernel's first sweep waits for takes none of the time
    first = swept(train, config, endless, timeout=2)
    assert (first.status, first.best_value) == ("deadline", None)
    assert "complete" not in {*first.trials.get("state", ())}
    assert swept(train, config, space, n_trials=3, timeout="1h").status == "completed"
