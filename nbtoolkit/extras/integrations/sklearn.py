"""Fit scikit-learn's estimators and pipelines in a run, its folds and its sweeps.

    train = nbs.train_function(make_pipeline(StandardScaler(), SVC()), X, y, metrics=["accuracy"])
    nb.launch(train, config)
    nb.cross_validate(train, config, nb.make_folds(y, k=5))
    nb.sweep(train, config, {"model.svc__C": {"type": "float", "low": 0.1, "high": 10}})

or, in a training function: ``return nbs.fit(ctx, estimator, X, y)``.

``fit`` of an estimator is one call, which cannot be stopped, pruned or resumed. With ``epochs=`` an
estimator that has ``partial_fit`` can.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from nbtoolkit.environment.installed import installed_version
from nbtoolkit.errors import CheckpointError, FoldError
from nbtoolkit.extras.integrations.rounds import Rounds
from nbtoolkit.extras.integrations.support import refuse_ranks, requires
from nbtoolkit.run.identity import code_of
from nbtoolkit.run.paths import write_whole
from nbtoolkit.training.evaluation import keep_predictor

if TYPE_CHECKING:
    import os

    from nbtoolkit.config.schema import Config
    from nbtoolkit.search.folds.folds import Fold
    from nbtoolkit.worker.context import RunContext

    Scorer: TypeAlias = Callable[[Any, Any, Any], float]

FILE = "estimator.skops"

Metrics: TypeAlias = "Sequence[str] | Mapping[str, str | Callable[..., Any]] | None"
Method: TypeAlias = Literal["predict", "predict_proba", "decision_function"]


def train_function(
    estimator: Any, X: Any, y: Any, **options: Any
) -> Callable[[Config, RunContext], dict[str, Any]]:
    """Make the training function of an estimator, for ``nb.launch``, ``nb.sweep`` and others.

    Args:
        estimator: an estimator, or a function of the config that returns one. Such a function reads
            the settings under ``model.`` itself; otherwise they are set.
        X: n samples.
        y: n targets.
        options: further arguments of :func:`fit`.

    Raises:
        TypeError: an option is unknown.
    """
    factory = not hasattr(estimator, "fit") or inspect.isclass(estimator)
    if factory:
        options = {"params": {}, **options}
    inspect.signature(fit).bind(None, estimator, X, y, **options)  # before anything starts

    def train(config: Config, ctx: RunContext) -> dict[str, Any]:
        return fit(ctx, estimator(config) if factory else estimator, X, y, **options)

    train.__name__ = getattr(estimator, "__name__", type(estimator).__name__)
    # A run is identified by its function's source and plain attributes: tell estimators apart.
    text = f"{code_of(estimator) if factory else estimator.get_params()}"
    text = re.sub(r" at 0x[0-9a-f]+", "", f"{text} {options.get('metrics')}")
    train.__dict__["made_from"] = f"{train.__name__} {text}"
    return train


def fit(
    ctx: RunContext,
    estimator: Any,
    X: Any,
    y: Any,
    X_valid: Any = None,
    y_valid: Any = None,
    *,
    metrics: Metrics = None,
    method: Method = "predict",
    epochs: int | None = None,
    params: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Fit a copy of an estimator, score it, save it, and return what the training function returns.

    In a fold it is fitted on the fold's training samples and scored on the others. Where ``n_jobs``
    is not set, it is the plan's number of threads; joblib uses threads here, and no processes.

    Args:
        ctx: the run.
        estimator: an estimator or a ``Pipeline``.
        X: n samples: an array, a sparse matrix, a data frame or a list.
        y: n targets.
        X_valid: samples to validate on, outside of folds.
        y_valid: their targets.
        metrics: names of scikit-learn's scorers in a list; or a dict of a name for each, where a
            value is also a scorer (``make_scorer``) or a function ``(y_true, y_pred)``. Reported as
            ``val_<name>``, or ``train_<name>`` without samples to validate on. None: ``accuracy``
            of a classifier, ``r2`` of a regressor, else ``score``.
        method: how ``predictions`` are made, as in ``cross_val_predict``.
        epochs: call ``partial_fit`` so many times on all training samples, and report after each.
        params: parameters for ``set_params``; None: all settings under ``model.``.

    Returns:
        The scores, and ``predictions`` for the samples to validate on, of shape (n_valid, ...).

    Raises:
        MissingExtra: scikit-learn 1.4 or newer is not installed.
        PlanError: the run has several ranks.
        ValueError: of scikit-learn: a setting is not a parameter of the estimator, or a metric is
            unknown.
        AttributeError: ``epochs`` is given, and the estimator has no ``partial_fit``.
        FoldError: the folds are of another number of samples.
    """
    with requires("scikit-learn", "1.4"):
        from joblib import parallel_config
        from sklearn.base import clone
    refuse_ranks(ctx, "scikit-learn")
    model = clone(estimator)
    model.set_params(**(ctx.config.model if params is None else params))
    scorers = _scorers(model, metrics)
    prefix = "train" if ctx.fold is None and X_valid is None else "val"
    if (fold := ctx.fold) is not None:
        _check_fold(fold, X)
        X_valid = _rows(X, fold.valid_indices)
        y_valid = _rows(y, fold.valid_indices)
        X = _rows(X, fold.train_indices)
        y = _rows(y, fold.train_indices)
    held_out = (X, y) if X_valid is None else (X_valid, y_valid)

    def scores(fitted: Any) -> dict[str, float]:
        values = {name: scorer(fitted, *held_out) for name, scorer in scorers.items()}
        return {f"{prefix}_{name}": float(value) for name, value in values.items()}

    # Not processes: to start them takes seconds, and the rank shares its data with none of them.
    with parallel_config("threading", n_jobs=ctx.plan.threads_per_rank):
        if epochs is None:
            kind = type(model).__name__
            ctx.message(f"{kind}.fit is one call: a stop request or a pruner cannot end it earlier")
            ctx.raise_if_stopped()
            model.fit(X, y)
        else:
            model = _fit_epochs(ctx, model, X, y, epochs, scores)
        if ctx.config.checkpoint.enabled:
            _save(ctx, model)
            if not ctx.params:  # a sweep's folds keep none
                keep_predictor(ctx, getattr(model, method))
        predictions = {} if X_valid is None else {"predictions": getattr(model, method)(X_valid)}
        return {**scores(model), **predictions}


def load(folder: str | os.PathLike[str], *, trusted: Sequence[str] = ()) -> Any:
    """Return the fitted estimator of a run.

    Args:
        folder: the run's folder (``result.paths.folder``).
        trusted: types of other packages that may be loaded, as skops names them; scikit-learn's
            own are.

    Raises:
        MissingExtra: skops is not installed.
        CheckpointError: the run has saved no estimator.
        UntrustedTypesFoundException: of skops: the estimator has other types than these.
    """
    path = Path(folder) / "checkpoints" / FILE
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no fitted estimator",
            allowed="the folder of a run of nbs.fit, with checkpoint.enabled and skops installed",
            do="pip install skops, and launch it again",
        )
    return _load(path, trusted)


def _load(path: Path, trusted: Sequence[str] = ()) -> Any:
    with requires("skops", "0.11"):
        from skops import io
    known = [name for name in io.get_untrusted_types(file=path) if name.startswith("sklearn.")]
    return io.load(path, trusted=[*known, *trusted])


def _save(ctx: RunContext, model: Any) -> None:
    """Write the fitted estimator with skops: without pickled code."""
    if installed_version("skops") is None:
        ctx.message("the fitted estimator is not saved: pip install skops")
        return
    from skops.io.exceptions import UnsupportedTypeException

    path = ctx.paths.checkpoints / FILE
    try:
        write_whole(path, _dump(model), durable=False)
    except (UnsupportedTypeException, OSError) as error:
        ctx.message(f"the fitted estimator is not saved: {error}", "warning")
    else:
        ctx.note_saved(path, None, "estimator")


def _fit_epochs(
    ctx: RunContext,
    model: Any,
    X: Any,
    y: Any,
    epochs: int,
    scores: Callable[[Any], dict[str, float]],
) -> Any:
    """Call ``partial_fit`` on all samples in each epoch; returns the fitted estimator."""
    from sklearn.base import is_classifier
    from sklearn.utils.multiclass import unique_labels

    rounds = Rounds(ctx, "epochs.skops", epochs)
    done = 0
    if installed_version("skops") is None:
        rounds.do_not_save("pip install skops")
    elif rounds.saved is not None:
        saved = _load(rounds.saved)
        model = saved["model"]
        done = saved["epoch"]
    more = {"classes": unique_labels(y)} if is_classifier(model) else {}
    for epoch in range(done + 1, epochs + 1):
        model.partial_fit(X, y, **more)
        state = {"model": model, "epoch": epoch}
        rounds.end_round(epoch, scores(model), partial(_dump, state))
    return model


def _dump(state: Any) -> bytes:
    from skops import io

    return bytes(io.dumps(state))


def _scorers(model: Any, metrics: Metrics) -> dict[str, Scorer]:
    from sklearn.base import is_classifier, is_regressor
    from sklearn.metrics import get_scorer

    if metrics is None:
        if not (is_classifier(model) or is_regressor(model)):
            return {"score": lambda fitted, X, y: fitted.score(X, y)}
        metrics = ["accuracy" if is_classifier(model) else "r2"]
    if isinstance(metrics, str):
        metrics = [metrics]
    named = metrics if isinstance(metrics, Mapping) else {name: name for name in metrics}
    return {
        name: get_scorer(metric) if isinstance(metric, str) else _scorer(metric)
        for name, metric in named.items()
    }


def _scorer(metric: Callable[..., Any]) -> Scorer:
    """Return a scorer is called with (estimator, X, y), a metric with (y_true, y_pred)."""
    needed = [
        parameter
        for parameter in inspect.signature(metric).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(needed) == 3:
        return metric
    return lambda fitted, X, y: metric(y, fitted.predict(X))


def _check_fold(fold: Fold, X: Any) -> None:
    size = X.shape[0] if hasattr(X, "shape") else len(X)
    wanted = 1 + int(max(fold.train_indices[-1], fold.valid_indices[-1]))
    if wanted > size:
        raise FoldError(
            f"the folds are of {wanted} samples or more, and X has {size}",
            allowed="folds of the same samples as X and y",
            do="make them from y: nb.make_folds(y, k=5)",
        )


def _rows(data: Any, indices: Any) -> Any:
    """Return some samples of an array, a matrix, a data frame or a list."""
    if hasattr(data, "iloc"):
        return data.iloc[indices]
    return data[indices] if hasattr(data, "shape") else [data[index] for index in indices]
