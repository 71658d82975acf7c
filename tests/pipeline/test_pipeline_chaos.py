"""A pipeline killed at random moments, whole or in part, ends with the same metrics.

`make test` kills a step in test_pipeline_faults.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from kernels import SECONDS, children, descendants, until
from pipelines import own_tmpdir, write_pipeline
from programs import write_program
from records import first_of, last_of

import nbtoolkit as nb
from nbtoolkit.run.attempts import last_event
from nbtoolkit.run.paths import RunPaths

__all__ = ["own_tmpdir"]  # a fixture

VICTIMS = ("command", "run", "kernel", "all")
EVENTS = "events.jsonl"
PLACES = ("folder", "checkpoint", "page")  # of which each run has its own

SETTINGS = """
import nbtoolkit as nb
from nbtoolkit.tasks.digits import train
config = nb.load_config("config/train.yaml", env=None, overrides={
    "runtime.output_dir": folder, "tracking.mlflow": False, "checkpoint.every_epochs": 1,
    **overrides,
})
"""
TRAIN = """
trained = nb.launch(train, config, display="off")
nb.publish({"metrics": trained.metrics})
"""
# The same training, which does not go beyond its first checkpoint while there is the file `hold`.
HELD = """
import time, torch
from nbtoolkit.tasks import digits

def loss(outputs, labels):
    while hold.exists() and [*pathlib.Path(folder).glob("*-train-*/checkpoints/step-*")]:
        time.sleep(0.02)
    return torch.nn.functional.cross_entropy(outputs, labels)

def train(config, ctx):
    images, labels = digits.load()
    fitted, held_out = digits.split(labels, config, ctx)
    halves = [(images[part], labels[part]) for part in (fitted, held_out)]
    return nb.fit(ctx, config, digits.make_model(config), *halves, loss=loss, metrics=["accuracy"])
"""
DECLARES = "overrides: dict = {}\nfolder: str = ''"


def started(path: Path, folder: Path) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "nbtoolkit", "pipeline", str(path), "--no-html"]
    return subprocess.Popen(
        [*program, "--folder", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def published(path: Path, folder: Path, seconds: float = SECONDS) -> dict[str, Any]:
    """Run a pipeline to its end; what it published, but for the places."""
    command = started(path, folder)
    out, err = command.communicate(timeout=seconds)
    assert command.returncode == 0, err
    values: dict[str, Any] = yaml.safe_load(out)
    return {
        step: {name: value for name, value in told.items() if name not in PLACES}
        for step, told in values.items()
    }


def frozen(pid: int) -> set[int]:
    """Stop a process and its descendants, so that none sees another's end, or starts one more."""
    stopped: set[int] = set()
    while found := ({pid} | descendants(pid)) - stopped:
        for one in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGSTOP)
        stopped |= found
    return stopped


def strike(command: subprocess.Popen[str], victim: str) -> bool:
    """Kill; where the command is left, it ends by itself, as failed. False: it was just done."""
    family = frozen(command.pid) if victim == "all" else set()
    runs = children(command.pid)
    kernels = set().union(*map(children, runs))
    killed = {
        "command": {command.pid},
        "run": runs,
        "kernel": kernels,
        "all": family,
    }
    for pid in killed[victim] or {command.pid}:  # there may be no kernel yet
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    command.communicate(timeout=SECONDS)
    assert command.returncode in (-signal.SIGKILL, 1, 0)
    return command.returncode != 0


def written(folder: Path) -> int:
    """Bytes of events that the runs in a folder have written: how far a pipeline is."""
    # os.walk passes over folders that are removed meanwhile; Path.rglob raises.
    found = [Path(place, EVENTS) for place, _, files in os.walk(folder) if EVENTS in files]
    return sum(file.stat().st_size for file in found)


def is_far_enough(command: subprocess.Popen[str], folder: Path, goal: float) -> bool:
    """Whether a command has ended, or its runs have written more than ``goal`` bytes of events."""
    return command.poll() is not None or written(folder) > goal


def killed_often(path: Path, folder: Path, kills: int, longest: float) -> int:
    """Start a pipeline again and again, and kill it; how often that was before it was done.

    Args:
        path: the pipeline's file.
        folder: where it runs.
        kills: how often at most.
        longest: bytes of events that it writes before a kill, at most. Seconds would say nothing
            where the machine was busy a minute ago.
    """
    chance = random.Random(kills)
    for struck in range(kills):
        command = started(path, folder)
        moment, victim = chance.uniform(0.0, 1.0) * longest, chance.choice(VICTIMS)
        goal = written(folder) + moment
        until(partial(is_far_enough, command, folder, goal), "progress")
        # Not always right behind an event.
        time.sleep(chance.uniform(0.0, 0.3))
        if not strike(command, victim):
            return struck
    return kills


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.timeout(4 * SECONDS)  # it waits three times, for so long at most
@pytest.mark.usefixtures("own_tmpdir")
def test_a_step_that_was_killed_goes_on_from_its_runs_checkpoint(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    held = f"import pathlib\nhold = pathlib.Path({str(hold)!r})\n"
    write_program(tmp_path, SETTINGS, held + HELD, TRAIN, declares=DECLARES, name="train")
    given = {"overrides": {"train.epochs": 4}, "folder": "${pipeline.folder}"}
    path = write_pipeline(tmp_path, train={"notebook": "train.ipynb", "parameters": given})
    command = started(path, tmp_path / "out")
    until(lambda: [*(tmp_path / "out").glob("*-train-*/checkpoints/step-*")], "a checkpoint")
    assert strike(command, "all")
    [run] = (tmp_path / "out").glob("*-train-*")
    assert last_event(RunPaths(run)) is None
    hold.unlink()
    published(path, tmp_path / "out")
    assert [*(tmp_path / "out").glob("*-train-*")] == [run]
    assert first_of(run).attempt == 2


@pytest.mark.chaos
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("own_tmpdir")
def test_the_digits_that_were_killed_six_times_end_with_the_same_metrics(tmp_path: Path) -> None:
    """The undisturbed run is that of the digits out of the box."""
    path = Path("config/pipeline/smoke.yaml")
    undisturbed = published(path, tmp_path / "calm", 1200)
    check_that_the_best_was_trained(tmp_path / "calm", undisturbed)
    whole = written(tmp_path / "calm")
    assert killed_often(path, tmp_path / "wild", kills=6, longest=0.2 * whole) >= 3
    survived = published(path, tmp_path / "wild", 1200)
    # A step that is killed when its run has ended, and before it is done itself, runs it again.
    assert survived["report"].pop("runs") >= undisturbed["report"].pop("runs")
    # One that is killed before its first checkpoint stays behind; the step starts another.
    assert {*undisturbed["report"].pop("statuses")} == {"completed"}
    assert {*survived["report"].pop("statuses")} - {"cut off"} == {"completed"}
    assert survived == undisturbed


def check_that_the_best_was_trained(folder: Path, values: dict[str, Any]) -> None:
    found, trained = values["sweep"], values["train"]
    assert trained["metrics"]["val_accuracy"] == pytest.approx(found["best_value"])
    assert len(values["cross-validate"]["scores"]["val_accuracy"]) == 3
    again = nb.run_pipeline("config/pipeline/smoke.yaml", folder=folder, display="off")
    assert {step.status for step in again.steps.values()} == {"skipped"}
    run = Path(again["train"].values["folder"])
    assert last_of(run).metrics == trained["metrics"]
    assert f"hidden: {found['best_config']['model.hidden']}" in (run / "config.yaml").read_text()
