"""Find layers of settings in files and overrides, and merge them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from nbtoolkit.config.yaml_source import Keys, Layer, Mistake, parse_value, read_layer
from nbtoolkit.errors import ConfigError

Overrides = Mapping[str, Any] | Iterable[str]
"""``{"optim.lr": 3e-4}``, ``{"optim": {"lr": 3e-4}}`` or ``["optim.lr=3e-4"]``."""

# Of these two a later layer's one replaces an earlier layer's other.
_ALTERNATIVES = {
    ("train", "batch_size"): ("train", "batch_size_per_device"),
    ("train", "batch_size_per_device"): ("train", "batch_size"),
}


def file_layer(path: str | os.PathLike[str]) -> Layer:
    """Read a file of settings; a relative path is looked for, see :func:`places_to_look`.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
    """
    wanted = Path(path).expanduser()
    candidates = list(places_to_look(wanted))
    for candidate in candidates:
        if candidate.exists():
            return read_layer(candidate, _shown(candidate))
    folders = list(dict.fromkeys(candidate.parent for candidate in candidates))
    raise ConfigError(
        f"there is no configuration file {str(path)!r}",
        allowed=f"a file in one of {', '.join(map(str, folders))}",
        do=_similar_file(wanted.name, folders),
    )


def places_to_look(wanted: Path) -> Iterator[Path]:
    """Where a configuration file may lie, in order.

    An absolute path as it is. A relative one in the working directory, then in its parents up to
    the first with a ``pyproject.toml``, then (``config/...``, ``notebooks/...``) among the files of
    this package.
    """
    if wanted.is_absolute():
        yield wanted
        return
    cwd = Path.cwd()
    for folder in (cwd, *cwd.parents):
        yield folder / wanted
        if (folder / "pyproject.toml").exists():
            break
    if wanted.parts[:1] in (("config",), ("notebooks",)):
        yield shipped_folder(wanted.parts[0]).joinpath(*wanted.parts[1:])


def shipped_folder(name: str = "config") -> Path:
    """The folder of a name that ships: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / f"_{name}"
    return inside if inside.is_dir() else package.parent / name


def override_layer(overrides: Overrides | None) -> Layer:
    """The layer of the overrides of a call; texts such as ``"optim.lr=3e-4"`` are read as YAML."""
    tree = _Tree()
    if isinstance(overrides, str):
        overrides = [overrides]
    if isinstance(overrides, Mapping):
        for name, value in overrides.items():
            tree.put(name, value, f"override {name!r}")
    else:
        for text in overrides or ():
            tree.put_text(text)
    return Layer(values=tree.values, places=tree.places, mistakes=tuple(tree.mistakes))


def merge(layers: Iterable[Layer]) -> Layer:
    """One layer out of several: the later one's values hold, lists are replaced as a whole."""
    values: dict[str, Any] = {}
    places: dict[Keys, str] = {}
    mistakes: list[Mistake] = []
    for layer in layers:
        for keys, other in _ALTERNATIVES.items():
            if _get(layer.values, keys) is not None and _get(values, other) is not None:
                values[other[0]].pop(other[1])
        _merge_into(values, layer.values)
        places.update(layer.places)
        mistakes += layer.mistakes
    return Layer(values=values, places=places, mistakes=tuple(mistakes))


class _Tree:
    """Nested settings out of dotted names."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.places: dict[Keys, str] = {}
        self.mistakes: list[Mistake] = []

    def put_text(self, text: str) -> None:
        name, equals, value = text.partition("=")
        place = f"override {text!r}"
        if not equals:
            self._mistake(place, "has no '='", 'write "optim.lr=3e-4"')
            return
        try:
            self.put(name.strip(), parse_value(value), place)
        except yaml.YAMLError:
            self._mistake(place, f"the value {value!r} is not YAML", "put quotes around a text")

    def put(self, name: str, value: Any, place: str) -> None:
        keys = tuple(name.split(".")) if isinstance(name, str) else ("",)
        if not all(keys):
            self._mistake(place, "is not a dotted name", 'write "section.name", such as "optim.lr"')
            return
        self._put(keys, value, place)

    def _put(self, keys: Keys, value: Any, place: str) -> None:
        self.places[keys] = place
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                self._put((*keys, *str(key).split(".")), inner, place)
            return
        into = self.values
        for key in keys[:-1]:
            into = into.setdefault(key, {})
            if not isinstance(into, dict):
                self._mistake(place, f"'{key}' is both a value and a section", "keep one of them")
                return
        into[keys[-1]] = _plain(value)

    def _mistake(self, place: str, what: str, do: str) -> None:
        self.mistakes.append(Mistake(place=place, what=what, do=do))


def _plain(value: Any) -> Any:
    """A NumPy scalar (what samplers hand out) as the Python number it stands for."""
    is_scalar = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    return value.item() if is_scalar else value


def _merge_into(values: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(values.get(key), dict):
            _merge_into(values[key], value)
        elif isinstance(value, Mapping):
            values[key] = {}
            _merge_into(values[key], value)
        else:
            values[key] = value


def _get(values: Mapping[str, Any], keys: Keys) -> Any:
    section = values.get(keys[0])
    return section.get(keys[1]) if isinstance(section, Mapping) else None


def _shown(path: Path) -> str:
    """A path as short as it can be said: relative below the working directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _similar_file(name: str, folders: list[Path]) -> str:
    there = [entry.name for folder in folders for entry in folder.glob("*.*ml")]
    close = difflib.get_close_matches(name, there, n=1)
    return f"did you mean {close[0]!r}?" if close else "check the path, or give an absolute one"
