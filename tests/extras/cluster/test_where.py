"""``where=``: what is wrong is reported before anything is submitted, without a cluster."""

from __future__ import annotations

import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from records import first_of

import nbtoolkit as nb
from nbtoolkit.errors import (
    CannotPickle,
    ConfigError,
    LaunchError,
    MissingExtra,
    PlanError,
    ResumeError,
)
from nbtoolkit.launcher.remote import load_call
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.tasks.digits import train as digits
from nbtoolkit.views.state import read_state

SPACE = {"optim.lr": {"type": "float", "low": 1e-3, "high": 1e-1}}


def settings(folder: Path, **values: Any) -> dict[str, Any]:
    return {"runtime.output_dir": str(folder / "runs"), "tracking.mlflow": False, **values}


# --- arguments ---


def test_an_unknown_place_names_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"'lsf' is not valid\n.*'local' \| 'slurm' \| 'ray'"):
        nb.launch(digits, settings(tmp_path), where="lsf")  # type: ignore[call-overload]


def test_a_machine_without_slurm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"there is no Slurm here: sbatch is not on PATH"):
        nb.launch(digits, settings(tmp_path), where="slurm")
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("login_node")
def test_eight_gpus_as_three_nodes_with_four_are_refused(tmp_path: Path) -> None:
    values = {"cluster.nodes": 3, "cluster.devices": 4, "distributed.world_size": 8}
    with pytest.raises(PlanError, match="is 8, and 3 nodes with 4 devices each make 12 ranks"):
        nb.launch(digits, settings(tmp_path, **values), where="slurm")
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("login_node")
def test_a_search_on_several_nodes_of_slurm_is_refused(tmp_path: Path) -> None:
    values = {"cluster.nodes": 2, "cluster.devices": 4}
    with pytest.raises(PlanError, match=r"a search with cluster.nodes: 2: its trials share one"):
        nb.sweep(digits, settings(tmp_path, **values), SPACE, n_trials=1, where="slurm")


@pytest.mark.usefixtures("login_node")
def test_a_measured_strategy_is_refused(tmp_path: Path) -> None:
    values = {"distributed.strategy": "measured", "cluster.devices": 1}
    with pytest.raises(ConfigError, match=r'strategy: measured, and where="slurm": a calibration'):
        nb.launch(digits, settings(tmp_path, **values), where="slurm")


@pytest.mark.usefixtures("login_node")
def test_a_start_that_is_tied_to_this_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r'start="inline" ties the run to this process, and'):
        nb.launch(digits, settings(tmp_path), where="slurm", start="inline")


@pytest.mark.usefixtures("login_node")
def test_a_function_that_cannot_be_pickled_is_named_and_leaves_no_folder(tmp_path: Path) -> None:
    lock = threading.Lock()

    def train(config: Any, ctx: Any) -> object:
        return lock

    with pytest.raises(CannotPickle, match="closure variable `lock`"):
        nb.launch(train, settings(tmp_path, **{"cluster.devices": 1}), where="slurm")
    assert not list((tmp_path / "runs").iterdir())


def test_a_mistake_in_the_section_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("cluster:\n  nodes: 2\n  partiton: gpu\n  modules: cuda\n")
    with pytest.raises(ConfigError) as caught:
        nb.load_config(file)
    text = str(caught.value)
    assert f"{file}:3: unknown setting 'cluster.partiton'" in text
    assert "did you mean 'cluster.partition'?" in text
    assert f"{file}:4: cluster.modules: 'cuda' is not allowed (allowed: a list of strings" in text


# --- what is submitted ---


def test_a_run_is_submitted_and_waits_for_its_job(login_node: Path) -> None:
    config = settings(login_node, **{"cluster.devices": 2, "train.epochs": 3})
    handle = nb.launch(digits, config, where="slurm", wait=False, display="off")
    paths = handle.paths
    assert handle.status == "Slurm's job 7: PENDING (Resources)"
    assert not handle.done()
    assert read_state(paths.folder).status == "submitted"
    words = (login_node / "submitted").read_text().split()
    assert words == [
        "--parsable",
        f"--output={paths.folder}/remote/log.txt",
        str(paths.remote.with_name("job.sh")),
    ]
    assert paths.folder.stat().st_mode & 0o777 == 0o700
    # The next launch starts another run: this one has no checkpoint, and a job will start it.
    with pytest.raises(ResumeError, match="is still running"):
        nb.launch(digits, config, resume=paths.folder)
    nb.attach(paths.folder).stop()
    assert (login_node / "cancelled").read_text() == "7\n"


@pytest.mark.long
@pytest.mark.usefixtures("login_node")
def test_the_call_of_a_job_trains_the_run_as_its_first_attempt(tmp_path: Path) -> None:
    config = settings(tmp_path, **{"cluster.devices": 1, "cluster.gpu": False, "train.epochs": 1})
    paths = nb.launch(digits, config, where="slurm", wait=False, display="off").paths
    done = subprocess.run(
        [sys.executable, "-m", "nbtoolkit.extras.cluster.job", str(paths.folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = nb.attach(paths.folder).result()
    assert result.status == "completed"
    assert nb.attach(paths.folder).status == "completed"
    assert first_of(paths.folder).attempt == 1


def test_a_job_on_a_machine_without_the_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"cannot read .*call.pkl: No such file"):
        load_call(RunPaths(tmp_path / "elsewhere"))


def test_ray_that_is_not_installed_names_the_extra(tmp_path: Path) -> None:
    if find_spec("ray") is not None:
        pytest.skip("Ray is installed here")
    with pytest.raises(MissingExtra, match=r"needs Ray: .*\n.*pip install '.*ray"):
        nb.launch(digits, settings(tmp_path, **{"cluster.devices": 1}), where="ray")
