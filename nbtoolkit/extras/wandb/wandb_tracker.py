"""Write a run, a trial or a fold to Weights & Biases (W&B).

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.run.events import Event, RunEnded, RunStarted
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.tracking.tracker import Point

if TYPE_CHECKING:
    import wandb

_open_runs: dict[str, wandb.Run] = {}
"""The W&B runs of this process that are not finished, by id."""


class WandbTracker:
    """Writes one run folder to W&B.

    Args:
        paths: the run.
        sweep: the tracker of the sweep that the run is a job of; None: a run of its own.
    """

    def __init__(self, paths: RunPaths, sweep: WandbTracker | None = None) -> None:
        self._root: Path = sweep._root if sweep else paths.folder
        self._name = str(paths.folder.relative_to(self._root if sweep else self._root.parent))
        self._id = hashlib.sha256(f"{self._root.name}/{self._name}".encode()).hexdigest()[:16]
        self._kind = "run"
        if sweep is not None:
            self._kind = "fold" if "fold" in self._name else "trial"
        self._project: str = sweep._project if sweep else ""
        self._run: wandb.Run | None = None
        self._row = -1  # the last row's number, and the time and step of its event
        self._last: tuple[float, int] | None = None
        self.place = ""

    def open(self, run: RunStarted, *, fresh: bool, done: bool) -> bool:
        """Start the W&B run, or continue that of the attempt before."""
        settings = run.config.get("tracking", {})
        project = settings.get("wandb_project") or settings.get("experiment") or "nbtoolkit"
        self._project = self._project or re.sub(r"[/\\#?%:]", "-", project)[:128]
        if fresh:
            self._start()
        if self._run is None:
            # Another process wrote it. It is written again, unless it is complete.
            return done and any(self._files())
        metadata = {"plan": run.plan, "versions": run.versions, "params": run.params}
        self._run.config.update(run.config | metadata, allow_val_change=True)
        return True

    def write(self, points: Sequence[Point], events: Sequence[Event]) -> None:
        """Write the numbers of each event as a row."""
        if self._run is None:
            return
        for point in points:
            if self._last != (point.time, point.step):
                self._last, self._row = (point.time, point.step), self._row + 1
            values = {"step": point.step, "_timestamp": point.time, point.name: point.value}
            self._run.log(values, step=self._row)

    def close(self, ended: RunEnded) -> None:
        """End the W&B run."""
        if self._run is None:
            return
        self._run.summary.update({"status": ended.status, "error": ended.error})
        self._finish(failed=ended.status in ("failed", "killed"))

    def for_job(self, paths: RunPaths) -> WandbTracker:
        """Return a tracker for a trial or a fold of this sweep."""
        return WandbTracker(paths, self)

    def _files(self) -> Iterator[Path]:
        """Yield the folders that W&B has made for this run."""
        return (self._root / "wandb").glob(f"*run-*-{self._id}")

    def _start(self) -> None:
        self._finish(failed=True)  # one that a follower which starts over has left open
        for old in self._files():
            shutil.rmtree(old)
        run = self._run = _open_runs[self._id] = _init(
            project=self._project,
            id=self._id,
            name=self._name,
            group=self._root.name,
            job_type=self._kind,
            dir=str(self._root),
        )
        run.define_metric("*", step_metric="step")
        self.place = str(Path(run.dir).parent if run.offline else run.url)

    def _finish(self, *, failed: bool) -> None:
        self._run = None
        if run := _open_runs.pop(self._id, None):
            run.finish(exit_code=int(failed))
            if not _open_runs:
                importlib.import_module("wandb").teardown()  # W&B's own process, of 100 MB


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
