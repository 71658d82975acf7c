from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from nbtoolkit.config.loading import dump, parse_value, read_layer
from nbtoolkit.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        ("-.5", -0.5),
        (".inf", float("inf")),
        ("010", 10),
        ("1_000", 1000),
        ("0x1f", 31),
        ("0o17", 15),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("~", None),
        ("", None),
        ("1e-", "1e-"),
        ("'1e-3'", "1e-3"),
        ("[1, 2.]", [1, 2.0]),
    ],
)
def test_values_are_what_they_look_like(text: str, value: Any) -> None:
    read = parse_value(text)
    assert (read, type(read)) == (value, type(value))


def test_dumped_texts_stay_texts_for_every_yaml(tmp_path: Path) -> None:
    texts = ["1e-3", "no", "on", "010", "1:30", "2024-01-01", "~", "", "<<", "=", "a: b", "é"]
    path = tmp_path / "texts.yaml"
    path.write_text(dump({"texts": texts, "numbers": [1e-5, 10, 1e300]}), encoding="utf-8")
    assert read_layer(path).values == {"texts": texts, "numbers": [1e-5, 10, 1e300]}
    assert yaml.safe_load(path.read_text())["texts"] == texts


def test_every_key_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("# comment\na: 1\nb:\n  c: {d: 2}\n  e:\n  - f: 3\n")
    layer = read_layer(path, "my.yaml")
    assert layer.values == {"a": 1, "b": {"c": {"d": 2}, "e": [{"f": 3}]}}
    lines = {".".join(keys): place.removeprefix("my.yaml:") for keys, place in layer.places.items()}
    assert lines == {"a": "2", "b": "3", "b.c": "4", "b.c.d": "4", "b.e": "5", "b.e.0.f": "6"}


def test_anchors_and_merges_work(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {y: 3, <<: *a}\nc: *a\nd: {<<: [*a, {x: 5, z: 6}]}\n")
    layer = read_layer(path, "my.yaml")
    assert layer.values == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": {"x": 1, "y": 2},
        "d": {"x": 1, "y": 2, "z": 6},
    }
    assert layer.places["b", "y"] == "my.yaml:2"
    assert layer.mistakes == ()


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    for text in ("", "# only a comment\n", "---\n", "null"):
        path.write_text(text)
        assert read_layer(path).values == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n\tb: 1", r"my.yaml:2: not valid YAML: .*: 'b: 1'\n.*replace the tab by spaces"),
        ("a: 1\nb: [1, 2", r"my.yaml:\d: not valid YAML"),
        ("a: 1\n  b: 2", r"my.yaml:2: not valid YAML: mapping values are not allowed here: 'b: 2'"),
        ("a: *b", r"my.yaml:1: not valid YAML: found undefined alias 'b'"),
        ("a: 1\n---\nb: 2", r"my.yaml:2: not valid YAML: but found another document"),
        (
            "a: !!python/name:os.system x",
            r"my.yaml:1: not valid YAML: could not determine a",
        ),
        ("a: &a [*a]", r"my.yaml: not valid YAML: .* an alias stands in its own value"),
        ("a: !!python/tuple [1]", r"my.yaml:1: not valid YAML: a list cannot have the tag"),
        ("a: !!omap [b: 1]", r"my.yaml:1: not valid YAML: a list cannot have the tag"),
        ("a: {<<: [1]}", r"my.yaml:1: not valid YAML: << needs a mapping"),
        ("a: \x00", r"my.yaml: not valid YAML: .*special characters are not allowed"),
    ],
)
def test_what_is_no_yaml_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_layer(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a: 1\nb: 2\na: 3",
            r"my.yaml:3: 'a' is given twice, first in line 1 \(keep one",
        ),
        ("a:\n  b: 1\n  b: 1", r"my.yaml:3: 'a.b' is given twice, first in line 2"),
        ("1: x", r'my.yaml:1: the key 1 is not a string \(write "1"\)'),
    ],
)
def test_wrong_keys_are_noted_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    (mistake,) = read_layer(path, "my.yaml").mistakes
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(str(mistake))


def test_json_is_checked_like_yaml(tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    path.write_text('{\n\t"a": 1,\n\t"a": 2\n}')
    (mistake,) = read_layer(path, "my.json").mistakes
    assert (mistake.place, mistake.what) == ("my.json:3", "'a' is given twice, first in line 2")
    path.write_text('{\n"a": 1,\n}')
    with pytest.raises(ConfigError, match=r"my.json:\d: not valid JSON"):
        read_layer(path)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_layer(tmp_path)
    path = tmp_path / "my.yaml"
    path.write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text(.|\n)*save it as UTF-8"):
        read_layer(path)


@pytest.mark.parametrize("text", ["!!int x", "!!timestamp x", "9" * 5000, "[" * 500])
def test_what_pyyaml_trips_over_is_not_yaml_too(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        parse_value(text)
