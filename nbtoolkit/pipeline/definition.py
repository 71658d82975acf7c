"""Define a pipeline's steps, the references between them, and the order they imply."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from nbtoolkit.config.fields import Allowed, Free, FreeSection, Seconds, Text
from nbtoolkit.config.schema import Section
from nbtoolkit.config.yaml_source import Keys, Mistake
from nbtoolkit.notebooks.document import NotebookSummary

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


def connection_mistakes(steps: Sequence[Step], names: Sequence[str]) -> Iterator[Mistake]:
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
                yield unknown_step(name, step.place("after"), names)
    yield from _circle(steps)


def unknown_step(name: str, place: str, names: Sequence[str], prefix: str = "") -> Mistake:
    """Return the mistake of a name that no step has.

    Args:
        name: the unknown name.
        place: where it is written.
        names: names of all steps.
        prefix: beginning of the sentence.
    """
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return Mistake(
        place=place,
        what=f"{prefix}there is no step {name!r}",
        allowed=", ".join(names),
        do=f"did you mean {close[0]!r}?" if close else "",
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
        yield unknown_step(reference.step, place, names, f"{reference.text}: ")


def _circle(steps: Sequence[Step]) -> Iterator[Mistake]:
    by_name = {step.name: step for step in steps}
    try:
        TopologicalSorter({step.name: step.needs for step in steps}).prepare()
    except CycleError as error:
        names = error.args[1][::-1]  # each of them needs the next one
        what = f"steps need each other in a circle: {' needs '.join(names)}"
        yield Mistake(place=by_name[names[0]].place(), what=what, do="remove one of the references")
