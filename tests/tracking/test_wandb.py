"""Runs and sweeps in Weights & Biases, in its offline mode, without account and internet."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from kernels import SECONDS
from test_tracking_sweeps import Sweep, two_trials
from tracked_runs import Run, follow, whole_run
from wandb_files import OfflineRun, offline_runs

import nbtoolkit as nb
from nbtoolkit.run.paths import RunPaths, read_json
from nbtoolkit.tracking.follower import Follower
from nbtoolkit.tracking.service import TrackingProcess, replay
from nbtoolkit.tracking.tracker import choose_tracking

needs_wandb = pytest.mark.skipif(
    find_spec("wandb") is None, reason="W&B is not installed: pip install wandb"
)
ON = {"mlflow": False, "wandb": True}


def test_a_missing_wandb_is_a_note_with_the_install_line() -> None:
    settings = {"mlflow": True, "wandb": True}
    choice = choose_tracking(settings, installed=lambda module: module != "wandb")
    assert choice.trackers == ("mlflow",)
    (note,) = choice.notes
    assert "tracking.wandb is on, but wandb cannot be imported" in note
    assert "pip install wandb" in note
    assert choose_tracking({}, installed=lambda module: True).trackers == ("mlflow",)


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An output folder, in a home without a key; W&B's own process ends with the test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")  # no threads that outlive a test
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.delenv("NETRC", raising=False)
    yield tmp_path / "outputs"
    if "wandb" in sys.modules:
        import wandb

        wandb.teardown()
    assert not list((tmp_path / "cwd").iterdir())


def only_run(paths: RunPaths) -> OfflineRun:
    (run,) = offline_runs(paths.folder).values()
    return run


# --- one run ----------------------------------------------------------------------------------


@needs_wandb
def test_a_run_becomes_one_wandb_run_in_its_own_folder(outputs: Path) -> None:
    paths = whole_run(outputs, tracking={**ON, "wandb_project": "digits/cnn"})
    follow(paths)
    run = only_run(paths)
    assert (run.name, run.group, run.job_type) == (paths.run_id, paths.run_id, "run")
    assert run.project == "digits-cnn"
    assert run.config["optim"] == {"name": "adamw", "lr": 1e-3}
    assert run.config["plan"]["processes"] == 2
    assert run.curve("loss") == [(step, pytest.approx(1 / (step + 1))) for step in range(5)]
    assert run.curve("val_accuracy") == [(4, 0.9)]
    assert [row["_step"] for row in run.rows] == [0, 1, 2, 3, 4, 5]
    assert (run.exit_code, run.summary["status"], run.summary["loss"]) == (0, "completed", 0.2)
    place = read_json(paths.tracking)["places"]["wandb"]
    assert Path(place).parent == paths.folder / "wandb"
    # A replay writes nothing; without the files it writes them again, with the same id.
    before = sorted((file, file.stat().st_mtime_ns) for file in paths.folder.rglob("*.wandb"))
    follow(paths)
    assert before == sorted(
        (file, file.stat().st_mtime_ns) for file in paths.folder.rglob("*.wandb")
    )
    (paths.folder / "wandb").rename(outputs / "moved away")
    follow(paths)
    again = only_run(paths)
    assert (again.id, again.curve("loss")) == (run.id, run.curve("loss"))


@needs_wandb
@pytest.mark.long
def test_values_of_a_cut_off_follower_are_written_once(outputs: Path) -> None:
    run = Run.new(outputs)
    run.begin(tracking=ON)
    run.train(range(3))
    process = TrackingProcess([run.paths.folder])
    wait_until_tracked(run.paths)
    kill_children()
    process.wait()
    run.train(range(3, 6))
    run.end("failed", error="ValueError: no")
    assert replay(run.paths.folder) is None
    written = only_run(run.paths)
    assert [step for step, _ in written.curve("loss")] == list(range(6))
    assert (written.exit_code, written.summary["error"]) == (1, "ValueError: no")
    replay(run.paths.folder)
    assert only_run(run.paths) == written


def wait_until_tracked(paths: RunPaths) -> None:
    """Wait until the service has written what there is."""
    until = time.monotonic() + SECONDS
    while not paths.tracking.exists() or not read_json(paths.tracking)["written"]:
        assert time.monotonic() < until
        time.sleep(0.05)


def kill_children() -> None:
    """Kill the tracking service and W&B's process below it, as a machine's end does."""
    for process in psutil.Process().children(recursive=True):
        process.send_signal(signal.SIGKILL)


@needs_wandb
def test_a_later_attempt_continues_in_the_same_wandb_run(outputs: Path) -> None:
    run = Run.new(outputs)
    run.begin(tracking=ON)
    run.train(range(3))
    run.release()  # its supervisor was killed
    follow(run.paths)
    killed = only_run(run.paths)
    assert (killed.exit_code, killed.summary["status"]) == (1, "killed")
    second = Run(run.paths)
    second.begin(attempt=2, tracking=ON, train={"epochs": 4})
    with Follower(second.paths) as follower:
        assert not follower.poll()
        second.train(range(3, 5))
        second.end()
        assert follower.poll()
    written = only_run(run.paths)
    assert (written.id, written.exit_code, written.summary["status"]) == (killed.id, 0, "completed")
    assert [step for step, _ in written.curve("loss")] == list(range(5))
    assert written.config["train"] == {"epochs": 4}


@needs_wandb
def test_an_attempt_that_begins_between_two_reads_is_in_the_same_wandb_run(outputs: Path) -> None:
    run = Run.new(outputs)
    run.begin(tracking=ON)
    run.train(range(2))
    with Follower(run.paths) as follower:
        assert not follower.poll()
        run.end("stopped")
        assert follower.poll()  # the W&B run has ended
        second = Run(run.paths)
        second.begin(attempt=2, tracking=ON)
        second.train(range(2, 4))
        second.end()
        assert follower.poll()
    assert [step for step, _ in only_run(run.paths).curve("loss")] == list(range(4))


# --- sweeps -----------------------------------------------------------------------------------


@needs_wandb
def test_a_sweep_its_trials_and_folds_are_one_group(outputs: Path) -> None:
    sweep = Sweep(outputs, {**ON})
    sweep.trial(7, "running")
    for fold in (0, 1):
        sweep.fold(7, fold, "running")
        sweep.job(f"trials/0007/fold-{fold}", range(2))
        sweep.fold(7, fold, "complete", val_accuracy=0.1 + fold)
    sweep.trial(7, "complete", value=0.6, best=True)
    two_trials(sweep)
    follow(sweep.paths)
    runs = offline_runs(sweep.paths.folder)
    kinds = {name: run.job_type for name, run in runs.items()}
    assert kinds == {
        sweep.paths.run_id: "run",
        "trials/0000": "trial",
        "trials/0001": "trial",
        "trials/0007/fold-0": "fold",
        "trials/0007/fold-1": "fold",
    }
    assert {run.group for run in runs.values()} == {sweep.paths.run_id}
    first, second = runs["trials/0000"], runs["trials/0001"]
    assert [step for step, _ in first.curve("val_accuracy")] == [0, 1, 2, 3, 4]
    assert (first.summary["val_accuracy"], first.summary["status"]) == (0.4, "completed")
    assert second.summary["status"] == "pruned"
    assert runs["trials/0007/fold-1"].summary["val_accuracy"] == 0.1
    assert runs[sweep.paths.run_id].curve("value") == [(7, 0.6), (0, 0.4)]
    assert all(run.exit_code == 0 for run in runs.values())


@needs_wandb
def test_a_trial_that_is_retried_and_a_follower_that_stops_double_nothing(outputs: Path) -> None:
    sweep = Sweep(outputs, {**ON})
    sweep.trial(0, "running")
    sweep.job("trials/0000", range(2), "failed")
    sweep.trial(0, "waiting", reason="its process was killed")
    with Follower(sweep.paths) as follower:
        follower.poll()
        sweep.trial(0, "running")
        sweep.job("trials/0000", range(3), None)
        follower.poll()
    sweep.job("trials/0000", range(3, 5))
    sweep.trial(0, "complete", value=0.5)
    sweep.end()
    follow(sweep.paths)
    follow(sweep.paths)
    trial = offline_runs(sweep.paths.folder)["trials/0000"]
    assert [step for step, _ in trial.curve("val_accuracy")] == [0, 1, 0, 1, 2, 3, 4]
    assert (trial.exit_code, trial.summary["status"]) == (0, "completed")


# --- no key, no internet, no question ---------------------------------------------------------


SUPPORT = Path(__file__).parents[1] / "support"
FOLLOW = """
import sys
from pathlib import Path
from tracked_runs import follow
from nbtoolkit.run.paths import RunPaths
follow(RunPaths(Path(sys.argv[1])))
"""


@needs_wandb
@pytest.mark.long
@pytest.mark.parametrize("key", [None, "0" * 40])
def test_at_a_terminal_without_key_or_server_nothing_is_asked(
    outputs: Path, key: str | None
) -> None:
    paths = whole_run(outputs, tracking=ON)
    variables = {"WANDB_BASE_URL": "http://127.0.0.1:9", **({"WANDB_API_KEY": key} if key else {})}
    ours, theirs = pty.openpty()
    try:
        source = os.pathsep.join([str(Path(nb.__file__).parents[1]), str(SUPPORT)])
        done = subprocess.run(
            [sys.executable, "-c", FOLLOW, str(paths.folder)],
            env={**os.environ, **variables, "PYTHONPATH": source},
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert (done.returncode, done.stdout) == (0, "")
    assert only_run(paths).summary["status"] == "completed"


# --- in a launch ------------------------------------------------------------------------------


@needs_wandb
@pytest.mark.long
def test_a_launch_and_a_sweep_are_tracked_by_the_tracking_process_only(outputs: Path) -> None:
    def train(config: Any, ctx: Any) -> dict[str, float]:
        import sys

        assert "wandb" not in sys.modules
        for step in range(3):
            ctx.report({"val_loss": config.optim.lr / (step + 1)}, step=step)
        return {"val_loss": config.optim.lr}

    config = {"tracking": ON, "runtime.output_dir": str(outputs)}
    result = nb.launch(train, config, processes=2)
    run = only_run(result.paths)
    assert [step for step, _ in run.curve("val_loss")][:3] == [0, 1, 2]
    assert (run.summary["status"], run.config["plan"]["processes"]) == ("completed", 2)
    study = nb.sweep(
        train,
        config,
        {
            "study": {"metric": "val_loss"},
            "space": {"optim.lr": {"type": "categorical", "choices": [0.1, 0.2]}},
        },
        n_trials=2,
    )
    assert study.status == "completed"
    runs = offline_runs(study.paths.folder)
    trials = [run for run in runs.values() if run.job_type == "trial"]
    assert len(trials) == 2
    for trial in trials:
        assert trial.summary["val_loss"] == trial.config["params"]["optim.lr"]


@needs_wandb
@pytest.mark.long
def test_the_command_line_of_wandb_finds_the_files(outputs: Path) -> None:
    paths = whole_run(outputs, tracking=ON)
    follow(paths)
    command = [sys.executable, "-m", "wandb", "sync", "--dry-run"]
    folders = [str(folder) for folder in paths.folder.glob("wandb/offline-run-*")]
    done = subprocess.run([*command, *folders], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0
    assert Path(folders[0]).name in done.stdout + done.stderr
