"""Deadlines and stop requests: a run is notified in mid-epoch, saves, and ends in time."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import functions
import pytest
from kernels import (
    SECONDS,
    alive,
    all_gone,
    catches,
    descendants,
    ranks_up,
    run_folder,
    script,
    until,
)
from launches import begin, inline, notes, quiet, types
from machines import DAY, machine_of_age
from records import owner_pid

import nbtoolkit as nb
from nbtoolkit.environment.deadline import TimeLimit, session_age, time_limit
from nbtoolkit.errors import ConfigError, ReportError
from nbtoolkit.wire.messages import Answer, Go, StopCheck, StopPending
from nbtoolkit.wire.signals import ENDING
from nbtoolkit.wire.transport import Connection
from nbtoolkit.worker.channel import SupervisorChannel

# --- the question in mid-epoch --------------------------------------------------------------------


def steps_until_news(config: Any, ctx: Any) -> None:
    """An endless epoch; every step sends rank 0's stop request to all ranks."""
    import torch
    import torch.distributed as dist

    functions.says_it_is_up(ctx)
    while True:
        news = torch.tensor([ctx.stop_requested()], dtype=torch.int)
        if ctx.world_size > 1:
            dist.all_reduce(news)
        if news.item():
            status = ctx.should_stop()
            ctx.note_saved(ctx.paths.checkpoints / "last.pt", 7, "last")
            ctx.message(f"saved before leaving: {status}")
            raise nb.RunStopped(status)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_before_the_start_is_heard_in_the_function(
    config: nb.Config, processes: int
) -> None:
    handle = begin(steps_until_news, config, processes)
    handle.stop("early")
    assert handle.result(timeout=SECONDS).status == "stopped"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_is_heard_inside_an_epoch_and_all_ranks_save_and_leave(
    config: nb.Config, processes: int
) -> None:
    handle = begin(steps_until_news, config, processes)
    ranks_up(handle.paths.folder, processes)
    handle.stop("enough")
    result = handle.result(timeout=SECONDS)
    assert (result.status, result.value) == ("stopped", None)
    assert result.checkpoint == result.paths.checkpoints / "last.pt"
    assert types(handle) == ["run", "stop", "checkpoint", "note", "ended"]
    assert notes(handle) == ["saved before leaving: stopped"]  # once: rank 0 alone speaks


def test_a_deadline_is_news_without_anybody_saying_so(config: nb.Config) -> None:
    mine = config.with_overrides({"runtime.time_budget": 0.5})
    assert begin(steps_until_news, mine).result(timeout=SECONDS).status == "deadline"


def test_a_deadline_nearer_than_the_time_to_save_ends_the_run(config: nb.Config) -> None:
    def train(config: Any, ctx: Any) -> None:
        ctx.raise_if_stopped()
        ctx.raise_if_stopped(reserve=1800.0)
        (Path(ctx.paths.folder) / f"went on {ctx.rank}").touch()
        ctx.raise_if_stopped(reserve=7200.0)
        raise AssertionError("went on")

    handle = begin(train, config.with_overrides({"runtime.time_budget": "1h"}))
    assert handle.result(timeout=SECONDS).status == "deadline"
    assert len(list(handle.paths.folder.glob("went on *"))) == 2
    [stop] = [event for event in handle.events() if event.type == "stop"]
    assert stop.reason.startswith("the run's time is used up, except 3")


def checks_on_one_rank(config: Any, ctx: Any) -> None:
    if ctx.is_main:
        ctx.raise_if_stopped()


def checks_while_another_reports(config: Any, ctx: Any) -> None:
    ctx.raise_if_stopped() if ctx.is_main else ctx.report({"a": 1.0})


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            checks_on_one_rank,
            r"ctx.raise_if_stopped at .*test_deadline.py:\d+ .* on rank 0 only",
        ),
        (checks_while_another_reports, "rank 0: check at .*; rank 1: report at"),
    ],
)
def test_a_check_is_a_call_of_all_ranks(config: nb.Config, train: Any, message: str) -> None:
    with pytest.raises(ReportError, match=message):
        quiet(train, config)


def test_inline_hears_of_a_stop_too(config: nb.Config) -> None:
    def train(config: Any, ctx: Any) -> None:
        assert not ctx.stop_requested()
        ctx.raise_if_stopped()
        threading.Thread(target=nb.attach(ctx.paths.folder).stop).start()
        while not ctx.stop_requested():
            pass
        assert ctx.should_stop() == "stopped"
        saver = threading.Thread(target=ctx.note_saved, args=("here.pt", 1, "last"))
        saver.start()
        saver.join()
        ctx.message("careful", level="warning")
        ctx.raise_if_stopped()

    heard: list[str] = []
    result = inline(train, config, on_event=lambda event: heard.append(event.type))
    assert (result.status, result.checkpoint) == ("stopped", Path("here.pt"))
    assert heard == ["run", "stop", "checkpoint", "note", "ended"]


# --- the limits -----------------------------------------------------------------------------------

NOON = 1_700_000_000.0 - 1_700_000_000.0 % DAY + DAY / 2


def limit_of(root: Path, *, environ: dict[str, str] | None = None, **runtime: Any) -> TimeLimit:
    overrides = {"runtime": {"shutdown_margin": "15m", **runtime}}
    config = nb.load_config(env=None, overrides=overrides)
    return time_limit(config, root=root, now=NOON, environ=environ or {})


def test_the_age_of_a_session_is_its_first_process_s(tmp_path: Path) -> None:
    assert session_age(machine_of_age(tmp_path, 4321.0)) == pytest.approx(4321.0, abs=0.02)
    assert session_age(tmp_path / "no proc") is None
    assert session_age(machine_of_age(tmp_path, -10.0)) is None  # clocks that do not fit together
    (tmp_path / "proc/1/stat").write_text("1 (init) S 0")
    assert session_age(tmp_path) is None


def test_this_machine_has_an_age() -> None:
    assert 0 < (session_age() or 0) < time.clock_gettime(time.CLOCK_BOOTTIME) + 1


HOURS = 3600.0
# The age of a session, the settings, when a run must end (from now on), who says so, and its note.
LIMITS = {
    "no limit": (100, {}, None, False, ""),
    "a budget": (100, {"time_budget": "2h"}, 7200, False, ""),
    "the session": (
        12_000,
        {"session_limit": "12h", "time_budget": "11h"},
        12 * HOURS - 900 - 12_000,
        True,
        "info: the session is 3 h 20 min old: the run must end by 20:25 UTC, in 8 h 25 min "
        "(runtime.session_limit 12 h minus a margin of 15 min)",
    ),
    "a budget in the session": (
        12_000,
        {"session_limit": "12h", "time_budget": "90m"},
        5400,
        False,
        "info: the run must end by 13:30 UTC, in 1 h 30 min "
        "(runtime.time_budget; the session has more time)",
    ),
    "outlived": (  # a Jupyter server that is up for weeks, with the settings of another host
        20 * DAY,
        {"session_limit": "12h", "time_budget": 60},
        60,
        False,
        "warning: runtime.session_limit is ignored: the session is 20 d old, so its limit of 12 h "
        "is not this machine's",
    ),
    "inside the reserve": (  # a run ends at its first report
        11.9 * HOURS,
        {"session_limit": "12h"},
        -540,
        True,
        "warning: the session is 11 h 54 min old, and its time for runs is used up",
    ),
    "an unknown age": (
        None,
        {"session_limit": "12h"},
        None,
        False,
        "the session's age cannot be read from /proc",
    ),
}


@pytest.mark.parametrize(
    ("age", "settings", "left", "imposed", "note"), LIMITS.values(), ids=LIMITS
)
def test_which_limit_ends_a_run(
    tmp_path: Path,
    age: float | None,
    settings: dict[str, Any],
    left: float | None,
    imposed: bool,
    note: str,
) -> None:
    root = tmp_path if age is None else machine_of_age(tmp_path, age)
    limit = limit_of(root, **settings)
    assert limit.deadline == (None if left is None else pytest.approx(NOON + left, abs=0.02))
    assert limit.imposed == imposed
    told = [f"{level}: {text}" for level, text in limit.notes]
    assert len(told) == bool(note)
    assert note in "".join(told)


@pytest.mark.parametrize(
    ("end", "settings", "deadline"),
    [
        (NOON + 7200, {}, NOON + 7200 - 900),
        (NOON + 7200, {"time_budget": "1h"}, NOON + 3600),  # the earlier one counts
        (NOON - 5, {}, None),  # an earlier job's
        (NOON + 7200, {"session_limit": "12h"}, NOON + 12 * 3600 - 900 - 100),  # the user's own
    ],
)
def test_slurm_says_when_its_job_ends(
    tmp_path: Path, end: float, settings: dict[str, Any], deadline: float | None
) -> None:
    environ = {"SLURM_JOB_END_TIME": f"{end:.0f}"}
    limit = limit_of(machine_of_age(tmp_path, 100), environ=environ, **settings)
    assert limit.deadline == (None if deadline is None else pytest.approx(deadline, abs=0.1))
    if not settings and deadline:
        assert "Slurm ends this job: the run must end by" in limit.notes[0][1]


def test_a_reserve_that_leaves_no_time_is_refused() -> None:
    settings = ["runtime.session_limit=20m", "runtime.shutdown_margin=20m"]
    with pytest.raises(ConfigError, match=r"shutdown_margin \(1200 s\) leaves no time of session"):
        nb.load_config(env=None, overrides=settings)


@pytest.mark.parametrize("start", ["forkserver", "inline"])
def test_a_launch_says_which_limit_counts_and_keeps_it(config: nb.Config, start: Any) -> None:
    age = session_age()
    assert age is not None
    # A second after now; the hour in reserve is for a launch that begins late.
    mine = config.with_overrides(
        {"runtime.session_limit": age + 3601.0, "runtime.shutdown_margin": 3600.0}
    )
    result = quiet(functions.reports_until_stopped, mine, 1, start=start)
    assert result.status == "deadline"
    [note] = notes(result)
    assert note.startswith("the session is ")


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, "deadline"),  # a pre-emption, or a shutdown of the machine
        pytest.param(signal.SIGUSR1, "deadline", marks=pytest.mark.long),
        pytest.param(signal.SIGUSR2, "deadline", marks=pytest.mark.long),
        (signal.SIGHUP, "deadline"),
        (signal.SIGINT, "stopped"),
    ],
)
def test_a_signal_to_the_owner_ends_the_run_with_all_saved(
    config: nb.Config, number: signal.Signals, status: str
) -> None:
    handle = begin(steps_until_news, config)
    ranks_up(handle.paths.folder)
    os.kill(owner_pid(handle.paths.folder), number)
    result = handle.result(timeout=SECONDS)
    assert (result.status, result.checkpoint) == (status, result.paths.checkpoints / "last.pt")
    [stop] = [event for event in handle.events() if event.type == "stop"]
    assert number.name in stop.reason or status == "stopped"


def fits_slowly(config: Any, ctx: Any) -> dict[str, float]:
    """One epoch of 800 steps, which takes for ever until there is a file ``go``."""
    import torch

    def step(model: Any, batch: Any) -> Any:
        if not Path(config.model.go).exists():
            time.sleep(0.3)
        return model(batch[0]), batch[1]

    torch.manual_seed(0)
    data = torch.randn(3200, 2), torch.ones(3200, 1)
    functions.says_it_is_up(ctx)
    loss = torch.nn.functional.mse_loss
    return nb.fit(ctx, config, torch.nn.Linear(2, 1), data, None, loss=loss, step=step)


@pytest.mark.long
def test_fit_saves_inside_an_epoch_and_goes_on_there_on_another_number_of_ranks(
    config: nb.Config, tmp_path: Path
) -> None:
    settings = {"model.go": str(tmp_path / "go"), "train.batch_size": 4, "train.epochs": 1}
    mine = config.with_overrides({**settings, "optim.name": "sgd"})
    handle = begin(fits_slowly, mine)
    ranks_up(handle.paths.folder)
    os.kill(owner_pid(handle.paths.folder), signal.SIGTERM)
    assert handle.result(timeout=SECONDS).status == "deadline"
    assert types(handle)[-3:] == ["stop", "checkpoint", "ended"]
    [saved] = [event for event in handle.events() if event.type == "checkpoint"]
    assert 0 < saved.step < 800

    (tmp_path / "go").touch()
    gone_on = begin(fits_slowly, mine, 1, resume="auto").result(timeout=SECONDS)
    whole = begin(fits_slowly, mine, 1).result(timeout=SECONDS)
    assert (gone_on.paths, gone_on.status) == (handle.paths, "completed")
    assert gone_on.value == pytest.approx(whole.value, rel=1e-4)


LAUNCHES = """
import signal
result = nb.launch(
    functions.reports_until_stopped, {"runtime.output_dir": "out", "tracking.mlflow": False},
    processes=2, resume="never", display="off",
)
print(result.status, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
"""


@pytest.mark.parametrize("number", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.long)])
def test_a_signal_to_a_script_ends_its_run_with_all_saved(tmp_path: Path, number: str) -> None:
    with script(LAUNCHES, tmp_path) as kernel:
        ranks_up(run_folder(tmp_path / "out"))
        until(lambda: catches(kernel.pid, getattr(signal, number)), "the wait for the run")
        os.kill(kernel.pid, getattr(signal, number))
        assert kernel.output().split() == ["deadline", "True"]


NEVER_REPORTS = """
result = nb.launch(
    functions.sleeps, {{"runtime.output_dir": "out", "tracking.mlflow": False}},
    start="{start}", resume="never", display="off",
)
print(result.status)
"""


@pytest.mark.parametrize("start", ["forkserver", "inline"])
def test_a_second_sigterm_ends_a_run_whose_function_never_reports(
    tmp_path: Path, start: str
) -> None:
    with script(NEVER_REPORTS.format(start=start), tmp_path) as kernel:
        folder = run_folder(tmp_path / "out")
        ranks = ranks_up(folder, 1)
        until(lambda: catches(kernel.pid, signal.SIGTERM), "the wait for the run")
        os.kill(kernel.pid, signal.SIGTERM)
        time.sleep(2.0)
        assert any(map(alive, ranks))  # the first one waits for a report
        os.kill(kernel.pid, signal.SIGTERM)
        assert kernel.output().split() == ["deadline"]
    all_gone(ranks)
    [stop] = [event for event in nb.attach(folder).events() if event.type == "stop"]
    assert "SIGTERM" in stop.reason


def test_a_second_sigterm_to_the_owner_ends_a_run_whose_function_never_reports(
    config: nb.Config,
) -> None:
    handle = begin(functions.sleeps, config)
    ranks_up(handle.paths.folder)
    owner = owner_pid(handle.paths.folder)
    os.kill(owner, signal.SIGTERM)
    until(lambda: [e for e in handle.events() if e.type == "stop"], "the first request")
    time.sleep(1.5)
    assert not handle.done()
    os.kill(owner, signal.SIGTERM)
    assert handle.result(timeout=SECONDS).status == "deadline"


def test_a_scheduler_s_warning_to_every_process_of_a_job_ends_its_run(tmp_path: Path) -> None:
    with script(LAUNCHES, tmp_path) as kernel:
        ranks_up(run_folder(tmp_path / "out"))
        until(lambda: catches(kernel.pid, signal.SIGUSR1), "the wait for the run")
        for pid in (kernel.pid, *descendants(kernel.pid)):
            os.kill(pid, signal.SIGUSR1)
        assert kernel.output().split() == ["deadline", "True"]


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_to_a_process_that_trains_itself(config: nb.Config, number: int) -> None:
    def train(config: Any, ctx: Any) -> None:
        os.kill(os.getpid(), number)
        assert ctx.stop_requested()
        ctx.report({"a": 1.0})

    assert signal.getsignal(number) is signal.SIG_DFL
    assert inline(train, config).status == "deadline"
    assert signal.getsignal(number) is signal.SIG_DFL


def test_handlers_of_others_are_left_alone(config: nb.Config) -> None:
    heard: list[int] = []

    def train(config: Any, ctx: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        ctx.report({"a": 1.0})
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        assert inline(train, config).status == "completed"
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    assert heard == [signal.SIGUSR1]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # Python 3.12, of any fork
def test_a_child_of_a_heeding_process_is_ended_by_a_signal_as_ever(config: nb.Config) -> None:
    """Pools and DataLoaders end their workers so."""

    def train(config: Any, ctx: Any) -> int | None:
        here, there = os.pipe()

        def work() -> None:
            os.write(there, b"up")
            time.sleep(300)

        worker = get_context("fork").Process(target=work)
        worker.start()
        os.read(here, 2)
        worker.terminate()
        worker.join(SECONDS)
        worker.kill()
        worker.join()
        os.close(here)
        os.close(there)
        return worker.exitcode

    assert inline(train, config).value == -signal.SIGTERM


# --- the line -------------------------------------------------------------------------------------


CHECK = StopCheck(reserve=0.0, where="train.py:1")


@pytest.fixture
def line() -> Any:
    """The supervisor's end of a connection, and a rank's channel at the other."""
    supervisor, rank = Connection.pair()
    ear, quiet = Connection.pair()
    yield supervisor, SupervisorChannel(rank, quiet, async_reports=False)
    for end in (supervisor, rank, ear, quiet):
        end.close()


def test_a_call_to_come_is_no_answer(line: tuple[Connection, SupervisorChannel]) -> None:
    supervisor, channel = line
    assert not channel.stop_pending()
    supervisor.send(StopPending())
    supervisor.send(Answer())
    assert channel.ask(CHECK) == Answer()
    assert channel.stop_pending()


def test_a_stop_that_is_announced_before_the_start_is_no_start_and_is_kept(
    line: tuple[Connection, SupervisorChannel],
) -> None:
    supervisor, channel = line
    supervisor.send(StopPending())
    supervisor.send(Go())
    assert channel.wait() == Go()
    assert channel.stop_pending()


def test_an_owner_that_is_gone_is_news(line: tuple[Connection, SupervisorChannel]) -> None:
    supervisor, channel = line
    supervisor.close()
    assert channel.stop_pending()
    assert channel.ask(CHECK) == Answer(leave="stopped")


def test_asking_for_news_waits_for_no_other_thread(
    line: tuple[Connection, SupervisorChannel],
) -> None:
    supervisor, channel = line
    other = threading.Thread(target=channel.ask, args=(CHECK,))
    other.start()
    # From here on it waits for the answer.
    assert supervisor.receive(timeout=SECONDS) == CHECK
    assert not channel.stop_pending()
    supervisor.send(Answer())
    other.join(SECONDS)
