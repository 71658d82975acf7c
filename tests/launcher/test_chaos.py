"""A run that is killed at random moments and resumed ends like one that was never interrupted.

`make test-all` kills six times, `make test` twice.

The moments are counted in steps of the training, which does not end before the last of them: so the
kills hit it at work on a slow machine, and before its end on a fast one.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import until
from records import first_of
from step_samples import StepSamples, numbered, read_step_samples

import nbtoolkit as nb
from nbtoolkit.errors import WorkerDied
from nbtoolkit.run.events import Event, MetricsLogged, MetricsReported

OFTEN, SELDOM = 6, 2


def train(config: Any, ctx: Any) -> dict[str, float]:
    """Small steps, an uneven data set, dropout, momentum, averages: all that has to be kept."""
    import time
    from pathlib import Path

    import torch
    from torch import nn

    inputs = torch.randn(499, 6, generator=torch.Generator().manual_seed(0))
    data = (numbered(inputs), inputs[:, :3].argmax(dim=1))
    dropout = [nn.Dropout(0.2)] if config.model.dropout else []
    model = nn.Sequential(nn.Linear(6, 16), *dropout, nn.Tanh(), nn.Linear(16, 3))
    noted = StepSamples()
    given = {"loss": nn.functional.cross_entropy, "step": noted.step, "callbacks": [noted]}
    values = nb.fit(ctx, config, model, data, data, **given)
    ctx.log({"fitted": 1.0})
    while not Path(config.runtime.output_dir, "may-end").exists():
        time.sleep(0.02)
    return values


def configured(folder: Path, *, epochs: int, dropout: bool) -> nb.Config:
    return nb.load_config(
        env=None,
        overrides={
            "runtime.output_dir": str(folder),
            "model.dropout": dropout,
            "optim.name": "adamw",
            "train.epochs": epochs,
            "train.batch_size": 12,
            "train.weight_averaging": "ema",
            "checkpoint.every_steps": 30,
            # Another test's kill for memory at that moment would let a run start again.
            "train.gradient_accumulation_steps": 1,
            "tracking.mlflow": False,
        },
    )


def kill_at_random(handle: nb.RunHandle, ranks: int, chance: random.Random) -> None:
    """Kill a rank after some words of its training, or after none; at its end at the latest."""
    attempt = first_of(handle.paths.folder).attempt

    def now() -> list[Event]:
        """The events of this attempt."""
        events = list(handle.events())
        begun = [n for n, event in enumerate(events) if event.type == "run"]
        return events[begun[attempt - 1] :] if len(begun) == attempt else []

    def ready() -> dict[int, int]:
        return {
            event.rank: event.pid
            for event in now()
            if event.type == "rank" and event.phase == "ready"
        }

    def has_said(words: int) -> Callable[[], bool]:
        def look() -> bool:
            said = [event for event in now() if isinstance(event, MetricsLogged | MetricsReported)]
            return len(said) >= words or any("fitted" in event.values for event in said)

        return look

    until(lambda: len(ready()) == ranks, "all ranks")
    until(has_said(chance.randrange(12)), "the moment")
    time.sleep(chance.uniform(0.0, 0.02))  # which is anywhere between two of its words
    os.kill(ready()[chance.randrange(ranks)], signal.SIGKILL)


def survive(config: nb.Config, ranks: list[int], kills: int) -> nb.RunResult:
    """Kill and go on, on ``ranks`` in turn."""
    chance = random.Random(10 * kills + ranks[0])
    for number in range(kills):
        size = ranks[number % len(ranks)]
        handle = nb.launch(train, config, processes=size, wait=False, display="off")
        kill_at_random(handle, size, chance)
        with pytest.raises(WorkerDied):
            handle.result()
    may_end(config)
    return nb.launch(train, config, processes=ranks[0], display="off")


def may_end(config: nb.Config) -> None:
    """Let the trainings of this folder return."""
    folder = Path(config.runtime.output_dir)
    folder.mkdir(exist_ok=True)
    (folder / "may-end").touch()


def weights(result: nb.RunResult) -> dict[str, torch.Tensor]:
    newest = max(result.paths.checkpoints.glob("step-*"))
    parts = [torch.load(newest / f"{name}.pt", weights_only=True) for name in ("model", "averaged")]
    return {f"{n}.{name}": value for n, part in enumerate(parts) for name, value in part.items()}


def check_equal_steps(killed: nb.RunResult, whole: nb.RunResult) -> None:
    expected = read_step_samples(whole.paths)
    sizes = [len(samples) for samples in expected.values()]
    assert sizes == [*[12] * 41, 7] * (len(sizes) // 42)  # 499 samples in an epoch
    assert read_step_samples(killed.paths) == expected


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ranks", "kills"),
    [(2, SELDOM), *(pytest.param(n, OFTEN, marks=pytest.mark.long) for n in (1, 2, 3))],
)
def test_killed_at_random_it_ends_as_if_it_never_was(
    tmp_path: Path, ranks: int, kills: int
) -> None:
    config = configured(tmp_path / "whole", epochs=4 * kills, dropout=True)
    may_end(config)
    whole = nb.launch(train, config, processes=ranks, display="off")
    config = config.with_overrides({"runtime.output_dir": str(tmp_path / "killed")})
    killed = survive(config, [ranks], kills)
    mine, theirs = weights(whole), weights(killed)
    for name in mine:
        torch.testing.assert_close(theirs[name], mine[name], atol=1e-5 * (ranks > 2), rtol=0)
    check_equal_steps(killed, whole)
    assert killed.value == (whole.value if ranks < 3 else pytest.approx(whole.value, abs=1e-5))


@pytest.mark.timeout(600)
@pytest.mark.long
def test_the_number_of_ranks_may_change_in_between(tmp_path: Path) -> None:
    config = configured(tmp_path / "whole", epochs=4 * OFTEN, dropout=False)
    may_end(config)
    whole = nb.launch(train, config, processes=1, display="off")
    config = config.with_overrides({"runtime.output_dir": str(tmp_path / "killed")})
    killed = survive(config, [1, 2, 3], OFTEN)
    mine, theirs = weights(whole), weights(killed)
    for name in mine:
        torch.testing.assert_close(theirs[name], mine[name], atol=1e-4, rtol=0)
    check_equal_steps(killed, whole)
