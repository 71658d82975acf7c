"""load_pipeline: a pipeline's file, and the overrides of a call, as checked steps in order."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from nbtoolkit.config import Section
from nbtoolkit.config_checks import mistakes
from nbtoolkit.config_layers import Overrides, file_layer, places_to_look
from nbtoolkit.errors import NotebookError, PipelineError
from nbtoolkit.notebooks.glance import glance
from nbtoolkit.notebooks.parameters import FromShell
from nbtoolkit.pipeline.connections import in_order, misconnections, no_step
from nbtoolkit.pipeline.parameters import known_mistakes
from nbtoolkit.pipeline.step import OWN, Pipeline, Step
from nbtoolkit.pipeline.wishes import PipelineWishes, StepWishes
from nbtoolkit.yaml_lines import Keys, Layer, Mistake, refuse

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
        wishes = _checked(PipelineWishes, layer)
        names = _names(wishes, layer, file)
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
    where = Path(folder or wishes.folder or Path("outputs") / file.stem).expanduser()
    return Pipeline(path=file, folder=where.absolute(), steps=in_order(steps))


def _checked(model: type[AnySection], layer: Layer) -> AnySection:
    try:
        return model.model_validate(layer.values)
    except ValidationError as error:
        raise _Wrong(*mistakes(error, layer, model)) from None


def _names(wishes: PipelineWishes, layer: Layer, file: Path) -> list[str]:
    allowed = f"letters, digits, _ and -; not {OWN!r}"
    wrong = [
        Mistake(
            place=layer.places["steps", name],
            what=f"{name!r} cannot be a step's name",
            allowed=allowed,
        )
        for name in wishes.steps
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name == OWN
    ]
    if not wishes.steps:
        allowed = "`steps:`, and under it `name: {notebook: ...}` for each"
        wrong = [Mistake(place=str(file), what="has no steps", allowed=allowed)]
    if wrong:
        raise _Wrong(*wrong)
    return [*wishes.steps]


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
    wishes = _checked(StepWishes, layer)
    if wishes.notebook is None:
        what = f"the step {name!r} names no notebook"
        raise _Wrong(
            Mistake(place=layer.places[()], what=what, allowed="notebook: <a .ipynb file>")
        )
    place = layer.places["notebook",]
    notebook = _found(wishes.notebook, place, file)
    try:
        seen = glance(notebook)
    except NotebookError as error:
        mistake = Mistake(place=place, what=error.what, allowed=error.allowed, do=error.do)
        raise _Wrong(mistake) from error
    return Step(
        name=name,
        notebook=notebook,
        parameters=layer.values["parameters"],
        wishes=wishes,
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
