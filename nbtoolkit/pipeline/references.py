"""References: `${sweep.best_config}` is what the step `sweep` published as `best_config`.

A reference that is the whole value keeps its type; within a text it becomes part of the text.
`${pipeline.folder}` is the pipeline's folder. `$${...}` stands for the characters `${...}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
