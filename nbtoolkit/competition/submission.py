"""Check a submission against the competition's sample before it is sent."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from nbtoolkit.errors import MissingExtra, SubmissionError

if TYPE_CHECKING:
    import pandas as pd

    Table: TypeAlias = pd.DataFrame | str | os.PathLike[str]

_SHOWN = 3  # examples in a line

_NUMBERS = {"whole numbers", "fractions"}
_KINDS = {
    **dict.fromkeys("iu", "whole numbers"),
    **dict.fromkeys("mM", "dates"),
    "f": "fractions",
    "b": "booleans",
}


def check_submission(
    frame: Table, sample: Table, *, probabilities: bool | Literal["auto"] = "auto"
) -> None:
    """Check that a submission has the form of the competition's sample.

    Args:
        frame: the submission, as a DataFrame or as the CSV file that will be sent. The file is the
            better check: it shows an index that was written with it.
        sample: the competition's sample submission, as a DataFrame or a CSV file. Its first column
            has the ids.
        probabilities: whether the predictions must be from 0 to 1. ``"auto"``: if those of the
            sample are, and one of them is neither 0 nor 1.

    Raises:
        SubmissionError: lists every mistake, one per line: columns, ids, their order, duplicates,
            missing and infinite values, types, range.
        MissingExtra: pandas is not installed.
    """
    submitted, expected = _read(frame, "frame"), _read(sample, "sample")
    mistakes = list(_mistakes(submitted, expected, probabilities))
    if mistakes:
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        raise SubmissionError(
            "\n".join([f"the submission has {count}:", *(f"  - {line}" for line in mistakes)]),
            allowed=f"the sample's form: {len(expected)} rows, columns {_names(expected)}",
            do="correct these lines and check again, before you send it",
        )


def _read(table: Table, name: str) -> pd.DataFrame:
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtra(
            "nb.check_submission compares pandas DataFrames, and pandas is not installed",
            do="pip install 'nbtoolkit-torch[search]'",
        ) from error
    try:
        read = table if isinstance(table, pd.DataFrame) else pd.read_csv(table)
        if len(read.columns) < 2:
            raise ValueError(f"it has the columns {_names(read)}")
        return read
    except (OSError, ValueError, TypeError) as error:  # pandas' parser errors are ValueErrors
        raise SubmissionError(
            f"the {name} cannot be read: {error}",
            allowed="a DataFrame or a CSV file, with a column of ids and one of predictions",
            do="frame.to_csv(path, index=False) writes such a file",
        ) from error


def _mistakes(
    frame: pd.DataFrame, sample: pd.DataFrame, probabilities: bool | str
) -> Iterator[str]:
    yield from _column_mistakes(frame, sample)
    if len(frame) != len(sample):
        yield f"it has {len(frame)} rows; the sample has {len(sample)}"
    for position, name in enumerate(sample.columns):
        if list(frame.columns).count(name) != 1:  # a mistake of the columns
            continue
        yield from _value_mistakes(frame[name], sample[name])
        if position == 0:
            yield from _id_mistakes(frame[name], sample[name])
        else:
            yield from _range_mistakes(frame[name], sample[name], probabilities)


def _column_mistakes(frame: pd.DataFrame, sample: pd.DataFrame) -> Iterator[str]:
    missing = sample.columns[~sample.columns.isin(frame.columns)]
    unknown = frame.columns[~frame.columns.isin(sample.columns)]
    if len(missing):
        yield f"columns are missing: {_examples(missing)}"
    if len(unknown):
        index = any(str(name).startswith("Unnamed: ") for name in unknown)
        hint = " (an index: write the file with index=False)" if index else ""
        yield f"the sample does not have these columns: {_examples(unknown)}{hint}"
    if frame.columns.has_duplicates:
        twice = frame.columns[frame.columns.duplicated()]
        yield f"columns are there more than once: {_examples(twice)}"
    elif not len(missing) and not len(unknown) and list(frame.columns) != list(sample.columns):
        yield f"the columns are in another order: {_names(frame)}; the sample has {_names(sample)}"


def _id_mistakes(ids: pd.Series, needed: pd.Series) -> Iterator[str]:
    if ids.duplicated().any():
        yield f"ids are there more than once: {_examples(ids[ids.duplicated()].unique())}"
    missing, unknown = needed[~needed.isin(ids)], ids[~ids.isin(needed)].dropna()
    if len(missing):
        yield f"ids of the sample are missing: {_examples(missing.to_list())}"
    if len(unknown):
        yield f"the sample does not have these ids: {_examples(unknown.to_list())}"
    if not len(missing) and len(ids) == len(needed):
        differs = (ids.to_numpy() != needed.to_numpy()).nonzero()[0]
        if len(differs):
            theirs, ours = needed.iloc[differs[0]], ids.iloc[differs[0]]
            yield f"the ids are in another order: row {differs[0]} has {ours}, the sample {theirs}"


def _value_mistakes(values: pd.Series, expected: pd.Series) -> Iterator[str]:
    name, kind, needed = repr(values.name), _kind(values), _kind(expected)
    if missing := int(values.isna().sum()):
        yield f"{name} has no value in {_rows(missing)} (NaN)"
    if endless := int(values.isin([float("inf"), float("-inf")]).sum()):
        yield f"{name} is infinite in {_rows(endless)}"
    # Whole numbers may stand for fractions; a missing value makes fractions of whole numbers.
    if kind != needed and not ({kind, needed} == _NUMBERS and (missing or needed == "fractions")):
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
            yield f"{values.name!r} is outside 0 to 1 in {_rows(len(outside))} ({span})"


def _kind(values: pd.Series) -> str:
    """The kind of a column's values; nullable types of pandas have the kinds of NumPy's."""
    return _KINDS.get(values.dtype.kind, "texts")


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _names(frame: pd.DataFrame) -> str:
    return ", ".join(map(repr, frame.columns))


def _examples(values: Sequence[object]) -> str:
    more = f", and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return ", ".join(map(str, values[:_SHOWN])) + more
