"""The choice of a fastest setting against launches of every choice, on a small case.

A step mostly sleeps, so that other work on the machine does not decide. The micro-batch and
the learning rate are in test_batch_size.py and test_learning_rate.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fits import model_of, samples
from torch import nn
from torch.nn.functional import cross_entropy

import nbtoolkit as nb

FAST_LAYOUT = {"fast": {"channels_last": True}}
FAST_BF16 = {"fast": {"precision": "bf16"}}
FAST_COMPILED = {"fast": {"compile": True}}


class Sleeps:
    """A data set that waits for each sample, as for a disk."""

    def __init__(self, count: int) -> None:
        self.inputs, self.labels = samples(count)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return self.inputs[index], self.labels[index]


def train(config: Any, ctx: nb.RunContext) -> dict[str, float]:
    """Steps take time by samples, by ranks or by a setting of ``train``, as ``data`` says."""
    data = config.data.to_dict()

    def step(model: nn.Module, batch: Any) -> Any:
        time.sleep(data.get("sample", 0.0) * len(batch[0]))
        time.sleep(data.get("rank", 0.0) * ctx.world_size)
        for name, fast in data.get("fast", {}).items():
            time.sleep(0.1 * (getattr(config.train, name) != fast))
        return model(batch[0]), batch[1]

    count = 40 * config.train.batch_size
    read = Sleeps(count) if data.get("reads") else samples(count)
    return nb.fit(ctx, config, model_of(), read, None, loss=cross_entropy, step=step)


def made(folder: Path, **data: Any) -> nb.Config:
    settings = {
        "train.epochs": 1,
        "train.batch_size": 4,
        "tracking.mlflow": False,
        "tracking.log_every_n_steps": 5,
        "runtime.output_dir": str(folder),
        **{f"data.{name}": value for name, value in data.items()},
    }
    return nb.load_config(env=None, overrides=settings)


def launched(config: nb.Config, settings: Mapping[str, Any], **given: Any) -> float:
    """Samples per second of a run with some settings, nothing of tuning/ involved."""
    # A compiled model's first step takes as long as 40 others.
    steps = None if "train.compile" in settings else 15
    changed = config.with_overrides({**settings, "train.max_steps": steps})
    run = nb.launch(train, changed, resume="never", display="off", **given)
    assert run.throughput is not None
    return run.throughput


@pytest.mark.long
@pytest.mark.parametrize(
    ("data", "name", "values", "fastest"),
    [
        ({"reads": True}, "train.num_workers", [0, 1, 2], 2),
        ({"sample": 0.04}, "train.num_workers", [0, 2], 0),
        (FAST_LAYOUT, "train.channels_last", [False, True], True),
        (FAST_BF16, "train.precision", ["fp32", "bf16"], "bf16"),
        (FAST_COMPILED, "train.compile", [False, True], True),
    ],
    ids=["loads-slowly", "loads-at-once", "layout", "bf16", "compiled"],
)
def test_a_comparison_chooses_what_brute_force_chooses(
    data: Any,
    name: str,
    values: list[Any],
    fastest: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other are noise
    config = made(tmp_path, **data)
    speeds = {value: launched(config, {name: value}, processes=1) for value in values}
    assert speeds[fastest] > 0.8 * max(speeds.values()), speeds
    choices = [{name: value} for value in values]
    assert nb.compare(train, config, choices, processes=1).settings == {name: fastest}


@pytest.mark.long
@pytest.mark.parametrize(
    ("data", "fastest"), [({"sample": 0.04}, "ddp"), ({"rank": 0.1}, "single")]
)
def test_a_calibration_chooses_what_brute_force_chooses(
    data: Any, fastest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config, name = made(tmp_path, **data), "distributed.strategy"
    speeds = {value: launched(config, {name: value}) for value in ("single", "ddp")}
    assert speeds[fastest] > 0.8 * max(speeds.values()), speeds
    assert nb.calibrate(train, config).settings == {name: fastest}
