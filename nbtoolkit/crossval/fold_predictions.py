"""Predict a test set with the models of all folds, several at once if there are devices."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

from nbtoolkit.config.reads import mark_used
from nbtoolkit.crossval.fold_loop import finished_folds, fold_key
from nbtoolkit.crossval.out_of_fold import as_array
from nbtoolkit.environment.deadline import check_deadline
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.errors import DeadlinePassed, FoldError
from nbtoolkit.folds.folds import Folds
from nbtoolkit.launcher.run_result import result_of
from nbtoolkit.run.attempts import failed, run_config
from nbtoolkit.run.checkpoints.weights import load_model
from nbtoolkit.run.events import Event, FoldChanged
from nbtoolkit.run.failure import raise_failure
from nbtoolkit.run.output import Display, choose_screen, find_display
from nbtoolkit.run.paths import RunPaths, Status
from nbtoolkit.run.serialization import add_note, unpack_value
from nbtoolkit.search.request import Search
from nbtoolkit.search.slots import make_slots
from nbtoolkit.search.submit import start_search
from nbtoolkit.search.sweep_result import SearchHandle, TableLines
from nbtoolkit.study.table import EventTable
from nbtoolkit.text_table import counted

if TYPE_CHECKING:
    import torch

    from nbtoolkit.config.schema import Config
    from nbtoolkit.crossval.cv_result import CVResult
    from nbtoolkit.crossval.out_of_fold import Array
    from nbtoolkit.folds.folds import Fold
    from nbtoolkit.worker.context import RunContext

    Model = TypeVar("Model", bound=torch.nn.Module)

Average = Literal["mean", "ranks", "none"]

Predict: TypeAlias = "Callable[[FoldRun, Any], Any]"
"""``predict(fold_run, test)`` -> one row for each row of the test set."""


@dataclass(frozen=True, kw_only=True)
class FoldRun:
    """The run of one fold: the first argument of a prediction function (``cv.predict``).

    Attributes:
        paths: the folder and the files of the run.
        fold: the index of the fold, and the indices of its training and validation samples.
        ctx: the context of the prediction. ``ctx.device`` is the device on which to predict.
    """

    paths: RunPaths
    fold: Fold
    ctx: RunContext

    @property
    def value(self) -> Any:
        """The value that ``train`` returned in this fold."""
        return unpack_value(self.paths.value(0))

    def load_into(self, model: Model) -> Model:
        """Load the fold's weights into ``model``; return it on ``ctx.device``, ready to predict."""
        return load_model(self.paths.folder, model).to(self.ctx.device)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A block of the test set to predict with one model."""

    paths: RunPaths
    fold: Fold
    label: str
    block: tuple[int, int]
    """The number of the block, and of all blocks."""


def predict_mean(
    results: Sequence[CVResult],
    test: object,
    *,
    predict: Predict | None = None,
    transform: Callable[[Any], Any] | None = None,
    average: Average = "mean",
    folds: Sequence[int] | None = None,
    display: Display = "auto",
) -> Array:
    """Predict a test set with the models of all folds of several cross-validations, and average.

    The predictions are computed in new processes, one per device. For models of ``nb.fit``, the
    test set is divided into blocks, so that all devices have work until the end. All models have
    the same weight in the average.

    Args:
        results: results of :func:`nbtoolkit.cross_validate`, for example with several seeds. Folds
            that are not done are left out, and a message says so.
        test: the test set, in a form that ``predict`` accepts. Without ``predict``: inputs that
            ``nb.predict`` accepts.
        predict: a function ``predict(fold_run, test)`` that returns one row per row of ``test``. It
            gets a :class:`FoldRun`, and is called once for each fold, in a process that has one
            device. Default: the prediction of the model that ``nb.fit`` trained, with the weights
            that ``checkpoint.weights`` names.
        transform: a function that is applied to the outputs of each model before the average, such
            as ``lambda outputs: outputs.softmax(dim=1)``.
        average: ``"mean"``: the mean of the predictions. ``"ranks"``: each model's predictions are
            first replaced by their ranks among the n rows, divided by n. ``"none"``: no average,
            but all predictions, shape (models, n, ...).
        folds: the indices of the folds to use; default: all folds that are done.
        display: as for :func:`nbtoolkit.cross_validate`.

    Returns:
        An array of shape (n, ...), in the order of the test set.

    Raises:
        FoldError: no fold is done, a fold has no model, or the predictions of the models cannot be
            averaged.
        DeadlinePassed: the notebook's deadline came before the first model was done.
        Exception: the exception of ``predict`` or of the model, with its own type.
    """
    __tracebackhide__ = True
    import numpy as np

    count = _row_count(test)
    models = [(cv, index) for cv in results for index in _chosen(cv, folds, predict)]
    if not models or count == 0 or average not in ("mean", "ranks", "none"):
        raise FoldError(
            f"cv.predict was given {len(results)} results, {count} rows and average={average!r}",
            allowed="one result and one row or more; average 'mean', 'ranks' or 'none'",
            do="check the filter that made the test set",
        )
    path = results[0].paths
    config = run_config(path).with_overrides(
        {
            "tracking": {"mlflow": False, "tensorboard": False},
            "runtime": {
                "output_dir": str(path.folder / "predictions"),
                "pack": False,
                "time_budget": None,
            },
        }
    )
    check_deadline(config, uses_reserve=True)
    screen = choose_screen(display, find_display())
    slots = make_slots(config, detect_hardware(), "device_per_trial")
    # A function of the user's gets the whole test set: it may compare its rows.
    blocks = 1 if predict or count is None else _blocks(len(models), len(slots.slots))
    jobs = [
        _Job(
            paths=cv.run(index),
            fold=cv.folds[index],
            label=f"fold {index} of {cv.paths.run_id}",
            block=(at, blocks),
        )
        for cv, index in models
        for at in range(blocks)
    ]
    pairs = tuple((job.fold.train_indices, job.fold.valid_indices) for job in jobs)
    search = Search(
        kind="cv",
        loop="nbtoolkit.crossval.fold_loop:run_folds",
        folds=Folds("predefined", results[0].folds.n_samples, pairs),  # a fold for each job
        slots=slots,
        uses_reserve=True,
    )
    function = _prediction(jobs, test, count, predict, transform)
    started = start_search(function, config, search, name="predict", resume="never")
    paths, cell = started.run.paths, TableLines(_Progress(jobs), screen.shape)
    missing = sum(len(cv.folds) for cv in results) - len(models) if folds is None else 0
    text = f" (folds that are not done, and are left out: {missing})" if missing else ""
    cell.say(f"predicting with the models of {counted(len(models), 'fold')}{text}")
    handle = _PredictionHandle(paths, len(jobs), started=started.process, cell=cell)
    parts = handle.result().parts
    shutil.rmtree(paths.folder)
    whole = {
        jobs[at].label: np.concatenate([parts[at + block] for block in range(blocks)])
        for at in range(0, len(jobs), blocks)
        if all(at + block in parts for block in range(blocks))
    }
    if len(whole) < len(models):
        cell.say(f"it ended early: {len(whole)} of {len(models)} models have predicted")
    return _averaged(whole, count, average)


def _prediction(
    jobs: Sequence[_Job],
    test: object,
    count: int | None,
    predict: Predict | None,
    transform: Callable[[Any], Any] | None,
) -> Callable[[Config, RunContext], Array]:
    """The function that the ranks run; ``ctx.fold.index`` is the number of a job."""

    def predict_block(config: Config, ctx: RunContext) -> Array:
        mark_used(("*", "model.*", "data.*"))  # the settings are those of the training
        assert ctx.fold is not None
        job = jobs[ctx.fold.index]
        block, blocks = job.block
        part = test
        if count is not None and blocks > 1:
            part = _rows(test, count * block // blocks, count * (block + 1) // blocks)
        try:
            function = predict or unpack_value(job.paths.predictor)
            outputs = function(FoldRun(paths=job.paths, fold=job.fold, ctx=ctx), part)
            return as_array(outputs if transform is None else transform(outputs))
        except Exception as error:
            add_note(error, f"[nbtoolkit] in the prediction of {job.label}")
            raise

    return predict_block


@dataclass(frozen=True)
class _Predicted:
    """How the predictions ended, and those of each finished job."""

    status: Status
    parts: dict[int, Array]


class _PredictionHandle(SearchHandle[_Predicted]):
    """Waits for predictions."""

    def __init__(self, paths: RunPaths, jobs: int, **options: Any) -> None:
        self._runs = [RunPaths(paths.folder / fold_key(job)) for job in range(jobs)]
        super().__init__(paths, self._predicted, **options)

    def _predicted(self, paths: RunPaths) -> _Predicted:
        finished = finished_folds(paths.folder, len(self._runs))
        parts = {job: unpack_value(self._runs[job].value(0)) for job in finished}
        return _Predicted(cast("Status", result_of(paths, "prediction").status), parts)

    def _outcome(self) -> Any:
        __tracebackhide__ = True
        for run in self._runs if failed(self.paths) else ():
            if run.error_pickle.exists():
                raise_failure(run)
        return super()._outcome()


class _Progress(EventTable):
    """The progress of a prediction in one line."""

    def __init__(self, jobs: Sequence[_Job]) -> None:
        self._jobs, self._done = jobs, 0

    def update(self, event: Event) -> None:
        self._done += isinstance(event, FoldChanged) and event.state == "complete"

    def summary(self, now: float | None = None) -> str:
        return f"{self._done} of {len(self._jobs)} predictions"


def _chosen(cv: CVResult, folds: Sequence[int] | None, predict: Predict | None) -> list[int]:
    """The folds to predict with; refuses those without a model."""
    done = cv.finished
    chosen = done if folds is None else list(folds)
    wrong = ", ".join(str(index) for index in chosen if index not in done)
    if wrong or not chosen:
        raise FoldError(
            f"folds of {cv.paths.run_id} are not done: {wrong or 'all'} (it ended as {cv.status})",
            allowed=f"the folds that are done: {', '.join(map(str, done)) or 'none'}",
            do="cross-validate again: the folds that are not done resume",
        )
    lacking = [index for index in chosen if not cv.run(index).predictor.exists()]
    if lacking and predict is None:
        raise FoldError(
            f"fold {lacking[0]} of {cv.paths.run_id} kept no model: it was not trained by nb.fit",
            allowed="folds trained by nb.fit or by nbs.fit of nbtoolkit.integrations, those that "
            "call keep_predictor, or a prediction function of your own",
            do="cv.predict(test, predict=f), with f(fold_run, test) -> one row per row of test",
        )
    return chosen


def _blocks(models: int, slots: int) -> int:
    """Blocks per model, up to 4, with which the slots are busy until the end."""
    return min(
        range(1, 5), key=lambda blocks: (math.ceil(models * blocks / slots) / blocks, blocks)
    )


def _averaged(predictions: Mapping[str, Array], count: int | None, average: Average) -> Array:
    """Average the predictions of all models, given by the model's label."""
    import numpy as np

    if not predictions:
        raise DeadlinePassed(
            "the deadline came before the predictions of the first model were done",
            allowed="a test set that one model predicts in the time that is left",
            do="nb.set_deadline(..., reserve=) with a larger reserve, or predict fewer rows",
        )
    total: Array | None = None
    first = next(iter(predictions))
    for label, array in predictions.items():
        if array.shape != predictions[first].shape or len(array) != (count or len(array)):
            raise FoldError(
                f"the predictions of {label} have the shape {array.shape}, those of {first} "
                f"{predictions[first].shape}; the test set has {count} rows",
                allowed="one row for each row of the test set, of one shape for all models",
                do="look at what predict (or transform) returns",
            )
        if array.dtype.kind != "f" and average != "none":
            raise FoldError(
                f"the predictions of {label} are {array.dtype}: they have no mean",
                allowed="probabilities, scores or values of a regression",
                do="return probabilities, or pass average='none' and combine them yourself",
            )
        if average == "ranks":
            from scipy.stats import rankdata

            array = rankdata(array, axis=0) / len(array)
        total = array if total is None else total + array
    if average == "none":
        return np.stack(list(predictions.values()))
    assert total is not None
    mean: Array = total / np.asarray(len(predictions), dtype=total.dtype)
    return mean


def _row_count(test: Any) -> int | None:
    """The number of rows; None: not known, as of an iterable."""
    if isinstance(test, (tuple, dict)):
        test = next(iter(test.values() if isinstance(test, dict) else test), ())
    return len(test) if hasattr(test, "__len__") and hasattr(test, "__getitem__") else None


def _rows(test: Any, low: int, high: int) -> Any:
    """Some rows of a test set, of the same kind."""
    if isinstance(test, tuple):
        return tuple(_rows(part, low, high) for part in test)
    if isinstance(test, dict):
        return {name: _rows(part, low, high) for name, part in test.items()}
    if hasattr(test, "iloc"):
        return test.iloc[low:high]
    if hasattr(test, "shape") or isinstance(test, list):
        return test[low:high]
    from torch.utils.data import Subset

    return Subset(test, range(low, high))
