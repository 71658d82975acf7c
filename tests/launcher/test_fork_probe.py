"""The fork server's probe: whether a child that a process forks could train."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from kernels import all_gone, script, until

PROBE = """
import torch
from nbtoolkit.launcher.fork_probe import probe_fork
{before}
print(probe_fork(device=False, seconds={seconds}))
"""

USED_OPENMP = """
torch.set_num_threads(2)
(torch.ones(900, 900) @ torch.ones(900, 900)).exp()
"""

SLOW = """
import time
ones = torch.ones
def slow_ones(*size, **options):
    end = time.process_time() + 1.5
    while time.process_time() < end: pass
    return ones(*size, **options)
torch.ones = slow_ones
"""

FAILS = "import os; os.register_at_fork(after_in_child=lambda: os._exit(1))"


@pytest.mark.parametrize(
    ("before", "works"),
    [
        pytest.param("", True, id="fresh"),
        pytest.param(USED_OPENMP, False, id="computed in parallel"),
        pytest.param(SLOW, True, id="slow, not hung"),
        pytest.param(FAILS, False, id="a child fails"),
    ],
)
def test_a_process_is_fork_safe_if_its_child_computes(
    before: str, works: bool, tmp_path: Path
) -> None:
    with script(PROBE.format(before=before, seconds=1.0), tmp_path) as kernel:
        assert kernel.output().strip() == str(works)


def test_a_hung_probe_ends_with_the_process_that_probes(tmp_path: Path) -> None:
    with script(PROBE.format(before=USED_OPENMP, seconds=600), tmp_path) as kernel:
        process = psutil.Process(kernel.process.pid)
        [child] = until(process.children, "the probe's child")
        time.sleep(1)  # it hangs: its parent has used OpenMP
        assert child.is_running()
        kernel.kill()
        all_gone({child.pid}, 30)
