"""A trial that ran out of memory keeps larger ones from starting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest
from fits import configured, model_of, samples
from searches import Fake, algorithm, drive
from torch import nn

import nbtoolkit as nb
from nbtoolkit.run.attempts import newest_plan
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.search.algorithm import JobResult, SearchJob
from nbtoolkit.search.trial_limits import MemoryLimits
from nbtoolkit.study.samplers import OUT_OF_MEMORY
from nbtoolkit.study.study import FILE, read_study

LEAST = "with equal or smaller sizes"
FAILED = {
    "model.hidden": 64,
    "train.batch_size": 32,
    "model.kind": "cnn",
    "model.patch_size": 4,
    "optim.lr": 0.1,
    "optim.name": "adamw",
    "train.epochs": 5,
}


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, True),
        ({"model.hidden": 128}, True),
        ({"model.hidden": 63}, False),
        ({"model.hidden": 128, "train.batch_size": 16}, False),
        ({"model.kind": "mlp"}, False),
        ({"model.patch_size": 8}, False),  # larger patches need less
        ({"optim.lr": 0.0001, "train.epochs": 1}, True),
        ({"optim.name": "sgd"}, False),
        ({"model.more": 1}, False),
    ],
)
def test_what_is_no_smaller_in_any_size_would_run_out_too(changes: Any, refused: bool) -> None:
    limits = MemoryLimits(Path("sweep"))
    assert limits.why_not(FAILED) is None
    limits.add(3, FAILED)
    reason = limits.why_not({**FAILED, **changes})
    assert (reason is not None) == refused
    expected = f"not started: trial 3, {LEAST} (model.hidden 64, train.batch"
    assert reason is None or reason.startswith(expected)


def test_without_a_size_nothing_is_concluded() -> None:
    limits = MemoryLimits(Path("sweep"))
    limits.add(0, {"optim.lr": 0.1, "model.kind": "cnn"})
    assert limits.why_not({"optim.lr": 0.2, "model.kind": "cnn"}) is None


# --- observed peaks ---

SEEN = [(16, 8), (16, 32), (32, 8), (32, 16), (64, 8), (64, 16)]


def observed(folder: Path, seen: Any = SEEN, *, noise: float = 1.0, **more: Any) -> MemoryLimits:
    """Limits of a sweep with completed trials, and one of 64 units and batch 32 that ran out."""
    limits = MemoryLimits(folder)
    for number, (hidden, batch) in enumerate(seen):
        peak = 0.001 * hidden**1.5 * batch * noise ** (-1 if number % 3 else 1)
        run = folder / f"trials/{number:04d}"
        run.mkdir(parents=True)
        values = {"loss": 1.0, "memory_gb_rank0": peak / 2, "memory_gb_rank1": peak}
        line = {"type": "metrics", "t": 1.0, "step": 1, "values": values}
        (run / "events.jsonl").write_text(json.dumps(line) + "\n")
        limits.completed(
            f"trials/{number:04d}", {"model.hidden": hidden, "train.batch_size": batch, **more}
        )
    limits.add(9, {"model.hidden": 64, "train.batch_size": 32, **more})
    return limits


@pytest.mark.parametrize(
    ("hidden", "batch", "refused"),
    [(256, 16, True), (128, 16, False), (128, 8, False), (16, 512, True), (32, 64, False)],
)
def test_peaks_of_completed_trials_predict_what_has_larger_and_smaller_sizes(
    hidden: int, batch: int, refused: bool, tmp_path: Path
) -> None:
    """Batch 16 with 256 units needs 4 times, with 128 units 1.4 times what ran out."""
    limits = observed(tmp_path)
    reason = limits.why_not({"model.hidden": hidden, "train.batch_size": batch})
    assert (reason is not None) == refused
    if (hidden, batch) == (256, 16):
        expected = "by the memory of 6 trials it needs 4.0 times that of trial 9, which ran out of"
        assert reason is not None
        assert expected in reason


@pytest.mark.parametrize(
    "known",
    [
        {"seen": SEEN[:3]},  # too few
        {"seen": [(16, 8)] * 6},  # they do not differ
        {"seen": [(16, size) for size in (2, 4, 8, 16, 32, 64)]},  # in one size only
        {"noise": 1.5},  # sizes do not explain the peaks
    ],
)
def test_peaks_that_tell_too_little_predict_nothing(known: Any, tmp_path: Path) -> None:
    limits = observed(tmp_path, **known)
    assert limits.why_not({"model.hidden": 256, "train.batch_size": 16}) is None


def test_peaks_say_nothing_on_another_kind_of_model(tmp_path: Path) -> None:
    limits = observed(tmp_path, **{"model.kind": "mlp"})
    wide = {"model.hidden": 256, "train.batch_size": 16}
    assert limits.why_not({**wide, "model.kind": "mlp"}) is not None
    assert limits.why_not({**wide, "model.kind": "cnn"}) is None


GRID = {
    "study": {"sampler": "grid", "pruner": "none", "metric": "val_loss", "direction": "minimize"},
    "space": {"model.hidden": [2, 8, 4, 16]},
}


def test_a_trial_that_is_left_out_is_infeasible_in_the_study(tmp_path: Path) -> None:
    made, diary = algorithm(tmp_path, GRID)
    oom = JobResult(status="failed", fault="oom", error="CUDA out of memory")
    fake = Fake(lambda job, step: {"val_loss": 1.0}, endings={"trials/0001": oom})
    jobs = drive(made, fake)
    assert [job.key for job in jobs] == ["trials/0000", "trials/0001", "trials/0002"]
    assert made.close("completed")["counts"] == {"complete": 2, "infeasible": 2}
    reason = f"not started: trial 1, {LEAST} (model.hidden 8), ran out of memory"
    assert diary.ends()[3].reason == reason
    assert f"trial 3 is {reason}" in diary.notes()
    (last,) = [one for one in read_study(tmp_path / FILE).trials if one.number == 3]
    assert last.state == optuna.trial.TrialState.PRUNED
    assert last.user_attrs["constraints"] == {OUT_OF_MEMORY: 1.0}


def test_a_search_in_which_all_would_run_out_ends(tmp_path: Path) -> None:
    space = {"model.hidden": {"type": "int", "low": 8, "high": 8}, "optim.lr": [0.1, 0.01]}
    study = {**GRID["study"], "sampler": "random"}
    made, _ = algorithm(tmp_path, {"study": study, "space": space, "budget": {"n_trials": 60}})
    job = made.next(None)
    assert isinstance(job, SearchJob)
    made.on_end(job, JobResult(status="failed", fault="oom", error="CUDA out of memory"))
    assert made.next(None) is None
    while not made.done:
        assert made.next(None) is None
    assert len(read_study(tmp_path / FILE).trials) == 60


def wide(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    (ctx.paths.folder / "began").touch()
    if config.model.hidden > 4:
        raise MemoryError(f"hidden {config.model.hidden}")
    return {"val_loss": 1.0 / config.model.hidden}


def test_a_larger_trial_is_not_started(tmp_path: Path) -> None:
    settings = {"runtime.output_dir": str(tmp_path), "tracking.mlflow": False}
    settings["distributed.world_size"] = 1
    config = nb.load_config(env=None, overrides=settings)
    placed = {**GRID, "placement": "all_devices_per_trial"}  # one after the other
    result = nb.sweep(wide, config, placed, display="off")
    rows = {row["model.hidden"]: row for _, row in result.trials.iterrows()}
    states = {hidden: row["state"] for hidden, row in rows.items()}
    assert states == {2: "complete", 8: "infeasible", 4: "complete", 16: "infeasible"}
    assert rows[8]["reason"] == "MemoryError: hidden 8"
    assert rows[16]["reason"].startswith(f"not started: trial 1, {LEAST}")
    assert len([*tmp_path.glob("*/trials/*/began")]) == 3
    assert result.best_params == {"model.hidden": 4}


def logs_its_memory(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    (ctx.paths.folder / "began").touch()
    need = 1e-3 * config.model.hidden * config.train.batch_size
    if need > 1.0:
        raise MemoryError(f"{need} GB")
    ctx.log({"memory_gb_rank0": need}, step=1)
    return {"val_loss": need}


def test_a_trial_that_is_predicted_not_to_fit_is_not_started(tmp_path: Path) -> None:
    settings = {"runtime.output_dir": str(tmp_path), "tracking.mlflow": False}
    config = nb.load_config(env=None, overrides={**settings, "distributed.world_size": 1})
    sizes = [(8, 8), (8, 64), (64, 8), (32, 8), (64, 32), (512, 8), (48, 16)]
    trials = [{"model.hidden": hidden, "train.batch_size": batch} for hidden, batch in sizes]
    space = {
        name: {"type": "int", "low": 8, "high": 512}
        for name in ("model.hidden", "train.batch_size")
    }
    study = {**GRID["study"], "sampler": "random"}
    placed = {"study": study, "space": space, "placement": "all_devices_per_trial"}
    placed["budget"] = {"n_trials": len(trials)}
    result = nb.sweep(logs_its_memory, config, {**placed, "first_trials": trials}, display="off")
    assert list(result.trials["state"]) == [*["complete"] * 4, *["infeasible"] * 2, "complete"]
    reasons = list(result.trials["reason"])
    assert reasons[4].startswith("MemoryError")
    assert reasons[5].startswith("not started: by the memory of 4 trials it needs 2.0 times that")
    assert len([*tmp_path.glob("*/trials/*/began")]) == 6


def fitted(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    """Has memory for 64 units in a forward pass."""

    def step(model: nn.Module, batch: Any) -> Any:
        if model.training and len(batch[0]) * config.model.hidden > 64:
            raise MemoryError(f"{len(batch[0])} samples")
        return model(batch[0]), batch[1]

    loss = nn.functional.cross_entropy
    return nb.fit(ctx, config, model_of(), samples(64), samples(8), loss=loss, step=step)


@pytest.mark.long
def test_a_trial_takes_as_many_accumulation_steps_as_it_needs(tmp_path: Path) -> None:
    more = {"runtime.output_dir": str(tmp_path), "train.batch_size": 32, "train.epochs": 1}
    space = {"model.hidden": [2, 16, 65]}
    config = configured(overrides={**more, "distributed.world_size": 1})
    result = nb.sweep(fitted, config, {**GRID, "space": space}, display="off")
    assert list(result.trials["state"]) == ["complete", "complete", "infeasible"]
    assert "one sample per forward pass ran out of memory" in result.trials["reason"][2]
    plans = [newest_plan(RunPaths(trial)) for trial in sorted(tmp_path.glob("*/trials/*"))]
    assert [plan["accumulate"] for plan in plans] == [1, 8, 32]
    losses = result.trials["value"]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
