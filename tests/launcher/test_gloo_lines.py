"""Lines that gloo itself prints (torch 2.10) reach neither a rank's log nor the cell."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist

import nbtoolkit as nb
from nbtoolkit.worker.collectives import new_gloo_group, without_gloo_lines

LINE = (
    b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"
)


def silent(config: nb.Config, ctx: nb.RunContext) -> None:
    # As nb.fit does where the ranks' own group is NCCL's. Without a collective the first rank may
    # have ended while the other still connects to it ("connectFullMesh failed", one of 3,000 tests
    # on a loaded machine).
    dist.barrier(new_gloo_group())


def test_a_rank_that_prints_nothing_has_an_empty_log(
    config: nb.Config, capfd: pytest.CaptureFixture[str]
) -> None:
    result = nb.launch(silent, config, processes=2, display="text")
    assert [result.paths.log(rank).read_text() for rank in (0, 1)] == ["", ""]
    assert "Gloo" not in capfd.readouterr().out


def test_only_its_lines_are_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    with without_gloo_lines():
        os.write(1, b"before\n" + LINE + b"after\n" + LINE + b"[Gloo] an error")
    os.write(1, b" of it\n")
    assert capfd.readouterr().out == "before\nafter\n[Gloo] an error of it\n"


def test_what_was_written_before_an_error_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    def join() -> None:
        os.write(1, LINE + b"cannot reach rank 1\n")
        raise RuntimeError("no peer")

    with pytest.raises(RuntimeError, match="no peer"), without_gloo_lines():
        join()
    assert capfd.readouterr().out == "cannot reach rank 1\n"


def late(config: nb.Config, ctx: nb.RunContext) -> str:
    group = new_gloo_group(2.0)
    if ctx.rank == 1:
        time.sleep(4)
        return ""
    try:
        dist.barrier(group)
    except RuntimeError as error:
        return str(error)
    return "no limit"


@pytest.mark.long
def test_a_group_has_the_limit_that_it_is_given(config: nb.Config) -> None:
    result = nb.launch(late, config, processes=2, display="off")
    assert "imed out" in result.value or "imeout" in result.value
