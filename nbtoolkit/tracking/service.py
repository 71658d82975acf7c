"""Run the tracking service, a process of its own that follows the runs it is given.

It gets TrackRun packets (see run/messages.py) over a socket that is inherited, and answers with
RunTracked or TrackingFailed. Nobody has to read the answers: ``tracking.json`` in the run's folder
says the same (``done``, with ``read`` bytes of the events written; or ``error``).

When the other end is gone it finishes what has ended, for at most 10 s, and exits; what it does not
finish, ``replay`` does.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType

from nbtoolkit.environment.resources import STALL_SECONDS, Activity, has_ended, wait_while_active
from nbtoolkit.errors import MissingExtra, NbtoolkitError, TrackingError
from nbtoolkit.run.events import EventReader, RunStarted
from nbtoolkit.run.messages import RunTracked, TrackingFailed, TrackRun
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.transport import packet_pair, receive_packet, send_packet
from nbtoolkit.tracking.database import import_client
from nbtoolkit.tracking.follower import Follower
from nbtoolkit.tracking.tracker import choose_tracking

POLL = 0.5
"""Seconds between two looks at the runs (at 50 events a second: 4% of a core; 10% with 0.2 s)."""

GRACE = 10.0
"""Seconds for what is left to write when the other end is gone."""

_ERROR_LENGTH = 4000  # MLflow's errors repeat the whole batch; a packet has 64 KB

# Set in this process only. The second is what fluent calls in a kernel leave in its environment:
# nothing of it is meant for our runs.
_NO_TELEMETRY = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
_KERNEL_STATE = (
    "MLFLOW_RUN_ID",
    "MLFLOW_EXPERIMENT_ID",
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_REGISTRY_URI",
    "MLFLOW_ENABLE_WORKSPACES",
    "MLFLOW_WORKSPACE",
)


# MLflow imports these where it finds them (0.3 s of 2.1 s, 60 MB) and does without them where it
# does not: mlflow-skinny is MLflow without them.
_NOT_NEEDED = ("pandas", "pyarrow", "scipy")


def run_service(control: socket.socket) -> None:
    """Be the tracking service. Returns when the other end of ``control`` is gone.

    For a process of its own, forked or fresh: it changes the environment.
    """
    _set_environment()
    _go_without(*_NOT_NEEDED)
    with contextlib.suppress(MissingExtra):  # TensorBoard alone may be wanted; MLflow's runs say so
        import_client()  # now, while the training starts, rather than when its first event is there
    gc.freeze()  # what is imported stays: the collector need not look through it again
    Service(control).run()


class Service:
    """Follows several runs in one thread, round robin."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._followers: dict[str, Follower] = {}
        self._alone = False  # the other end is gone

    def run(self) -> None:
        """Serve until the other end is gone, then finish."""
        while not self._alone:
            if self._message_within(POLL if self._followers else None):
                self._hear()
            self._look()
        until = time.monotonic() + GRACE
        while self._followers and time.monotonic() < until:
            time.sleep(POLL)
            self._look()

    def _message_within(self, seconds: float | None) -> bool:
        return bool(select.select([self._control], [], [], seconds)[0])

    def _hear(self) -> None:
        # A second time: answers that nobody read make the first end in a reset, which may stand
        # before packets that are still to be read.
        packet = receive_packet(self._control) or receive_packet(self._control)
        if packet is None:
            self._alone = True
        elif isinstance(packet, TrackRun):
            self._begin(packet.folder, packet.output_dir)

    def _begin(self, folder: str, output_dir: str | None) -> None:
        if folder not in self._followers:
            with self._answering(folder):
                where = Path(output_dir) if output_dir else None
                self._followers[folder] = Follower(RunPaths(Path(folder)), output_dir=where)

    def _look(self) -> None:
        for folder, follower in list(self._followers.items()):
            with self._answering(folder):
                if follower.poll():
                    run_id = follower.state.get("mlflow_run_id")
                    self._end(folder)
                    self._tell(RunTracked(folder=folder, mlflow_run_id=run_id))

    def _end(self, folder: str) -> None:
        if follower := self._followers.pop(folder, None):
            follower.close()

    @contextlib.contextmanager
    def _answering(self, folder: str) -> Iterator[None]:
        """Whatever goes wrong with one run is told, and is no matter of the others."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, NbtoolkitError):  # those say all that is to be said
                traceback.print_exc()
            text = f"{type(error).__name__}: {error}"[:_ERROR_LENGTH]
            if folder in self._followers:
                self._followers[folder].failed(text)
            self._end(folder)
            self._tell(TrackingFailed(folder=folder, error=text))

    def _tell(self, message: RunTracked | TrackingFailed) -> None:
        """Answer, unless that would wait for a reader."""
        if select.select([], [self._control], [], 0)[1]:
            send_packet(self._control, message)


class TrackingProcess:
    """A tracking service in a fresh interpreter, for who has no fork server to fork it from.

    Use it in a ``with`` block; at its end the service finishes and exits.
    """

    def __init__(self) -> None:
        self._socket, theirs = packet_pair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, str(theirs.fileno()), json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt of the kernel is not for it
            )

    def track(self, folder: Path, output_dir: Path | None = None) -> None:
        """Ask for a run to be followed to its end."""
        where = str(output_dir) if output_dir else None
        send_packet(self._socket, TrackRun(folder=str(folder), output_dir=where))

    def wait(
        self,
        timeout: float | None = None,
        *,
        stalled: float = STALL_SECONDS,
        say: Callable[[str], object] | None = None,
    ) -> str | None:
        """Wait until the next run is written through.

        Args:
            timeout: seconds to wait; None: as long as the service makes progress.
            stalled: seconds without any progress after which it is not waited for any more.
            say: told what is waited for when it takes long; None: stderr is.

        Returns:
            The id of its MLflow run; None when MLflow is off.

        Raises:
            TrackingError: it could not be written, or the service died.
            TimeoutError: it took longer than ``timeout`` seconds, or made no progress.
        """
        news = select.poll()  # select() refuses descriptors above 1023
        news.register(self._socket, select.POLLIN)
        if not wait_while_active(
            lambda seconds: news.poll(seconds * 1000),
            Activity(self._process.pid),
            "tracking to write the run",
            stalled=stalled,
            limit=timeout,
            say=say,
        ):
            raise TimeoutError(
                f"the tracking service (process {self._process.pid}) has not written it in time; "
                "nbtoolkit.tracking.replay(folder) writes the rest"
            )
        answer = receive_packet(self._socket)
        if isinstance(answer, TrackingFailed):
            raise TrackingError(
                f"tracking {answer.folder} failed: {answer.error}",
                do="the run itself is whole; write it later with nbtoolkit.tracking.replay(folder)",
            )
        if not isinstance(answer, RunTracked):
            raise TrackingError(f"the tracking process died (exit code {self._process.wait()})")
        return answer.mlflow_run_id

    def close(self, stalled: float = STALL_SECONDS) -> None:
        """Let it finish and exit; where it makes no progress for so many seconds, end it."""
        self._socket.close()
        ended, activity = partial(has_ended, self._process), Activity(self._process.pid)
        if not wait_while_active(ended, activity, "tracking to finish", stalled=stalled):
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> TrackingProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def replay(folder: str | Path, *, output_dir: str | Path | None = None) -> str | None:
    """Write a run that was not, or not wholly, tracked: from where tracking stopped, to its end.

    Done twice it changes nothing. When the database is gone it is written anew. It runs in a
    process of its own, so that this one imports no MLflow.

    Args:
        folder: the run's folder.
        output_dir: where the MLflow database lies; None: the run folder's parent.

    Returns:
        The id of its MLflow run; None when MLflow is off in the run's configuration.

    Raises:
        TrackingError: there is no run in the folder, or it could not be written.
        MissingExtra: a tracker that the run's configuration asks for is not installed.
    """
    paths = RunPaths(Path(folder).absolute())
    run = next(EventReader(paths.events).read(), None)
    if not isinstance(run, RunStarted):
        raise TrackingError(
            f"there are no events in {paths.folder}",
            do="give the folder of one run, such as result.paths.folder",
        )
    choice = choose_tracking(run.config.get("tracking", {}))
    if choice.notes:
        raise MissingExtra("\n".join(choice.notes))
    with TrackingProcess() as service:
        service.track(paths.folder, Path(output_dir).absolute() if output_dir else None)
        return service.wait()


def replay_all(folder: Path, runs: Iterable[str]) -> dict[str, str | None]:
    """Write several runs like :func:`replay`, each to the database beside it, by one process.

    Runs whose configuration names another store are passed over: it may be anybody's.

    Args:
        folder: the output folder.
        runs: their folders below it.

    Returns:
        Run -> why it could not be written, None: it was. Runs without MLflow are not in it.
    """
    done: dict[str, str | None] = {}
    with contextlib.ExitStack() as open_service:
        service: TrackingProcess | None = None
        for run in runs:
            first = next(EventReader(RunPaths(folder / run).events).read(), None)
            if not isinstance(first, RunStarted) or not first.config:
                continue
            settings = first.config.get("tracking", {})
            if not settings.get("mlflow", True) or settings.get("uri"):
                continue
            choice = choose_tracking(settings)
            if choice.notes:
                done[run] = "\n".join(choice.notes)
                continue
            service = service or open_service.enter_context(TrackingProcess())
            try:
                service.track((folder / run).absolute())
                service.wait()
                done[run] = None
            except (NbtoolkitError, OSError) as error:  # TimeoutError is an OSError
                done[run] = str(error)
    return done


_START = """
import json, socket, sys
sys.path[:] = json.loads(sys.argv[2])
from nbtoolkit.tracking.service import run_service
run_service(socket.socket(fileno=int(sys.argv[1])))
"""


def _go_without(*modules: str) -> None:
    """Let these not be found, unless they are there already (None in sys.modules says so)."""
    for name in modules:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type] # typeshed knows no None there


def _set_environment() -> None:
    os.environ.update(_NO_TELEMETRY, MLFLOW_LOGGING_LEVEL="WARNING")
    for name in _KERNEL_STATE:
        os.environ.pop(name, None)
