"""load_pipeline: a pipeline's file, and the overrides of a call, as checked steps in order."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nbtoolkit.config_checks import mistakes as mistakes_of
from nbtoolkit.config_layers import Overrides, file_layer, places_to_look
from nbtoolkit.errors import NotebookError, PipelineError
from nbtoolkit.notebooks.glance import glance
from nbtoolkit.notebooks.parameters import FromShell
from nbtoolkit.pipeline.parameters import known_mistakes
from nbtoolkit.pipeline.references import references
from nbtoolkit.pipeline.step import OWN, Pipeline, Step
from nbtoolkit.pipeline.wishes import PipelineWishes, StepWishes
from nbtoolkit.yaml_lines import Layer, Mistake, refuse

_OF_ITSELF = ("folder", "name")  # `${pipeline.folder}`, `${pipeline.name}`


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
    wishes, wrong = _checked(PipelineWishes, layer)
    refuse([*layer.mistakes, *wrong], PipelineError)
    reader = _Reader(file, layer, [*wishes.steps])
    reader.override(overrides or ())
    steps = [step for name in wishes.steps if (step := reader.step(name))]
    refuse([*reader.mistakes, *reader.unfit(steps)], PipelineError)
    where = Path(folder or wishes.folder or Path("outputs") / file.stem).expanduser()
    return Pipeline(path=file, folder=where.absolute(), steps=_in_order(steps))


def _checked(model: Any, layer: Layer) -> tuple[Any, list[Mistake]]:
    try:
        return model.model_validate(layer.values), []
    except ValidationError as error:
        return None, mistakes_of(error, layer, model)


class _Reader:
    """Makes steps of a file's entries, and collects what is wrong with them."""

    def __init__(self, file: Path, layer: Layer, names: list[str]) -> None:
        self._file, self._layer, self._names = file, layer, names
        self._above: dict[str, dict[str, tuple[Any, str]]] = {name: {} for name in names}
        self.mistakes: list[Mistake] = []
        if not names:
            allowed = "`name: {notebook: ...}` lines under steps:"
            self._mistake(str(file), "has no steps", allowed)

    def override(self, overrides: Overrides) -> None:
        """Take the parameters that a call sets."""
        for wish, name, value in _split(overrides):
            step, _, parameter = name.partition(".")
            place = f"override {wish!r}"
            if not parameter or (value is None and "=" not in wish):
                self._mistake(place, "names no step's parameter", "step.parameter=value")
            elif step not in self._above:
                self._unknown_step(place, step)
            else:
                self._above[step][parameter] = (value, place)

    def step(self, name: str) -> Step | None:
        """One step; None where its own settings are wrong."""
        layer = self._below(name)
        place = self._place("steps", name)
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name == OWN:
            what, allowed = (
                f"{name!r} cannot be a step's name",
                f"letters, digits, _ and -; not {OWN}",
            )
            self._mistake(place, what, allowed)
            return None
        wishes, wrong = _checked(StepWishes, layer)
        self.mistakes += wrong
        notebook = None if wrong else self._notebook(name, wishes.notebook)
        if notebook is None:
            return None
        parameters = wishes.parameters.to_dict()
        places = {key: self._place("steps", name, "parameters", key) for key in parameters}
        for parameter, (value, given) in self._above[name].items():
            parameters[parameter], places[parameter] = value, given
        try:
            seen = glance(notebook)
        except NotebookError as error:
            self._mistake(self._place("steps", name, "notebook"), error.what, error.allowed)
            return None
        return Step(
            name=name,
            place=place,
            notebook=notebook,
            parameters=parameters,
            places=places,
            wishes=wishes,
            glance=seen,
        )

    def unfit(self, steps: Iterable[Step]) -> Iterator[Mistake]:
        """What does not fit together, each step being right by itself."""
        steps = list(steps)
        for step in steps:
            yield from known_mistakes(step)
            yield from self._dangling(step)
        yield from self._circle(steps)

    def _below(self, name: str) -> Layer:
        """A step's entries as a layer of their own."""
        values = self._layer.values["steps"][name]
        if not isinstance(values, Mapping):
            allowed = "`notebook: ...` and `parameters: {...}` under it"
            self._mistake(self._place("steps", name), f"the step {name!r} is {values!r}", allowed)
            values = {}
        places = {k[2:]: v for k, v in self._layer.places.items() if k[:2] == ("steps", name)}
        return Layer(values=dict(values), places=places)

    def _notebook(self, name: str, wish: str | None) -> Path | None:
        if wish is None:
            self._mistake(
                self._place("steps", name), f"the step {name!r} names no notebook", "notebook: ..."
            )
            return None
        wanted = Path(wish).expanduser()
        candidates = [self._file.parent / wanted, *places_to_look(wanted)]
        found = next((one for one in candidates if one.is_file()), None)
        if found is None:
            place = self._place("steps", name, "notebook")
            folders = ", ".join(dict.fromkeys(str(one.parent) for one in candidates))
            self._mistake(place, f"there is no notebook {wish!r}", f"a file in one of {folders}")
            return None
        return found.absolute()

    def _dangling(self, step: Step) -> Iterator[Mistake]:
        """References and `after` that lead to no step."""
        for parameter, value in step.parameters.items():
            place = step.places[parameter]
            for reference in references(value):
                known = reference.path[:1] and reference.path[0] in _OF_ITSELF
                if not reference.path:
                    do = "write ${step.name}, or $${...} for the characters themselves"
                    yield Mistake(place=place, what=f"{reference.text} refers to no value", do=do)
                elif reference.step == OWN and not known:
                    allowed = ", ".join(f"${{{OWN}.{one}}}" for one in _OF_ITSELF)
                    yield Mistake(
                        place=place, what=f"there is no {reference.text}", allowed=allowed
                    )
                elif reference.step not in (OWN, *self._names):
                    yield self._no_step(place, reference.step, f"{reference.text}: ")
        for name in step.wishes.after:
            if name not in self._names:
                yield self._no_step(self._place("steps", step.name, "after"), name)

    def _circle(self, steps: list[Step]) -> Iterator[Mistake]:
        graph = {step.name: step.needs for step in steps}
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            names = error.args[1][::-1]  # each of them needs the next one
            what = f"steps need each other in a circle: {' needs '.join(names)}"
            yield Mistake(
                place=self._place("steps", names[0]), what=what, do="take one reference out"
            )

    def _unknown_step(self, place: str, name: str) -> None:
        self.mistakes.append(self._no_step(place, name))

    def _no_step(self, place: str, name: str, before: str = "") -> Mistake:
        close = difflib.get_close_matches(name, self._names, n=1, cutoff=0.5)
        return Mistake(
            place=place,
            what=f"{before}there is no step {name!r}",
            allowed=", ".join(self._names),
            do=f"did you mean {close[0]!r}?" if close else "",
        )

    def _place(self, *keys: str) -> str:
        around = (keys[:length] for length in range(len(keys), 0, -1))
        places = self._layer.places
        return next((places[some] for some in around if some in places), str(self._file))

    def _mistake(self, place: str, what: str, allowed: str = "") -> None:
        self.mistakes.append(Mistake(place=place, what=what, allowed=allowed))


def _split(overrides: Overrides) -> Iterator[tuple[str, str, Any]]:
    """Each override as written, its dotted name, and its value."""
    if isinstance(overrides, Mapping):
        yield from ((name, name, value) for name, value in overrides.items())
        return
    for text in [overrides] if isinstance(overrides, str) else overrides:
        name, equals, value = text.partition("=")
        yield text, name.strip(), FromShell(value) if equals else None


def _in_order(steps: list[Step]) -> tuple[Step, ...]:
    """The file's order, but none before what it needs (there is no circle)."""
    left, ordered = list(steps), list[Step]()
    while left:
        done = {step.name for step in ordered}
        ready = next(step for step in left if step.needs <= done)
        left.remove(ready)
        ordered.append(ready)
    return tuple(ordered)
