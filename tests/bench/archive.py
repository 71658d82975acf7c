"""Time to pack a folder of 1 GB, compared with ``tar``, and time to unpack it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from nbtoolkit.run.checkpoints.checkpoint_store import CheckpointStore
from nbtoolkit.run.events import EventLog, RunEnded, RunStarted
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.sessions.pack import pack
from nbtoolkit.sessions.unpack import unpack
from tests.bench.figures import Figure

RUNS, NUMBERS = 4, 2**26  # float32: 268 MB a run
ROUNDS = 7


def make_runs(folder: Path) -> None:
    """Finished runs, each with one checkpoint: all of the folder is worth keeping."""
    for number in range(RUNS):
        paths = RunPaths.create(folder, f"run{number}")
        log = EventLog(paths.events)
        log.write(RunStarted(run_id=paths.run_id))
        log.write(RunEnded(status="completed"))
        log.close()
        weights = {"model": {"model": {"weight": torch.rand(NUMBERS)}}}
        CheckpointStore(paths.checkpoints).put("best", 1, weights, {"epoch": 1})


def timed(folder: Path, tar: str) -> tuple[float, float]:
    """Seconds of tar, and of packing; each file is removed before the next is written."""
    start = time.perf_counter()
    subprocess.run([tar, "-cf", folder / "x.tar", "-C", folder, "outputs"], check=True)
    by_tar = time.perf_counter() - start
    (folder / "x.tar").unlink()
    packed = pack(folder / "x.bundle", source=folder / "outputs")
    assert not packed.left_out
    return by_tar, packed.seconds


def figures() -> list[Figure]:
    tar = shutil.which("tar") or "tar"
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        folder = Path(place)
        make_runs(folder / "outputs")
        timed(folder, tar)  # from here on all is in memory
        pairs = [timed(folder, tar) for _ in range(ROUNDS)]
        size = (folder / "x.bundle").stat().st_size
        start = time.perf_counter()
        unpack(folder / "x.bundle", into=folder / "second")
        unpacked = time.perf_counter() - start
    # The shortest of each: gigabytes that are still on their way to the disk disturb the others.
    by_tar, by_us = min(one for one, _ in pairs), min(other for _, other in pairs)
    return [
        Figure(f"packing {size / 1e9:.2f} GB, in times of tar", by_us / by_tar, "x", 1.1, 2.0),
        Figure("the same, absolute", by_us, "s"),
        Figure("tar, absolute", by_tar, "s"),
        Figure("unpacking it", unpacked, "s"),
    ]
