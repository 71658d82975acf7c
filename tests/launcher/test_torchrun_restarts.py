"""Restarts of torchrun: --max-restarts, elastic --nnodes min:max, and ranks with other code."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nbtoolkit.errors import LaunchError
from nbtoolkit.launcher.same_code import FUNCTION, refuse_differences
from nbtoolkit.worker.attempt_store import attempt_store

SCRIPT = str(Path(__file__).parents[1] / "support/restarted.py")


def start(folder: Path, program: list[str], **variables: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *program],
        env=environ,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    )


def torchrun(folder: Path, dies: str, *options: str) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--max-restarts=3", *options]
    return start(folder, [*launcher, SCRIPT, dies, str(folder)])


def answers(job: subprocess.Popen[str]) -> tuple[list[dict[str, Any]], str]:
    """What the ranks of a job that went well said, and all that it printed."""
    try:
        out, err = job.communicate(timeout=240)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, out + err
    lines = [line[5:] for line in out.splitlines() if line.startswith("TOLD ")]
    return [json.loads(line) for line in lines], out + err


def undisturbed(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    [told], _ = answers(start(folder, [SCRIPT, "nobody", str(folder)], RANK="0", WORLD_SIZE="1"))
    value: dict[str, Any] = told["value"]
    return value


@pytest.mark.long
def test_a_rank_that_dies_costs_a_restart_and_the_run_resumes(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "one")
    told, printed = answers(torchrun(tmp_path, "rank", "--standalone", "--nproc-per-node=2"))
    assert len(told) == 2
    assert {one["restarts"] for one in told} == {1}
    assert (tmp_path / "died").exists()
    assert "fit: resumes after epoch 0, 4 steps into the next one" in printed
    for one in told:
        assert one["value"] == pytest.approx({**expected, "world_size": 2}, abs=1e-4)


@pytest.mark.long
def test_an_elastic_job_goes_on_without_a_machine_that_died(tmp_path: Path) -> None:
    """Two agents stand for two machines; the second is killed with its rank."""
    expected = undisturbed(tmp_path / "one")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    wait = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = (
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        "--rdzv-id=elastic",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        f"--rdzv-conf={wait}",
    )
    first = torchrun(tmp_path, "agent", *options)
    time.sleep(1)  # the first agent serves the rendezvous, and must be the one that stays
    second = torchrun(tmp_path, "agent", *options)
    [told], printed = answers(first)
    out, err = second.communicate(timeout=60)
    assert second.returncode == -signal.SIGKILL, out + err
    assert "2 processes before, 1 now" in printed
    assert "fit: resumes after epoch 0, 4 steps into the next one" in printed
    assert told["value"] == pytest.approx(expected, abs=1e-4)


def test_ranks_do_not_read_what_an_earlier_attempt_left_in_the_store() -> None:
    """torchrun keeps its store: the addresses of ranks that died are still there."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    shared = {**place, "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def attempt(ranks: int) -> list[dist.Store | None]:
        with ThreadPoolExecutor(ranks) as pool:
            # Rank 0 comes last, when the others have asked.
            calls = [
                pool.submit(attempt_store, rank, ranks, 30, shared)
                for rank in reversed(range(ranks))
            ]
            return [call.result() for call in calls]

    for number, ranks in enumerate((3, 3, 2)):
        stores = [store for store in attempt(ranks) if store is not None]
        assert len(stores) == ranks
        assert not any(store.check(["address"]) for store in stores)
        stores[0].set("address", str(number))
        assert {store.get("address") for store in stores} == {str(number).encode()}
    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not answer within 0 s"):
        attempt_store(0, 2, 0.2, shared)
    assert attempt_store(0, 2, 30, place) is None


OTHER = """
import sys
import nbtoolkit as nb

def train(config, ctx):
    return {"loss": {loss}}

nb.launch(train, {"runtime.output_dir": sys.argv[1], "tracking.mlflow": False})
"""


@pytest.mark.long
def test_ranks_with_other_code_are_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    jobs = []
    for rank in ("0", "1"):
        script = tmp_path / f"{rank}.py"
        script.write_text(OTHER.replace("{loss}", rank))
        place = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        jobs.append(start(tmp_path, [str(script), str(tmp_path / "outputs")], **place))
    for job in jobs:
        _, err = job.communicate(timeout=240)
        assert job.returncode == 1
        assert "the training function of rank 1 (" in err
        assert "another source than that of rank 0 (" in err
        assert "Do now:  copy the script to every machine" in err
    assert not list(tmp_path.glob("outputs/*"))


def test_other_versions_are_refused_by_name() -> None:
    versions = {"torch": "2.13.0", "nbtoolkit": "0.2.0", "Python": "3.11", FUNCTION: "abc"}
    names = ["rank 0 (a)", "rank 1 (a)", "rank 2 (b)"]
    refuse_differences(names, [versions] * 3)
    older = [versions, versions, {**versions, "torch": "2.12.1"}]
    with pytest.raises(
        LaunchError,
        match=r"rank 2 \(b\) has torch 2.12.1, and rank 0 \(a\) has 2.13.0(.|\n)*Allowed:(.|\n)*"
        r"install one version of torch on all machines",
    ):
        refuse_differences(names, older)
