"""Which run a launch resumes: its settings, its number of ranks, and other users of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import functions
import pytest
from kernels import SECONDS, finish, ranks_up, script, until
from launches import begin, inline, notes, quiet
from machines import cpu_machine, plan_on
from records import first_of, owner_pid

import nbtoolkit as nb
from nbtoolkit.environment.plan import BatchTooLarge
from nbtoolkit.errors import LaunchError, ResumeError
from nbtoolkit.run.checkpoints.checkpoint_store import has_checkpoint
from nbtoolkit.run.events import RECORD, RunStarted, RunSubmitted
from nbtoolkit.run.identity import Identity
from nbtoolkit.run.paths import RunPaths, runs_in
from nbtoolkit.run.resume import (
    begin_attempt,
    choose_run,
    lock_run,
    new_run,
    refuse_other_function,
    why_not_resumed,
    write_first_event,
)


def cut_off(train: Any, config: nb.Config, processes: int = 2) -> RunPaths:
    """A run that saved a checkpoint before its supervisor was killed."""
    handle = begin(train, config, processes)
    ranks_up(handle.paths.folder, processes)
    os.kill(owner_pid(handle.paths.folder), signal.SIGKILL)
    with pytest.raises(LaunchError, match="died"):
        handle.result(timeout=SECONDS)
    return handle.paths


# --- a run of an earlier build ---


def made_by_an_earlier_build(folder: Path) -> None:
    events = folder / "events.jsonl"
    events.write_text(events.read_text().replace(f'"record": {RECORD}', '"record": 0'))


REFUSED = (
    r"an earlier build of nbtoolkit made .*; this one cannot resume it\n"
    r".*nb\.attach and nb\.report show it, nb\.load_model.*\n.*resume='never'"
)


def test_a_run_of_an_earlier_build_is_shown_and_not_resumed(config: nb.Config) -> None:
    first = inline(functions.reports, config)
    made_by_an_earlier_build(first.paths.folder)
    again = nb.attach(first.paths.folder, display="off").result()
    assert (again.status, again.metrics) == (first.status, first.metrics)
    with pytest.raises(ResumeError, match=REFUSED):
        nb.launch(functions.reports, config, resume=first.paths.folder, display="off")
    new = inline(functions.reports, config, resume="auto")
    assert new.paths.folder != first.paths.folder


def saves_and_fails(factor: float) -> Any:
    def train(config: nb.Config, ctx: nb.RunContext) -> None:
        ctx.save({"factor": factor})
        raise RuntimeError("after the checkpoint")

    return train


def fails_at_once(config: nb.Config, ctx: nb.RunContext) -> None:
    raise RuntimeError("before a checkpoint")


def left_by(train: Any, config: nb.Config) -> RunPaths:
    """A run of one process that has failed after its checkpoint."""
    with pytest.raises(RuntimeError, match="after the checkpoint"):
        inline(train, config, processes=1, resume="auto")
    return max(runs_in(config.runtime.output_dir), key=lambda paths: paths.run_id)


SAVES = saves_and_fails(1.0)


@pytest.mark.parametrize(
    ("before", "now", "changes", "taken"),
    [
        pytest.param(SAVES, SAVES, {}, True, id="the same"),
        pytest.param(SAVES, SAVES, {"train.num_workers": 3}, True, id="other workers"),
        pytest.param(SAVES, SAVES, {"optim.lr": 0.5}, False, id="another rate"),
        pytest.param(SAVES, functions.reports, {}, False, id="another function"),
        pytest.param(functions.reports, functions.reports, {}, False, id="complete"),
        pytest.param(fails_at_once, fails_at_once, {}, False, id="no checkpoint"),
    ],
)
def test_which_run_auto_resumes(
    config: nb.Config, before: Any, now: Any, changes: dict[str, Any], taken: bool
) -> None:
    with contextlib.suppress(RuntimeError):
        inline(before, config)
    [left] = runs_in(config.runtime.output_dir)
    with choose_run(config.with_overrides(changes), now, None, "auto") as run:
        assert (run.paths == left, run.attempt) == (taken, 1 + taken)


def test_auto_passes_over_an_unfinished_run_of_an_earlier_build(config: nb.Config) -> None:
    left = left_by(SAVES, config)
    made_by_an_earlier_build(left.folder)
    with choose_run(config, SAVES, None, "auto") as run:
        assert run.paths != left


def test_a_look_at_the_lock_that_takes_long_does_not_hide_a_run(tmp_path: Path) -> None:
    """As on a busy machine: a display asked whether the run has an owner, and was interrupted."""
    paths = new_run(tmp_path, "looked-at").paths
    looking = os.open(paths.lock, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.3, os.close, [looking]).start()
    lock = lock_run(paths)
    assert lock is not None
    assert lock_run(paths) is None
    lock.release()


def test_behind_a_run_that_is_alive_an_older_one_is_resumed(config: nb.Config) -> None:
    older = left_by(SAVES, config)
    newer = older.folder.with_name("29991231T000000-train-0001")
    shutil.copytree(older.folder, newer)
    alive = lock_run(RunPaths(newer))
    assert alive is not None
    with choose_run(config, SAVES, None, "auto") as run:
        assert run.paths == older
    alive.release()


@pytest.mark.parametrize(
    ("first", "attempt"),
    [
        pytest.param(RunStarted(attempt=2), 3, id="started"),
        pytest.param(RunSubmitted(attempt=2), 2, id="submitted"),  # its job begins it
    ],
)
def test_the_number_of_an_attempt(config: nb.Config, first: RunSubmitted, attempt: int) -> None:
    with new_run(config.runtime.output_dir, "train") as run:
        write_first_event(run.paths, config, first)
        identity = Identity.of({}, functions.ranks)
        assert begin_attempt(run.paths, run.lock, identity).attempt == attempt


def test_a_request_to_stop_the_attempt_before_is_forgotten(config: nb.Config) -> None:
    left = left_by(SAVES, config)
    left.stop.write_text("{}")
    with choose_run(config, SAVES, None, "auto") as run:
        assert run.resumed
        assert not left.stop.exists()


@pytest.mark.parametrize(("processes", "known"), [(2, (BatchTooLarge(16),)), (1, ())])
def test_a_limit_of_memory_is_known_to_as_many_ranks_only(
    tmp_path: Path, processes: int, known: tuple[BatchTooLarge, ...]
) -> None:
    before = replace(plan_on(cpu_machine(), distributed__world_size=2), too_large=16)
    with new_run(tmp_path, "run") as new:
        run = replace(new, attempt=2, plan_before=before.to_dict())
        assert run.learned(plan_on(cpu_machine(), distributed__world_size=processes)) == known


def test_a_function_of_a_notebook_may_go_on_in_a_script(tmp_path: Path) -> None:
    in_notebook = RunStarted(function="__main__.ranks")
    refuse_other_function(RunPaths(tmp_path), in_notebook, functions.ranks)
    with pytest.raises(
        ResumeError, match=r"another function: __main__.ranks, not functions.reports"
    ):
        refuse_other_function(RunPaths(tmp_path), in_notebook, functions.reports)


def test_a_search_with_a_damaged_record_is_named(tmp_path: Path) -> None:
    with new_run(tmp_path, "sweep") as run:
        (run.paths.folder / "study.jsonl").touch()
        run.paths.events.touch()
    [told] = why_not_resumed(tmp_path, "sweep", Identity.of({}, functions.ranks))
    assert told.startswith(f"not resumed, because the record is damaged: {run.paths.run_id};")


def test_a_run_of_other_code_is_named_with_the_functions_that_differ(config: nb.Config) -> None:
    first = left_by(SAVES, config)
    assert left_by(SAVES, config) == first
    time.sleep(1.0)  # a run's id has whole seconds
    second = left_by(saves_and_fails(2.0), config)
    assert second != first
    [warning] = notes(nb.attach(second.folder))
    assert warning.startswith(
        f"starts anew, because the code differs from that of the unfinished run {first.run_id}: "
        "saves_and_fails.<locals>.train; "
    )


@pytest.mark.parametrize("damage", ["empty", "missing", "cut", "fifo", "folder"])
def test_a_run_with_checkpoints_and_a_damaged_record_is_named(
    config: nb.Config, damage: str
) -> None:
    first = left_by(SAVES, config)
    first.events.unlink()
    if damage in ("empty", "cut"):
        first.events.write_text({"empty": "", "cut": '{"type": "run", "t": 1.0, "run_'}[damage])
    elif damage == "fifo":
        os.mkfifo(first.events)
    elif damage == "folder":
        first.events.mkdir()
    time.sleep(1.0)
    second = left_by(SAVES, config)
    assert second != first
    assert notes(nb.attach(second.folder)) == [
        f"not resumed, because the record is damaged: {first.run_id}; nb.load_model reads "
        "checkpoints"
    ]


def test_the_lines_before_a_new_attempt_may_be_cut(config: nb.Config) -> None:
    first = left_by(SAVES, config)
    with first.events.open("a") as events:
        events.write('{"type": "report", "t": 1.0, "val')
    assert left_by(SAVES, config) == first
    assert first_of(first.folder).attempt == 2


def test_folds_of_an_earlier_build_are_not_resumed(config: nb.Config) -> None:
    folds = nb.make_folds([0, 1] * 4, k=2)
    first = nb.cross_validate(functions.reports, config, folds, display="off")
    made_by_an_earlier_build(first.paths.folder)
    with pytest.raises(ResumeError, match=REFUSED):
        nb.cross_validate(
            functions.reports, config, folds, display="off", resume=first.paths.folder
        )


# --- another number of ranks ----------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), [("sweep", "sweep"), ("cv", "cross-validation")])
def test_a_search_is_no_run_to_resume(config: nb.Config, kind: str, name: str) -> None:
    with new_run(config.runtime.output_dir, "train") as run:
        write_first_event(run.paths, config, RunStarted(record=RECORD, search=kind))
        with pytest.raises(ResumeError, match=f"is a {name}, not a run\n"):
            choose_run(config, functions.ranks, None, run.paths.folder)


@pytest.mark.parametrize(("before", "now"), [(2, 2), (2, 1), (1, 2)])
def test_auto_goes_on_with_any_number_of_ranks_and_says_so(
    config: nb.Config, capsys: pytest.CaptureFixture[str], before: int, now: int
) -> None:
    paths = cut_off(functions.saves_then_waits, config, before)
    handle = begin(functions.saves_then_waits, config, now, resume="auto", display="text")
    result = finish(handle)
    assert result.paths == paths
    assert result.values == [{"epoch": 3}] * now
    said = capsys.readouterr().out
    assert f"resuming the unfinished run {paths.run_id} (attempt 2" in said
    made = "1 process" if before == 1 else "2 processes"
    assert (f"(attempt 2; {made} before, {now} now; " in said) == (before != now)
    attempts = [event.attempt for event in handle.events() if event.type == "run"]
    assert attempts == [1, 2]


def test_a_named_run_refuses_what_decides_its_result_and_goes_on_with_other_changes(
    config: nb.Config,
) -> None:
    train = functions.saves_then_waits
    run = cut_off(train, config).folder
    other_function = r"another function: functions.saves_then_waits, not functions.reports\n"
    for resume, function, changes, message in (
        (run, train, {"optim.lr": 0.5}, r"optim.lr: 0.001 then, 0.5 now"),
        (run, train, {"train.epochs": 9}, r"train.epochs: 10 then, 9 now"),
        (run.name, functions.reports, {}, other_function),
        ("of-another-life", train, {}, "there is no run of-another-life"),
    ):
        with pytest.raises(ResumeError, match=message):
            quiet(function, config.with_overrides(changes), resume=resume)
    changes = {
        "train.num_workers": 2,
        "train.gradient_accumulation_steps": 4,
        "distributed.bucket_cap_mb": 5.0,
    }
    resumed = quiet(train, config.with_overrides(changes), 1, resume=run.name)
    assert resumed.paths.folder == run
    with pytest.raises(ResumeError, match="is complete"):
        quiet(train, config, resume=run)
    longer = config.with_overrides({"train.epochs": 11})
    assert quiet(train, longer, resume=run).value == {"epoch": 3}


def test_a_step_that_grows_with_the_ranks_keeps_their_number(config: nb.Config) -> None:
    mine = config.with_overrides({"train.batch_size_per_device": 16})
    paths = left_by(SAVES, mine)
    with pytest.raises(ResumeError, match=r"distributed.world_size: 1 then, 2 now"):
        quiet(SAVES, mine, 2, resume=paths.folder)


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({"distributed.world_size": 2}, True),
        ({"distributed.find_unused_parameters": True}, True),
        ({"train.gradient_accumulation_steps": 2}, True),
        ({"train.num_workers": 3}, True),
        ({"runtime.time_budget": 60, "checkpoint.keep_last": 5}, True),
        ({"tracking.log_every_n_steps": 5}, True),
        ({"distributed.sync_batchnorm": True}, False),
        ({"checkpoint.mode": "max"}, False),
        ({"checkpoint.monitor": "f1"}, False),
        ({"checkpoint.weights": "last"}, False),
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
    prints = [Identity.of(each.to_dict(), functions.reports) for each in (config, other)]
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
