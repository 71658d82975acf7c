"""SIGKILL at random moments, gone on with each time: the end is that of a run never interrupted.

`make test-chaos` does it twenty times over; `make test` a few times, with the same seeds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import nbtoolkit as nb
from nbtoolkit.errors import WorkerDied
from nbtoolkit.training.samples import read_samples

OFTEN, SELDOM = pytest.param(20, marks=pytest.mark.long), 2


def train(config: Any, ctx: Any) -> dict[str, float]:
    """Small steps, an uneven data set, dropout, momentum, averages: all that has to be kept."""
    import torch
    from torch import nn

    inputs = torch.randn(499, 6, generator=torch.Generator().manual_seed(0))
    data = (inputs, inputs[:, :3].argmax(dim=1))
    dropout = [nn.Dropout(0.2)] if config.model.dropout else []
    model = nn.Sequential(nn.Linear(6, 16), *dropout, nn.Tanh(), nn.Linear(16, 3))
    return nb.fit(ctx, config, model, data, data, loss=nn.functional.cross_entropy)


def configured(folder: Path, *, epochs: int, dropout: bool) -> nb.Config:
    return nb.load_config(
        env=None,
        overrides={
            "runtime.output_dir": str(folder),
            "model.dropout": dropout,
            "optim.name": "adamw",
            "train.epochs": epochs,
            "train.batch_size": 12,
            "train.average": "ema",
            "checkpoint.every_steps": 30,
            "tracking.mlflow": False,
            "tracking.samples": True,
        },
    )


def kill_at_random(handle: nb.RunHandle, ranks: int, chance: random.Random) -> bool:
    """Kill a rank within a quarter of a second of their start; False: the run was done before."""
    attempt = json.loads(handle.paths.versions.read_text())["attempt"]
    ready: dict[int, int] = {}
    while len(ready) < ranks and not handle.done():
        begun = 0
        for event in handle.events():
            begun += event["type"] == "run"
            if begun == attempt and event["type"] == "rank" and event["phase"] == "ready":
                ready[event["rank"]] = event["pid"]
    time.sleep(chance.uniform(0.0, 0.25))
    if handle.done():
        return False
    os.kill(ready[chance.randrange(ranks)], signal.SIGKILL)
    return True


def survive(config: nb.Config, ranks: list[int], kills: int) -> tuple[nb.RunResult, int]:
    """Kill and go on, on ``ranks`` in turn; the result, and how many were killed."""
    chance, done = random.Random(kills), 0
    for number in range(kills):
        size = ranks[number % len(ranks)]
        handle = nb.launch(train, config, processes=size, wait=False, display="off")
        try:
            done += kill_at_random(handle, size, chance)
            return handle.result(), done
        except (WorkerDied, ProcessLookupError):
            continue
    return nb.launch(train, config, processes=ranks[0], display="off"), done


def weights(result: nb.RunResult) -> dict[str, torch.Tensor]:
    newest = max(result.paths.checkpoints.glob("step-*"))
    parts = [torch.load(newest / f"{name}.pt", weights_only=True) for name in ("model", "averaged")]
    return {f"{n}.{name}": value for n, part in enumerate(parts) for name, value in part.items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [SELDOM, OFTEN])
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_killed_at_random_it_ends_as_if_it_never_was(
    tmp_path: Path, ranks: int, kills: int
) -> None:
    config = configured(tmp_path / "whole", epochs=10 * kills, dropout=True)
    whole = nb.launch(train, config, processes=ranks, display="off")
    config = config.with_overrides({"runtime.output_dir": str(tmp_path / "killed")})
    killed, done = survive(config, [ranks], kills)
    assert done >= kills // 2, "the training is too short for this machine"
    mine, theirs = weights(whole), weights(killed)
    for name in mine:
        torch.testing.assert_close(theirs[name], mine[name], atol=1e-5 * (ranks > 2), rtol=0)
    assert read_samples(killed.paths) == read_samples(whole.paths)
    assert killed.value == (whole.value if ranks < 3 else pytest.approx(whole.value, abs=1e-5))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [SELDOM, OFTEN])
def test_the_number_of_ranks_may_change_in_between(tmp_path: Path, kills: int) -> None:
    config = configured(tmp_path / "whole", epochs=10 * kills, dropout=False)
    whole = nb.launch(train, config, processes=1, display="off")
    config = config.with_overrides({"runtime.output_dir": str(tmp_path / "killed")})
    killed, done = survive(config, [1, 2, 3], kills)
    assert done >= kills // 2, "the training is too short for this machine"
    mine, theirs = weights(whole), weights(killed)
    for name in mine:
        torch.testing.assert_close(theirs[name], mine[name], atol=1e-4, rtol=0)
    steps, expected = read_samples(killed.paths), read_samples(whole.paths)
    assert {place: sorted(ids) for place, ids in steps.items()} == {
        place: sorted(ids) for place, ids in expected.items()
    }
