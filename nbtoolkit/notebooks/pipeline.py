"""Run notebooks in order, and skip steps that are done (``nb.run_pipeline``).

<folder>/
pipeline.lock          locked (flock) while the pipeline runs
steps/<step>.ipynb     executed copy; .html, .run.json and .run.log are beside it
steps/<step>.done.json hash of the inputs, and published values; only of steps that are done
...                    files that the notebooks write: they are given ${pipeline.folder}

In a record the folder itself is written as `${pipeline.folder}`. It may be moved, or packed on one
machine and unpacked on another, and its steps are still done.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from nbtoolkit.cards import Card, Table, html
from nbtoolkit.config.loading import Mistake, Overrides, dump, places_to_look, refuse
from nbtoolkit.environment.deadline import span
from nbtoolkit.environment.resources import try_lock
from nbtoolkit.errors import (
    NbtoolkitError,
    NotebookError,
    NotebookFailed,
    PipelineError,
    PipelineFailed,
)
from nbtoolkit.host import in_kernel
from nbtoolkit.notebooks.handle import NotebookFiles, published_text
from nbtoolkit.notebooks.pipeline_file import (
    PIPELINE,
    Pipeline,
    Published,
    Step,
    load_pipeline,
    values_of,
)
from nbtoolkit.notebooks.run import Display, require_packages, run_notebook
from nbtoolkit.run.attempts import readable_first_event
from nbtoolkit.run.paths import RunPaths, read_or_empty, runs_in, write_whole
from nbtoolkit.version import __version__

StepStatus = Literal["done", "skipped", "early"]
"""``early``: the step published a `status` that says that its work is not finished."""

# The values of a published `status` that mean that a step is done.
_FINISHED = ("completed", "pruned")

_FOLDER = "${pipeline.folder}"

_NAMED_FILE = re.compile(r"""["']([^"'\n]+\.(?:ya?ml|json))["']""")

# A kernel and a run's supervisor end by themselves after their parent has ended. A step that does
# not wait for them starts its runs from the beginning. On a quiet machine a kernel ends after 1 s
# (it checks once a second whether its parent is alive), a supervisor 2 s after its kernel; tracking
# may take longer.
_LEFTOVER_SECONDS = 180.0


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
        return html([Card("", [Table(header, rows)], span=4)])


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
    require_packages(html)
    started_at = time.monotonic()
    pipeline = load_pipeline(path, overrides, folder)
    _refuse_unknown(again, [step.name for step in pipeline.steps])
    run = _PipelineRun(pipeline, _command(path, overrides, folder), html, display)
    status = "completed"
    with _locked(pipeline.folder):
        for name in again:
            run.forget(name)
        for step in pipeline.steps:
            result = run.results[step.name] = run.result_of(step)
            if result.status == "early":
                status = str(result.values["status"])
                run.say(f"{step.name} ended as {status}; to continue: {run.command}")
                break
    seconds = time.monotonic() - started_at
    return PipelineResult(steps=run.results, status=status, folder=pipeline.folder, seconds=seconds)


class _Outcome(TypedDict):
    """Published values of a step, and the duration of its run."""

    values: dict[str, Any]
    seconds: float


class _StepRecord(_Outcome):
    """The record of a step that is done."""

    hash: str
    """Of its inputs."""
    settings: list[str]
    """Names of the settings files among the inputs."""


@dataclass
class _PipelineRun:
    """One run of a pipeline: its arguments, and the results so far."""

    pipeline: Pipeline
    command: str
    """The shell command that continues the pipeline."""
    html: bool
    display: Display
    results: dict[str, StepResult] = field(default_factory=dict)

    def result_of(self, step: Step) -> StepResult:
        """Run a step, or skip it if it is done with the same inputs."""
        published = self._published()
        values = values_of(step, published)
        inputs = _inputs_of(step, values, published)
        settings = _settings_files(step, values)
        number = f"[{len(self.results) + 1}/{len(self.pipeline.steps)}] {step.name}"
        record = self._record(step)
        if record and self._is_same(record, inputs, settings):
            reason = "done with the same inputs"
            self.say(f"{number}: skipped, {reason}")
            return self._result(step, "skipped", reason, record)
        reason = "its inputs have changed" if record else "not done before"
        self.say(f"{number}: {step.notebook.name} ({reason})")
        outcome = self._run(step, values)
        if not _is_finished(outcome["values"]):
            return self._result(step, "early", reason, outcome)
        # A settings file that the step itself has written is no input.
        after = _settings_files(step, values)
        kept = {name: each for name, each in settings.items() if after.get(name) == each}
        record = {**outcome, "hash": self._hash(inputs, kept), "settings": [*kept]}
        with _writing(self.pipeline.folder):
            text = json.dumps(record, default=_plain, indent=1)
            write_whole(self._done(step.name), self._without_folder(text))
        return self._result(step, "done", reason, outcome)

    def _run(self, step: Step, values: dict[str, Any]) -> _Outcome:
        """Run a step's notebook; return its values and its duration.

        A notebook that published an unfinished status, and failed after that, has ended early.
        """
        files = self._files(step.name)
        started_at = time.monotonic()
        self.forget(step.name)
        _wait_for_leftovers(files, self.pipeline.folder)
        try:
            values = run_notebook(
                step.notebook,
                files.copy,
                values,
                kernel=step.settings.kernel,
                timeout=step.settings.timeout,
                cell_timeout=step.settings.cell_timeout,
                html=self.html,
                display=self.display,
            ).values
        except NbtoolkitError as error:
            ran = isinstance(error, NotebookFailed)
            published = read_or_empty(files.record).get("values") if ran else None
            if not isinstance(published, dict) or _is_finished(published):
                raise self._failed(step, error) from error
            values = published
        return {"values": values, "seconds": round(time.monotonic() - started_at, 3)}

    def _result(self, step: Step, status: StepStatus, reason: str, outcome: _Outcome) -> StepResult:
        return StepResult(
            name=step.name,
            status=status,
            reason=reason,
            values=outcome["values"],
            output=self._files(step.name).copy,
            seconds=outcome["seconds"],
        )

    def _failed(self, step: Step, error: NbtoolkitError) -> PipelineFailed:
        names = [other.name for other in self.pipeline.steps]
        index = names.index(step.name)
        done = ", ".join(names[:index]) or "nothing"
        left = ", ".join(names[index:])
        copy = self._files(step.name).copy
        look = f"look at {copy}, correct the cause, and run: " if copy.exists() else ""
        failed = PipelineFailed(
            f"the step {step.name!r} failed: {error.what}",
            allowed=error.allowed,
            do=f"{look}{self.command} (done: {done}; left: {left}; "
            "an unfinished launch or sweep in it resumes from its checkpoint)",
        )
        failed.step = step.name
        failed.cell = getattr(error, "cell", 0)
        failed.output = copy if copy.exists() else None
        return failed

    def _published(self) -> Published:
        pipeline = {"folder": str(self.pipeline.folder), "name": self.pipeline.path.stem}
        return {PIPELINE: pipeline, **{name: step.values for name, step in self.results.items()}}

    def _hash(self, inputs: str, settings: Mapping[str, str]) -> str:
        text = self._without_folder(f"{inputs} {json.dumps(settings, sort_keys=True)}")
        return hashlib.sha256(text.encode()).hexdigest()

    def _is_same(self, record: _StepRecord, inputs: str, settings: Mapping[str, str]) -> bool:
        """Whether a step is done with these inputs."""
        counted = {name: settings.get(name, "") for name in record["settings"]}
        return record["hash"] == self._hash(inputs, counted)

    def say(self, text: str) -> None:
        """Print a line on the progress."""
        if self.display != "off":
            print(text, file=sys.stdout if in_kernel(sys.modules) else sys.stderr, flush=True)

    def forget(self, step: str) -> None:
        """Record that a step is not done."""
        with _writing(self.pipeline.folder):
            self._done(step).unlink(missing_ok=True)

    def _record(self, step: Step) -> _StepRecord | None:
        """Return the record of a step; None if the step is not done."""
        try:
            text = self._done(step.name).read_text(encoding="utf-8")
            record = json.loads(text.replace(_FOLDER, _in_json(self.pipeline.folder)))
            complete: _StepRecord = {key: record[key] for key in _StepRecord.__annotations__}  # type: ignore[assignment]
        except (OSError, ValueError, KeyError, TypeError):  # cut short by a crash of the machine
            return None
        return complete if self._files(step.name).copy.exists() else None

    def _without_folder(self, text: str) -> str:
        return text.replace(_in_json(self.pipeline.folder), _FOLDER)

    def _files(self, step: str) -> NotebookFiles:
        """Return the executed copy of a step, and the files beside it."""
        return NotebookFiles(self.pipeline.folder / "steps" / f"{step}.ipynb")

    def _done(self, step: str) -> Path:
        return self.pipeline.folder / "steps" / f"{step}.done.json"


def _is_finished(values: Mapping[str, object]) -> bool:
    """Whether a notebook published no status, or that of a finished step."""
    return values.get("status", "completed") in _FINISHED


def _refuse_unknown(again: Sequence[str], names: Sequence[str]) -> None:
    problem = "there is no such step"
    allowed = ", ".join(names)
    wrong = [
        Mistake(place=f"again {name!r}", what=problem, allowed=allowed)
        for name in again
        if name not in names
    ]
    refuse(wrong, PipelineError)


def _inputs_of(step: Step, values: object, published: Published) -> str:
    """Return what decides a step's result, but for the settings files, as one text."""
    after = [published[name] for name in step.settings.after]
    inputs = [step.code, values, _file_hashes(step), after, __version__]
    return json.dumps(inputs, sort_keys=True, default=_plain)


def _settings_files(step: Step, values: Mapping[str, object]) -> dict[str, str]:
    """Return the hashes of the YAML and JSON files that parameters or code name."""
    texts = [value for value in values.values() if isinstance(value, str)]
    named = [text for text in texts if text.endswith((".yaml", ".yml", ".json"))]
    hashes = {}
    for name in dict.fromkeys([*named, *_NAMED_FILE.findall(step.code)]):
        existing = (path for path in places_to_look(Path(name).expanduser()) if path.is_file())
        if path := next(existing, None):
            hashes[name] = _hash_of(path)
    return hashes


def _file_hashes(step: Step) -> dict[str, str]:
    """Return the hashes of the files that match the patterns in ``files``.

    Raises:
        PipelineError: no file matches a pattern.
    """
    hashes = {}
    for pattern in step.settings.files:
        names = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
        matching = {name: _hash_of(Path(name)) for name in names if Path(name).is_file()}
        if not matching:
            raise PipelineError(
                f"{step.place('files')}: there is no file {pattern!r}",
                allowed="files or patterns (src/**/*.py), relative to the working directory",
            )
        hashes.update(matching)
    return hashes


def _hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _plain(value: object) -> object:
    """Return a set as a sorted list, another object as a text."""
    return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else str(value)


def _in_json(folder: Path) -> str:
    """Return a folder as it is written inside a text of JSON."""
    return json.dumps(str(folder))[1:-1]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the pipeline's lock.

    Raises:
        NotebookError: another run holds the lock, or the folder cannot be written.
    """
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "pipeline.lock", "w")  # noqa: SIM115 - closed below
    with file:
        if not try_lock(file.fileno()):
            raise NotebookError(
                f"another run of a pipeline writes to {folder}",
                allowed="one run per folder at a time",
                do="wait until it ends, or choose another folder: folder='...', "
                "--folder in a shell",
            )
        yield


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotebookError(
            f"the pipeline's folder {folder} cannot be written: {error.strerror or error}",
            allowed="a folder on a disk with free space that you may write to",
            do="free some space, or choose another folder: folder='...', --folder in a shell",
        ) from error


def _wait_for_leftovers(files: NotebookFiles, folder: Path) -> None:
    """Wait until the kernel of a killed run, and its launches, have ended by themselves.

    A launch resumes an unfinished run only if no supervisor owns that run.
    """
    deadline = time.monotonic() + _LEFTOVER_SECONDS
    while time.monotonic() < deadline:
        if not files.running() and not any(map(_ends_soon, runs_in(folder))):
            return
        time.sleep(0.1)


def _ends_soon(run: RunPaths) -> bool:
    """Whether a supervisor owns a run, and ends with the kernel that launched the run."""
    first = readable_first_event(run)
    return run.owned() and not (first is not None and first.detached)


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
