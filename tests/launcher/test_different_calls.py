"""Ranks that wait for each other in different calls are reported with both lines."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import functions
import pytest
import torch
from kernels import finish
from launches import begin, line_of

import nbtoolkit as nb
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import ReportError, WorkerHung
from nbtoolkit.launcher.health import HangDetector
from nbtoolkit.launcher.worker_group import WorkerGroup
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.wire.transport import GroupConnections
from nbtoolkit.worker.context import RunContext
from nbtoolkit.worker.main import STACKS_SIGNAL
from nbtoolkit.worker.waiting import in_collective


@pytest.fixture
def config(config: nb.Config) -> nb.Config:
    return config.with_overrides({"runtime.hang_timeout": functions.HANG})


def launch(train: Callable[..., Any], config: nb.Config) -> Any:
    return finish(begin(train, config), functions.HANG).value


def normed(ctx: RunContext) -> Any:
    return ctx.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))


# --- one rank alone makes a call in which it waits for the others ---


def predicts_alone(config: nb.Config, ctx: RunContext) -> None:
    model = torch.nn.Linear(4, 1)
    if ctx.is_main:
        nb.predict(ctx, model, torch.ones(9, 4))
    ctx.report({"loss": 1.0})


def predicts_alone_at_the_end(config: nb.Config, ctx: RunContext) -> None:
    if ctx.is_main:
        nb.predict(ctx, torch.nn.Linear(4, 1), torch.ones(9, 4))


def evaluates_alone(config: nb.Config, ctx: RunContext) -> None:
    model = normed(ctx)
    if ctx.is_main:
        with torch.no_grad():
            model.eval()(torch.ones(2, 4))
    ctx.report({"loss": 1.0})


def evaluates_alone_while_others_train(config: nb.Config, ctx: RunContext) -> None:
    model = normed(ctx)
    for _ in range(3):
        model.train()(torch.randn(2, 4)).sum().backward()
        if ctx.is_main:
            for _ in range(2):
                model.eval()(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("train", "call"),
    [
        (predicts_alone, "nb.predict"),
        pytest.param(evaluates_alone, "model.eval()", marks=pytest.mark.long),
    ],
)
def test_a_call_of_one_rank_is_named_where_the_others_report(
    train: Callable[..., Any], call: str, config: nb.Config
) -> None:
    with pytest.raises(ReportError, match="rank 0 waits at") as caught:
        launch(train, config)
    said = str(caught.value)
    assert f"test_different_calls.py:{line_of(train, call)} out of `if ctx.is_main:`" in said
    assert "ctx.unwrap(model)" in said
    assert f"ctx.report at {__file__}:{line_of(train, 'ctx.report')}" in said


@pytest.mark.long
def test_a_call_of_one_rank_is_named_where_the_others_have_returned(config: nb.Config) -> None:
    with pytest.raises(WorkerHung, match="rank 1 has returned") as caught:
        launch(predicts_alone_at_the_end, config)
    line = line_of(predicts_alone_at_the_end, "nb.predict")
    assert f"rank 0 waits in collective number 2 at {__file__}:{line}" in str(caught.value)


def test_ranks_in_different_collectives_are_told_their_lines(config: nb.Config) -> None:
    train = evaluates_alone_while_others_train
    places = [f"{__file__}:{line_of(train, text)}" for text in ("model.eval()", "model.train()")]
    with pytest.raises(WorkerHung, match="wait for each other in different calls") as caught:
        launch(train, config)
    said = str(caught.value)
    assert re.search(rf"rank 0 waits in collective number \d+ at {places[0]}", said)
    assert re.search(rf"rank 1 waits in collective number \d+ at {places[1]}", said)


def waits_inside_a_library(config: nb.Config, ctx: RunContext) -> None:
    from accelerate.utils import broadcast, gather

    exchange = gather if ctx.is_main else broadcast
    exchange(torch.ones(3))


def test_a_deadlock_inside_a_library_is_found_in_seconds(config: nb.Config) -> None:
    """All ranks are at the same line of the user's, with equal numbers of collectives."""
    with pytest.raises(WorkerHung, match="wait for each other in different calls") as caught:
        launch(waits_inside_a_library, config)
    said = str(caught.value)
    line = line_of(waits_inside_a_library, "exchange(torch")
    assert said.count(f"waits in collective number 2 at {__file__}:{line}") == 2
    assert re.search(r"rank 0: .*/accelerate/utils/operations.py:\d+ in .*gather", said)
    assert re.search(r"rank 1: .*/accelerate/utils/operations.py:\d+ in .*broadcast", said)


# --- one rank alone works for long, or hangs ---


def computes_while_others_report(config: nb.Config, ctx: RunContext) -> float:
    began = time.monotonic()
    while ctx.is_main and time.monotonic() - began < 5.0:
        torch.randn(50, 50).inverse()
    ctx.report({"loss": 1.0})
    return time.monotonic() - began


def sleeps_while_others_report(config: nb.Config, ctx: RunContext) -> None:
    if ctx.is_main:
        time.sleep(functions.HANG)
    ctx.report({"loss": 1.0})


@pytest.mark.long
def test_a_rank_that_computes_alone_is_waited_for_in_a_report(config: nb.Config) -> None:
    mine = config.with_overrides({"runtime.hang_timeout": 2.0})
    assert launch(computes_while_others_report, mine) >= 5.0


@pytest.mark.long
def test_a_rank_that_hangs_while_the_others_report_is_found(config: nb.Config) -> None:
    # Longer than a report waits until the other ranks are looked at, which hid the hang.
    mine = config.with_overrides({"runtime.hang_timeout": 8.0})
    with pytest.raises(WorkerHung, match="rank 0 sent nothing"):
        launch(sleeps_while_others_report, mine)


# --- stacks ---

DDP = "torch.nn.parallel.distributed"


@pytest.mark.parametrize(
    ("modules", "waits"),
    [
        # NCCL returns from a collective at once: a rank that waits turns in the next call that
        # needs a result, with no frame of torch.
        (["__main__"], False),
        (["torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "__main__"], True),
        (["torch.autograd.graph", "torch.autograd", "torch._tensor", "__main__"], True),
        # DDP sends its buffers, or a layer below it computes.
        ([DDP, "torch.nn.modules.module", "__main__"], True),
        (["torch.nn.modules.linear", DDP, "__main__"], False),
        (["mine", "torch.distributed.distributed_c10d", "__main__"], False),
    ],
)
def test_which_stacks_end_in_a_collective(modules: list[str], waits: bool) -> None:
    assert in_collective(modules) == waits


TURNS = "while True: pass"
SLEEPS = "import time; time.sleep(600)"
RANK = """
import faulthandler, sys
faulthandler.register(int(sys.argv[2]), file=open(sys.argv[1], "w"), all_threads=True)
print("up", flush=True)
"""


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[tuple[WorkerGroup, RunPaths]]:
    """Rank 0 turns in a loop as in ``.item()``, rank 1 sleeps; neither shows a frame of torch's."""
    config = nb.load_config(env=None, overrides={"distributed.world_size": 2})
    plan = make_plan(config, nb.detect_host(), nb.detect_hardware())
    paths = RunPaths.create(tmp_path, "apart")
    paths.stacks(0).parent.mkdir(parents=True)
    mine, theirs = GroupConnections.pair(plan.processes)
    worker_group = WorkerGroup(plan, mine, paths.elastic)
    with ExitStack() as stack:
        for rank, does in enumerate((TURNS, SLEEPS)):
            command = [sys.executable, "-c", RANK + does, str(paths.stacks(rank))]
            process = stack.enter_context(
                subprocess.Popen(
                    [*command, str(int(STACKS_SIGNAL))], stdout=subprocess.PIPE, text=True
                )
            )
            stack.callback(process.send_signal, signal.SIGKILL)
            assert process.stdout is not None
            process.stdout.readline()
            worker_group.ranks[rank].pid = process.pid
        yield worker_group, paths
    worker_group.close()
    theirs.close()


@pytest.mark.long
@pytest.mark.parametrize(("collectives", "hung"), [((5, 4), 1), ((4, 4), None)])
def test_a_rank_that_turns_in_a_loop_waits_if_it_is_ahead(
    two_ranks: tuple[WorkerGroup, RunPaths], collectives: tuple[int, int], hung: int | None
) -> None:
    worker_group, paths = two_ranks
    watch = HangDetector(worker_group, paths, 1.0)
    for rank, number in zip(worker_group.ranks, collectives, strict=True):
        rank.collectives = number
    found = None
    end = time.monotonic() + 6.0
    while found is None and time.monotonic() < end:
        watch.sample()
        found = watch.hung()
        time.sleep(0.05)
    assert (found and found.rank) == hung
