"""The fork server's probe: whether a child that a process forks could train."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
from kernels import all_gone, script, until

USED_OPENMP = """
torch.set_num_threads(2)
(torch.ones(900, 900) @ torch.ones(900, 900)).exp()
"""

PROBES = f"""
import os, time
import torch
from nbtoolkit.launcher.fork_probe import probe_fork

def probe(what):
    print(what, probe_fork(device=False, seconds=1.0))

probe("fresh:")

ones = torch.ones
def slow_ones(*size, **options):
    end = time.process_time() + 1.5
    while time.process_time() < end: pass
    return ones(*size, **options)
torch.ones = slow_ones
probe("slow, not hung:")
torch.ones = ones

fails = True
os.register_at_fork(after_in_child=lambda: fails and os._exit(1))
probe("a child fails:")
fails = False
probe("no child fails:")

{USED_OPENMP}
probe("computed in parallel:")
"""


def test_a_process_is_fork_safe_if_its_child_computes(tmp_path: Path) -> None:
    with script(PROBES, tmp_path) as kernel:
        assert kernel.output().splitlines() == [
            "fresh: True",
            "slow, not hung: True",
            "a child fails: False",
            "no child fails: True",
            "computed in parallel: False",
        ]


HUNG = f"""
import torch
from nbtoolkit.launcher.fork_probe import probe_fork
{USED_OPENMP}
probe_fork(device=False, seconds=600)
"""


def test_a_hung_probe_ends_with_the_process_that_probes(tmp_path: Path) -> None:
    with script(HUNG, tmp_path) as kernel:
        process = psutil.Process(kernel.process.pid)
        [child] = until(process.children, "the probe's child")
        time.sleep(1)  # it hangs: its parent has used OpenMP
        assert child.is_running()
        kernel.kill()
        all_gone({child.pid}, 30)
