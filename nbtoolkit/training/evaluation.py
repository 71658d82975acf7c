"""Evaluate and predict a whole data set, each sample once, on any number of ranks.

A fold keeps its model as a predictor, from which ``cv.predict`` predicts a test set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from nbtoolkit.errors import CannotPickle, FitError
from nbtoolkit.run.paths import RunPaths, write_whole
from nbtoolkit.training.data import Batch, Collate, make_source, take_apart
from nbtoolkit.training.loader import (
    MapTrainLoader,
    StreamTrainLoader,
    TrainLoader,
    is_stream,
)
from nbtoolkit.training.metrics import Meter, Metric
from nbtoolkit.training.model import broadcast_buffers, half_precision
from nbtoolkit.training.samples import EpochOrder, Passes, make_order
from nbtoolkit.wire.serialization import add_note, pack_value
from nbtoolkit.worker.collectives import Rows, gather_on_all, in_order

if TYPE_CHECKING:
    import torch

    from nbtoolkit.config.schema import Config
    from nbtoolkit.training.step import Forward, TrainStep
    from nbtoolkit.worker.context import RunContext

# Without gradients nothing is kept for a backward pass: batches so many times larger fit, too.
_LARGER = 4


def make_evaluation_loader(
    ctx: RunContext,
    data: object,
    *,
    batch_size: int | None = None,
    workers: int = 0,
    collate: Collate | None = None,
    name: Literal["validation", "prediction"] = "validation",
    model: torch.nn.Module | None = None,
) -> EvaluationLoader:
    """Make the loader of this rank's part of ``data``; it can be iterated any number of times.

    Random augmentation draws the same for a sample in every iteration. The ranks take their batches
    in turn, without padding::

        samples         0 1 2 3 4 5 | 6 7 8      steps of 2 samples per rank
        rank 0 of 3     0 1         | 6
        rank 1 of 3         2 3     |   7
        rank 2 of 3             4 5 |     8

    Args:
        ctx: the run's context.
        data: what :func:`~nbtoolkit.training.data.make_source` takes, or an iterable that
            is the same on all ranks: each reads all of it, and makes batches of its part only; or
            a ``DataLoader`` of either.
        batch_size: samples of this rank in one batch, at most; default: four times the plan's.
        workers: ``DataLoader`` processes of this rank; none for an iterable.
        collate: makes a batch from a list of samples; default: torch's.
        name: the set's name, for messages.
        model: the data are for it: it decides the type of their floats.

    Returns:
        Batches on the device, each with its number of samples (at least 1).

    Raises:
        FitError: the data cannot be used or are empty (of an iterable: at the end of an iteration).
    """
    import torch

    size = batch_size or _LARGER * ctx.plan.batch_size_per_device
    feed = take_apart(data, collate=collate, model=model)
    data = feed.data
    collate = feed.collate
    ranks = ctx.world_size
    passes = Passes(size=size * ranks, batch=size * ranks, micro=size, rank=ctx.rank, ranks=ranks)
    if is_stream(data):
        return EvaluationLoader(
            StreamTrainLoader(data, passes, ctx.device, seed=ctx.seed, collate=collate, name=name)
        )
    source = make_source(feed, ctx.device, workers=workers, seed=ctx.seed)
    if len(source) == 0:
        raise FitError(
            f"the {name} set is empty",
            allowed="one sample or more" + (", or valid_data=None" if name == "validation" else ""),
            do="check the split or the filter that made it",
        )
    chosen = torch.arange(len(source))
    if feed.sampler is not None:
        order = make_order(data, len(source), feed.sampler, None, seed=ctx.seed, ranks=ranks)
        chosen = order.draw(0)
    in_order = EpochOrder(len(chosen), lambda epoch: chosen, "")
    return EvaluationLoader(MapTrainLoader(in_order, replace(passes, size=len(chosen)), source))


class EvaluationLoader:
    """Loads a set in its own order; each rank gets its batches. Rank 0 has one if any rank has."""

    def __init__(self, loader: TrainLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        for batch, micro_batch in self._loader.batches(epoch=0):
            if micro_batch.samples:  # else a stand-in, which training steps need
                yield batch, micro_batch.samples


class Validator:
    """Validates a model; one per rank.

    Args:
        ctx: the run's context.
        config: ``train.num_workers`` is used.
        data: a data set as :func:`nbtoolkit.fit` takes it; None: no validation.
        metrics: by name, from :func:`~nbtoolkit.training.metrics.named_metrics`.
        collate: makes a batch from a list of samples.
        model: as it is trained.

    Raises:
        FitError: the data set is empty or cannot be used.
    """

    def __init__(
        self,
        ctx: RunContext,
        config: Config,
        data: object,
        metrics: Mapping[str, Metric],
        collate: Collate | None,
        model: torch.nn.Module,
    ) -> None:
        self._ctx = ctx
        self._metrics = metrics
        self._loader: Iterable[tuple[Batch, int]] | None = None
        if data is not None:
            workers = config.train.num_workers
            self._loader = make_evaluation_loader(
                ctx,
                data,
                workers=workers,
                collate=collate,
                model=model,
            )

    def values(self, train_step: TrainStep) -> dict[str, float]:
        """``val_loss`` and ``val_<metric>`` of all samples; called by all ranks, equal on all.

        Empty without a data set.
        """
        if self._loader is None:
            return {}
        ctx = self._ctx
        given = train_step.loss
        meter = Meter(self._metrics, ctx.device, ranks=ctx.world_size, loss=given)
        train_step.broadcast_buffers()
        train_step.module.eval()
        train_step.evaluated_module.eval()
        with train_step.strategy.evaluating():
            for batch, samples in self._loader:
                outputs, targets, loss = train_step.evaluate(batch, samples)
                meter.add(loss, outputs, targets, samples)
        return {f"val_{name}": value for name, value in meter.result().items()}


def predict(
    ctx: RunContext,
    model: torch.nn.Module,
    data: object,
    *,
    step: Forward | None = None,
    collate: Collate | None = None,
    batch_size: int | None = None,
) -> Batch:
    """Compute the outputs of ``model`` for every sample; all ranks call this and share the work.

    The model computes in evaluation mode, without gradients, in the plan's precision. Afterwards
    every layer is again in its previous mode (training or evaluation). The model is then on
    ``ctx.device``, with the buffers of rank 0.

    Args:
        ctx: the run's context.
        model: the model, with the same weights on all ranks, as after ``fit``. It is unwrapped if
            it is a ``DistributedDataParallel``.
        data: the samples, in any form that :func:`nbtoolkit.fit` takes, the same on all ranks.
            Targets are optional: a batch is a tensor of inputs, or a pair (inputs, targets).
        step: a function ``step(model, batch)`` that returns (outputs, targets), as in ``fit``. Only
            the outputs are used.
        collate: a function that makes a batch from a list of samples; default: torch's.
        batch_size: the samples in one forward pass of one rank. Default: four times as many as in
            the plan, because no activations are kept for a backward pass.

    Returns:
        A tensor, or a tuple, list or dict of tensors, as the model returns it. It is on the CPU,
        with one row per sample, in the order of the data set. Half precision becomes float32. Every
        rank gets the outputs of all samples, which are gathered once, at the end.

    Raises:
        FitError: ``ctx`` is not the context of a run; the data cannot be used or are empty; or the
            outputs are not tensors with one row per sample.
    """
    check_context(ctx, "predict")
    loader = make_evaluation_loader(
        ctx,
        data,
        batch_size=batch_size,
        workers=ctx.config.train.num_workers,
        collate=collate,
        name="prediction",
        model=model,
    )
    rows = Rows()
    forward = step or forward_inputs
    with evaluation_mode(ctx, model) as module:
        for batch, samples in loader:
            try:
                outputs, _ = forward(module, batch)
                rows.add(outputs, samples)
            except Exception as error:
                if step is not None and not _is_pair(batch):
                    add_note(error, _STEP_ADVICE)
                raise
    return in_order(gather_on_all(rows.part(), ctx.world_size))


def _is_pair(batch: Batch) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) == 2


_STEP_ADVICE = (
    "[nbtoolkit] step was called with a batch to predict, which is not a pair (inputs, targets). "
    "It must also take a batch without targets, and return (outputs, None): inputs, targets = "
    "batch if isinstance(batch, (tuple, list)) else (batch, None)"
)


def check_context(ctx: object, function: str) -> None:
    """Refuse what is no run's context; ``function`` of nbtoolkit got it.

    Raises:
        FitError: says where to get one.
    """
    if hasattr(ctx, "world_size"):
        return
    kind = type(ctx).__name__
    if hasattr(ctx, "load_into"):
        do = "call model = nb.load_model(result, Model()) and model(inputs) under torch.no_grad()"
        do = f"predict in the training function, and return it; or here, with a {kind}: {do}"
    else:
        do = f"call nb.{function}(ctx, ...) in def train(config, ctx), and nb.launch(train, config)"
    raise FitError(
        f"nb.{function} got a {kind} in place of ctx",
        allowed="the ctx that a training function gets: it has the device and the other ranks",
        do=do,
    )


def forward_pair(model: torch.nn.Module, batch: Batch) -> tuple[Batch, Batch]:
    """Return the default step: a batch is a pair (inputs, targets)."""
    if not _is_pair(batch):  # two rows, or keys, would unpack
        parts = f" of {len(batch)} parts" if isinstance(batch, (tuple, list)) else ""
        raise FitError(
            f"a batch is not a pair (inputs, targets) but a {type(batch).__name__}{parts}",
            allowed="data sets of pairs, whose inputs may be a tuple; or your own step",
            do="let the collate function, or the data set, return ((x, lengths), y); or pass "
            "step=lambda model, batch: (model(*batch[:-1]), batch[-1]) to fit, for a dict "
            "(model(batch['x']), batch['y'])",
        )
    inputs, targets = batch
    return model(inputs), targets


def forward_inputs(model: torch.nn.Module, batch: Batch) -> tuple[Batch, None]:
    """Return the step of :func:`predict`: a batch is inputs, or a pair (inputs, targets)."""
    import torch

    if isinstance(batch, torch.Tensor):
        return model(batch), None
    if isinstance(batch, (tuple, list)) and len(batch) in (1, 2):
        return model(batch[0]), None
    raise FitError(
        f"a batch is neither inputs nor a pair (inputs, targets) but a {type(batch).__name__}",
        allowed="data sets of inputs, or of pairs, or your own step",
        do="pass step=lambda model, batch: (model(batch['x']), None) to predict",
    )


@contextmanager
def evaluation_mode(ctx: RunContext, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield evaluation mode without gradients in the plan's precision; restores each layer's mode.

    Called by all ranks.

    Args:
        ctx: the run's context.
        model: may be wrapped in ``DistributedDataParallel``.

    Yields:
        The model, unwrapped, on ``ctx.device``, with rank 0's buffers.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(model, DistributedDataParallel):  # its forward has collectives
        model = cast("torch.nn.Module", model.module)
    module = model.to(ctx.device)
    broadcast_buffers(module, ctx.world_size)
    modes = [(layer, layer.training) for layer in module.modules()]
    dtype = half_precision(ctx)
    module.eval()
    try:
        with torch.no_grad(), torch.autocast(ctx.device.type, dtype, enabled=dtype is not None):
            yield module
    finally:
        for layer, training in modes:
            layer.training = training


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
    write_whole(paths.predictor, packed)


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


@dataclass(frozen=True)
class ModelPredictor:
    """Predicts with a trained model, by :func:`nbtoolkit.predict`; see there.

    Attributes:
        model: with the weights to predict with.
        step: the user's own step, as ``fit`` takes it; None: the default.
        collate: makes a batch from a list of samples; None: torch's.
    """

    model: torch.nn.Module
    step: Forward | None
    collate: Collate | None

    def __call__(self, fold_run: Any, test: object) -> Batch:
        """Return the model's outputs for the test set."""
        return predict(fold_run.ctx, self.model, test, step=self.step, collate=self.collate)


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
