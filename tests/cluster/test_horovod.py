"""horovodrun with real ranks: nb.launch runs in place, with Horovod's optimizer and without."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nbtoolkit as nb
from nbtoolkit.environment.installed import installed_version
from nbtoolkit.errors import LaunchError
from nbtoolkit.tasks.digits import train as digits

SCRIPT = str(Path(__file__).parents[1] / "support/horovod_ranks.py")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        installed_version("horovod") is None,
        reason="NOT TESTED: Horovod is not installed (make test-cluster)",
    ),
]


def horovodrun(function: str, folder: Path, *options: str, **more: Any) -> tuple[int, str]:
    """The exit status and the output of a job of two ranks."""
    settings = {"runtime.output_dir": str(folder), "tracking.mlflow": False, **more}
    program = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", "2", *options]
    done = subprocess.run(
        [*program, sys.executable, SCRIPT, function, json.dumps(settings)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def told(function: str, folder: Path, **more: Any) -> list[dict[str, Any]]:
    """What the ranks said, by rank; horovodrun marks lines with ``[1,0]<stdout>:``."""
    code, output = horovodrun(function, folder, **more)
    assert code == 0, output
    answers = [json.loads(line) for line in re.findall(r"TOLD (\{.*\})", output)]
    return sorted(answers, key=lambda answer: int(answer["rank"]))


def test_horovods_optimizer_trains_as_ddp(tmp_path: Path) -> None:
    ranks = told("own_loop", tmp_path / "horovod")
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert len({rank["folder"] for rank in ranks}) == 1
    first, second = ranks[0]["values"]
    assert first["weights"] == second["weights"]
    assert first["mean"] == second["mean"] == (first["own_accuracy"] + second["own_accuracy"]) / 2
    assert ranks[0]["metrics"]["accuracy"] == first["mean"] > 0.8
    by_ddp = told("own_loop_by_ddp", tmp_path / "ddp")[0]["values"][0]
    assert by_ddp["weights"] == pytest.approx(first["weights"], abs=1e-4)
    assert by_ddp["mean"] == pytest.approx(first["mean"], abs=1e-4)


def test_fit_under_horovodrun_gives_the_metrics_of_a_launch(tmp_path: Path) -> None:
    settings = {"train.epochs": 1}
    by_horovodrun = told("by_fit", tmp_path / "horovod", **settings)[0]["metrics"]
    config = nb.load_config(
        overrides={**settings, "runtime.output_dir": str(tmp_path), "tracking.mlflow": False}
    )
    by_launch = nb.launch(digits, config, processes=2, display="off").metrics
    assert by_horovodrun == {name: pytest.approx(by_launch[name], abs=1e-4) for name in by_launch}


def test_the_job_ends_when_a_rank_dies(tmp_path: Path) -> None:
    code, output = horovodrun("dies", tmp_path)
    assert code != 0
    assert "exit code" in output or "non-zero" in output.lower()


def test_horovod_in_ranks_of_a_launch_is_refused(tmp_path: Path) -> None:
    def train(config: Any, ctx: Any) -> None:
        import torch

        from nbtoolkit.integrations import horovod

        model = torch.nn.Linear(2, 1)
        horovod.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))

    config = {"runtime.output_dir": str(tmp_path), "tracking.mlflow": False}
    with pytest.raises(LaunchError, match=r"needs ranks of horovodrun, and this rank \(0 of 1\)"):
        nb.launch(train, config, processes=1, display="off")
