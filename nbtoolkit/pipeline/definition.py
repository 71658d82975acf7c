"""Define a pipeline's steps, references between them, and the order they imply."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from nbtoolkit.config.fields import Allowed, Free, FreeSection, Seconds, Text
from nbtoolkit.config.schema import Section
from nbtoolkit.config.yaml_source import Keys, Mistake
from nbtoolkit.notebooks.document import NotebookSummary

# --- references ---
# `${sweep.best_config}` is what the step `sweep` published as `best_config`.
#
# A reference that is the whole value keeps its type; within a text it becomes part of the text.
# `${pipeline.folder}` is the pipeline's folder. `$${...}` stands for the characters `${...}`.


_PATTERN = re.compile(r"\$(\$?)\{([^{}]*)\}")

_PLAIN = (str, int, float, bool)


@dataclass(frozen=True)
class Reference:
    """One `${step.value}` in a parameter."""

    text: str
    """As it is written."""
    step: str
    """The step it refers to, or ``pipeline``."""
    path: tuple[str, ...]
    """The value's name, and the names inside it."""
    whole: bool
    """Whether it is all of a value, not a part of a text."""


def references(value: Any) -> Iterator[Reference]:
    """Every reference in a parameter's value, in lists and dicts too."""
    if isinstance(value, str):
        for found in _PATTERN.finditer(value):
            if not found[1]:
                yield _reference(found, value)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from references(inner)


def resolve(value: Any, published: Mapping[str, Mapping[str, Any]]) -> Any:
    """A parameter's value with what its references stand for.

    Args:
        value: as written.
        published: step -> name -> value; every reference must be there (see :func:`found_in`).
    """
    if isinstance(value, str):
        return _resolved_text(value, published)
    if isinstance(value, Mapping):
        return {name: resolve(inner, published) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [resolve(inner, published) for inner in value]
    return value


def found_in(values: Mapping[str, Any], reference: Reference) -> Any:
    """What a reference stands for.

    Args:
        values: what its step published.
        reference: `${sweep.best_config.optim.lr}` finds ``{"optim": {"lr": ...}}`` as well as
            ``{"optim.lr": ...}``.

    Raises:
        KeyError: the first name that is not there.
        TypeError: it is no plain value, and stands in a text.
    """
    value = _inside(values, reference.path)
    if not reference.whole and not isinstance(value, _PLAIN):
        raise TypeError(f"a {type(value).__name__} cannot be a part of a text")
    return value


def _reference(found: re.Match[str], value: str) -> Reference:
    step, *path = found[2].strip().split(".")
    return Reference(found[0], step, tuple(path), found[0] == value.strip())


def _resolved_text(text: str, published: Mapping[str, Mapping[str, Any]]) -> Any:
    for reference in references(text):
        if reference.whole:
            return found_in(published[reference.step], reference)

    def put_in(found: re.Match[str]) -> str:
        if found[1]:
            return found[0][1:]
        reference = _reference(found, text)
        return str(found_in(published[reference.step], reference))

    return type(text)(_PATTERN.sub(put_in, text))  # what came from a shell stays marked as such


def _inside(values: Any, path: tuple[str, ...]) -> Any:
    if not path:
        return values
    if not isinstance(values, Mapping):
        raise KeyError(path[0])
    for length in range(len(path), 0, -1):  # "optim.lr" may be one name, or two
        name = ".".join(path[:length])
        if name in values:
            return _inside(values[name], path[length:])
    raise KeyError(path[0])


# --- settings of a file ---
# What a pipeline's file may hold, checked setting by setting.


def _texts(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Texts = Annotated[tuple[Text, ...], BeforeValidator(_texts), Allowed("a text, or a list of texts")]


class StepConfig(Section):
    """One step: a notebook, and what it is given."""

    notebook: Text | None = None
    """The notebook; looked for beside the pipeline's file, then as configuration files are."""
    parameters: Free = FreeSection()
    """Name -> value, for names that its ``parameters`` cell assigns; `${step.name}` refers."""
    after: Texts = ()
    """Steps that must be done before, though no parameter refers to them."""
    files: Texts = ()
    """Files (or patterns, `src/**/*.py`) that make the step run again when they change."""
    kernel: Text | None = None
    """The kernel spec's name; null: the notebook's own."""
    timeout: Seconds | None = None
    """For the whole notebook; null: no limit."""
    cell_timeout: Seconds | None = None
    """For each cell; null: no limit."""


class PipelineConfig(Section):
    """A pipeline's file."""

    folder: Text | None = None
    """Where everything of it goes; null: `outputs/<the file's name>`."""
    steps: Annotated[Free, Allowed("a name for each step, and its settings under it")] = (
        FreeSection()
    )
    """The steps by name, in order."""


# --- step ---
# One notebook of a pipeline. Pipeline: all of them, in the order they are run.


OWN = "pipeline"
"""What references call the pipeline itself: `${pipeline.folder}`."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A notebook, and what it is given."""

    name: str
    notebook: Path
    parameters: Mapping[str, Any]
    """As written: with references, and texts of a shell as such."""
    sweep_config: StepConfig
    glance: NotebookSummary
    places: Mapping[Keys, str]
    """Where each of its settings is given; ``()``: the step itself."""

    @property
    def references(self) -> Iterator[tuple[str, Reference]]:
        """Every reference, with the parameter it stands in."""
        for parameter, value in self.parameters.items():
            for reference in references(value):
                yield parameter, reference

    @property
    def needs(self) -> set[str]:
        """The steps that must be done before."""
        named = {reference.step for _, reference in self.references}
        return (named | set(self.sweep_config.after)) - {OWN}

    def place(self, *keys: str) -> str:
        """File and line of a setting, else of the step."""
        return self.places.get(keys, self.places[()])


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Steps in the order they are run: the file's, but none before what it needs."""

    path: Path
    folder: Path
    """Where everything of it goes."""
    steps: tuple[Step, ...]


# --- connections ---


OF_ITSELF = ("folder", "name")
"""`${pipeline.folder}`, and `${pipeline.name}`: its file's name."""


def misconnections(steps: Sequence[Step], names: Sequence[str]) -> Iterator[Mistake]:
    """What is wrong between steps, each of them being right by itself.

    Args:
        steps: the steps that are right.
        names: of all steps.
    """
    for step in steps:
        for parameter, reference in step.references:
            yield from _dangling(reference, step.place("parameters", parameter), names)
        for name in step.sweep_config.after:
            if name not in names:
                yield no_step(name, step.place("after"), names)
    yield from _circle(steps)


def no_step(name: str, place: str, names: Sequence[str], before: str = "") -> Mistake:
    """A name that no step has.

    Args:
        name: the name.
        place: where it stands.
        names: of all steps.
        before: what the sentence begins with.
    """
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return Mistake(
        place=place,
        what=f"{before}there is no step {name!r}",
        allowed=", ".join(names),
        do=f"did you mean {close[0]!r}?" if close else "",
    )


def in_order(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The file's order, but none before what it needs (there is no circle)."""
    left, ordered = list(steps), list[Step]()
    while left:
        done = {step.name for step in ordered}
        ready = next(step for step in left if step.needs <= done)
        left.remove(ready)
        ordered.append(ready)
    return tuple(ordered)


def _dangling(reference: Reference, place: str, names: Sequence[str]) -> Iterator[Mistake]:
    if not all(reference.path) or not reference.path:
        do = "write ${step.name}, or $${...} for the characters themselves"
        yield Mistake(place=place, what=f"{reference.text} refers to no value", do=do)
    elif reference.step == OWN and reference.path[0] not in OF_ITSELF:
        allowed = ", ".join(f"${{{OWN}.{one}}}" for one in OF_ITSELF)
        yield Mistake(place=place, what=f"there is no {reference.text}", allowed=allowed)
    elif reference.step not in (OWN, *names):
        yield no_step(reference.step, place, names, f"{reference.text}: ")


def _circle(steps: Sequence[Step]) -> Iterator[Mistake]:
    by_name = {step.name: step for step in steps}
    try:
        TopologicalSorter({step.name: step.needs for step in steps}).prepare()
    except CycleError as error:
        names = error.args[1][::-1]  # each of them needs the next one
        what = f"steps need each other in a circle: {' needs '.join(names)}"
        yield Mistake(place=by_name[names[0]].place(), what=what, do="take one reference out")
