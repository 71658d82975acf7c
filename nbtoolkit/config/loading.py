"""Load settings from layers of YAML, JSON and overrides, and report all mistakes in one error.

    defaults  <  host overlay  <  file  <  overrides

A layer has the line of each setting, so that an error can name it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from nbtoolkit.config.aliases import MEANINGS, REFUSALS, nearest
from nbtoolkit.config.fields import FREE, Free, allowed_values, as_yaml, describe
from nbtoolkit.errors import ConfigError

MOST_VALUES = 100_000
"""Limit of a file's values, aliases expanded: ten levels of ten aliases make 10 billion."""

Keys = tuple[str, ...]
"""Path of a value in a file: ``("optim", "lr")``."""

Overrides = Mapping[str, object] | Iterable[str]
"""``{"optim.lr": 3e-4}``, ``{"optim": {"lr": 3e-4}}`` or ``["optim.lr=3e-4"]``."""

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One error in a configuration: its place, what is wrong, what is allowed, what to do."""

    place: str
    what: str
    allowed: str = ""
    do: str = ""

    def __str__(self) -> str:
        hints = [f"allowed: {self.allowed}"] if self.allowed else []
        hints += [self.do] if self.do else []
        return f"{self.place}: {self.what}" + (f" ({'; '.join(hints)})" if hints else "")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Settings of one source, the place of each (``file:line``), and the mistakes found so far."""

    values: dict[str, Any]
    places: Mapping[Keys, str]
    mistakes: tuple[Mistake, ...] = ()


def refuse(mistakes: list[Mistake], kind: type[ConfigError] = ConfigError) -> None:
    """Raise one error for all mistakes, if there are any.

    Args:
        mistakes: the mistakes to report.
        kind: the error's type.

    Raises:
        ConfigError: there is at least one mistake.
    """
    if len(mistakes) == 1:
        [mistake] = mistakes
        problem = f"{mistake.place}: {mistake.what}"
        # "from None": pydantic's own error would be shown above this one.
        raise kind(problem, allowed=mistake.allowed, do=mistake.do) from None
    if mistakes:
        lines = "".join(f"\n  {mistake}" for mistake in sorted(mistakes, key=_by_line))
        raise kind(f"{len(mistakes)} mistakes in the configuration:{lines}") from None


def _by_line(mistake: Mistake) -> tuple[str, int]:
    name, _, line = mistake.place.rpartition(":")
    return (name, int(line)) if line.isdigit() else (mistake.place, 0)


def file_layer(path: str | os.PathLike[str]) -> Layer:
    """Read a file of settings; :func:`places_to_look` resolves a relative path.

    Raises:
        ConfigError: the file does not exist or cannot be read.
    """
    wanted = Path(path).expanduser()
    cwd = Path.cwd()
    candidates = list(places_to_look(wanted))
    for file in candidates:
        if file.exists():
            shown = file.relative_to(cwd) if file.is_relative_to(cwd) else file
            return read_layer(file, str(shown))
    folders = list(dict.fromkeys(candidate.parent for candidate in candidates))
    names = [entry.name for folder in folders for entry in folder.glob("*.*ml")]
    close = difflib.get_close_matches(wanted.name, names, n=1)
    raise ConfigError(
        f"there is no configuration file {str(path)!r}",
        allowed=f"a file in one of {', '.join(map(str, folders))}",
        do=f"did you mean {close[0]!r}?" if close else "check the path, or give an absolute one",
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


def read_layer(path: Path, shown: str | None = None) -> Layer:
    """Read a YAML or (``.json``) JSON file of settings.

    Args:
        path: the file.
        shown: its name in messages; default: the path.

    Raises:
        ConfigError: the file cannot be read, is not valid YAML or JSON, or is not a mapping.
    """
    name = shown or str(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text: {error}", do="save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from error
    return _read_json(text, name) if path.suffix == ".json" else _read_yaml(text, name)


def parse_settings(text: str, name: str) -> dict[str, object]:
    """Read a mapping of settings from a text, as from a file of that name.

    Raises:
        ConfigError: it is not YAML, not a mapping, or gives a setting twice.
    """
    layer = _read_yaml(text, name)
    refuse([*layer.mistakes])
    return dict(layer.values)


def parse_value(text: str) -> object:
    """Parse one YAML value: ``3e-4`` is a float, ``[1, 2]`` a list, ``null`` None.

    Raises:
        yaml.YAMLError: the text is not valid YAML.
    """
    return _Reader("").read(text)


def dump(values: Mapping[str, object]) -> str:
    """Write YAML that :func:`read_layer` and YAML 1.1 readers read back to the same values."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _read_json(text: str, name: str) -> Layer:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}:{error.lineno}: not valid JSON: {error.msg}") from error
    # Numbers of 5,000 digits, 5,000 nested brackets.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not valid JSON: {error}") from error
    # JSON is YAML except for tabs between tokens (inside strings JSON writes them as \t).
    return replace(_read_yaml(text.replace("\t", " "), name), values=values)


def _read_yaml(text: str, name: str) -> Layer:
    reader = _Reader(name)
    try:
        values = reader.read(text) or {}
    except yaml.YAMLError as error:
        raise _not_yaml(error, text, name) from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{name}:{reader.first_line}: not a mapping of settings",
            allowed="`name: value` lines under sections such as `train:`",
        )
    return Layer(values=values, places=reader.places, mistakes=tuple(reader.mistakes))


def _not_yaml(error: yaml.YAMLError, text: str, name: str) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return ConfigError(
            f"{name}: not valid YAML: {error}",
            allowed=f"at most {MOST_VALUES:,} plain numbers, texts, lists and mappings",
            do="remove control characters, deep nesting, aliases of aliases, and tags like !!int",
        )
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    problem = getattr(error, "problem", None) or error
    return ConfigError(
        f"{name}:{mark.line + 1}: not valid YAML: {problem}: {line.strip()!r}",
        do="replace the tab by spaces" if "\t" in line[: mark.column + 1] else "",
    )


class _Loader(yaml.SafeLoader):
    """PyYAML follows YAML 1.1, where ``1e-3`` is a string, ``010`` is eight and ``no`` is false.

    This loader follows YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema).
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012


if TYPE_CHECKING:
    from yaml import SafeDumper as _SafeDumper
else:
    # libyaml writes a config in 0.3 ms, pure Python in 9 ms, a tenth of a warm launch.
    _SafeDumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_SafeDumper):
    """A safe dumper that quotes strings which YAML 1.1 or 1.2 would read as another type."""


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F_]+|0o[0-7_]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
):
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first
        )


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node).replace("_", "")
    return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


class _Reader:
    """Builds the values of one YAML document, and notes the line of each key.

    Args:
        name: the name of the file.
    """

    def __init__(self, name: str) -> None:
        self.first_line = 1
        self.places: dict[Keys, str] = {}
        self.mistakes: list[Mistake] = []
        self._name = name
        self._count = 0

    def read(self, text: str) -> object:
        """Return the document's value; None if it is empty.

        Raises:
            yaml.YAMLError: the text is not valid YAML, or its aliases expand to too many values.
        """
        try:
            self._loader = _Loader(text)
            node = self._loader.get_single_node()
            if node is None:
                return None
            self.first_line = node.start_mark.line + 1
            return self._value(node, ())
        except RecursionError as error:
            text = "values nest too deeply, or an alias stands in its own value"
            raise yaml.YAMLError(text) from error
        except (ValueError, AttributeError) as error:  # of PyYAML: `!!int x`, 5,000 digits
            raise yaml.YAMLError(str(error)) from error

    def _value(self, node: yaml.Node, keys: Keys) -> object:
        self._count += 1
        if self._count > MOST_VALUES:
            text = f"its anchors and aliases expand to more than {MOST_VALUES:,} values"
            raise yaml.YAMLError(text)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, keys)
        if isinstance(node, yaml.SequenceNode):
            if not node.tag.endswith(":seq"):
                text = f"a list cannot have the tag {node.tag!r}"
                raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)
            return [self._value(item, (*keys, str(i))) for i, item in enumerate(node.value)]
        return self._loader.construct_object(node, deep=True)

    def _mapping(self, node: yaml.MappingNode, keys: Keys) -> dict[str, object]:
        values: dict[str, object] = {}
        lines: dict[str, int] = {}
        merges = [pair for pair in node.value if pair[0].tag.endswith(":merge")]
        for _, merged in merges:
            values.update(self._merged(merged, keys))
        for key_node, value_node in node.value:
            if key_node.tag.endswith(":merge"):
                continue
            key = self._value(key_node, keys)
            line = key_node.start_mark.line + 1
            place = f"{self._name}:{line}"
            name = str(key)
            if not isinstance(key, str):
                self._mistake(place, f"the key {key!r} is not a string", f'write "{key}"')
            if name in lines:
                dotted = ".".join((*keys, name))
                problem = f"'{dotted}' is given twice, first in line {lines[name]}"
                self._mistake(place, problem, "keep one of them")
            lines.setdefault(name, line)
            values[name] = self._value(value_node, (*keys, name))
            self.places[(*keys, name)] = place
        return values

    def _merged(self, node: yaml.Node, keys: Keys) -> dict[str, object]:
        """Return the values of ``<<: *other`` or ``<<: [*one, *other]``, where the first wins."""
        values: dict[str, object] = {}
        for source in reversed(node.value if isinstance(node, yaml.SequenceNode) else [node]):
            if not isinstance(source, yaml.MappingNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "<< needs a mapping", source.start_mark
                )
            values.update(self._mapping(source, keys))
        return values

    def _mistake(self, place: str, problem: str, do: str) -> None:
        self.mistakes.append(Mistake(place=place, what=problem, do=do))


def override_layer(overrides: Overrides | None) -> Layer:
    """Make a layer of a call's overrides; the value in ``"optim.lr=3e-4"`` is read as YAML."""
    values: dict[str, Any] = {}
    places: dict[Keys, str] = {}
    mistakes = []
    for given in [overrides] if isinstance(overrides, str) else overrides or ():
        place = f"override {given!r}"
        try:
            named = overrides[given] if isinstance(overrides, Mapping) else _parsed(given)
            name = given if isinstance(overrides, Mapping) else given.partition("=")[0].strip()
            for keys, value in _leaves(name, named):
                _put(values, keys, value)
                for length in range(name.count(".") + 1, len(keys) + 1):
                    places[keys[:length]] = place
        except ConfigError as error:
            mistakes.append(Mistake(place=place, what=error.what, do=error.do))
    return Layer(values=values, places=places, mistakes=tuple(mistakes))


def _parsed(override: str) -> object:
    _, equals, value = override.partition("=")
    if not equals:
        raise ConfigError("has no '='", do='write "optim.lr=3e-4"')
    try:
        return parse_value(value)
    except yaml.YAMLError as error:
        problem = f"the value {value!r} is not YAML"
        do = "put quotes around a string"
        raise ConfigError(problem, do=do) from error


def _leaves(name: object, value: object) -> Iterator[tuple[Keys, object]]:
    """Yield the path and value of each setting in an override."""
    # Callers without type checks may pass names of any type.
    keys = tuple(name.split(".")) if isinstance(name, str) else ("",)
    if not all(keys):
        raise ConfigError("is not a dotted name", do='write "section.name", such as "optim.lr"')
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    elif getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        yield keys, value.item()  # a NumPy scalar, as samplers return it
    else:
        yield keys, value


def _put(values: dict[str, Any], keys: Keys, value: object) -> None:
    for key in keys[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise ConfigError(f"'{key}' is both a value and a section", do="keep one of them")
    values[keys[-1]] = value


# A later layer's setting removes an earlier layer's alternative.
_ALTERNATIVES = {"batch_size": "batch_size_per_device", "batch_size_per_device": "batch_size"}


def merge(layers: Iterable[Layer]) -> Layer:
    """Merge layers: later values win, and lists are replaced as a whole."""
    values: dict[str, Any] = {}
    places: dict[Keys, str] = {}
    mistakes: list[Mistake] = []
    for layer in layers:
        _remove_alternatives(values.get("train"), layer.values.get("train"))
        for name, value in layer.values.items():
            # `train:` with nothing under it sets nothing.
            if value is not None or not isinstance(values.get(name), dict):
                _merge_into(values, {name: value})
        places.update(layer.places)
        mistakes += layer.mistakes
    return Layer(values=values, places=places, mistakes=tuple(mistakes))


def _remove_alternatives(earlier: object, later: object) -> None:
    if isinstance(earlier, dict) and isinstance(later, Mapping):
        for name, other in _ALTERNATIVES.items():
            if later.get(name) is not None:
                earlier.pop(other, None)


def _merge_into(values: dict[str, Any], new: Mapping[str, object]) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping):
            if not isinstance(values.get(key), dict):
                values[key] = {}
            _merge_into(values[key], value)
        else:
            values[key] = value


def with_our_names(layer: Layer, model: type[BaseModel]) -> Layer:
    """Return a layer with our names in place of those of other launchers.

    Args:
        layer: settings as written, in sections or flat at the top level.
        model: has our names.
    """
    known = allowed_values(model)
    places = dict(layer.places)
    mistakes = list(layer.mistakes)
    values = {k: dict(v) if isinstance(v, Mapping) else v for k, v in layer.values.items()}
    for keys, place in layer.places.items():
        name = ".".join(keys)
        meaning = name if name in known else MEANINGS.get(keys[-1], "")
        ours = tuple(meaning.split("."))
        if not meaning or ours == keys or keys[0] in FREE or len(keys) > 2:
            continue
        value = (values if len(keys) == 1 else values[keys[0]]).pop(keys[-1])
        section = values.setdefault(ours[0], {})
        if isinstance(section, dict) and section.setdefault(ours[1], value) != value:
            problem = f"'{name}' sets {meaning}, which {places[ours]} sets already"
            mistakes.append(Mistake(place=place, what=problem, do="keep one of them"))
        places.setdefault(ours, place)
    return Layer(values=values, places=places, mistakes=tuple(mistakes))


def validate(model: type[Model], layer: Layer, kind: type[ConfigError] = ConfigError) -> Model:
    """Make a model of a layer's values.

    Raises:
        ConfigError: of the given kind; lists all mistakes.
    """
    try:
        checked = model.model_validate(layer.values)
    except ValidationError as error:
        refuse([*layer.mistakes, *mistakes(error, layer, model)], kind)
        raise  # not reached: every validation error becomes a mistake
    refuse([*layer.mistakes], kind)
    return checked


def mistakes(error: ValidationError, layer: Layer, model: type[BaseModel]) -> list[Mistake]:
    """Convert pydantic's errors to one mistake per setting, with its place.

    Args:
        error: the error from validating ``layer.values``.
        layer: the validated values and their places.
        model: the model they were validated against.
    """
    by_setting: dict[Keys, Mistake] = {}
    for item in error.errors(include_url=False):
        # pydantic's location continues into unions and lists.
        keys = tuple(map(str, item["loc"]))[:2]
        if keys[0] in FREE or keys[0] in allowed_values(model):
            keys = keys[:1]
        reason = str(item["ctx"]["error"]) if item["type"] == "value_error" else ""
        if item["type"] == "extra_forbidden":
            by_setting[keys] = _unknown(layer, keys, model)
        elif reason or keys not in by_setting:
            by_setting[keys] = _invalid(layer, keys, model, reason)
    return list(by_setting.values())


def _unknown(layer: Layer, keys: Keys, model: type[BaseModel]) -> Mistake:
    dotted = ".".join(keys)
    place = place_of(layer, keys)
    sections = list(model.model_fields)
    has_free = set(FREE) <= set(sections)
    known = [*allowed_values(model), *(sections if len(keys) == 1 else ())]
    why, _, do = REFUSALS.get(dotted, REFUSALS.get(keys[-1], "")).partition("; ")
    if has_free and why and why not in known:
        return Mistake(place=place, what=f"'{dotted}' {why}", do=do)
    names = [name for name in known if name.startswith(f"{keys[0]}.")]
    close = nearest(dotted, known)
    hint = "put your own settings under model: or data:" if has_free else ""
    return Mistake(
        place=place,
        what=f"unknown setting '{dotted}'",
        allowed=", ".join(name.partition(".")[2] for name in names) or ", ".join(sections),
        do=f"did you mean '{close}'?" if close in known or (close and hint) else hint,
    )


_FINDERS = {
    "optim.lr": "nb.find_learning_rate(train, config)",
    "train.num_workers": 'nb.compare(train, config, [{"train.num_workers": n} for n in (0, 2)])',
}
"""The calls that suggest a value for settings that have no ``auto``: a launch measures nothing."""


def _invalid(layer: Layer, keys: Keys, model: type[BaseModel], reason: str) -> Mistake:
    dotted = ".".join(keys)
    place = place_of(layer, keys)
    field = model.model_fields[keys[0]]
    value = layer.values[keys[0]]
    is_section = dotted in FREE or dotted not in allowed_values(model)
    if len(keys) == 1 and is_section and not isinstance(value, Mapping):
        problem = f"'{dotted}' is a section, not {value!r}"
        return Mistake(place=place, what=problem, allowed="`name: value` lines under it")
    if dotted in FREE:
        return Mistake(place=place, what=f"{dotted}: {reason}", allowed=describe(Free))
    if len(keys) == 2:
        section: Any = field.annotation
        field = section.model_fields[keys[1]]
        value = value[keys[1]]
    default = field.get_default(call_default_factory=True)
    do = f"set one of these, or remove the setting (default: {as_yaml(default)})"
    if value == "auto" and dotted in _FINDERS:
        do = f"set a number: {_FINDERS[dotted]} measures which one; a launch measures nothing"
    return Mistake(
        place=place,
        what=f"{dotted}: {reprlib.repr(value)} is not allowed" + (f": {reason}" if reason else ""),
        allowed=allowed_values(model)[dotted],
        do=do,
    )


def place_of(layer: Layer, keys: Keys) -> str:
    """Return the place of a setting, else of all values inside it, else of its section."""
    if keys in layer.places:
        return layer.places[keys]
    inside = {place: 0 for other, place in layer.places.items() if other[: len(keys)] == keys}
    return " and ".join(inside) or layer.places.get(keys[:1], "configuration")
