"""Load a pipeline's file: its steps, the references between them, and the order they imply."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ValidationError

from nbtoolkit.config.fields import Allowed, Free, FreeSection, Seconds, Section, Text
from nbtoolkit.config.loading import (
    Keys,
    Layer,
    Mistake,
    Overrides,
    file_layer,
    places_to_look,
    refuse,
)
from nbtoolkit.config.loading import mistakes as validation_mistakes
from nbtoolkit.errors import NotebookError, PipelineError
from nbtoolkit.notebooks.document import NotebookSummary, summarise
from nbtoolkit.notebooks.parameters import FromShell, Parameter, typed_parameters
from nbtoolkit.text_table import did_you_mean

AnySection = TypeVar("AnySection", bound=Section)

PIPELINE = "pipeline"
"""Name of the pipeline itself in references: `${pipeline.folder}`."""

_PIPELINE_VALUES = ("folder", "name")

_REFERENCE = re.compile(r"\$(\$?)\{([^{}]*)\}")

Published = Mapping[str, Mapping[str, object]]
"""Published values: step -> name -> value."""


@dataclass(frozen=True)
class Reference:
    """A reference in a parameter: `${sweep.best_config}`, published by the step `sweep`.

    A reference that is the whole value keeps its type; within a text it becomes part of the text.
    `${pipeline.folder}` is the pipeline's folder. `$${...}` stands for the characters `${...}`.
    """

    text: str
    """The reference as written."""
    step: str
    """The step that it refers to, or ``pipeline``."""
    path: tuple[str, ...]
    """Name of the published value, and names inside that value."""
    whole: bool
    """Whether the reference is the whole value."""

    def value_in(self, published: Published) -> object:
        """Return the value that the reference stands for.

        Args:
            published: `${sweep.best_config.optim.lr}` finds ``{"optim": {"lr": ...}}`` as well as
                ``{"optim.lr": ...}`` in what ``sweep`` published as ``best_config``.

        Raises:
            KeyError: a name does not exist; the first such name.
            TypeError: the value is part of a text, and is a list or a dict.
        """
        value = _value_at(published[self.step], self.path)
        if not self.whole and not isinstance(value, (str, int, float, bool)):
            raise TypeError(f"a {type(value).__name__} cannot be part of a text")
        return value


def references(value: object) -> Iterator[Reference]:
    """Yield every reference in a parameter's value, including those in lists and dicts."""
    if isinstance(value, str):
        for match in _REFERENCE.finditer(value):
            if not match[1]:
                yield _reference(match, value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from references(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from references(item)


def resolve(value: object, published: Published) -> object:
    """Replace the references in a parameter's value.

    Args:
        value: the value as written.
        published: must contain every reference (see :meth:`Reference.value_in`).
    """
    if isinstance(value, str):
        return _resolve_text(value, published)
    if isinstance(value, Mapping):
        return {name: resolve(item, published) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [resolve(item, published) for item in value]
    return value


def _reference(match: re.Match[str], value: str) -> Reference:
    step, *path = match[2].strip().split(".")
    return Reference(match[0], step, tuple(path), match[0] == value.strip())


def _resolve_text(text: str, published: Published) -> object:
    for reference in references(text):
        if reference.whole:
            return reference.value_in(published)

    def replacement(match: re.Match[str]) -> str:
        if match[1]:
            return match[0][1:]
        return str(_reference(match, text).value_in(published))

    # The type of the text: a FromShell text stays one.
    return type(text)(_REFERENCE.sub(replacement, text))


def _value_at(values: object, path: tuple[str, ...]) -> object:
    if not path:
        return values
    if not isinstance(values, Mapping):
        raise KeyError(path[0])
    for length in range(len(path), 0, -1):  # "optim.lr" may be one name, or two
        name = ".".join(path[:length])
        if name in values:
            return _value_at(values[name], path[length:])
    raise KeyError(path[0])


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Texts = Annotated[
    tuple[Text, ...], BeforeValidator(_as_tuple), Allowed("a text, or a list of texts")
]


class StepConfig(Section):
    """The settings of one step in a pipeline's file."""

    notebook: Text | None = None
    """The notebook: beside the pipeline's file, else found like a configuration file."""
    parameters: Free = FreeSection()
    """Name -> value, for names that its ``parameters`` cell assigns; `${step.name}` refers."""
    after: Texts = ()
    """Steps that must be done before this one, without a reference to them."""
    files: Texts = ()
    """Files or patterns (`src/**/*.py`); the step runs again when one of them changes."""
    kernel: Text | None = None
    """Name of the kernel spec; null: the notebook's own."""
    timeout: Seconds | None = None
    """Time limit of the whole notebook; null: no limit."""
    cell_timeout: Seconds | None = None
    """Time limit of each cell; null: no limit."""


class PipelineConfig(Section):
    """The settings in a pipeline's file."""

    folder: Text | None = None
    """Folder of the pipeline; null: `outputs/<the file's name>`."""
    steps: Annotated[Free, Allowed("a name for each step, and its settings under it")] = (
        FreeSection()
    )
    """The steps by name, in order."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A checked step: a notebook and its parameters."""

    name: str
    notebook: Path
    parameters: Mapping[str, object]
    """Values as written, with references; values from a shell are FromShell texts."""
    config: StepConfig
    summary: NotebookSummary
    places: Mapping[Keys, str]
    """Place (file and line) of each setting; ``()``: of the step itself."""

    @property
    def references(self) -> Iterator[tuple[str, Reference]]:
        """Every reference, with the name of its parameter."""
        for parameter, value in self.parameters.items():
            for reference in references(value):
                yield parameter, reference

    @property
    def needs(self) -> set[str]:
        """The steps that must be done before this one."""
        referenced = {reference.step for _, reference in self.references}
        return (referenced | set(self.config.after)) - {PIPELINE}

    def place(self, *keys: str) -> str:
        """Return file and line of a setting; if it is not written, of the step."""
        return self.places.get(keys, self.places[()])


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Steps in the order in which they run."""

    path: Path
    folder: Path
    """Folder for everything that the pipeline writes."""
    steps: tuple[Step, ...]


def _connection_mistakes(steps: Sequence[Step], names: Sequence[str]) -> Iterator[Mistake]:
    """Yield what is wrong between steps: references, names in ``after``, circles.

    Args:
        steps: the steps without mistakes of their own.
        names: names of all steps.
    """
    for step in steps:
        for parameter, reference in step.references:
            yield from _reference_mistakes(reference, step.place("parameters", parameter), names)
        for name in step.config.after:
            if name not in names:
                yield _unknown_step(name, step.place("after"), names)
    try:
        TopologicalSorter({step.name: step.needs for step in steps}).prepare()
    except CycleError as error:
        circle = error.args[1][::-1]  # each of them needs the next one
        what = f"steps need each other in a circle: {' needs '.join(circle)}"
        place = next(step.place() for step in steps if step.name == circle[0])
        yield Mistake(place=place, what=what, do="remove one of the references")


def _unknown_step(name: str, place: str, names: Sequence[str], prefix: str = "") -> Mistake:
    """Return the mistake of a name that no step has.

    Args:
        name: the unknown name.
        place: where it is written.
        names: names of all steps.
        prefix: beginning of the sentence.
    """
    return Mistake(
        place=place,
        what=f"{prefix}there is no step {name!r}",
        allowed=", ".join(names),
        do=did_you_mean(name, names),
    )


def in_order(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Sort steps without a circle: the file's order, but each step after those it needs."""
    remaining, ordered = list(steps), list[Step]()
    while remaining:
        done = {step.name for step in ordered}
        ready = next(step for step in remaining if step.needs <= done)
        remaining.remove(ready)
        ordered.append(ready)
    return tuple(ordered)


def _reference_mistakes(
    reference: Reference, place: str, names: Sequence[str]
) -> Iterator[Mistake]:
    if not all(reference.path) or not reference.path:
        do = "write ${step.name}, or $${...} for the characters themselves"
        yield Mistake(place=place, what=f"{reference.text} refers to no value", do=do)
    elif reference.step == PIPELINE and reference.path[0] not in _PIPELINE_VALUES:
        allowed = ", ".join(f"${{{PIPELINE}.{name}}}" for name in _PIPELINE_VALUES)
        yield Mistake(place=place, what=f"there is no {reference.text}", allowed=allowed)
    elif reference.step not in (PIPELINE, *names):
        yield _unknown_step(reference.step, place, names, f"{reference.text}: ")


# --- loading ---


class _Invalid(Exception):
    """Settings from which no step can be made; its arguments are the mistakes in them."""


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
    refuse([*layer.mistakes], PipelineError)
    try:
        config = _validate(PipelineConfig, layer)
        names = _step_names(config, layer, file)
    except _Invalid as invalid:
        refuse([*invalid.args], PipelineError)
        raise
    by_step, problems = _overrides_by_step(overrides or (), names)
    steps = []
    for name in names:
        try:
            steps.append(_step(name, _step_layer(name, layer, by_step[name]), file))
        except _Invalid as invalid:
            problems += invalid.args
    problems += [mistake for step in steps for mistake in _parameter_mistakes(step)]
    refuse([*problems, *_connection_mistakes(steps, names)], PipelineError)
    target = Path(folder or config.folder or Path("outputs") / file.stem).expanduser()
    return Pipeline(path=file, folder=target.absolute(), steps=in_order(steps))


def _validate(model: type[AnySection], layer: Layer) -> AnySection:
    try:
        return model.model_validate(layer.values)
    except ValidationError as error:
        raise _Invalid(*validation_mistakes(error, layer, model)) from None


def _step_names(config: PipelineConfig, layer: Layer, file: Path) -> list[str]:
    if not config.steps:
        allowed = "`steps:`, and under it `name: {notebook: ...}` for each"
        raise _Invalid(Mistake(place=str(file), what="has no steps", allowed=allowed))
    wrong = [
        Mistake(
            place=layer.places["steps", name],
            what=f"{name!r} cannot be a step's name",
            allowed=f"letters, digits, _ and -; not {PIPELINE!r}",
        )
        for name in config.steps
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name == PIPELINE
    ]
    if wrong:
        raise _Invalid(*wrong)
    return [*config.steps]


@dataclasses.dataclass(frozen=True)
class _Override:
    """A value that a call sets for a parameter, and its place."""

    value: object
    place: str


def _overrides_by_step(
    overrides: Overrides, names: list[str]
) -> tuple[dict[str, dict[str, _Override]], list[Mistake]]:
    """Return the overrides by step and parameter, and the mistakes in them."""
    by_step: dict[str, dict[str, _Override]] = {name: {} for name in names}
    wrong = []
    value: object
    for written in [overrides] if isinstance(overrides, str) else overrides:
        if isinstance(overrides, Mapping):
            name, complete, value = written, True, overrides[written]
        else:
            name, equals, text = written.partition("=")
            complete, value = bool(equals), FromShell(text)
        place = f"override {written!r}"
        step, _, parameter = name.strip().partition(".")
        if not parameter or not complete:
            what = "names no step's parameter, or has no '='"
            wrong.append(Mistake(place=place, what=what, do="write step.parameter=value"))
        elif step not in by_step:
            wrong.append(_unknown_step(step, place, names))
        else:
            by_step[step][parameter] = _Override(value, place)
    return by_step, wrong


def _step_layer(name: str, layer: Layer, overrides: Mapping[str, _Override]) -> Layer:
    """Return a step's settings as a layer of their own, including the overrides.

    Raises:
        _Invalid: the step is not a mapping.
    """
    values = layer.values["steps"][name]
    place = layer.places["steps", name]
    if not isinstance(values, Mapping):
        allowed = "`notebook: ...` and `parameters: {...}` under it"
        raise _Invalid(
            Mistake(place=place, what=f"the step {name!r} is {values!r}", allowed=allowed)
        )
    places: dict[Keys, str] = {(): place}
    places |= {keys[2:]: at for keys, at in layer.places.items() if keys[:2] == ("steps", name)}
    places |= {("parameters", key): override.place for key, override in overrides.items()}
    parameters = values.get("parameters") or {}
    if isinstance(parameters, Mapping):
        parameters = {**parameters, **{key: item.value for key, item in overrides.items()}}
    return Layer(values={**values, "parameters": parameters}, places=places)


def _step(name: str, layer: Layer, file: Path) -> Step:
    """Check one step.

    Raises:
        _Invalid: its settings are wrong, or the notebook does not exist.
    """
    config = _validate(StepConfig, layer)
    if config.notebook is None:
        what, allowed = f"the step {name!r} names no notebook", "notebook: <a .ipynb file>"
        raise _Invalid(Mistake(place=layer.places[()], what=what, allowed=allowed))
    place = layer.places["notebook",]
    notebook = _find_notebook(config.notebook, place, file)
    try:
        summary = summarise(notebook)
    except NotebookError as error:
        mistake = Mistake(place=place, what=error.what, allowed=error.allowed, do=error.do)
        raise _Invalid(mistake) from error
    return Step(
        name=name,
        notebook=notebook,
        parameters=layer.values["parameters"],
        config=config,
        summary=summary,
        places=layer.places,
    )


def _find_notebook(name: str, place: str, file: Path) -> Path:
    """Find a notebook beside the pipeline's file, else like a configuration file.

    Raises:
        _Invalid: it does not exist.
    """
    path = Path(name).expanduser()
    candidates = [file.parent / path, *places_to_look(path)]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.absolute()
    folders = ", ".join(dict.fromkeys(str(candidate.parent) for candidate in candidates))
    what, allowed = f"there is no notebook {name!r}", f"a file in one of {folders}"
    raise _Invalid(Mistake(place=place, what=what, allowed=allowed))


def _parameter_mistakes(step: Step) -> list[Mistake]:
    """Return the mistakes in a step's parameters that are known before any step runs."""
    # The value and the type of a parameter with a reference are checked when its step runs.
    referring = {name for name, _ in step.references}
    declared = {
        name: dataclasses.replace(parameter, hint=Any) if name in referring else parameter
        for name, parameter in step.summary.declared.items()
    }
    given = {
        name: None if name in referring else resolve(value, {})
        for name, value in step.parameters.items()
    }
    return _typed(step, given, declared)[1]


def values_of(step: Step, published: Published) -> dict[str, Any]:
    """Return the values of a step's parameters, with references resolved.

    Args:
        step: a step; all steps that it needs are done.
        published: published values of the steps before it.

    Raises:
        PipelineError: a step did not publish the value, or published one of another type.
    """
    refuse([*_unresolved(step, published)], PipelineError)
    given = {name: resolve(value, published) for name, value in step.parameters.items()}
    values, mistakes = _typed(step, given, step.summary.declared)
    refuse(mistakes, PipelineError)
    return values


def _typed(
    step: Step, values: dict[str, object], declared: Mapping[str, Parameter]
) -> tuple[dict[str, Any], list[Mistake]]:
    places: dict[Keys, str] = {(name,): step.place("parameters", name) for name in values}
    return typed_parameters(Layer(values=values, places=places), declared, step.notebook.name)


def _unresolved(step: Step, published: Published) -> Iterator[Mistake]:
    for parameter, reference in step.references:
        place = step.place("parameters", parameter)
        try:
            reference.value_in(published)
        except KeyError as error:
            name, values = error.args[0], published[reference.step]
            yield Mistake(
                place=place,
                what=f"{reference.text}: the step {reference.step!r} published no {name!r}",
                allowed=", ".join(values) or "nothing: it published nothing",
                do=did_you_mean(name, values),
            )
        except TypeError as error:
            what, do = f"{reference.text}: {error}", "make the reference the whole value"
            yield Mistake(place=place, what=what, do=do)
