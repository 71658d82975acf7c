"""Out-of-fold predictions in the order of the data set, and the ensemble of fold models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nbtoolkit as nb
from nbtoolkit.crossval.out_of_fold import Ensemble, assemble
from nbtoolkit.errors import FoldError

CLASSES = np.arange(12) % 3
TRUTH = np.random.default_rng(0).random((12, 2))


def parts_of(folds: nb.Folds, whole: np.ndarray) -> dict[int, Any]:
    return {fold.index: whole[fold.valid_indices] for fold in folds}


@pytest.mark.parametrize(
    "whole",
    [
        TRUTH,
        TRUTH[:, 0].astype(np.float32),
        CLASSES,
        CLASSES > 0,
        np.array(["cat", "dog", "ox"])[CLASSES],
        TRUTH.reshape(12, 2, 1) + 1j,
    ],
)
def test_each_sample_has_the_prediction_of_its_fold(whole: np.ndarray) -> None:
    folds = nb.make_folds(CLASSES, k=4, seed=3)
    found = assemble(folds, parts_of(folds, whole))
    assert found.dtype == whole.dtype
    np.testing.assert_array_equal(found, whole)


def test_lists_and_tensors_are_taken_as_arrays_are() -> None:
    folds = nb.make_folds(CLASSES, k=2)
    parts = parts_of(folds, TRUTH)
    as_list = {index: part.tolist() for index, part in parts.items()}
    as_tensor = {index: torch.tensor(part, requires_grad=True) for index, part in parts.items()}
    as_rows = {index: list(torch.tensor(part)) for index, part in parts.items()}
    for way in (as_list, as_tensor, as_rows):
        np.testing.assert_array_equal(assemble(folds, way), TRUTH)


def test_fractions_of_repeated_folds_are_averaged() -> None:
    folds = nb.make_folds(CLASSES, k=2, repeats=3)
    parts = {index: part + index // 2 for index, part in parts_of(folds, TRUTH).items()}
    np.testing.assert_allclose(assemble(folds, parts), TRUTH + 1.0)


def test_classes_of_repeated_folds_are_voted_on() -> None:
    folds = nb.make_folds(CLASSES, k=2, repeats=3)
    wrong_once = {index: part * (index >= 2) for index, part in parts_of(folds, CLASSES).items()}
    np.testing.assert_array_equal(assemble(folds, wrong_once), CLASSES)
    wrong_twice = {index: part * (index >= 4) for index, part in parts_of(folds, CLASSES).items()}
    np.testing.assert_array_equal(assemble(folds, wrong_twice), np.zeros(12))
    pairs = np.stack([CLASSES, CLASSES[::-1]], axis=1)
    by_column = {index: part * (index >= 2) for index, part in parts_of(folds, pairs).items()}
    np.testing.assert_array_equal(assemble(folds, by_column), pairs)


def test_equally_many_votes_go_to_the_least_class() -> None:
    folds = nb.make_folds(CLASSES, k=2, repeats=2)
    names = np.array(["a", "b", "c"])
    parts = {
        index: names[CLASSES[folds.valid_indices(index)]] if index < 2 else ["b"] * 6
        for index in range(4)
    }
    expected = np.where(CLASSES == 0, "a", "b")
    np.testing.assert_array_equal(assemble(folds, parts), expected)


def test_samples_that_no_fold_validates_on_have_no_prediction() -> None:
    folds = nb.make_folds(CLASSES, k=3, kind="time")  # the first quarter is only trained on
    numbers = assemble(folds, parts_of(folds, CLASSES))
    assert np.isnan(numbers[:3]).all()
    np.testing.assert_array_equal(numbers[3:], CLASSES[3:])
    rows = assemble(folds, parts_of(folds, TRUTH))
    assert np.isnan(rows[:3]).all()
    np.testing.assert_array_equal(rows[3:], TRUTH[3:])
    texts = assemble(folds, parts_of(folds, CLASSES.astype(str)))
    assert texts.tolist() == [None] * 3 + CLASSES.astype(str)[3:].tolist()


def test_folds_that_are_not_done_leave_gaps() -> None:
    folds = nb.make_folds(CLASSES, k=2)
    found = assemble(folds, {1: TRUTH[folds.valid_indices(1)]})
    assert np.isnan(found[folds.valid_indices(0)]).all()
    np.testing.assert_array_equal(found[folds.valid_indices(1)], TRUTH[folds.valid_indices(1)])


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ([1, 2], "fold 1 returned 2 predictions for 6 validation samples\n.*valid_indices"),
        (3, "fold 1 returned a single value for 6"),
        (np.zeros((6, 3)), r"differ in shape: \(\), \(3,\)"),
    ],
)
def test_predictions_that_do_not_fit_are_refused(part: Any, said: str) -> None:
    folds = nb.make_folds(CLASSES, k=2)
    with pytest.raises(FoldError, match=said):
        assemble(folds, {0: [0] * 6, 1: part})


def test_an_ensemble_answers_with_the_mean() -> None:
    models = [nn.Linear(3, 2) for _ in range(3)]
    ensemble = Ensemble(models)
    inputs = torch.rand(5, 3)
    expected = sum(model(inputs) for model in models) / 3
    torch.testing.assert_close(ensemble(inputs), expected.detach())
    assert not ensemble(inputs).requires_grad
    assert (len(ensemble), repr(ensemble)) == (3, "Ensemble(3 x Linear)")


def test_outputs_without_a_mean_are_refused() -> None:
    with pytest.raises(FoldError, match=r"the outputs of the 2 models \(Tensor\) have no mean"):
        Ensemble([nn.Linear(3, 2), nn.Linear(3, 1)])(torch.rand(5, 3))
    with pytest.raises(FoldError, match=r"\(tuple\) have no mean"):
        Ensemble([nn.LSTM(3, 2)])(torch.rand(5, 3))
