"""The class-balanced sampler: whole groups, the same batches on any number of ranks."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from step_samples import StepSamples, numbered, read_step_samples
from torch import Tensor, nn

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import FitError, WorkerDied
from nbtoolkit.extras.metric_learning.contrastive import ClassBalanced, make_loss
from nbtoolkit.worker.context import RunContext

# Classes of 40, 9, 3 and 2 samples, in no order.
SIZES = {7: 40, 300: 9, -1: 3, 2**40: 2}
LABELS = torch.tensor([label for label, size in SIZES.items() for _ in range(size)])[
    torch.randperm(54, generator=torch.Generator().manual_seed(0))
]


def test_each_round_has_a_whole_group_of_every_class() -> None:
    sampler = ClassBalanced(LABELS, 4)
    given = list(sampler)
    assert len(given) == len(sampler) == 3 * 16  # 54 samples, rounded to rounds of 16
    groups = LABELS[torch.tensor(given)].view(-1, 4)
    assert bool((groups == groups[:, :1]).all())
    for part in groups[:, 0].view(-1, 4):
        assert sorted(part.tolist()) == sorted(SIZES)


def test_samples_repeat_only_in_groups_of_classes_that_are_too_small() -> None:
    given = torch.tensor(list(ClassBalanced(LABELS, 4)))
    for group in given.view(-1, 4):
        distinct = min(4, SIZES[int(LABELS[group[0]])])
        assert len(set(group.tolist())) <= distinct
        if distinct == 4:
            assert len(set(group.tolist())) == 4


def test_the_order_comes_from_the_global_generator() -> None:
    sampler, orders = ClassBalanced(LABELS, 4), []
    for seed in (1, 1, 2):
        np.random.seed(seed)
        orders.append(list(sampler))
    assert orders[0] == orders[1] != orders[2]


def test_classes_of_one_sample_are_refused_or_left_out() -> None:
    labels = torch.tensor([3, 3, 3, 8, 5, 5])
    message = r"1 of 3 classes have one training sample: 8\n[\s\S]*model\.skip_single: true"
    with pytest.raises(FitError, match=message):
        ClassBalanced(labels, 2)
    skipped = labels[list(ClassBalanced(labels, 2, skip_single=True))]
    assert sorted(set(skipped.tolist())) == [3, 5]
    with pytest.raises(FitError, match="4 of 4 classes have one training sample: 0, 1, 2, 3"):
        ClassBalanced(torch.arange(4), 2, skip_single=True)
    with pytest.raises(FitError, match=r"7 of 7 classes .*: 0, 1, 2, 3, 4 and 2 more"):
        ClassBalanced(torch.arange(7), 2)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(FitError, match="samples_per_class is 1"):
        ClassBalanced(LABELS, 1)


# --- in fit ---


SETTINGS = {
    "optim.lr": 0.1,
    "train.epochs": 3,
    "train.batch_size": 16,
    "tracking.mlflow": False,
    "checkpoint.every_steps": 1,
    "checkpoint.weights": "last",
}


def encoded(config: Config, ctx: RunContext) -> Tensor:
    inputs = torch.randn(54, 6, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    first_attempt = not ctx.paths.checkpoints.exists()

    class Killed(nb.Callback):
        def on_train_batch_end(self, state: Any) -> None:
            if config.model.get("killed") and first_attempt and state.step == 5:
                ctx.accelerator.wait_for_everyone()
                if ctx.is_main:
                    os.kill(os.getpid(), signal.SIGKILL)

    noted = StepSamples()
    nb.fit(
        ctx,
        config,
        model,
        (numbered(inputs), LABELS),
        None,
        loss=make_loss("SupConLoss"),
        sampler=ClassBalanced(LABELS, 4),
        step=noted.step,
        callbacks=[noted, Killed()],
    )
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.long
def test_batches_and_weights_are_equal_on_two_ranks_and_after_a_kill(tmp_path: Path) -> None:
    def config_of(folder: str, **more: Any) -> Config:
        settings = {**SETTINGS, "runtime.output_dir": str(tmp_path / folder), **more}
        return nb.load_config(env=None, overrides=settings)

    one = nb.launch(encoded, config_of("one"), processes=1, display="off")
    two = nb.launch(encoded, config_of("two"), processes=2, display="off")
    config = config_of("killed", **{"model.killed": True})
    with pytest.raises(WorkerDied):
        nb.launch(encoded, config, processes=2, display="off")
    resumed = nb.launch(encoded, config, processes=2, display="off")
    expected = read_step_samples(one.paths)
    assert list(expected) == [(1 + step // 3, 1 + step) for step in range(9)]
    for batch in expected.values():
        assert Counter(LABELS[batch].tolist()) == dict.fromkeys(SIZES, 4)
    assert expected[1, 1] != expected[2, 4]
    for other in (two, resumed):
        assert read_step_samples(other.paths) == expected
        torch.testing.assert_close(other.value, one.value, atol=1e-5, rtol=0)
    assert "resumes after epoch" in resumed.paths.log(0).read_text()
