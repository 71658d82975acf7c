"""Space: what a sweep searches: dotted names of the configuration, and the values of each.

space:
  optim.lr: {type: float, low: 1.0e-4, high: 1.0e-1, log: true}
  model.hidden: {type: int, low: 32, high: 512, log: true}
  optim.name: [adamw, sgd]                                # short for choices
  optim.momentum: {type: float, low: 0.5, high: 0.99, when: {optim.name: sgd}}
  train.epochs: 5                                         # a constant
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import ConfigError, SpaceError
from nbtoolkit.search.parameter import (
    CategoricalParameter,
    ConstantParameter,
    Parameter,
    Searched,
    stored,
)
from nbtoolkit.search.space_reader import place_of, read_parameters
from nbtoolkit.yaml_lines import Keys, Mistake, refuse

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.distributions import BaseDistribution

    from nbtoolkit.config import Config

_LISTED_AT_MOST = 100_000


class Space:
    """The parameters of a sweep by dotted name, each after those it depends on.

    Args:
        parameters: name -> parameter, as written or checked (:mod:`nbtoolkit.search.parameter`).
        places: where each stands, for messages: ``("optim.lr", "low") -> "sweep.yaml:7"``.

    Raises:
        SpaceError: a parameter is wrong, or there is nothing to search; all mistakes at once.
    """

    def __init__(
        self, parameters: Mapping[str, Any], places: Mapping[Keys, str] | None = None
    ) -> None:
        self._places = dict(places or {})
        self.parameters: dict[str, Parameter] = read_parameters(parameters, self._places)
        self._grid: list[dict[str, Any]] | None = None

    @property
    def searched(self) -> dict[str, Searched]:
        """The parameters that are not constants."""
        return {
            name: one
            for name, one in self.parameters.items()
            if not isinstance(one, ConstantParameter)
        }

    def suggest(self, trial: Trial) -> dict[str, Any]:
        """Let Optuna choose a value for every parameter whose condition holds.

        Returns:
            Dotted name -> value, constants too: overrides for the configuration.
        """
        return self._walk(lambda name, one: one.suggest(name, trial))

    def at(self, shares: Sequence[float]) -> dict[str, Any]:
        """The point at these shares (0 <= share < 1) of the searched parameters' ranges."""
        share = dict(zip(self.searched, shares, strict=True))
        return self._walk(lambda name, one: one.at(share[name]))

    def meant(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """The values that a study's trial holds, with the constants."""
        return self._walk(
            lambda name, one: (
                one.meant(stored[name]) if isinstance(one, CategoricalParameter) else stored[name]
            )
        )

    def stored(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Searched values as Optuna's study holds them."""
        return {name: stored(value) for name, value in values.items() if name in self.searched}

    def distributions(self) -> dict[str, BaseDistribution]:
        """Optuna's distribution of every searched parameter, whatever its condition."""
        return {name: one.distribution() for name, one in self.searched.items()}

    def grid(self) -> list[dict[str, Any]]:
        """Every combination, the last parameter changing fastest; conditions are kept.

        Raises:
            SpaceError: a parameter has no list of values, or the grid has over 100,000 points.
        """
        if self._grid is None:
            self._grid = self._points()
        return self._grid

    def _points(self) -> list[dict[str, Any]]:
        endless = [name for name, one in self.searched.items() if one.values() is None]
        if endless:
            raise SpaceError(
                f"{place_of(endless[0], self._places)}: a grid has no end with space.{endless[0]}",
                allowed="choices, whole numbers, or a float with a step",
                do=f"give {endless[0]} a step or a list, or choose another sampler",
            )
        points: list[dict[str, Any]] = [{}]
        for name, one in self.parameters.items():
            longer = (more for point in points for more in _extended(point, name, one))
            points = list(itertools.islice(longer, _LISTED_AT_MOST + 1))
            if len(points) > _LISTED_AT_MOST:
                raise SpaceError(
                    f"the grid has more than {_LISTED_AT_MOST:,} points",
                    do="search fewer values, or choose another sampler, such as qmc",
                )
        return points

    def to_dict(self) -> dict[str, Any]:
        """The space in full, as plain values; :class:`Space` takes it back."""
        return {name: one.model_dump(exclude_unset=True) for name, one in self.parameters.items()}

    def check(self, config: Config) -> None:
        """Check that the configuration takes every parameter's values.

        Raises:
            SpaceError: a name is unknown, or a value is not allowed; all mistakes at once.
        """
        found = [
            mistake
            for name, one in self.parameters.items()
            if (mistake := self._refused(config, name, one)) is not None
        ]
        refuse(found, SpaceError)

    def _refused(self, config: Config, name: str, one: Parameter) -> Mistake | None:
        for value in _extremes(one):
            try:
                config.with_overrides({name: value})
            except ConfigError as error:
                what = error.what.removeprefix(f"override {name!r}: ")
                place = place_of(name, self._places)
                return Mistake(place=place, what=what, allowed=error.allowed, do=error.do)
        return None

    def _walk(self, choose: Callable[[str, Searched], Any]) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        for name, one in self.parameters.items():
            if one.active(chosen):
                chosen[name] = (
                    one.value if isinstance(one, ConstantParameter) else choose(name, one)
                )
        return chosen

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Space) and self.parameters == other.parameters

    def __hash__(self) -> int:
        return hash(tuple(self.parameters))

    def __repr__(self) -> str:
        return f"Space({', '.join(self.parameters)})"


def _extended(point: dict[str, Any], name: str, one: Parameter) -> Iterator[dict[str, Any]]:
    """The point with each value of one more parameter; itself where the condition fails."""
    if not one.active(point):
        yield point
        return
    values = [one.value] if isinstance(one, ConstantParameter) else one.values() or []
    for value in values:
        yield {**point, name: value}


def _extremes(one: Parameter) -> list[Any]:
    """The values at which a configuration would refuse the parameter, if anywhere."""
    if isinstance(one, ConstantParameter):
        return [one.value]
    return list(one.choices) if isinstance(one, CategoricalParameter) else [one.low, one.high]
