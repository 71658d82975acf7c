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


ONE = PANEL.replace('"distributed.world_size": 2', '"distributed.world_size": 1')
"""The same with one process per trial, so that two trials run at a time on two CPUs."""

FRIEDMAN = """
import torch
from sklearn.datasets import make_friedman1

import nbtoolkit as nb

x, y = (torch.tensor(part, dtype=torch.float32) for part in make_friedman1(1200, random_state=0))
x, y = x - 0.5, ((y - y.mean()) / y.std())[:, None]


def friedman(config, ctx):
    torch.manual_seed(config.seed)
    hidden, drop = config.model["hidden"], torch.nn.Dropout(config.model["dropout"])
    net = torch.nn.Sequential(
        torch.nn.Linear(10, hidden), torch.nn.ReLU(), drop, torch.nn.Linear(hidden, 1)
    )
    decay = config.optim.weight_decay
    steps = torch.optim.AdamW(net.parameters(), config.optim.lr, weight_decay=decay)
    for epoch in range(config.train.epochs):
        net.train()
        for batch in torch.randperm(1000).split(8):
            loss = torch.nn.functional.mse_loss(net(x[batch]), y[batch])
            steps.zero_grad()
            loss.backward()
            steps.step()
        net.eval()
        with torch.no_grad():
            rmse = torch.nn.functional.mse_loss(net(x[1000:]), y[1000:]).sqrt().item()
        ctx.print(f"epoch {epoch + 1}: {rmse:.4f}")
        ctx.report({"val_rmse": rmse, "train_loss": loss.item()}, step=epoch + 1)
"""

FRIEDMAN_PANEL = """
space = {
    "study": {"name": "friedman", "metric": "val_rmse", "direction": "minimize", "sampler": "tpe",
              "pruner": "median", "seed": 1},
    "budget": {"n_trials": 20},
    "space": {
        "optim.lr": {"type": "float", "low": 1e-4, "high": 0.3, "log": True},
        "optim.weight_decay": {"type": "float", "low": 1e-5, "high": 0.1, "log": True},
        "model.hidden": [8, 16, 32, 64, 128],
        "model.dropout": {"type": "float", "low": 0.0, "high": 0.5},
    },
}
settings = {"train.epochs": 12, "model": {"hidden": 32, "dropout": 0.1}, "tracking.mlflow": False}
panel = nb.panel(friedman, settings, space)
panel
"""
"""The sweep of the pictures: a network of torch that learns in seconds."""


def write_notebook(path: Path, *cells: str) -> None:
    """A notebook of code cells."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    nbformat.write(notebook, path)
