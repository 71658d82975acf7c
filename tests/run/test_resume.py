"""Which run a launch resumes: its settings, its number of ranks, and other users of it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import functions
import pytest
from kernels import SECONDS, finish, ranks_up, script, until

import nbtoolkit as nb
from nbtoolkit.errors import LaunchError, ResumeError
from nbtoolkit.run.checkpoints.checkpoint_store import has_checkpoint
from nbtoolkit.run.fingerprint import fingerprint
from nbtoolkit.run.paths import RunPaths, write_json
from nbtoolkit.run.resume import (
    choose_run,
    new_run,
)


@pytest.fixture
def config(tmp_path: Path) -> nb.Config:
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path / "out")}
    return nb.load_config(env=None, overrides=settings)


def begin(train: Any, config: nb.Config, processes: int = 2, **options: Any) -> nb.RunHandle:
    options = {"display": "off", "resume": "never", "wait": False, **options}
    return nb.launch(train, config, processes=processes, **options)


def cut_off(train: Any, config: nb.Config, processes: int = 2) -> RunPaths:
    """A run that saved a checkpoint before its supervisor was killed."""
    handle = begin(train, config, processes)
    ranks_up(handle.paths.folder, processes)
    os.kill(json.loads(handle.paths.owner.read_text())["pid"], signal.SIGKILL)
    with pytest.raises(LaunchError, match="died"):
        handle.result(timeout=SECONDS)
    return handle.paths


# --- a run of version 0.1 ---


def made_by_the_first_version(folder: Path) -> None:
    about = json.loads((folder / "versions.json").read_text())
    about["versions"]["nbtoolkit"] = "0.1.0"
    (folder / "versions.json").write_text(json.dumps(about))
    settings = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(settings.replace("num_workers:", "workers:"))


REFUSED = (
    r"was made by nbtoolkit 0\.1\.0; version 0\.2.* cannot resume it\n"
    r".*nb\.attach and nb\.report show it, nb\.load_model.*\n.*resume='never'"
)


def test_a_run_of_the_first_version_is_shown_and_not_resumed(config: nb.Config) -> None:
    first = nb.launch(functions.reports, config, start="inline", display="off")
    made_by_the_first_version(first.paths.folder)
    again = nb.attach(first.paths.folder, display="off").result()
    assert (again.status, again.metrics) == (first.status, first.metrics)
    with pytest.raises(ResumeError, match=REFUSED):
        nb.launch(functions.reports, config, resume=first.paths.folder, display="off")
    new = nb.launch(functions.reports, config, start="inline", resume="auto", display="off")
    assert new.paths.folder != first.paths.folder


def test_folds_of_the_first_version_are_not_resumed(config: nb.Config) -> None:
    folds = nb.make_folds([0, 1] * 4, k=2)
    first = nb.cross_validate(functions.reports, config, folds, display="off")
    made_by_the_first_version(first.paths.folder)
    with pytest.raises(ResumeError, match=REFUSED):
        nb.cross_validate(
            functions.reports, config, folds, display="off", resume=first.paths.folder
        )


# --- another number of ranks ----------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), [("sweep", "sweep"), ("cv", "cross-validation")])
def test_a_search_is_no_run_to_resume(config: nb.Config, kind: str, name: str) -> None:
    with new_run(config.runtime.output_dir, "train") as run:
        write_json(run.paths.versions, {"kind": kind, "attempt": 1})
        with pytest.raises(ResumeError, match=f"is a {name}, not a run\n"):
            choose_run(config, functions.ranks, None, run.paths.folder)


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2)])
def test_auto_goes_on_with_another_number_of_ranks_and_says_so(
    config: nb.Config, capsys: pytest.CaptureFixture[str], before: int, now: int
) -> None:
    paths = cut_off(functions.saves_then_waits, config, before)
    handle = begin(functions.saves_then_waits, config, now, resume="auto", display="text")
    result = finish(handle)
    assert result.paths == paths
    assert result.values == [{"epoch": 3}] * now
    made = "1 process" if before == 1 else "2 processes"
    assert f"(attempt 2; {made} before, {now} now; " in capsys.readouterr().out


def test_a_named_run_may_go_on_with_other_ranks_workers_and_accumulation(
    config: nb.Config,
) -> None:
    paths = cut_off(functions.saves_then_waits, config, 2)
    other = {
        "train.num_workers": 2,
        "train.gradient_accumulation_steps": 4,
        "distributed.bucket_cap_mb": 5.0,
    }
    handle = begin(functions.saves_then_waits, config.with_overrides(other), 1, resume=paths.folder)
    assert finish(handle).paths == paths


def test_a_step_that_grows_with_the_ranks_keeps_their_number(config: nb.Config) -> None:
    mine = config.with_overrides({"train.batch_size_per_device": 16})
    paths = cut_off(functions.saves_then_waits, mine, 2)
    with pytest.raises(ResumeError, match=r"distributed.world_size: 2 then, 1 now"):
        begin(functions.saves_then_waits, mine, 1, resume=paths.folder)


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({"distributed.world_size": 2}, True),
        ({"distributed.find_unused_parameters": True}, True),
        ({"train.gradient_accumulation_steps": 2}, True),
        ({"train.num_workers": 3}, True),
        (
            {"runtime.time_budget": 60, "checkpoint.keep_last": 5, "tracking.record_samples": True},
            True,
        ),
        ({"distributed.sync_batchnorm": True}, False),
        ({"distributed.compression": "fp16"}, False),
        ({"train.precision": "bf16"}, False),
        ({"train.early_stopping_patience": 3}, False),
        ({"train.epochs": 11}, False),
        ({"model.workers": 3}, False),
        ({"train.batch_size_per_device": 8}, False),
    ],
)
def test_what_makes_another_run(config: nb.Config, settings: dict[str, Any], same: bool) -> None:
    other = config.with_overrides(settings)
    prints = [fingerprint(each.to_dict(), functions.reports) for each in (config, other)]
    assert (prints[0] == prints[1]) is same


# --- what there is to go on from ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("last.pt", True),
        ("step-00000010/manifest.json", True),
        ("fit-2/step-00000010/manifest.json", True),
        ("step-00000010/model.pt", False),  # its manifest, which comes last, did not come
        ("best.pt", False),
    ],
)
def test_a_checkpoint_is_one_that_was_finished(tmp_path: Path, file: str, found: bool) -> None:
    assert not has_checkpoint(tmp_path)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    assert has_checkpoint(tmp_path) is found


def test_a_run_may_be_made_longer_but_not_shorter(config: nb.Config) -> None:
    paths = cut_off(functions.saves_then_waits, config, 1)
    shorter = config.with_overrides({"train.epochs": 9})
    with pytest.raises(ResumeError, match=r"train.epochs: 10 then, 9 now"):
        begin(functions.saves_then_waits, shorter, 1, resume=paths.folder)
    longer = config.with_overrides({"train.epochs": 11})
    assert finish(begin(functions.saves_then_waits, longer, 1, resume=paths.folder)).value


# --- two kernels at once --------------------------------------------------------------------------

KERNEL = """
config = nb.load_config("config.json", env=None)
try:
    result = nb.launch(
        functions.saves_then_waits_for_file, config, processes=1, resume={resume!r}, display="off"
    )
    print(result.paths.run_id, result.value)
except nb.errors.ResumeError as error:
    print("refused:", str(error).splitlines()[0])
"""


@contextmanager
def two_kernels(config: nb.Config, home: Path, resume: str = "") -> Iterator[Any]:
    """A run that was cut off, and two kernels that go on with it, by name where not said else."""
    mine = config.with_overrides({"model.go": str(home / "go"), "distributed.world_size": 1})
    (home / "config.json").write_text(json.dumps(mine.to_dict()))
    paths = cut_off(functions.saves_then_waits_for_file, mine, 1)
    (paths.folder / "up-0").unlink()
    code = KERNEL.format(resume=resume or str(paths.folder))
    with script(code, home) as one, script(code, home) as two:
        yield paths, one, two


@pytest.mark.long
def test_of_two_kernels_one_goes_on_and_the_other_gets_a_run_of_its_own(
    config: nb.Config, tmp_path: Path
) -> None:
    with two_kernels(config, tmp_path, "auto") as (paths, *kernels):
        until(lambda: len(list((tmp_path / "out").glob("*/up-0"))) == 2, "two runs' ranks")
        (tmp_path / "go").write_text("gone on")
        said = [kernel.output().split(maxsplit=1) for kernel in kernels]
    assert [what for _, what in said] == ["gone on\n"] * 2
    assert [run for run, _ in said].count(paths.run_id) == 1


@pytest.mark.long
def test_of_two_kernels_that_name_a_run_one_is_refused(config: nb.Config, tmp_path: Path) -> None:
    with two_kernels(config, tmp_path) as (paths, *kernels):
        ranks_up(paths.folder, 1)
        until(lambda: any(kernel.process.poll() == 0 for kernel in kernels), "the refused kernel")
        (tmp_path / "go").write_text("gone on")
        mine, refused = sorted(kernel.output() for kernel in kernels)  # a run's id is a date
    assert mine == f"{paths.run_id} gone on\n"
    assert refused.startswith(f"refused: the run {paths.run_id} is still running, ")
