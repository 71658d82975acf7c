"""Shares of a step's time, and the rank that the others wait for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import nbtoolkit as nb
from nbtoolkit.run.events import EventReader, MetricsLogged, NoteAdded
from nbtoolkit.training import sync
from nbtoolkit.training.sync import StepClock

SETTINGS: dict[str, Any] = {
    "train.batch_size": 16,
    "tracking.mlflow": False,
    "checkpoint.enabled": False,
    "train.epochs": 1000,
}


class Slow(Dataset[Any]):
    """Samples of which each takes some time to load."""

    def __init__(self, seconds: float) -> None:
        self.inputs, self.seconds = torch.randn(1600, 32), seconds

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.seconds:
            time.sleep(self.seconds)
        return self.inputs[index], int(self.inputs[index, 0] > 0)


class Model(nn.Module):
    """A model that computes for a while in its forward pass."""

    def __init__(self, seconds: float, norm: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 32), nn.BatchNorm1d(32) if norm else nn.ReLU(), nn.Linear(32, 2)
        )
        self.seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.seconds and self.training:
            time.sleep(self.seconds)
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    sync.JUDGED_SECONDS = config.model.get("judged", sync.JUDGED_SECONDS)
    slow = ctx.rank == config.model["slow_rank"]
    data = Slow(config.model.get("sample", 0.0) if slow else 0.0)
    model = Model(config.model.get("forward", 0.0) if slow else 0.0, config.model.get("norm", 0))
    return nb.fit(ctx, config, model, data, None, loss=cross_entropy)


def launched(folder: Path, processes: int, **more: Any) -> nb.RunResult:
    settings = {**SETTINGS, "runtime.output_dir": str(folder), **more}
    return nb.launch(train, settings, processes=processes)


def warnings(result: nb.RunResult) -> list[str]:
    events = EventReader(result.paths.events).read()
    return [one.text for one in events if isinstance(one, NoteAdded) and "straggler" in one.text]


@pytest.mark.long
def test_a_slow_loader_takes_most_of_the_time(tmp_path: Path) -> None:
    settings = {"train.max_steps": 20, "model.slow_rank": 0, "model.sample": 0.005}
    result = launched(tmp_path, 1, **settings)
    assert result.step_time["data"] > 0.2  # the first step may import for seconds
    assert sum(result.step_time.values()) == pytest.approx(1.0)
    logged = [
        one for one in EventReader(result.paths.events).read() if isinstance(one, MetricsLogged)
    ]
    assert all("communication_share" not in one.values for one in logged)
    fast = launched(tmp_path, 1, **{**settings, "model.slow_rank": 1, "model.forward": 0.0})
    assert fast.step_time["data"] < result.step_time["data"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("slow", "norm", "kind"),
    [(1, 0, "sample"), (0, 1, "sample"), (1, 0, "forward")],
)
def test_the_slow_rank_is_named_once(tmp_path: Path, slow: int, norm: int, kind: str) -> None:
    seconds = {"sample": 0.002, "forward": 0.02}[kind]
    settings = {"model.slow_rank": slow, f"model.{kind}": seconds, "model.norm": norm}
    settings["model.judged"] = 5.0
    result = launched(tmp_path, 2, **settings, **{"train.max_steps": 330})
    (text,) = warnings(result)
    assert text.startswith(f"rank {slow} is the straggler")
    assert ("waits for its batches" in text) == (kind == "sample")
    shares = result.step_time
    assert sum(shares.values()) == pytest.approx(1.0)
    # One of two ranks works for most of the time, while the other waits.
    assert 0.3 < shares["communication"] < 0.6


@pytest.mark.long
def test_no_rank_is_named_in_the_first_minute(tmp_path: Path) -> None:
    settings = {"model.slow_rank": 1, "model.forward": 0.02, "train.max_steps": 330}
    assert not warnings(launched(tmp_path, 2, **settings))


def test_the_ranks_wait_for_none_if_all_are_alike(tmp_path: Path) -> None:
    result = launched(tmp_path, 2, **{"model.slow_rank": 2, "train.max_steps": 30})
    assert not warnings(result)
    assert set(result.step_time) == {"data", "compute", "communication"}


def test_a_clock_costs_less_than_a_microsecond_a_step() -> None:
    class Context:
        world_size = 1

    clock = StepClock(Context(), nn.Linear(1, 1))  # type: ignore[arg-type]
    batches, best = [None] * 20_000, 1.0
    for _ in range(10):
        began = time.perf_counter()
        for _ in batches:
            pass
        plain = time.perf_counter() - began
        began = time.perf_counter()
        for _ in clock.timed(batches):
            pass
        best = min(best, (time.perf_counter() - began - plain) / len(batches))
    assert best < 1e-6
    print(f"{best * 1e9:.0f} ns a step")
