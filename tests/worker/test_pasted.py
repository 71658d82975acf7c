"""Code pasted from scripts for torchrun works, or the error says what to delete."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import WorkerDied
from nbtoolkit.worker.context import RunContext


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config().with_overrides({"tracking.mlflow": False, "runtime.output_dir": str(tmp_path)})


def forms_a_group(config: Config, ctx: RunContext) -> int:
    dist.init_process_group("gloo")
    return dist.get_rank()


def reads_local_rank(config: Config, ctx: RunContext) -> int:
    return int(os.environ["LOCAL_RANK"])


def leaves_the_group(config: Config, ctx: RunContext) -> int:
    rank = dist.get_rank() if dist.is_initialized() else 0
    if dist.is_initialized():
        dist.destroy_process_group()
    return rank


def reads_arguments(config: Config, ctx: RunContext) -> float:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    return float(parser.parse_args().lr)


def exits(config: Config, ctx: RunContext) -> None:
    sys.exit(2)


# torch 2.11 on a GPU: class weights of the notebook in a loss that is a lambda, and a convolution.
ON_THE_CPU = [
    "Expected all tensors to be on the same device, but got weight is on cpu, different from other "
    "tensors on cuda:0 (when checking argument in method wrapper_CUDA_nll_loss_forward)",
    "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same",
]


def mixes_devices(config: Config, ctx: RunContext) -> None:
    raise RuntimeError(config.model.text)


class Textless(Exception):
    def __str__(self) -> str:
        raise TypeError("no text")


def raises_odd_key(config: Config, ctx: RunContext) -> None:
    raise KeyError(["not hashable"])


def raises_textless(config: Config, ctx: RunContext) -> None:
    raise Textless


@pytest.mark.parametrize("processes", [1, 2])
def test_a_group_is_not_to_be_formed(config: Config, processes: int) -> None:
    with pytest.raises(ValueError, match=r"group twice|RANK expected") as caught:
        nb.launch(forms_a_group, config, processes=processes, display="off")
    assert "delete init_process_group(...)" in "\n".join(caught.value.__notes__)


def test_a_variable_of_torchruns_is_in_ctx(config: Config) -> None:
    result = nb.launch(reads_local_rank, config, processes=2, display="off")
    assert result.values == [0, 1]
    start: Any
    for start in ("forkserver", "inline"):
        with pytest.raises(KeyError) as caught:
            nb.launch(reads_local_rank, config, processes=1, start=start, display="off")
        assert "use ctx.local_rank instead" in "\n".join(caught.value.__notes__)


def test_a_group_may_be_left(config: Config) -> None:
    assert nb.launch(leaves_the_group, config, processes=2, display="off").values == [0, 1]


def test_arguments_are_those_of_the_kernel(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher", "-f", "/tmp/kernel-1.json"])
    with pytest.raises(WorkerDied, match=r"SystemExit\(2\)[\s\S]*parser.parse_args\(\[\]\)"):
        nb.launch(reads_arguments, config, display="off")


@pytest.mark.parametrize("text", ON_THE_CPU)
def test_a_tensor_that_stayed_on_the_cpu_is_to_be_moved(config: Config, text: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        nb.launch(mixes_devices, config.with_overrides({"model.text": text}), display="off")
    assert ".to(ctx.device)" in "\n".join(caught.value.__notes__)


def test_another_exit_is_told_as_before(config: Config) -> None:
    with pytest.raises(WorkerDied, match=r"SystemExit\(2\)[\s\S]*return instead"):
        nb.launch(exits, config, display="off")


def test_an_error_that_advice_cannot_read_arrives_as_it_is(config: Config) -> None:
    with pytest.raises(KeyError, match="not hashable"):
        nb.launch(raises_odd_key, config, display="off")
    with pytest.raises(Textless):
        nb.launch(raises_textless, config, display="off")
