"""Run a pipeline's notebooks in order, and skip steps with equal inputs (``nb.run_pipeline``)."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nbtoolkit.config.loading import Mistake, Overrides, dump, refuse
from nbtoolkit.environment.deadline import span
from nbtoolkit.errors import NbtoolkitError, NotebookFailed, PipelineError, PipelineFailed
from nbtoolkit.host import in_kernel
from nbtoolkit.notebooks.execution import Display
from nbtoolkit.notebooks.handle import published_text
from nbtoolkit.notebooks.job import require_extras
from nbtoolkit.notebooks.run import run_notebook
from nbtoolkit.pipeline.definition import (
    PIPELINE,
    Pipeline,
    Published,
    Step,
    load_pipeline,
    values_of,
)
from nbtoolkit.pipeline.folder import (
    PipelineFolder,
    RunOutcome,
    difference,
    inputs_of,
    without_own_files,
)
from nbtoolkit.run.paths import read_json
from nbtoolkit.text_table import html_columns

StepStatus = Literal["done", "skipped", "early"]
"""``early``: the step published a `status` that says that its work is not finished."""

# The values of a published `status` that mean that a step is done.
_FINISHED = ("completed", "pruned")


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The published values and the executed copy of a step."""

    name: str
    status: StepStatus
    reason: str
    """Why the step ran, or was skipped."""
    values: dict[str, Any]
    """Published values."""
    output: Path
    """The executed copy; HTML, record and log are beside it."""
    seconds: float
    """Duration of the run; for a skipped step, of its earlier run."""


@dataclass(frozen=True, kw_only=True, repr=False)
class PipelineResult:
    """The results of all steps; ``result["sweep"]`` is the result of the step ``sweep``.

    If a step fails, there is no result: :func:`nbtoolkit.run_pipeline` raises an error.
    """

    steps: dict[str, StepResult]
    """The results by the name of the step, up to the first step that ended early."""
    status: str
    """``"completed"``. If a step ended early, it is the ``status`` that the notebook of this step
    has passed to ``nb.publish``."""
    folder: Path
    seconds: float
    """The duration of this run of the pipeline."""

    def __getitem__(self, name: str) -> StepResult:
        return self.steps[name]

    @property
    def values(self) -> dict[str, dict[str, Any]]:
        """The published values of each step, by the name of the step."""
        return {name: step.values for name, step in self.steps.items()}

    def values_as_yaml(self) -> str:
        """Return the published values of all steps as YAML text."""
        return dump(self.values)

    def __repr__(self) -> str:
        steps = ", ".join(f"{step.name}: {step.status}" for step in self.steps.values())
        return f"PipelineResult({self.status}, {steps}, {span(self.seconds)}, {self.folder})"

    def _repr_html_(self) -> str:
        header = ("step", "", "time", "published", "executed copy")
        rows = [
            (
                step.name,
                step.status,
                span(step.seconds),
                published_text(step.values),
                str(step.output),
            )
            for step in self.steps.values()
        ]
        return html_columns(header, rows)


def run_pipeline(
    path: str | os.PathLike[str],
    *,
    overrides: Overrides | None = None,
    folder: str | os.PathLike[str] | None = None,
    again: Sequence[str] = (),
    html: bool = True,
    display: Display = "auto",
) -> PipelineResult:
    """Run a pipeline's notebooks; each one can use values that earlier notebooks published.

    A step is skipped if it was done before with equal inputs. The inputs of a step are the code of
    its notebook, its parameters, the YAML and JSON files that the code and the parameters name, and
    nbtoolkit's version. They also include the files in the step's setting ``files``, and the
    results of the steps in its setting ``after``. After a failure or a kill, the next call
    continues with the unfinished step. Launches and sweeps in this step resume from their own
    checkpoints.

    Args:
        path: a YAML file with ``steps`` (see docs/pipelines.md). If the path is relative, nbtoolkit
            looks for the file in the same folders as :func:`nbtoolkit.load_config`.
        overrides: parameters of steps, as ``{"sweep.n_trials": 5}`` or ``["sweep.n_trials=5"]``.
        folder: the folder of the pipeline; default: the ``folder`` that the file names, or
            ``outputs/<the file's name>``.
        again: the names of steps to run even if nothing has changed.
        html: whether to write the executed copies as HTML pages, too.
        display: how to show the progress. ``"auto"``: one line per step and cell, which is updated
            in a terminal. ``"text"``: one line per step and finished cell. ``"off"``: nothing.

    Returns:
        The results of the steps, in the order in which they ran.

    Raises:
        PipelineError: the file, an override, or a value that a step refers to is wrong.
        PipelineFailed: a step failed. The message has the command that continues the pipeline.
        NotebookError: the folder cannot be written, or another run writes to it.
        MissingExtra: papermill, or nbconvert for the page, is not installed.
    """
    require_extras(html)
    pipeline = load_pipeline(path, overrides, folder)
    names = [step.name for step in pipeline.steps]
    unknown = [name for name in again if name not in names]
    what, allowed = "there is no such step", ", ".join(names)
    refuse(
        [Mistake(place=f"again {name!r}", what=what, allowed=allowed) for name in unknown],
        PipelineError,
    )
    pipeline_folder = PipelineFolder(pipeline.folder)
    with pipeline_folder.lock():
        for name in again:
            pipeline_folder.forget(name)
        command = _command(path, overrides, folder)
        return _PipelineRun(pipeline, pipeline_folder, command, html, display).run()


@dataclass
class _PipelineRun:
    """One run of a pipeline."""

    pipeline: Pipeline
    folder: PipelineFolder
    command: str
    """The shell command that continues the pipeline."""
    html: bool
    display: Display
    results: dict[str, StepResult] = field(default_factory=dict)
    started_at: float = field(default_factory=time.monotonic)

    def run(self) -> PipelineResult:
        """Run or skip the steps in order, up to the first that ends early."""
        status = "completed"
        for step in self.pipeline.steps:
            result = self.results[step.name] = self._result_of(step)
            if result.status == "early":
                status = str(result.values["status"])
                self._print(f"{step.name} ended as {status}; to continue: {self.command}")
                break
        return PipelineResult(
            steps=self.results,
            status=status,
            folder=self.pipeline.folder,
            seconds=time.monotonic() - self.started_at,
        )

    def _result_of(self, step: Step) -> StepResult:
        published = self._published()
        values = values_of(step, published)
        inputs = inputs_of(step, values, published)
        record = self.folder.record(step.name)
        reason = difference(record["inputs"], inputs) if record else "not done before"
        number = f"[{len(self.results) + 1}/{len(self.pipeline.steps)}]"
        if record and not reason:
            self._print(f"{number} {step.name}: skipped, done with equal inputs")
            return self._result(step, "skipped", "done with equal inputs", record["result"])
        self._print(f"{number} {step.name}: {step.notebook.name} ({reason})")
        outcome = self._run_step(step, values)
        if _is_unfinished(outcome["values"]):
            return self._result(step, "early", reason, outcome)
        inputs = without_own_files(inputs, inputs_of(step, values, published))
        self.folder.write_record(step.name, {"inputs": inputs, "result": outcome})
        return self._result(step, "done", reason, outcome)

    def _run_step(self, step: Step, values: dict[str, Any]) -> RunOutcome:
        """Run a step's notebook.

        A notebook that published an unfinished status, and failed after that, has ended early.
        """
        self.folder.forget(step.name)
        self.folder.wait_for_leftovers(step.name)
        try:
            result = run_notebook(
                step.notebook,
                self.folder.files(step.name).copy,
                values,
                kernel=step.config.kernel,
                timeout=step.config.timeout,
                cell_timeout=step.config.cell_timeout,
                html=self.html,
                display=self.display,
            )
        except NotebookFailed as error:
            record = read_json(self.folder.files(step.name).record)
            if record is None or not _is_unfinished(record["values"]):
                raise self._failed(step, error) from error
            return {"values": record["values"], "seconds": record["seconds"]}
        except NbtoolkitError as error:
            raise self._failed(step, error) from error
        return {"values": result.values, "seconds": round(result.seconds, 3)}

    def _failed(self, step: Step, error: NbtoolkitError) -> PipelineFailed:
        names = [other.name for other in self.pipeline.steps]
        index = names.index(step.name)
        done, left = ", ".join(names[:index]) or "nothing", ", ".join(names[index:])
        copy = self.folder.files(step.name).copy
        look = f"look at {copy}, correct the cause, and run: " if copy.exists() else ""
        failed = PipelineFailed(
            f"the step {step.name!r} failed: {error.what}",
            allowed=error.allowed,
            do=f"{look}{self.command} (done: {done}; left: {left}; "
            "an unfinished launch or sweep in it resumes from its checkpoint)",
        )
        failed.step = step.name
        failed.cell, failed.output = getattr(error, "cell", 0), copy if copy.exists() else None
        return failed

    def _result(
        self, step: Step, status: StepStatus, reason: str, outcome: RunOutcome
    ) -> StepResult:
        output = self.folder.files(step.name).copy
        return StepResult(name=step.name, status=status, reason=reason, output=output, **outcome)

    def _published(self) -> Published:
        own = {"folder": str(self.pipeline.folder), "name": self.pipeline.path.stem}
        return {PIPELINE: own, **{name: result.values for name, result in self.results.items()}}

    def _print(self, text: str) -> None:
        if self.display != "off":
            print(text, file=sys.stdout if in_kernel(sys.modules) else sys.stderr, flush=True)


def _is_unfinished(values: Mapping[str, object]) -> bool:
    """Whether a notebook published a status other than that of a finished step."""
    return values.get("status", "completed") not in _FINISHED


def _command(path: object, overrides: Overrides | None, folder: object) -> str:
    """Return the shell command for a call."""
    words = ["nbtoolkit", "pipeline", str(path)]
    if isinstance(overrides, Mapping):
        overrides = [f"{name}={_in_shell(value)}" for name, value in overrides.items()]
    for override in [overrides] if isinstance(overrides, str) else overrides or ():
        words += ["-o", override]
    return shlex.join([*words, *(["--folder", str(folder)] if folder else [])])


def _in_shell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
