"""Note which samples count in each optimizer step of nb.fit, and read the notes of all ranks.

Each sample carries its number as the last column of its inputs. A sample counts in a step if the
loss has a gradient with respect to its outputs: a rank without samples passes a stand-in, whose
gradient is zero.
"""

from __future__ import annotations

import json
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import nbtoolkit as nb
from nbtoolkit.run.paths import RunPaths

Steps = dict[tuple[int, int], list[int]]
"""(epoch, number of finished optimizer steps) -> the samples of the last one, in order."""


def numbered(inputs: Tensor) -> Tensor:
    """Return inputs of shape (n, features), with the number of each sample as a further column."""
    return torch.cat([inputs, torch.arange(float(len(inputs)))[:, None]], dim=1)


class StepSamples(nb.Callback):
    """The notes of one rank of one fit: pass it as a callback, and its method ``step`` as ``step``.

    After each optimizer step, it appends a line to a file of the rank in the folder of the run.
    """

    def __init__(self) -> None:
        self._samples: list[int] = []

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        outputs = model(inputs[:, :-1])
        if outputs.requires_grad:
            numbers = inputs[:, -1].long().tolist()
            outputs.register_hook(partial(self._note, numbers))
        return outputs, targets

    def on_train_batch_end(self, state: nb.FitState) -> None:
        ctx = state.ctx
        line = {
            "ranks": ctx.world_size,
            "epoch": state.epoch,
            "step": state.step,
            "samples": self._samples,
        }
        with (ctx.paths.folder / f"step-samples-{ctx.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._samples = []

    def _note(self, numbers: list[int], gradient: Tensor) -> None:
        counts = gradient.ne(0).any(dim=1).tolist()
        self._samples += [
            number for number, counted in zip(numbers, counts, strict=True) if counted
        ]


def read_step_samples(paths: RunPaths) -> Steps:
    """Return the samples of each step that all ranks have noted, in the order of the ranks.

    Fails if a step that was repeated after a kill took other samples than before, on the same or
    on another number of ranks.
    """
    # (epoch, step) -> number of ranks -> rank -> samples
    notes: dict[tuple[int, int], dict[int, dict[int, list[int]]]] = defaultdict(dict)
    for rank, file in _files(paths.folder):
        for line in map(json.loads, file.read_text().splitlines()):
            place = (line["epoch"], line["step"])
            by_rank = notes[place].setdefault(line["ranks"], {})
            before = by_rank.setdefault(rank, line["samples"])
            assert line["samples"] == before, f"rank {rank} repeated {place} with other samples"
    steps: Steps = {}
    for place in sorted(notes):
        for ranks, by_rank in notes[place].items():
            if len(by_rank) == ranks:
                samples = [sample for rank in range(ranks) for sample in by_rank[rank]]
                before = steps.setdefault(place, samples)
                assert samples == before, f"{ranks} ranks repeated {place} with other samples"
    return steps


def _files(folder: Path) -> list[tuple[int, Path]]:
    """The file of each rank with its number."""
    return [(int(file.stem.split("-")[-1]), file) for file in folder.glob("step-samples-*.jsonl")]
