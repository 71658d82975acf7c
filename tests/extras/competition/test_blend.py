"""nb.blend on cross-validations with real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.stats import rankdata
from sklearn.metrics import accuracy_score, log_loss, mean_squared_error, roc_auc_score

import nbtoolkit as nb
from nbtoolkit.errors import FoldError

N = 240
RANDOM = np.random.default_rng(0)
Y = (np.arange(N) % 3 == 0).astype(int)
FOLDS = nb.make_folds(Y, k=4)


def near(noise: float) -> np.ndarray:
    """Scores of the targets with noise of their own, as probabilities."""
    return 1 / (1 + np.exp(-(2 * Y - 1 + noise * RANDOM.standard_normal(N))))


CNN, GBM, BAD = near(1.0), near(1.2), near(30.0)


def returning(predictions: np.ndarray, **more: np.ndarray) -> Callable[..., dict[str, Any]]:
    def train(config: Any, ctx: Any) -> dict[str, Any]:
        valid = ctx.fold.valid_indices
        values = {name: array[valid] for name, array in more.items()}
        return {"score": 0.0, "predictions": predictions[valid], **values}

    return train


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., nb.CVResult]:
    folder = tmp_path_factory.mktemp("blend")
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(folder)}

    def run(train: Callable[..., Any], folds: nb.Folds = FOLDS) -> nb.CVResult:
        return nb.cross_validate(train, settings, folds, display="off", resume="never")

    return run


@pytest.fixture(scope="module")
def two(validated: Callable[..., nb.CVResult]) -> dict[str, nb.CVResult]:
    return {
        "cnn": validated(returning(CNN, targets=Y)),
        "gbm": validated(returning(GBM, labels=Y)),
    }


def best_on_a_grid(rows: np.ndarray) -> float:
    """The first model's weight with the lowest log loss on these rows."""
    grid = np.linspace(0, 1, 1001)[:, None]
    mixed = grid * CNN[rows] + (1 - grid) * GBM[rows]
    costs = -np.log(np.where(Y[rows] == 1, mixed, 1 - mixed)).mean(axis=1)
    return float(grid[costs.argmin(), 0])


def test_weights_and_scores_are_those_of_a_search_over_all_weights(
    two: dict[str, nb.CVResult],
) -> None:
    found = nb.blend(two, metric=log_loss)
    weight = best_on_a_grid(np.arange(N))
    assert found.direction == "minimize"
    assert found.weights["cnn"] == pytest.approx(weight, abs=0.01)
    assert sum(found.weights.values()) == pytest.approx(1)
    assert found.scores == pytest.approx({"cnn": log_loss(Y, CNN), "gbm": log_loss(Y, GBM)})
    assert found.score == pytest.approx(log_loss(Y, weight * CNN + (1 - weight) * GBM), abs=1e-5)
    # The nested score, by hand: the weights of a fold are fitted on the other folds.
    blended = np.zeros(N)
    for fold in FOLDS:
        weight = best_on_a_grid(fold.train_indices)
        rows = fold.valid_indices
        blended[rows] = weight * CNN[rows] + (1 - weight) * GBM[rows]
    assert found.nested_score == pytest.approx(log_loss(Y, blended), abs=1e-4)
    assert found.score < found.nested_score < min(found.scores.values())
    assert found.folds == FOLDS.hash
    assert "nested_score" in repr(found)


@pytest.mark.long
def test_a_blend_of_noise_is_no_better_than_its_nested_score_says(
    validated: Callable[..., nb.CVResult],
) -> None:
    """With many models of pure noise, the fitted score is too good; the nested one is not."""
    noise = {f"m{at}": RANDOM.random(N) for at in range(6)}
    found = nb.blend(
        {name: validated(returning(column)) for name, column in noise.items()},
        Y,
        metric=roc_auc_score,
    )
    assert found.score > found.nested_score + 0.02
    assert found.score >= max(found.scores.values())


@pytest.mark.long
@pytest.mark.parametrize("metric", [roc_auc_score, lambda y, p: accuracy_score(y, p > 0.5)])
def test_a_metric_that_is_constant_in_steps_is_no_worse_than_any_model(
    two: dict[str, nb.CVResult],
    validated: Callable[..., nb.CVResult],
    metric: Callable[..., float],
) -> None:
    three = {**two, "bad": validated(returning(BAD))}
    found = nb.blend(three, metric=metric, direction="maximize")
    assert found.score >= max(found.scores.values())
    assert min(found.weights.values()) >= 0
    assert found.weights["bad"] < 0.2


def test_it_predicts_new_samples_by_its_weights(two: dict[str, nb.CVResult]) -> None:
    found = nb.blend(two, metric=log_loss)
    new = {"gbm": RANDOM.random(7), "cnn": RANDOM.random(7)}
    weights = found.weights
    expected = weights["cnn"] * new["cnn"] + weights["gbm"] * new["gbm"]
    np.testing.assert_allclose(found.predict(new), expected)


def test_ranks_take_models_on_different_scales(validated: Callable[..., nb.CVResult]) -> None:
    scaled = {"cnn": validated(returning(CNN)), "gbm": validated(returning(1000 * GBM + 5))}
    found = nb.blend(scaled, Y, metric=roc_auc_score, method="ranks")
    plain = nb.blend(scaled, Y, metric=roc_auc_score)
    assert found.score > plain.score
    new = {"cnn": RANDOM.random(9), "gbm": 1000 * RANDOM.random(9)}
    expected = sum(found.weights[name] * rankdata(new[name]) / 9 for name in new)
    np.testing.assert_allclose(found.predict(new), expected)


@pytest.mark.long
def test_probabilities_of_several_classes_and_repeats(
    validated: Callable[..., nb.CVResult],
) -> None:
    folds = nb.make_folds(Y, k=3, repeats=2)
    both = [np.column_stack([1 - column, column]) for column in (CNN, GBM)]
    both[0] = both[0].astype("float32")  # mixed in its precision, to which the rows sum to 1
    results = {str(at): validated(returning(array), folds) for at, array in enumerate(both)}
    found = nb.blend(results, Y, metric=log_loss)
    assert found.score < found.nested_score < min(found.scores.values())
    assert found.predict(dict(zip(results, both, strict=True))).shape == (N, 2)


@pytest.mark.long
def test_samples_that_no_fold_validates_on_do_not_count(
    validated: Callable[..., nb.CVResult],
) -> None:
    folds = nb.make_folds(np.arange(N), kind="time", k=4)
    results = {"cnn": validated(returning(CNN), folds), "gbm": validated(returning(GBM), folds)}
    seen = np.concatenate([valid for _, valid in folds.pairs])
    assert len(seen) < N
    found = nb.blend(results, Y.astype(float), metric=mean_squared_error)
    assert found.scores["cnn"] == pytest.approx(mean_squared_error(Y[seen], CNN[seen]))


# --- what is refused ---


def test_folds_of_another_split_are_refused(
    two: dict[str, nb.CVResult], validated: Callable[..., nb.CVResult]
) -> None:
    other = validated(returning(GBM), nb.make_folds(Y, k=4, seed=7))
    with pytest.raises(FoldError, match=r"'other' has other folds than 'cnn': seed 0 and 7; hash "):
        nb.blend({**two, "other": other}, metric=log_loss)


def test_missing_predictions_are_refused_by_name(
    two: dict[str, nb.CVResult], validated: Callable[..., nb.CVResult]
) -> None:
    def stops(config: Any, ctx: Any) -> dict[str, Any]:
        if ctx.fold.index == 1:
            raise nb.RunStopped("stopped")
        return {"score": 1.0, "predictions": CNN[ctx.fold.valid_indices]}

    def scores(config: Any, ctx: Any) -> dict[str, float]:
        return {"score": 1.0}

    holes = np.where(np.arange(N) == 5, np.nan, CNN)
    for train, match in [
        (stops, r"'new' has NaN among its predictions[\s\S]*call nb.cross_validate again if folds"),
        (scores, r"fold 0 returned a dict with score: there is no 'predictions'"),
        (returning(holes), r"'new' has NaN among its predictions"),
        (returning((CNN > 0.5).astype(int)), r"'new' has int64 values, as classes are"),
    ]:
        with pytest.raises(FoldError, match=match):
            nb.blend({**two, "new": validated(train)}, metric=log_loss)


def test_other_shapes_and_models_are_refused(
    two: dict[str, nb.CVResult], validated: Callable[..., nb.CVResult]
) -> None:
    wide = validated(returning(np.column_stack([1 - CNN, CNN])))
    with pytest.raises(ValueError, match="must have the same shape"):
        nb.blend({**two, "wide": wide}, metric=log_loss)
    found = nb.blend(two, metric=log_loss)
    with pytest.raises(ValueError, match="must have the same shape"):
        found.predict({"cnn": np.ones(5), "gbm": np.ones(6)})
    with pytest.raises(FoldError, match=r"predictions of 'cnn' were given to a blend of 'cnn', 'g"):
        found.predict({"cnn": np.ones(5)})
    with pytest.raises(FoldError, match="'gbm' has NaN"):
        found.predict({"cnn": np.ones(2), "gbm": [0.5, np.nan]})


def test_other_arguments_are_refused(
    two: dict[str, nb.CVResult], validated: Callable[..., nb.CVResult]
) -> None:
    with pytest.raises(FoldError, match=r"nb.blend was given \{\}"):
        nb.blend({}, metric=log_loss)
    with pytest.raises(FoldError, match=r"nb.blend was given \[CVResult"):
        nb.blend([*two.values()], metric=log_loss)  # type: ignore[arg-type]
    with pytest.raises(FoldError, match="highest or the lowest '<lambda>' is best"):
        nb.blend(two, metric=lambda y, p: 0.0)
    with pytest.raises(FoldError, match=r"method is 'mean'(.|\n)*'probabilities' or 'ranks'"):
        nb.blend(two, metric=log_loss, method="mean")  # type: ignore[arg-type]
    with pytest.raises(FoldError, match=r"nb.blend has 3 targets for 240 samples"):
        nb.blend(two, [1, 2, 3], metric=log_loss)
    with pytest.raises(FoldError, match=r"nb.blend has no targets for 240 samples"):
        nb.blend({"new": validated(returning(CNN))}, metric=log_loss)
