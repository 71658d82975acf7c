"""Sessions: programs as a host runs them, each in a folder of its own; for tests of the relay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    from nbtoolkit.tasks import datasets, digits

    images, labels = digits.load()
    fitted, held_out = datasets.split(labels, config, ctx)
    return nb.fit(
        ctx,
        config,
        digits.make_model(config),
        (images[fitted], labels[fitted]),
        (images[held_out], labels[held_out]),
        loss=loss,
        metrics=["accuracy"],
    )


def main(overrides):
    settings = {"train.epochs": 12, "train.batch_size": 256, "model.hidden": 32, **overrides}
    config = nb.load_config(overrides=settings)
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

END = """
    with open("told.json", "w") as file:
        json.dump({**told, "unpacked": list(unpacked.new)}, file)


if __name__ == "__main__":
    main(json.loads(os.environ["OVERRIDES"]))
"""


class Session:
    """One session on a host that ends: its working folder, and what it printed and found.

    Args:
        folder: its working folder; made here.
        work: what it does: ``FIT`` or ``SWEEP``.
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
        done = subprocess.run(
            [sys.executable, "-W", "error", "session.py"],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        self.folder, self.output = folder, done.stdout
        self.told: dict[str, Any] = json.loads((folder / "told.json").read_text())
