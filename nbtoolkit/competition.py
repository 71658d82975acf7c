"""Blend cross-validated models by out-of-fold predictions, and check submissions."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from nbtoolkit.config.directions import direction_of
from nbtoolkit.crossval.cv_result import CVResult
from nbtoolkit.environment.installed import install_line
from nbtoolkit.errors import FoldError, MissingExtra, SubmissionError

if TYPE_CHECKING:
    from typing import Any

    import numpy as np
    import pandas as pd
    from numpy.typing import ArrayLike, NDArray

    from nbtoolkit.config.directions import Direction
    from nbtoolkit.folds.folds import Folds

    Array: TypeAlias = NDArray[Any]
    Metric: TypeAlias = Callable[[Array, Array], float]
    Table: TypeAlias = pd.DataFrame | str | os.PathLike[str]

Method = Literal["probabilities", "ranks"]

_CALLS = 60
"""Calls of the metric for each model and search of the weights; two models need about 40."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Blend:
    """A weighted mean of several models' predictions, from :func:`nbtoolkit.blend`.

    Attributes:
        weights: the weight of each model. No weight is negative, and their sum is 1.
        score: the metric of the blended out-of-fold predictions. It is too optimistic, because the
            weights were fitted to the same predictions.
        nested_score: a fair estimate of the metric. The weights for the samples of each fold were
            fitted on the other folds.
        scores: the metric of each model alone.
        direction: ``"maximize"`` or ``"minimize"``.
        method: ``"probabilities"`` or ``"ranks"``.
        folds: a hash of the folds.
    """

    weights: dict[str, float]
    score: float
    nested_score: float
    scores: dict[str, float]
    direction: Direction
    method: Method
    folds: str

    def predict(self, predictions: Mapping[str, ArrayLike]) -> Array:
        """Blend the models' predictions for new samples.

        Args:
            predictions: the predictions of each model, such as those of ``cv.predict``, all of the
                same shape (n, ...). With ``method="ranks"``, the n predictions of a model are
                sorted, and each prediction is replaced by its position.

        Returns:
            An array of shape (n, ...).

        Raises:
            FoldError: a model is missing or unknown, the shapes differ, or values are missing.
        """
        import numpy as np

        if set(predictions) != set(self.weights):
            raise FoldError(
                f"predictions of {_names(predictions)} were given to a blend of "
                f"{_names(self.weights)}",
                allowed="one array for each model of the blend, by its name",
                do="pass {name: cv.predict(test) for each of the blended results}",
            )
        arrays = {name: _numbers(name, predictions[name]) for name in self.weights}
        _check_shapes(arrays)
        columns = [_column(array, slice(None), self.method) for array in arrays.values()]
        return _mix(np.array(list(self.weights.values())), _stack(columns))

    def __repr__(self) -> str:
        weights = ", ".join(f"{name}={weight:.3f}" for name, weight in self.weights.items())
        return f"Blend({weights}; score={self.score:.5g}, nested_score={self.nested_score:.5g})"


def blend(
    results: Mapping[str, CVResult],
    targets: ArrayLike | None = None,
    *,
    metric: Metric,
    method: Method = "probabilities",
    direction: Direction | Literal["auto"] = "auto",
    name: str = "predictions",
) -> Blend:
    """Find the weights with which several models predict best together.

    The blend is a weighted mean of the models' out-of-fold predictions, and the weights give it the
    best metric. They are found with the method of Nelder and Mead (``scipy.optimize.minimize``),
    which needs no gradient: metrics such as the accuracy or the AUC have none.

    Args:
        results: a dict of cross-validations on the same folds, with a name for each model.
        targets: the true values of all samples, shape (n_samples,). Default: those that a training
            function returned as ``"targets"`` or ``"labels"``, one for each validation sample.
        metric: a function ``metric(targets, predictions)`` that returns a number. The order of the
            arguments is scikit-learn's.
        method: ``"probabilities"``: the mean of the predictions as they are, which are
            probabilities or the values of a regression. ``"ranks"``: the mean of their ranks,
            divided by the number of samples; for metrics that depend on the order only, such as the
            AUC, and for models with different scales.
        direction: ``"maximize"`` or ``"minimize"``. ``"auto"``: the name of ``metric`` decides.
        name: the key under which the training functions return their predictions.

    Returns:
        The :class:`Blend`. Use its ``nested_score`` as the estimate for new data; its ``score`` is
        too good.

    Raises:
        FoldError: the results have different folds or shapes, predictions or targets are missing,
            or the name of ``metric`` does not tell the direction.
        MissingExtra: SciPy is not installed.
    """
    import numpy as np

    folds = _check_results(results)
    rising = _direction(metric, direction) == "maximize"
    has = np.zeros(folds.n_samples, dtype=bool)
    for _, valid in folds.pairs:
        has[valid] = True
    arrays = {key: _out_of_fold(key, cv, name, has) for key, cv in results.items()}
    _check_shapes(arrays)
    truth = _targets(results, targets, folds.n_samples)
    columns = _stack([_column(array, has, method) for array in arrays.values()])
    truth = truth[has]
    place = np.cumsum(has) - 1  # of a sample among those that have a prediction
    repeats = [
        [place[valid] for _, valid in folds.pairs[first : first + folds.k]]
        for first in range(0, len(folds), folds.k)
    ]

    def score(predictions: Array, rows: Array | slice = slice(None)) -> float:
        return float(metric(truth[rows], predictions))

    def fitted(rows: Array | slice) -> Array:
        sign, part = (-1.0 if rising else 1.0), columns[:, rows]
        return _best_weights(lambda w: sign * score(_mix(w, part), rows), len(columns))

    weights, nested = fitted(slice(None)), []
    for repeat in repeats:
        blended = np.zeros_like(columns[0])
        for rows in repeat:
            others = np.setdiff1d(np.arange(len(truth)), rows)
            blended[rows] = _mix(fitted(others), columns[:, rows])
        seen = np.unique(np.concatenate(repeat))
        nested.append(score(blended[seen], seen))
    return Blend(
        weights=dict(zip(results, map(float, weights), strict=True)),
        score=score(_mix(weights, columns)),
        nested_score=float(np.mean(nested)),
        scores={key: score(column) for key, column in zip(results, columns, strict=True)},
        direction="maximize" if rising else "minimize",
        method=method,
        folds=folds.hash,
    )


def _best_weights(cost: Callable[[Array], float], models: int) -> Array:
    """The weights of the lowest cost; at least as good as equal weights, and as any model alone."""
    import numpy as np

    try:
        from scipy.optimize import minimize
    except ImportError as error:
        raise MissingExtra(
            "nb.blend finds its weights with SciPy, which is not installed",
            do=install_line("training"),
        ) from error

    def weights(point: Array) -> Array:  # all but the last one, which is the rest
        positive: Array = np.clip(np.append(point, 1 - point.sum()), 0, None)
        return positive / float(positive.sum())

    corners = np.eye(models)
    candidates = [corners.mean(axis=0), *corners]
    if models > 1:
        # A wide start: an accuracy is constant over small changes.
        simplex = (0.5 * corners + 0.5 / models)[:, :-1]
        options = {"initial_simplex": simplex, "maxfev": _CALLS * models, "xatol": 1e-3}
        found = minimize(
            lambda point: cost(weights(point)), simplex[0], method="Nelder-Mead", options=options
        )
        candidates.append(weights(found.x))
    best: Array = min(candidates, key=cost)
    return best


def _mix(weights: Array, columns: Array) -> Array:
    import numpy as np

    mixed: Array = np.tensordot(weights.astype(columns.dtype), columns, axes=1)
    return mixed


def _stack(arrays: list[Array]) -> Array:
    """Stack arrays in the lowest of their precisions.

    Probabilities of float32 sum to 1 within its precision only, and scikit-learn's metrics expect
    the precision of the array's type.
    """
    import numpy as np

    dtype = min((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)
    return np.stack([array.astype(dtype) for array in arrays])


def _column(array: Array, rows: Array | slice, method: Method) -> Array:
    """One model's part of the mean, of the samples in ``rows``."""
    array = array[rows]
    if method == "probabilities":
        return array
    if method != "ranks":
        raise FoldError(
            f"method is {method!r}",
            allowed="'probabilities' or 'ranks'",
            do="use 'ranks' if only the order of the predictions counts",
        )
    from scipy.stats import rankdata

    ranks: Array = rankdata(array, axis=0) / len(array)
    return ranks


# --- argument checks ---


def _check_results(results: Mapping[str, CVResult]) -> Folds:
    """The folds of all results."""
    given = results.values() if isinstance(results, Mapping) else [results]
    if not given or not all(isinstance(cv, CVResult) for cv in given):
        raise FoldError(
            f"nb.blend was given {reprlib.repr(results)}",
            allowed="a dict of CVResults: {'cnn': cv1, 'gbm': cv2}",
            do="pass what nb.cross_validate returns; nb.attach(folder).result() reads it again",
        )
    first, *others = results
    folds = results[first].folds
    for key in others:
        if results[key].folds != folds:
            differences = folds.differences(results[key].folds)
            raise FoldError(
                f"{key!r} has other folds than {first!r}: "
                + "; ".join(f"{what} {one} and {two}" for what, (one, two) in differences.items()),
                allowed="results on the same folds: on others, a prediction has seen its sample",
                do="cross-validate both with the same nb.make_folds(...)",
            )
    return folds


def _out_of_fold(key: str, cv: CVResult, name: str, has: NDArray[np.bool_]) -> Array:
    """A result's out-of-fold predictions, of shape (n_samples, ...)."""
    if len(cv.finished) < len(cv.folds):
        raise FoldError(
            f"{key!r} lacks out-of-fold predictions: {len(cv.finished)} of {len(cv.folds)} folds "
            f"are done (the cross-validation ended as {cv.status})",
            allowed="complete cross-validations",
            do="run its nb.cross_validate again: it resumes; or leave it out of the blend",
        )
    try:
        array = cv.out_of_fold(name)
    except FoldError as error:
        raise FoldError(f"{key!r}: {error.what}", allowed=error.allowed, do=error.do) from None
    return _numbers(key, array, has)


def _numbers(key: str, values: ArrayLike, has: Array | slice = slice(None)) -> Array:
    import numpy as np

    array = np.asarray(values)
    whole = array.dtype.kind != "f"
    if whole or np.isnan(array[has]).any():
        kind = f"{array.dtype} values, as classes are" if whole else "NaN among its predictions"
        raise FoldError(
            f"{key!r} has {kind}",
            allowed="a fraction for every sample: a probability, or a value of a regression",
            do="return probabilities of all classes as 'predictions'; look for NaN in cv.scores",
        )
    return array


def _check_shapes(arrays: Mapping[str, Array]) -> None:
    shapes = {key: array.shape for key, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        raise FoldError(
            "the predictions differ in shape: "
            + ", ".join(f"{key!r} {shape}" for key, shape in shapes.items()),
            allowed="one shape: (n,) or (n, classes) for all models",
            do="select the same columns in all of them, such as predictions[:, 1]",
        )


def _targets(results: Mapping[str, CVResult], targets: ArrayLike | None, size: int) -> Array:
    import numpy as np

    if targets is None:
        targets = next((t for cv in results.values() if (t := cv.targets) is not None), None)
    if targets is None or len(np.asarray(targets)) != size:
        what = "no targets" if targets is None else f"{len(np.asarray(targets))} targets"
        raise FoldError(
            f"nb.blend has {what} for {size} samples",
            allowed="targets=, or a training function that returns 'targets' or 'labels'",
            do="pass the y of nb.make_folds(y): nb.blend({...}, y, metric=...)",
        )
    return np.asarray(targets)


def _direction(metric: Metric, direction: Direction | Literal["auto"]) -> Direction:
    if direction != "auto":
        return direction
    name = getattr(metric, "__name__", type(metric).__name__)
    found = direction_of(name)
    if found is None:
        raise FoldError(
            f"nb.blend cannot tell whether the highest or the lowest {name!r} is best",
            allowed="direction='maximize' or direction='minimize'",
            do="pass one of them",
        )
    return found


def _names(keys: Mapping[str, object]) -> str:
    return ", ".join(map(repr, keys)) or "no model"


# --- submissions ---


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
        SubmissionError: a file cannot be read, or the submission has mistakes. The message lists
            all of them, one per line: columns, ids and their order, duplicates, missing and
            infinite values, types, range.
        MissingExtra: pandas is not installed.
    """
    submitted, expected = _read(frame, "frame"), _read(sample, "sample")
    mistakes = list(_mistakes(submitted, expected, probabilities))
    if mistakes:
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        raise SubmissionError(
            "\n".join([f"the submission has {count}:", *(f"  - {line}" for line in mistakes)]),
            allowed=f"the sample's form: {len(expected)} rows, columns {_columns(expected)}",
            do="correct these lines and check again, before you send it",
        )


def _read(table: Table, name: str) -> pd.DataFrame:
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtra(
            "nb.check_submission compares pandas DataFrames, and pandas is not installed",
            do=install_line("search"),
        ) from error
    try:
        read = table if isinstance(table, pd.DataFrame) else pd.read_csv(table)
        if len(read.columns) < 2:
            raise ValueError(f"it has the columns {_columns(read)}")
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
        yield from _value_mistakes(frame[name], sample[name], ids=position == 0)
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
        theirs, ours = _columns(sample), _columns(frame)
        yield f"the columns are in another order: {ours}; the sample has {theirs}"


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


def _value_mistakes(values: pd.Series, expected: pd.Series, *, ids: bool) -> Iterator[str]:
    name, kind, needed = repr(values.name), _kind(values), _kind(expected)
    if missing := int(values.isna().sum()):
        yield f"{name} has no value in {_rows(missing)} (NaN)"
    if endless := int(values.isin([float("inf"), float("-inf")]).sum()):
        yield f"{name} is infinite in {_rows(endless)}"
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
            yield f"{values.name!r} is outside 0 to 1 in {_rows(len(outside))} ({span})"


def _kind(values: pd.Series) -> str:
    """The kind of a column's values; nullable types of pandas have the kinds of NumPy's."""
    return _KINDS.get(values.dtype.kind, "texts")


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _columns(frame: pd.DataFrame) -> str:
    return ", ".join(map(repr, frame.columns))


def _examples(values: Sequence[object]) -> str:
    more = f", and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return ", ".join(map(str, values[:_SHOWN])) + more
