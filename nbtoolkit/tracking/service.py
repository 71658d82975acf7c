"""Run the processes that follow runs and write them to their trackers.

A kernel has one such process, which its fork server forks. Without a fork server, and for
:func:`replay`, a process follows given runs to their end. ``tracking.json`` in a run's folder says
what they have done (``done``, with ``written`` bytes of the events; or ``error``).
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nbtoolkit.environment.grace import EXIT_GRACE, STALL_SECONDS
from nbtoolkit.environment.resources import Activity, has_ended, wait_while_active
from nbtoolkit.errors import MissingExtra, NbtoolkitError, TrackingError
from nbtoolkit.run.paths import RunPaths, read_or_empty
from nbtoolkit.tracking.database import import_client
from nbtoolkit.tracking.follower import Follower, first_event, lock_tracking
from nbtoolkit.tracking.tracker import choose_tracking
from nbtoolkit.wire.messages import TrackRun
from nbtoolkit.wire.transport import Connection

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


class Service:
    """Follows several runs in one thread, round robin."""

    def __init__(self) -> None:
        self._followers: dict[str, Follower] = {}

    @property
    def busy(self) -> bool:
        """Whether a run is not written to its end."""
        return bool(self._followers)

    @property
    def live(self) -> bool:
        """Whether one of the runs has not ended."""
        return any(RunPaths(Path(folder)).owned() for folder in self._followers)

    def follow(self, folder: str, output_dir: Path | None = None) -> None:
        """Follow a run from the next poll on."""
        if folder not in self._followers:
            with self._reported_errors(folder):
                self._followers[folder] = Follower(RunPaths(Path(folder)), output_dir=output_dir)

    def poll(self) -> None:
        """Write the new events of all runs, and release those that are written to their end."""
        for folder, follower in list(self._followers.items()):
            with self._reported_errors(folder):
                if follower.poll():
                    self._remove(folder)

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
            else:  # there is no folder, or it is another process's
                print(text, file=sys.stderr)


def run_service(descriptors: list[int]) -> None:
    """Follow the runs that TrackRun messages name until the other end of the connection closes.

    For a process of its own, forked by the fork server. It then follows detached runs to their end,
    finishes runs that have ended, for at most 10 s, and exits; ``replay`` writes the rest.

    Args:
        descriptors: the last one is of the connection; the fork server gives its own first.
    """
    *others, connection = descriptors
    for fd in others:
        os.close(fd)
    _prepare_process()
    serve(Connection.inherited(connection))


def serve(kernel: Connection) -> None:
    """Serve until the other end closes, then finish."""
    service = Service()
    while not kernel.closed:
        timeout = POLL if service.busy else None
        if select.select([kernel], [], [], timeout)[0]:
            for message in kernel.drain():
                if isinstance(message, TrackRun):
                    _set_environment(message.environ)
                    service.follow(message.folder)
        service.poll()
    until = time.monotonic() + EXIT_GRACE
    while service.busy and time.monotonic() < until:
        time.sleep(POLL)
        service.poll()
        if service.live:
            until = time.monotonic() + EXIT_GRACE


def _prepare_process() -> None:
    """Set what is for this process only, and import MLflow."""
    _set_environment(os.environ.copy())
    for name in _NOT_NEEDED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type] # None: importing it fails
    with contextlib.suppress(MissingExtra):  # maybe only TensorBoard is on; else the run reports it
        import_client()  # now, while the training starts, rather than with its first event
    gc.freeze()  # imported modules stay: the collector need not scan them again


def _set_environment(kernel: Mapping[str, str]) -> None:
    """Give this process the kernel's environment, with the credentials that it has now."""
    state = {name: value for name, value in kernel.items() if name not in _KERNEL_STATE}
    os.environ.clear()
    os.environ.update({**state, **_OWN_VARIABLES})


class TrackingProcess:
    """Follows runs to their end, where there is no fork server, and exits.

    Args:
        folders: of the runs.
        output_dir: the folder of the MLflow database; None: the parent of each run's folder.
    """

    def __init__(self, folders: Sequence[Path], output_dir: Path | None = None) -> None:
        words = [str(output_dir or ""), *map(str, folders)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, json.dumps(sys.path), *words],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the kernel's interrupts do not reach it
        )

    def wait(
        self, *, stalled: float = STALL_SECONDS, say: Callable[[str], object] | None = None
    ) -> None:
        """Wait until it has written the runs, and has ended; kill it if it makes no progress.

        Args:
            stalled: seconds without any progress after which to give up.
            say: called with a line when it takes long; None: stderr.

        Raises:
            TimeoutError: it made no progress.
        """
        ended = partial(has_ended, self._process)
        activity = Activity(self._process.pid)
        awaited = "tracking to write the run"
        if not wait_while_active(ended, activity, awaited, stalled=stalled, say=say):
            self._process.kill()
            self._process.wait()
            raise TimeoutError(
                f"the tracking process {self._process.pid} made no progress for {stalled:g} s; "
                "nbtoolkit.tracking.replay(folder) writes the rest"
            )

    def check(self, folder: Path) -> str | None:
        """Return the id of a run's MLflow run, after :meth:`wait`; None when MLflow is off.

        Raises:
            TrackingError: the run could not be written, or the process died.
        """
        saved: dict[str, Any] = read_or_empty(RunPaths(folder).tracking)
        if error := saved.get("error"):
            raise TrackingError(
                f"tracking {folder} failed: {error}",
                do="the run itself is complete; write it later with "
                "nbtoolkit.tracking.replay(folder)",
            )
        if self._process.returncode or not saved.get("done"):
            raise TrackingError(f"the tracking process died (exit code {self._process.poll()})")
        place: str | None = saved.get("places", {}).get("mlflow")
        return place


def follow_to_end(output_dir: str, folders: Sequence[str]) -> None:
    """Follow runs until each is written to its end, or cannot be; the main of TrackingProcess."""
    _prepare_process()
    service = Service()
    for folder in folders:
        service.follow(folder, Path(output_dir) if output_dir else None)
    service.poll()
    while service.busy:
        time.sleep(POLL)
        service.poll()


_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from nbtoolkit.tracking.service import follow_to_end
follow_to_end(sys.argv[2], sys.argv[3:])
"""


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
        TrackingError: there is no run in the folder, another process tracks it, or it could not be
            written.
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
    os.close(lock_tracking(paths))  # an error of the process itself would be in its output only
    process = TrackingProcess([paths.folder], Path(output_dir).absolute() if output_dir else None)
    process.wait()
    return process.check(paths.folder)


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
    written = []
    for run in runs:
        first = first_event(RunPaths(folder / run))
        if first is None or not first.config:
            continue
        settings = first.config.get("tracking", {})
        if not settings.get("mlflow", True) or settings.get("uri"):
            continue
        if notes := choose_tracking(settings).notes:
            done[run] = "\n".join(notes)
        else:
            written.append(run)
    if not written:
        return done
    process = TrackingProcess([(folder / run).absolute() for run in written])
    try:
        process.wait()
    except TimeoutError as error:
        return {**done, **dict.fromkeys(written, str(error))}
    for run in written:
        try:
            process.check(folder / run)
            done[run] = None
        except TrackingError as error:
            done[run] = str(error)
    return done
