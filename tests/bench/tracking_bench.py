"""Cost of tracking: python tests/bench/tracking_bench.py [samples] prints medians (s) as JSON.

first_use    a fresh tracking process, a fresh output folder, a run that has ended: until all of
             it is in MLflow (a launch goes on meanwhile, so it sees less of this)
next_kernel  the same, where the database exists
warm         the next run of a process that is warm
stock        what it takes stock MLflow to import itself, make a database and log the same run
share        processor time of the tracking process, per second, while a run logs 50 times a second
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import psutil

from nbtoolkit.run.events import EventLog, MetricsLogged, RunEnded, RunStarted
from nbtoolkit.run.paths import RunPaths, read_or_empty
from nbtoolkit.wire.messages import TrackRun
from nbtoolkit.wire.transport import Connection

STEPS = 200

STOCK = f"""
import sys
from mlflow.tracking import MlflowClient
from mlflow.entities import Metric, Param
client = MlflowClient(sys.argv[1])
experiment = client.create_experiment("stock", artifact_location=sys.argv[2])
run = client.create_run(experiment).info.run_id
client.log_batch(run, params=[Param(f"p{{i}}", "1") for i in range(10)])
client.log_batch(run, metrics=[Metric("loss", 0.5, step, step) for step in range({STEPS})])
client.set_terminated(run)
"""


def begin(output_dir: Path) -> tuple[RunPaths, EventLog]:
    paths = RunPaths.create(output_dir, "bench")
    log = EventLog(paths.events)
    config = {"seed": 0, "optim": {"lr": 0.001}, "tracking": {"mlflow": True}}
    log.write(RunStarted(run_id=paths.run_id, config=config))
    return paths, log


def whole_run(output_dir: Path) -> Path:
    paths, log = begin(output_dir)
    for step in range(STEPS):
        log.write(MetricsLogged(values={"loss": 0.5}, step=step))
    log.write(RunEnded(status="completed", seconds=1.0))
    log.close()
    return paths.folder


SERVICE = """
import sys
from nbtoolkit.tracking.service import run_service
run_service([int(sys.argv[1])])
"""


@contextlib.contextmanager
def tracking_service() -> Iterator[tuple[Connection, psutil.Process]]:
    """A tracking service, as the fork server starts it: the kernel's end, and its process."""
    kernel, other_end = Connection.pair()
    fd = other_end.fileno()
    process = subprocess.Popen([sys.executable, "-c", SERVICE, str(fd)], pass_fds=[fd])
    other_end.close()
    try:
        yield kernel, psutil.Process(process.pid)
    finally:
        kernel.close()
        process.wait()


def track(kernel: Connection, folder: Path) -> None:
    kernel.send(TrackRun(folder=str(folder), environ=dict(os.environ)))


def written(folder: Path) -> None:
    """Wait until a run is written to its end."""
    while not read_or_empty(RunPaths(folder).tracking).get("done"):
        time.sleep(0.005)


def in_fresh_process(output_dir: Path) -> dict[str, float]:
    """The two first runs of a tracking process."""
    folders = [whole_run(output_dir), whole_run(output_dir)]
    begun = time.perf_counter()
    with tracking_service() as (kernel, _):
        times = [begun]
        for folder in folders:
            track(kernel, folder)
            written(folder)
            times.append(time.perf_counter())
    return {"first": times[1] - times[0], "warm": times[2] - times[1]}


def stock(output_dir: Path) -> float:
    begun = time.perf_counter()
    store, artifacts = f"sqlite:///{output_dir}/mlflow.db", (output_dir / "artifacts").as_uri()
    command = [sys.executable, "-c", STOCK, store, artifacts]
    environ = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    subprocess.run(command, check=True, env=environ, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begun


def share(output_dir: Path, seconds: float = 5.0) -> float:
    """Of one core, with an event every 20 ms."""
    with tracking_service() as (kernel, process):
        first = whole_run(output_dir)
        track(kernel, first)
        written(first)
        paths, log = begin(output_dir)
        lock = os.open(paths.lock, os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
        track(kernel, paths.folder)
        before, until, step = sum(process.cpu_times()[:2]), time.perf_counter() + seconds, 0
        while time.perf_counter() < until:
            log.write(MetricsLogged(values={"loss": 0.5, "lr": 0.001}, step=step))
            step += 1
            time.sleep(0.02)
        used = sum(process.cpu_times()[:2]) - before
        log.write(RunEnded(status="completed", seconds=seconds))
        log.close()
        os.close(lock)
        written(paths.folder)
    return used / seconds


def sample(folder: Callable[[], Path]) -> dict[str, float]:
    same = folder()
    first, second = in_fresh_process(same), in_fresh_process(same)
    return {
        "first_use": first["first"],
        "next_kernel": second["first"],
        "warm": second["warm"],
        "stock": stock(folder()),
        "share": share(same),
    }


def main(samples: int = 3) -> None:
    with tempfile.TemporaryDirectory(prefix="nbtoolkit-bench-") as temporary:
        found = [sample(lambda: Path(tempfile.mkdtemp(dir=temporary))) for _ in range(samples)]
    medians = {key: round(statistics.median(one[key] for one in found), 3) for key in found[0]}
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps({**medians, **machine, "mlflow": version("mlflow"), "samples": samples}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
