"""A sweep whose processes are killed at random moments ends with the same study.

`make test` kills the kernel and a worker once each, in test_sweep_faults.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from kernels import Script, alive, all_gone, descendants, script, until
from records import owner_pid
from sweeps import begun, finished, sweep_folder

KILLS = 10
VICTIMS = ("kernel", "scheduler", "worker")

SWEEP = """
import json
sweep_config = json.loads(open("sweep_config.json").read())
config = nb.load_config(env=None, overrides={
    "runtime.output_dir": "out", "tracking.mlflow": False,
})
result = nb.sweep(functions.takes_its_time, config, sweep_config, display="off")
print(result.status)
"""


def sweep_config(trials: int) -> dict[str, object]:
    return {
        "study": {"sampler": "grid", "pruner": "none"},
        "budget": {"retries": 1_000, "max_failures": None},
        "space": {"optim.lr": {"type": "categorical", "choices": lr(trials)}},
    }


def lr(trials: int) -> list[float]:
    """Every trial's parameter, none twice."""
    return [round(0.001 * (1 + number), 6) for number in range(trials)]


def strike(kernel: Script, folder: Path, victim: str) -> None:
    """Kill, and where the session ends by it, wait until nothing of it is left."""
    supervisor = owner_pid(folder)
    family = descendants(kernel.pid)
    if victim == "worker":
        workers = [pid for pid in family if alive(pid) and is_worker(pid, folder)]
        for pid in workers[:1]:
            kill(pid)
        return
    kill(kernel.pid if victim == "kernel" else supervisor)
    kernel.end()
    all_gone(family)


def kill(pid: int) -> None:
    """SIGKILL; it may just have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_worker(pid: int, folder: Path) -> bool:
    """Whether a process says that it is a rank of a trial in this sweep."""
    try:
        mark = Path(f"/proc/{pid}/environ").read_bytes()
        return os.readlink(f"/proc/{pid}/fd/1").startswith(str(folder / "trials")) or (
            f"NBTOOLKIT_RANK={folder}".encode() in mark
        )
    except OSError:
        return False


def some_trial_begins(kernel: Script, folder: Path) -> None:
    """Wait until a trial starts, for the first time or again, or until nothing is left to do."""
    before = begun(folder)
    until(lambda: begun(folder) > before or kernel.process.poll() is not None, "a trial")


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_no_trial_is_lost_and_none_counts_twice(tmp_path: Path) -> None:
    trials = 6 * KILLS
    (tmp_path / "sweep_config.json").write_text(json.dumps(sweep_config(trials)))
    chance, struck, before = random.Random(KILLS), 0, dict[int, float]()
    while struck < KILLS:
        with script(SWEEP, tmp_path) as kernel:
            folder = sweep_folder(tmp_path)
            some_trial_begins(kernel, folder)
            while kernel.process.poll() is None and struck < KILLS:
                time.sleep(chance.uniform(0.0, 0.5))
                if kernel.process.poll() is None:
                    strike(kernel, folder, chance.choice(VICTIMS))
                    struck += 1
            if kernel.process.poll() is None:
                kernel.end()
        now = finished(folder)
        assert before.items() <= now.items()  # none that was finished is lost or changed
        before = now
        if len(now) == trials:
            break
    assert struck >= KILLS // 2, "the sweep is too short for this machine"
    with script(SWEEP, tmp_path) as kernel:
        if len(before) < trials:
            assert kernel.output().strip() == "completed"
    assert sorted(finished(folder).values()) == lr(trials)
    for trial in folder.glob("trials/*"):
        begun_with = {line.split()[0] for line in (trial / "begun.txt").read_text().splitlines()}
        assert len(begun_with) == 1  # a trial resumes with the same parameters
