"""Read layers of settings from files and overrides, and merge them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from nbtoolkit.config.yaml_source import Keys, Layer, Mistake, parse_value, read_layer
from nbtoolkit.errors import ConfigError

Overrides = Mapping[str, object] | Iterable[str]
"""``{"optim.lr": 3e-4}``, ``{"optim": {"lr": 3e-4}}`` or ``["optim.lr=3e-4"]``."""

# A later layer's setting removes an earlier layer's alternative.
_ALTERNATIVES = {
    ("train", "batch_size"): ("train", "batch_size_per_device"),
    ("train", "batch_size_per_device"): ("train", "batch_size"),
}


def file_layer(path: str | os.PathLike[str]) -> Layer:
    """Read a file of settings; :func:`places_to_look` resolves a relative path.

    Raises:
        ConfigError: the file does not exist or cannot be read.
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
    """Yield the paths to try for a configuration file, in order.

    An absolute path is tried as it is. A relative one is tried in the working directory, in its
    parents up to the first with a ``pyproject.toml``, and then (``config/...``, ``notebooks/...``)
    among the files of this package.
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
    """Return a folder that ships with nbtoolkit: in a wheel inside the package, else beside it."""
    package = Path(__file__).resolve().parents[1]
    inside = package / f"_{name}"
    return inside if inside.is_dir() else package.parent / name


def override_layer(overrides: Overrides | None) -> Layer:
    """Make a layer of a call's overrides; the value in ``"optim.lr=3e-4"`` is read as YAML."""
    tree = _OverrideTree()
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
    """Merge layers: later values win, and lists are replaced as a whole."""
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


class _OverrideTree:
    """Builds nested settings from dotted names."""

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
            self._mistake(place, f"the value {value!r} is not YAML", "put quotes around a string")

    def put(self, name: str, value: object, place: str) -> None:
        # Callers without type checks may pass names of any type.
        keys = tuple(name.split(".")) if isinstance(name, str) else ("",)
        if not all(keys):
            self._mistake(place, "is not a dotted name", 'write "section.name", such as "optim.lr"')
            return
        self._put(keys, value, place)

    def _put(self, keys: Keys, value: object, place: str) -> None:
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


def _plain(value: object) -> object:
    """Convert a NumPy scalar, as samplers return it, to a Python number."""
    is_scalar = getattr(value, "ndim", None) == 0
    return value.item() if is_scalar and hasattr(value, "item") else value


def _merge_into(values: dict[str, Any], new: Mapping[str, object]) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping):
            if not isinstance(values.get(key), dict):
                values[key] = {}
            _merge_into(values[key], value)
        else:
            values[key] = value


def _get(values: Mapping[str, object], keys: Keys) -> object:
    section = values.get(keys[0])
    return section.get(keys[1]) if isinstance(section, Mapping) else None


def _shown(path: Path) -> str:
    """Return a path below the working directory as a relative path, another one as it is."""
    cwd = Path.cwd()
    return str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)


def _similar_file(name: str, folders: list[Path]) -> str:
    names = [entry.name for folder in folders for entry in folder.glob("*.*ml")]
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else "check the path, or give an absolute one"
