"""make_folds, Folds and their files."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import model_selection as sk

import nbtoolkit as nb
from nbtoolkit.errors import FoldError, FoldWarning, MissingExtra

CLASSES = np.arange(60) % 3
TEAMS = np.arange(60) // 4  # 15 groups of 4
EMPTY = np.zeros(60)


def splits(folds: nb.Folds) -> list[tuple[list[int], list[int]]]:
    return [(fold.train_indices.tolist(), fold.valid_indices.tolist()) for fold in folds]


@pytest.mark.parametrize("name", ["train", "valid", "val_idx"])
def test_an_unknown_attribute_of_a_fold_is_an_error_that_names_those_it_has(name: str) -> None:
    [fold, _] = pickle.loads(pickle.dumps(list(nb.make_folds(CLASSES, k=2))))
    with pytest.raises(AttributeError, match=rf"'{name}'\n.*index, train_indices, valid_indices"):
        getattr(fold, name)
    assert not hasattr(copy.copy(fold), "__array__")


# --- what is made ---


@pytest.mark.parametrize(
    ("arguments", "splitter"),
    [
        ({"kind": "stratified"}, sk.StratifiedKFold(5, shuffle=True, random_state=0)),
        ({"k": 3, "seed": 7}, sk.StratifiedKFold(3, shuffle=True, random_state=7)),
        ({"kind": "kfold"}, sk.KFold(5, shuffle=True, random_state=0)),
        ({"kind": "group", "groups": TEAMS}, sk.GroupKFold(5)),
        ({"groups": TEAMS}, sk.GroupKFold(5)),
        (
            {"kind": "stratified_group", "groups": TEAMS, "seed": 3},
            sk.StratifiedGroupKFold(5, shuffle=True, random_state=3),
        ),
        ({"kind": "time"}, sk.TimeSeriesSplit(5)),
        (
            {"kind": "stratified", "k": 2, "repeats": 3, "seed": 1},
            sk.RepeatedStratifiedKFold(n_splits=2, n_repeats=3, random_state=1),
        ),
        (
            {"kind": "kfold", "k": 4, "repeats": 2},
            sk.RepeatedKFold(n_splits=4, n_repeats=2, random_state=0),
        ),
    ],
)
def test_folds_are_those_of_scikit_learns_splitter(
    arguments: dict[str, Any], splitter: Any
) -> None:
    folds = nb.make_folds(CLASSES, **arguments)
    expected = [
        (train.tolist(), valid.tolist())
        for train, valid in splitter.split(EMPTY, CLASSES, arguments.get("groups"))
    ]
    assert splits(folds) == expected
    assert len(folds) == len(expected) == folds.k * folds.repeats


def test_targets_may_be_a_list_an_array_a_tensor_a_series_or_texts() -> None:
    ways = [CLASSES.tolist(), CLASSES, torch.as_tensor(CLASSES), pd.Series(CLASSES)]
    ways += [CLASSES.astype(kind) for kind in (np.int32, np.uint8)]
    made = [nb.make_folds(y) for y in ways]
    assert len({folds.hash for folds in made}) == len({folds.target for folds in made}) == 1
    named = nb.make_folds(np.array(["cat", "dog", "ox"])[CLASSES])
    assert named == made[0]
    assert named.target != made[0].target


def test_predefined_folds_come_from_numbers_or_from_pairs() -> None:
    by_number = nb.make_folds(list("aabbc"), kind="predefined", predefined=[0, 0, 1, 1, -1])
    assert splits(by_number) == [([2, 3, 4], [0, 1]), ([0, 1, 4], [2, 3])]
    pairs = [(np.array([4, 3]), np.array([0])), ([0, 1], [4, 2])]
    by_pair = nb.make_folds(range(5), kind="predefined", predefined=pairs)
    assert splits(by_pair) == [([3, 4], [0]), ([0, 1], [2, 4])]
    splitter = sk.ShuffleSplit(4, random_state=0).split(EMPTY)
    assert len(nb.make_folds(CLASSES, kind="predefined", predefined=splitter)) == 4
    assert nb.make_folds(list("aabbc"), predefined=[0, 0, 1, 1, -1]).hash == by_number.hash


def test_indices_handed_out_are_copies_that_torch_takes_without_a_warning() -> None:
    folds = nb.make_folds(CLASSES)
    mine = folds.train_indices(0)
    assert torch.arange(60)[mine].tolist() == mine.tolist()
    mine[:] = 0
    assert folds.train_indices(0).sum() > 0
    with pytest.raises(ValueError, match="read-only"):
        folds.pairs[0][1][0] = 5
    with pytest.raises(AttributeError, match="cannot assign"):
        folds.n_samples = 3  # type: ignore[misc]


def test_folds_are_counted_indexed_and_told_apart_by_how_they_split() -> None:
    folds = nb.make_folds(CLASSES, k=4)
    assert [fold.index for fold in folds] == [0, 1, 2, 3]
    assert folds[-1].index == 3
    with pytest.raises(IndexError):
        folds[4]
    assert folds == nb.make_folds(CLASSES, k=4)
    assert {folds, nb.make_folds(CLASSES, k=4)} == {folds}
    assert folds != nb.make_folds(CLASSES, k=4, seed=1)
    pairs = [([0, 1], [2]), ([0], [2])]  # which differ in the samples to train on
    first, second = (nb.make_folds(range(3), predefined=[pair]) for pair in pairs)
    assert first != second
    assert repr(folds) == f"Folds(stratified, 4, n_samples=60, {folds.hash})"
    assert repr(folds[1]) == "Fold(1, train=45, valid=15)"
    assert "45 + 15" in folds._repr_html_()


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kind": "strat"}, "kind is 'strat'\n.*stratified, kfold, group"),
        ({"k": 1}, "k is 1\n.*whole number from 2"),
        ({"k": 2.5}, "k is 2.5\n"),
        ({"k": True}, "k is True\n"),
        ({"repeats": 0}, "repeats is 0\n"),
        ({"seed": -1}, "seed is -1\n"),
        ({"k": 61, "kind": "kfold"}, "60 samples cannot be split into k=61 folds"),
        ({"k": 60, "kind": "time"}, "60 samples cannot be split .*\n.*61 samples or more"),
        ({"k": 21}, r"every class has fewer samples than k=21 folds: 0 \(20\), .*\n.*up to 20"),
        ({"kind": "group"}, "'group' needs groups"),
        (
            {"kind": "stratified", "groups": TEAMS},
            "'stratified' does not use groups\n.*\n.*stratified_group",
        ),
        ({"kind": "group", "groups": TEAMS[:9]}, "groups has 9 values for 60 samples"),
        ({"kind": "group", "groups": CLASSES}, "3 groups for k=5 folds\n.*\n.*k=3"),
        ({"kind": "group", "groups": TEAMS, "repeats": 2}, "'group' cannot be repeated"),
        ({"kind": "predefined"}, "'predefined' needs predefined"),
        ({"kind": "kfold", "predefined": CLASSES}, "'kfold' does not use predefined"),
    ],
)
def test_sweep_config_that_cannot_be_met_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(FoldError, match=said):
        nb.make_folds(CLASSES, **arguments)


@pytest.mark.parametrize(
    ("y", "said"),
    [
        (np.linspace(0, 1, 60), "fractions or NaN.*\n.*\n.*kind='kfold'"),
        ([0.0, 1.0, float("nan")] * 20, "fractions or NaN"),
        (np.eye(3)[CLASSES], r"y has the shape \(60, 3\).*\n.*\n.*argmax"),
        ([], "0 samples cannot be split into k=5"),
    ],
)
def test_targets_that_cannot_be_stratified_are_refused(y: Any, said: str) -> None:
    with pytest.raises(FoldError, match=said):
        nb.make_folds(y)


@pytest.mark.parametrize(
    ("predefined", "said"),
    [
        ([0, 1], "predefined has 2 values for 5 samples"),
        ([-1] * 5, "no fold at all"),
        ([0.5] * 5, "float64 values"),
        ([0] * 5, "fold 0 has 0 samples to train on and 5"),
        ([([0, 1], [1, 2])], "fold 0 validates on 1 samples that it trains on"),
        ([([0, 1], [5])], "fold 0 holds what is no index of 5 samples"),
        ([([0, 1], [2]), ([3, -1], [2])], "fold 1 holds what is no index"),
        ([([0, 0], [2])], "fold 0 holds a sample twice"),
        ([([0, 1], [2, 2])], "fold 0 holds a sample twice"),
        ([(0, 1)], "fold 0 is no pair of index lists"),
    ],
)
def test_predefined_folds_that_are_none_are_refused(predefined: Any, said: str) -> None:
    with pytest.raises(FoldError, match=said):
        nb.make_folds(range(5), kind="predefined", predefined=predefined)


def test_folds_that_would_be_empty_are_refused() -> None:
    classes, teams = [1, 1, 1, 1, 1, 0, 0, 1, 0], [3, 3, 3, 4, 0, 5, 3, 4, 5]
    with (
        pytest.warns(FoldWarning, match=r"k=4 are missing in some folds: 0 \(3\)"),
        pytest.raises(FoldError, match=r"fold 2 would have 9 samples to train on and 0 to"),
    ):
        nb.make_folds(classes, k=4, kind="stratified_group", groups=teams)


def test_classes_too_small_for_every_fold_are_told_at_the_line_of_the_call() -> None:
    with pytest.warns(FoldWarning, match=r"fewer samples than k=5 .*: rare \(2\)$") as told:
        folds = nb.make_folds(["common"] * 30 + ["rare"] * 2)
    assert len(folds) == 5
    assert [Path(one.filename).name for one in told] == ["test_folds.py"]


def test_without_scikit_learn_its_install_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingExtra, match=r"pip install [^\n]*'scikit-learn>="):
        nb.make_folds(CLASSES)


# --- as files ---


@pytest.mark.parametrize("kind", ["kfold", "time"])
def test_folds_come_back_from_their_file_as_they_were(tmp_path: Path, kind: Any) -> None:
    folds = nb.make_folds(np.arange(60), kind=kind, k=3)
    path = folds.save(tmp_path / "folds.json")
    again = nb.Folds.load(path)
    assert splits(again) == splits(folds)
    assert again.differences(folds) == {}
    with pytest.raises(ValueError, match="read-only"):
        again.pairs[0][0][0] = 5


def test_a_damaged_file_of_folds_is_refused(tmp_path: Path) -> None:
    path = nb.make_folds(CLASSES).save(tmp_path / "folds.json")
    about = json.loads(path.read_text())
    about["valid"][0][0] += 1
    path.write_text(json.dumps(about))
    with pytest.raises(FoldError, match=r"folds.json: its samples have the hash .*, not"):
        nb.Folds.load(path)
    path.write_text(path.read_text()[:50])
    with pytest.raises(FoldError, match=r"cannot be read from .*folds.json"):
        nb.Folds.load(path)
    with pytest.raises(FoldError, match="No such file"):
        nb.Folds.load(tmp_path / "none.json")


def test_differences_name_what_is_not_the_same() -> None:
    folds = nb.make_folds(CLASSES, kind="time")
    other = nb.make_folds(CLASSES, kind="time", k=4)
    assert folds.differences(other) == {"k": (5, 4), "hash": (folds.hash, other.hash)}
    renamed = nb.make_folds(CLASSES + 1, kind="time")
    assert set(folds.differences(renamed)) == {"target"}
