"""Callbacks: their moments, what they see, stop, add and save."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fits import Run, check_equal_weights, configured, model_of, samples
from torch import nn

import nbtoolkit as nb
from nbtoolkit.errors import CheckpointError, FitError, RunStopped, WorkerDied
from nbtoolkit.training.callbacks import MOMENTS


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


@pytest.fixture
def another(tmp_path: Path) -> Run:
    return Run(tmp_path / "another")


def recorder(*moments: str) -> tuple[list[tuple[Any, ...]], Any]:
    """An object of some moments, and what it saw in them."""
    seen: list[tuple[Any, ...]] = []

    def see(moment: str) -> Any:
        return lambda state: seen.append((moment, state.epoch, state.step, *sorted(state.metrics)))

    return seen, SimpleNamespace(**{moment: see(moment) for moment in moments})


def test_the_moments_come_in_order_with_the_state_of_the_fit(run: Run) -> None:
    seen, everything = recorder(*MOMENTS)
    config = configured(overrides={"train.epochs": 2, "checkpoint.every_epochs": 2})
    run.fit(config=config, callbacks=[everything])
    before, train = ("train_loss",), ("train_loss", "val_loss")
    assert seen == [
        ("on_fit_start", 0, 0),
        ("on_train_epoch_start", 1, 0),
        *(("on_train_batch_end", 1, step) for step in (1, 2, 3, 4)),
        ("on_train_epoch_end", 1, 4, *before),
        ("on_validation_end", 1, 4, *train),
        ("on_train_epoch_start", 2, 4, *train),
        *(("on_train_batch_end", 2, step, *train) for step in (5, 6, 7, 8)),
        ("on_train_epoch_end", 2, 8, *before),
        ("on_validation_end", 2, 8, *train),
        ("on_save_checkpoint", 2, 8, *train),
        ("on_fit_end", 2, 8, *train),
    ]


def test_the_state_is_frozen_and_has_what_is_trained(run: Run) -> None:
    class Look(nb.Callback):
        def on_fit_end(self, state: nb.FitState) -> None:
            self.state = state

    look, model = Look(), model_of()
    run.fit(model, callbacks=[look])
    state = look.state
    assert state.model is model
    assert state.ctx.world_size == 1
    assert {id(one) for group in state.optimizer.param_groups for one in group["params"]} == {
        id(one) for one in model.parameters()
    }
    with pytest.raises(AttributeError):
        state.epoch = 3  # type: ignore[misc]


def test_metrics_of_a_callback_are_reported_and_monitored(run: Run) -> None:
    class Gap(nb.Callback):
        def on_validation_end(self, state: nb.FitState) -> dict[str, float]:
            return {"score": [1.0, 3.0, 2.0][state.epoch - 1]}

    settings = {"checkpoint.monitor": "score", "checkpoint.mode": "max"}
    result = run.fit(config=configured(overrides=settings), callbacks=[Gap()])
    assert [event["values"]["score"] for event in run.events("report")] == [1.0, 3.0, 2.0]
    assert (result["best_epoch"], result["best_score"], result["score"]) == (2, 3.0, 3.0)


@pytest.mark.parametrize("moment", ["on_train_batch_end", "on_train_epoch_end"])
def test_a_callback_stops_the_run_and_it_stays_stopped(run: Run, capsys: Any, moment: str) -> None:
    def stop(state: nb.FitState) -> None:
        if state.step == 4 or moment == "on_train_batch_end":
            state.stop("it is good enough")

    callbacks = [SimpleNamespace(**{moment: stop})]
    result = run.fit(callbacks=callbacks)
    assert result["epoch"] == 1
    assert "fit: stops after epoch 1: it is good enough" in capsys.readouterr().out
    assert run.saved()["step"] == (1 if moment == "on_train_batch_end" else 4)
    assert run.fit(callbacks=callbacks) == result
    assert len(run.events("report")) == 1


class Counter(nb.Callback):
    """Counts steps; its state is restored."""

    def __init__(self) -> None:
        self.count, self.tensor, self.starts = 0, torch.zeros(2), []

    def on_fit_start(self, state: nb.FitState) -> None:
        self.starts.append(self.count)

    def on_train_batch_end(self, state: nb.FitState) -> None:
        self.count += 1
        self.tensor += state.step

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "tensor": self.tensor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count, self.tensor = state_dict["count"], state_dict["tensor"].clone()


class Interrupted(Exception):
    pass


def test_the_state_of_a_callback_is_saved_and_restored(run: Run, another: Run) -> None:
    def forward(model: nn.Module, batch: Any) -> Any:
        nonlocal left
        left -= model.training
        if left < 0:
            raise Interrupted
        return model(batch[0]), batch[1]

    config = configured(overrides={"checkpoint.every_steps": 3})
    whole, left = [Counter(), Counter()], 100
    another.fit(config=config, callbacks=whole)
    left = 7
    with pytest.raises(Interrupted):
        run.fit(config=config, callbacks=[Counter(), Counter()], step=forward)
    resumed, left = [Counter(), Counter(), nb.Callback()], 100
    run.fit(config=config, callbacks=resumed[:2], step=forward)
    for one, other in zip(whole, resumed[:2], strict=True):
        assert (other.count, other.starts) == (12, [6])
        assert torch.equal(one.tensor, other.tensor)
    assert [*run.saved()["callbacks"]] == ["Counter", "Counter 2"]


class Bare(nb.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"model": nn.Linear(1, 1)}


class Lightnings:
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...


class Unknown:
    def on_epoch_end(self, state: Any) -> None: ...


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (Lightnings(), r"on_train_epoch_end of the callback Lightnings does not take one argument"),
        (
            Unknown(),
            r"never calls on_epoch_end of the callback Unknown[\s\S]*on_train_epoch_end",
        ),
        (Counter, r"the callback Counter is a class[\s\S]*add \(\)"),
        (3, r"the callback int has no method that fit calls"),
    ],
    ids=["lightning", "unknown", "class", "number"],
)
def test_what_is_no_callback_is_refused(run: Run, callback: Any, message: str) -> None:
    with pytest.raises(FitError, match=message):
        run.fit(callbacks=[callback])


def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(run: Run) -> None:
    seen, watched = recorder("on_train_batch_end")
    with pytest.raises(CheckpointError, match=r"Linear"):
        run.fit(callbacks=[Bare(), watched])
    assert seen == []


def test_a_metric_that_is_there_is_not_replaced(run: Run) -> None:
    twice = SimpleNamespace(on_validation_end=lambda state: {"val_loss": 0.0})
    with pytest.raises(FitError, match=r"SimpleNamespace returns the metric 'val_loss'"):
        run.fit(callbacks=[twice])


def test_an_unused_moment_costs_no_state(run: Run, another: Run) -> None:
    """A callback without on_train_batch_end changes nothing either."""
    one, other = model_of(), model_of()
    run.fit(one, callbacks=[nb.Callback(), SimpleNamespace(on_fit_end=lambda state: None)])
    another.fit(other)
    check_equal_weights(one, other)


# --- ranks ---------------------------------------------------------------------------------------


class Fault(nb.Callback):
    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_epoch_end(self, state: nb.FitState) -> None:
        if self.what == "raises" and state.epoch == 2 and state.ctx.rank == 1:
            raise ValueError("too much")
        if self.what == "stops" and state.epoch == 2 and state.ctx.rank == 1:
            state.stop("rank 1 has seen enough")

    def on_validation_end(self, state: nb.FitState) -> dict[str, float]:
        return {"of_rank": float(state.ctx.rank) + state.epoch}


def on_ranks(config: Any, ctx: Any) -> Any:
    counter = Counter()

    class Kill(nb.Callback):
        def on_train_batch_end(self, state: nb.FitState) -> None:
            killed = ctx.paths.folder / "killed"
            if config.data.what == "killed" and state.step == 6 and not killed.exists():
                while not any(ctx.paths.checkpoints.glob("step-*4")):
                    pass
                if ctx.is_main:
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)

    given = {"loss": nn.functional.cross_entropy, "callbacks": [Fault(config.data.what), counter]}
    given["callbacks"].append(Kill())
    values = nb.fit(ctx, config, model_of(), samples(37), samples(11, seed=1), **given)
    return values, counter.count, counter.tensor


def launched(folder: Path, what: str) -> Any:
    more = {"runtime.output_dir": str(folder), "data.what": what, "checkpoint.every_steps": 2}
    return nb.launch(on_ranks, configured(overrides=more), processes=2, display="off")


def test_one_that_raises_on_one_rank_ends_the_run_with_its_name_and_the_rank(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="too much") as caught:
        launched(tmp_path, "raises")
    notes = "\n".join(caught.value.__notes__)
    assert "in on_train_epoch_end of the callback Fault, on rank 1" in notes


@pytest.mark.long
def test_one_rank_stops_all_and_rank_0s_metrics_count(tmp_path: Path) -> None:
    result = launched(tmp_path, "stops")
    for values, count, _ in result.values:
        assert (values["epoch"], values["of_rank"], count) == (2, 2.0, 8)


@pytest.mark.long
def test_the_state_survives_a_kill(tmp_path: Path) -> None:
    whole = launched(tmp_path, "none").values
    with pytest.raises(WorkerDied):
        launched(tmp_path, "killed")
    for (values, count, tensor), (expected, steps, sums) in zip(
        launched(tmp_path, "killed").values, whole, strict=True
    ):
        assert (values, count) == (expected, steps)
        assert torch.equal(tensor, sums)


def searched(config: Any, ctx: Any) -> Any:
    class Rate(nb.Callback):
        def on_validation_end(self, state: nb.FitState) -> dict[str, float]:
            return {"val_losses": config.optim.lr * state.epoch}

    loss = nn.functional.cross_entropy
    data = samples(37)
    return nb.fit(ctx, config, model_of(), data, data, loss=loss, callbacks=[Rate()])


@pytest.mark.long
def test_a_sweep_searches_by_a_metric_of_a_callback(tmp_path: Path) -> None:
    config = configured(overrides={"runtime.output_dir": str(tmp_path), "train.epochs": 4})
    sweep = {
        "study": {
            "metric": "val_losses",  # near val_loss, which fit itself reports
            "direction": "minimize",
            "sampler": "grid",
        },
        "space": {"optim.lr": [0.1, 0.5]},
    }
    found = nb.sweep(searched, config, sweep, n_trials=2, display="off")
    assert found.best_params == {"optim.lr": 0.1}
    assert found.best_value == pytest.approx(0.4)


def test_a_stop_of_the_run_is_not_a_callbacks_matter(run: Run) -> None:
    """RunStopped passes through a callback."""

    def leave(state: nb.FitState) -> None:
        raise RunStopped("stopped")

    with pytest.raises(RunStopped):
        run.fit(callbacks=[SimpleNamespace(on_train_epoch_end=leave)])
