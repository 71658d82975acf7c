"""File modes of a run folder, errors for other users, and who can hold its lock."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import nbtoolkit as nb
from nbtoolkit.errors import NbtoolkitError, ReportFolderError
from nbtoolkit.run.events import Event
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.resume import lock_run

NOBODY = 65534

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def train(config: Any, ctx: Any) -> float:
    inputs = torch.ones(8, 2)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :1])
    nb.fit(ctx, config, torch.nn.Linear(2, 1), data, data, loss=torch.nn.functional.mse_loss)
    ctx.save({"weight": torch.ones(2)})
    return 1.0


@contextmanager
def another_user() -> Iterator[None]:
    """This process as nobody; what is called must have imported all it needs."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@pytest.fixture
def outputs() -> Iterator[Path]:
    """An output folder that every user may look into; pytest's own are root's alone."""
    before = os.umask(0o022)
    folder = Path(tempfile.mkdtemp(prefix="modes-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    os.umask(before)
    shutil.rmtree(folder)


@pytest.fixture
def run(outputs: Path) -> RunPaths:
    """A finished run, of which everything was read once."""
    settings = {
        "tracking.mlflow": False,
        "train.epochs": 1,
        "runtime.output_dir": str(outputs),
    }
    config = nb.load_config(env=None, overrides=settings)
    result = nb.launch(train, config, start="inline", processes=1, display="off")
    nb.report(outputs, outputs / "report.html")
    nb.load_model(result.paths.folder, torch.nn.Linear(2, 1))
    _look(result.paths.folder)
    return result.paths


def _look(folder: Path) -> list[Event]:
    handle = nb.attach(folder, display="off")
    assert handle.result().value == 1.0
    return list(handle.events())


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_runs_folder_is_private_and_what_is_inside_follows_the_umask(run: RunPaths) -> None:
    assert oct(_mode(run.folder)) == "0o700"
    inside = {path: _mode(path) for path in run.folder.rglob("*") if path != run.lock}
    other = {
        str(path): oct(mode)
        for path, mode in inside.items()
        if mode != (0o755 if path.is_dir() else 0o644)
    }
    assert len(inside) > 10
    assert not other
    assert oct(_mode(run.lock)) == "0o600"


def test_what_is_written_for_others_follows_the_umask(run: RunPaths) -> None:
    assert oct(_mode(run.folder.parent / "report.html")) == "0o644"


@root_only
def test_another_user_is_told_whose_it_is(run: RunPaths) -> None:
    told = r"cannot be read: Permission denied\n  Allowed: .*\n  Do now:  .*chmod go\+rX"
    with another_user():
        with pytest.raises(NbtoolkitError, match=told):
            nb.attach(run.folder, display="off")
        with pytest.raises(NbtoolkitError, match=told):
            nb.load_model(run.folder, torch.nn.Linear(2, 1))
        with pytest.raises(
            ReportFolderError, match=r"(?s)cannot be read: Permission denied.*chmod go\+rX"
        ):
            nb.report(run.folder, "/dev/null")


@root_only
def test_another_user_can_read_a_shared_run_and_never_hold_its_lock(run: RunPaths) -> None:
    run.folder.chmod(0o755)
    with another_user():
        assert _look(run.folder)[-1].type == "ended"
        assert not run.owned()
        with pytest.raises(PermissionError):
            run.lock.open()
    lock = lock_run(run)
    assert lock is not None
    with another_user():
        assert run.owned()  # it is in charge, and nobody can say so without holding its lock
    lock.release()
