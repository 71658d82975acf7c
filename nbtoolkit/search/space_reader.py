"""Reads a space as written, and says what is wrong with it: all at once, with places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from nbtoolkit.config_checks import fields
from nbtoolkit.config_names import nearest
from nbtoolkit.errors import SpaceError
from nbtoolkit.search.parameter import (
    KINDS,
    CategoricalParameter,
    ConstantParameter,
    Parameter,
    written_out,
)
from nbtoolkit.yaml_lines import Keys, Mistake, refuse


def read_parameters(values: Mapping[str, Any], places: Mapping[Keys, str]) -> dict[str, Parameter]:
    """The parameters of a space, each after those its condition names.

    Args:
        values: dotted name -> parameter, as written or read before.
        places: where each stands, by ``(name,)`` and ``(name, key)``.

    Raises:
        SpaceError: a parameter is wrong, or there is nothing to search.
    """
    reader = _Reader(places)
    read = {name: one for name, value in values.items() if (one := reader.read(name, value))}
    refuse(reader.mistakes, SpaceError)
    reader.check_conditions(read)
    if all(isinstance(one, ConstantParameter) for one in read.values()):
        reader.mistake("", "there is nothing to search", do="give a setting a range or a list")
    refuse(reader.mistakes, SpaceError)
    return _sorted(read)


def place_of(name: str, places: Mapping[Keys, str]) -> str:
    """Where a parameter stands; its name where it did not come out of a file."""
    return places.get((name,), f"space {name!r}" if name else "space")


def _sorted(read: Mapping[str, Parameter]) -> dict[str, Parameter]:
    done: dict[str, Parameter] = {}
    while len(done) < len(read):
        ready = {name: one for name, one in read.items() if set(one.when) <= set(done)}
        done.update({name: one for name, one in ready.items() if name not in done})
    return done


class _Reader:
    """Collects what is wrong while parameters are read."""

    def __init__(self, places: Mapping[Keys, str]) -> None:
        self._places = places
        self.mistakes: list[Mistake] = []

    def mistake(self, name: str, what: str, *, allowed: str = "", do: str = "") -> None:
        """Note a mistake of a parameter."""
        what = f"space.{name}: {what}" if name else what
        place = place_of(name, self._places)
        self.mistakes.append(Mistake(place=place, what=what, allowed=allowed, do=do))

    def read(self, name: str, value: Any) -> Parameter | None:
        """A parameter as written; None where it is wrong."""
        if isinstance(value, Parameter):
            return value  # read before
        spec = dict(written_out(value))
        kind = KINDS.get(str(spec.get("type")))
        if kind is None:
            self._unknown_kind(name, spec)
            return None
        try:
            one = kind.model_validate(spec)
        except ValidationError as error:
            self._misread(name, spec, kind, error)
            return None
        what, do = one.mistake()
        if what:
            self.mistake(name, what, do=do)
        return one

    def check_conditions(self, read: Mapping[str, Parameter]) -> None:
        """Check that every `when` names parameters and values of theirs, without a circle."""
        for name, one in read.items():
            for other, wanted in one.when.items():
                if other not in read:
                    close = nearest(other, read)
                    do = f"did you mean {close!r}?" if close in read else ""
                    what = f"when: {other} is not searched"
                    self.mistake(name, what, allowed=", ".join(read), do=do)
                else:
                    self._check_wanted(name, other, read[other], wanted)
            if not self.mistakes and name in _above(name, read):
                self.mistake(name, "when: depends on itself", do="take one condition out")

    def _check_wanted(self, name: str, other: str, one: Parameter, wanted: Any) -> None:
        if not isinstance(one, (CategoricalParameter, ConstantParameter)):
            what = f"when: {other} is a range"
            self.mistake(name, what, allowed="conditions on a list of choices")
            return
        choices = one.choices if isinstance(one, CategoricalParameter) else (one.value,)
        for value in wanted if isinstance(wanted, tuple) else (wanted,):
            if value not in choices:
                allowed = ", ".join(map(str, choices))
                self.mistake(name, f"when: {other} is never {value!r}", allowed=allowed)

    def _unknown_kind(self, name: str, spec: Mapping[str, Any]) -> None:
        kind = spec.get("type")
        close = nearest(str(kind), KINDS)
        inner = next(iter(spec), "name")
        what = f"type: {kind!r} is not known" if "type" in spec else "has no type"
        nested = isinstance(spec.get(inner), Mapping)
        do = f"did you mean {close!r}?" if close in KINDS else ""
        do = f"write `{name}.{inner}:`, one dotted name for each setting" if nested else do
        self.mistake(name, what, allowed=", ".join(KINDS), do=do)

    def _misread(
        self, name: str, spec: Mapping[str, Any], kind: type[Parameter], error: ValidationError
    ) -> None:
        """Note what pydantic found, once for each key (it goes on into unions and lists)."""
        allowed = fields(kind)
        found = {str(item["loc"][0]): item["type"] for item in reversed(error.errors())}
        for key, problem in found.items():
            place = self._places.get((name, key)) or place_of(name, self._places)
            what, hint, do = f"{key}: {spec.get(key)!r} is not allowed", allowed.get(key, ""), ""
            if problem == "missing":
                what = f"has no {key}"
            elif problem == "extra_forbidden":
                close = nearest(key, allowed)
                what, hint = f"unknown key {key!r}", ", ".join(allowed)
                do = f"did you mean {close!r}?" if close in allowed else ""
            what = f"space.{name}: {what}"
            self.mistakes.append(Mistake(place=place, what=what, allowed=hint, do=do))


def _above(name: str, read: Mapping[str, Parameter]) -> set[str]:
    """All that a parameter's condition names, and theirs."""
    found: set[str] = set()
    todo = list(read[name].when)
    while todo:
        other = todo.pop()
        if other in read and other not in found:
            found.add(other)
            todo += read[other].when
    return found
