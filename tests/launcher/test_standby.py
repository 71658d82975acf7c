"""Ranks that start in advance: which launch takes them, what they cost, and when they end."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kernels import all_gone, finish, notebook, script, until

import nbtoolkit as nb
from nbtoolkit.launcher.forkserver_client import fork_server, pids, shutdown

LARGEST = 60e6
"""Bytes that a group of two may have of its own."""


@pytest.fixture
def config(tmp_path: Path) -> Iterator[nb.Config]:
    shutdown()  # ranks that wait for another test's launches would be taken for this one's
    settings = {
        "tracking.mlflow": False,
        "runtime.output_dir": str(tmp_path / "out"),
        "runtime.standby_seconds": 600.0,
    }
    yield nb.load_config(env=None, overrides=settings)
    # The ranks of the last launch's successor start a second after its end: in the next test.
    shutdown()


def who(config: nb.Config, ctx: nb.RunContext) -> dict[str, Any]:
    """Which process runs it, and whether it has run before in this process."""
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    if ctx.world_size > 1:
        dist.all_reduce(total)
    print("rank", ctx.rank, "is here")
    ran_before = hasattr(torch, "ran_before")
    torch.ran_before = True  # type: ignore[attr-defined]
    return {
        "pid": os.getpid(),
        "sum": total.item(),
        "ran_before": ran_before,
        "folder": os.getcwd(),
        "marks": (os.environ["NBTOOLKIT_RANK"], os.environ.get("MARK")),
    }


def started(config: nb.Config, processes: int = 2) -> nb.RunHandle:
    return nb.launch(who, config, processes=processes, resume="never", display="off", wait=False)


def launched(config: nb.Config, processes: int = 2) -> list[dict[str, Any]]:
    values = finish(started(config, processes)).values
    assert [value["sum"] for value in values] == [processes] * processes
    assert not any(value["ran_before"] for value in values)
    return list(values)


def members() -> set[int]:
    """Agent and ranks that wait; others are in the process group of the fork server."""
    server = fork_server().pid
    return {pid for pid in pids() if psutil.pid_exists(pid) and os.getpgid(pid) != server}


def waiting(ranks: int = 2) -> set[int]:
    """Wait until ``ranks`` ranks wait, in their group; return their pids."""

    def joined() -> set[int]:
        group = members()
        if ranks > 1:  # a single rank is its own agent, which leads the process group
            group -= {os.getpgid(pid) for pid in group}
        # It is removed when all have joined.
        folders = [name for name in os.listdir(tempfile.gettempdir()) if "nbtoolkit-" in name]
        return group if len(group) == ranks and not folders else set()

    # The server first imports again what earlier tests of this worker have imported.
    try:
        ready: set[int] = until(joined, f"{ranks} ranks that wait", 240)
    except AssertionError as error:
        names = {pid: psutil.Process(pid).cmdline()[-1][-60:] for pid in pids()}
        raise AssertionError(f"{error}: {names}, {os.listdir(tempfile.gettempdir())}") from None
    return ready


def pids_of(values: list[dict[str, Any]]) -> set[int]:
    return {value["pid"] for value in values}


def test_the_next_launch_takes_the_ranks_that_wait(config: nb.Config) -> None:
    first = launched(config)
    ready = waiting()
    own = sum(psutil.Process(pid).memory_full_info().uss for pid in pids() - {fork_server().pid})
    assert own < LARGEST, f"{own / 1e6:.0f} MB"
    handle = started(config)
    second = finish(handle).values
    assert pids_of(second) == ready
    assert not pids_of(first) & ready
    folder = handle.paths.folder
    assert [value["marks"][0] for value in second] == [str(folder)] * 2
    assert [value["folder"] for value in second] == [os.getcwd()] * 2
    assert handle.paths.log(1).read_text() == "rank 1 is here\n"
    assert handle.paths.agent_log.is_file()
    third = waiting()
    assert not third & ready, "each group runs one function"
    shutdown()
    all_gone(third, 30)


def test_the_request_of_a_supervisor_that_has_just_ended_is_read(tmp_path: Path) -> None:
    """On a busy machine the fork server may see the end first, and the ranks never started."""
    code = """
        import os, socket
        from nbtoolkit.launcher.forkserver import ForkServer
        from nbtoolkit.run import messages
        from nbtoolkit.run.transport import packet_pair, send_packet

        def ends(forkserver, message):
            file = os.open(os.devnull, os.O_RDONLY)
            given = messages.StandbyDescriptors(payload=file, spec=file)
            send_packet(forkserver, messages.StartStandby(
                shape="two", environment="", seconds=600.0, descriptors=given))

        ours, theirs = packet_pair()
        server = ForkServer(theirs)
        file = os.open(os.devnull, os.O_RDONLY)
        given = messages.SupervisorDescriptors(
            payload=file, request=file, connection=file, lock=file)
        pid = server._fork_supervisor("__main__:ends", messages.ForkSupervisor(
            main="", detached=False, shape="", descriptors=given))
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        server._reap()
        print(server._standby.request.shape)
    """
    with script(code, tmp_path) as running:
        assert running.output() == "two\n"


@pytest.mark.long
def test_a_rank_that_is_killed_while_it_waits(config: nb.Config) -> None:
    launched(config)
    for pause in (0.0, 1.0):  # before its supervisor knows, and after
        killed = waiting()
        os.kill(min(killed), signal.SIGKILL)
        time.sleep(pause)
        assert not pids_of(launched(config)) & killed


@pytest.mark.long
@pytest.mark.parametrize("change", ["variable", "folder", "ranks", "timeout"])
def test_a_launch_that_they_do_not_fit(
    change: str, config: nb.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(config)
    ready = waiting()
    if change == "variable":
        monkeypatch.setenv("MARK", "new")
    elif change == "folder":
        monkeypatch.chdir(tmp_path)
    elif change == "timeout":
        config = config.with_overrides({"distributed.timeout": 600.0})
    values = launched(config, 4 if change == "ranks" else 2)
    assert not pids_of(values) & ready
    assert {value["marks"][1] for value in values} == {os.environ.get("MARK")}
    assert {value["folder"] for value in values} == {os.getcwd()}
    all_gone(ready, 30)


@pytest.mark.long
def test_two_launches_at_once(config: nb.Config) -> None:
    launched(config)
    ready = waiting()
    handles = [started(config), started(config)]
    taken = [pids_of(finish(handle).values) for handle in handles]
    assert ready in taken
    assert not taken[0] & taken[1]


@pytest.mark.long
def test_a_single_rank_waits_too(config: nb.Config) -> None:
    launched(config, 1)
    ready = waiting(1)
    assert pids_of(launched(config, 1)) == ready


@pytest.mark.long
def test_they_end_before_a_search(config: nb.Config) -> None:
    launched(config)
    ready = waiting()
    space = {"space": {"optim.lr": {"type": "float", "low": 1e-4, "high": 1e-1}}}
    study = nb.sweep(who_slowly, config, space, n_trials=1, display="off", wait=False)
    all_gone(ready, 30)
    assert not study.done()
    study.result()


def who_slowly(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    time.sleep(3.0)
    return {"val_loss": 1.0}


@pytest.mark.long
def test_they_wait_for_a_limited_time_or_not_at_all(config: nb.Config) -> None:
    launched(config.with_overrides({"runtime.standby_seconds": 3.0}))
    all_gone(waiting(), 30)
    launched(config.with_overrides({"runtime.standby_seconds": 0}))
    time.sleep(2.5)
    assert not members()


@pytest.mark.long
def test_they_start_after_a_run_that_ended_well_only(config: nb.Config) -> None:
    with pytest.raises(ValueError, match="it fails"):
        nb.launch(fails, config, processes=2, resume="never", display="off")
    time.sleep(2.5)
    assert not members()


def fails(config: nb.Config, ctx: nb.RunContext) -> None:
    raise ValueError("it fails")


def dies(config: nb.Config, ctx: nb.RunContext) -> None:
    if ctx.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.long
def test_what_their_agent_prints_is_in_the_folder_of_the_run(config: nb.Config) -> None:
    launched(config)
    ready = waiting()
    with pytest.raises(nb.errors.WorkerDied):
        nb.launch(dies, config, processes=2, resume="never", display="off")
    run = max(Path(config.runtime.output_dir).iterdir())
    assert (run / "ranks/launcher.txt").read_text().count("exitcode: -9") == 1
    all_gone(ready, 30)


CODE = """
import os, time

settings = {"tracking.mlflow": False, "runtime.output_dir": "out"}
settings["runtime.standby_seconds"] = 600.0
config = nb.load_config(env=None, overrides=settings)

def train(config, ctx):
    return os.getpid()

def go():
    return nb.launch(train, config, processes=2, resume="never", display="off").values

from nbtoolkit.launcher.forkserver_client import pids
go()
while True:
    try:
        for _ in range(600):
            print(*pids(), flush=True)
            time.sleep(0.1)
    except KeyboardInterrupt:
        print("interrupted", *go(), flush=True)
"""


def words_of(kernel: Any, count: int, first: str = "") -> list[str]:
    """The words of the kernel's next line that has so many, and this first one."""
    for line in kernel.process.stdout:
        words: list[str] = line.split()
        if len(words) >= count and words[0].startswith(first):
            return words
    raise AssertionError(kernel.process.stderr.read())


def line_with(kernel: Any, count: int) -> set[int]:
    """The pids of the kernel's next line of so many."""
    return {int(word) for word in words_of(kernel, count) if word.isdigit()}


@pytest.mark.long
def test_they_end_with_the_kernel(tmp_path: Path) -> None:
    with script(CODE, tmp_path) as kernel:
        ready = line_with(kernel, 5)
        kernel.kill()
        all_gone(ready, 30)


@pytest.mark.long
def test_an_interrupt_of_the_kernel_does_not_reach_them(tmp_path: Path) -> None:
    with script(CODE, tmp_path) as kernel:
        line_with(kernel, 2)  # the supervisor has started; its ranks start now
        kernel.interrupt()
        words = words_of(kernel, 3, "interrupted")
        assert len(words) == 3, "a rank each"
        ready = line_with(kernel, 5)
        kernel.interrupt()
        words = words_of(kernel, 3, "interrupted")
        assert {int(word) for word in words[1:]} < ready
        kernel.kill()
        all_gone(ready, 30)


CELL = """
import os
import nbtoolkit as nb

def launched(**more):
    settings = {"tracking.mlflow": False, "runtime.output_dir": "out", **more}
    config = nb.load_config(env=None, overrides=settings)
    options = {"processes": 2, "resume": "never", "display": "off"}
    values = nb.launch(lambda config, ctx: os.getpid(), config, **options).values
    return sorted(values)
"""


@pytest.mark.long
def test_a_kernels_ranks_wait_unless_it_is_switched_off(tmp_path: Path) -> None:
    with notebook(tmp_path) as kernel:
        kernel.run(CELL).ok()
        kernel.run("launched()").ok()
        # fork server, supervisor, agent and two ranks
        ready: set[int] = until(lambda: at_least(kernel.warm(), 5), "ranks that wait")
        taken = kernel.run("print(*launched())").ok().text.split()
        assert {int(pid) for pid in taken} < ready
        again: set[int] = until(lambda: at_least(kernel.warm(), 5), "new ranks that wait")
        assert not {int(pid) for pid in taken} & again
        off = "{'runtime.standby_seconds': 0}"
        fresh = kernel.run(f"print(*launched(**{off}))").ok().text.split()
        assert not {int(pid) for pid in fresh} & again
        time.sleep(2.5)
        assert len(kernel.warm()) == 1


def at_least(found: set[int], count: int) -> set[int]:
    return found if len(found) >= count else set()
