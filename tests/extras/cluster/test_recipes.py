"""Scripts of ``nbtoolkit recipe``: read by real tools, and run where this machine can."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from records import last_of

from nbtoolkit.config.schema import Config, load_config
from nbtoolkit.errors import PlanError
from nbtoolkit.extras.cluster.recipes import TEMPLATES, recipe

IMAGE = "pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime"
CLUSTERS = [
    {"nodes": nodes, "devices": 2, "gpu": gpu, "time_limit": "2h30m"}
    for nodes in (1, 3)
    for gpu in (True, False)
]
WORDS = ["config/train.yaml", "-o", 'model.note=it\'s $HOME; rm -rf `x` "y"']
# torchrun lies beside this Python.
SEARCH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def machines(**cluster: Any) -> Config:
    return load_config(overrides={f"cluster.{name}": value for name, value in cluster.items()})


# --- what tools say of them ---


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
@pytest.mark.parametrize("kind", ["torchrun", "slurm", "ssh"])
def test_shellcheck_finds_nothing(kind: str, cluster: dict[str, Any]) -> None:
    if (shellcheck := shutil.which("shellcheck")) is None:
        pytest.skip("NOT CHECKED: shellcheck is not installed (apt-get install shellcheck)")
    # SC2016: a word of the user's with $ stays as it is.
    words = [shellcheck, "--exclude=SC2016", "-"]
    text = recipe(kind, machines(**cluster), WORDS)
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0)


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_kubernetes_accepts_the_service_and_the_job(cluster: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    service, job = yaml.safe_load_all(recipe("kubernetes", machines(**cluster), WORDS, image=IMAGE))
    for resource in (service, job):
        validate(resource, "1.31", strict=True)

    # Each pod finds the first one: a headless service with the pods' subdomain as its name.
    assert service["spec"]["clusterIP"] == "None"
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == cluster["nodes"]
    container = pod["containers"][0]
    assert container["args"] == WORDS
    assert "--rdzv-endpoint=train-0.train:29400" in container["command"]
    limit = {"nvidia.com/gpu": 2} if cluster["gpu"] else {"cpu": 2}
    assert container["resources"]["limits"] == limit
    assert job["spec"]["activeDeadlineSeconds"] == 9000


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_kubeflow_reads_every_key_of_the_train_job(cluster: dict[str, Any]) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    content = yaml.safe_load(recipe("kubeflow", machines(**cluster), WORDS, image=IMAGE))
    read = models.TrainerV1alpha1TrainJob.from_dict(content).to_dict()
    assert read == content  # the model drops keys that it does not know
    assert content["spec"]["trainer"]["numNodes"] == cluster["nodes"]
    assert content["spec"]["trainer"]["args"] == WORDS


def test_slurm_gets_a_task_per_device_and_its_time_in_minutes() -> None:
    lines = recipe("slurm", machines(nodes=4, devices=8, time_limit=93784)).splitlines()
    assert "#SBATCH --nodes=4" in lines
    assert "#SBATCH --ntasks-per-node=8" in lines
    assert "#SBATCH --gpus-per-node=8" in lines
    assert "#SBATCH --time=1564" in lines


# --- run for real ---


def program(folder: Path, kind: str, *, port: int = 29400, **cluster: int) -> str:
    """A script in ``folder`` that trains the task of digits for two epochs, without GPUs."""
    settings = ("train.epochs=2", "tracking.mlflow=false", f"runtime.output_dir={folder / 'runs'}")
    words = [word for setting in settings for word in ("-o", setting)]
    script = folder / "train.sh"
    script.write_text(recipe(kind, machines(gpu=False, **cluster), words, port=port))
    return str(script)


def started(words: list[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    here = {"PATH": SEARCH, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder)}
    return subprocess.Popen(
        ["bash", *words],
        cwd=folder,
        env={**os.environ, **here, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def check(folder: Path, *processes: subprocess.Popen[str]) -> None:
    """All have ended well, and the one run is of two ranks."""
    texts = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), texts
    [run] = (folder / "runs").glob("*-train-*")
    result = last_of(run)
    assert (result.status, result.processes) == ("completed", 2)
    assert result.metrics["val_accuracy"] > 0.5


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


@pytest.mark.long
def test_the_script_for_one_machine_trains(tmp_path: Path) -> None:
    script = program(tmp_path, "torchrun", devices=2)
    check(tmp_path, started([script], tmp_path))


@pytest.mark.long
def test_the_script_for_several_machines_trains_on_two_agents(tmp_path: Path) -> None:
    script = program(tmp_path, "torchrun", nodes=2, devices=1, port=free_port())
    check(tmp_path, *(started([script], tmp_path, HEAD="127.0.0.1") for _ in range(2)))


@pytest.mark.long
def test_the_script_for_ssh_starts_every_machine(tmp_path: Path) -> None:
    # In place of two machines: the last word is the command, which ssh gives to the shell there.
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(
        '#!/usr/bin/env bash\nwhile [ "$#" -gt 1 ]; do shift; done\ncd / && bash -c "$1"\n'
    )
    ssh.chmod(0o755)
    script = program(tmp_path, "ssh", nodes=2, devices=1, port=free_port())
    search = os.pathsep.join(
        [str(ssh.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    check(tmp_path, started([script, "127.0.0.1", "localhost"], tmp_path, PATH=search))


def test_the_script_for_ssh_refuses_another_number_of_hosts(tmp_path: Path) -> None:
    script = program(tmp_path, "ssh", nodes=2, devices=1)
    job = started([script, "one"], tmp_path)
    assert "2 hosts, not 1" in job.communicate(timeout=60)[0]
    assert job.returncode == 2


def test_the_script_for_several_machines_asks_for_their_head(tmp_path: Path) -> None:
    job = started([program(tmp_path, "torchrun", nodes=2, devices=1)], tmp_path, HEAD="")
    assert "set HEAD to the name or address of one machine" in job.communicate(timeout=60)[0]
    assert job.returncode == 1


# --- what cannot be ---


def test_a_world_size_that_the_nodes_do_not_make_is_refused() -> None:
    settings = machines(nodes=3, devices=4).with_overrides({"distributed.world_size": 8})
    with pytest.raises(PlanError, match="is 8, and 3 nodes with 4 devices each make 12"):
        recipe("slurm", settings)


def test_the_devices_follow_from_the_settings() -> None:
    eight = machines(nodes=2).with_overrides({"distributed.world_size": 8})
    assert "--ntasks-per-node=4" in recipe("slurm", eight)
    two = machines().with_overrides({"distributed.device_ids": [1, 3]})
    assert "--ntasks-per-node=2" in recipe("slurm", two)
    with pytest.raises(PlanError, match="number of devices of a machine is not known"):
        recipe("slurm", machines(nodes=3))


@pytest.mark.parametrize("name", ["Train", "a_b", "", "-a", "a" * 60, "a; reboot"])
def test_a_name_that_is_no_host_name_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match="a job cannot be called"):
        recipe("kubernetes", machines(devices=1), name=name)


def test_an_unknown_recipe_names_those_that_exist() -> None:
    with pytest.raises(PlanError, match=f"there is no recipe for 'lsf'\n.*{', '.join(TEMPLATES)}"):
        recipe("lsf", machines(devices=1))


def test_the_command_prints_it() -> None:
    words = ["recipe", "slurm", "-o", "train.epochs=2", "--nodes", "2", "--devices", "4", "--cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "nbtoolkit", *words, "--time", "90m"],
        capture_output=True,
        text=True,
        check=True,
    )
    settings = machines(nodes=2, devices=4, gpu=False, time_limit="90m")
    assert done.stdout == recipe("slurm", settings, ["-o", "train.epochs=2"])
