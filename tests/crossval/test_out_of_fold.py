"""Out-of-fold predictions in the order of the data set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import nbtoolkit as nb
from nbtoolkit.errors import FoldError
from nbtoolkit.search.crossval.out_of_fold import assemble

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


@pytest.mark.parametrize("whole", [CLASSES, np.array(["a", "b", "c"])[CLASSES]])
def test_classes_of_repeated_folds_are_those_of_the_first_repeat(whole: np.ndarray) -> None:
    folds = nb.make_folds(CLASSES, k=2, repeats=3)
    parts = {
        index: part if index < 2 else part[::-1] for index, part in parts_of(folds, whole).items()
    }
    as_they_ended = dict(reversed(parts.items()))
    np.testing.assert_array_equal(assemble(folds, as_they_ended), whole)


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
