"""nb.fit with bad data and broken machines: a clear error, and no saved work lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import nbtoolkit as nb
from nbtoolkit.errors import CheckpointError, FitError


def configured(folder: Path, **more: Any) -> nb.Config:
    settings = {
        "runtime.output_dir": str(folder),
        "train.epochs": 3,
        "train.batch_size": 6,
        "optim.warmup_ratio": 0.0,
        "tracking.mlflow": False,
        "tracking.log_every_n_steps": 4,
    }
    return nb.load_config(env=None, overrides={**settings, **more})


class Spared(torch.nn.Module):
    """A model with a layer that takes no part."""

    def __init__(self, used: torch.nn.Module) -> None:
        super().__init__()
        self.used, self.spare = used, torch.nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


def train(config: Any, ctx: Any) -> dict[str, float]:
    """What may go wrong is chosen by config.model.fault."""
    import resource

    import torch
    from torch import nn

    fault, hidden = config.model.get("fault"), config.model.get("hidden", 8)
    inputs = torch.randn(45, 6, generator=torch.Generator().manual_seed(0))
    labels = inputs[:, :3].argmax(dim=1)
    if fault == "nan":
        inputs[17] = torch.nan
    if fault == "label":
        labels[3] = 7
    model = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3))
    if fault == "unused":
        model = Spared(model)
    taken = 0

    def forward(model: Any, batch: Any) -> tuple[Any, Any]:
        nonlocal taken
        taken += model.training
        if fault == "disk" and taken == 12:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, resource.RLIM_INFINITY))
        return model(batch[0]), batch[1]

    data = (inputs, labels)
    return nb.fit(ctx, config, model, data, data, loss=nn.functional.cross_entropy, step=forward)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_loss_that_is_no_number_ends_it_with_the_step_and_its_samples(
    tmp_path: Path, ranks: int
) -> None:
    config = configured(tmp_path, **{"model.fault": "nan"})
    with pytest.raises(FitError, match=r"the loss of optimizer step (\d) .* is nan") as caught:
        nb.launch(train, config, processes=ranks, display="off")
    named = str(caught.value).partition("Its batch: samples ")[2].splitlines()[0]
    assert "17" in named.split(", ")
    assert len(named.split(", ")) == 6


def test_labels_without_a_score_are_told_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(FitError, match=r"7"):
        nb.launch(train, configured(tmp_path, **{"model.fault": "label"}), display="off")


def test_parameters_without_a_part_are_named(tmp_path: Path) -> None:
    config = configured(tmp_path, **{"model.fault": "unused"})
    with pytest.raises(FitError, match=r"spare\.weight[\s\S]*find_unused_parameters: true"):
        nb.launch(train, config, processes=2, display="off")
    again = config.with_overrides({"distributed.find_unused_parameters": True})
    assert nb.launch(train, again, processes=2, display="off").status == "completed"


def test_a_disk_that_fills_up_does_not_end_training_nor_harm_what_is_saved(tmp_path: Path) -> None:
    settings = {"model.fault": "disk", "model.hidden": 512, "checkpoint.every_steps": 5}
    result = nb.launch(train, configured(tmp_path, **settings), display="off")
    assert result.status == "completed"
    events = map(json.loads, result.paths.events.read_text().splitlines())
    notes = [event["text"] for event in events if event["type"] == "note"]
    assert any("training continues without a checkpoint" in note for note in notes)
    saved = sorted(path.name for path in result.paths.checkpoints.iterdir())
    assert "step-000000005" in saved  # that of step 10 may be just under way when the disk is full
    assert [name for name in saved if name.startswith(".")] == []
    model = torch.nn.Sequential(torch.nn.Linear(6, 512), torch.nn.Tanh(), torch.nn.Linear(512, 3))
    result.load_into(model, "last")


def test_a_batch_that_the_ranks_cannot_divide_names_those_they_can(tmp_path: Path) -> None:
    with pytest.raises(nb.errors.PlanError, match=r"batch_size 6 .* 4 processes[\s\S]*4 or 8"):
        nb.launch(train, configured(tmp_path), processes=4, display="off")


def test_when_every_checkpoint_is_damaged_nothing_begins_anew_in_silence(tmp_path: Path) -> None:
    config = configured(tmp_path)
    result = nb.launch(train, config, display="off")
    for path in result.paths.checkpoints.glob("step-*/model.pt"):
        path.write_bytes(path.read_bytes()[:-7])
    more = config.with_overrides({"train.epochs": 4})
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged: .* bytes of"):
        nb.launch(train, more, resume=result.paths.folder, processes=2, display="off")


def test_a_checkpoint_of_another_run_is_refused_by_what_differs(tmp_path: Path) -> None:
    import shutil

    small = nb.launch(train, configured(tmp_path), display="off", name="small")
    config = configured(tmp_path, **{"model.hidden": 16})
    large = nb.launch(train, config, display="off", name="large")
    for path in large.paths.checkpoints.glob("step-*"):
        shutil.rmtree(path)
    (newest,) = small.paths.checkpoints.glob("step-*")
    shutil.copytree(newest, large.paths.checkpoints / newest.name)
    more = config.with_overrides({"train.epochs": 4})
    with pytest.raises(
        CheckpointError, match=r"does not fit this Sequential: 0\.weight is \(8, 6\)"
    ):
        nb.launch(train, more, resume=large.paths.folder, display="off")
