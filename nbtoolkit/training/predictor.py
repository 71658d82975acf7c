"""Keep a fold's model as a predictor, from which ``cv.predict`` predicts a test set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import CannotPickle, FitError
from nbtoolkit.run.paths import RunPaths, write_whole
from nbtoolkit.run.serialization import pack_value
from nbtoolkit.training.evaluation import predict
from nbtoolkit.training.loading.data import Batch, Collate

if TYPE_CHECKING:
    import torch

    from nbtoolkit.training.step import Forward
    from nbtoolkit.worker.context import RunContext


def save_predictor(paths: RunPaths, predictor: object) -> None:
    """Write what predicts the test set with the model of a fold.

    Args:
        paths: the fold's run.
        predictor: ``predictor(fold_run, test)`` -> one row per row of ``test``. It must predict
            each row by itself: it may be called with blocks of the test set. It is pickled by
            cloudpickle; one that cannot be pickled is replaced by the error, raised when it is
            used.
    """
    try:
        packed = pack_value(predictor)
    except CannotPickle as error:
        packed = pack_value(_NoPredictor(error.what))
    write_whole(paths.predictor, packed, durable=False)


def keep_predictor(ctx: RunContext, predict: Callable[[Any], Any]) -> None:
    """Keep what predicts with the model of this fold, for ``cv.predict``; outside folds nothing.

    Args:
        ctx: the run; the main rank writes.
        predict: ``predict(test)`` -> one row per row of ``test``, each row by itself, such as
            ``booster.predict``. It is pickled with its model.
    """
    if ctx.is_main and ctx.has_fold:
        save_predictor(ctx.paths, _KeptPredictor(predict))


class _KeptPredictor:
    def __init__(self, predict: Callable[[Any], Any]) -> None:
        self._predict = predict

    def __call__(self, fold_run: Any, test: Any) -> Any:
        return self._predict(test)


class ModelPredictor:
    """Predicts with a trained model, by :func:`nbtoolkit.predict`.

    Args:
        model: with the weights to predict with.
        step: the user's own step, as ``fit`` takes it; None: the default.
        collate: as for ``fit``.
        train_data: only the shape of its rows is kept, for an error.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        step: Forward | None,
        collate: Collate | None,
        train_data: object,
    ) -> None:
        self._model, self._step, self._collate = model, step, collate
        self._row = _row_shape(train_data)

    def __call__(self, fold_run: Any, test: object) -> Batch:
        """Return the model's outputs for the test set.

        Raises:
            FitError: the model fails, and the rows have another shape than in training.
        """
        try:
            return predict(fold_run.ctx, self._model, test, step=self._step, collate=self._collate)
        except Exception as error:
            row = _row_shape(test)
            if row is None or self._row is None or row == self._row:
                raise
            raise FitError(
                f"the rows of the test set have the shape {row}, those of the training set "
                f"{self._row}: {error}",
                allowed="a test set prepared as the training set was",
                do="select the same columns (or sizes) in the same order",
            ) from error


class _NoPredictor:
    """Stands for a model that cannot be pickled."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __call__(self, fold_run: Any, test: object) -> Batch:
        raise FitError(
            f"nb.fit could not keep the model of fold {fold_run.fold.index}: {self._reason}",
            allowed="a model that can be pickled, or a prediction function of your own",
            do="cv.predict(test, predict=lambda run, test: "
            "nb.predict(run.ctx, run.load_into(make_model()), test))",
        )


def _row_shape(data: object) -> tuple[int, ...] | None:
    """The shape of one row of the inputs; None if ``data`` are no arrays."""
    if isinstance(data, tuple) and data:
        data = data[0]
    if isinstance(data, Mapping) or not hasattr(data, "shape"):
        return None
    return tuple(data.shape[1:])
