"""Parameters of a notebook: its declared names and the values they accept. No kernel runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nbtoolkit.config.schema import load_config
from nbtoolkit.errors import ConfigError, ParameterError
from nbtoolkit.notebooks.parameters import FromShell, check_parameters, given_layer, read_parameters

CELL = """
from typing import Literal, Optional
import torch

config_path: str = "config/train.yaml"
overrides: dict = {}  # for example {"optim.lr": 3e-3}
folds: int | None = None
rate: float = 1
names: "list[str]" = []
mode: Literal["quick", "full", "007"] = "quick"
pair: tuple[int, int] = (1, 2)
maybe: Optional[str] = None
dtype: torch.dtype = torch.float32
processes = 0
fast = False
anything = None
path = "a" + "b"
_hidden = 1
a, b = 1, 2
"""
DECLARED = read_parameters(CELL)


def checked(**values: Any) -> dict[str, Any]:
    return check_parameters(given_layer(values, None), DECLARED, "work.ipynb")


def from_shell(name: str, text: str) -> Any:
    return checked(**{name: FromShell(text)})[name]


def test_the_cells_assignments_are_its_parameters() -> None:
    assert [*DECLARED] == [
        "config_path",
        "overrides",
        "folds",
        "rate",
        "names",
        "mode",
        "pair",
        "maybe",
        "dtype",
        "processes",
        "fast",
        "anything",
        "path",
    ]
    assert DECLARED["folds"].shown == "int | None"
    assert not DECLARED["folds"].required


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("config_path", "007", "007"),
        ("config_path", "null", "null"),
        ("config_path", '"quoted"', '"quoted"'),
        ("folds", "007", 7),
        ("folds", "null", None),
        ("rate", "3e-4", 3e-4),
        ("rate", "2", 2.0),
        ("overrides", "{optim.lr: 3e-3, deep: {a: [1]}}", {"optim.lr": 3e-3, "deep": {"a": [1]}}),
        ("names", "[a, b]", ["a", "b"]),
        ("mode", "full", "full"),
        ("mode", "007", "007"),
        ("pair", "[3, 4]", (3, 4)),
        ("maybe", "007", "007"),
        ("maybe", "null", None),
        ("maybe", "a: b: c", "a: b: c"),
        ("processes", "2", 2),
        ("fast", "true", True),
        ("anything", "[1, null]", [1, None]),
        ("path", "2", 2),
        ("dtype", "float16", "float16"),
    ],
)
def test_a_shells_text_is_read_as_its_parameters_type_says(
    name: str, text: str, value: Any
) -> None:
    found = from_shell(name, text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("folds", "3", r"folds is '3'\n  Allowed: int \| None"),
        ("folds", 2.5, r"folds is 2\.5\n  Allowed: int \| None"),
        ("folds", True, r"folds is True\n  Allowed: int"),
        ("config_path", 7, "config_path is 7\n  Allowed: str"),
        ("mode", "fulll", "mode is 'fulll'\n  Allowed: Literal"),
        ("processes", 0.5, r"processes is 0\.5\n  Allowed: int, as its default is"),
        ("fast", FromShell("yes"), "fast is 'yes'\n  Allowed: bool"),
        ("names", ["a", 7], r"names is \['a', 7\]; at 1: input should be a valid string"),
        ("pair", [1], r"pair is \[1\]"),
        ("overrides", np.zeros(3), "a ndarray cannot be written into a cell"),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        checked(**{name: value})


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ParameterError, match=r"no parameter 'proceses'[\s\S]*mean 'processes'\?"):
        checked(proceses=2)
    with pytest.raises(ParameterError, match="none: none of its cells has the tag 'parameters'"):
        check_parameters(given_layer({"a": 1}, None), {}, "work.ipynb")


def test_a_parameter_without_a_default_must_be_given() -> None:
    declared = read_parameters("seed: int\nname: str = ''")
    with pytest.raises(ParameterError, match=r"'seed' has no default[\s\S]*Do now:  give one: -p"):
        check_parameters(given_layer({}, None), declared, "work.ipynb")
    assert check_parameters(given_layer({"seed": 3}, None), declared, "w") == {"seed": 3}


def test_plain_relatives_of_plain_values_are_taken() -> None:
    values = checked(config_path=Path("a/b"), folds=np.int64(3), rate=np.float32(0.5))
    assert values == {"config_path": "a/b", "folds": 3, "rate": 0.5}
    free = load_config(env=None, overrides={"model.hidden": 3}).model
    assert checked(overrides=free) == {"overrides": {"hidden": 3}}


def test_a_files_mistakes_are_told_together_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text("folds: three\nmode: full\n\nfolds_: 2\n")
    layer = given_layer({"rate": 0.5}, file)
    with pytest.raises(ParameterError) as caught:
        check_parameters(layer, DECLARED, "work.ipynb")
    assert f"{file}:1: folds is 'three' (allowed: int | None)" in str(caught.value)
    assert f"{file}:4: work.ipynb has no parameter 'folds_'" in str(caught.value)


def test_the_calls_values_go_before_the_files(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text("folds: 3\nmode: full\nconfig_path: '007'\n")
    layer = given_layer({"folds": 5}, file)
    values = check_parameters(layer, DECLARED, "work.ipynb")
    assert values == {"folds": 5, "mode": "full", "config_path": "007"}
    with pytest.raises(ConfigError, match="cannot be read"):
        given_layer(None, tmp_path / "missing.yaml")
