"""Which steps need which: what leads nowhere or in a circle is refused, the rest gives an order."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter

from nbtoolkit.pipeline.references import Reference
from nbtoolkit.pipeline.step import OWN, Step
from nbtoolkit.yaml_lines import Mistake

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
        for name in step.wishes.after:
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
