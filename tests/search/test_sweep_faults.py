"""A fault in a sweep's processes costs a trial or a session, never the sweep."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import functions
import pytest
from kernels import all_gone, descendants, script, until
from mounts import in_own_mounts
from records import owner_pid
from sweeps import begun, finished, sweep_folder

import nbtoolkit as nb
from nbtoolkit import errors
from nbtoolkit.search.study.study import FILE, read_study

pytestmark = pytest.mark.chaos

SWEEP_CONFIG = {
    "study": {"sampler": "random", "pruner": "none"},
    "space": {"optim.lr": {"type": "float", "low": 0.001, "high": 0.1}},
}
FATES = ["well", "killed", "hung", "out of memory", "nan"]
# The third trial and those after it do not come to their end while there is a file ``hold``.
SWEEP = """
import json, os, time
sweep_config = json.loads(open("sweep_config.json").read())
config = nb.load_config("config.json", env=None)
def train(config, ctx):
    found = functions.takes_its_time(config, ctx)
    while ctx.paths.folder.name > "0001" and os.path.exists("hold"):
        time.sleep(0.02)
    return found
result = nb.sweep(train, config, sweep_config, n_trials=6, display="off")
print(result.status, len(result.trials))
"""


@pytest.fixture
def config(tmp_path: Path) -> nb.Config:
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path / "out")}
    return nb.load_config(env=None, overrides=settings)


@pytest.fixture
def home(config: nb.Config, tmp_path: Path) -> Path:
    """A working directory for scripts; sweeps go to its folder ``out``."""
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    (tmp_path / "sweep_config.json").write_text(json.dumps(SWEEP_CONFIG))
    return tmp_path


# --- trials that fail ---


def test_a_worker_that_dies_hangs_or_has_no_memory_costs_its_trial(config: nb.Config) -> None:
    config = config.with_overrides({"runtime.hang_timeout": 2})
    choices = {"type": "categorical", "choices": FATES}
    sweep_config = {"study": {"sampler": "grid"}, "space": {"data.what": choices}}
    result = nb.sweep(functions.is_slow_or_ill, config, sweep_config, display="off")
    rows = {row["data.what"]: row for _, row in result.trials.iterrows()}
    states = {what: row["state"] for what, row in rows.items()}
    assert states == {
        "well": "complete",
        "killed": "failed",
        "hung": "failed",
        "out of memory": "infeasible",
        "nan": "failed",
    }
    assert "SIGKILL" in rows["killed"]["reason"]
    assert "used under 1% CPU for 2 s" in rows["hung"]["reason"]
    assert "optimizer step 3 is nan" in rows["nan"]["reason"]
    assert result.best_params == {"data.what": "well"}


def test_a_trial_is_tried_again_where_that_is_wished(config: nb.Config, tmp_path: Path) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        tries = ctx.paths.folder / "tries"
        tries.open("a").write("x")
        if len(tries.read_text()) < 3:
            raise ValueError("not yet")
        return {"val_loss": 1.0}

    sweep_config = {**SWEEP_CONFIG, "budget": {"retries": 2}}
    result = nb.sweep(train, config, sweep_config, n_trials=2, display="off")
    assert list(result.trials["state"]) == ["complete", "complete"]


def test_too_many_failures_end_the_sweep_and_the_same_call_resumes_it(
    config: nb.Config, tmp_path: Path
) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        if not (tmp_path / "mended").exists():
            raise ValueError("always")
        return {"val_loss": 1.0}

    sweep_config = {**SWEEP_CONFIG, "budget": {"max_failures": 2}}
    with pytest.raises(errors.SweepError, match=r"trials have failed \(\d\); the last: .*always"):
        nb.sweep(train, config, sweep_config, n_trials=8, display="off")
    (tmp_path / "mended").touch()
    result = nb.sweep(train, config, sweep_config, n_trials=8, display="off")
    assert 3 <= list(result.trials["state"]).count("failed") <= 5
    assert len(result.trials) == 8


def test_trials_whose_parameters_fit_no_configuration_count_as_failures(
    config: nb.Config,
) -> None:
    # Each value fits the configuration by itself; no two of them fit together.
    base = {"distributed.timeout": 1800.0, "runtime.hang_timeout": 600.0}
    space = {"distributed.timeout": [700.0, 701.0], "runtime.hang_timeout": [800.0, 801.0]}
    sweep_config = {
        "study": {"sampler": "random", "pruner": "none"},
        "space": {**SWEEP_CONFIG["space"], **space},
        "budget": {"max_failures": 2},
    }
    with pytest.raises(errors.SweepError, match=r"trials have failed \(\d\); the last: .*timeout"):
        nb.sweep(
            functions.takes_its_time,
            config.with_overrides(base),
            sweep_config,
            n_trials=40,
            display="off",
        )
    (folder,) = Path(config.runtime.output_dir).glob("*-sweep-*")
    states = [trial.state.name for trial in read_study(folder / FILE).trials]
    assert states == ["FAIL"] * len(states)
    assert 3 <= len(states) <= 8


# --- sessions that die ---


@pytest.mark.parametrize(
    "victim",
    ["kernel", *(pytest.param(one, marks=pytest.mark.long) for one in ("scheduler", "forkserver"))],
)
def test_a_session_that_dies_is_gone_on_with(home: Path, victim: str) -> None:
    (home / "hold").touch()
    with script(SWEEP, home) as kernel:
        folder = sweep_folder(home)
        until(lambda: len(finished(folder)) == 2 < begun(folder), "two trials, and one that runs")
        family = descendants(kernel.pid)
        scheduler = owner_pid(folder)
        (server,) = [pid for pid in family if scheduler in descendants(pid)]
        os.kill({"kernel": kernel.pid, "scheduler": scheduler, "forkserver": server}[victim], 9)
        out, err = kernel.end()
        assert victim == "kernel" or "LaunchError" in err, out + err
    all_gone(family)
    (home / "hold").unlink()
    before = finished(folder)
    assert len(before) == 2
    moved = home / "out" / folder.name.replace("sweep", "moved")
    shutil.move(folder, moved)
    with script(SWEEP, home) as kernel:
        assert kernel.output().splitlines()[-1] == "completed 6"
    after = finished(moved)
    assert before.items() <= after.items()
    assert len(after) == 6
    for trial in moved.glob("trials/*"):
        lines = [line.split() for line in (trial / "begun.txt").read_text().splitlines()]
        assert len({line[0] for line in lines}) == 1  # run again with the same parameters


def test_a_study_of_another_space_or_other_folds_is_refused(config: nb.Config) -> None:
    folds = nb.make_folds([0, 1] * 6, k=2)
    options: dict[str, Any] = {"n_trials": 1, "display": "off"}
    first = nb.sweep(functions.takes_its_time, config, SWEEP_CONFIG, folds=folds, **options)
    options["resume"] = first.paths.run_id
    wider = {**SWEEP_CONFIG, "space": {"optim.lr": {"type": "float", "low": 0.001, "high": 0.2}}}
    with pytest.raises(errors.SweepError, match=r"0\.2"):
        nb.sweep(functions.takes_its_time, config, wider, folds=folds, **options)
    others = nb.make_folds([0, 1] * 6, k=2, seed=1)
    with pytest.raises(errors.SweepError, match="folds"):
        nb.sweep(functions.takes_its_time, config, SWEEP_CONFIG, folds=others, **options)


FILL = """
import json
def fill(folder):
    try:
        with open(folder / "filler", "wb") as file:
            while True:
                file.write(bytes(10_000)), file.flush()
    except OSError:
        pass
"""


@pytest.mark.long
def test_a_full_disk_ends_the_session_and_not_the_study(home: Path) -> None:
    code = (
        FILL
        + """
sweep_config = json.loads(open("sweep_config.json").read())
config = nb.load_config("config.json", env=None)
def fills(config, ctx):
    if ctx.params["optim.lr"] < 1:
        fill(ctx.paths.folder)
    return {"val_loss": 1.0}
try:
    nb.sweep(fills, config, sweep_config, n_trials=4, display="off")
except nb.errors.RunFolderError as error:
    print(str(error).splitlines()[0])
"""
    )
    (line,) = in_own_mounts(code, home)
    assert "No space left on device" in line


@pytest.mark.long
def test_a_full_disk_ends_a_cross_validation_and_says_so(home: Path) -> None:
    code = (
        FILL
        + """
config = nb.load_config("config.json", env=None)
def fills(config, ctx):
    if ctx.fold.index > 0:
        fill(ctx.paths.folder)
    return {"val_loss": 1.0}
try:
    nb.cross_validate(fills, config, nb.make_folds([0, 1] * 8, k=4), display="off")
except nb.errors.RunFolderError as error:
    print(str(error).splitlines()[0])
"""
    )
    (line,) = in_own_mounts(code, home)
    assert "No space left on device" in line


@pytest.mark.long
def test_an_interrupted_wait_leaves_a_sweep_to_go_on_with(home: Path) -> None:
    code = SWEEP.replace("result =", "try:\n    result =").replace(
        "print(", "except KeyboardInterrupt:\n    print('interrupted')\nelse:\n    print("
    )
    (home / "hold").touch()
    with script(code, home) as kernel:
        folder = sweep_folder(home)
        until(lambda: len(finished(folder)) == 2 < begun(folder), "two trials, and one that runs")
        family = descendants(kernel.pid)
        os.kill(kernel.pid, signal.SIGINT)
        assert kernel.output().strip() == "interrupted"
    all_gone(family)
    (home / "hold").unlink()
    with script(SWEEP, home) as kernel:
        assert kernel.output().splitlines()[-1] == "completed 6"
