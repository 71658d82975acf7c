"""Run notebooks one after the other (``nb.run_pipeline``); equal inputs are not run again."""

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

from nbtoolkit.config.layers import Overrides
from nbtoolkit.config.yaml_source import Mistake, dump, refuse
from nbtoolkit.environment.deadline import span
from nbtoolkit.errors import NbtoolkitError, NotebookFailed, PipelineError, PipelineFailed
from nbtoolkit.host import in_kernel
from nbtoolkit.notebooks.progress import Display
from nbtoolkit.notebooks.run import require_extras, run_notebook
from nbtoolkit.pipeline.definition import OWN, Pipeline, Step
from nbtoolkit.pipeline.folder import PipelineFolder, difference, inputs_of, without_own
from nbtoolkit.pipeline.load import Published, load_pipeline, values_of
from nbtoolkit.run.paths import read_json
from nbtoolkit.text_table import html_columns

StepStatus = Literal["done", "skipped", "early"]
"""``early``: it published a `status` that says that there is more to do."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step published, and where its executed copy is."""

    name: str
    status: StepStatus
    reason: str
    """Why it was run, or skipped."""
    values: dict[str, Any]
    """What its notebook published."""
    output: Path
    """The executed copy; HTML, record and log lie beside it."""
    seconds: float
    """What its run took; of a skipped step, that run's."""


@dataclass(frozen=True, kw_only=True, repr=False)
class PipelineResult:
    """The results of all steps, by name: ``result["sweep"].values``.

    A pipeline whose step fails has no result: :func:`nbtoolkit.run_pipeline` raises.
    """

    steps: dict[str, StepResult]
    """In the order they were run; after one that ended early there are no more."""
    status: str
    """``"completed"``, or the status that a step published (``"deadline"``, ``"stopped"``)."""
    folder: Path
    seconds: float
    """Of this run."""

    def __getitem__(self, name: str) -> StepResult:
        return self.steps[name]

    @property
    def values(self) -> dict[str, dict[str, Any]]:
        """What the steps published, by step."""
        return {name: step.values for name, step in self.steps.items()}

    def values_as_yaml(self) -> str:
        """The same as YAML text."""
        return dump(self.values)

    def __repr__(self) -> str:
        steps = ", ".join(f"{step.name}: {step.status}" for step in self.steps.values())
        return f"PipelineResult({self.status}, {steps}, {span(self.seconds)}, {self.folder})"

    def _repr_html_(self) -> str:
        header = ("step", "", "time", "published", "executed copy")
        rows = [
            (step.name, step.status, span(step.seconds), _short(step.values), str(step.output))
            for step in self.steps.values()
        ]
        return html_columns(header, rows)


def _short(values: dict[str, Any]) -> str:
    plain = {name: value for name, value in values.items() if not isinstance(value, (dict, list))}
    text = ", ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in plain.items()
    )
    return text if len(text) <= 120 else f"{text[:117]}..."


_THROUGH = ("completed", "pruned")
"""What a step may publish as its `status` when it is done."""


def run_pipeline(
    path: str | os.PathLike[str],
    *,
    overrides: Overrides | None = None,
    folder: str | os.PathLike[str] | None = None,
    again: Sequence[str] = (),
    html: bool = True,
    display: Display = "auto",
) -> PipelineResult:
    """Run a pipeline's notebooks, each with what the ones before it published.

    A step is skipped when it was done with equal inputs: its notebook's code, its parameters as
    resolved, the settings files these name and those under ``files``, nbtoolkit's version. Run
    again after a failure or a kill it goes on with the step that was not done; launches and
    sweeps in that one go on from their own checkpoints.

    Args:
        path: a YAML file with ``steps`` (see docs/pipelines.md), found as
            :func:`nbtoolkit.load_config` finds its.
        overrides: parameters of steps: ``{"sweep.n_trials": 5}`` or ``["sweep.n_trials=5"]``.
        folder: where everything goes; default: the file's ``folder``, else
            ``outputs/<the file's name>``.
        again: steps to be run though nothing has changed.
        html: whether executed copies are written as pages too.
        display: a line for each step and cell: ``"auto"`` (live on a terminal), ``"text"``,
            ``"off"``.

    Returns:
        The steps' results, in the order they were run.

    Raises:
        PipelineError: the file, an override, or a value that a step refers to is wrong.
        PipelineFailed: a step did not come to its end; it names the command that goes on.
        NotebookError: the folder cannot be written, or another run writes to it.
        MissingExtra: papermill, or nbconvert for the page, is not installed.
    """
    require_extras(html)
    pipeline = load_pipeline(path, overrides, folder)
    _refuse_unknown(again, pipeline)
    place = PipelineFolder(pipeline.folder)
    with place.lock():
        for name in again:
            place.forget(name)
        run = _Run(pipeline, place, _command(path, overrides, folder), html, display)
        return run.to_the_end()


@dataclass
class _Run:
    """A pipeline on its way."""

    pipeline: Pipeline
    place: PipelineFolder
    command: str
    """The shell command that goes on with it."""
    html: bool
    display: Display
    results: dict[str, StepResult] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)

    def to_the_end(self) -> PipelineResult:
        """Run what is not done, one step after the other; to the first that ends early."""
        status = "completed"
        for step in self.pipeline.steps:
            result = self.results[step.name] = self._result_of(step)
            if result.status == "early":
                status = str(result.values["status"])
                self._say(f"{step.name} ended as {status}; to go on: {self.command}")
                break
        return PipelineResult(
            steps=self.results,
            status=status,
            folder=self.pipeline.folder,
            seconds=time.monotonic() - self.begun,
        )

    def _result_of(self, step: Step) -> StepResult:
        published = self._published()
        values = values_of(step, published)
        inputs = inputs_of(step, values, published)
        before = self.place.record(step.name)
        why = difference(before["inputs"], inputs) if before else "not done before"
        if before and not why:
            self._say(f"{self._number(step)} {step.name}: skipped, done with equal inputs")
            return self._result(step, "skipped", "done with equal inputs", **before["result"])
        self._say(f"{self._number(step)} {step.name}: {step.notebook.name} ({why})")
        result = self._run(step, values)
        if _more_to_do(result["values"]):
            return self._result(step, "early", why, **result)
        inputs = without_own(inputs, inputs_of(step, values, published))
        self.place.write_record(step.name, {"inputs": inputs, "result": result})
        return self._result(step, "done", why, **result)

    def _run(self, step: Step, values: dict[str, Any]) -> dict[str, Any]:
        """What a step published, and its seconds.

        One that fails after it has published that its time was up had nothing more to show.
        """
        self.place.forget(step.name)
        self.place.wait_for_leftovers(step.name)
        try:
            ended = run_notebook(
                step.notebook,
                self.place.files(step.name).copy,
                values,
                kernel=step.sweep_config.kernel,
                timeout=step.sweep_config.timeout,
                cell_timeout=step.sweep_config.cell_timeout,
                html=self.html,
                display=self.display,
            )
        except NotebookFailed as error:
            record = read_json(self.place.files(step.name).record)
            if record is None or not _more_to_do(record["values"]):
                raise self._failed(step, error) from error
            return {"values": record["values"], "seconds": record["seconds"]}
        except NbtoolkitError as error:
            raise self._failed(step, error) from error
        return {"values": ended.values, "seconds": round(ended.seconds, 3)}

    def _failed(self, step: Step, error: NbtoolkitError) -> PipelineFailed:
        steps = [one.name for one in self.pipeline.steps]
        at = steps.index(step.name)
        copy = self.place.files(step.name).copy
        look = f"look at {copy}; when that is mended: " if copy.exists() else ""
        failed = PipelineFailed(
            f"the step {step.name!r} failed: {error.what}",
            allowed=error.allowed,
            do=f"{look}{self.command} (done: {_listed(steps[:at])}; left: {_listed(steps[at:])}; "
            "an unfinished launch or sweep in it goes on from its checkpoint)",
        )
        failed.step = step.name
        failed.cell, failed.output = getattr(error, "cell", 0), copy if copy.exists() else None
        return failed

    def _result(self, step: Step, status: StepStatus, reason: str, **result: Any) -> StepResult:
        output = self.place.files(step.name).copy
        return StepResult(name=step.name, status=status, reason=reason, output=output, **result)

    def _published(self) -> Published:
        own = {"folder": str(self.pipeline.folder), "name": self.pipeline.path.stem}
        return {OWN: own, **{name: result.values for name, result in self.results.items()}}

    def _number(self, step: Step) -> str:
        return f"[{len(self.results) + 1}/{len(self.pipeline.steps)}]"

    def _say(self, text: str) -> None:
        if self.display != "off":
            print(text, file=sys.stdout if in_kernel(sys.modules) else sys.stderr, flush=True)


def _more_to_do(values: Mapping[str, Any]) -> bool:
    """Whether a notebook published a status that is none of an end."""
    return values.get("status", "completed") not in _THROUGH


def _command(path: object, overrides: Overrides | None, folder: object) -> str:
    """The shell command for a call."""
    words = ["nbtoolkit", "pipeline", str(path)]
    if isinstance(overrides, Mapping):
        overrides = [f"{name}={_in_shell(value)}" for name, value in overrides.items()]
    for wish in [overrides] if isinstance(overrides, str) else overrides or ():
        words += ["-o", wish]
    return shlex.join([*words, *(["--folder", str(folder)] if folder else [])])


def _in_shell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _refuse_unknown(again: Sequence[str], pipeline: Pipeline) -> None:
    names = [step.name for step in pipeline.steps]
    wrong = [
        Mistake(place=f"again {name!r}", what="there is no such step", allowed=", ".join(names))
        for name in again
        if name not in names
    ]
    refuse(wrong, PipelineError)


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "nothing"
