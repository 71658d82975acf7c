"""What a host lacks: a walk along requirements, to all that none of its packages meets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from nbtoolkit.errors import WheelsError
from nbtoolkit.hosts.image import Image
from nbtoolkit.hosts.wheels import Wheel

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

Fetch = Callable[["list[Requirement]"], list[Wheel]]

# A host has its torch, for its GPUs; several GB that would not run there.
NEVER = ("torch", "torchvision", "torchaudio", "triton")


def missing_wheels(own: Wheel, extras: Iterable[str], image: Image, fetch: Fetch) -> list[Wheel]:
    """Fetch what a wheel needs on a host and is not there, or is too old there.

    Args:
        own: the wheel that is to run.
        extras: those of its extras that are wanted.
        image: what the host holds.
        fetch: takes requirements, returns a wheel for each.

    Returns:
        The other wheels, by name.

    Raises:
        WheelsError: the host's torch does not do, or a wheel cannot be had.
    """
    walk = _Walk(own, image)
    todo = walk.requirements(own, frozenset(extras))
    while wanted := walk.lacking(todo):
        got = fetch(wanted)
        walk.have.update({wheel.name: wheel for wheel in got})
        todo = [one for wheel in got for one in walk.requirements(wheel, walk.extras(wheel.name))]
    return [wheel for name, wheel in sorted(walk.have.items()) if wheel is not own]


class _Walk:
    """What is known so far: the wheels there are, and all that was ever asked of each name."""

    def __init__(self, own: Wheel, image: Image) -> None:
        self.have = {own.name: own}
        self._image = image
        self._asked: dict[str, tuple[SpecifierSet, frozenset[str]]] = {}

    def extras(self, name: str) -> frozenset[str]:
        return self._asked[name][1]

    def requirements(self, wheel: Wheel, extras: frozenset[str]) -> list[Requirement]:
        """Those of a wheel that hold on the host; of extras of itself what they stand for."""
        from packaging.utils import canonicalize_name

        held = [one for one in wheel.requires if self._image.wants(one, extras)]
        inner = {
            extra
            for one in held
            if canonicalize_name(one.name) == wheel.name
            for extra in one.extras
        }
        if inner - extras:
            return self.requirements(wheel, extras | inner)
        return [one for one in held if canonicalize_name(one.name) != wheel.name]

    def lacking(self, todo: Iterable[Requirement]) -> list[Requirement]:
        """For each name that nothing there meets: all that was ever asked of it, in one."""
        from packaging.requirements import Requirement
        from packaging.utils import canonicalize_name

        names = []
        for one in todo:
            name = canonicalize_name(one.name)
            specifier, extras = self._asked.get(name, (None, frozenset()))
            together = one.specifier if specifier is None else specifier & one.specifier
            self._asked[name] = together, extras | one.extras
            if not self._met(name, one, extras):
                names.append(name)
        lacking = [Requirement(name) for name in dict.fromkeys(names)]
        for one in lacking:
            one.specifier, extras = self._asked[one.name]
            one.extras = set(extras)
        return lacking

    def _met(self, name: str, one: Requirement, extras: frozenset[str]) -> bool:
        """Whether something that is there already does.

        Raises:
            WheelsError: nothing does, and it is nothing that could be brought along.
        """
        if name in self.have:
            version = self.have[name].version
            return one.specifier.contains(version, prereleases=True) and one.extras <= extras
        if not self._image.has(one) and name in NEVER:
            there = self._image.packages.get(name)
            raise WheelsError(
                f"{self._image.name} has {f'{name} {there}' if there else f'no {name}'}, "
                f"and nbtoolkit needs {one}",
                allowed="an image whose torch does: it is never brought along",
            )
        return self._image.has(one)
