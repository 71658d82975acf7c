"""Notebooks as programs compared with a script; a pipeline whose steps are complete."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.figures import Figure, median

ROUNDS = 3
AGAIN = 5
ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import nbtoolkit as nb
from nbtoolkit.tasks.digits import train
config = nb.load_config("config/train.yaml", overrides={"runtime.output_dir": sys.argv[1]})
print(nb.launch(train, config, name="digits"))
"""


def seconds(*words: str) -> float:
    """Of a command of this interpreter, from its start to its end."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{words} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return time.perf_counter() - start


def training() -> list[Figure]:
    """The first notebook, its page included, in turn with a script that trains the same."""
    notebook, script = list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for number in range(ROUNDS):
            script.append(seconds("-c", SCRIPT, f"{folder}/script-{number}"))
            words = ["-m", "nbtoolkit", "run", "notebooks/01_train.ipynb"]
            words += ["--output", f"{folder}/{number}.ipynb", "-p", "own_function=false"]
            notebook.append(seconds(*words, "-p", f"output_dir={folder}/notebook-{number}"))
    more = median([a - b for a, b in zip(notebook, script, strict=True)])
    return [
        Figure("nbtoolkit run of 01_train: more than the same from a script", more, "s", 3.0, 6.0),
        Figure("the same, absolute", median(notebook), "s"),
        Figure("the script, absolute", median(script), "s"),
    ]


def nothing_to_do() -> list[Figure]:
    """The pipeline that ships, small, run again with everything done."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        words = ["-m", "nbtoolkit", "pipeline", "config/pipeline/smoke.yaml", "--folder", folder]
        first = seconds(*words)
        again = median([seconds(*words) for _ in range(AGAIN)])
    return [
        Figure("pipeline with nothing to do", again, "s", 2.0, 4.0),
        Figure("the same, everything to do", first, "s"),
    ]


def figures() -> list[Figure]:
    return [*training(), *nothing_to_do()]
