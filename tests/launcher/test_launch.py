"""nb.launch with real processes, end to end: results, captured values, resume."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import functions
import pytest
from kernels import SECONDS, ranks_up, run_folder, script, until
from launches import begin, quiet
from records import owner_pid

import nbtoolkit as nb
from nbtoolkit.errors import CannotPickle, LaunchError, PlanError, ResumeError

# --- what comes back ---


def test_result_of_two_ranks(config: nb.Config) -> None:
    """With its events as they are heard, and its metrics in the database of MLflow."""
    began = time.monotonic()
    heard: list[Any] = []
    tracked = config.with_overrides({"tracking.mlflow": True})
    result = quiet(functions.reports, tracked, name="my run", on_event=heard.append)
    assert result.value == {"accuracy": 0.75, "seed": 0.0}
    assert result.values == [result.value, result.value]
    assert result.metrics == {"accuracy": 0.75, "seed": 0.0}
    assert result.status == "completed"
    assert (result.plan.processes, result.plan.backend) == (2, "gloo")
    assert result.paths.folder.parent == Path(config.runtime.output_dir)
    assert "-my_run-" in result.paths.run_id
    assert 0 < result.seconds < time.monotonic() - began
    assert result.checkpoint == result.paths.checkpoints / "last.pt"
    assert "completed" in repr(result)
    assert "0.75" in result._repr_html_()

    kinds = [event.type for event in heard]
    assert (kinds[0], kinds[-1]) == ("run", "ended")
    assert [e.values["loss"] for e in heard if e.type == "metrics"] == [1.0, 0.5, 1 / 3]
    # what it returned comes without a step
    assert [e.step for e in heard if e.type == "report"] == [0, 1, 2, None]
    assert kinds.count("checkpoint") == 1

    database = Path(config.runtime.output_dir) / "mlflow.db"
    with contextlib.closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("select key, step, value from metrics order by step").fetchall()
        runs = connection.execute("select name, status from runs").fetchall()
    accuracies = [("accuracy", step, 0.25 * (step + 1)) for step in range(3)]
    assert [row for row in rows if row[0] == "accuracy"] == accuracies
    assert runs == [(result.paths.run_id, "FINISHED")]


def test_one_then_two_then_one_process_each_as_planned(config: nb.Config) -> None:
    """The argument ``processes`` counts more than the configuration."""
    for processes, precision, said in [(1, "fp32", "no"), (2, "bf16", "bf16"), (1, "fp32", "no")]:
        mine = config.with_overrides({"train.precision": precision, "distributed.world_size": 2})
        result = quiet(functions.precision_and_sum, mine, processes)
        assert result.plan.processes == processes
        for value in result.values:
            assert value == {
                "precision": said,
                "processes": processes,
                "sum": sum(range(1, processes + 1)),
                "threads": result.plan.threads_per_rank,
                "device": "cpu",
            }


# --- handles ---


def waiting(config: nb.Config, tmp_path: Path) -> tuple[nb.Config, Path]:
    """A configuration for functions.waits_for_file, and the file."""
    return config.with_overrides({"model.go": str(tmp_path / "go")}), tmp_path / "go"


def test_two_handles_of_a_run_are_asked_now_and_then(config: nb.Config, tmp_path: Path) -> None:
    mine, go = waiting(config, tmp_path)
    first = begin(functions.waits_for_file, mine)
    ranks_up(first.paths.folder)
    second = nb.attach(first.paths.folder)
    for handle in (first, second):
        assert not handle.done()
        with pytest.raises(TimeoutError, match="it continues"):
            handle.result(timeout=0.1)
    go.write_text("now")
    for handle in (first, second):
        assert handle.result(timeout=SECONDS).value == "now"
        assert handle.done()
    assert first.result().values == ["now", "now"]  # as often as one likes
    assert [event.type for event in first.events()][-1] == "ended"
    assert nb.attach(first.paths.folder).result().value == "now"  # long ended


def test_stop_lets_all_ranks_leave_at_their_next_report(config: nb.Config) -> None:
    handle = begin(functions.reports_until_stopped, config)
    ranks_up(handle.paths.folder)
    until(lambda: any(e.type == "report" for e in handle.events()), "a report")
    handle.stop("enough")
    result = handle.result(timeout=SECONDS)
    assert (result.status, result.value, result.values) == ("stopped", None, [])
    assert result.metrics["time"] > 0
    assert [e.reason for e in handle.events() if e.type == "stop"] == ["enough"]


def test_stop_with_a_grace_ends_ranks_that_never_report(config: nb.Config) -> None:
    handle = begin(functions.sleeps, config)
    ranks_up(handle.paths.folder)
    handle.stop(grace=0.1)
    assert handle.result(timeout=SECONDS).status == "stopped"


def test_an_interrupt_while_the_display_opens_stops_the_run(
    config: nb.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = begin(functions.reports_until_stopped, config)
    monkeypatch.setattr(handle._cell, "open", lambda **_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        handle.result(timeout=SECONDS)
    assert [e.reason for e in handle.events() if e.type == "stop"] == ["interrupted"]


def test_a_run_nobody_listens_to_goes_on(config: nb.Config) -> None:
    """Neither a dropped handle nor thousands of unread messages end or stop a run."""
    folder = begin(functions.logs_much, config.with_overrides({"model.steps": 3000})).paths.folder
    handle = nb.attach(folder)
    assert handle.result(timeout=SECONDS).value == 3000


def test_attach_from_another_process_and_stop(config: nb.Config, tmp_path: Path) -> None:
    handle = begin(functions.reports_until_stopped, config)
    ranks_up(handle.paths.folder)
    code = f"""
    handle = nb.attach({str(handle.paths.folder)!r})
    print(handle.done())
    handle.stop("from far away")
    print(handle.result(timeout={SECONDS}).status)
    """
    with script(code, tmp_path) as other:
        lines = other.output().splitlines()
    assert (lines[0], lines[-1]) == ("False", "stopped")
    assert handle.result(timeout=SECONDS).status == "stopped"


def test_several_launches_at_once(config: nb.Config) -> None:
    """Three from threads beside three that are not waited for, none in the way of another."""
    runs: dict[int, nb.RunResult] = {}

    def one(seed: int) -> None:
        runs[seed] = quiet(functions.reports, config.with_overrides({"seed": seed}))

    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    handles = {s: begin(functions.reports, config.with_overrides({"seed": s})) for s in (3, 4, 5)}
    for thread in threads:
        thread.join(SECONDS)
    runs |= {seed: handle.result(timeout=SECONDS) for seed, handle in handles.items()}
    assert {seed: run.value["seed"] for seed, run in runs.items()} == {n: n for n in range(6)}
    assert len({run.paths.folder for run in runs.values()}) == 6


# --- output ---


def test_lines_are_whole_and_tagged_and_every_rank_has_its_file(
    config: nb.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    result = quiet(functions.prints, config, display="text")
    said = capsys.readouterr().out.splitlines()
    assert "plan: 2 processes on the CPU" in said[0]
    assert [line for line in said if line.startswith("[rank 0] line")] == [
        f"[rank 0] line {n} of rank 0 end" for n in range(200)
    ]
    assert "[rank 0] straight to the descriptor" in said
    assert not [line for line in said if "of rank 1" in line]
    mine = [f"line {n} of rank 1 end" for n in range(200)]
    assert result.paths.log(1).read_text().splitlines()[:200] == mine


def test_ten_megabytes_of_prints_neither_hang_nor_flood(
    config: nb.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    result = quiet(functions.floods, config, display="text")
    said = capsys.readouterr().out
    assert len(said) < 300_000
    assert "more lines of rank 0 are in" in said.splitlines()[-2]  # the last: how it ended
    log = result.paths.log(0)
    assert log.stat().st_size > 10_000_000
    assert log.read_text().endswith("the last line\n")


def test_bars_and_display_do_not_vanish(
    config: nb.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet(functions.draws_bars_and_displays, config, 1, display="text")
    said = capsys.readouterr().out
    for bar in ("auto bar", "notebook bar", "range bar"):
        assert f"{bar}: 100%" in said
    for shown in ("{'shown': 'by import'}", "{'shown': 'as in a cell'}", "HTML object"):
        assert shown in said


# --- what crosses the border ---


def test_cwd_path_and_environment_are_carried_over(
    config: nb.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    monkeypatch.setenv("MY_SETTING", "later than the fork server")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("MASTER_PORT", "1")
    found = quiet(functions.surroundings, config, 1).value
    assert found["cwd"] == str(tmp_path)
    assert found["path"] == sys.path
    assert found["environ"]["MY_SETTING"] == "later than the fork server"
    assert "SLURM_JOB_ID" not in found["environ"]
    assert found["environ"].get("MASTER_PORT") != "1"


def test_captured_arrays_and_tensors_are_mapped_and_private(config: nb.Config) -> None:
    import numpy as np
    import torch
    from torch.utils.data import TensorDataset

    array = np.arange(100_000.0)
    fortran = np.asfortranarray(np.arange(60_000).reshape(300, 200))
    part = np.arange(60_000).reshape(300, 200)[:, ::2]
    days = np.arange(10_000).astype("datetime64[D]")
    tensor = torch.arange(100_000.0)
    view = tensor[10:20]  # shares memory with tensor
    data = TensorDataset(tensor.reshape(-1, 2))

    def train(config: Any, ctx: Any) -> dict[str, Any]:
        def mapped(address: int) -> bool:
            for line in Path("/proc/self/maps").read_text().splitlines():
                start, end = (int(x, 16) for x in line.split()[0].split("-"))
                if start <= address < end:
                    return "memfd:nbtoolkit" in line
            return False

        before = float(array[5]), float(tensor[15])
        array[5] = tensor[15] = 100 + ctx.rank
        return {
            "mapped": [
                mapped(array.ctypes.data),
                mapped(part.ctypes.data),
                mapped(days.ctypes.data),
                mapped(tensor.data_ptr()),
                mapped(data[0][0].data_ptr()),
            ],
            "before": before,
            "after": (float(array[5]), float(tensor[15]), float(view[5]), float(data[7][0][1])),
            "fortran": (fortran.flags.f_contiguous, int(fortran[299, 199]), int(fortran.sum())),
            "sums": (int(part.sum()), int(days.astype(int).sum())),
        }

    result = quiet(train, config)
    for rank, value in enumerate(result.values):
        assert value["mapped"] == [True] * 5
        assert value["before"] == (5.0, 15.0)  # the other rank's write is not seen
        # tensors that share memory here share it there
        assert value["after"] == (100.0 + rank,) * 4
        assert value["fortran"] == (True, 59_999, int(fortran.sum()))
        assert value["sums"] == (int(part.sum()), int(days.astype(int).sum()))
    assert (array[5], tensor[15].item()) == (5.0, 15.0)


def test_tensors_come_back_detached_and_whole(config: nb.Config) -> None:
    def train(config: Any, ctx: Any) -> Any:
        import torch

        weight = torch.nn.Parameter(torch.ones(3))
        return {"loss": (weight * 2).sum(), "weight": weight, "none": None}

    value = quiet(train, config, 1).value
    assert float(value["loss"]) == 6.0
    assert not value["loss"].requires_grad
    assert value["weight"].requires_grad


def test_what_cannot_be_pickled_is_named(config: nb.Config) -> None:
    cell: dict[str, Any] = {"__name__": "__main__"}
    source = """
    import threading
    guard = threading.Lock()
    class Model:
        def __init__(self): self.lock = guard
    model = Model()
    def helper(): return guard
    def direct(config, ctx): return guard
    def through_attribute(config, ctx): return model
    def through_helper(config, ctx): return helper()
    def by_default(config, ctx, lock=guard): return lock
    """
    exec(textwrap.dedent(source), cell)
    for name, match in {
        "direct": r"global `guard` \(a _thread.lock\), captured by direct\(\)",
        "through_attribute": r"global `model` \(a __main__.Model\), through its attribute `lock`",
        "through_helper": r"global `helper` \(a function\), through its global `guard`",
        "by_default": r"default value `argument 0`",
    }.items():
        with pytest.raises(CannotPickle, match=match):
            quiet(cell[name], config)
    assert not list(Path(config.runtime.output_dir).iterdir())  # a launch that did not start


def test_an_edited_module_takes_effect(
    config: nb.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "edited_between_launches.py"
    module.write_text("def train(config, ctx):\n    return 'first'\n")
    import edited_between_launches  # type: ignore[import-not-found]

    assert quiet(edited_between_launches.train, config, 1).value == "first"
    module.write_text("def train(config, ctx):\n    return 'second, and longer'\n")
    assert quiet(edited_between_launches.train, config, 1).value == "second, and longer"
    del sys.modules["edited_between_launches"]


# --- the context ---


def test_context_in_a_rank(config: nb.Config, capsys: pytest.CaptureFixture[str]) -> None:
    def train(config: Any, ctx: Any) -> dict[str, Any]:
        ctx.print("only once")
        path = ctx.save({"step": 1, "weights": {"w": [1.0]}}, kind="best", step=1)
        with ctx.pause_hang_detection("thinking"):
            state = ctx.load("best")
        return {
            "main": ctx.is_main,
            "local": ctx.local_rank,
            "device": str(ctx.device),
            "seed": ctx.seed,
            "free": (ctx.params, ctx.fold, ctx.deadline),
            "plan": ctx.plan.processes,
            "saved": (path.name, state, ctx.load("never saved")),
            "rank": ctx.rank,
            "pid": os.getpid(),
        }

    result = quiet(train, config.with_overrides({"seed": 7}), display="text")
    pids = {value.pop("pid") for value in result.values}
    assert len({*pids, os.getpid()}) == 3  # processes of their own
    for rank, value in enumerate(result.values):
        assert value == {
            "rank": rank,
            "main": rank == 0,
            "local": rank,
            "device": "cpu",
            "seed": 7,
            "free": ({}, None, None),
            "plan": 2,
            "saved": ("best.pt", {"step": 1, "weights": {"w": [1.0]}}, None),
        }
    assert capsys.readouterr().out.count("only once") == 1
    assert result.paths.log(1).read_text() == ""


def test_leave_is_not_swallowed_and_ends_all_ranks_with_its_status(config: nb.Config) -> None:
    def train(config: Any, ctx: Any) -> None:
        try:
            ctx.report({"a": 1.5})
            raise nb.RunStopped("pruned")
        except Exception:
            raise AssertionError("RunStopped was taken for an Exception") from None

    result = quiet(train, config)
    assert (result.status, result.value, result.metrics) == ("pruned", None, {"a": 1.5})


def test_cached_builds_once_for_all_ranks(config: nb.Config, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    mine = config.with_overrides({"model.marks": str(marks)})
    for _ in range(2):  # the second launch finds it built
        assert quiet(functions.caches, mine).values == [(0.0, True), (1.0, True)]


def test_prepare_divides_the_global_batch(config: nb.Config) -> None:
    one, two = (quiet(functions.prepares, config, n) for n in (1, 2))
    assert one.value["sizes"] == [8, 8]
    assert [value["sizes"] for value in two.values] == [[4, 4], [4, 4]]
    assert two.value["gradient"] == pytest.approx(one.value["gradient"], rel=1e-5)
    with pytest.raises(PlanError, match="a batch has 7 samples, which 2 ranks cannot"):
        quiet(functions.prepares, config.with_overrides({"model.batch": 7}), 2)


# --- going on with a run ---


@pytest.mark.parametrize("by_name", [False, True], ids=["auto", "named"])
def test_a_run_that_left_early_is_gone_on_with(config: nb.Config, by_name: bool) -> None:
    train = functions.saves_then_leaves
    first = quiet(train, config.with_overrides({"runtime.time_budget": 0.3}))
    assert first.status == "deadline"
    second = quiet(train, config, resume=first.paths.folder if by_name else "auto")
    assert (second.status, second.value) == ("completed", "went on")
    assert second.paths.folder == first.paths.folder


def test_auto_never_takes_an_owned_run(config: nb.Config, tmp_path: Path) -> None:
    mine, go = waiting(config, tmp_path)
    first = begin(functions.saves_then_waits_for_file, mine)
    ranks_up(first.paths.folder)
    second = begin(functions.saves_then_waits_for_file, mine, resume="auto")
    assert second.paths.folder != first.paths.folder
    with pytest.raises(ResumeError, match=r"is still running, owned by process \d+"):
        quiet(functions.saves_then_waits_for_file, mine, resume=first.paths.folder)
    go.write_text("both")
    assert [handle.result(timeout=SECONDS).value for handle in (first, second)] == ["both", "both"]


def test_two_launches_race_for_one_unfinished_run_without_mixing(
    config: nb.Config, tmp_path: Path
) -> None:
    mine, go = waiting(config, tmp_path)
    first = begin(functions.saves_then_waits_for_file, mine)
    ranks_up(first.paths.folder)
    os.kill(owner_pid(first.paths.folder), signal.SIGKILL)
    with pytest.raises(LaunchError, match="died"):
        first.result(timeout=SECONDS)
    go.write_text("raced")
    results: list[nb.RunResult] = []

    def race() -> None:
        results.append(quiet(functions.saves_then_waits_for_file, mine, resume="auto"))

    threads = [threading.Thread(target=race) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert [result.value for result in results] == ["raced"] * 3
    folders = [result.paths.folder for result in results]
    # a launch that comes after the first one has ended finds the run complete
    assert folders.count(first.paths.folder) == 1
    assert len(set(folders)) == 3


CELL = """
import nbtoolkit as nb

def rate():
    return {rate}

def train(config, ctx):
    first = (ctx.load() or {{}}).get("epoch", 0)
    ctx.save({{"epoch": first + 1}})
    if first == 0:
        raise RuntimeError("the first attempt fails")
    return [first, rate()]
"""


def defined(rate: int) -> Any:
    """``train`` of a cell that calls a function of another cell."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(CELL.format(rate=rate), names)
    return names["train"]


def test_changed_code_that_train_calls_resumes_by_name_only_and_says_so(
    config: nb.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="the first attempt fails") as caught:
        quiet(defined(1), config, resume="auto")
    del caught
    folder = run_folder(Path(config.runtime.output_dir))
    with pytest.raises(RuntimeError, match="the first attempt fails"):
        quiet(defined(2), config, resume="auto", display="text")
    said = capsys.readouterr().out
    assert f"differs from that of the unfinished run {folder.name}: rate; " in said
    assert f"resume='{folder.name}' resumes it with the code as it is now" in said
    resumed = quiet(defined(3), config, resume=folder.name, display="text")
    assert resumed.value == [1, 3]
    told = f"warning: the code has changed since the last attempt of {folder.name}: rate; "
    assert told in capsys.readouterr().out
    again = config.with_overrides({"train.epochs": config.train.epochs + 1})
    assert quiet(defined(3), again, resume=folder.name, display="text").value == [2, 3]
    assert "has changed" not in capsys.readouterr().out


def test_a_late_rank_does_not_load_what_is_being_saved(config: nb.Config) -> None:
    assert quiet(functions.loads_late, config).values == [False, False]


def test_a_launch_that_does_not_start_leaves_the_named_run_as_it_was(config: nb.Config) -> None:
    cell: dict[str, Any] = {"__name__": "__main__", "captured": 1}
    exec("def train(config, ctx):\n    return str(captured)", cell)
    first = quiet(cell["train"], config)
    before = first.paths.events.read_bytes()
    cell["captured"] = threading.Lock()
    longer = config.with_overrides({"train.epochs": config.train.epochs + 1})
    with pytest.raises(CannotPickle, match="the global `captured`"):
        quiet(cell["train"], longer, resume=first.paths.folder)
    assert first.paths.events.read_bytes() == before
    again = nb.attach(first.paths.folder).result(timeout=SECONDS)
    assert (again.status, again.value) == ("completed", "1")
    cell["captured"] = 2
    assert quiet(cell["train"], longer, resume=first.paths.folder).value == "2"
