"""Blend cross-validated models by their out-of-fold predictions."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nbtoolkit.config.directions import direction_of
from nbtoolkit.errors import FoldError

if TYPE_CHECKING:
    from nbtoolkit.config.directions import Direction
    from nbtoolkit.search.crossval.cv_result import CVResult
    from nbtoolkit.search.folds.folds import Folds

Array: TypeAlias = NDArray[Any]
Metric: TypeAlias = Callable[[Array, Array], float]
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
            FoldError: a model is missing or unknown, or values are missing.
            ValueError: the shapes differ.
        """
        if set(predictions) != set(self.weights):
            raise FoldError(
                f"predictions of {', '.join(map(repr, predictions)) or 'no model'} were given to a "
                f"blend of {', '.join(map(repr, self.weights))}",
                allowed="one array for each model of the blend, by its name",
                do="pass {name: cv.predict(test) for each of the blended results}",
            )
        arrays = [_checked(name, np.asarray(predictions[name])) for name in self.weights]
        return _mix(np.array(list(self.weights.values())), _columns(arrays, self.method))

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
        FoldError: the results have different folds, predictions or targets are missing, or the name
            of ``metric`` does not tell the direction.
        ValueError: the predictions differ in shape.
        ImportError: SciPy is not installed.
    """
    folds = _common_folds(results)
    direction = _direction(metric, direction)
    sign = -1.0 if direction == "maximize" else 1.0
    # The samples that a fold validates on; with folds by time, these are not all.
    seen = np.unique(np.concatenate([valid for _, valid in folds.pairs]))
    truth = _targets(results, targets, folds.n_samples)[seen]
    arrays = [_checked(key, cv.out_of_fold(name)[seen]) for key, cv in results.items()]
    columns = _columns(arrays, method)

    def score(predictions: Array, rows: Array) -> float:
        return float(metric(truth[rows], predictions))

    def fitted(rows: Array) -> Array:
        part = columns[:, rows]
        return _best_weights(lambda w: sign * score(_mix(w, part), rows), len(columns))

    def score_of_other_folds(repeat: int) -> float:
        """Return the metric of one division into folds, each with the weights of the others."""
        blended = np.zeros_like(columns[0])
        validated = []
        for _, valid in folds.pairs[repeat * folds.k : (repeat + 1) * folds.k]:
            rows = np.searchsorted(seen, valid)
            weights = fitted(np.setdiff1d(everything, rows))
            blended[rows] = _mix(weights, columns[:, rows])
            validated.append(rows)
        rows = np.unique(np.concatenate(validated))
        return score(blended[rows], rows)

    everything = np.arange(len(seen))
    weights = fitted(everything)
    nested = [score_of_other_folds(repeat) for repeat in range(len(folds) // folds.k)]
    return Blend(
        weights=dict(zip(results, map(float, weights), strict=True)),
        score=score(_mix(weights, columns), everything),
        nested_score=float(np.mean(nested)),
        scores={
            key: score(column, everything) for key, column in zip(results, columns, strict=True)
        },
        direction=direction,
        method=method,
        folds=folds.hash,
    )


def _best_weights(cost: Callable[[Array], float], models: int) -> Array:
    """Return the weights of the lowest cost.

    They are at least as good as equal weights, and as any model alone.
    """
    from scipy.optimize import minimize

    def weights(point: Array) -> Array:  # all but the last one, which is the rest
        positive: Array = np.clip(np.append(point, 1 - point.sum()), 0, None)
        return positive / float(positive.sum())

    corners = np.eye(models)
    candidates = [corners.mean(axis=0), *corners]
    if models > 1:
        # A wide start: an accuracy is constant over small changes.
        simplex = (0.5 * corners + 0.5 / models)[:, :-1]
        options = {"initial_simplex": simplex, "maxfev": _CALLS * models, "xatol": 1e-3}
        end = minimize(
            lambda point: cost(weights(point)), simplex[0], method="Nelder-Mead", options=options
        )
        candidates.append(weights(end.x))
    best: Array = min(candidates, key=cost)
    return best


def _mix(weights: Array, columns: Array) -> Array:
    mixed: Array = np.tensordot(weights.astype(columns.dtype), columns, axes=1)
    return mixed


def _columns(arrays: list[Array], method: Method) -> Array:
    """Stack each model's part of the mean.

    In the lowest of their precisions: probabilities of float32 sum to 1 within its precision only,
    and scikit-learn's metrics expect the precision of the array's type.
    """
    if method == "ranks":
        from scipy.stats import rankdata

        arrays = [rankdata(array, axis=0) / len(array) for array in arrays]
    elif method != "probabilities":
        raise FoldError(
            f"method is {method!r}",
            allowed="'probabilities' or 'ranks'",
            do="use 'ranks' if only the order of the predictions counts",
        )
    dtype = min((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)
    return np.stack([array.astype(dtype) for array in arrays])


def _common_folds(results: Mapping[str, CVResult]) -> Folds:
    if not isinstance(results, Mapping) or not results:
        raise FoldError(
            f"nb.blend was given {reprlib.repr(results)}",
            allowed="a dict of CVResults: {'cnn': cv1, 'gbm': cv2}",
            do="pass what nb.cross_validate returns; nb.attach(folder).result() reads it again",
        )
    first = next(iter(results))
    folds = results[first].folds
    for key, cv in results.items():
        if cv.folds != folds:
            pairs = folds.differences(cv.folds).items()
            raise FoldError(
                f"{key!r} has other folds than {first!r}: "
                + "; ".join(f"{field} {values[0]} and {values[1]}" for field, values in pairs),
                allowed="results on the same folds: on others, a prediction has seen its sample",
                do="cross-validate both with the same nb.make_folds(...)",
            )
    return folds


def _checked(key: str, array: Array) -> Array:
    """Return the predictions of a model, without NaN."""
    whole = array.dtype.kind != "f"
    if whole or np.isnan(array).any():
        kind = f"{array.dtype} values, as classes are" if whole else "NaN among its predictions"
        raise FoldError(
            f"{key!r} has {kind}",
            allowed="a fraction for every sample: a probability, or a value of a regression",
            do="return probabilities of all classes as 'predictions'; look for NaN in cv.scores; "
            "call nb.cross_validate again if folds are missing: it resumes",
        )
    return array


def _targets(results: Mapping[str, CVResult], targets: ArrayLike | None, size: int) -> Array:
    if targets is None:
        returned = (cv.targets for cv in results.values())
        targets = next((values for values in returned if values is not None), [])
    array = np.asarray(targets)
    if len(array) != size:
        raise FoldError(
            f"nb.blend has {len(array) or 'no'} targets for {size} samples",
            allowed="targets=, or a training function that returns 'targets' or 'labels'",
            do="pass the y of nb.make_folds(y): nb.blend({...}, y, metric=...)",
        )
    return array


def _direction(metric: Metric, direction: Direction | Literal["auto"]) -> Direction:
    if direction != "auto":
        return direction
    name = getattr(metric, "__name__", type(metric).__name__)
    by_name = direction_of(name)
    if by_name is None:
        raise FoldError(
            f"nb.blend cannot tell whether the highest or the lowest {name!r} is best",
            allowed="direction='maximize' or direction='minimize'",
            do="pass one of them",
        )
    return by_name
