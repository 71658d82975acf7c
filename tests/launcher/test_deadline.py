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
from machines import DAY, machine_of_age
from records import owner_pid

import nbtoolkit as nb
from nbtoolkit.environment.deadline import TimeLimit, session_age, time_limit
from nbtoolkit.errors import ConfigError, ReportError
from nbtoolkit.run.events import EventLog, EventReader, NoteAdded
from nbtoolkit.run.messages import Answer, Go, StopCheck, StopPending
from nbtoolkit.run.signals import ENDING
from nbtoolkit.run.transport import Connection
from nbtoolkit.worker.channel import SupervisorChannel


@pytest.fixture
def config(tmp_path: Path) -> nb.Config:
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path / "out")}
    return nb.load_config(env=None, overrides=settings)


def begin(train: Any, config: nb.Config, processes: int = 2, **options: Any) -> nb.RunHandle:
    """A launch that is not waited for."""
    options = {"display": "off", "resume": "never", "wait": False, **options}
    return nb.launch(train, config, processes=processes, **options)


def told(handle: nb.RunHandle) -> list[str]:
    """The types of a run's events, without those of its ranks' starts."""
    return [event.type for event in handle.events() if event.type not in ("rank", "device")]


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
    assert told(handle) == ["run", "stop", "checkpoint", "note", "ended"]
    notes = [event.text for event in handle.events() if event.type == "note"]
    assert notes == ["saved before leaving: stopped"]  # once: rank 0 alone speaks


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


def test_a_check_on_one_rank_only_is_told_with_its_line(config: nb.Config) -> None:
    def train(config: Any, ctx: Any) -> None:
        if ctx.is_main:
            ctx.raise_if_stopped()

    with pytest.raises(
        ReportError, match=r"ctx.raise_if_stopped at .*test_deadline.py:\d+ .* on rank 0 only"
    ):
        begin(train, config).result(timeout=SECONDS)


def test_a_check_meets_no_report(config: nb.Config) -> None:
    def train(config: Any, ctx: Any) -> None:
        ctx.raise_if_stopped() if ctx.is_main else ctx.report({"a": 1.0})

    with pytest.raises(ReportError, match=r"rank 0: check at .*; rank 1: report at"):
        begin(train, config).result(timeout=SECONDS)


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
    options: dict[str, Any] = {"start": "inline", "on_event": lambda e: heard.append(e.type)}
    result = nb.launch(train, config, display="off", resume="never", **options)
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


def test_without_a_session_limit_the_budget_counts_alone(tmp_path: Path) -> None:
    assert limit_of(tmp_path) == TimeLimit(None)
    assert limit_of(tmp_path, time_budget="2h") == TimeLimit(NOON + 7200)


def test_the_session_s_limit_less_the_reserve_ends_a_run(tmp_path: Path) -> None:
    limit = limit_of(machine_of_age(tmp_path, 12_000), session_limit="12h", time_budget="11h")
    assert limit.deadline == pytest.approx(NOON + 12 * 3600 - 900 - 12_000, abs=0.02)
    assert limit.imposed
    assert limit.notes == (
        (
            "info",
            "the session is 3 h 20 min old: the run must end by 20:25 UTC, in 8 h 25 min "
            "(runtime.session_limit 12 h minus a margin of 15 min)",
        ),
    )


def test_a_budget_that_ends_before_the_session_says_so(tmp_path: Path) -> None:
    limit = limit_of(machine_of_age(tmp_path, 12_000), session_limit="12h", time_budget="90m")
    assert limit.deadline == NOON + 5400
    assert not limit.imposed
    text = (
        "the run must end by 13:30 UTC, in 1 h 30 min "
        "(runtime.time_budget; the session has more time)"
    )
    assert limit.notes == (("info", text),)


def test_a_session_that_has_outlived_its_limit_has_another_one(tmp_path: Path) -> None:
    """A Jupyter server that is up for weeks, with the settings of another host."""
    limit = limit_of(machine_of_age(tmp_path, 20 * DAY), session_limit="12h", time_budget=60)
    assert limit.deadline == NOON + 60
    [(level, text)] = limit.notes
    assert level == "warning"
    assert "the session is 20 d old, so its limit of 12 h is not this machine's" in text


def test_an_age_that_cannot_be_told_is_told(tmp_path: Path) -> None:
    limit = limit_of(tmp_path, session_limit="12h")
    assert limit.deadline is None
    assert "the session's age cannot be read from /proc" in limit.notes[0][1]


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


def test_inside_the_reserve_a_run_ends_at_its_first_report(tmp_path: Path) -> None:
    limit = limit_of(machine_of_age(tmp_path, 11.9 * 3600), session_limit="12h")
    assert limit.deadline == pytest.approx(NOON - 540, abs=0.02)
    [(level, text)] = limit.notes
    assert level == "warning"
    assert text.startswith("the session is 11 h 54 min old, and its time for runs is used up")


def test_a_reserve_that_leaves_no_time_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"shutdown_margin \(1200 s\) leaves no time of session_limit"
    ):
        nb.load_config(
            env=None, overrides=["runtime.session_limit=20m", "runtime.shutdown_margin=20m"]
        )


@pytest.mark.parametrize("start", ["forkserver", "inline"])
def test_a_launch_says_which_limit_counts_and_keeps_it(config: nb.Config, start: Any) -> None:
    age = session_age()
    assert age is not None
    # A second after now; the hour in reserve is for a launch that begins late.
    mine = config.with_overrides(
        {"runtime.session_limit": age + 3601.0, "runtime.shutdown_margin": 3600.0}
    )
    options: dict[str, Any] = {"processes": 1, "start": start, "resume": "never", "display": "off"}
    result = nb.launch(functions.reports_until_stopped, mine, **options)
    assert result.status == "deadline"
    [note] = [e for e in nb.attach(result.paths.folder).events() if e.type == "note"]
    assert note.text.startswith("the session is ")


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, "deadline"),
        (signal.SIGUSR1, "deadline"),
        (signal.SIGUSR2, "deadline"),
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
    assert told(handle)[-3:] == ["stop", "checkpoint", "ended"]
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


@pytest.mark.parametrize(
    "number",
    ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.long)],
)
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


def inline(train: Any, config: nb.Config) -> nb.RunResult:
    return nb.launch(train, config, start="inline", resume="never", display="off")


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


# --- the diary ------------------------------------------------------------------------------------


def test_threads_write_whole_events(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")

    def write(name: str) -> None:
        for _ in range(200):
            log.write(NoteAdded(level=name, text=name * 500))

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    log.close()
    events = list(EventReader(tmp_path / "events.jsonl").read())
    assert len(events) == 600
    assert all(event.text == event.level * 500 for event in events)


def test_a_closed_diary_takes_nothing_more(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.close()
    with (tmp_path / "another").open("wb"), pytest.raises(OSError, match="Bad file descriptor"):
        log.write(NoteAdded(text="late"))
    assert (tmp_path / "another").read_bytes() == b""
