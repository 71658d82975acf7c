"""One machine of a shared sweep without worker processes: the algorithm's loop alone.

python shared_worker.py FOLDER MACHINES TRIALS SECONDS: prints the numbers of each one's trials.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from searches import Fake, Memory, request, run
from shared_sweep import source

from nbtoolkit import load_config
from nbtoolkit.search.algorithm import Search, SearchJob
from nbtoolkit.search.sweep_algorithm import SweepAlgorithm, make_algorithm
from nbtoolkit.study.study_server import split_storage
from nbtoolkit.study.sweep_config import load_sweep_config


def machine(folder: Path, source: Mapping[str, Any]) -> tuple[SweepAlgorithm, Memory]:
    """The algorithm of one machine."""
    folder.mkdir(parents=True, exist_ok=True)
    base = load_config(env=None, overrides={"model.x": 0.0})
    sweep_config, url = split_storage(load_sweep_config(source, base))
    search = Search(kind="sweep", algorithm="", sweep_config=sweep_config, storage=url)
    diary = Memory()
    return make_algorithm(request(folder, search=search), diary), diary


def work(made: SweepAlgorithm, seconds: float = 0.0) -> Iterator[SearchJob]:
    """Run jobs until the study is complete; yields each after its end."""
    score = Fake(lambda job, step: {"score": job.params["model.x"]})
    while not made.done:
        job = made.next(None)
        if job is None:
            time.sleep(0.05)
            continue
        time.sleep(seconds)
        made.on_end(job, run(made, job, score))
        yield job


@contextmanager
def closing(made: SweepAlgorithm) -> Iterator[SweepAlgorithm]:
    """Leave the study at the end."""
    try:
        yield made
    finally:
        made.close("stopped")


if __name__ == "__main__":
    for name in ("optuna.storages._rdb.storage", "psycopg", "nbtoolkit.search.study_recorder"):
        import_module(name)
    home, count, trials, pause = sys.argv[1:]
    number = 0
    # The machines share the time of their imports, and nothing else.
    while number < int(count) and os.fork():
        number += 1
    if number == int(count):
        failed = sum(os.wait()[1] != 0 for _ in range(int(count)))
        sys.exit(f"{failed} failed" if failed else 0)
    made, _ = machine(Path(home, str(number)), source(int(trials), name="workers", heartbeat=30))
    ran = [job.key.rpartition("/")[2] for job in work(made, float(pause))]
    print(f"ran {' '.join(ran)} best {made.close('completed')['best_value']}\n", end="", flush=True)
