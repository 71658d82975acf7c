"""Runs are tracked by an MLflow server over HTTP."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow.tracking import MlflowClient

import nbtoolkit as nb

pytestmark = pytest.mark.cluster


def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    ctx.report({"score": 0.5}, step=0)
    return {"score": 0.5}


def test_a_run_on_a_tracking_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret-token")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--backend-store-uri", f"sqlite:///{tmp_path}/tracking.db"]
    words += ["--artifacts-destination", str(tmp_path / "artifacts")]
    words += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    log = tmp_path / "mlflow.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *words],
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: answers(port) or server.poll() is not None)
        assert server.poll() is None, log.read_text()[-3000:]
        uri = f"http://127.0.0.1:{port}"
        settings = {"runtime.output_dir": str(tmp_path / "out"), "tracking.uri": uri}
        result = nb.launch(train, settings, processes=1, display="off")
        client = MlflowClient(tracking_uri=uri)
        wait_until(lambda: finished(client))
        runs = finished(client)
        assert runs[0].info.run_name == result.paths.run_id
        assert runs[0].data.metrics["score"] == 0.5
        assert "config.yaml" in [file.path for file in client.list_artifacts(runs[0].info.run_id)]
    finally:
        end(server)
    assert not files_with(tmp_path / "out", "secret-token")


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants."""
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.kill()
    process.wait()


def wait_until(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + 200
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def files_with(folder: Path, text: str) -> list[Path]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return [file for file in files if text.encode() in file.read_bytes()]


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def finished(client: MlflowClient) -> list[Any]:
    known = [experiment.experiment_id for experiment in client.search_experiments()]
    return [run for run in client.search_runs(known) if run.info.status == "FINISHED"]
