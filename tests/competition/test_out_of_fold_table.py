"""cv.write_out_of_fold: the table as pandas and pyarrow read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyarrow import parquet

import nbtoolkit as nb
from nbtoolkit.errors import FoldError, MissingExtra

Y = np.array([0, 1, 2] * 10)


def doubled(config: Any, ctx: Any) -> dict[str, Any]:
    valid = ctx.fold.valid_indices
    return {"score": 0.0, "predictions": 2.0 * valid, "targets": valid % 3}


def two_columns(config: Any, ctx: Any) -> dict[str, Any]:
    valid = ctx.fold.valid_indices
    return {"score": 0.0, "predictions": np.column_stack([valid, -valid]).astype(float)}


@pytest.fixture
def validate(tmp_path: Path) -> Callable[..., nb.CVResult]:
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path / "out")}

    def run(train: Callable[..., Any], folds: nb.Folds) -> nb.CVResult:
        return nb.cross_validate(train, settings, folds, display="off")

    return run


def test_the_table_has_every_sample_with_its_fold_and_the_folds_hash(
    validate: Callable[..., nb.CVResult], tmp_path: Path
) -> None:
    folds = nb.make_folds(Y, k=3)
    cv = validate(doubled, folds)
    file = cv.write_out_of_fold(tmp_path / "oof.parquet")
    table = pd.read_parquet(file)
    assert list(table) == ["index", "fold", "target", "prediction"]
    assert table["prediction"].tolist() == cv.oof.tolist() == [2.0 * at for at in range(30)]
    assert table["target"].tolist() == Y.tolist()
    for fold in folds:
        assert (table["fold"][fold.valid_indices] == fold.index).all()
    metadata = parquet.read_schema(file).metadata
    assert metadata[b"folds"] == folds.hash.encode()
    assert metadata[b"run"] == cv.paths.run_id.encode()
    ids = [f"row-{at}" for at in range(30)]
    table = pd.read_parquet(cv.write_out_of_fold(file, ids=ids, targets=Y * 1.5))
    assert list(table) == ["id", "fold", "target", "prediction"]
    assert table["id"].tolist() == ids
    assert table["target"].tolist() == (Y * 1.5).tolist()
    with pytest.raises(FoldError, match=r"ids has the shape \(2,\) for 30 samples"):
        cv.write_out_of_fold(file, ids=[1, 2])
    assert pd.read_parquet(file)["id"].tolist() == ids  # the file is as it was


@pytest.mark.long
def test_several_columns_repeats_and_samples_without_a_fold(
    validate: Callable[..., nb.CVResult], tmp_path: Path
) -> None:
    cv = validate(two_columns, nb.make_folds(np.arange(30), kind="time", k=4))
    table = pd.read_parquet(cv.write_out_of_fold(tmp_path / "time.parquet"))
    assert list(table) == ["index", "fold", "prediction_0", "prediction_1"]
    unseen = table["fold"] == -1
    assert unseen.sum() > 0
    assert table["prediction_0"].isna().equals(unseen)
    assert (table["prediction_1"] == -table["prediction_0"])[~unseen].all()
    cv = validate(two_columns, nb.make_folds(Y, k=3, repeats=2))
    table = pd.read_parquet(cv.write_out_of_fold(tmp_path / "repeats.parquet"))
    assert set(table["fold"]) == {0, 1, 2}
    assert table["prediction_0"].tolist() == list(range(30))


def test_without_pyarrow_the_error_has_the_install_line(
    validate: Callable[..., nb.CVResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cv = validate(doubled, nb.make_folds(Y, k=2))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"pyarrow is not installed(.|\n)*pip install pyarrow"):
        cv.write_out_of_fold(tmp_path / "oof.parquet")
    assert not (tmp_path / "oof.parquet").exists()
