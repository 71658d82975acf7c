"""Each finder's choice of a fastest setting against launches of every choice, on a small case.

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
FAST_BF16, FAST_AUTO = {"fast": {"precision": "bf16"}}, {"fast": {"precision": "auto"}}
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
    ("find", "data", "name", "values", "fastest"),
    [
        (nb.calibrate, {"sample": 0.04}, "distributed.strategy", ["single", "ddp"], "ddp"),
        (nb.calibrate, {"rank": 0.1}, "distributed.strategy", ["single", "ddp"], "single"),
        (nb.find_num_workers, {"reads": True}, "train.num_workers", [0, 1, 2], 2),
        (nb.find_num_workers, {"sample": 0.02}, "train.num_workers", [0, 2], 0),
        (nb.find_speedups, FAST_LAYOUT, "train.channels_last", [False, True], True),
        (nb.find_speedups, FAST_BF16, "train.precision", ["auto", "fp32", "bf16"], "bf16"),
        (nb.find_speedups, FAST_AUTO, "train.precision", ["auto", "bf16"], "auto"),
        (nb.find_speedups, FAST_COMPILED, "train.compile", [False, True], True),
    ],
    ids=[
        *("two-ranks", "one-rank", "loads-slowly", "loads-at-once"),
        *("layout", "bf16", "fp32", "compiled"),
    ],
)
def test_a_choice_is_what_brute_force_chooses(
    find: Any,
    data: Any,
    name: str,
    values: list[Any],
    fastest: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if find is not nb.find_num_workers:  # which tries as many as there are threads
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = made(tmp_path, **data)
    given: dict[str, Any] = {} if find is nb.calibrate else {"processes": 1}
    options = dict.fromkeys(("precision", "channels_last", "compile"), False)
    more = {**options, name[6:]: True} if find is nb.find_speedups else {}
    speeds = {value: launched(config, {name: value}, **given) for value in values}
    assert speeds[fastest] > 0.8 * max(speeds.values()), speeds
    found = find(train, config, **given, **more)
    # What the configuration says already is no change.
    assert found.settings == ({} if fastest == "auto" else {name: fastest})
