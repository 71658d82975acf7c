"""Probes: short runs that measure a function, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from kernels import script

import nbtoolkit as nb
from nbtoolkit.errors import TuningError
from nbtoolkit.extras.tuning.answer import Subject
from nbtoolkit.extras.tuning.probe import Probe, probe, scratch_folder
from nbtoolkit.tasks.digits import train


def short_config(**settings: object) -> nb.Config:
    return nb.load_config(env=None, overrides={"train.batch_size": 512, **settings})


def scratch_folders() -> list[Path]:
    return [*Path(tempfile.gettempdir()).glob("nbtoolkit-probe-*")]


def test_a_probe_measures_each_step_and_leaves_no_folder(tmp_path: Path) -> None:
    config = short_config(**{"runtime.output_dir": str(tmp_path)})
    found = probe(Subject(train, config), {}, steps=4)
    assert found.status == "measured"
    assert [step.step for step in found.steps] == [1, 2, 3, 4]
    assert found.samples_per_second > 0
    assert found.memory > 0.05
    assert found.plan is not None
    assert found.plan.processes == 1
    assert scratch_folders() == []
    assert [*tmp_path.iterdir()] == []


def test_a_probe_ends_where_its_caller_says() -> None:
    seen: list[int] = []

    def enough(found: Probe) -> bool:
        seen.append(found.steps[-1].step)
        return seen[-1] >= 2

    found = probe(Subject(train, short_config()), {}, steps=100_000, enough=enough)
    assert found.status == "measured"
    assert [step.step for step in found.steps[:2]] == [1, 2]
    assert seen[-1] >= 2
    assert len(found.steps) < 100_000


def test_a_loss_that_is_not_finite_is_a_result() -> None:
    found = probe(Subject(train, short_config()), {"optim.lr": 1e30}, steps=8)
    assert found.status == "not_finite"
    assert "loss of optimizer step" in found.reason


def test_memory_that_runs_out_is_a_result() -> None:
    def greedy(config: nb.Config, ctx: nb.RunContext) -> None:
        import torch

        torch.empty(1 << 50)

    found = probe(Subject(greedy, short_config()), {}, steps=1)
    assert found.status == "out_of_memory"
    assert "memory" in found.reason


def test_a_killed_rank_counts_as_memory_that_ran_out() -> None:
    def killed(config: nb.Config, ctx: nb.RunContext) -> None:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)

    assert probe(Subject(killed, short_config()), {}, steps=1).status == "out_of_memory"


HOLDS = """
import time
from nbtoolkit.extras.tuning.probe import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


def test_only_the_folders_of_processes_that_have_ended_are_deleted(tmp_path: Path) -> None:
    """Whatever their numbers: a container that shares the disk has others."""
    with script(HOLDS, tmp_path) as other:
        assert other.process.stdout is not None
        first = Path(other.process.stdout.readline().strip())
        # As seen from another container: there is no process of this number here.
        moved = first.rename(first.with_name("nbtoolkit-probe-4194399-held"))
        with scratch_folder() as own:
            assert Path(own).is_dir()
        assert moved.is_dir()
        other.kill()
    with scratch_folder():
        assert not moved.exists()


def test_an_error_of_the_function_is_raised() -> None:
    def broken(config: nb.Config, ctx: nb.RunContext) -> None:
        raise KeyError("pixels")

    with pytest.raises(KeyError, match="pixels"):
        probe(Subject(broken, short_config()), {}, steps=1)
    assert scratch_folders() == []


def test_a_function_without_fit_is_refused() -> None:
    def own_loop(config: nb.Config, ctx: nb.RunContext) -> float:
        return 1.0

    with pytest.raises(TuningError, match=r"own_loop did no optimizer step of nb.fit") as refused:
        probe(Subject(own_loop, short_config()), {}, steps=1)
    assert "Allowed: training functions that call nb.fit" in str(refused.value)


MAKES = """
import os
from nbtoolkit.extras.tuning.probe import scratch_folder
for _ in range(200):
    with scratch_folder() as folder:
        assert os.path.isdir(folder)
"""


def test_probes_at_once_do_not_delete_the_folders_that_others_make() -> None:
    jobs = [subprocess.Popen([sys.executable, "-c", MAKES]) for _ in range(4)]
    assert [job.wait(timeout=240) for job in jobs] == [0] * 4
    assert scratch_folders() == []
