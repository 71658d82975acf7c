"""Code pasted from scripts for torchrun works, or the error says what to change."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mounts import in_own_mounts
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import PlanError, WorkerDied
from nbtoolkit.worker.advice import advice
from nbtoolkit.worker.context import RunContext

DATA = TensorDataset(torch.arange(12.0).reshape(12, 1), torch.arange(12.0).reshape(12, 1))
Losses = list[float]


def torchrun_script(config: Config, ctx: RunContext, *, form: bool = True) -> tuple[int, Losses]:
    """The recipe of torch's DDP tutorials; its sampler and model ask for the default group."""
    if form:
        dist.init_process_group("gloo")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert (rank, ranks) == (dist.get_rank(), dist.get_world_size()) == (ctx.rank, ctx.world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    sampler: Any = DistributedSampler(DATA, shuffle=False)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(DATA, 4 // ranks, sampler=sampler):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            losses.append(float(mean))
    dist.destroy_process_group()
    return int(os.environ["LOCAL_RANK"]), losses


def script_without_group(config: Config, ctx: RunContext) -> tuple[int, Losses]:
    return torchrun_script(config, ctx, form=False)


def asks_before_it_forms(config: Config, ctx: RunContext) -> int:
    rank = int(os.environ["LOCAL_RANK"])
    assert DistributedSampler(DATA).rank == rank
    dist.init_process_group("gloo", rank=rank, world_size=ctx.world_size)
    dist.barrier()
    return rank


def asks_for_another_group(config: Config, ctx: RunContext) -> str:
    messages = []
    for arguments in ({"backend": "nccl"}, {"world_size": 4, "rank": 0}):
        with pytest.raises(PlanError) as caught:
            dist.init_process_group(**arguments)
        messages.append(str(caught.value))
    return "\n".join(messages)


def is_as_before(config: Config, ctx: RunContext) -> list[str]:
    """Libraries do the same on one rank as without torchrun's variables and groups."""
    from accelerate import Accelerator

    model = Accelerator().prepare(nn.Linear(1, 1))
    ours = ctx.prepare(nn.Linear(1, 1))
    return [str(dist.is_initialized()), type(model).__name__, type(ours).__name__]


def reads_arguments(config: Config, ctx: RunContext) -> float:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    return float(parser.parse_args().lr)


class Textless(Exception):
    def __str__(self) -> str:
        raise TypeError("no text")


def raises_odd_key(config: Config, ctx: RunContext) -> None:
    raise KeyError(["not hashable"])


def raises_textless(config: Config, ctx: RunContext) -> None:
    raise Textless


@pytest.mark.parametrize("script", [torchrun_script, script_without_group])
def test_a_script_for_torchrun_runs_on_any_number_of_ranks(config: Config, script: Any) -> None:
    ranks: list[int]
    values: list[Losses]
    several = nb.launch(script, config, processes=2, display="off").values
    ranks, values = zip(*several, strict=True)  # type: ignore[assignment]
    assert list(ranks) == [0, 1]
    single = nb.launch(script, config, processes=1, display="off").value
    assert single == (0, pytest.approx(values[0], rel=1e-5))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_further_group_is_the_one_that_exists(config: Config, processes: int) -> None:
    result = nb.launch(asks_before_it_forms, config, processes=processes, display="off")
    assert result.values == list(range(processes))


def test_a_kernel_keeps_no_group_and_no_variables(config: Config) -> None:
    assert nb.launch(asks_before_it_forms, config, start="inline", display="off").value == 0
    assert "LOCAL_RANK" not in os.environ
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="not been initialized"):
        dist.get_rank()


def test_another_group_is_refused_with_both_sets_of_arguments(config: Config) -> None:
    told = nb.launch(asks_for_another_group, config, processes=2, display="off").value
    assert "init_process_group(backend='nccl') asks for another process group" in told
    assert "init_process_group(world_size=4, rank=0) asks" in told
    assert "backend='gloo', world_size=2, rank=0" in told
    assert "leave out rank and world_size" in told or "leave out world_size" in told


@pytest.mark.parametrize("start", ["forkserver", "inline"])
def test_libraries_see_no_group_on_one_rank(config: Config, start: Any) -> None:
    result = nb.launch(is_as_before, config, processes=1, start=start, display="off")
    assert result.value == ["False", "Linear", "Linear"]


def test_arguments_are_those_of_the_kernel(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher", "-f", "/tmp/kernel-1.json"])
    with pytest.raises(WorkerDied, match=r"SystemExit\(2\)[\s\S]*parser.parse_args\(\[\]\)"):
        nb.launch(reads_arguments, config, display="off")


SMALL_SHARED_MEMORY = """
import torch

class Pictures(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.ones(1_000_000), 0

def own_loop(config, ctx):
    for _ in ctx.prepare(torch.utils.data.DataLoader(Pictures(), 16, num_workers=1)): pass

def fit(config, ctx):
    model = torch.nn.Linear(1_000_000, 2)
    loss = torch.nn.functional.cross_entropy
    nb.fit(ctx, config, model, Pictures(), Pictures(), loss=loss)

if __name__ == "__main__":
    settings = {"tracking.mlflow": False, "train.batch_size": 16, "train.num_workers": 1}
    config = nb.load_config(env=None, overrides=settings)
    for train in (own_loop, fit):
        try:
            nb.launch(train, config, processes=1, display="off", resume="never")
        except RuntimeError as error:
            print(type(error).__name__, *error.__notes__)
"""


# torch 2.11 on a GPU: class weights of the notebook in a loss that is a lambda, and a convolution;
# then what torch and its DataLoader say of a /dev/shm that is full.
ADVICE = [
    (
        "Expected all tensors to be on the same device, but got weight is on cpu, different from "
        "other tensors on cuda:0 (when checking argument in method wrapper_CUDA_nll_loss_forward)",
        ".to(ctx.device)",
    ),
    (
        "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the "
        "same",
        ".to(ctx.device)",
    ),
    (
        "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device",
        "--shm-size=8g",
    ),
    (
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory. Please try to raise your shared memory",
        "--shm-size=8g",
    ),
]


@pytest.mark.parametrize(("text", "do"), ADVICE)
def test_errors_of_torch_have_advice(text: str, do: str) -> None:
    assert do in str(advice(RuntimeError(text)))


@pytest.mark.long
def test_a_small_dev_shm_is_told_with_what_to_do(tmp_path: Path) -> None:
    lines = in_own_mounts(SMALL_SHARED_MEMORY, tmp_path, at="/dev/shm", size="64m")
    assert len(lines) == 2
    for line in lines:
        assert "/dev/shm is full: it has 67.1 MB" in line
        assert "--shm-size=8g" in line
        assert "train.num_workers: 0" in line


def test_an_error_that_advice_cannot_read_arrives_as_it_is(config: Config) -> None:
    with pytest.raises(KeyError, match="not hashable"):
        nb.launch(raises_odd_key, config, display="off")
    with pytest.raises(Textless):
        nb.launch(raises_textless, config, display="off")


class TwoHeads(nn.Module):
    """Only one of its heads takes part in a step, as in the templates of some GANs."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        output: torch.Tensor = self.heads[head](inputs)
        return output


def one_head_a_step(config: Config, ctx: RunContext) -> None:
    model: Any = TwoHeads()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.001)
    loader: Any = DataLoader(DATA, batch_size=4)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    for step, (inputs, targets) in enumerate(loader):
        loss = (model(inputs, step % 2) - targets).square().mean()
        optimizer.zero_grad()
        ctx.accelerator.backward(loss)
        optimizer.step()


def test_a_model_of_which_a_step_uses_a_part_names_the_setting(config: Config) -> None:
    with pytest.raises(RuntimeError, match="Expected to have finished reduction") as caught:
        nb.launch(one_head_a_step, config, processes=2, display="off")
    assert "set distributed.find_unused_parameters: true" in "\n".join(caught.value.__notes__)
    other = config.with_overrides({"distributed.find_unused_parameters": True})
    assert nb.launch(one_head_a_step, other, processes=2, display="off").status == "completed"
