"""Read the result of a cross-validation from its folder."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from nbtoolkit.errors import CheckpointError, FoldError, MissingExtra
from nbtoolkit.launcher.run_result import result_of
from nbtoolkit.run.events import Event, FoldChanged
from nbtoolkit.run.output import charts, displays
from nbtoolkit.run.paths import RunPaths, Status, read_pickle
from nbtoolkit.search.crossval.fold_loop import FOLDS_FILE, finished_folds, fold_key
from nbtoolkit.search.crossval.out_of_fold import assemble
from nbtoolkit.search.folds.folds import Folds
from nbtoolkit.search.study.table import EventTable, short

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import torch
    from numpy.typing import NDArray

    from nbtoolkit.search.crossval.out_of_fold import Array
    from nbtoolkit.views.figure import Chart


class FoldTable(EventTable):
    """The folds of a cross-validation, made from its events.

    Args:
        folds: the number of folds; None: unknown.
    """

    def __init__(self, *, folds: int | None = None) -> None:
        self.folds = folds

    def line(self, event: Event) -> str | None:
        """Return a line of text on a fold that ended; None for every other event."""
        if not isinstance(event, FoldChanged) or event.state == "running":
            return None
        scores = [f"{name} {short(value)}" for name, value in event.metrics.items()]
        return "  ".join([f"fold {event.fold}", event.state, *scores])


class CVResult:
    """The result of a cross-validation: the scores and the predictions of all folds.

    Attributes:
        status: ``"completed"``, or the reason why it ended before all folds were done:
            ``"stopped"`` or ``"deadline"``. The other attributes then lack some folds.
        folds: the folds.
        paths: the folder; its subfolder ``folds`` contains the runs of the folds.
        seconds: wall time of the last session.
        shared_files: files outside the folds' folders that several folds have written.
    """

    def __init__(self, paths: RunPaths) -> None:
        ended = result_of(paths, "cross-validation")
        self.paths = paths
        self.status = cast("Status", ended.status)
        self.seconds = ended.seconds or 0.0
        self.shared_files: list[str] = ended.summary.get("shared_files", [])
        self.folds = Folds.load(paths.folder / FOLDS_FILE)
        self._finished = finished_folds(paths.folder, len(self.folds))

    @cached_property
    def scores(self) -> dict[str, NDArray[np.float64]]:
        """The values of each metric, one per fold; NaN for a fold without this metric."""
        import numpy as np

        names = dict.fromkeys(name for fold in self._finished.values() for name in fold.metrics)
        scores = {name: np.full(len(self.folds), np.nan) for name in names}
        for index, fold in self._finished.items():
            for name, value in fold.metrics.items():
                scores[name][index] = value
        return scores

    @property
    def mean(self) -> dict[str, float]:
        """The mean of each metric over the finished folds.

        Raises:
            FoldError: no fold is done.
        """
        done = self._done()
        return {name: float(values[done].mean()) for name, values in self.scores.items()}

    @property
    def std(self) -> dict[str, float]:
        """The sample standard deviation (n - 1) of each metric; NaN with one finished fold.

        Raises:
            FoldError: no fold is done.
        """
        done = self._done()
        if len(done) == 1:
            return dict.fromkeys(self.scores, float("nan"))
        return {name: float(values[done].std(ddof=1)) for name, values in self.scores.items()}

    @property
    def table(self) -> pd.DataFrame:
        """A table with one row per fold, indexed by the number of the fold.

        The columns are the metrics, ``n_train``, ``n_valid`` and ``seconds``.

        Raises:
            MissingExtra: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtra(
                "CVResult.table is a pandas DataFrame, and pandas is not installed",
                do="pip install pandas",
            ) from error
        sizes = {
            "n_train": [len(train) for train, _ in self.folds.pairs],
            "n_valid": [len(valid) for _, valid in self.folds.pairs],
        }
        finished = [self._finished.get(index) for index in range(len(self.folds))]
        seconds = [fold.seconds if fold else None for fold in finished]
        index = pd.RangeIndex(len(self.folds), name="fold")
        return pd.DataFrame({**self.scores, **sizes, "seconds": seconds}, index=index)

    @cached_property
    def values(self) -> list[Any]:
        """The value that rank 0 returned in each fold; None for a fold that is not finished."""
        return [
            read_pickle(self.run(index).value(0)) if index in self._finished else None
            for index in range(len(self.folds))
        ]

    @cached_property
    def oof(self) -> Array:
        """The out-of-fold predictions, as ``out_of_fold("predictions")`` returns them."""
        return self.out_of_fold("predictions")

    def out_of_fold(self, name: str = "predictions") -> Array:
        """Return the out-of-fold predictions of all samples, in the order of the data set.

        Args:
            name: the key of the predictions in the dict that ``train`` returns: one prediction for
                each of ``ctx.fold.valid_indices``, in their order.

        Returns:
            An array of shape (n_samples, ...). If several folds validate on a sample, it has the
            mean of their fractions; of classes and strings it has that of the first fold. A sample
            that no fold validates on has NaN (None if the predictions are strings).

        Raises:
            FoldError: no fold is done, or a fold did not return one prediction for each sample.
        """
        return assemble(self.folds, {index: self._part(index, name) for index in self._done()})

    def predict(self, test: object, **options: Any) -> Array:
        """Predict a test set with the model of each fold, and average the predictions.

        Args:
            test: the test set.
            options: the arguments ``predict``, ``transform``, ``average``, ``folds`` and
                ``display`` of :func:`nbtoolkit.predict_mean`.

        Returns:
            An array of shape (n, ...), in the order of the test set.

        Raises:
            FoldError: no fold is done, a fold has no model, or predictions do not fit together.
        """
        from nbtoolkit.search.crossval.fold_predictions import predict_mean

        __tracebackhide__ = True
        return predict_mean([self], test, **options)

    @property
    def finished(self) -> list[int]:
        """The numbers of the finished folds, in ascending order."""
        return sorted(self._finished)

    @cached_property
    def targets(self) -> Array | None:
        """The true values of all samples, in the order of the data set.

        They are the values that ``train`` returned under the key ``"targets"`` or ``"labels"``, one
        for each validation sample; None if ``train`` returned neither.
        """
        for name in ("targets", "labels"):
            values = [self.values[index] for index in self.finished]
            if values and all(isinstance(value, Mapping) and name in value for value in values):
                return self.out_of_fold(name)
        return None

    def models(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """Return the models of the finished folds.

        ``checkpoint.weights`` sets whether they have the best or the last weights.

        Args:
            model: a model of the same architecture; each fold gets a copy of it.

        Returns:
            The models, in evaluation mode and in the order of the folds.

        Raises:
            CheckpointError: a fold saved no weights, or its weights do not fit ``model``.
        """
        return [self._model(index, copy.deepcopy(model)) for index in self.finished]

    def _done(self) -> list[int]:
        """Return the folds that are done.

        Raises:
            FoldError: there are none.
        """
        if not self._finished:
            raise FoldError(
                f"none of {len(self.folds)} folds is done: the cross-validation ended as "
                f"{self.status} after {self.seconds:.0f} s",
                allowed="at least one finished fold",
                do="cross-validate again: folds resume from their checkpoint; use a larger "
                "runtime.time_budget if that ended it",
            )
        return self.finished

    def plot(self) -> Chart:
        """Draw the learning curves of all folds."""
        return charts().result_chart(self.paths, "curves")

    def run(self, index: int) -> RunPaths:
        """Return the folder and the files of the run of fold ``index``."""
        return RunPaths(self.paths.folder / fold_key(range(len(self.folds))[index]))

    def _part(self, index: int, name: str) -> object:
        value = self.values[index]
        if isinstance(value, Mapping) and name in value:
            return value[name]
        keys = f"a dict with {', '.join(map(str, value))}" if isinstance(value, Mapping) else ""
        raise FoldError(
            f"fold {index} returned {keys or 'no dict'}: there is no {name!r} to assemble",
            allowed=f"a train function that returns a dict with {name!r}, one per sample",
            do=f'return {{**scores, "{name}": nb.predict(ctx, model, inputs[valid]).tolist()}}',
        )

    def _model(self, index: int, model: torch.nn.Module) -> torch.nn.Module:
        from nbtoolkit.run.checkpoints.weights import load_model

        try:
            return load_model(self.run(index).folder, model)
        except CheckpointError as error:
            raise CheckpointError(
                f"fold {index}: {error.what}", allowed=error.allowed, do=error.do
            ) from None

    def __repr__(self) -> str:
        scores = []
        if self._finished:
            std = self.std
            scores = [f"{name}={mean:.4g} ± {std[name]:.2g}" for name, mean in self.mean.items()]
        done = f"{len(self._finished)} of {len(self.folds)} folds"
        shared = f", several jobs wrote {', '.join(self.shared_files)}" if self.shared_files else ""
        return f"CVResult({', '.join([self.status, done, *scores])}, {self.paths.folder}{shared})"

    def _repr_html_(self) -> str:
        return displays().static(self.paths)
