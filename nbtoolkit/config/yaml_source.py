"""Read YAML and JSON with the line of every key, so that errors can name it.

PyYAML follows YAML 1.1, where ``1e-3`` is a string, ``010`` is eight and ``no`` is false. This
module follows YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from nbtoolkit.errors import ConfigError

MOST_VALUES = 100_000
"""Limit of a file's values, aliases expanded: ten levels of ten aliases make 10 billion."""

Keys = tuple[str, ...]
"""Path of a value in a file: ``("optim", "lr")``."""


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
        what = f"{mistake.place}: {mistake.what}"
        # "from None": pydantic's own error would be shown above this one.
        raise kind(what, allowed=mistake.allowed, do=mistake.do) from None
    if mistakes:
        lines = "".join(f"\n  {mistake}" for mistake in sorted(mistakes, key=_by_line))
        raise kind(f"{len(mistakes)} mistakes in the configuration:{lines}") from None


def _by_line(mistake: Mistake) -> tuple[str, int]:
    name, _, line = mistake.place.rpartition(":")
    return (name, int(line)) if line.isdigit() else (mistake.place, 0)


def read_layer(path: Path, shown: str | None = None) -> Layer:
    """Read a YAML or (``.json``) JSON file of settings.

    Args:
        path: the file.
        shown: its name in messages; default: the path.

    Raises:
        ConfigError: the file cannot be read, is not valid YAML or JSON, or is not a mapping.
    """
    name = shown or str(path)
    text = _read_text(path, name)
    return _read_json(text, name) if path.suffix == ".json" else _read_yaml(text, name)


def parse_value(text: str) -> object:
    """Parse one YAML value: ``3e-4`` is a float, ``[1, 2]`` a list, ``null`` None.

    Raises:
        yaml.YAMLError: the text is not valid YAML.
    """
    try:
        # _Loader is a SafeLoader: it builds plain values only.
        return yaml.load(text, Loader=_Loader)
    except _PYYAML_ERRORS as error:
        raise yaml.YAMLError(str(error)) from error


def dump(values: Mapping[str, object]) -> str:
    """Write YAML that :func:`read_layer` and YAML 1.1 readers read back to the same values."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def parse_settings(text: str, name: str) -> dict[str, object]:
    """Read a mapping of settings from a text, as from a file of that name.

    Raises:
        ConfigError: it is not YAML, not a mapping, or gives a setting twice.
    """
    layer = _read_yaml(text, name)
    refuse([*layer.mistakes])
    return dict(layer.values)


def _read_text(path: Path, name: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text: {error}", do="save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from error


def _read_json(text: str, name: str) -> Layer:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}:{error.lineno}: not valid JSON: {error.msg}") from error
    # Numbers of 5,000 digits, 5,000 nested brackets.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not valid JSON: {error}") from error
    # JSON is YAML except for tabs between tokens (inside strings JSON writes them as \t).
    layer = _read_yaml(text.replace("\t", " "), name)
    return Layer(values=values, places=layer.places, mistakes=layer.mistakes)


def _read_yaml(text: str, name: str) -> Layer:
    """Read a YAML text; a duplicate key becomes a mistake of the layer."""
    reader = _Reader(text, name)
    try:
        values = reader.values()
    except _TooLarge as error:
        raise ConfigError(
            f"{name}: its anchors and aliases expand to more than {MOST_VALUES:,} values",
            allowed=f"a file of at most {MOST_VALUES:,} values, aliases expanded",
            do="use fewer aliases of aliases",
        ) from error
    except yaml.YAMLError as error:
        raise _not_yaml(error, text, name) from error
    except _PYYAML_ERRORS as error:
        raise ConfigError(
            f"{name}: not valid YAML: {error}",
            allowed="plain numbers, texts, lists and mappings",
            do="remove deep nesting and tags such as !!int",
        ) from error
    return Layer(values=values, places=reader.places, mistakes=tuple(reader.mistakes))


def _not_yaml(error: yaml.YAMLError, text: str, name: str) -> ConfigError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return ConfigError(f"{name}: not valid YAML: {error}")
    problem = getattr(error, "problem", None) or getattr(error, "context", None) or str(error)
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in line[: mark.column + 1]:
        return ConfigError(
            f"{name}:{mark.line + 1}: a tab: {line.strip()!r}",
            allowed="spaces, as YAML requires",
            do="replace the tab by spaces",
        )
    return ConfigError(f"{name}:{mark.line + 1}: not valid YAML: {problem}: {line.strip()!r}")


class _TooLarge(yaml.YAMLError):
    """A document has too many values, aliases expanded."""


_PYYAML_ERRORS = (ValueError, AttributeError, RecursionError)
"""Errors of PyYAML that are no YAMLError: ``!!int x``, 5,000 digits, 5,000 brackets."""


class _Loader(yaml.SafeLoader):
    """A safe loader with the scalars of YAML 1.2 and a limit for expanded aliases."""

    def get_single_node(self) -> yaml.Node | None:
        """Return the document's root node; None for an empty document.

        Raises:
            _TooLarge: the document has too many values, aliases expanded.
        """
        root = super().get_single_node()
        if root is not None and _size(root, {}) > MOST_VALUES:
            raise _TooLarge(f"more than {MOST_VALUES:,} values, aliases expanded")
        return root


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Count the values below a node, aliases expanded; ``known`` holds the nodes counted so far."""
    if id(node) not in known:
        # Ends the recursion of a node that contains itself; _Reader rejects it later.
        known[id(node)] = 1
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        known[id(node)] = 1 + sum(_size(child, known) for child in children)
    return known[id(node)]


if TYPE_CHECKING:
    from yaml import SafeDumper as _SafeDumper
else:
    # libyaml writes a config in 0.3 ms, pure Python in 9 ms, a tenth of a warm launch.
    _SafeDumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_SafeDumper):
    """A safe dumper that quotes strings which YAML 1.1 or 1.2 would read as another type."""


_SCALARS = (
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
)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node).replace("_", "")
    base = {"0x": 16, "0o": 8}.get(text[:2], 10)
    return int(text, base)


def _register_scalars() -> None:
    _Loader.yaml_implicit_resolvers, _Dumper.yaml_implicit_resolvers = {}, {}
    for tag, pattern, first in _SCALARS:
        expression = re.compile(f"^(?:{pattern})$")
        for cls in (_Loader, _Dumper):
            cls.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", expression, first)
    _Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
    for letter, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items():
        _Dumper.yaml_implicit_resolvers.setdefault(letter, []).extend(resolvers)


_register_scalars()


@dataclass
class _Reader:
    """Builds the values of one YAML document and records the line of each key."""

    text: str
    name: str
    places: dict[Keys, str] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    _open: set[int] = field(default_factory=set)
    """Ids of the nodes on the path to the current one."""

    def values(self) -> dict[str, object]:
        self._loader = _Loader(self.text)
        try:
            node = self._loader.get_single_node()
            if node is None or (isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null")):
                return {}
            if not isinstance(node, yaml.MappingNode):
                raise ConfigError(
                    f"{self.name}:{node.start_mark.line + 1}: not a mapping of settings",
                    allowed="`name: value` lines under sections such as `train:`",
                )
            return self._mapping(node, ())
        finally:
            self._loader.dispose()

    def _value(self, node: yaml.Node, keys: Keys) -> object:
        if id(node) in self._open:
            raise yaml.constructor.ConstructorError(
                None, None, "a value that contains itself", node.start_mark
            )
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, keys)
            if isinstance(node, yaml.SequenceNode) and node.tag.endswith(":seq"):
                return [self._value(item, (*keys, str(i))) for i, item in enumerate(node.value)]
            return self._loader.construct_object(node, deep=True)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, keys: Keys) -> dict[str, object]:
        self._report_duplicates(node, keys)
        # Expands `<<: *other` to the front, so that the mapping's own keys override it.
        self._loader.flatten_mapping(node)
        values: dict[str, object] = {}
        for key, value_node, place in self._pairs(node):
            values[key] = self._value(value_node, (*keys, key))
            self.places[(*keys, key)] = place
        return values

    def _pairs(self, node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node, str]]:
        for key_node, value_node in node.value:
            key = self._loader.construct_object(key_node, deep=True)
            place = f"{self.name}:{key_node.start_mark.line + 1}"
            if not isinstance(key, str):
                what = f"the key {key!r} is not a string"
                self.mistakes.append(Mistake(place=place, what=what, do=f'write "{key}"'))
            yield str(key), value_node, place

    def _report_duplicates(self, node: yaml.MappingNode, keys: Keys) -> None:
        first: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                continue
            if key_node.value in first:
                dotted = ".".join((*keys, key_node.value))
                what = f"'{dotted}' is given twice, first in line {first[key_node.value]}"
                mistake = Mistake(place=f"{self.name}:{line}", what=what, do="keep one of them")
                self.mistakes.append(mistake)
            first.setdefault(key_node.value, line)
