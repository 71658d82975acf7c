"""Runs and searches write exactly the documented events and files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.run import events, paths
from nbtoolkit.worker.context import RunContext

SPACE = {
    "space": {"model.x": {"type": "float", "low": 0.0, "high": 1.0}},
    "study": {"metric": "loss"},
}


def train(config: Config, ctx: RunContext) -> None:
    ctx.log({"rate": 1.0}, step=1)
    ctx.report({"loss": config.model["x"]}, step=1)
    ctx.save({"x": 1})


def fails(config: Config, ctx: RunContext) -> None:
    raise ValueError("no")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, one that failed, a sweep, one with folds and a cross-validation."""
    folder = tmp_path_factory.mktemp("outputs")
    settings = {"runtime.output_dir": str(folder), "tracking.mlflow": False, "model.x": 0.5}
    config = Config().with_overrides(settings)
    folds = nb.make_folds([0, 1] * 6, k=2)
    nb.launch(train, config, display="off")
    with pytest.raises(ValueError, match="no"):
        nb.launch(fails, config, display="off")
    nb.cross_validate(train, config, folds, display="off")
    nb.sweep(train, config, SPACE, n_trials=1, folds=folds, display="off")
    handle = nb.sweep(train, config, SPACE, n_trials=2, display="off", wait=False)
    handle.pause()
    handle.resume()
    handle.result()
    return folder


def test_every_type_of_event_is_listed(outputs: Path) -> None:
    texts = [file.read_text() for file in outputs.rglob("events.jsonl")]
    lines = (line for text in texts for line in text.splitlines())
    written = {json.loads(line)["type"] for line in lines}
    assert {"run", "trial", "intermediate", "fold", "command", "checkpoint"} <= written
    listed = set(re.findall(r"^    (\w+)  ", events.__doc__ or "", re.MULTILINE))
    assert written <= listed


def test_every_file_of_a_run_is_listed(outputs: Path) -> None:
    listed = re.findall(r"[\w<>.-]*[\w>]", paths.__doc__ or "")
    names = {
        re.sub(r"^\d+(?=\.)", "<rank>", part)
        for run in outputs.iterdir()
        for file in run.rglob("*")
        for part in file.relative_to(run).parts
        if not part.isdecimal() and not part.startswith(("fold-", "last."))
    }
    assert {"events.jsonl", "<rank>.pkl", "error.pkl", "study.jsonl"} <= names
    assert names <= set(listed)


def test_a_loop_of_ones_own_that_ended_earlier_counts_to_no_default(outputs: Path) -> None:
    from nbtoolkit.views.state import State
    from nbtoolkit.views.text import summary_line

    state = State(next(run for run in map(paths.RunPaths, sorted(outputs.glob("*-train-*")))))
    state.refresh()
    assert state.status == "completed"
    assert "completed, step 1, " in summary_line(state)
