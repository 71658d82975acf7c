"""The notebooks that the browser tests open."""

from __future__ import annotations

from pathlib import Path

import nbformat

TRAIN = """
import time
from pathlib import Path

from accelerate.utils import broadcast_object_list

import nbtoolkit as nb
from nbtoolkit.tasks import digits


def held():  # rank 0 looks for all: the file may go between the looks of two ranks
    return broadcast_object_list([Path("hold").exists()])[0]


def train(config, ctx):  # digits; then it reports on while the file hold is there
    scores, step = digits.train(config, ctx), config.train.epochs
    print(f"rank {ctx.rank} of {ctx.world_size} has trained", config.model.get("say", ""))
    while held():
        step += 1
        ctx.report({"val_accuracy": scores["val_accuracy"]}, step=step)
        time.sleep(0.05)
    return scores
"""

SETTINGS = """
space = {
    "study": {"name": "digits", "metric": "val_accuracy", "sampler": "random", "pruner": "none"},
    "budget": {"n_trials": 4},
    "space": {"optim.lr": {"type": "float", "low": 1e-3, "high": 0.1}, "model.hidden": [16, 32]},
}
two = {"distributed.enabled": True, "distributed.world_size": 2}
config = nb.load_config(env=None, overrides={**two, "tracking.mlflow": False, "train.epochs": 5})
"""

PANEL = f"{SETTINGS}panel = nb.panel(train, config, space)\npanel"


def write_notebook(path: Path, *cells: str) -> None:
    """A notebook of code cells."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    nbformat.write(notebook, path)
