"""Predict a test set with the models of all folds, several at once if there are devices."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from nbtoolkit.config import reads
from nbtoolkit.environment.deadline import check_deadline, time_limit
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import DeadlinePassed, FoldError, PlanError
from nbtoolkit.host import detect_host
from nbtoolkit.launcher.launch import submit
from nbtoolkit.launcher.run_handle import RunHandle
from nbtoolkit.run.attempts import run_config
from nbtoolkit.run.checkpoints.weights import load_model
from nbtoolkit.run.output import CellOutput, Display, choose_screen, displays, find_display
from nbtoolkit.run.paths import RunPaths, make_folder, read_pickle, write_whole
from nbtoolkit.run.resume import new_run, write_header
from nbtoolkit.search.crossval.out_of_fold import as_array
from nbtoolkit.text_table import counted
from nbtoolkit.wire.payload import JobSpec, RunRequest
from nbtoolkit.wire.serialization import add_note, pack_value

if TYPE_CHECKING:
    import torch

    from nbtoolkit.config.schema import Config
    from nbtoolkit.search.crossval.cv_result import CVResult
    from nbtoolkit.search.crossval.out_of_fold import Array
    from nbtoolkit.search.folds.folds import Fold
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
        return read_pickle(self.paths.value(0))

    def load_into(self, model: Model) -> Model:
        """Load the fold's weights into ``model``; return it on ``ctx.device``, ready to predict."""
        return load_model(self.paths.folder, model).to(self.ctx.device)


@dataclass(frozen=True, kw_only=True)
class _FoldModel:
    """The model of one fold, to predict with."""

    paths: RunPaths
    fold: Fold
    label: str


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

    The predictions are computed in one launch, which has a rank for each device. With models of
    ``nb.fit``, each rank predicts a part of the rows with every model. All models have the same
    weight in the average.

    Args:
        results: results of :func:`nbtoolkit.cross_validate`, for example with several seeds. Folds
            that are not done are left out, and a message says so.
        test: the test set, in a form that ``predict`` accepts. Without ``predict``: inputs that
            ``nb.predict`` accepts.
        predict: a function ``predict(fold_run, test)`` that returns one row per row of ``test``. It
            gets a :class:`FoldRun`, and is called once for each fold, by one rank, which has one
            device and waits for no other rank. Default: the prediction of the model that ``nb.fit``
            trained, with the weights that ``checkpoint.weights`` names.
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
    count = _row_count(test)
    models = [(cv, index) for cv in results for index in _chosen(cv, folds, predict)]
    if not models or count == 0 or average not in ("mean", "ranks", "none"):
        raise FoldError(
            f"cv.predict was given {len(results)} results, {count} rows and average={average!r}",
            allowed="one result and one row or more; average 'mean', 'ranks' or 'none'",
            do="check the filter that made the test set",
        )
    folder = results[0].paths.folder / "predictions"
    config = _prediction_config(results[0], folder)
    check_deadline(config, uses_reserve=True)
    task = _Prediction(
        models=[
            _FoldModel(
                paths=cv.run(index),
                fold=cv.folds[index],
                label=f"fold {index} of {cv.paths.run_id}",
            )
            for cv, index in models
        ],
        test=test,
        # A function of the user's gets the whole test set: it may compare its rows.
        rows=None if predict else count,
        predict=predict,
        transform=transform,
    )
    missing = sum(len(cv.folds) for cv in results) - len(models) if folds is None else 0
    text = f" (folds that are not done, and are left out: {missing})" if missing else ""
    started = f"predicting with the models of {counted(len(models), 'fold')}{text}"
    paths, say = _run(task, config, started, display)
    whole = task.read(paths)
    shutil.rmtree(paths.folder)
    if len(whole) < len(models):
        say(f"it ended early: {len(whole)} of {len(models)} models have predicted")
    return _averaged(whole, count, average)


def _prediction_config(cv: CVResult, folder: Path) -> Config:
    """Return the configuration of the folds, for a launch that is neither tracked nor resumed."""
    config = run_config(cv.paths)
    overrides: dict[str, Any] = {
        "tracking": {"mlflow": False, "tensorboard": False},
        "runtime": {"output_dir": str(folder), "pack": False, "time_budget": None},
    }
    if not config.distributed.sharded_by:
        overrides["distributed"] = {"strategy": "auto"}
    return config.with_overrides(overrides)


def _run(
    task: _Prediction, config: Config, started: str, display: Display
) -> tuple[RunPaths, Callable[[str], None]]:
    """Launch the predictions, and wait for them, at the latest until the deadline.

    Returns:
        The run, and what shows a further line below its output.
    """
    __tracebackhide__ = True
    host = detect_host()
    hardware = detect_hardware()
    if host.is_rank:
        raise PlanError(
            f"a prediction was started in one rank of several ({host.rank_reason})",
            allowed="a notebook, a script or the command line, once",
            do="start it without torchrun: it starts its ranks itself",
        )
    screen = choose_screen(display, find_display())
    plan = make_plan(config, host, hardware)
    with new_run(config.runtime.output_dir, "predict") as run:
        header = write_header(run, config, plan, host, task)
        limit = time_limit(config, uses_reserve=True)
        job = JobSpec(paths=run.paths, plan=plan, config=config, deadline=limit.deadline)
        request = RunRequest(
            job=job, host=host, hardware=hardware, header=header, notes=limit.notes
        )
        cell = displays().show(CellOutput(run.paths, display), run.paths, screen)
        cell.say(started)
        handle = RunHandle(run.paths, submit(task, request, run, detach=False), cell=cell)
    left = None if limit.deadline is None else limit.deadline - time.time() + limit.grace
    try:
        handle.result(left)
    except TimeoutError:  # a model that does not look at the time is cut off
        handle.stop("the time for predictions is used up", grace=0.0)
        handle.result()
    return run.paths, cell.say


class _Prediction:
    """What the ranks run: they share the models, or the rows of each model.

    Args:
        models: the models.
        test: the test set.
        rows: its number of rows, if the ranks share them; None: each model predicts all rows.
        predict: the user's function; None: each fold's own predictor.
        transform: applied to the outputs.
    """

    def __init__(
        self,
        *,
        models: Sequence[_FoldModel],
        test: object,
        rows: int | None,
        predict: Predict | None,
        transform: Callable[[Any], Any] | None,
    ) -> None:
        self._models = models
        self._test = test
        self._rows = rows
        self._predict = predict
        self._transform = transform

    def __call__(self, config: Config, ctx: RunContext) -> None:
        """Predict this rank's share, and write each part as soon as it is done."""
        reads.note(reads.ALL, "model.*", "data.*")  # the settings are those of the training
        rank = ctx.rank
        alone = ctx.alone()
        make_folder(_parts(ctx.paths), durable=False)
        share = self._test
        blocks = 1
        numbers = range(rank, len(self._models), ctx.world_size)
        if self._rows is not None:
            blocks = min(ctx.world_size, self._rows)
            numbers = range(len(self._models) if rank < blocks else 0)
        if self._rows is not None and blocks > 1:
            low = self._rows * rank // blocks
            high = self._rows * (rank + 1) // blocks
            share = _rows(self._test, low, high)
        for number in numbers:
            outputs = self._outputs(self._models[number], alone, share)
            file = _parts(ctx.paths) / f"{number:04d}-{rank:04d}-{blocks}.pkl"
            write_whole(file, pack_value(outputs))
            alone.raise_if_stopped()

    def _outputs(self, model: _FoldModel, ctx: RunContext, part: object) -> Array:
        try:
            predict = self._predict or read_pickle(model.paths.predictor)
            outputs = predict(FoldRun(paths=model.paths, fold=model.fold, ctx=ctx), part)
            return as_array(outputs if self._transform is None else self._transform(outputs))
        except Exception as error:
            add_note(error, f"[nbtoolkit] in the prediction of {model.label}")
            raise

    def read(self, paths: RunPaths) -> dict[str, Array]:
        """Return the predictions of each model that has predicted all rows, by its label."""
        import numpy as np

        whole: dict[str, Array] = {}
        for number, model in enumerate(self._models):
            files = sorted(_parts(paths).glob(f"{number:04d}-*.pkl"))
            if files and len(files) == int(files[0].stem.rpartition("-")[2]):
                whole[model.label] = np.concatenate([read_pickle(file) for file in files])
        return whole


def _parts(paths: RunPaths) -> Path:
    """Return the folder of what the ranks have predicted."""
    return paths.folder / "parts"


def _chosen(cv: CVResult, folds: Sequence[int] | None, predict: Predict | None) -> list[int]:
    """Return the folds to predict with; refuses those without a model."""
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
    """Return the number of rows; None: not known, as of an iterable."""
    if isinstance(test, (tuple, dict)):
        test = next(iter(test.values() if isinstance(test, dict) else test), ())
    return len(test) if hasattr(test, "__len__") and hasattr(test, "__getitem__") else None


def _rows(test: Any, low: int, high: int) -> Any:
    """Return some rows of a test set, of the same kind."""
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
