"""Losses that are not finite: the step and samples are reported, the same on all ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import CPU_BUILD, machine
from torch import nn

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import FitError
from nbtoolkit.host import detect_host
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.record import RunRecord
from nbtoolkit.training.evaluation import forward_pair
from nbtoolkit.training.samples import Passes, permutation
from nbtoolkit.training.step import Recipe, TrainStep
from nbtoolkit.training.sync import StepLoss, not_finite, raise_if_not_finite
from nbtoolkit.wire.payload import JobSpec
from nbtoolkit.worker.channel import RecordChannel
from nbtoolkit.worker.context import RunContext

NAN, INF = math.nan, math.inf


def losses(*values: float, first: int = 1) -> list[StepLoss]:
    """One loss a step, from step ``first`` of the first epoch on."""
    steps = enumerate(values, first)
    return [StepLoss(step, 1, step - 1, value) for step, value in steps]


@pytest.fixture
def ctx(tmp_path: Path) -> RunContext:
    """A run of one rank in this process."""
    (tmp_path / "run").mkdir()
    paths, config = RunPaths(tmp_path / "run"), Config()
    plan = make_plan(config, detect_host({}), machine(build=CPU_BUILD))
    channel = RecordChannel(RunRecord(paths, deadline=None))
    return RunContext(JobSpec(paths=paths, plan=plan, config=config), channel)


# --- which step it was ----------------------------------------------------------------------------


def test_losses_that_are_not_finite_come_by_step() -> None:
    assert not_finite(losses(1.0, 2.0)) == []
    other = [StepLoss(1, 1, 0, 0.5), StepLoss(2, 1, 1, -INF)]
    assert [one.step for one in not_finite([*losses(1.0, 1.0, NAN, 2.0, INF), *other])] == [2, 3, 5]


# --- what is said ---------------------------------------------------------------------------------


def test_the_message_has_step_samples_and_what_to_do(ctx: RunContext) -> None:
    asked = []

    def sample_ids(epoch: int, step: int) -> list[int]:
        asked.append((epoch, step))
        return [7, 3, 5]

    what = (
        r"loss of optimizer step 12 \(step 2 of epoch 4\) is nan; learning rate 0\.001, gradient "
        r"norm 31\.5\n  Its batch: samples 7, 3, 5\n[\s\S]*lower optim\.lr, .*train\.max_grad_norm"
    )
    window = [StepLoss(11, 4, 0, 1.0), StepLoss(12, 4, 1, NAN)]
    with pytest.raises(FitError, match=what):
        raise_if_not_finite(ctx, window, sample_ids, tolerant=False, rate=1e-3, grad_norm=31.5)
    assert asked == [(4, 1)]


def test_of_a_large_batch_twenty_samples_are_shown(ctx: RunContext) -> None:
    with pytest.raises(FitError, match=r"is inf\n.* 17, 18, 19 and 44 more\n"):
        raise_if_not_finite(ctx, losses(INF), lambda *_: range(64), tolerant=False)


def test_a_step_that_fp16_left_out_is_told_and_not_refused(
    ctx: RunContext, capsys: pytest.CaptureFixture[str]
) -> None:
    raise_if_not_finite(ctx, losses(1.0, NAN, 2.0), lambda *_: [], tolerant=True)
    assert "loss of optimizer step 2 is not finite" in capsys.readouterr().out


# --- a sample that is not a number, on ranks ------------------------------------------------------


def train_on_a_bad_sample(config: Config, ctx: RunContext) -> tuple[str, list[int]]:
    """Train until a loss is not finite; what was said, and the batch that the bad sample is in."""
    size, bad = 24, 13
    inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
    targets = inputs.sum(dim=1, keepdim=True)
    inputs[bad, 2] = config.data.value
    micro = 8 // ctx.world_size
    passes = Passes(size=size, batch=8, micro=micro, rank=ctx.rank, ranks=ctx.world_size)
    order = permutation(size, seed=0, epoch=1)
    batches = [block.tolist() for block in order.split(8)]
    torch.manual_seed(0)
    train_step = TrainStep(
        ctx,
        config,
        nn.Linear(4, 1),
        Recipe(loss=nn.functional.mse_loss, forward=forward_pair),
        steps=3,
    )
    told = []
    for step, (rows, share) in enumerate(
        zip(passes.indices(order).split(micro), passes.micro_batches, strict=True)
    ):
        loss = train_step.step((inputs[rows], targets[rows]), share, measure_norm=False).mean
        told.append(StepLoss(step + 1, 1, step, float(loss)))
    try:
        raise_if_not_finite(ctx, told, lambda epoch, step: batches[step], tolerant=False)
    except FitError as error:
        return str(error), next(batch for batch in batches if bad in batch)
    return "nothing was raised", []


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("value", [NAN, INF], ids=str)
def test_all_ranks_name_the_batch_with_the_bad_sample(
    tmp_path: Path, value: float, ranks: int
) -> None:
    settings: dict[str, Any] = {
        "data.value": value,
        "tracking.mlflow": False,
        "runtime.output_dir": str(tmp_path),
    }
    result = nb.launch(
        train_on_a_bad_sample, settings, processes=ranks, resume="never", display="off"
    )
    (said, batch), *others = result.values
    assert f"samples {', '.join(map(str, batch))}\n" in said
    assert others == [(said, batch)] * (ranks - 1)
