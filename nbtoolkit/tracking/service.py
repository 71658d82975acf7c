"""Run the tracking service, a process that follows runs and writes them to their trackers.

It receives TrackRun messages (see run/messages.py) over an inherited connection, and answers with
RunTracked. The answers need not be read: ``tracking.json`` in the run's folder has the same
(``done``, with ``read`` bytes of the events written; or ``error``).

When the other end closes, it follows detached runs to their end, finishes runs that have ended, for
at most 10 s, and exits; ``replay`` writes the rest.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from nbtoolkit.environment.grace import EXIT_GRACE, STALL_SECONDS
from nbtoolkit.environment.resources import Activity, has_ended, wait_while_active
from nbtoolkit.errors import MissingExtra, NbtoolkitError, TrackingError
from nbtoolkit.run.messages import Message, RunTracked, TrackRun
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.transport import Connection
from nbtoolkit.tracking.database import import_client
from nbtoolkit.tracking.follower import Follower, first_event
from nbtoolkit.tracking.tracker import choose_tracking

POLL = 0.5
"""Seconds between two polls of the runs (at 50 events a second: 4% of a core; 10% with 0.2 s)."""

_ERROR_LENGTH = 4000  # longer texts of libraries repeat the data
_STATEMENT = "\n[SQL:"  # from here on, SQLAlchemy's errors repeat the whole batch

# Set in this process only.
_OWN_VARIABLES = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "WANDB_ERROR_REPORTING": "false",
}
# Calls of MLflow and W&B leave these in a kernel's environment; they do not apply to our runs.
# MLFLOW_TRACKING_URI stays: it may have the password for the URI of a run.
_KERNEL_STATE = (
    "MLFLOW_RUN_ID",
    "MLFLOW_EXPERIMENT_ID",
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_REGISTRY_URI",
    "MLFLOW_ENABLE_WORKSPACES",
    "MLFLOW_WORKSPACE",
    "WANDB_SERVICE",
)

# MLflow imports these if they are installed (0.3 s of 2.1 s, 60 MB), and works without them:
# mlflow-skinny is MLflow without them.
_NOT_NEEDED = ("pandas", "pyarrow", "scipy")


def run_service(descriptors: list[int]) -> None:
    """Run the tracking service until the other end of its connection closes.

    For a process of its own, forked or new: it changes the environment and ``sys.modules``.

    Args:
        descriptors: the last one is of the connection; the fork server gives its own first.
    """
    *others, connection = descriptors
    for fd in others:
        os.close(fd)
    _set_environment(os.environ.copy())
    for name in _NOT_NEEDED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type] # None: importing it fails
    with contextlib.suppress(MissingExtra):  # maybe only TensorBoard is on; else the run reports it
        import_client()  # now, while the training starts, rather than with its first event
    gc.freeze()  # imported modules stay: the collector need not scan them again
    Service(Connection.inherited(connection)).run()


def _set_environment(kernel: Mapping[str, str]) -> None:
    """Give this process the kernel's environment, with the credentials that it has now."""
    state = {name: value for name, value in kernel.items() if name not in _KERNEL_STATE}
    os.environ.clear()
    os.environ.update({**state, **_OWN_VARIABLES})


class Service:
    """Follows several runs in one thread, round robin."""

    def __init__(self, kernel: Connection) -> None:
        self._kernel = kernel
        self._followers: dict[str, Follower] = {}

    def run(self) -> None:
        """Serve until the other end closes, then finish."""
        while not self._kernel.closed:
            timeout = POLL if self._followers else None
            if select.select([self._kernel], [], [], timeout)[0]:
                for message in self._kernel.drain():
                    self._receive(message)
            self._poll()
        until = time.monotonic() + EXIT_GRACE
        while self._followers and time.monotonic() < until:
            time.sleep(POLL)
            self._poll()
            if any(RunPaths(Path(folder)).owned() for folder in self._followers):
                until = time.monotonic() + EXIT_GRACE

    def _receive(self, message: Message) -> None:
        if not isinstance(message, TrackRun):
            return
        if message.environ is not None:
            _set_environment(message.environ)
        if message.folder not in self._followers:
            with self._reported_errors(message.folder):
                output_dir = Path(message.output_dir) if message.output_dir else None
                follower = Follower(RunPaths(Path(message.folder)), output_dir=output_dir)
                self._followers[message.folder] = follower

    def _poll(self) -> None:
        for folder, follower in list(self._followers.items()):
            with self._reported_errors(folder):
                if follower.poll():
                    run_id = follower.state.get("mlflow_run_id")
                    self._remove(folder)
                    self._kernel.send_nowait(RunTracked(folder=folder, mlflow_run_id=run_id))

    def _remove(self, folder: str) -> None:
        if follower := self._followers.pop(folder, None):
            follower.close()

    @contextlib.contextmanager
    def _reported_errors(self, folder: str) -> Iterator[None]:
        """Report an error of one run, and stop following it; the other runs continue."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, NbtoolkitError):  # whose message is complete
                traceback.print_exc()
            text = f"{type(error).__name__}: {error}".partition(_STATEMENT)[0][:_ERROR_LENGTH]
            if folder in self._followers:
                self._followers[folder].failed(text)
            self._remove(folder)
            self._kernel.send_nowait(RunTracked(folder=folder, error=text))


class TrackingProcess:
    """A tracking service in a new interpreter, where there is no fork server to fork it.

    A context manager: on exit the service finishes.
    """

    def __init__(self) -> None:
        self._line, other_end = Connection.pair()
        fd = other_end.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, str(fd), json.dumps(sys.path)],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the kernel's interrupts do not reach it
        )
        other_end.close()

    def track(self, folder: Path, output_dir: Path | None = None) -> None:
        """Request that a run is followed to its end."""
        path = str(output_dir) if output_dir else None
        self._line.send(TrackRun(folder=str(folder), output_dir=path))

    def wait(
        self, *, stalled: float = STALL_SECONDS, say: Callable[[str], object] | None = None
    ) -> str | None:
        """Wait until the next run is written to its end.

        Args:
            stalled: seconds without any progress after which to give up.
            say: called with a line when it takes long; None: stderr.

        Returns:
            The id of its MLflow run; None when MLflow is off.

        Raises:
            TrackingError: it could not be written, or the service died.
            TimeoutError: it made no progress.
        """
        poller = select.poll()  # select() refuses descriptors above 1023
        poller.register(self._line, select.POLLIN)
        if not wait_while_active(
            lambda seconds: poller.poll(seconds * 1000),
            Activity(self._process.pid),
            "tracking to write the run",
            stalled=stalled,
            say=say,
        ):
            raise TimeoutError(
                f"the tracking service (process {self._process.pid}) has not written it in time; "
                "nbtoolkit.tracking.replay(folder) writes the rest"
            )
        answer = self._line.receive()
        if not isinstance(answer, RunTracked):
            raise TrackingError(f"the tracking process died (exit code {self._process.wait()})")
        if answer.error:
            raise TrackingError(
                f"tracking {answer.folder} failed: {answer.error}",
                do="the run itself is complete; write it later with "
                "nbtoolkit.tracking.replay(folder)",
            )
        return answer.mlflow_run_id

    def close(self, stalled: float = STALL_SECONDS) -> None:
        """Wait until it finishes and exits; kill it after ``stalled`` seconds without progress."""
        self._line.close()
        ended, activity = partial(has_ended, self._process), Activity(self._process.pid)
        if not wait_while_active(ended, activity, "tracking to finish", stalled=stalled):
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> TrackingProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def replay(
    folder: str | os.PathLike[str], *, output_dir: str | os.PathLike[str] | None = None
) -> str | None:
    """Write a run that was not tracked to its end, from where tracking stopped.

    Calling it again changes nothing. A missing database is written again. Another process does it,
    so that this one does not import MLflow.

    Args:
        folder: the run's folder.
        output_dir: the folder of the MLflow database; None: the run folder's parent.

    Returns:
        The id of its MLflow run; None when MLflow is off in the run's configuration.

    Raises:
        TrackingError: there is no run in the folder, or it could not be written.
        MissingExtra: a tracker in the run's configuration is not installed.
    """
    paths = RunPaths(Path(folder).absolute())
    run = first_event(paths)
    if run is None:
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
    """Write several runs like :func:`replay`, each to the database beside it, in one process.

    Runs whose configuration names another store are skipped: it may be somebody else's.

    Args:
        folder: the output folder.
        runs: their folders below it.

    Returns:
        Run -> why it could not be written; None: it was. Runs without MLflow are left out.
    """
    done: dict[str, str | None] = {}
    with contextlib.ExitStack() as open_service:
        service: TrackingProcess | None = None
        for run in runs:
            first = first_event(RunPaths(folder / run))
            if first is None or not first.config:
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
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from nbtoolkit.tracking.service import run_service
run_service([int(sys.argv[1])])
"""
