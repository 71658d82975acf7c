"""fit: the optional training loop, decided in YAML; the same steps on any number of ranks."""

from __future__ import annotations

import random
import sys
import time
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import FitError
from nbtoolkit.training.data import Collate, Source, make_source
from nbtoolkit.training.metrics import LossWindow, Metrics, named_metrics
from nbtoolkit.training.order import Order, mix
from nbtoolkit.training.progress import Progress
from nbtoolkit.training.schedule import make_schedule
from nbtoolkit.training.stepper import Forward, Loss, Stepper
from nbtoolkit.training.validation import Validator

if TYPE_CHECKING:
    import torch

    from nbtoolkit.config import Config
    from nbtoolkit.runtime.context import RunContext


def fit(
    ctx: RunContext,
    config: Config,
    model: torch.nn.Module,
    train_data: Any,
    valid_data: Any,
    *,
    loss: Loss,
    metrics: Metrics = None,
    step: Forward | None = None,
    collate: Collate | None = None,
) -> dict[str, float]:
    """Train ``model`` as ``config`` says; called by all ranks.

    An optimizer step takes the same samples on any number of ranks (``train.batch_size`` is
    global), and its gradient is the mean over exactly these, in the last uneven step too. Every
    validation sample counts once. Each epoch begins with random streams of (seed, epoch, rank), so
    that a resumed run draws what the uninterrupted one would have drawn.

    Logged every ``tracking.log_every_n_steps`` optimizer steps, at the optimizer step: ``loss, lr,
    grad_norm, samples_per_second``. Saved after each epoch: ``last``, and ``best`` if it is. Then
    reported, at the number of epochs done (comparable between trials whose batch sizes differ):
    ``train_loss, val_loss, val_<metric>``. A run whose folder holds a ``last`` goes on after it; a
    second call in one training function has ``last-2`` and ``best-2``.

    Args:
        ctx: the run's context.
        config: its sections ``optim, train, distributed, checkpoint, tracking`` are used.
        model: trained in place; it ends with the last epoch's weights, on ``ctx.device``.
        train_data: tensors, arrays, a tuple or dict of them, a ``TensorDataset``, or any map-style
            data set; the same on all ranks.
        valid_data: the same; None: no validation.
        loss: ``loss(outputs, targets)`` -> mean over the batch's samples (a scalar tensor).
        metrics: ``"accuracy"``, functions ``(outputs, targets)`` -> mean over the batch,
            torchmetrics objects; in a list, or in a dict by name.
        step: ``step(model, batch)`` -> (outputs, targets); default: the batch is a pair (inputs,
            targets).
        collate: makes a batch from a list of samples; default: torch's.

    Returns:
        The last epoch's ``train_loss, val_loss, val_<metric>``, with ``epoch``, ``best_epoch`` and
        ``best_<monitored metric>``.

    Raises:
        FitError: the data, a metric or ``checkpoint.monitor`` cannot be used.
        CheckpointError: the run's ``last`` checkpoint is damaged or another model's.
        Leave: the run was asked to end (a BaseException: let it pass); all is saved by then.
    """
    trainer = _Trainer(ctx, config, model, train_data, loss, step or _pair, collate)
    validator = Validator(ctx, config, valid_data, named_metrics(metrics), collate)
    progress = Progress.of(ctx, config, trainer.stepper)
    while not trainer.done:
        epoch = progress.epoch + 1
        _seed(ctx, epoch)
        values = {"train_loss": trainer.epoch(epoch), **validator.values(trainer.stepper)}
        progress.end_epoch(epoch, values)
        ctx.report(values, step=epoch)
    return progress.summary()


class _Trainer:
    """One rank's walk through the training set."""

    def __init__(
        self,
        ctx: RunContext,
        config: Config,
        model: torch.nn.Module,
        data: Any,
        loss: Loss,
        forward: Forward,
        collate: Collate | None,
    ) -> None:
        self._ctx = ctx
        self._source = _source(ctx, config, data, collate)
        self._order = Order(
            size=len(self._source),
            batch=ctx.plan.global_batch_size,
            micro=ctx.plan.batch_size_per_device,
            seed=ctx.seed,
            rank=ctx.rank,
            ranks=ctx.world_size,
        )
        steps = min(self._order.steps * config.train.epochs, config.train.max_steps or sys.maxsize)
        schedule = make_schedule(config, steps=steps, factor=ctx.plan.lr_factor)
        self.stepper = Stepper(ctx, config, model, loss, forward, schedule)
        self._every = config.tracking.log_every_n_steps

    @property
    def done(self) -> bool:
        """Whether all steps of the run are taken."""
        return self.stepper.step >= self.stepper.schedule.total

    def epoch(self, epoch: int) -> float:
        """Train for one epoch; returns its mean loss over all samples of all ranks."""
        stepper, order, every = self.stepper, self._order, self._every
        window = LossWindow(self._ctx.device, ranks=self._ctx.world_size)
        stepper.module.train()
        total, seen, since = 0.0, 0, time.perf_counter()
        passes = order.passes(stepper.schedule.total - stepper.step)
        batches = self._source.batches(order.indices(epoch), order.sizes[:passes])
        for batch, share in zip(batches, order.shares[:passes], strict=True):
            watch = share.last and (stepper.step + 1) % every == 0
            window.add(stepper.take(batch, share, watch=watch), share.samples)
            if watch:
                part, count = window.close()
                total, seen, now = total + part, seen + count, time.perf_counter()
                self._log(part / count, count / (now - since))
                since = now
        part, count = window.close()
        return (total + part) / (seen + count)

    def _log(self, loss: float, speed: float) -> None:
        stepper = self.stepper
        values = {"loss": loss, "lr": stepper.rate, "samples_per_second": speed}
        if stepper.grad_norm is not None:
            values["grad_norm"] = float(stepper.grad_norm)
        self._ctx.log(values, step=stepper.step)


def _source(
    ctx: RunContext,
    config: Config,
    data: Any,
    collate: Collate | None,
) -> Source:
    source = make_source(data, ctx.device, collate=collate, workers=config.train.workers)
    if len(source) == 0:
        raise FitError(
            "the training set is empty",
            allowed="one sample or more",
            do="check the split or the filter that made it",
        )
    return source


def _pair(model: torch.nn.Module, batch: Any) -> tuple[Any, Any]:
    """The default step."""
    try:
        inputs, targets = batch
    except (TypeError, ValueError):
        raise FitError(
            f"a batch is not a pair (inputs, targets) but a {type(batch).__name__}",
            allowed="data sets of pairs, or a step of your own",
            do="pass step=lambda model, batch: (model(batch['x']), batch['y']) to fit",
        ) from None
    return model(inputs), targets


def _seed(ctx: RunContext, epoch: int) -> None:
    """Fresh random streams for an epoch: every rank's own (dropout), the same after a resume."""
    import numpy as np
    import torch

    seed = mix(ctx.seed, "epoch", epoch, ctx.rank)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
