"""What was told as saved is on the disk: after a crash of the machine the next launch finds it.

A preloaded fsync copies what is flushed (tests/support/synced.c) while real processes train. The
crash is the folder that these copies make: a file that was never flushed is empty, and a name that
was never flushed is gone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kernels import SECONDS, until

import nbtoolkit as nb
from nbtoolkit.run.attempts import first_event, run_config
from nbtoolkit.run.checkpoints.checkpoint_store import CheckpointStore
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.resume import choose_run

SUPPORT = Path(__file__).parents[1] / "support"

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="NOT TESTED: gcc is not installed"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("library") / "synced.so"
    source = SUPPORT / "synced.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


@contextmanager
def session(code: str, home: Path, library: Path) -> Iterator[subprocess.Popen[str]]:
    """A script that runs while its flushes are recorded in ``synced``."""
    (home / "synced").mkdir()
    (home / "script.py").write_text(f"import nbtoolkit as nb\nimport functions\n{code}")
    path = os.pathsep.join([str(SUPPORT), *filter(None, sys.path)])
    preloaded = {"LD_PRELOAD": str(library), "SYNCED": str(home / "synced"), "PYTHONPATH": path}
    process = subprocess.Popen(
        [sys.executable, "script.py"], cwd=home, env={**os.environ, **preloaded}, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def after_crash(home: Path) -> Path:
    """The output folder with what was flushed so far."""
    synced, target = home / "synced", home / "after"
    listed = {listing: listing.read_text().splitlines() for listing in synced.glob("d*")}
    [top] = [listing for listing, lines in listed.items() if lines[0] == str(home)]
    shutil.rmtree(target, ignore_errors=True)
    _rebuild(synced, top.name[1:], target)
    return target / "out"


def _rebuild(synced: Path, key: str, target: Path) -> None:
    listing, content = synced / f"d{key}", synced / f"f{key}"
    if not listing.exists():
        target.write_bytes(content.read_bytes() if content.exists() else b"")
        return
    target.mkdir()
    for line in listing.read_text().splitlines()[1:]:
        inner, _, name = line.partition(" ")
        _rebuild(synced, inner, target / name)


SAVES = """
config = {"tracking.mlflow": False, "runtime.output_dir": "out", "model.go": "go"}
nb.launch(functions.saves_then_waits_for_file, config, processes=2, display="off")
"""


def test_a_checkpoint_that_was_told_is_found(tmp_path: Path, library: Path) -> None:
    with session(SAVES, tmp_path, library):
        events = until(lambda: list(tmp_path.glob("out/*/events.jsonl")), "the run")
        until(lambda: '"type": "checkpoint"' in events[0].read_text(), "a checkpoint", SECONDS)
        until(lambda: (events[0].parent / "checkpoints/last.pt").exists(), "its file")
        out = after_crash(tmp_path)
    [folder] = out.iterdir()
    paths = RunPaths(folder)
    first = first_event(paths)
    assert first is not None
    settings = run_config(paths).with_overrides({"runtime.output_dir": str(out)})
    from functions import saves_then_waits_for_file

    with choose_run(settings, saves_then_waits_for_file, None, "auto") as run:
        assert run.paths == paths
        assert run.attempt == 2


STORES = """
import torch
from pathlib import Path
from nbtoolkit.run.checkpoints.checkpoint_store import CheckpointStore

parts = {"model": {"weight": torch.ones(3)}, "training": {"epoch": 1}}
CheckpointStore(Path("out")).put("step", 10, parts, {})
"""


def test_a_checkpoint_of_fit_is_whole(tmp_path: Path, library: Path) -> None:
    with session(STORES, tmp_path, library) as process:
        assert process.wait(SECONDS) == 0
        entry, damages = CheckpointStore(after_crash(tmp_path)).good("step")
    assert damages == []
    assert entry is not None
    assert entry.read("model")["weight"].tolist() == [1.0] * 3


COMPLETES = """
config = {"tracking.mlflow": False, "runtime.output_dir": "out"}
result = nb.launch(functions.ranks, config, processes=2, display="off")
folds = nb.make_folds([0, 1] * 4, k=2)
nb.cross_validate(functions.reports, config, folds, display="off")
"""


def test_the_values_of_a_completed_run_and_of_folds_are_kept(tmp_path: Path, library: Path) -> None:
    with session(COMPLETES, tmp_path, library) as process:
        assert process.wait(SECONDS) == 0
        out = after_crash(tmp_path)
    run, search = sorted(out.iterdir())
    result = nb.attach(run, display="off").result()
    assert (result.status, len(result.values)) == ("completed", 2)
    assert None not in result.values
    cv = nb.attach(search, display="off").result()
    assert cv.status == "completed"
    assert len(cv.scores["accuracy"]) == 2


TRIAL_SAVES = """
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.record import RunRecord

record = RunRecord(RunPaths.create("out", "trial"), deadline=None, durable=False)
record.saved("checkpoints/last.pt", 1, "last")
"""


def test_a_trial_is_found_once_it_has_told_of_a_checkpoint(tmp_path: Path, library: Path) -> None:
    """Most trials have none, and are not flushed before."""
    with session(TRIAL_SAVES, tmp_path, library) as process:
        assert process.wait(SECONDS) == 0
        [folder] = after_crash(tmp_path).iterdir()
    assert '"type": "checkpoint"' in (folder / "events.jsonl").read_text()
