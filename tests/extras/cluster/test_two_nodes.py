"""Two nodes with an address each, in network namespaces: torchrun, gloo over a veth pair."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import two_nodes
from records import last_of
from restarted import train as restarted

import nbtoolkit as nb
from nbtoolkit.run.events import EventReader, MetricsReported, RunEnded, RunStarted
from nbtoolkit.tasks.digits import train as digits

pytestmark = pytest.mark.cluster

# Twenty steps of a fifth of a second, with a collective each.
STEPS = """
import time
import nbtoolkit as nb

def train(config, ctx):
    saved = ctx.load()
    done = saved["done"] if saved else 0
    for step in range(done, 20):
        time.sleep(0.2)
        ctx.save({"done": step + 1})
        ctx.report({"score": 1.0}, step=step)
    return {"started_at": done}

"""


@pytest.fixture
def nodes() -> Iterator[two_nodes.TwoNodes]:
    if lacking := two_nodes.missing():
        pytest.skip(f"NOT TESTED: {lacking}")
    with two_nodes.TwoNodes().running() as running:
        yield running


def config(folder: Path, **settings: Any) -> dict[str, Any]:
    fixed = {"runtime.output_dir": str(folder / "runs"), "tracking.mlflow": False}
    return {**fixed, "train.epochs": 2, **settings}


def script(folder: Path, text: str, **settings: Any) -> None:
    (folder / "job.py").write_text(f"{text}\nnb.launch(train, {config(folder, **settings)!r})\n")


def events(folder: Path) -> list[Any]:
    logs = list((folder / "runs").glob("*-train-*/events.jsonl"))
    return list(EventReader(logs[0]).read()) if logs else []


def reported(folder: Path) -> list[int | None]:
    return [event.step for event in events(folder) if isinstance(event, MetricsReported)]


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def all_well(folder: Path, processes: list[subprocess.Popen[str]]) -> RunEnded:
    texts = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    [run] = (folder / "runs").glob("*-train-*")
    result = last_of(run)
    assert (result.status, result.processes) == ("completed", 2)
    return result


def test_two_nodes_give_the_metrics_of_one(nodes: two_nodes.TwoNodes, tmp_path: Path) -> None:
    local = nb.launch(digits, config(tmp_path / "one"), processes=2, display="off")
    script(tmp_path, "import nbtoolkit as nb\nfrom nbtoolkit.tasks.digits import train")
    result = all_well(tmp_path, nodes.torchrun(tmp_path))
    assert result.metrics == pytest.approx(local.metrics, abs=1e-4)


def test_a_link_that_is_cut_for_seconds_costs_nothing(
    nodes: two_nodes.TwoNodes, tmp_path: Path
) -> None:
    script(tmp_path, STEPS)
    agents = nodes.torchrun(tmp_path, "--max-restarts=0")
    wait_until(lambda: len(reported(tmp_path)) > 3)
    nodes.cut()
    time.sleep(3)
    assert len(reported(tmp_path)) < 20
    nodes.cut(False)
    result = all_well(tmp_path, agents)
    assert result.metrics["started_at"] == 0
    assert [step for step in reported(tmp_path) if step is not None] == list(range(20))


TIMEOUTS = {"distributed.timeout": 15, "runtime.hang_timeout": 10}
MARGIN = 30.0
"""Seconds beyond a timeout in which everything has ended; on a quiet machine it takes a few."""


def ranks(nodes: two_nodes.TwoNodes) -> list[list[str]]:
    """The command lines of the processes that train."""
    running = []
    for process in [*nodes.processes(0), *nodes.processes(1)]:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                running.append(process.cmdline())
    return [line for line in running if "torch.distributed.run" not in line]


def all_ranks_end(nodes: two_nodes.TwoNodes) -> None:
    began = time.monotonic()
    while left := ranks(nodes):
        assert time.monotonic() - began < TIMEOUTS["distributed.timeout"] + MARGIN, left
        time.sleep(0.2)


def test_a_killed_rank_costs_one_restart_and_no_digit(
    nodes: two_nodes.TwoNodes, tmp_path: Path
) -> None:
    steps = {"train.epochs": 3, "train.batch_size": 12, "checkpoint.every_steps": 2}
    plain = config(tmp_path / "one", **steps, **{"model.dies": "nobody"})
    local = nb.launch(restarted, plain, processes=1, display="off")
    text = "import nbtoolkit as nb\nfrom restarted import train"
    script(tmp_path, text, **steps, **{"model.dies": "rank"})
    result = all_well(tmp_path, nodes.torchrun(tmp_path, "--max-restarts=3"))
    assert (tmp_path / "runs/died").exists()
    assert result.metrics["train_loss"] == pytest.approx(local.metrics["train_loss"], abs=1e-4)
    attempts = [event for event in events(tmp_path) if isinstance(event, RunStarted)]
    assert len(attempts) == 2


def test_a_link_that_is_cut_for_ever_ends_both_ranks(
    nodes: two_nodes.TwoNodes, tmp_path: Path
) -> None:
    script(tmp_path, STEPS, **TIMEOUTS)
    nodes.torchrun(tmp_path, "--max-restarts=0")
    wait_until(lambda: len(reported(tmp_path)) > 3)
    nodes.cut()
    all_ranks_end(nodes)
    [run] = (tmp_path / "runs").glob("*-train-*")
    assert last_of(run).status == "failed"


def test_the_first_node_loses_its_agent_and_a_new_job_resumes(
    nodes: two_nodes.TwoNodes, tmp_path: Path
) -> None:
    script(tmp_path, STEPS, **TIMEOUTS)
    agents = nodes.torchrun(tmp_path, "--max-restarts=3")
    wait_until(lambda: len(reported(tmp_path)) > 3)
    agents[0].kill()
    all_ranks_end(nodes)
    assert agents[1].wait(timeout=60) != 0
    result = all_well(tmp_path, nodes.torchrun(tmp_path))
    assert result.metrics["started_at"] > 3


def test_a_node_that_never_arrives(nodes: two_nodes.TwoNodes, tmp_path: Path) -> None:
    script(tmp_path, STEPS, **TIMEOUTS)
    began = time.monotonic()
    alone = nodes.first_rank(tmp_path)
    [agent] = nodes.torchrun(tmp_path, conf=("join_timeout=10",), nodes=1)
    texts = [process.communicate(timeout=100)[0] for process in (alone, agent)]
    assert time.monotonic() - began < TIMEOUTS["distributed.timeout"] + MARGIN
    assert (alone.returncode, agent.returncode) == (1, 1), texts
    assert "GroupStartFailed" in texts[0]
    assert "RendezvousTimeoutError" in texts[1]


def test_a_slow_link(nodes: two_nodes.TwoNodes, tmp_path: Path) -> None:
    local = nb.launch(digits, config(tmp_path / "one"), processes=2, display="off")
    nodes.slow_down("4mbit")
    script(tmp_path, "import nbtoolkit as nb\nfrom nbtoolkit.tasks.digits import train", **TIMEOUTS)
    result = all_well(tmp_path, nodes.torchrun(tmp_path, "--max-restarts=0"))
    assert result.metrics == pytest.approx(local.metrics, abs=1e-4)
