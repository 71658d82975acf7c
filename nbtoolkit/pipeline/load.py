"""Load a pipeline's file and overrides as checked steps in order."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from nbtoolkit.config.layers import Overrides, file_layer, places_to_look
from nbtoolkit.config.schema import Section
from nbtoolkit.config.validation import mistakes as validation_mistakes
from nbtoolkit.config.yaml_source import Keys, Layer, Mistake, refuse
from nbtoolkit.errors import NotebookError, PipelineError
from nbtoolkit.notebooks.document import summarise
from nbtoolkit.notebooks.parameters import FromShell, Parameter, typed_parameters
from nbtoolkit.pipeline.definition import (
    PIPELINE,
    Pipeline,
    PipelineConfig,
    Published,
    Reference,
    Step,
    StepConfig,
    connection_mistakes,
    in_order,
    resolve,
    unknown_step,
)

AnySection = TypeVar("AnySection", bound=Section)


class _Invalid(Exception):
    """Settings from which no step can be made, with their mistakes."""

    def __init__(self, *mistakes: Mistake) -> None:
        self.mistakes = mistakes
        super().__init__(*map(str, mistakes))


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
        refuse([*invalid.mistakes], PipelineError)
        raise
    by_step, problems = _overrides_by_step(overrides or (), names)
    steps = []
    for name in names:
        try:
            steps.append(_step(name, _step_layer(name, layer, by_step[name]), file))
        except _Invalid as invalid:
            problems += invalid.mistakes
    problems += [mistake for step in steps for mistake in _parameter_mistakes(step)]
    refuse([*problems, *connection_mistakes(steps, names)], PipelineError)
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
            wrong.append(unknown_step(step, place, names))
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
    for name, reference in step.references:
        place = step.place("parameters", name)
        try:
            reference.value_in(published)
        except KeyError as error:
            yield _unpublished(place, reference, error.args[0], published)
        except TypeError as error:
            what, do = f"{reference.text}: {error}", "make the reference the whole value"
            yield Mistake(place=place, what=what, do=do)


def _unpublished(place: str, reference: Reference, name: str, published: Published) -> Mistake:
    values = published[reference.step]
    close = difflib.get_close_matches(name, values, n=1, cutoff=0.5)
    return Mistake(
        place=place,
        what=f"{reference.text}: the step {reference.step!r} published no {name!r}",
        allowed=", ".join(values) or "nothing: it published nothing",
        do=f"did you mean {close[0]!r}?" if close else "",
    )
