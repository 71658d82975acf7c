"""Read the result of a sweep, show its progress as lines, and control a running search."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from nbtoolkit.config.loading import read_layer
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import LaunchError, RunFileError, SweepError
from nbtoolkit.launcher.run_handle import RunHandle
from nbtoolkit.launcher.run_result import result_of
from nbtoolkit.run.attempts import run_config
from nbtoolkit.run.events import Event, EventReader, NoteAdded, StopRequested, TrialChanged
from nbtoolkit.run.output import MAX_BYTES, Screen, charts, displays, to_stdout
from nbtoolkit.run.paths import RunPaths, Status, reading, write_json, write_whole
from nbtoolkit.search.study.importance import importance
from nbtoolkit.search.study.sweep_config import SweepConfig
from nbtoolkit.search.study.table import ENDED, EventTable
from nbtoolkit.wire.messages import SearchCommand

if TYPE_CHECKING:
    import optuna
    import pandas as pd

    from nbtoolkit.views.figure import Chart


STUDY_FILE = "study.jsonl"

Result = TypeVar("Result")


class SweepResult:
    """The result of a sweep.

    Attributes:
        status: ``"completed"``, or the reason why the sweep ended early: ``"stopped"`` or
            ``"deadline"``.
        paths: the folder of the sweep; its subfolder ``trials`` contains the runs of the trials.
        seconds: wall time of the last session.
        best_value: the value of the best trial. None if no trial is complete, or if there are
            several metrics.
        best_trial: the number of the best trial; None if there is none.
        shared_files: files outside the trials' folders that several jobs have written.
    """

    def __init__(self, paths: RunPaths) -> None:
        ended = result_of(paths, "sweep")
        self.paths = paths
        self.status = cast("Status", ended.status)
        self.seconds = ended.seconds or 0.0
        self.summary = ended.summary
        with reading(paths.events):
            self.best_value: float | None = self.summary["best_value"]
            self.best_trial: int | None = self.summary["best"]
            self.shared_files: list[str] = self.summary.get("shared_files", [])

    @property
    def best_params(self) -> dict[str, Any]:
        """The parameters of the best trial, by dotted name; empty if there is none.

        Raises:
            SweepError: there are several metrics, which have no single best trial.
        """
        if self.summary["front"] is not None:
            raise self._several_best()
        return self.summary["best_params"] or {}

    @property
    def best_config(self) -> Config:
        """The base configuration with the parameters of the best trial, for ``nb.launch``.

        Raises:
            SweepError: there is no best trial.
        """
        if self.summary["front"] is not None:
            raise self._several_best()
        if self.best_trial is None:
            reason = self.summary.get("infeasible") or "no trial is complete"
            raise SweepError(
                f"the sweep {self.paths.run_id} has no best trial: {reason}",
                allowed="a best configuration, once a complete trial meets all constraints",
                do="look at .trials for the reasons of all trials",
            )
        return self.config.with_overrides(self.best_params)

    def _several_best(self) -> SweepError:
        metrics = ", ".join(self.sweep_config.metrics)
        front = ", ".join(map(str, self.summary["front"])) or "none"
        return SweepError(
            f"the sweep {self.paths.run_id} has several metrics ({metrics}) and no single best "
            "trial",
            allowed=f"a trial of the Pareto front: {front}",
            do="choose one of them, and take its parameters from result.trials.loc[number]",
        )

    @cached_property
    def config(self) -> Config:
        """The base configuration of all trials."""
        return run_config(self.paths)

    @cached_property
    def sweep_config(self) -> SweepConfig:
        """The settings of the sweep, from the file ``sweep.yaml`` in its folder."""
        return read_sweep_config(self.paths.folder)

    @cached_property
    def study(self) -> optuna.Study:
        """The Optuna study, read-only; its file is ``study.jsonl`` in the folder of the sweep."""
        from nbtoolkit.search.study.study import read_study

        file = self.paths.folder / STUDY_FILE
        with reading(file):
            return read_study(file)

    @property
    def trials(self) -> pd.DataFrame:
        """A table with one row per trial, indexed by the number of the trial.

        The columns are ``state``, ``value`` (or one column per metric if there are several), one
        column per parameter, ``seconds``, ``reason`` and ``folder``.
        """
        import pandas as pd

        rows = {}
        for event in self._events():
            if isinstance(event, TrialChanged):
                rows[event.number] = self._row(event)
        if not rows:
            return pd.DataFrame(columns=["state", "value", "seconds", "reason", "folder"])
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("trial").sort_index()

    def _events(self) -> list[Event]:
        """Read the sweep's events; trials that the events have lost come from the study."""
        try:
            events = list(EventReader(self.paths.events).read())
        except RunFileError:
            events = []
        with reading(self.paths.events):
            count = sum(self.summary["counts"].values())
        trials = (event for event in events if isinstance(event, TrialChanged))
        recorded = {trial.number for trial in trials if trial.state in ENDED}
        if len(recorded) >= count:
            return events
        from nbtoolkit.search.study.study import ended_trials

        ended = ended_trials(self.study, self.sweep_config.make_space())
        lost = [trial for trial in ended if trial.number not in recorded]
        return [*events, *(replace(trial, best=trial.number == self.best_trial) for trial in lost)]

    def _row(self, event: TrialChanged) -> dict[str, Any]:
        metrics = self.sweep_config.metrics
        values = event.values
        several = dict(zip(metrics, values, strict=True)) if len(values) == len(metrics) > 1 else {}
        shown: Mapping[str, float | None] = several or {"value": event.value}
        rest = {"seconds": event.seconds, "reason": event.reason, "folder": event.folder}
        return {"state": event.state, **shown, **event.params, **rest}

    def save_best(self, path: str | os.PathLike[str]) -> Path:
        """Write the best configuration as a YAML file that ``nb.load_config`` can read.

        Raises:
            SweepError: there is no best trial.
        """
        file = Path(path)
        write_whole(file, self.best_config.to_yaml())
        return file

    def plot_history(self) -> Chart:
        """Draw the value of each trial, and the best value so far."""
        return charts().result_chart(self.paths, "history")

    def plot_importances(self) -> Chart:
        """Draw the importance of each parameter.

        Raises:
            SweepError: fewer than ten trials are complete, or all have the same value.
            MissingExtra: scikit-learn is not installed.
        """
        maximize = self.sweep_config.directions[0] == "maximize"
        importances = importance(self.study.get_trials(deepcopy=False), maximize=maximize)
        return charts().importance_chart(importances, self.sweep_config.metrics[0])

    def plot_slices(self) -> Chart:
        """Draw the value of the trials against each parameter."""
        return charts().result_chart(self.paths, "slices")

    def __repr__(self) -> str:
        best = "none" if self.best_value is None else f"{self.best_value:.6g}"
        shared = f", several jobs wrote {', '.join(self.shared_files)}" if self.shared_files else ""
        return f"SweepResult({self.status}, best={best}, {self.paths.folder}{shared})"

    def _repr_html_(self) -> str:
        return displays().static(self.paths)


def read_sweep_config(folder: Path) -> SweepConfig:
    """Read a sweep's settings, the ``sweep.yaml`` in its folder.

    Raises:
        RunFileError: it cannot be read.
    """
    file = folder / "sweep.yaml"
    with reading(file):
        return SweepConfig.model_validate(read_layer(file).values)


class TableLines:
    """Prints lines while a thread waits for a search.

    Args:
        table: receives the events.
        screen: ``"lines"`` prints each trial or fold that ends, ``"html"`` notes only, and
            ``"off"`` nothing.
        since: unix seconds; earlier events belong to earlier sessions and are not printed again.
    """

    def __init__(self, table: EventTable, screen: Screen, *, since: float = 0.0) -> None:
        self.table = table
        self._since = since
        self._on = screen.shape != "off"
        self._each = screen.shape == "lines"
        self._written = 0

    def open(self, *, waits: bool) -> None:
        """Do nothing: lines are printed as events arrive."""

    def event(self, event: Event) -> None:
        """Print what an event says."""
        self.table.update(event)
        if event.t < self._since:
            return
        if isinstance(event, NoteAdded):
            self.say(("warning: " if event.level == "warning" else "") + event.text)
        elif isinstance(event, StopRequested):
            self.say(f"stopping: {event.reason}")
        elif self._each and (line := self.table.line(event)):
            self.say(line)

    def say(self, text: str) -> None:
        """Print a line."""
        if self._on and self._written <= MAX_BYTES:
            self._written += len(text)
            to_stdout(text + "\n")

    def pump(self) -> None:
        """Do nothing: lines are printed as events arrive."""

    def close(self) -> None:
        """Show what is still buffered."""
        if self._on:
            to_stdout("", flush=True)


class SearchHandle(RunHandle, Generic[Result]):
    """A running search.

    Args:
        paths: its folder.
        make_result: reads the result from the folder.
        options: the options of :class:`~nbtoolkit.launcher.run_handle.RunHandle`.
    """

    def __init__(
        self, paths: RunPaths, make_result: Callable[[RunPaths], Result], **options: Any
    ) -> None:
        super().__init__(paths, **options)
        self._make_result = make_result

    def pause(self) -> None:
        """Finish the running jobs and start no others until :meth:`resume`."""
        self._command(SearchCommand(op="pause"))

    def resume(self) -> None:
        """Continue after :meth:`pause`."""
        self._command(SearchCommand(op="resume"))

    def result(self, timeout: float | None = None) -> Result:  # type: ignore[override] # of many runs
        """Wait for the end of the search and return its result.

        Args:
            timeout: seconds to wait; None for no limit.

        Returns:
            The ``SweepResult`` or ``CVResult``.

        Raises:
            TimeoutError: the search has not ended yet (it continues).
            KeyboardInterrupt: the wait was interrupted; the running jobs have stopped.
            NbtoolkitError: the search failed.
            Exception: what the training function raised in a fold, with its own type.
        """
        __tracebackhide__ = True
        return cast(Result, super().result(timeout))

    def _command(self, command: SearchCommand) -> None:
        if self._line is None or not self._line.send(command):
            if self.done():
                raise LaunchError(
                    f"cannot {command.op} {self.paths.run_id}: it has ended",
                    allowed="a running search",
                    do="start it again with resume=<its folder>",
                )
            file = self.paths.commands / f"{time.time_ns()}.json"
            write_json(file, vars(command), durable=False)

    def _read_result(self) -> Any:
        return self._make_result(self.paths)


class SweepHandle(SearchHandle[SweepResult]):
    """A handle of a sweep, from ``nb.sweep(wait=False)`` or ``nb.attach(folder)``.

    It also has the methods of :class:`nbtoolkit.RunHandle`, and ``pause()`` and ``resume()``.
    """

    def stop_trial(self, number: int) -> None:
        """Stop the trial with this number at its next report. The sweep continues."""
        self._command(SearchCommand(op="stop_trial", n=int(number)))

    def add_trials(self, count: int) -> None:
        """Add trials to the sweep, as many as ``count`` says."""
        self._command(SearchCommand(op="add_trials", n=int(count)))
