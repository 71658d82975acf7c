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
from nbtoolkit.config.validation import mistakes
from nbtoolkit.config.yaml_source import Keys, Layer, Mistake, refuse
from nbtoolkit.errors import NotebookError, PipelineError
from nbtoolkit.notebooks.document import summarise
from nbtoolkit.notebooks.parameters import FromShell, Parameter, typed_parameters
from nbtoolkit.pipeline.definition import (
    OWN,
    Pipeline,
    PipelineConfig,
    Reference,
    Step,
    StepConfig,
    found_in,
    in_order,
    misconnections,
    no_step,
    resolve,
)

# --- parameters ---
# The values of a step's parameters: references looked up, types as its notebook says.


Published = Mapping[str, Mapping[str, Any]]
"""Step -> name -> value."""


def known_mistakes(step: Step) -> list[Mistake]:
    """What is wrong before anything runs: names, and values that refer to nothing."""
    later = {name for name, _ in step.references}
    declared = {
        name: dataclasses.replace(parameter, hint=Any) if name in later else parameter
        for name, parameter in step.glance.declared.items()
    }
    given = {
        name: None if name in later else resolve(value, {})
        for name, value in step.parameters.items()
    }
    return _typed(step, given, declared)[1]


def values_of(step: Step, published: Published) -> dict[str, Any]:
    """The values a step is run with.

    Args:
        step: a step, everything that it needs being done.
        published: what the steps before it published.

    Raises:
        PipelineError: a step published no such value, or one of another type.
    """
    refuse([*_not_found(step, published)], PipelineError)
    given = {name: resolve(value, published) for name, value in step.parameters.items()}
    values, mistakes = _typed(step, given, step.glance.declared)
    refuse(mistakes, PipelineError)
    return values


def _typed(
    step: Step, values: dict[str, Any], declared: Mapping[str, Parameter]
) -> tuple[dict[str, Any], list[Mistake]]:
    places: dict[Keys, str] = {(name,): step.place("parameters", name) for name in values}
    given = Layer(values=values, places=places)
    return typed_parameters(given, declared, step.notebook.name)


def _not_found(step: Step, published: Published) -> Iterator[Mistake]:
    for name, reference in step.references:
        place = step.place("parameters", name)
        try:
            found_in(published[reference.step], reference)
        except KeyError as error:
            yield _unpublished(place, reference, error.args[0], published)
        except TypeError as error:
            what, do = f"{reference.text}: {error}", "let the reference be the whole value"
            yield Mistake(place=place, what=what, do=do)


def _unpublished(place: str, reference: Reference, name: str, published: Published) -> Mistake:
    there = published[reference.step]
    close = difflib.get_close_matches(name, there, n=1, cutoff=0.5)
    return Mistake(
        place=place,
        what=f"{reference.text}: the step {reference.step!r} published no {name!r}",
        allowed=", ".join(there) or "nothing: it published nothing",
        do=f"did you mean {close[0]!r}?" if close else "",
    )


# --- load ---


AnySection = TypeVar("AnySection", bound=Section)


class _Wrong(Exception):
    """Settings from which no step can be made, and why."""

    def __init__(self, *found: Mistake) -> None:
        self.mistakes = found
        super().__init__(*map(str, found))


def load_pipeline(
    path: str | os.PathLike[str],
    overrides: Overrides | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Pipeline:
    """Read and check a pipeline; nothing is run or written.

    Args:
        path: a YAML or JSON file, found as :func:`nbtoolkit.load_config` finds its.
        overrides: parameters of steps: ``{"sweep.n_trials": 5}`` or ``["sweep.n_trials=5"]``.
        folder: beats the file's.

    Raises:
        PipelineError: something in it is wrong; all mistakes at once, with file and line.
        ConfigError: the file cannot be found or read.
    """
    layer = file_layer(path)
    file = next(one for one in places_to_look(Path(path).expanduser()) if one.exists())
    refuse([*layer.mistakes], PipelineError)
    try:
        sweep_config = _checked(PipelineConfig, layer)
        names = _names(sweep_config, layer, file)
    except _Wrong as wrong:
        refuse([*wrong.mistakes], PipelineError)
        raise
    above, found = _overridden(overrides or (), names)
    steps = []
    for name in names:
        try:
            steps.append(_step(name, _below(name, layer, above[name]), file))
        except _Wrong as wrong:
            found += wrong.mistakes
    found += [mistake for step in steps for mistake in known_mistakes(step)]
    refuse([*found, *misconnections(steps, names)], PipelineError)
    where = Path(folder or sweep_config.folder or Path("outputs") / file.stem).expanduser()
    return Pipeline(path=file, folder=where.absolute(), steps=in_order(steps))


def _checked(model: type[AnySection], layer: Layer) -> AnySection:
    try:
        return model.model_validate(layer.values)
    except ValidationError as error:
        raise _Wrong(*mistakes(error, layer, model)) from None


def _names(sweep_config: PipelineConfig, layer: Layer, file: Path) -> list[str]:
    allowed = f"letters, digits, _ and -; not {OWN!r}"
    wrong = [
        Mistake(
            place=layer.places["steps", name],
            what=f"{name!r} cannot be a step's name",
            allowed=allowed,
        )
        for name in sweep_config.steps
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name == OWN
    ]
    if not sweep_config.steps:
        allowed = "`steps:`, and under it `name: {notebook: ...}` for each"
        wrong = [Mistake(place=str(file), what="has no steps", allowed=allowed)]
    if wrong:
        raise _Wrong(*wrong)
    return [*sweep_config.steps]


def _overridden(
    overrides: Overrides, names: list[str]
) -> tuple[dict[str, dict[str, tuple[Any, str]]], list[Mistake]]:
    """Step -> parameter -> the value that a call sets and its place; and what is wrong."""
    above: dict[str, dict[str, tuple[Any, str]]] = {name: {} for name in names}
    wrong = []
    for written, dotted, value in _split(overrides):
        place = f"override {written!r}"
        step, _, parameter = dotted.partition(".")
        if not parameter or value is None:
            what = "names no step's parameter, or has no '='"
            wrong.append(Mistake(place=place, what=what, do="write step.parameter=value"))
        elif step not in above:
            wrong.append(no_step(step, place, names))
        else:
            above[step][parameter] = (value[0], place)
    return above, wrong


def _split(overrides: Overrides) -> Iterator[tuple[str, str, tuple[Any] | None]]:
    """Each override as written, its dotted name, and its value, if it has one."""
    if isinstance(overrides, Mapping):
        yield from ((name, name, (value,)) for name, value in overrides.items())
        return
    for text in [overrides] if isinstance(overrides, str) else overrides:
        name, equals, value = text.partition("=")
        yield text, name.strip(), (FromShell(value),) if equals else None


def _below(name: str, layer: Layer, above: Mapping[str, tuple[Any, str]]) -> Layer:
    """A step's entries as a layer of their own, with the overrides in it.

    Raises:
        _Wrong: it has none.
    """
    values = layer.values["steps"][name]
    here = layer.places["steps", name]
    if not isinstance(values, Mapping):
        allowed = "`notebook: ...` and `parameters: {...}` under it"
        raise _Wrong(Mistake(place=here, what=f"the step {name!r} is {values!r}", allowed=allowed))
    places: dict[Keys, str] = {(): here}
    places |= {keys[2:]: at for keys, at in layer.places.items() if keys[:2] == ("steps", name)}
    places |= {("parameters", key): at for key, (_, at) in above.items()}
    parameters = values.get("parameters") or {}
    if isinstance(parameters, Mapping):
        parameters = {**parameters, **{key: value for key, (value, _) in above.items()}}
    return Layer(values={**values, "parameters": parameters}, places=places)


def _step(name: str, layer: Layer, file: Path) -> Step:
    """One step.

    Raises:
        _Wrong: its settings are wrong, or there is no such notebook.
    """
    sweep_config = _checked(StepConfig, layer)
    if sweep_config.notebook is None:
        what = f"the step {name!r} names no notebook"
        raise _Wrong(
            Mistake(place=layer.places[()], what=what, allowed="notebook: <a .ipynb file>")
        )
    place = layer.places["notebook",]
    notebook = _found(sweep_config.notebook, place, file)
    try:
        seen = summarise(notebook)
    except NotebookError as error:
        mistake = Mistake(place=place, what=error.what, allowed=error.allowed, do=error.do)
        raise _Wrong(mistake) from error
    return Step(
        name=name,
        notebook=notebook,
        parameters=layer.values["parameters"],
        sweep_config=sweep_config,
        glance=seen,
        places=layer.places,
    )


def _found(wish: str, place: str, file: Path) -> Path:
    """The notebook, beside the pipeline's file or where settings files are looked for."""
    wanted = Path(wish).expanduser()
    candidates = [file.parent / wanted, *places_to_look(wanted)]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.absolute()
    folders = ", ".join(dict.fromkeys(str(one.parent) for one in candidates))
    what, allowed = f"there is no notebook {wish!r}", f"a file in one of {folders}"
    raise _Wrong(Mistake(place=place, what=what, allowed=allowed))
