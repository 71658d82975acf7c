"""Read from its folder what a cross-validation found."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

from nbtoolkit.crossval.fold_algorithm import FOLDS_FILE, finished_folds, fold_key
from nbtoolkit.crossval.out_of_fold import Ensemble, assemble
from nbtoolkit.errors import CheckpointError, FoldError, LaunchError, MissingExtra
from nbtoolkit.folds.folds import Folds
from nbtoolkit.run.events import Event, EventReader, FoldChanged, RunEnded, RunStarted
from nbtoolkit.run.paths import RunPaths, Status, read_result, reading
from nbtoolkit.run.serialization import unpack_value
from nbtoolkit.study.table import short
from nbtoolkit.text_table import html_columns, text_columns

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from numpy.typing import NDArray


class FoldTable:
    """A cross-validation as a table, for a cell (HTML) or as text.

    Args:
        name: what it is called.
        folds: how many folds there are; None: not known.
    """

    def __init__(self, *, name: str = "cross-validation", folds: int | None = None) -> None:
        self.name, self.folds = name, folds
        self.status = "running"
        """How it ended, once it has."""
        self._folds: dict[int, FoldChanged] = {}

    def read(self, events: Iterable[Event]) -> None:
        """Take new events, in their order."""
        for event in events:
            self.take(event)

    def take(self, event: Event) -> None:
        """Take one event; those of other kinds change nothing."""
        match event:
            case FoldChanged(number=None):
                self._folds[event.fold] = event
            case RunStarted():
                self.status = "running"
            case RunEnded():
                self.status = event.status

    def summary(self) -> str:
        """One line: how many folds are done, and the mean and standard deviation of each score."""
        done = [fold for fold in self._folds.values() if fold.state == "complete"]
        of = f" of {self.folds}" if self.folds is not None else ""
        scores = [f"{name} {_spread(self._scores(name))}" for name in self._names()]
        ended = [self.status] if self.status != "running" else []
        return f"{self.name}: " + "; ".join([f"{len(done)}{of} folds", *scores, *ended])

    def text(self) -> str:
        """Summary and table as lines of text."""
        header, rows = self._columns()
        return self.summary() + ("\n" + text_columns(header, rows) if rows else "")

    def html(self) -> str:
        """Summary and table for a cell; all values escaped."""
        header, rows = self._columns()
        return f"<p>{escape(self.summary())}</p>" + (html_columns(header, rows) if rows else "")

    def line(self, event: Event) -> str | None:
        """An event as a line of text: a fold that ended; None for every other event."""
        if not isinstance(event, FoldChanged) or event.state == "running":
            return None
        scores = [f"{name} {short(value)}" for name, value in event.metrics.items()]
        return "  ".join([f"fold {event.fold}", event.state, *scores])

    def _columns(self) -> tuple[list[str], list[list[str]]]:
        names = self._names()
        folds = sorted(self._folds.items())
        rows = [self._row(number, fold, names) for number, fold in folds]
        return ["fold", "state", *names, "seconds"], rows

    def _row(self, number: int, fold: FoldChanged, names: Sequence[str]) -> list[str]:
        values = [short(fold.metrics[name]) if name in fold.metrics else "" for name in names]
        seconds = "" if fold.seconds is None else f"{fold.seconds:.1f}"
        return [str(number), fold.state, *values, seconds]

    def _names(self) -> list[str]:
        """The scores of all folds, in the order in which they came."""
        return list(dict.fromkeys(name for fold in self._folds.values() for name in fold.metrics))

    def _scores(self, name: str) -> list[float]:
        """The score of the folds that are done."""
        done = (fold for fold in self._folds.values() if fold.state == "complete")
        return [fold.metrics[name] for fold in done if name in fold.metrics]


def _spread(scores: Sequence[float]) -> str:
    if len(scores) < 2:
        return short(scores[0]) if scores else "-"
    return f"{short(statistics.fmean(scores))} ± {short(statistics.stdev(scores))}"


class CVResult:
    """The scores of all folds, and what their models say of the samples they have not seen.

    Attributes:
        status: ``"completed"``, or why it ended before all folds were through: ``"stopped"``,
            ``"deadline"``. Then some folds are missing in what follows.
        folds: the folds.
        paths: the cross-validation's folder; the folds' runs lie in ``folds/`` there.
        seconds: wall time of the last session.
    """

    def __init__(self, paths: RunPaths) -> None:
        ended = read_result(paths)
        if ended is None:
            raise LaunchError(
                f"the cross-validation {paths.folder} has no result",
                do="attach to it with nb.attach(folder)",
            )
        self.paths = paths
        with reading(paths.result):
            self.status: Status = ended["status"]
            self.seconds: float = ended["seconds"]
        self.folds = Folds.load(paths.folder / FOLDS_FILE)
        self._ended = finished_folds(paths.folder, len(self.folds))

    @cached_property
    def scores(self) -> dict[str, NDArray[Any]]:
        """Each metric's value in every fold: float64 of shape (folds,); NaN where one has none."""
        import numpy as np

        names = dict.fromkeys(name for end in self._ended.values() for name in end.metrics)
        found = {name: np.full(len(self.folds), np.nan) for name in names}
        for index, end in self._ended.items():
            for name, value in end.metrics.items():
                found[name][index] = value
        return found

    @property
    def mean(self) -> dict[str, float]:
        """Each metric's mean over the folds that are done.

        Raises:
            FoldError: none is.
        """
        self._need_a_fold()
        return {name: float(values[self._done].mean()) for name, values in self.scores.items()}

    @property
    def std(self) -> dict[str, float]:
        """Each metric's sample standard deviation (n - 1) over these folds; NaN for one fold.

        Raises:
            FoldError: none is done.
        """
        self._need_a_fold()
        some = len(self._done) > 1
        return {
            name: float(values[self._done].std(ddof=1)) if some else float("nan")
            for name, values in self.scores.items()
        }

    @property
    def table(self) -> pd.DataFrame:
        """One row a fold: its metrics, ``n_train``, ``n_valid``, ``seconds``; indexed by fold.

        Raises:
            MissingExtra: pandas is not installed.
        """
        pd = _pandas()
        sizes = {
            "n_train": [len(train) for train, _ in self.folds.pairs],
            "n_valid": [len(valid) for _, valid in self.folds.pairs],
        }
        ends = [self._ended.get(index) for index in range(len(self.folds))]
        seconds = [end.seconds if end else None for end in ends]
        index = pd.RangeIndex(len(self.folds), name="fold")
        return pd.DataFrame({**self.scores, **sizes, "seconds": seconds}, index=index)

    @cached_property
    def values(self) -> list[Any]:
        """What ``train`` returned in every fold, from rank 0; None for folds that are not done."""
        return [self._value(index) for index in range(len(self.folds))]

    @cached_property
    def oof(self) -> NDArray[Any]:
        """Out-of-fold predictions: :meth:`out_of_fold` of ``"predictions"``."""
        return self.out_of_fold("predictions")

    def out_of_fold(self, name: str = "predictions") -> NDArray[Any]:
        """What the folds' models predict for the samples they have not seen, in the data's order.

        Args:
            name: the key of the dict that ``train`` returns; under it lies one prediction for each
                of ``ctx.fold.valid_indices``, in their order.

        Returns:
            Shape (n_samples, ...); see :func:`~nbtoolkit.crossval.out_of_fold.assemble` for samples
            that several folds validate on, or none.

        Raises:
            FoldError: a fold returned nothing of this name, or not one for each sample.
        """
        self._need_a_fold()
        return assemble(self.folds, {index: self._part(index, name) for index in self._done})

    def models(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """Every finished fold's model, with the weights that ``checkpoint.weights`` says.

        Args:
            model: the architecture; it is copied for each fold, and stays as it is.

        Returns:
            Models in evaluation mode, in the folds' order.

        Raises:
            CheckpointError: a fold saved none, or another model's.
        """
        return [self._model(index, copy.deepcopy(model)) for index in self._done]

    def ensemble(self, model: torch.nn.Module) -> Ensemble:
        """The folds' models as one predictor: the mean of their outputs.

        Args:
            model: as for :meth:`models`.
        """
        return Ensemble(self.models(model))

    def _need_a_fold(self) -> None:
        if not self._done:
            raise FoldError(
                f"none of {len(self.folds)} folds is done: the cross-validation ended as "
                f"{self.status} after {self.seconds:.0f} s",
                allowed="one fold or more that is through",
                do="cross-validate again: folds that saved a checkpoint go on from it; with a "
                "larger runtime.time_budget if that ended it",
            )

    # --- one fold ---

    @property
    def _done(self) -> list[int]:
        return sorted(self._ended)

    def run(self, index: int) -> RunPaths:
        """The folder of a fold's run."""
        return RunPaths(self.paths.folder / fold_key(range(len(self.folds))[index]))

    def _value(self, index: int) -> Any:
        return unpack_value(self.run(index).value(0)) if index in self._ended else None

    def _part(self, index: int, name: str) -> Any:
        value = self.values[index]
        if isinstance(value, Mapping) and name in value:
            return value[name]
        had = (
            f"a dict with {', '.join(map(str, value))}" if isinstance(value, Mapping) else "no dict"
        )
        raise FoldError(
            f"fold {index} returned {had}: there is no {name!r} to be put together",
            allowed="a train function that returns a dict with one for each validation sample",
            do=f'return {{**scores, "{name}": nb.predict(ctx, model, inputs[valid]).tolist()}}',
        )

    def _model(self, index: int, model: torch.nn.Module) -> torch.nn.Module:
        from nbtoolkit.run.weights import load_model

        try:
            return load_model(self.run(index).folder, model)
        except CheckpointError as error:
            raise CheckpointError(
                f"fold {index}: {error.what}", allowed=error.allowed, do=error.do
            ) from None

    # --- shown ---

    def __repr__(self) -> str:
        scores = []
        if self._done:
            spread = self.std
            scores = [f"{name}={mean:.4g} ± {spread[name]:.2g}" for name, mean in self.mean.items()]
        done = f"{len(self._done)} of {len(self.folds)} folds"
        return f"CVResult({', '.join([self.status, done, *scores])}, {self.paths.folder})"

    def _repr_html_(self) -> str:
        table = FoldTable(name=self.paths.run_id, folds=len(self.folds))
        table.read(EventReader(self.paths.events).read())
        return table.html()


def _pandas() -> Any:
    """The module.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra(
            "tables are pandas' DataFrames, and pandas is not installed", do="pip install pandas"
        ) from error
    return pandas
