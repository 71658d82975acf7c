"""The values of a step's parameters: references looked up, types as its notebook says."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from nbtoolkit.errors import PipelineError
from nbtoolkit.notebooks.parameters import Parameter, typed_parameters
from nbtoolkit.pipeline.references import Reference, found_in, resolve
from nbtoolkit.pipeline.step import Step
from nbtoolkit.yaml_lines import Keys, Layer, Mistake, refuse

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
