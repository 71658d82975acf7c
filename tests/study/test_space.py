from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from nbtoolkit import load_config
from nbtoolkit.errors import SpaceError
from nbtoolkit.search.study.space import Space

RANGE = {"type": "float", "low": 1e-4, "high": 1e-1, "log": True}
WHOLE = {
    "optim.momentum": {"type": "float", "low": 0.5, "high": 0.9, "when": {"optim.name": "sgd"}},
    "optim.name": ["adamw", "sgd"],
    "optim.lr": RANGE,
    "model.layers": [[64], [64, 32]],
    "train.epochs": 5,
}


def suggest(space: Space, **fixed: object) -> dict[str, object]:
    return space.suggest(
        optuna.trial.FixedTrial({k.replace("__", "."): v for k, v in fixed.items()})
    )


def test_a_condition_hides_a_parameter_and_constants_are_always_there() -> None:
    space = Space(WHOLE)
    common = {"optim__lr": 0.01, "model__layers": "[64, 32]"}
    adamw = suggest(space, optim__name="adamw", optim__momentum=0.6, **common)
    assert adamw == {
        "optim.name": "adamw",
        "optim.lr": 0.01,
        "model.layers": [64, 32],
        "train.epochs": 5,
    }
    sgd = suggest(space, optim__name="sgd", optim__momentum=0.6, **common)
    assert sgd == {**adamw, "optim.name": "sgd", "optim.momentum": 0.6}


def test_a_hidden_parent_hides_its_children() -> None:
    space = Space(
        {
            "model.c": {"type": "categorical", "choices": [1, 2], "when": {"model.b": True}},
            "model.b": {"type": "categorical", "choices": [True, False], "when": {"model.a": "x"}},
            "model.a": ["x", "y"],
        }
    )
    assert list(space.parameters) == ["model.a", "model.b", "model.c"]
    assert suggest(space, model__a="y", model__b=True, model__c=2) == {"model.a": "y"}
    assert [len(point) for point in space.grid()] == [3, 3, 2, 1]


def test_a_condition_may_name_several_values() -> None:
    when = {"model.a": ["x", "y"]}
    space = Space({"model.a": ["x", "y", "z"], "model.b": {**RANGE, "when": when}})
    seen = ["model.b" in suggest(space, model__a=value, model__b=0.01) for value in "xyz"]
    assert seen == [True, True, False]


def test_choices_of_any_kind_are_stored_as_optuna_can_store_them() -> None:
    choices = [1, "1", None, 0.5, [64, 32], {"kind": "cnn"}]
    space = Space({"model.a": choices})
    stored = space.distributions["model.a"].choices
    assert stored == (1, "1", None, 0.5, "[64, 32]", '{"kind": "cnn"}')
    assert [space.decode({"model.a": value})["model.a"] for value in stored] == choices
    assert [space.encode({"model.a": value})["model.a"] for value in choices] == [*stored]


def test_values_outside_the_space_are_told() -> None:
    space = Space(WHOLE)
    point = {"optim.name": "sgd", "optim.lr": 7, "model.layers": [64], "train.epochs": 5}
    first, second = space.outside(point)
    assert "The value 7 of parameter 'optim.lr' isn't contained" in first
    assert second == "train.epochs is not searched"


def test_a_grid_is_every_combination_the_last_changing_fastest() -> None:
    space = Space(
        {"model.a": ["x", "y"], "model.b": {"type": "int", "low": 1, "high": 3, "step": 2}}
    )
    assert [tuple(point.values()) for point in space.grid()] == [
        ("x", 1),
        ("x", 3),
        ("y", 1),
        ("y", 3),
    ]


def test_a_grid_needs_an_end() -> None:
    with pytest.raises(SpaceError, match=r"no end with space.optim.lr(.|\n)*float with a step"):
        Space({"optim.lr": RANGE}).grid()
    big = {"type": "int", "low": 1, "high": 10_000}
    with pytest.raises(SpaceError, match="more than 100,000 points"):
        Space({"model.a": big, "model.b": big}).grid()


def test_a_space_reads_back_what_it_writes() -> None:
    space = Space(WHOLE)
    assert Space(space.to_dict()).to_dict() == space.to_dict()


@pytest.mark.parametrize(
    ("short", "kind"),
    [
        ({"low": 1e-4, "high": 1e-1, "log": True}, "float"),
        ({"low": 1, "high": 10.0}, "float"),
        ({"low": 0, "high": 1, "step": 0.25}, "float"),
        ({"low": 16, "high": 512, "log": True}, "int"),
        ({"low": 1, "high": 9, "step": 2}, "int"),
        ({"choices": ["a", "b"]}, "categorical"),
        ({"value": 3}, "constant"),
    ],
)
def test_a_type_that_is_left_out_follows_from_the_other_keys(
    short: dict[str, object], kind: str
) -> None:
    whole = Space({"model.a": {"type": kind, **short}, "model.b": [1, 2]})
    assert Space({"model.a": short, "model.b": [1, 2]}).to_dict() == whole.to_dict()


WRONG = {
    r"type: 'flot' is not known \(allowed: float, int, categorical, constant\)": {
        "type": "flot",
        "low": 0,
        "high": 1,
    },
    r"type: \['int'\] is not known": {"type": ["int"], "low": 1, "high": 2},
    "int too large": {"type": "int", "low": 1, "high": 10**400},
    "it has no type, but inner; write a dotted name": {"inner": {"type": "float"}},
    "missing 1 required positional argument: 'high'": {"type": "float", "low": 0.1},
    "missing 1 required positional argument: 'low'": {"high": 0.1},
    "low: 'a' is not a number": {"type": "float", "low": "a", "high": 1},
    "low: True is not a number": {"type": "float", "low": True, "high": 1},
    "low: 0.5 is not a whole number": {"type": "int", "low": 0.5, "high": 1},
    "high: inf is not a number": {"type": "float", "low": 0.5, "high": float("inf")},
    "log: 'no' is not true or false": {"type": "float", "low": 1, "high": 2, "log": "no"},
    "unexpected keyword argument 'lg'(.|\n)*low, high, log, step, when": {
        "type": "float",
        "low": 1,
        "high": 2,
        "lg": True,
    },
    "a constant has the key value, not vlaue": {"type": "constant", "vlaue": 1},
    "`low <= high` must hold": {"type": "float", "low": 3, "high": 2},
    "`low > 0` must hold for `log=True`": {"type": "float", "low": 0, "high": 2, "log": True},
    "only accept step is 1 when `log`": {
        "type": "int",
        "low": 1,
        "high": 9,
        "log": True,
        "step": 2,
    },
    "not divisible by `step`(.|\n)*0.9": {"type": "float", "low": 0, "high": 1, "step": 0.3},
    "choices: one is given twice": {"type": "categorical", "choices": ["a", "a"]},
    "choices: 'ab' is not a list": {"type": "categorical", "choices": "ab"},
    "one or more elements": {"type": "categorical", "choices": []},
    "when: 'sgd' is no condition": {**RANGE, "when": "sgd"},
    "when: optim.nam is not searched(.|\n)*optim.name": {**RANGE, "when": {"optim.nam": "sgd"}},
    "when: optim.name is never 'sdg'(.|\n)*adamw, sgd": {**RANGE, "when": {"optim.name": "sdg"}},
    "when: model.a is a range": {**RANGE, "when": {"model.a": 0.5}},
    "when: it depends on itself": {
        "type": "categorical",
        "choices": [0.1],
        "when": {"optim.lr": 0.1},
    },
}


@pytest.mark.parametrize(("says", "written"), WRONG.items())
def test_a_wrong_parameter_is_refused(says: str, written: dict[str, object]) -> None:
    others = {"optim.name": ["adamw", "sgd"], "model.a": {"type": "float", "low": 0, "high": 1}}
    with pytest.raises(SpaceError, match=says):
        Space({"optim.lr": written, **others})


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(SpaceError, match=r"2 mistakes(.|\n)*model.a(.|\n)*model.b"):
        Space({"model.a": {"type": "int"}, "model.b": {"type": "float", "low": 2, "high": 1}})


def test_a_space_of_constants_is_no_search() -> None:
    with pytest.raises(SpaceError, match="nothing to search"):
        Space({"train.epochs": 5})


def test_names_and_values_must_be_the_configurations(tmp_path: Path) -> None:
    config = load_config(env=None)
    Space(WHOLE).check(config)
    with pytest.raises(SpaceError, match=r"unknown setting 'optim.lrr'(.|\n)*'optim.lr'"):
        Space({"optim.lrr": RANGE}).check(config)
    with pytest.raises(SpaceError, match=r"optim.momentum: 1.5 is not allowed"):
        Space({"optim.momentum": {"type": "float", "low": 0.5, "high": 1.5}}).check(config)
    with pytest.raises(SpaceError, match=r"optim.schedule: 'cosin' is not allowed"):
        Space({"optim.schedule": ["linear", "cosin"]}).check(config)
