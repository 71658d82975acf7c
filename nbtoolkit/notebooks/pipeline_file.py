"""Read a pipeline's file, check it before anything runs, and resolve its references."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from nbtoolkit.config.fields import Seconds
from nbtoolkit.config.loading import (
    Keys,
    Layer,
    Mistake,
    Overrides,
    file_layer,
    places_to_look,
    refuse,
)
from nbtoolkit.errors import NbtoolkitError, NotebookError, PipelineError
from nbtoolkit.notebooks.document import (
    declared_parameters,
    numbered,
    read_notebook,
    refuse_syntax_errors,
)
from nbtoolkit.notebooks.parameters import FromShell, Parameter, typed_parameters
from nbtoolkit.text_table import did_you_mean

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

PIPELINE = "pipeline"
"""Name of the pipeline itself in references: `${pipeline.folder}`."""

_PIPELINE_VALUES = ("folder", "name")

_REFERENCE = re.compile(r"\$(\$?)\{([^{}]*)\}")

Published = Mapping[str, Mapping[str, object]]
"""Published values: step -> name -> value."""


class StepSettings(BaseModel):
    """The settings of one step in a pipeline's file."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    notebook: str
    """The notebook: beside the pipeline's file, else found like a configuration file."""
    parameters: dict[str, Any] = {}
    """Name -> value, for names that its ``parameters`` cell assigns; `${step.name}` refers."""
    after: tuple[str, ...] = ()
    """Steps that must be done before this one, without a reference to them."""
    files: tuple[str, ...] = ()
    """Files or patterns (`src/**/*.py`); the step runs again when one of them changes."""
    kernel: str | None = None
    """Name of the kernel spec; null: the notebook's own."""
    timeout: Seconds | None = None
    """Time limit of the whole notebook, such as 90s, 30m or 1h30m; null: no limit."""
    cell_timeout: Seconds | None = None
    """Time limit of each cell, such as 90s, 30m or 1h30m; null: no limit."""

    @field_validator("after", "files", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True)
class Step:
    """A checked step: a notebook and its parameters."""

    name: str
    notebook: Path
    code: str
    """The code of all cells."""
    declared: Mapping[str, Parameter]
    """The notebook's parameters."""
    settings: StepSettings
    layer: Layer
    """The file, with the place of each setting."""

    @property
    def needs(self) -> set[str]:
        """The steps that must be done before this one."""
        referenced = {text.partition(".")[0] for text in references(self.settings.parameters)}
        return (referenced | set(self.settings.after)) - {PIPELINE}

    def place(self, *keys: str) -> str:
        """Return file and line of a setting; if it is not written, of the step."""
        return _place(self.layer, ("steps", self.name, *keys))


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Steps in the order in which they run."""

    path: Path
    folder: Path
    """Folder for everything that the pipeline writes."""
    steps: tuple[Step, ...]


def references(value: object) -> list[str]:
    """Return the references in a parameter's value, also in lists and dicts: ``sweep.best``."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return [match[2].strip() for match in _REFERENCE.finditer(text) if not match[1]]


def resolve(value: object, published: Published) -> object:
    """Replace the references in a parameter's value.

    A reference that is the whole value keeps its type; within a text it becomes part of the text.
    `$${...}` stands for the characters `${...}`.

    Raises:
        PipelineError: a value was not published, or is part of a text and is a list or a dict.
    """
    if isinstance(value, Mapping):
        return {name: resolve(item, published) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [resolve(item, published) for item in value]
    if not isinstance(value, str):
        return value
    whole = _REFERENCE.fullmatch(value.strip())
    if whole and not whole[1]:
        return _look_up(whole[2], published)

    def replacement(match: re.Match[str]) -> str:
        if match[1]:
            return match[0][1:]
        part = _look_up(match[2], published)
        if not isinstance(part, (str, int, float, bool)):
            problem = f"{match[0]}: a {type(part).__name__} cannot be part of a text"
            raise PipelineError(problem, do="make the reference the whole value")
        return str(part)

    # The type of the text: a FromShell text stays one.
    return type(value)(_REFERENCE.sub(replacement, value))


def _look_up(reference: str, published: Published) -> object:
    """Return the value of a reference.

    `sweep.best.optim.lr` finds ``{"optim": {"lr": ...}}`` as well as ``{"optim.lr": ...}``.
    """
    step, *names = reference.strip().split(".")
    value: object = published[step]
    while names:
        known = value if isinstance(value, Mapping) else {}
        prefixes = [".".join(names[:length]) for length in range(len(names), 0, -1)]
        name = next((prefix for prefix in prefixes if prefix in known), None)
        if name is None:
            raise PipelineError(
                f"${{{reference}}}: the step {step!r} published no {names[0]!r}",
                allowed=", ".join(known) or "nothing: it published nothing",
                do=did_you_mean(names[0], known),
            )
        value = known[name]
        names = names[name.count(".") + 1 :]
    return value


def values_of(step: Step, published: Published) -> dict[str, Any]:
    """Return the values of a step's parameters, with references resolved.

    Args:
        step: a step; all steps that it needs are done.
        published: published values of the steps before it.

    Raises:
        PipelineError: a step did not publish the value, or published one of another type.
    """
    values, mistakes = _check_values(step, published)
    refuse(mistakes, PipelineError)
    return values


def _check_values(step: Step, published: Published | None) -> tuple[dict[str, Any], list[Mistake]]:
    """Return the valid values of a step's parameters, and the mistakes in the others.

    Without published values, before any step runs, those with references are not checked.
    """
    given = dict[str, object]()
    declared = dict(step.declared)
    mistakes = list[Mistake]()
    places: dict[Keys, str] = {}
    for name, value in step.settings.parameters.items():
        places[name,] = step.place("parameters", name)
        given[name] = None
        try:
            if published is not None or not references(value):
                given[name] = resolve(value, published or {})
                continue
        except PipelineError as error:
            mistakes.append(_mistake(places[name,], error))
        if name in declared:
            declared[name] = dataclasses.replace(declared[name], hint=Any)
    layer = Layer(values=given, places=places)
    values, wrong = typed_parameters(layer, declared, step.notebook.name)
    return values, [*mistakes, *wrong]


def load_pipeline(
    path: str | os.PathLike[str],
    overrides: Overrides | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Pipeline:
    """Read and check a pipeline; nothing runs, and nothing is written.

    Args:
        path: a YAML or JSON file, found as by :func:`nbtoolkit.load_config`.
        overrides: parameters of steps: ``{"sweep.n_trials": 5}`` or ``["sweep.n_trials=5"]``.
        folder: overrides the file's ``folder``.

    Raises:
        PipelineError: the file or an override is wrong; lists all mistakes with file and line.
        ConfigError: the file is missing or unreadable.
    """
    layer = file_layer(path)
    file = next(place for place in places_to_look(Path(path).expanduser()) if place.exists())
    names = _step_names(layer, file)
    layer = _with_overrides(layer, overrides or (), names)
    mistakes = [*layer.mistakes]
    steps = list[Step]()
    for name in names:
        try:
            steps.append(_step(name, layer, file))
        except ValidationError as error:
            mistakes += [_invalid(layer, ("steps", name), each) for each in error.errors()]
        except (NotebookError, PipelineError) as error:
            mistakes.append(_mistake(_place(layer, ("steps", name, "notebook")), error))
    for step in steps:
        mistakes += [*_check_values(step, None)[1], *_reference_mistakes(step, names)]
    refuse([*mistakes, *_circle(steps)], PipelineError)
    target = Path(folder or layer.values.get("folder") or Path("outputs") / file.stem)
    return Pipeline(path=file, folder=target.expanduser().absolute(), steps=tuple(_in_order(steps)))


def _step_names(layer: Layer, file: Path) -> list[str]:
    """Return the names of the steps.

    Raises:
        PipelineError: the file has another form.
    """
    mistakes = [_unknown(layer, (name,)) for name in layer.values.keys() - {"folder", "steps"}]
    steps = layer.values.get("steps")
    if not steps or not isinstance(steps, Mapping):
        place = _place(layer, ("steps",)) if steps else str(file)
        allowed = "`steps:`, and under it `name: {notebook: ...}` for each"
        mistakes.append(Mistake(place=place, what="has no steps", allowed=allowed))
        steps = {}
    for name in steps:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name == PIPELINE:
            problem = f"{name!r} cannot be a step's name"
            allowed = f"letters, digits, _ and -; not {PIPELINE!r}"
            place = _place(layer, ("steps", name))
            mistakes.append(Mistake(place=place, what=problem, allowed=allowed))
    refuse(mistakes, PipelineError)
    return [*steps]


def _with_overrides(layer: Layer, overrides: Overrides, names: Sequence[str]) -> Layer:
    """Return the file's settings with the values that a call sets for parameters."""
    given: list[tuple[str, object, str]] = []
    if isinstance(overrides, Mapping):
        given = [(name, value, f"override {name!r}") for name, value in overrides.items()]
    else:
        for text in [overrides] if isinstance(overrides, str) else overrides:
            name, equals, written = text.partition("=")
            given.append((name if equals else "", FromShell(written), f"override {text!r}"))
    places = dict(layer.places)
    mistakes = [*layer.mistakes]
    for name, value, place in given:
        step, _, parameter = name.strip().partition(".")
        if not parameter:
            problem = "names no step's parameter, or has no '='"
            mistakes.append(Mistake(place=place, what=problem, do="write step.parameter=value"))
        elif step not in names:
            mistakes.append(_unknown_step(step, place, names))
        elif isinstance(settings := layer.values["steps"][step], dict):
            settings["parameters"] = {**(settings.get("parameters") or {}), parameter: value}
            places["steps", step, "parameters", parameter] = place
    return Layer(values=layer.values, places=places, mistakes=tuple(mistakes))


def _step(name: str, layer: Layer, file: Path) -> Step:
    """Check one step's settings and notebook.

    Raises:
        ValidationError: a setting is wrong.
        PipelineError: the step is not a mapping.
        NotebookError: the notebook does not exist, or is not one.
    """
    written = layer.values["steps"][name]
    if not isinstance(written, Mapping):
        allowed = "`notebook: ...` and `parameters: {...}` under it"
        raise PipelineError(f"the step {name!r} is {written!r}", allowed=allowed)
    settings = StepSettings.model_validate(written)
    wanted = Path(settings.notebook).expanduser()
    candidates = [file.parent / wanted, *places_to_look(wanted)]
    path = next((place.absolute() for place in candidates if place.is_file()), None)
    if path is None:
        folders = ", ".join(dict.fromkeys(str(place.parent) for place in candidates))
        problem = f"there is no notebook {settings.notebook!r}"
        raise NotebookError(problem, allowed=f"a file in one of {folders}")
    notebook = read_notebook(path)
    refuse_syntax_errors(notebook, path.name)
    return Step(
        name=name,
        notebook=path,
        code="\0".join(cell.source for _, cell in numbered(notebook)),
        declared=declared_parameters(notebook, path.name),
        settings=settings,
        layer=layer,
    )


def _reference_mistakes(step: Step, names: Sequence[str]) -> Iterator[Mistake]:
    """Yield the references and the names in ``after`` that can never have a value."""
    for name in step.settings.after:
        if name not in names:
            yield _unknown_step(name, step.place("after"), names)
    for parameter, value in step.settings.parameters.items():
        place = step.place("parameters", parameter)
        for reference in references(value):
            other, *path = reference.split(".")
            if not path or not all(path):
                problem = f"${{{reference}}} refers to no value"
                do = "write ${step.name}, or $${...} "
                yield Mistake(place=place, what=problem, do=f"{do}for the characters themselves")
            elif other == PIPELINE and path[0] not in _PIPELINE_VALUES:
                allowed = ", ".join(f"${{{PIPELINE}.{value}}}" for value in _PIPELINE_VALUES)
                yield Mistake(place=place, what=f"there is no ${{{reference}}}", allowed=allowed)
            elif other not in (PIPELINE, *names):
                yield _unknown_step(other, place, names, f"${{{reference}}}: ")


def _circle(steps: Sequence[Step]) -> Iterator[Mistake]:
    """Yield the mistake of steps that need each other."""
    try:
        TopologicalSorter({step.name: step.needs for step in steps}).prepare()
    except CycleError as error:
        circle = error.args[1][::-1]  # each of them needs the next one
        problem = f"steps need each other in a circle: {' needs '.join(circle)}"
        place = next(step.place() for step in steps if step.name == circle[0])
        yield Mistake(place=place, what=problem, do="remove one of the references")


def _in_order(steps: Sequence[Step]) -> Iterator[Step]:
    """Yield steps without a circle: the file's order, but each step after those it needs."""
    remaining = [*steps]
    done = set[str]()
    while remaining:
        ready = next(step for step in remaining if step.needs <= done)
        remaining.remove(ready)
        done.add(ready.name)
        yield ready


def _unknown_step(name: str, place: str, names: Sequence[str], prefix: str = "") -> Mistake:
    problem = f"{prefix}there is no step {name!r}"
    do = did_you_mean(name, names)
    return Mistake(place=place, what=problem, allowed=", ".join(names), do=do)


def _mistake(place: str, error: NbtoolkitError) -> Mistake:
    return Mistake(place=place, what=error.what, allowed=error.allowed, do=error.do)


def _invalid(layer: Layer, step: Keys, error: ErrorDetails) -> Mistake:
    """Return the mistake that pydantic found in a step."""
    keys = (*step, *map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return _unknown(layer, keys)
    allowed = StepSettings.model_fields[keys[2]].description or ""
    problem = f"{'.'.join(keys)}: {error['msg']}"
    return Mistake(place=_place(layer, keys), what=problem, allowed=allowed.rstrip("."))


def _unknown(layer: Layer, keys: Keys) -> Mistake:
    known = [*StepSettings.model_fields] if len(keys) > 1 else ["folder", "steps"]
    problem = f"unknown setting {keys[-1]!r}"
    allowed = ", ".join(known)
    do = did_you_mean(keys[-1], known)
    return Mistake(place=_place(layer, keys), what=problem, allowed=allowed, do=do)


def _place(layer: Layer, keys: Keys) -> str:
    """Return file and line of a setting; if it is not written, of the nearest one around it."""
    while keys and keys not in layer.places:
        keys = keys[:-1]
    return layer.places.get(keys, "the pipeline")
