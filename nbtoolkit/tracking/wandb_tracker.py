"""Write a run, and the trials and folds below it, to Weights & Biases (W&B).

    sweep                    group: the sweep's id; job type: run
      trials/0007            the same group; job type: trial
        trials/0007/fold-2   the same group; job type: fold

A W&B run's id comes from the run's folder, and a row's number from the events alone. A W&B run is
written by one process from its first event: where a process stopped, the next one starts over. Its
offline files replace the earlier ones; a server ignores rows up to the last number that it has.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.run.events import Event, EventReader, JobEvent, RunEnded, RunStarted, TrialChanged
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.tracking.tracker import Point, TrackerState, job_folder, job_values

if TYPE_CHECKING:
    import wandb


@dataclass
class _OpenRun:
    """A W&B run, the state of its follower, its last row's number, and that row's time and step."""

    run: wandb.Run
    state: TrackerState
    row: int = -1
    last: tuple[float, int] | None = None


# By W&B run id. A follower's next attempt continues the W&B run of the one before.
_open_runs: dict[str, _OpenRun] = {}


class WandbTracker:
    """Writes one run folder to W&B.

    Args:
        paths: the run.
        state: the caller keeps it between processes.
        fresh: the events come from the first; the W&B run is written again.
        sweep: the tracker of the sweep that the run is a job of; None: a run of its own.
    """

    def __init__(
        self, paths: RunPaths, state: TrackerState, fresh: bool, sweep: WandbTracker | None = None
    ) -> None:
        self._paths, self._state, self._fresh, self._sweep = paths, state, fresh, sweep
        self._root: Path = sweep._root if sweep else paths.folder
        self._name = str(paths.folder.relative_to(self._root if sweep else self._root.parent))
        self._id = hashlib.sha256(f"{self._root.name}/{self._name}".encode()).hexdigest()[:16]
        self._project: str = sweep._project if sweep else ""
        self._started, self._status = 0.0, ""  # time of the attempt's first event; set at its end
        self._results: dict[str, JobEvent] = {}  # by folder, of the jobs that have ended
        self._jobs: dict[str, WandbTracker] = {}  # by folder: written, without a result yet

    def open(self, run: RunStarted) -> bool:
        """Start the W&B run, or continue that of the attempt before."""
        self._started = run.t
        settings = run.config.get("tracking", {})
        if self._sweep is None:
            project = settings.get("wandb_project") or settings.get("experiment") or "nbtoolkit"
            self._project = re.sub(r"[/\\#?%:]", "-", project)[:128]
        # Without its offline files it is written again.
        written = self._state.get("wandb_written") == _last_attempt(self._paths)
        if written and ("://" in self._state["wandb"] or Path(self._state["wandb"]).exists()):
            return True
        if self._fresh:
            self._start()
        elif self._id not in _open_runs or _open_runs[self._id].state is not self._state:
            return False
        own = {"plan": run.plan, "versions": run.versions, "params": run.params}
        _open_runs[self._id].run.config.update(run.config | own, allow_val_change=True)
        return True

    def write(self, points: Sequence[Point], events: Sequence[Event]) -> None:
        """Write the numbers of each event as a row, and the results of jobs."""
        if (opened := _open_runs.get(self._id)) is None:
            return
        for point in points:
            if opened.last != (point.time, point.step):
                opened.last, opened.row = (point.time, point.step), opened.row + 1
            values = {"step": point.step, "_timestamp": point.time, point.name: point.value}
            opened.run.log(values, step=opened.row)
        for event in events:
            if isinstance(event, JobEvent) and (folder := job_folder(event)) is not None:
                self._write_result(folder, event)

    def close(self, ended: RunEnded) -> None:
        """End the W&B run, unless another attempt follows; a job's when its result is known."""
        self._status = ended.status
        for job in [*self._jobs.values()]:
            job._finish()
        if (own := _open_runs.get(self._id)) is None or self._started != _last_attempt(self._paths):
            return
        own.run.summary.update({"status": ended.status, "error": ended.error})
        if self._sweep is None or self._sweep._status or self._name in self._sweep._results:
            self._finish()
        else:
            self._sweep._jobs[self._name] = self

    def for_job(self, paths: RunPaths, fresh: bool, state: TrackerState) -> WandbTracker:
        """A tracker for a trial or a fold of this sweep."""
        return WandbTracker(paths, state, fresh, self)

    def _start(self) -> None:
        if self._id in _open_runs:
            _open_runs.pop(self._id).run.finish()
        if self._sweep is not None:
            self._sweep._jobs.pop(self._name, None)  # its attempt before
        for old in (self._root / "wandb").glob(f"*run-*-{self._id}"):
            shutil.rmtree(old)
        kind = ("fold" if "fold" in self._name else "trial") if self._sweep else "run"
        group, name, folder = self._root.name, self._name, str(self._root)
        run = _init(
            project=self._project, id=self._id, name=name, group=group, job_type=kind, dir=folder
        )
        run.define_metric("*", step_metric="step")
        _open_runs[self._id] = _OpenRun(run, self._state)
        self._state["wandb"] = str(Path(run.dir).parent if run.offline else run.url)

    def _write_result(self, folder: str, event: JobEvent) -> None:
        self._results.pop(folder, None)  # of an attempt before
        if event.state in ("running", "waiting"):
            return
        self._results[folder] = event
        paths = RunPaths(self._paths.folder / folder)
        if folder in self._jobs:
            self._jobs[folder]._finish()
        elif isinstance(event, TrialChanged) and not paths.events.exists():  # its folds have events
            trial = self.for_job(paths, True, {})
            trial._start()
            _open_runs[trial._id].run.config.update({"params": event.params})
            trial._finish()

    def _finish(self) -> None:
        run, status = _open_runs.pop(self._id).run, self._status
        if self._sweep is not None:
            self._sweep._jobs.pop(self._name, None)
            if event := self._sweep._results.get(self._name):
                status = event.state
                run.summary.update({"status": status, "reason": event.reason, **job_values(event)})
        run.finish(exit_code=int(status in ("failed", "infeasible", "killed")))
        if not _open_runs:
            importlib.import_module("wandb").teardown()  # W&B's own process, of 100 MB
        self._state["wandb_written"] = self._started


def _last_attempt(paths: RunPaths) -> float:
    """Time of the first event of the last attempt."""
    events = EventReader(paths.events).read()
    return max((event.t for event in events if isinstance(event, RunStarted)), default=0.0)


def _init(**arguments: Any) -> wandb.Run:
    """Start a W&B run without a question to the user, offline where the server cannot be used."""
    import wandb

    # The ranks' output and the state of the code are in the run's folder.
    off = {"console": "off", "symlink": False, "disable_git": True, "save_code": False}
    settings = wandb.Settings(silent=True, x_disable_meta=True, x_disable_stats=True, **off)
    # "create_new": several runs at once, the trials of a sweep.
    arguments |= {"settings": settings, "reinit": "create_new"}
    known = wandb.setup().settings  # WANDB_MODE, WANDB_BASE_URL, or what the command line has set
    online = known.mode == "online"
    # The server refuses the key, or does not answer.
    with contextlib.suppress(wandb.Error, OSError):
        if online and _has_key(known.base_url):
            return wandb.init(mode="online", resume="allow", **arguments)
    return wandb.init(mode="offline" if online else known.mode, **arguments)


def _has_key(server: str) -> bool:
    """Whether there is a key, in the environment or in .netrc, for a server that answers.

    Raises:
        OSError: the server does not answer within 3 s.
    """
    import requests

    variables = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    if not any(map(os.environ.get, variables)) and requests.utils.get_netrc_auth(server) is None:
        return False
    requests.head(server, timeout=3)
    return True
