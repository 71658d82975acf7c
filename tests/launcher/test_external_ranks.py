"""Ranks started by torchrun, srun or bare variables, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from kernels import descendants
from machines import T4, machine
from records import last_of

from nbtoolkit.attach import attach
from nbtoolkit.host import detect_host
from nbtoolkit.launcher.in_process import first_node, rendezvous
from nbtoolkit.run.events import EventReader
from nbtoolkit.run.paths import RunPaths

SCRIPT = str(Path(__file__).parents[1] / "support/in_place.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def arguments(function: str, outputs: Path, **more: Any) -> list[str]:
    settings = {"runtime.output_dir": str(outputs), "tracking.mlflow": False, **more}
    return [SCRIPT, function, json.dumps(settings)]


def torchrun(function: str, outputs: Path, **more: Any) -> subprocess.Popen[str]:
    program = [*TORCHRUN, *arguments(function, outputs, **more)]
    return start(program, TMPDIR=str(outputs))  # torchrun leaves a folder there


def start(
    program: list[str], folder: Path | None = None, **variables: str
) -> subprocess.Popen[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen(program, cwd=folder, env=environ, stdout=pipe, stderr=pipe, text=True)


def told(*processes: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What the ranks of a job that went well said, by rank."""
    answers = []
    for process in processes:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, out + err
        answers += [json.loads(line[5:]) for line in out.splitlines() if line.startswith("TOLD ")]
    return sorted(answers, key=lambda answer: int(answer["rank"]))


def the_run(outputs: Path) -> RunPaths:
    [folder] = [path.parent for path in outputs.glob("*/events.jsonl")]
    return RunPaths(folder)


def types(paths: RunPaths) -> list[str]:
    return [event.type for event in EventReader(paths.events).read()]


def wait_for(outputs: Path, type: str, process: subprocess.Popen[str]) -> RunPaths:
    while process.poll() is None:
        if list(outputs.glob("*/events.jsonl")) and type in types(the_run(outputs)):
            return the_run(outputs)
        time.sleep(0.05)
    raise AssertionError(process.communicate())


# --- torchrun -------------------------------------------------------------------------------------


def test_torchrun_ranks_share_one_run(tmp_path: Path) -> None:
    ranks = told(torchrun("works", tmp_path, **{"tracking.mlflow": True}))

    paths = the_run(tmp_path)
    assert [rank["folder"] for rank in ranks] == [str(paths.folder)] * 2
    assert [rank["status"] for rank in ranks] == ["completed"] * 2
    assert ranks[0]["values"] == ranks[1]["values"]
    for number, value in enumerate(ranks[0]["values"]):
        assert value.pop("nested").endswith(str(paths.folder))
        wanted = {"rank": number, "world_size": 2, "device": "cpu", "saved": True, "sum": 3.0}
        assert value == wanted
    # The note: the ranks report different scores. The second report is what it returned.
    assert types(paths) == ["run", "metrics", "checkpoint", "note", "report", "report", "ended"]
    assert ranks[0]["events"] == types(paths)
    assert ranks[1]["events"] == []  # rank 0 keeps the record
    assert ranks[1]["metrics"] == {
        "score": 10.0,
        "rank": 0.0,
        "world_size": 2.0,
        "sum": 3.0,
    }  # rank 0's values count
    assert [rank["left"] for rank in ranks] == [[], []]
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        assert database.execute("select status from runs").fetchall() == [("FINISHED",)]


def test_the_command_prints_the_result_of_all_torchrun_ranks_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def train(config, ctx):\n    return {'score': 3.0}\n")
    settings = {"task": "mine:train", "tracking": {"mlflow": False}}
    (tmp_path / "mine.json").write_text(json.dumps(settings))
    program = [*TORCHRUN, "-m", "nbtoolkit", "train", "mine.json"]
    job = start(program, tmp_path, TMPDIR=str(tmp_path))
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, err
    assert out.count("RunResult(completed, score=3") == 1


@pytest.mark.long
def test_torchrun_ranks_leave_when_a_handle_stops_the_run(tmp_path: Path) -> None:
    job = torchrun("reports_for_ever", tmp_path)
    paths = wait_for(tmp_path, "report", job)
    handle = attach(paths.folder)
    assert not handle.done()
    handle.stop("a test asks")
    assert [rank["status"] for rank in told(job)] == ["stopped"] * 2
    assert (handle.done(), handle.result().status) == (True, "stopped")
    assert types(paths)[-2:] == ["report", "ended"]


@pytest.mark.long
def test_torchrun_ranks_hear_of_a_stop_inside_an_epoch(tmp_path: Path) -> None:
    job = torchrun("hears_inside_an_epoch", tmp_path)
    paths = wait_for(tmp_path, "report", job)
    attach(paths.folder).stop("a test asks")
    assert [rank["status"] for rank in told(job)] == ["stopped"] * 2
    assert types(paths)[-3:] == ["stop", "checkpoint", "ended"]


@pytest.mark.long
def test_a_signal_to_one_torchrun_rank_lets_all_leave(tmp_path: Path) -> None:
    job = torchrun("reports_for_ever", tmp_path)
    paths = wait_for(tmp_path, "report", job)
    os.kill(pid_of_rank(1, job), signal.SIGUSR1)
    assert [rank["status"] for rank in told(job)] == ["deadline"] * 2
    assert types(paths)[-3:] == ["stop", "report", "ended"]


@pytest.mark.long
def test_torchrun_itself_may_be_asked_to_end(tmp_path: Path) -> None:
    """It hands SIGTERM on to its ranks and gives them 30 s."""
    job = torchrun("reports_for_ever", tmp_path)
    paths = wait_for(tmp_path, "report", job)
    job.terminate()
    _, err = job.communicate(timeout=240)
    assert "SignalException" in err
    assert attach(paths.folder).result().status == "deadline"


def pid_of_rank(rank: int, job: subprocess.Popen[str]) -> int:
    """The process of a rank of a torchrun job."""
    mark = f"RANK={rank}".encode()
    environs = {}
    for pid in descendants(job.pid):
        # some live for a moment only
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            environs[pid] = Path(f"/proc/{pid}/environ").read_bytes()
    [found] = [pid for pid, environ in environs.items() if mark in environ.split(b"\0")]
    return found


@pytest.mark.long
def test_torchrun_job_ends_with_the_exception_of_one_rank(tmp_path: Path) -> None:
    job = torchrun("fails_on_rank_1", tmp_path)
    _, err = job.communicate(timeout=240)
    assert job.returncode != 0
    assert "ValueError: rank 1 had enough" in err

    paths = the_run(tmp_path)
    assert types(paths).count("ended") == 1
    assert last_of(paths.folder).rank == 1
    with pytest.raises(ValueError, match="rank 1 had enough") as caught:
        attach(paths.folder).result()
    assert "rank 1, " in caught.value.__notes__[0]


# --- bare variables -------------------------------------------------------------------------------


@pytest.mark.long
def test_one_process_with_rank_variables_is_a_run(tmp_path: Path) -> None:
    program = [sys.executable, *arguments("works", tmp_path)]
    [rank] = told(start(program, RANK="0", WORLD_SIZE="1"))
    assert (rank["status"], rank["values"][0]["sum"]) == ("completed", 1.0)
    assert rank["left"] == []


@pytest.mark.long
def test_a_rank_whose_peers_never_come_says_so(tmp_path: Path) -> None:
    patience = {"distributed.timeout": 1, "runtime.hang_timeout": 0.5}
    program = [sys.executable, *arguments("works", tmp_path, **patience)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    job = start(program, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    _, err = job.communicate(timeout=240)
    assert job.returncode == 1
    assert "GroupStartFailed: rank 0 of 2 (variables: RANK=0, WORLD_SIZE=2) could not join" in err
    assert f"127.0.0.1:{port}" in err
    assert not list(tmp_path.iterdir())


# --- Slurm ----------------------------------------------------------------------------------------


def task(number: int, **more: str) -> dict[str, str]:
    """What srun sets for a task of a step with two."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": str(os.getpid()),  # so that two sessions on one machine do not meet
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number),
        "SLURM_STEP_NODELIST": "127.0.0.1",
        **more,
    }


@pytest.mark.long
def test_srun_tasks_find_each_other_and_a_signal_to_one_lets_all_leave(tmp_path: Path) -> None:
    program = [sys.executable, *arguments("reports_for_ever", tmp_path)]
    tasks = [start(program, **task(number)) for number in (0, 1)]
    paths = wait_for(tmp_path, "report", tasks[0])
    os.kill(tasks[1].pid, signal.SIGUSR1)
    ranks = told(*tasks)
    assert [rank["status"] for rank in ranks] == ["deadline"] * 2
    assert [rank["metrics"]["sum"] for rank in ranks] == [3.0, 3.0]
    assert [rank["folder"] for rank in ranks] == [str(paths.folder)] * 2
    assert [rank["left"] for rank in ranks] == [[], []]  # RANK, MASTER_PORT and so on are gone
    assert types(paths)[-3:] == ["stop", "report", "ended"]


LEAVES = """
import os, sys
import torch.distributed as dist
from nbtoolkit.worker.process_group import leave_group
for turn in range(10):
    meet = f"file://{sys.argv[2]}/{turn}"
    dist.init_process_group("gloo", init_method=meet, rank=int(sys.argv[1]), world_size=2)
    dist.broadcast_object_list([list(range(50))], src=0)
    leave_group()
print("left")
"""


@pytest.mark.long
def test_ranks_leave_their_group_right_after_a_collective(tmp_path: Path) -> None:
    """With torch 2.6 nearly every such end waited for a thread that waited for it."""
    command = [sys.executable, "-c", LEAVES]
    ranks = [start([*command, str(rank), str(tmp_path)]) for rank in (0, 1)]
    # Some versions of torch write a line of gloo's before it.
    assert [rank.communicate(timeout=240)[0].split()[-1:] for rank in ranks] == [["left"]] * 2


@pytest.mark.long
def test_ranks_that_trained_a_prepared_model_end_well(tmp_path: Path) -> None:
    """They aborted after their last line, with torch 2.13: torchrun took the job for failed."""
    assert len(told(torchrun("trains_by_hand", tmp_path))) == 2


@pytest.mark.long
def test_a_function_may_end_the_group(tmp_path: Path) -> None:
    program = [sys.executable, *arguments("ends_the_group", tmp_path)]
    ranks = told(*[start(program, **task(number)) for number in (0, 1)])
    assert [rank["values"] for rank in ranks] == [[0, 1]] * 2
    assert types(the_run(tmp_path)) == ["run", "report", "ended"]  # what it returned


def places(environ: Mapping[str, str], *cards: Any) -> dict[str, str]:
    return rendezvous(detect_host(environ, modules={}), machine(*cards), environ)


def test_srun_tasks_of_a_step_get_one_address() -> None:
    nodes = {"SLURM_STEP_NODELIST": "gpu[07-08]"}
    first, second = (places(task(number, **nodes)) for number in (0, 1))
    assert (first["RANK"], first["WORLD_SIZE"], first["MASTER_ADDR"]) == ("0", "2", "gpu07")
    assert {**first, "RANK": "1", "LOCAL_RANK": "1"} == second


def test_what_the_launcher_said_is_left_alone() -> None:
    said = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert not said.keys() & places(task(0, **said)).keys()
    assert places({"RANK": "0", "WORLD_SIZE": "1"}) == {}


def test_a_task_bound_to_one_gpu_has_it_as_the_first() -> None:
    assert places(task(1), T4)["LOCAL_RANK"] == "0"
    assert places(task(1), T4, T4)["LOCAL_RANK"] == "1"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[01-04,07],m2", "n01"),
        ("n[3,5]", "n3"),
        ("m2,n[01-04]", "m2"),
        ("a-b-1,a-b-2", "a-b-1"),
        ("", ""),
    ],
)
def test_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first
