"""Define RunResult, the result of a run, read from its folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, cast

from nbtoolkit.cards import properties_html
from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.errors import CheckpointError, LaunchError, RunFolderError
from nbtoolkit.run.attempts import first_event, last_event, newest_plan
from nbtoolkit.run.events import EventReader, MetricsLogged, RunEnded, RunStarted
from nbtoolkit.run.failure import raise_failure
from nbtoolkit.run.output import charts
from nbtoolkit.run.paths import RunPaths, Status, read_pickle, reading
from nbtoolkit.run.remote_job import RemoteJob, last_lines

if TYPE_CHECKING:
    import torch

    from nbtoolkit.views.figure import Chart


class RunResult:
    """The result of a run, read from its folder.

    Attributes:
        status: ``"completed"``, or the reason why all ranks left the function early:
            ``"stopped"``, ``"deadline"`` or ``"pruned"``.
        metrics: the last reported or returned metrics; if there are none, the last logged ones.
        plan: the launch plan: processes, devices, precision and division of the batch, with the
            reasons for them.
        paths: the folder and the files of the run.
        seconds: wall time from the start of the supervisor to the end of the last rank.
        checkpoint: the last saved checkpoint: a file of ``ctx.save`` or a folder of ``nb.fit``;
            None if there is none.
    """

    def __init__(self, paths: RunPaths) -> None:
        ended = result_of(paths, "run")
        self.paths = paths
        self.status = cast("Status", ended.status)
        self.metrics = ended.metrics
        self.seconds = ended.seconds or 0.0
        self.checkpoint = _find_checkpoint(paths, ended.checkpoint)
        self._processes = ended.processes
        with reading(paths.events):
            self.plan = LaunchPlan.from_dict(newest_plan(paths))

    @cached_property
    def value(self) -> Any:
        """The value that rank 0 returned, with tensors on the CPU; None if the run ended early."""
        return read_pickle(self.paths.value(0)) if self.status == "completed" else None

    @cached_property
    def values(self) -> list[Any]:
        """The values that the ranks returned, in their order; empty if the run ended early."""
        if self.status != "completed":
            return []
        others = range(1, self._processes)
        return [self.value, *(read_pickle(self.paths.value(rank)) for rank in others)]

    @cached_property
    def step_time(self) -> dict[str, float]:
        """The mean shares of the time of a step of ``nb.fit``; empty if ``nb.fit`` logged none.

        The keys are ``data`` (waiting for the next batch), ``communication`` (waiting for other
        ranks; only with DDP on several ranks) and ``compute`` (the rest).
        """
        shares: dict[str, list[float]] = {}
        for event in EventReader(self.paths.events).read():
            if isinstance(event, MetricsLogged) and "data_share" in event.values:
                for name in ("data", "compute", "communication"):
                    if (share := event.values.get(f"{name}_share")) is not None:
                        shares.setdefault(name, []).append(share)
        return {name: sum(values) / len(values) for name, values in shares.items()}

    @cached_property
    def throughput(self) -> float | None:
        """The samples per second over all ranks; None if ``nb.fit`` logged none.

        It is the median over the second half of the log entries of the last attempt. The time of
        the start, of validation and of checkpoints does not count.
        """
        logged: list[float] = []
        for event in EventReader(self.paths.events).read():
            if isinstance(event, RunStarted):
                logged = []
            elif isinstance(event, MetricsLogged) and "samples_per_second" in event.values:
                logged.append(event.values["samples_per_second"])
        return median(logged[len(logged) // 2 :]) if logged else None

    @property
    def efficiency(self) -> float | None:
        """The throughput divided by the ideal throughput; None without a calibration.

        The ideal throughput is the number of devices times the throughput of one device, which
        :func:`nbtoolkit.calibrate` measured before the run. On the CPU, one process on all CPUs
        counts as one device.
        """
        device_speed = self.plan.one_device_speed
        if not device_speed or self.throughput is None:
            return None
        return self.throughput / (max(1, len(self.plan.devices)) * device_speed)

    def load_into(
        self, model: torch.nn.Module, kind: Literal["best", "last"] | None = None
    ) -> torch.nn.Module:
        """Load the run's weights into ``model`` in place, and return ``model``.

        Args:
            model: a model with the same parameters as the trained model.
            kind: ``"best"`` or ``"last"``; None takes the value of ``checkpoint.weights``. If there
                are no best weights, the last saved weights are loaded.

        Raises:
            CheckpointError: the run saved no weights, or the weights are damaged or do not fit the
                model.
        """
        from nbtoolkit.run.checkpoints.weights import find_weights, load_model

        if self.checkpoint is None:
            raise CheckpointError(
                f"the run {self.paths.run_id} has saved no checkpoint",
                allowed="runs whose function calls nb.fit(...) or ctx.save(...)",
                do='call ctx.save({"model": model.state_dict()}) before the function returns',
            )
        # A checkpoint that ctx.save wrote under another name is not found by its kind.
        return load_model(find_weights(self.paths.folder, kind) or self.checkpoint, model)

    def plot(self) -> Chart:
        """Draw the learning curves."""
        return charts().result_chart(self.paths, "curves")

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name}={value:.4g}" for name, value in self.metrics.items())
        parts = [self.status, metrics or "no metrics", f"{self.seconds:.1f} s", self.paths.folder]
        return f"RunResult({', '.join(map(str, parts))})"

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object]] = [("status", self.status)]
        rows += [(name, f"{value:.6g}") for name, value in self.metrics.items()]
        rows += [("seconds", f"{self.seconds:.1f}")]
        rows += [("plan", str(self.plan.explain()).splitlines()[0]), ("folder", self.paths.folder)]
        return properties_html("run", rows)


def result_of(paths: RunPaths, kind: str) -> RunEnded:
    """Return the last event of a run or search that has ended without an error.

    Args:
        paths: its folder.
        kind: what it is, for the message.

    Raises:
        LaunchError: it has not ended, or has failed.
        RunFileError: its events cannot be read.
    """
    ended = last_event(paths)
    if ended is None or ended.status == "failed":
        raise LaunchError(
            f"the {kind} {paths.folder} has no result", do="attach to it with nb.attach(folder)"
        )
    return ended


def pack_at_deadline(status: Status, paths: RunPaths, say: Callable[[str], None]) -> None:
    """Pack a run that ended at its deadline, if its session is about to end.

    Args:
        status: the run's final status.
        paths: the run.
        say: shows a message to the user.
    """
    if status == "deadline":
        # Imported by name: sessions are built on launches, and imports point one way.
        import_module("nbtoolkit.sessions.pack").pack_for_next_session(paths, say)


def refuse_deleted(paths: RunPaths) -> None:
    """Raise an error if the run's folder was deleted, possibly by the training function.

    Raises:
        RunFolderError: the folder is missing, or holds only files written after the deletion. Its
            cause is the exception that the function raised.
    """
    if not paths.events.exists():
        failure: BaseException | None = None
        try:
            if paths.error_pickle.exists():
                raise_failure(paths)
        except BaseException as error:
            failure = error
        raise RunFolderError(
            f"the folder {paths.folder} was deleted during the run: its result is lost",
            allowed="a training function that deletes only its own files",
            do="find the code that deletes it (shutil.rmtree, rm -r), and launch again",
        ) from failure


def no_result(paths: RunPaths, job: RemoteJob | None) -> LaunchError:
    """Return the error of a run that has neither a last event nor a process.

    Args:
        paths: the run.
        job: its job on a cluster; None: it ran on this machine.

    Raises:
        RunFileError: its events cannot be read.
    """
    with reading(paths.events):
        if first_event(paths) is None:
            raise ValueError("it has no first event")
    if job is not None:
        return LaunchError(
            f"the job of the run {paths.run_id} has ended without a result: "
            f"{job.state().text}{last_lines(paths)}",
            allowed="a run that was cut off resumes from its last checkpoint",
            do="launch again (resume='auto' finds a run with a checkpoint); a time limit that "
            "is too short: cluster.time_limit",
        )
    return LaunchError(
        f"the supervisor process of the run {paths.run_id} died, and the ranks with it "
        "(usual cause: out of memory)",
        allowed="an interrupted run resumes from its last checkpoint",
        do="launch again (resume='auto' finds the run)",
    )


def _find_checkpoint(paths: RunPaths, recorded: str | None) -> Path | None:
    """Return the recorded checkpoint, even if the folder was moved or unpacked since.

    A bundle holds the best checkpoint of a finished run, not its last one.
    """
    if recorded is None:
        return None
    _, separator, name = recorded.rpartition(f"/{paths.checkpoints.name}/")
    if separator and (paths.checkpoints / name).exists():
        return paths.checkpoints / name
    best = sorted(paths.checkpoints.glob("best*"))
    return best[-1] if best else Path(recorded)
