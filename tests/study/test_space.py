from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from nbtoolkit import load_config
from nbtoolkit.errors import SpaceError
from nbtoolkit.study.space import Space

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
        "model.layers": (64, 32),
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
    assert ["model.b" in space.at([share, 0.5]) for share in (0.1, 0.5, 0.9)] == [True, True, False]


def test_even_shares_give_even_values() -> None:
    space = Space(
        {
            "model.a": {"type": "int", "low": 1, "high": 4},
            "model.b": {"type": "float", "low": 0.0, "high": 1.0, "step": 0.25},
            "model.c": {"type": "float", "low": 1e-4, "high": 1.0, "log": True},
        }
    )
    points = [space.at([i / 20] * 3) for i in range(20)]
    assert [p["model.a"] for p in points] == [1] * 5 + [2] * 5 + [3] * 5 + [4] * 5
    assert [p["model.b"] for p in points] == sorted([0.0, 0.25, 0.5, 0.75, 1.0] * 4)
    assert points[10]["model.c"] == pytest.approx(1e-2)
    assert points[0]["model.c"] == pytest.approx(1e-4)


def test_the_last_share_stays_inside_every_range() -> None:
    space = Space(
        {"model.a": {"type": "int", "low": 1, "high": 100, "log": True}, "optim.lr": RANGE}
    )
    last = space.at([1 - 2**-53] * 2)
    assert last == {"model.a": 100, "optim.lr": pytest.approx(0.1)}
    assert last["optim.lr"] <= 0.1
    for name, distribution in space.distributions().items():
        assert distribution._contains(distribution.to_internal_repr(last[name]))


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
    "type: 'flot' is not known(.|\n)*'float'": {"type": "flot", "low": 0, "high": 1},
    "has no type(.|\n)*write `optim.lr.inner:`": {"inner": {"type": "float"}},
    "has no high": {"type": "float", "low": 0.1},
    "has no low": {"high": 0.1},
    "low: 'a' is not allowed(.|\n)*a number": {"type": "float", "low": "a", "high": 1},
    "low: True is not allowed": {"type": "float", "low": True, "high": 1},
    "low: 0.5 is not allowed(.|\n)*a whole number": {"type": "int", "low": 0.5, "high": 1},
    "unknown key 'lg'(.|\n)*'log'": {"type": "float", "low": 1, "high": 2, "lg": True},
    "low: 3 is above high: 2": {"type": "float", "low": 3, "high": 2},
    "log: true with low: 0": {"type": "float", "low": 0, "high": 2, "log": True},
    "log: true with step: 2": {"type": "int", "low": 1, "high": 9, "log": True, "step": 2},
    "not reached in steps(.|\n)*set high: 0.9": {
        "type": "float",
        "low": 0,
        "high": 1,
        "step": 0.3,
    },
    "a list of different values": {"type": "categorical", "choices": ["a", "a"]},
    "when: optim.nam is not searched(.|\n)*'optim.name'": {**RANGE, "when": {"optim.nam": "sgd"}},
    "when: optim.name is never 'sdg'(.|\n)*adamw, sgd": {**RANGE, "when": {"optim.name": "sdg"}},
    "when: model.a is a range": {**RANGE, "when": {"model.a": 0.5}},
    "when: depends on itself": {
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
    with pytest.raises(SpaceError, match=r"3 mistakes(.|\n)*model.a(.|\n)*model.b"):
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
