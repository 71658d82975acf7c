"""The command line in its own process, and a user's module for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MINE = """
import time

def twice(config, ctx):
    ctx.log({"twice": 2.0 * config.data.x})

def fails(config, ctx):
    raise ValueError("no luck today")

def goes_on(config, ctx):
    while True:
        ctx.report({"alive": 1.0})
        time.sleep(0.01)

def load():
    return list(range(12)), [0, 1] * 6

def score(config, ctx):
    held_out = 0 if ctx.fold is None else len(ctx.fold.valid_indices)
    ctx.report({"score": config.optim.lr, "held_out": float(held_out)})
"""
SPACE = """
study: {metric: score, direction: maximize, sampler: random}
budget: {n_trials: 9}
space:
  optim.lr: {type: float, low: 0.1, high: 0.9}
"""


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "nbtoolkit", *words]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=240)
