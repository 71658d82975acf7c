"""Runs of nb.fit of one rank in the test's process, on a small classification problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from machines import CPU_BUILD, machine
from torch import nn

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.host import detect_host
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.record import RunRecord
from nbtoolkit.wire.payload import JobSpec
from nbtoolkit.worker.channel import RecordChannel
from nbtoolkit.worker.context import RunContext

SETTINGS = {
    "optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "warmup_ratio": 0.0},
    "train": {"epochs": 3, "batch_size": 12},
    "tracking": {"mlflow": False, "log_every_n_steps": 2},
}


def configured(**more: Any) -> Config:
    return Config.model_validate(SETTINGS).with_overrides(more.pop("overrides", {}))


def samples(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in 6 dimensions, and which of the first three is largest."""
    inputs = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs[:, :3].argmax(dim=1)


def model_of(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *more, nn.Tanh(), nn.Linear(16, 3))


class Run:
    """A run of one rank in this process, whose folder can be resumed."""

    def __init__(self, folder: Path) -> None:
        self.paths = RunPaths(folder)
        folder.mkdir()

    def context(self, config: Config) -> RunContext:
        hardware = machine(build=CPU_BUILD)
        plan = make_plan(config, detect_host({}), hardware)
        self.record = RunRecord(self.paths, deadline=None)
        job = JobSpec(paths=self.paths, plan=plan, config=config)
        return RunContext(job, RecordChannel(self.record))

    def fit(self, model: nn.Module | None = None, *, config: Config | None = None, **more: Any):
        config = config or configured()
        given = {
            "train_data": samples(37),
            "valid_data": samples(11, seed=1),
            "loss": nn.functional.cross_entropy,
            **more,
        }
        return nb.fit(self.context(config), config, model or model_of(), **given)

    def events(self, type: str) -> list[dict[str, Any]]:
        lines = map(json.loads, self.paths.events.read_text().splitlines())
        return [event for event in lines if event["type"] == type]

    def saved(self, part: str = "training", *, fit: str = "") -> dict[str, Any]:
        """A part of the newest checkpoint, read without our code."""
        newest = max((self.paths.checkpoints / fit).glob("step-*"))
        return torch.load(newest / f"{part}.pt", weights_only=True)

    def best(self) -> dict[str, Any]:
        """The manifest of the best checkpoint."""
        (folder,) = self.paths.checkpoints.glob("best-*")
        return json.loads((folder / "manifest.json").read_text())


def check_equal_weights(one: nn.Module, other: nn.Module, *, atol: float = 0.0) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, atol=atol, rtol=0)


def launch(train: Any, config: Config, ranks: int = 2, **options: Any) -> nb.RunResult:
    """Launch without a display."""
    return nb.launch(train, config, processes=ranks, display="off", **options)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the model's state."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def close(one: dict[str, Any], other: dict[str, Any], atol: float = 1e-5) -> None:
    """Fail unless two states have the same names and nearly the same values."""
    assert list(one) == list(other)
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], atol=atol, rtol=0, msg=name)
