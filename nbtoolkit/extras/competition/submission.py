"""Check that a submission has the form of the competition's sample submission."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias

from nbtoolkit.errors import SubmissionError

if TYPE_CHECKING:
    import pandas as pd

    Table: TypeAlias = pd.DataFrame | str | os.PathLike[str]

# By NumPy's kind of a column; nullable types of pandas have the same.
_KINDS = {
    **dict.fromkeys("iu", "whole numbers"),
    **dict.fromkeys("mM", "dates"),
    "f": "fractions",
    "b": "booleans",
}
_NUMBERS = {"whole numbers", "fractions"}


def check_submission(
    frame: Table, sample: Table, *, probabilities: bool | Literal["auto"] = "auto"
) -> None:
    """Check that a submission has the form of the competition's sample submission.

    Args:
        frame: the submission, as a DataFrame or as the CSV file that you will send. The file is
            better, because it also shows an index that was written by mistake.
        sample: the competition's sample submission, as a DataFrame or a CSV file. Its first column
            has the ids.
        probabilities: whether the predictions must be from 0 to 1. ``"auto"``: yes for each column
            that looks like probabilities in the sample (all values are from 0 to 1, and at least
            one is neither 0 nor 1).

    Raises:
        SubmissionError: the submission has mistakes. The message lists all of them, one per line:
            columns, ids and their order, duplicates, missing and infinite values, types, range.
        OSError, ValueError: of pandas: a file cannot be read.
        ImportError: pandas is not installed.
    """
    import pandas as pd

    submitted = frame if isinstance(frame, pd.DataFrame) else pd.read_csv(frame)
    expected = sample if isinstance(sample, pd.DataFrame) else pd.read_csv(sample)
    mistakes = list(_mistakes(submitted, expected, probabilities))
    if mistakes:
        raise SubmissionError(
            "\n  - ".join([f"mistakes of the submission: {len(mistakes)}", *mistakes]),
            allowed=f"the sample's form: {len(expected)} rows, columns {list(expected.columns)}",
            do="correct these lines and check again, before you send it",
        )


def _mistakes(
    frame: pd.DataFrame, sample: pd.DataFrame, probabilities: bool | str
) -> Iterator[str]:
    columns = list(frame.columns)
    needed = list(sample.columns)
    if columns != needed:
        index = any(str(name).startswith("Unnamed: ") for name in columns)
        hint = " (an index: write the file with index=False)" if index else ""
        yield f"the columns are {columns}; the sample has {needed}{hint}"
    if len(frame) != len(sample):
        yield f"it has {len(frame)} rows; the sample has {len(sample)}"
    for position, name in enumerate(needed):
        if columns.count(name) != 1:  # a mistake of the columns
            continue
        yield from _value_mistakes(frame[name], sample[name], ids=position == 0)
        if position == 0:
            yield from _id_mistakes(frame[name], sample[name])
        else:
            yield from _range_mistakes(frame[name], sample[name], probabilities)


def _id_mistakes(ids: pd.Series, needed: pd.Series) -> Iterator[str]:
    repeated = ids[ids.duplicated()].unique().tolist()
    if repeated:
        yield f"ids are there more than once: {reprlib.repr(repeated)}"
    missing = needed[~needed.isin(ids)]
    unknown = ids[~ids.isin(needed)].dropna()
    if len(missing):
        yield f"ids of the sample are missing: {reprlib.repr(missing.to_list())}"
    if len(unknown):
        yield f"the sample does not have these ids: {reprlib.repr(unknown.to_list())}"
    if not len(missing) and len(ids) == len(needed):
        differs = (ids.to_numpy() != needed.to_numpy()).nonzero()[0]
        if len(differs):
            row = differs[0]
            yield (
                f"the ids are in another order: row {row} has {ids.iloc[row]}, "
                f"the sample {needed.iloc[row]}"
            )


def _value_mistakes(values: pd.Series, expected: pd.Series, *, ids: bool) -> Iterator[str]:
    name = repr(values.name)
    kind = _kind(values)
    needed = _kind(expected)
    if missing := int(values.isna().sum()):
        yield f"{name} has no value in {missing} row(s) (NaN)"
    if endless := int(values.isin([float("inf"), float("-inf")]).sum()):
        yield f"{name} is infinite in {endless} row(s)"
    # A missing value makes fractions of whole numbers. A sample's predictions are placeholders, and
    # a whole one may stand for fractions; its ids are the real ones.
    numbers = {kind, needed} == _NUMBERS and (missing or needed == "fractions" or not ids)
    if kind != needed and not numbers:
        yield f"{name} has {kind} ({values.dtype}); the sample has {needed} ({expected.dtype})"


def _range_mistakes(
    values: pd.Series, expected: pd.Series, probabilities: bool | str
) -> Iterator[str]:
    if probabilities == "auto":
        like = _kind(expected) == "fractions" and expected.between(0, 1).all()
        probabilities = bool(like and not expected.isin([0, 1]).all())
    if probabilities and _kind(values) in _NUMBERS:
        outside = values[(values < 0) | (values > 1)]
        if len(outside):
            span = f"{outside.min():.4g} to {outside.max():.4g}"
            yield f"{values.name!r} is outside 0 to 1 in {len(outside)} row(s) ({span})"


def _kind(values: pd.Series) -> str:
    return _KINDS.get(values.dtype.kind, "texts")
