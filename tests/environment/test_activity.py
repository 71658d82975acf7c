"""The activity check waits for a slow process, and gives up one that makes no progress."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from nbtoolkit.environment.resources import Activity, wait_while_active
from nbtoolkit.errors import LaunchError
from nbtoolkit.launcher.forkserver_client import ForkServerClient
from nbtoolkit.wire.transport import Connection

SLEEPS = "import time; print('up', flush=True); time.sleep(3600)"
BURNS = "print('up', flush=True)\nwhile True: pass"
HAS_A_CHILD_THAT_BURNS = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {BURNS!r}])
"""
# A parent waits in state D, as for a disk, until the child of its vfork has ended.
WAITS_AS_FOR_A_DISK = """
import ctypes
print("up", flush=True)
libc = ctypes.PyDLL(None)
if libc.vfork() == 0:
    libc.sleep(3600)
    libc._exit(0)
"""


@contextlib.contextmanager
def python(code: str) -> Iterator[subprocess.Popen[str]]:
    """A process group that runs ``code`` and has said that it is up."""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def never(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def gives_up(process: subprocess.Popen[str], *, descendants: bool = True) -> bool:
    """Whether a wait for the process ends before its limit, since it makes no progress."""
    said: list[str] = []
    activity = Activity(process.pid, descendants=descendants)
    assert not wait_while_active(never, activity, "it", stalled=1.0, limit=1.6, say=said.append)
    return activity.idle() >= 1.0


def test_a_process_that_sleeps_is_given_up() -> None:
    with python(SLEEPS) as process:
        assert gives_up(process)


def test_a_process_that_computes_is_waited_for_until_it_is_stopped() -> None:
    with python(BURNS) as process:
        assert not gives_up(process)
        process.send_signal(signal.SIGSTOP)
        assert gives_up(process)


@pytest.mark.long
def test_what_descendants_do_counts_where_it_is_asked_for() -> None:
    with python(HAS_A_CHILD_THAT_BURNS) as process:
        assert not gives_up(process)
        assert gives_up(process, descendants=False)


def test_a_process_that_waits_for_a_disk_is_waited_for() -> None:
    with python(WAITS_AS_FOR_A_DISK) as process:
        assert not gives_up(process, descendants=False)


def test_a_process_that_has_ended_is_given_up() -> None:
    with python("print('up')") as process:
        process.wait()
        assert gives_up(process)


# --- the fork server ---


@pytest.fixture
def at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have every Python that is started from now on run some code first."""

    def begin_with(code: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return begin_with


@pytest.mark.long
def test_a_fork_server_that_starts_slowly_is_waited_for(at_start: Callable[[str], None]) -> None:
    at_start("import time\nwhile time.process_time() < 1.5: pass")
    client = ForkServerClient(stalled=1.0)
    try:
        client.wait_until_ready()
    finally:
        client.disconnect()
        client.wait_for_end(stalled=20.0)
    assert not client.alive()


def test_a_fork_server_that_does_nothing_is_given_up_with_its_last_words(
    at_start: Callable[[str], None],
) -> None:
    at_start("import sys, time\nsys.stderr.write('a cold disk\\n')\ntime.sleep(3600)")
    client = ForkServerClient(stalled=1.0)
    said = r"does not answer: no progress for 1 s; its last output:\n.*a cold disk"
    with pytest.raises(LaunchError, match=rf"(?s){said}.*Allowed: .*Do now:  launch again"):
        client.wait_until_ready()
    assert not client.alive()


def test_an_interrupt_at_the_moment_of_the_first_message_loses_nothing() -> None:
    server = ForkServerClient(stalled=5.0)

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code is Connection.receive.__code__:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    try:
        sys.setprofile(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                server.wait_until_ready()
        finally:
            sys.setprofile(None)
        server.wait_until_ready()
    finally:
        server.disconnect()
        server.wait_for_end(stalled=20.0)


def test_a_wait_is_told_of_and_then_ever_more_seldom(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    with python(BURNS) as process:
        activity = Activity(process.pid)
        assert not wait_while_active(
            never, activity, "it", limit=1.5, report_after=0.5, say=said.append
        )
        assert not wait_while_active(never, activity, "it", limit=1.0, report_after=0.5)
    first, *others = said
    assert first.startswith("waiting for it: ")
    assert first.endswith(" s so far, it makes progress")
    assert len(others) <= 1
    assert capsys.readouterr().err.startswith("waiting for it: ")
