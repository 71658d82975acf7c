"""nb.check_submission: one line for each mistake, and none for a submission of the right form."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import nbtoolkit as nb
from nbtoolkit.errors import SubmissionError

SAMPLE = pd.DataFrame({"id": [3, 1, 2, 4], "target": [0.5, 0.5, 0.5, 0.5], "label": [0, 0, 0, 0]})


def right() -> pd.DataFrame:
    return SAMPLE.assign(target=[0.1, 0.9, 1.0, 0.0], label=[1, 0, 7, 2])


def lines_of(frame: object, sample: pd.DataFrame = SAMPLE) -> list[str]:
    with pytest.raises(SubmissionError, match="mistakes of the submission") as raised:
        nb.check_submission(frame, sample)
    assert raised.value.allowed.startswith(f"the sample's form: {len(sample)} rows")
    head, *lines = raised.value.what.splitlines()
    assert head.split()[-1] == str(len(lines))
    return [line.removeprefix("  - ") for line in lines]


def test_a_right_submission_passes_as_a_frame_and_as_a_file(tmp_path: Path) -> None:
    nb.check_submission(right(), SAMPLE)
    SAMPLE.to_csv(tmp_path / "sample.csv", index=False)
    right().to_csv(tmp_path / "submission.csv", index=False)
    nb.check_submission(tmp_path / "submission.csv", str(tmp_path / "sample.csv"))


def test_whole_numbers_stand_for_fractions_and_nullable_types_for_numpys() -> None:
    nb.check_submission(right().assign(target=[1, 0, 1, 0]), SAMPLE)
    nb.check_submission(right().assign(label=[0.25, 3e5, 1.0, 2.5]), SAMPLE)
    nb.check_submission(right().convert_dtypes(), SAMPLE)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (
            right().drop(columns="target"),
            r"columns are \['id', 'label'\]; the sample has \['id', 'target', 'label'\]",
        ),
        (right().assign(extra=1), r"columns are .*'extra'\]; the sample has"),
        (right()[["id", "label", "target"]], r"columns are \['id', 'label', 'target'\]; the s"),
        (right().assign(id=[3, 1, 2, 5]), r"ids of the sample are missing: \[4\]"),
        (right().assign(id=[3, 1, 2, 5]), r"the sample does not have these ids: \[5\]"),
        (right().assign(id=[3, 1, 1, 4]), r"ids are there more than once: \[1\]"),
        (right().iloc[[1, 0, 2, 3]], "ids are in another order: row 0 has 1, the sample 3"),
        (right().iloc[:3], "it has 3 rows; the sample has 4"),
        (
            right().assign(target=[0.1, np.nan, np.nan, 1]),
            r"'target' has no value in 2 row",
        ),
        (right().assign(label=[1, np.nan, 2, 3]), r"'label' has no value in 1 row\(s\) \(NaN\)"),
        (right().assign(target=[0.1, np.inf, 0, 1]), r"'target' is infinite in 1 row\(s\)"),
        (right().assign(id=[3.0, 1, 2, 4]), r"'id' has fractions \(float64\); the sample has who"),
        (right().assign(label=list("abcd")), r"'label' has texts .*; the sample has whole numbers"),
        (right().assign(target=list("abcd")), r"'target' has texts .*; the sample has fractions"),
        (
            right().assign(target=[0.1, 1.5, -0.2, 0]),
            r"outside 0 to 1 in 2 row\(s\) \(-0.2 to 1.5\)",
        ),
    ],
)
def test_a_mistake_has_a_line(wrong: pd.DataFrame, line: str) -> None:
    found = lines_of(wrong)
    assert [one for one in found if re.search(line, one)], found


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    wrong = right().iloc[[1, 0, 2]].assign(target=[np.nan, 2.0, 0.1])
    wrong.to_csv(tmp_path / "wrong.csv")
    assert lines_of(tmp_path / "wrong.csv") == [
        "the columns are ['Unnamed: 0', 'id', 'target', 'label']; the sample has ['id', 'target', "
        "'label'] (an index: write the file with index=False)",
        "it has 3 rows; the sample has 4",
        "ids of the sample are missing: [4]",
        "'target' has no value in 1 row(s) (NaN)",
        "'target' is outside 0 to 1 in 1 row(s) (2 to 2)",
    ]


def test_a_column_that_is_there_twice_is_a_mistake_of_the_columns() -> None:
    twice = pd.concat([right(), right()[["id", "target"]]], axis=1)
    [line] = lines_of(twice)
    assert line.startswith("the columns are ['id', 'target', 'label', 'id', 'target']; the sample")


def test_the_range_follows_from_the_sample_or_the_caller() -> None:
    zeros = SAMPLE.assign(target=0.0)  # any number, or a probability
    wide = right().assign(target=[12.5, 3.0, -1.0, 0.0])
    nb.check_submission(wide, zeros)
    nb.check_submission(wide, SAMPLE, probabilities=False)
    with pytest.raises(SubmissionError, match="'target' is outside 0 to 1"):
        nb.check_submission(wide, zeros.drop(columns="label").assign(label=0), probabilities=True)


def test_of_many_ids_some_are_named() -> None:
    with pytest.raises(SubmissionError, match=r"are missing: \[0, 1, 2, 3, 4, 5, \.\.\.\]"):
        nb.check_submission(
            pd.DataFrame({"id": range(100, 200), "y": 0.0}),
            pd.DataFrame({"id": range(100), "y": 0.0}),
        )


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.csv"):
        nb.check_submission(tmp_path / "absent.csv", SAMPLE)
