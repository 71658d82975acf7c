"""The samples of each optimizer step are the same on any number of ranks and passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from feeds import Augmented, AugmentedStream, contexts, listed, steps_of
from step_samples import StepSamples, read_step_samples
from torch import nn

import nbtoolkit as nb
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.training.data import take_apart
from nbtoolkit.training.loader import make_train_loader


def collate(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs with the number of the sample as the last column, and classes."""
    inputs = torch.tensor([[*drawn, number] for number, drawn in rows])
    return inputs, inputs[:, :3].argmax(dim=1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("ranks", "passes"), [(1, 1), (2, 3), (3, 2)])
def test_a_step_takes_what_one_rank_would_be_given(
    tmp_path: Path, ranks: int, passes: int, stream: bool
) -> None:
    """On 2 ranks with 3 passes, one of them has no sample left in the last pass of an epoch."""
    data = AugmentedStream(29) if stream else Augmented(29)

    def train(config: Any, ctx: Any) -> None:
        noted, loss = StepSamples(), nn.functional.cross_entropy
        given = {"loss": loss, "collate": collate, "step": noted.step, "callbacks": [noted]}
        nb.fit(ctx, config, nn.Linear(3, 3), data, None, **given)

    [alone] = contexts(tmp_path / "alone", train__max_steps=6)
    settings = {
        "runtime.output_dir": str(tmp_path),
        "tracking.mlflow": False,
        "train.epochs": 2,
        "train.gradient_accumulation_steps": passes,
    }
    config = alone.config.with_overrides(settings)
    result = nb.launch(train, config, processes=ranks, resume="never", display="off")
    feed = make_train_loader(alone, alone.config, take_apart(data, collate=listed))
    given = [(epoch, step) for epoch in (1, 2) for step in steps_of(feed, epoch)]
    assert [len(step) for _, step in given] == [12, 12, 5] * 2
    assert read_step_samples(result.paths) == {
        (epoch, number): [sample for sample, _ in step]
        for number, (epoch, step) in enumerate(given, start=1)
    }


def note(folder: Path, rank: int, ranks: int, samples: list[int]) -> None:
    """Write a line as rank ``rank`` writes it after the first step."""
    line = {"ranks": ranks, "epoch": 1, "step": 1, "samples": samples}
    with (folder / f"step-samples-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_the_reader_refuses_a_repeated_step_with_other_samples(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    note(tmp_path, 0, 2, [3, 1])
    assert read_step_samples(paths) == {}  # the other rank was killed before
    note(tmp_path, 0, 2, [3, 1])
    note(tmp_path, 1, 2, [2])
    note(tmp_path, 0, 1, [3, 1, 2])
    assert read_step_samples(paths) == {(1, 1): [3, 1, 2]}
    note(tmp_path, 0, 3, [3])
    note(tmp_path, 1, 3, [1])
    note(tmp_path, 2, 3, [4])
    with pytest.raises(AssertionError, match=r"3 ranks repeated \(1, 1\) with other samples"):
        read_step_samples(paths)
    note(tmp_path, 1, 2, [5])
    with pytest.raises(AssertionError, match=r"rank 1 repeated \(1, 1\) with other samples"):
        read_step_samples(paths)
