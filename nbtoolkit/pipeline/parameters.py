"""The values of a step's parameters: references looked up, types as its notebook says."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from nbtoolkit.errors import PipelineError
from nbtoolkit.notebooks.parameters import typed_parameters
from nbtoolkit.pipeline.references import Reference, found_in, references, resolve
from nbtoolkit.pipeline.step import Step
from nbtoolkit.yaml_lines import Layer, Mistake, refuse

Published = Mapping[str, Mapping[str, Any]]
"""Step -> name -> value."""


def known_mistakes(step: Step) -> list[Mistake]:
    """What is wrong before anything runs: names, and values that refer to nothing."""
    later = {name for name, value in step.parameters.items() if [*references(value)]}
    declared = {
        name: dataclasses.replace(parameter, hint=Any) if name in later else parameter
        for name, parameter in step.glance.declared.items()
    }
    given = {name: None if name in later else resolve(value, {}) for name, value in _given(step)}
    _, mistakes = typed_parameters(_layer(step, given), declared, step.notebook.name)
    return mistakes


def values_of(step: Step, published: Published) -> dict[str, Any]:
    """The values a step is run with.

    Args:
        step: a step, everything that it needs being done.
        published: what the steps before it published.

    Raises:
        PipelineError: a step published no such value, or one of another type.
    """
    refuse([*_not_found(step, published)], PipelineError)
    given = {name: resolve(value, published) for name, value in _given(step)}
    values, mistakes = typed_parameters(
        _layer(step, given), step.glance.declared, step.notebook.name
    )
    refuse(mistakes, PipelineError)
    return values


def _given(step: Step) -> Iterator[tuple[str, Any]]:
    yield from step.parameters.items()


def _layer(step: Step, values: dict[str, Any]) -> Layer:
    return Layer(values=values, places={(name,): place for name, place in step.places.items()})


def _not_found(step: Step, published: Published) -> Iterator[Mistake]:
    for name, value in _given(step):
        for reference in references(value):
            try:
                found_in(published[reference.step], reference)
            except KeyError as error:
                yield _unpublished(step.places[name], reference, error.args[0], published)
            except TypeError as error:
                what, do = f"{reference.text}: {error}", "let the reference be the whole value"
                yield Mistake(place=step.places[name], what=what, do=do)


def _unpublished(place: str, reference: Reference, name: str, published: Published) -> Mistake:
    there = published[reference.step]
    close = difflib.get_close_matches(name, there, n=1, cutoff=0.5)
    return Mistake(
        place=place,
        what=f"{reference.text}: the step {reference.step!r} published no {name!r}",
        allowed=", ".join(there) or "nothing: it published nothing",
        do=f"did you mean {close[0]!r}?" if close else "",
    )
