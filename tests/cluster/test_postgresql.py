"""A study and a tracking server on PostgreSQL, shared by machines: separate folders here."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import postgresql
import psutil
import pytest
from mlflow.tracking import MlflowClient
from optuna.trial import TrialState
from shared_sweep import config, source, train
from shared_worker import closing, machine, work

import nbtoolkit as nb
from nbtoolkit import errors
from nbtoolkit.search.algorithm import JobResult
from nbtoolkit.study.shared_study import SharedStudy
from nbtoolkit.study.study import FILE, read_study

pytestmark = pytest.mark.cluster

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def running_server() -> Iterator[postgresql.PostgreSQL]:
    if lacking := postgresql.missing():
        pytest.skip(f"NOT TESTED: {lacking}")
    with postgresql.running() as server:
        yield server


@pytest.fixture
def server(
    running_server: postgresql.PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> postgresql.PostgreSQL:
    monkeypatch.setenv("STUDY_URL", running_server.url())
    return running_server


def start(script: str, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, SUPPORT / script, *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_all(process: subprocess.Popen[str]) -> None:
    """Kill a process and all below it at once, as a machine that loses power."""
    whole = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for one in whole:
        one.send_signal(signal.SIGSTOP)
    for one in whole:
        one.kill()
    process.communicate()


def stored(server: postgresql.PostgreSQL, name: str) -> list[optuna.trial.FrozenTrial]:
    storage = optuna.storages.RDBStorage(server.url())
    try:
        return optuna.load_study(study_name=name, storage=storage).trials
    finally:
        storage.remove_session()
        storage.engine.dispose()


def wait_until(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + 200
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def files_with(folder: Path, text: str) -> list[Path]:
    found = (file for file in folder.rglob("*") if file.is_file())
    return [file for file in found if text.encode() in file.read_bytes()]


def test_eight_machines_lose_and_double_no_trial(
    server: postgresql.PostgreSQL, tmp_path: Path
) -> None:
    printed = start("shared_worker.py", tmp_path, 8, 24, 0.05).communicate(timeout=280)[0]
    ran = re.findall(r"^ran (.*) best (.*)$", printed, re.MULTILINE)
    assert len(ran) == 8, printed
    numbers = [int(number) for words, _ in ran for number in words.split()]
    assert sorted(numbers) == list(range(24))
    trials = stored(server, "workers")
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert len({trial.params["model.x"] for trial in trials}) == len(trials) == 24
    # Each machine waited for the others, and has the whole study.
    assert len({best for _, best in ran}) == 1
    copies = [len(read_study(tmp_path / f"{i}" / FILE).trials) for i in range(8)]
    assert copies == [24] * 8


def test_another_machine_repeats_the_trial_of_a_dead_one(
    server: postgresql.PostgreSQL, tmp_path: Path
) -> None:
    dead = start("shared_sweep.py", tmp_path / "dead", 4, 60)
    try:
        wait_until(lambda: list(tmp_path.glob("dead/*/trials/*/ranks/*")))
    finally:
        kill_all(dead)
    [left] = stored(server, "shared")[:1]
    assert left.state == TrialState.RUNNING
    result = nb.sweep(train, config(str(tmp_path / "alive")), source(4), display="off")
    trials = stored(server, "shared")
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    assert (result.status, len(complete)) == ("completed", 4)
    assert left.params in [trial.params for trial in complete]
    assert sorted(result.trials.index) == [trial.number for trial in complete]
    assert set(result.trials["state"]) == {"complete"}


def test_trials_survive_a_restart_of_the_server(tmp_path: Path) -> None:
    if lacking := postgresql.missing():
        pytest.skip(f"NOT TESTED: {lacking}")
    settings = config(str(tmp_path), seconds=0.4)
    with postgresql.running() as server:
        # The URL itself here, with its password.
        study = source(12, name="restarted", storage=server.url(), heartbeat=5)
        handle = nb.sweep(train, settings, study, display="off", wait=False)
        wait_until(lambda: len(list(tmp_path.glob("*/trials/*"))) > 2)
        server.stop()
        time.sleep(3)
        server.start()
        result = handle.result(timeout=120)
        trials = stored(server, "restarted")
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert len(trials) == len(result.trials) == 12
    assert "study's server does not answer" in result.paths.events.read_text()
    for secret in (postgresql.PASSWORD, postgresql.PASSWORD.replace(" ", "%20")):
        assert not files_with(tmp_path, secret)
    assert "***@127.0.0.1" in (result.paths.folder / "sweep.yaml").read_text()


def test_a_trial_that_was_taken_over_is_dropped_by_its_first_machine(
    server: postgresql.PostgreSQL, tmp_path: Path
) -> None:
    first, diary = machine(tmp_path / "first", source(2, name="paused"))
    with closing(first):
        job = first.next(None)
        assert job is not None
        # As on a machine that is paused: no signs of life, and then it continues.
        study = first._recorder.study
        assert isinstance(study, SharedStudy)
        study.server.trials.clear()
        other, _ = machine(tmp_path / "other", source(2, name="paused"))
        with closing(other):
            keys = [one.key for one in work(other)]
        assert keys == ["trials/0002", "trials/0001"] or keys == ["trials/0001", "trials/0002"]
        assert first.on_report(job, {"score": 1.0}, 0) == "pruned"
        first.on_end(job, JobResult(status="pruned", metrics={"score": 1.0}))
    assert "another one repeats the trial" in diary.notes()
    states = [trial.state for trial in stored(server, "paused")]
    assert states == [TrialState.FAIL, TrialState.COMPLETE, TrialState.COMPLETE]


def test_another_search_does_not_join(server: postgresql.PostgreSQL, tmp_path: Path) -> None:
    made, _ = machine(tmp_path / "one", source(1, name="other"))
    made.close("stopped")
    space = {"model.x": {"type": "float", "low": 0.0, "high": 2.0}}
    with pytest.raises(errors.SweepError, match="made for another search") as caught:
        machine(tmp_path / "two", {**source(1, name="other"), "space": space})
    assert postgresql.PASSWORD not in str(caught.value)


def test_a_server_that_refuses_the_user(server: postgresql.PostgreSQL, tmp_path: Path) -> None:
    study = source(1, storage=server.url(password="wrong secret"))
    with pytest.raises(errors.SweepError, match="password authentication failed") as caught:
        nb.sweep(train, config(str(tmp_path)), study, display="off")
    assert "secret" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_tracking_server_on_postgresql(
    server: postgresql.PostgreSQL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret-token")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    database = server.new_database("tracking")
    words = ["--backend-store-uri", database, "--artifacts-destination", tmp_path / "artifacts"]
    words += ["--host", "127.0.0.1", "--port", port, "--workers", 1]
    log = tmp_path / "mlflow.log"
    with log.open("w") as output:
        tracking = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *map(str, words)],
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: answers(port) or tracking.poll() is not None)
        assert tracking.poll() is None, log.read_text()[-3000:]
        uri = f"http://127.0.0.1:{port}"
        settings = {**config(str(tmp_path / "out")), "tracking.mlflow": True, "tracking.uri": uri}
        result = nb.launch(train, settings, processes=1, display="off")
        client = MlflowClient(tracking_uri=uri)
        runs: list[Any] = []
        wait_until(lambda: runs.extend(finished(client)) or runs)
        assert runs[0].info.run_name == result.paths.run_id
        assert runs[0].data.metrics["score"] == 0.0
        assert "config.yaml" in [file.path for file in client.list_artifacts(runs[0].info.run_id)]
        # A study there would damage MLflow's tables.
        with pytest.raises(errors.SweepError, match="belongs to another program"):
            machine(tmp_path / "study", source(1, storage=database))
    finally:
        kill_all(tracking)
    assert not files_with(tmp_path / "out", "secret-token")


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def finished(client: MlflowClient) -> list[Any]:
    known = [one.experiment_id for one in client.search_experiments()]
    return [run for run in client.search_runs(known) if run.info.status == "FINISHED"]
