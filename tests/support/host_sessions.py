"""Programs run as sessions on a host, each in its own folder, for tests of the archive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

from kernels import SECONDS
from programs import write_program

# Every step waits as long as WAIT says: a session whose time is short cannot come to its end.
PROGRAM = """
import json
import os
import time

import nbtoolkit as nb


def loss(outputs, labels):
    import torch

    time.sleep(float(os.environ.get("WAIT", "0")))
    return torch.nn.functional.cross_entropy(outputs, labels)


def train(config, ctx):
    from nbtoolkit.tasks import digits

    images, labels = digits.load()
    fitted, held_out = digits.split(labels, config, ctx)
    return nb.fit(
        ctx,
        config,
        digits.make_model(config),
        (images[fitted], labels[fitted]),
        (images[held_out], labels[held_out]),
        loss=loss,
        metrics=["accuracy"],
    )


def configured(**more):
    settings = {"train.epochs": 12, "train.batch_size": 256, "model.hidden": 32}
    return nb.load_config(overrides={**settings, **json.loads(os.environ["OVERRIDES"]), **more})


def main():
    config = configured()
    unpacked = nb.unpack()
    print(unpacked)
"""

FIT = """
    result = nb.launch(train, config)
    told = {"status": result.status, "metrics": result.metrics, "folder": str(result.paths.folder)}
"""

SWEEP = """
    space = {"optim.lr": {"type": "float", "low": 1e-3, "high": 1e-1, "log": True}}
    result = nb.sweep(train, config, space, n_trials=4, display="text")
    trials = result.trials
    values = dict(zip(map(str, trials.index), trials["value"].tolist())) if len(trials) else {}
    told = {"status": result.status, "metrics": values, "folder": str(result.paths.folder)}
    told["best"] = result.best_params
"""

FOLDS = """
    from nbtoolkit.tasks.digits import load

    folds = nb.make_folds(load()[1], k=3)
    result = nb.cross_validate(train, config, folds, display="text")
    mean = result.mean if result.status == "completed" else {}
    told = {"status": result.status, "metrics": mean, "folder": str(result.paths.folder)}
"""

# The notebooks: `first` is through before the time is up, `second` is cut off.
PIPELINE = """
    result = nb.run_pipeline("steps.yaml", html=False, display="text")
    values = result.values.get("second", {})
    told = {"status": result.status, "metrics": values.get("metrics"), "folder": str(result.folder)}
    told["steps"] = {name: step.status for name, step in result.steps.items()}
"""
FIRST = """
import secrets
import nbtoolkit as nb
nb.publish({"drawn": secrets.token_hex(8)})
"""
SECOND = """
import nbtoolkit as nb
import session
result = nb.launch(session.train, session.configured(**{"runtime.output_dir": folder}))
nb.publish({"status": result.status, "metrics": result.metrics, "drawn": drawn})
"""
STEPS = """
steps:
  first: {notebook: first.ipynb}
  second:
    notebook: second.ipynb
    parameters: {folder: "${pipeline.folder}", drawn: "${first.drawn}"}
"""

END = """
    with open("told.json", "w") as file:
        json.dump({**told, "unpacked": list(unpacked.new)}, file)


if __name__ == "__main__":
    main()
"""


def write_steps(folder: Path) -> None:
    """The pipeline's file and notebooks, in a session's working folder."""
    folder.mkdir(parents=True)
    write_program(folder, FIRST, name="first")
    write_program(folder, SECOND, declares="folder: str = ''\ndrawn: str = ''", name="second")
    (folder / "steps.yaml").write_text(STEPS)


class Session:
    """One session on a host that ends: its working folder, and what it printed and found.

    It goes on beside the test, until that asks what came of it.

    Args:
        folder: its working folder; made here.
        work: what it does: ``FIT``, ``SWEEP``, ``FOLDS`` or ``PIPELINE``.
        wait: seconds that every step waits.
        overrides: settings of its configuration.
    """

    def __init__(self, folder: Path, work: str, wait: float = 0.0, **overrides: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "session.py").write_text(PROGRAM + work + END)
        environ = {
            **os.environ,
            "NBTOOLKIT_HOST": "kaggle",
            "WAIT": str(wait),
            "OVERRIDES": json.dumps(overrides),
        }
        self.folder = folder
        with (folder / "output.txt").open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", "session.py"],
                cwd=folder,
                env=environ,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @cached_property
    def output(self) -> str:
        """What it printed, once it has ended; it must have ended well."""
        code = self._process.wait(SECONDS)
        printed = (self.folder / "output.txt").read_text()
        assert code == 0, printed
        return printed

    @cached_property
    def told(self) -> dict[str, Any]:
        """What it found, once it has ended."""
        assert self.output is not None
        told: dict[str, Any] = json.loads((self.folder / "told.json").read_text())
        return told
