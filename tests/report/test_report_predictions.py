"""Predictions that a run returned: read without executing code, shown as a matrix."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_folders import trained, write_run

from nbtoolkit.report import predictions
from nbtoolkit.report.predictions import (
    NoPredictions,
    NotPlain,
    Predictions,
    predictions_of,
    read_plain,
)
from nbtoolkit.report.report import RunsReport, matrix
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.serialization import pack_value
from nbtoolkit.views.state import read_state

DIARY = trained({"val_loss": [1.0, 0.5]})


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.write_text, (self.file, "executed")


PLAIN = [
    {"a": [1, "x", None, 2.5], "b": {"c": (True, b"y")}},
    np.arange(4),
    np.asfortranarray(np.ones((2, 3))),
    np.array(["a", "b"]),
    np.array([None, "x"], dtype=object),
    np.float64(3.0),
    torch.arange(10)[::2],
    torch.nn.Parameter(torch.ones(2)),
    torch.ones(3, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values_arrays_and_tensors_are_read(tmp_path: Path, value: Any) -> None:
    (file := tmp_path / "0.pkl").write_bytes(pack_value(value))
    found = read_plain(file)
    assert type(found) is type(value)
    assert str(found) == str(value)


@pytest.mark.parametrize("kind", ["object", "array", "storage"])
def test_nothing_is_executed(tmp_path: Path, kind: str) -> None:
    evil = Evil(tmp_path / "mark")
    if kind == "storage":  # a tensor's numbers are a file of torch's own, pickled inside

        class Storage:
            def __reduce__(self) -> Any:
                return torch.storage._load_from_bytes, (saved,)

        torch.save(evil, tmp_path / "saved.pt")
        saved = (tmp_path / "saved.pt").read_bytes()
        data = pickle.dumps(Storage())
    else:
        data = pickle.dumps({"object": evil, "array": np.array([evil], dtype=object)}[kind])
    (file := tmp_path / "0.pkl").write_bytes(data)
    with pytest.raises(NotPlain):
        read_plain(file)
    assert not evil.file.exists()


@pytest.mark.parametrize("data", [b"", b"\x80\x05", b"no pickle"])
def test_a_damaged_pickle_is_not_read(tmp_path: Path, data: bytes) -> None:
    (file := tmp_path / "0.pkl").write_bytes(data)
    with pytest.raises(NotPlain):
        read_plain(file)


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    with (file := tmp_path / "0.pkl").open("wb") as sparse:
        sparse.truncate(predictions.LARGEST + 1)
    with pytest.raises(NotPlain, match="more than 200 MB"):
        read_plain(file)


def shown(*runs: RunPaths) -> str:
    report = RunsReport(runs[0].folder.parent, [read_state(run.folder) for run in runs])
    return "".join(report.predictions.parts)


NOT_SHOWN = [
    ({"labels": [1, 2], "predictions": [1]}, "1 predictions for 2 samples"),
    (
        {"labels": [1, 2], "predictions": [[1], [2]]},
        "predictions are not one class or number for each",
    ),
    ({"labels": [1], "predictions": 1}, "predictions are not one class or number for each"),
    ({"labels": [1], "predictions": [1], "model": torch.nn.Linear(1, 1)}, "is not read: torch.nn"),
]


@pytest.mark.parametrize(("value", "reason"), NOT_SHOWN, ids=[reason for _, reason in NOT_SHOWN])
def test_predictions_that_cannot_be_shown_are_named_with_the_reason(
    tmp_path: Path, value: Any, reason: str
) -> None:
    run = write_run(tmp_path, "a", events=DIARY, returned=value)
    with pytest.raises(NoPredictions, match=reason):
        predictions_of(run)
    assert reason in shown(run)


@pytest.mark.parametrize("value", [None, 0.5, {"val_loss": 0.5}, {"predictions": [1]}])
def test_a_run_that_returned_no_predictions_is_left_out(tmp_path: Path, value: Any) -> None:
    run = write_run(tmp_path, "a", events=DIARY, returned=value)
    assert predictions_of(run) is None
    assert shown(run) == ""


def test_the_matrix_counts_and_its_classes_are_escaped() -> None:
    found = Predictions(("<b>", "<b>", "c", "c"), ("<b>", "c", "c", "c"))
    markup = matrix(found)
    assert (found.accuracy, found.counts[("<b>", "c")]) == (0.75, 1)
    assert "<b>" not in markup
    assert markup.count("<th>&lt;b&gt;</th>") == 2
    assert [cell.partition(">")[2] for cell in markup.split("<td")[1:]] == [
        "1</td>",
        "1</td></tr><tr><th>c</th>",
        "</td>",
        "2</td></tr></tbody></table>",
    ]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_labels_may_be_lists_arrays_or_tensors(tmp_path: Path, kind: Any) -> None:
    value = {"labels": kind([0, 1, 1]), "predictions": kind([0, 1, 0])}
    run = write_run(tmp_path, "a", events=DIARY, returned=value)
    told = shown(run)
    assert "0.6667 of 3 samples are right" in told
    assert "1 x 1 as 0" in told


def test_the_folds_of_a_cross_validation_are_one_matrix(tmp_path: Path) -> None:
    cv = write_run(tmp_path, "cv", events=[{"type": "run"}], kind="cv")
    for fold in range(3):
        value = {"labels": [0, 1], "predictions": [0, fold % 2]}
        write_run(cv.folder / "folds", str(fold), events=DIARY, returned=value)
    told = shown(cv)
    assert "cv, out of fold" in told
    assert "0.6667 of 6 samples are right" in told


def test_quantities_are_a_scatter(tmp_path: Path) -> None:
    value = {"targets": [1.0, 2.0], "predictions": [1.5, 2.5]}
    run = write_run(tmp_path, "a", events=DIARY, returned=value)
    told = shown(run)
    assert 'aria-label="predicted by true: ' in told
    assert told.count("<circle") == 2


def test_many_classes_are_no_matrix_but_the_most_frequent_mistakes(tmp_path: Path) -> None:
    labels = list(range(50))
    value = {"labels": labels, "predictions": [7, *labels[1:]]}
    run = write_run(tmp_path, "a", events=DIARY, returned=value)
    told = shown(run)
    assert "<th>" not in told
    assert "Most often: 1 x 0 as 7." in told
