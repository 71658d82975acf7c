"""Faults in real processes: the right error, soon, no process left; the next launch works."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import functions
import psutil
import pytest
from kernels import all_gone, descendants, finish, ranks_up, run_folder, script, until
from launches import begin, line_of
from mounts import in_own_mounts
from records import last_of, owner_pid

import nbtoolkit as nb
from nbtoolkit import errors
from nbtoolkit.launcher.fork_servers import fork_server, pids
from nbtoolkit.run.attempts import last_event
from nbtoolkit.run.paths import RunPaths

pytestmark = pytest.mark.chaos

SOON = functions.HANG
"""Seconds that only a hang reaches; on a quiet machine it takes one to three."""


def run(train: Any, config: nb.Config, processes: int = 2) -> nb.RunResult:
    """A launch whose end is waited for, but not for ever."""
    result: nb.RunResult = finish(begin(train, config, processes), SOON)
    return result


def works(config: nb.Config) -> bool:
    """Whether the next launch works."""
    return [value["rank"] for value in run(functions.ranks, config).values] == [0, 1]


# --- errors of the user's function ---


@pytest.mark.parametrize(
    "train",
    [functions.fails_in_all_reduce, functions.fails_in_store_wait, functions.fails_in_barrier],
)
def test_an_error_on_rank_1_while_rank_0_waits(train: Any, config: nb.Config) -> None:
    handle = begin(train, config)
    with pytest.raises(ValueError, match="wrong on rank 1") as caught:
        handle.result(timeout=SOON)
    told = "\n".join(caught.value.__notes__)
    assert f"rank 1, {functions.__file__}:{line_of(train, 'raise ValueError')};" in told
    assert str(handle.paths.log(1)) in told
    assert "wrong on rank 1" in handle.paths.log(1).read_text()
    assert last_of(handle.paths.folder).rank == 1
    assert caught.traceback[-1].name == train.__name__  # down to the user's line


@pytest.mark.parametrize(
    ("train", "kind", "attributes"),
    [
        (functions.fails_with_own_init, functions.OwnInit, {"code": 3, "extra": [1, 2]}),
        (functions.fails_with_file, FileNotFoundError, {"filename": "/no/such/file"}),
        (functions.fails_with_decode, UnicodeDecodeError, {"object": b"\xff"}),
        # A lock cannot be pickled: it is left out.
        (functions.fails_with_lock_inside, functions.OwnInit, {"code": 4, "extra": [1]}),
    ],
)
def test_an_exception_comes_back_whole(
    train: Any, kind: type[Exception], attributes: dict[str, Any], config: nb.Config
) -> None:
    with pytest.raises(kind) as caught:
        run(train, config, 1)
    assert {name: getattr(caught.value, name) for name in attributes} == attributes
    assert not hasattr(caught.value, "lock")
    if train is functions.fails_with_own_init:
        assert isinstance(caught.value.__cause__, KeyError)


def test_an_exception_that_cannot_be_rebuilt(config: nb.Config) -> None:
    with pytest.raises(errors.WorkerError, match=r"Stubborn: the text survives") as caught:
        run(functions.fails_beyond_rebuilding, config, 1)
    assert 'raise Stubborn("the text survives")' in str(caught.value)
    line = line_of(functions.fails_beyond_rebuilding, "raise Stubborn")
    assert f"functions.py:{line};" in "\n".join(caught.value.__notes__)


def test_a_value_that_cannot_be_pickled(config: nb.Config) -> None:
    with pytest.raises(errors.CannotPickle, match=r"value\['lazy'\] \(a generator\)"):
        run(functions.returns_a_generator, config)


def test_a_launch_inside_a_rank(config: nb.Config) -> None:
    with pytest.raises(errors.NestedLaunch, match=r"inside a rank of the run .*launches_inside"):
        run(functions.launches_inside, config)


# --- ranks that die ---


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("train", "what"),
    [
        (functions.exits_hard, "exit code 7 and no exception"),
        (functions.exits, r"ended itself with SystemExit\(3\)[\s\S]*return instead"),
        (functions.is_killed, r"signal SIGKILL \(killed from outside, usually .* memory ran out\)"),
        (functions.crashes, "signal SIGSEGV"),
    ],
)
def test_a_rank_dies(train: Any, what: str, processes: int, config: nb.Config) -> None:
    with pytest.raises(errors.WorkerDied, match=what) as caught:
        run(train, config, processes)
    assert f"rank {processes - 1}" in str(caught.value)
    if train is functions.crashes:
        assert f"line {line_of(train, 'string_at')} in" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "kind", "match"),
    [
        ("import os\nos._exit(5)", errors.WorkerDied, "died with exit code 5"),
        ("raise RuntimeError('at import')", RuntimeError, "at import"),
    ],
)
def test_a_module_of_the_user_breaks_at_import(
    text: str,
    kind: type[Exception],
    match: str,
    config: nb.Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the user's error, not a reason to fall back to one process."""
    module = tmp_path / "breaks_in_ranks.py"
    module.write_text("def train(config, ctx): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import breaks_in_ranks  # type: ignore[import-not-found]

    module.write_text(text + "\n" * 100)
    handle = begin(breaks_in_ranks.train, config)
    del sys.modules["breaks_in_ranks"]
    with pytest.raises(kind, match=match):
        handle.result(timeout=SOON)
    assert not [event for event in handle.events() if event.type == "note"]


BLOCKS = """
import os
if os.environ.get("RANK") == "1":
    open({fifo!r}).read()
def train(config, ctx): ...
"""


def test_a_module_of_the_user_blocks_at_import(
    config: nb.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import that waits, as for a lock or a network disk: the function is never called."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "blocks_in_ranks.py").write_text(BLOCKS.format(fifo=str(fifo)))
    monkeypatch.syspath_prepend(str(tmp_path))
    import blocks_in_ranks  # type: ignore[import-not-found]

    handle = begin(blocks_in_ranks.train, config.with_overrides({"runtime.hang_timeout": 12}))
    with pytest.raises(errors.WorkerHung, match="rank 1 did not start") as caught:
        handle.result(timeout=SOON)
    assert f'"{tmp_path}/blocks_in_ranks.py", line 4 in <module>' in str(caught.value)
    [note] = [event.text for event in handle.events() if event.type == "note"]
    assert note.startswith("rank 1 has not started after 1")
    assert str(handle.paths.stacks(1)) in note


def test_packages_of_another_python_are_not_the_users_code(home: Path, tmp_path: Path) -> None:
    """A virtual environment may add an image's packages by a .pth file, torch among them."""
    packages = tmp_path / "base/site-packages"
    packages.mkdir(parents=True)
    (packages / "theirs.py").write_text("def fail():\n    raise ValueError('no luck')\n")
    (home / "mine.py").write_text("import theirs\ndef train(config, ctx):\n    theirs.fail()\n")
    code = f"""
import sys
sys.path[:0] = ["{packages}", "{home}"]
import mine
try:
    run(mine.train)
except ValueError as error:
    print(error.__notes__)
"""
    with script(SCRIPT + code, home) as running:
        assert f", {home}/mine.py:3; log: " in running.output()


def test_helpers_of_a_killed_rank_go_with_it(config: nb.Config) -> None:
    handle = begin(functions.is_killed_with_helpers, config)
    with pytest.raises(errors.WorkerDied, match="SIGKILL"):
        handle.result(timeout=SOON)
    files = [handle.paths.folder / f"helpers-{rank}" for rank in range(2)]
    helpers = {int(pid) for file in files for pid in file.read_text().split()}
    assert len(helpers) == 4
    all_gone(helpers)
    assert works(config)


# --- ranks that wait ---


def test_a_rank_sleeps_while_another_waits(config: nb.Config) -> None:
    mine = config.with_overrides({"runtime.hang_timeout": 1})
    handle = begin(functions.sleeps_while_other_waits, mine)
    with pytest.raises(errors.WorkerHung, match="rank 1 sent nothing") as caught:
        handle.result(timeout=SOON)
    said = str(caught.value)
    first, second = said.index("--- rank 0"), said.index("--- rank 1")
    assert "in barrier" in said[first:second]
    line = line_of(functions.sleeps_while_other_waits, "time.sleep")
    assert f"line {line} in sleeps_while_other_waits" in said[second:]
    warned = [e.text for e in handle.events() if e.type == "note"]
    warned = [text for text in warned if "silent and idle" in text]
    assert len(warned) == 1
    assert "rank 1 silent and idle for 0.5 s" in warned[0]
    assert "--- rank 0" in warned[0]


def test_a_rank_sleeps_after_another_has_returned(config: nb.Config) -> None:
    mine = config.with_overrides({"runtime.hang_timeout": 1})
    handle = begin(functions.sleeps_when_other_has_returned, mine)
    with pytest.raises(errors.WorkerHung, match=r"rank 0 sent[^$]*or has returned") as caught:
        handle.result(timeout=SOON)
    line = line_of(functions.sleeps_when_other_has_returned, "time.sleep")
    assert f"line {line} in sleeps_when_other_has_returned" in str(caught.value)


def test_who_computes_or_says_so_or_is_not_waited_for_is_not_hung(config: nb.Config) -> None:
    mine = config.with_overrides({"runtime.hang_timeout": 2, "model.seconds": 4})
    trains = {
        functions.computes_while_other_waits: "computed",
        functions.sleeps_long_while_other_waits: "waited",
        functions.all_sleep: "slept",
    }
    handles = [begin(train, mine) for train in trains]
    assert [handle.result(timeout=SOON).value for handle in handles] == list(trains.values())


@pytest.mark.parametrize(
    ("train", "call", "why"),
    [
        (functions.report_and_return, "ctx.report", r"rank 1 \(which has returned\)"),
        (functions.save_and_return, "ctx.save", r"rank 1 \(which has returned\)"),
        pytest.param(
            functions.report_and_barrier,
            "ctx.report",
            "which waits in collective number",
            marks=pytest.mark.long,
        ),
        (functions.report_and_save, "ctx.report", "different calls"),
    ],
)
def test_a_call_for_all_ranks_on_one_rank(
    train: Any, call: str, why: str, config: nb.Config
) -> None:
    with pytest.raises(errors.ReportError, match=why) as caught:
        run(train, config)
    assert f"functions.py:{line_of(train, call)}" in str(caught.value)


# --- interrupts, and kernels that die ---

SCRIPT = """
config = nb.load_config("config.json", env=None)
def run(train, **options):
    return nb.launch(train, config, processes=2, resume="never", display="off", **options)
"""


@pytest.fixture
def home(config: nb.Config, tmp_path: Path) -> Path:
    """A working directory for scripts that start with SCRIPT; runs go to its folder ``out``."""
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    return tmp_path


# The grace of a first interrupt, once it is changed, is longer than the test: it ends nothing.
INTERRUPTED = f"""
import signal
import nbtoolkit.launcher.run_handle

def interrupted(train, folder):
    mine = config.with_overrides({{"runtime.output_dir": folder}})
    try:
        nb.launch(train, mine, processes=2, resume="never", display="off")
    except KeyboardInterrupt:
        print("interrupted")
    print([value["rank"] for value in run(functions.ranks).values])

def once_more(frame, event, arg):
    if event == "return" and frame.f_code is nb.RunHandle.stop.__code__:
        sys.setprofile(None)
        signal.raise_signal(signal.SIGINT)

interrupted(functions.reports_until_stopped, "once")
nb.launcher.run_handle.STOP_GRACE = {2 * SOON}
interrupted(functions.sleeps, "twice")
sys.setprofile(once_more)
interrupted(functions.sleeps, "while handed on")
"""


def test_an_interrupt_leaves_at_the_next_report_and_a_second_one_kills(home: Path) -> None:
    """The second one comes after the first is handed on; in the third run, meanwhile."""
    with script(SCRIPT + INTERRUPTED, home) as kernel:
        once = run_folder(home / "once")
        ranks = ranks_up(once)
        kernel.interrupt()
        twice = run_folder(home / "twice")
        all_gone(ranks)
        assert nb.attach(once).result().status == "stopped"

        ranks = ranks_up(twice)
        kernel.interrupt()
        told = nb.attach(twice)
        until(lambda: [e for e in told.events() if e.type == "stop"], "the first interrupt")
        kernel.interrupt()
        meanwhile = run_folder(home / "while handed on")
        all_gone(ranks)
        [stop] = [event for event in told.events() if event.type == "stop"]
        assert stop.grace == 2 * SOON
        assert told.result().status == "stopped"

        ranks = ranks_up(meanwhile)
        kernel.interrupt()
        assert kernel.output().splitlines() == 3 * ["interrupted", "[0, 1]"]
    all_gone(ranks)
    assert nb.attach(meanwhile).result().status == "stopped"


def test_killed_kernel_takes_everything_with_it(home: Path) -> None:
    with script(SCRIPT + "run(functions.sleeps_with_helpers)", home) as kernel:
        folder = run_folder(home / "out")
        ranks_up(folder)
        family = descendants(kernel.pid)
        # fork server, supervisor, agent, ranks, DataLoader workers
        assert len(family) >= 1 + 1 + 1 + 2 + 4
        kernel.kill()
        all_gone(family)
    assert last_event(RunPaths(folder)) is None  # unfinished: it can be resumed


@pytest.mark.long
def test_killed_kernel_whose_child_and_detached_run_live_on(home: Path) -> None:
    """A process that the kernel forked holds every connection to the supervisors open."""
    code = """
    mine = config.with_overrides({"runtime.output_dir": "mine"})
    handle = nb.launch(functions.sleeps, mine, processes=2, wait=False, display="off")
    apart = config.with_overrides({"model.go": "go"})
    nb.launch(functions.waits_for_file, apart, processes=2, detach=True, wait=False, display="off")
    import os, time
    child = os.fork()
    if child == 0:
        time.sleep(functions.HANG)
        os._exit(0)
    open("child.new", "w").write(str(child))
    os.rename("child.new", "child")
    time.sleep(functions.HANG)
    """
    with script(SCRIPT + textwrap.dedent(code), home) as kernel:
        ranks = ranks_up(run_folder(home / "mine"))
        detached = run_folder(home / "out")
        ranks_up(detached)
        until((home / "child").exists, "the child")
        family = descendants(kernel.pid)
        assert ranks < family
        kernel.kill()
    try:
        all_gone(ranks)
        (home / "go").write_text("after the kernel's death")
        values = nb.attach(detached).result(timeout=SOON).values
        assert values == ["after the kernel's death"] * 2
    finally:
        os.kill(int((home / "child").read_text()), signal.SIGKILL)
    all_gone(family)


def test_killed_forkserver(config: nb.Config) -> None:
    handle = begin(functions.sleeps_with_helpers, config)
    ranks_up(handle.paths.folder)
    server = fork_server().pid
    # Not the tracking service, which a test before may have started: it serves the kernel.
    family = descendants(server) - (pids() - {server})
    os.kill(server, signal.SIGKILL)
    with pytest.raises(errors.LaunchError, match="the fork server process died"):
        handle.result(timeout=SOON)
    all_gone(family)
    assert last_event(handle.paths) is None  # unfinished: it can be resumed
    assert works(config)


def test_killed_owner(config: nb.Config) -> None:
    handle = begin(functions.sleeps_with_helpers, config)
    ranks_up(handle.paths.folder)
    supervisor = owner_pid(handle.paths.folder)
    family = descendants(fork_server().pid)
    assert supervisor in family
    ranks = ranks_up(handle.paths.folder)
    os.kill(supervisor, signal.SIGKILL)
    until(handle.done, "the handle's notice, without a wait for the result")
    with pytest.raises(errors.LaunchError, match=r"the supervisor process of the run .* died"):
        handle.result(timeout=SOON)
    all_gone(ranks)
    assert works(config)


def test_an_owner_that_fails_does_not_blame_the_folder(config: nb.Config) -> None:
    handle = begin(functions.sleeps_with_helpers, config)
    ranks = ranks_up(handle.paths.folder)
    supervisor = owner_pid(handle.paths.folder)
    psutil.Process(supervisor).rlimit(psutil.RLIMIT_NOFILE, (3, 3))
    too_many = r"that owned the run .* failed .*Too many"
    with pytest.raises(errors.LaunchError, match=too_many) as told:
        handle.result(timeout=SOON)
    assert not isinstance(told.value, errors.RunFolderError)
    all_gone(ranks)
    assert works(config)


def test_a_killed_agent_takes_its_ranks_with_it(config: nb.Config) -> None:
    handle = begin(functions.sleeps_with_helpers, config)
    ranks = ranks_up(handle.paths.folder)
    agent = psutil.Process(min(ranks)).ppid()
    family = descendants(agent)
    os.kill(agent, signal.SIGKILL)
    with pytest.raises(errors.WorkerDied, match=r"rank \d died with"):
        handle.result(timeout=SOON)
    all_gone(family)


# --- kernels that were lived in ---


@pytest.mark.long
def test_a_kernel_that_was_lived_in(home: Path) -> None:
    """It made an Accelerator, then it computed in parallel.

    With OMP_NUM_THREADS=2 and one matmul, notebook_launcher in the kernel hangs for ever.
    """
    code = (
        SCRIPT
        + """
from accelerate import Accelerator
Accelerator()
print([value["processes"] for value in run(functions.precision_and_sum).values])

import torch
(torch.ones(2000, 2000) @ torch.ones(2000, 2000)).exp().sum()
print(run(functions.precision_and_sum).value)
"""
    )
    with script(code, home, OMP_NUM_THREADS="2") as kernel:
        before, after = kernel.output().splitlines()
    assert before == "[2, 2]"
    assert "'sum': 3.0" in after
    assert "'threads': 2" in after


# --- ports and networks ---


def test_a_busy_port_is_left_for_a_free_one(config: nb.Config) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        handle = begin(functions.ranks, config.with_overrides({"distributed.port": port}))
        result = handle.result(timeout=SOON)
    assert len(result.values) == 2
    told = "".join(e.text for e in handle.events() if e.type == "note")
    assert f"port {port} was busy" in told
    assert result.plan.port is None


def test_ranks_that_cannot_meet_fall_back_to_one_or_end_the_run(home: Path) -> None:
    code = """
    result = nb.launch(functions.reports, config, processes=2, display="text")
    batch = result.plan.global_batch_size, config.train.batch_size
    print(result.plan.processes, len(result.values), result.value["accuracy"], *batch)
    try:
        config = config.with_overrides({"distributed.fallback": False})
        run(functions.reports)
    except nb.errors.GroupStartFailed as error:
        print(error)
    """
    # torch reads it once in a process: a kernel of its own
    code = SCRIPT + textwrap.dedent(code)
    with script(code, home, GLOO_DEVICE_TRANSPORT="none") as kernel:
        out, err = kernel.end(SOON)
        assert kernel.process.returncode == 0, err
    assert "warning: FALLING BACK TO ONE PROCESS: 2 ranks could not form" in out
    assert "1 1 0.75 128 128" in out.splitlines()
    _, _, refused = out.rpartition("1 1 0.75 128 128")
    assert "2 ranks could not form a process group" in refused
    assert "distributed.fallback: true continues with one process" in refused


# --- folders ---


FULL_DISK = """
for train in (functions.returns_too_much, functions.fills_the_disk, functions.ranks):
    try:
        run(train)
    except nb.errors.RunFolderError as error:
        print(train.__name__, str(error).splitlines()[0])
"""


def test_a_full_disk(home: Path) -> None:
    lines = in_own_mounts(SCRIPT + FULL_DISK, home)
    assert [line.split()[0] for line in lines] == ["returns_too_much", "fills_the_disk", "ranks"]
    for line in lines:
        assert f"the run folder {home}/out" in line
        assert "No space left on device" in line


def test_an_error_that_cannot_be_written_arrives_all_the_same(config: nb.Config) -> None:
    with pytest.raises(ValueError, match="raised on rank 1"):
        run(functions.cannot_write_its_error, config)


def test_an_unwritable_folder(home: Path) -> None:
    code = """
try:
    run(functions.ranks)
except nb.errors.RunFolderError as error:
    print(error)
"""
    what, allowed, do = in_own_mounts(SCRIPT + code, home, mode="ro")
    assert what == f"the run folder {home}/out cannot be written: Read-only file system"
    assert "a disk with free space that you may write to" in allowed
    assert "set runtime.output_dir to another folder" in do


# --- again and again ---


@pytest.mark.long
def test_ten_launches_after_a_killed_forkserver_leave_no_trace(config: nb.Config) -> None:
    assert leave_no_trace(config, 10) < 4_000_000


@pytest.mark.long
def test_fifty_launches_leave_no_trace(config: nb.Config) -> None:
    assert leave_no_trace(config, 50) < 8_000_000


def leave_no_trace(config: nb.Config, launches: int) -> int:
    """Launch and look what stays: nothing; by how many bytes the memory has grown."""

    def state() -> dict[str, int]:
        kernel, server = psutil.Process(), psutil.Process(fork_server().pid)
        until(lambda: not server.children(), "the last supervisor's end")
        return {
            "kernel's descriptors": kernel.num_fds(),
            "kernel's threads": kernel.num_threads(),
            "kernel's children": len(kernel.children()),
            "forkserver's descriptors": server.num_fds(),
            "forkserver's threads": server.num_threads(),
        }

    def rests() -> bool:
        server = psutil.Process(fork_server().pid)
        used = server.cpu_times().user
        time.sleep(1)
        return server.cpu_times().user == used

    def memory() -> tuple[int, int]:
        kernel, server = psutil.Process(), psutil.Process(fork_server().pid)
        return kernel.memory_info().rss, server.memory_info().rss

    # A new fork server: one that other tests used may track, or just be importing ahead. A killed
    # one must be no worse than one that was shut down.
    pid = fork_server().pid
    os.kill(pid, signal.SIGKILL)
    all_gone({pid})
    for _ in range(5):
        run(functions.ranks, config)
    # It imports torch._dynamo (80 MB) while ranks leave it alone for 0.25 s, which those of the
    # launches above do not on a fast machine.
    run(functions.all_sleep, config.with_overrides({"model.seconds": 1}))
    until(rests, "the fork server's imports")
    before, memory_before = state(), memory()
    for _ in range(launches):
        run(functions.ranks, config)
    assert state() == before
    return max(after - base for after, base in zip(memory(), memory_before, strict=True))
