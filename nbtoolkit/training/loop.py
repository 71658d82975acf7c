"""Train a model with ``fit`` in the same steps on any number of ranks, configured in YAML."""

from __future__ import annotations

import math
import sys
import time
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NoReturn

from nbtoolkit.config.schema import ConfigLike, as_config
from nbtoolkit.config.validation import mark_used
from nbtoolkit.errors import CheckpointError, FitError, RunStopped
from nbtoolkit.run.paths import write_json
from nbtoolkit.training.averaging import make_averages
from nbtoolkit.training.checkpoints import CheckpointManager, expected_bytes
from nbtoolkit.training.data import Collate
from nbtoolkit.training.evaluation import Validator
from nbtoolkit.training.loader import TrainLoader, make_train_loader
from nbtoolkit.training.losses import StepLoss, on_device, raise_if_not_finite
from nbtoolkit.training.metrics import Metrics, named_metrics, names_to_come
from nbtoolkit.training.optimizer import make_schedule
from nbtoolkit.training.rng import Streams, gather_streams, put_streams, seed_streams
from nbtoolkit.training.sampler import WHOLE_BATCHES, MicroBatch, inexact_layers
from nbtoolkit.training.step import Forward, Loss, TrainStep
from nbtoolkit.training.sync import ControlSignal, LossWindow, RankSync, SyncResult
from nbtoolkit.training.train_state import MetricLogger, TrainState, check_monitor

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from nbtoolkit.config.schema import Config
    from nbtoolkit.worker.context import RunContext


def fit(
    ctx: RunContext,
    config: ConfigLike,
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
    validation sample counts once.

    It may be killed at any moment: a run whose folder holds a checkpoint goes on with the next
    sample, with every rank's random streams where they were, so that the weights at the end are
    those of a run that was never interrupted. Checkpoints are due by ``checkpoint.every_minutes,
    every_steps, every_epochs``, at the end, and when the run is asked to leave (stop, time budget,
    session limit, SIGTERM), which is noticed within about a second, in the middle of an epoch too.

    Logged for every ``tracking.log_every_n_steps``-th optimizer step (written when the ranks meet,
    within about a second): ``loss, lr, grad_norm, samples_per_second`` and each rank's
    ``memory_gb``. Reported after each epoch, at the
    number of epochs done (comparable between trials whose batch sizes differ): ``train_loss,
    val_loss, val_<metric>``.

    Args:
        ctx: the run's context.
        config: its sections ``optim, train, distributed, checkpoint, tracking`` are used.
        model: trained in place, on ``ctx.device``; it ends with the weights of the best epoch, or
            with ``checkpoint.weights: last`` with those that were validated last (the averaged
            ones with ``train.weight_averaging``). Without a validation set and
            ``checkpoint.monitor`` no epoch is best.
        train_data: tensors, arrays, a tuple or dict of them, a ``TensorDataset``, any map-style
            data set, or an iterable one; the same on all ranks.
        valid_data: the same; None: no validation.
        loss: ``loss(outputs, targets)`` -> the mean or the sum over the batch's samples, a weighted
            mean of torch's ``cross_entropy`` or ``nll_loss`` (``weight``, ``ignore_index``), a
            tensor with one loss for each sample, or a pair of sums (total, weight). Which one is
            judged on the first batch; gradients and reported losses are those of the whole batch
            on one device. ``train.loss_reduction: batch`` allows others.
        metrics: ``"accuracy"``, functions ``(outputs, targets)`` -> mean over the batch,
            :func:`nbtoolkit.epoch_metric` of functions that need all samples at once, torchmetrics
            objects; in a list, or in a dict by name.
        step: ``step(model, batch)`` -> (outputs, targets); default: the batch is a pair (inputs,
            targets).
        collate: makes a batch from a list of samples; default: torch's.

    Returns:
        ``train_loss, val_loss, val_<metric>`` of the epoch whose weights the model has, with
        ``epoch`` (how many are done), ``best_epoch`` and ``best_<monitored metric>``.

    Raises:
        FitError: the data, the model, a metric or a setting cannot be used; the loss does not
            follow from its parts; or a loss is not a number (the step and its samples are named).
        CheckpointError: all checkpoints of the run are damaged, they belong to other data or
            another model, or the disk is too small for those to come.
        RunStopped: the run was asked to end (a BaseException: let it pass); all is saved by then.
    """
    config = as_config(config)
    mark_used()
    by_name = named_metrics(metrics)
    names, stems = names_to_come(by_name, validates=valid_data is not None)
    check_monitor(config, names, stems)
    monitor = config.checkpoint.monitor or ("val_loss" if "val_loss" in names else "train_loss")
    ctx.announce([*names, f"best_{monitor}", "epoch", "best_epoch"], stems, first_step=1)
    with CheckpointManager(ctx, config) as saver:
        fitting = _Fitting(ctx, config, model, train_data, loss, step or pair, collate, saver)
        validator = Validator(ctx, config, valid_data, by_name, collate)
        fitting.resume()
        while not fitting.done:
            fitting.train_epoch()
            fitting.end_epoch(validator)
        return fitting.finish()


class _Fitting:
    """One rank's part of a fit."""

    def __init__(
        self,
        ctx: RunContext,
        config: Config,
        model: torch.nn.Module,
        data: Any,
        loss: Loss,
        forward: Forward,
        collate: Collate | None,
        saver: CheckpointManager,
    ) -> None:
        self._ctx, self._config, self._saver = ctx, config, saver
        self._forward, loss = forward, on_device(loss, ctx.device)
        self._feed = make_train_loader(ctx, config, data, collate=collate, fit=saver.number)
        self._total = _total_steps(config, self._feed)
        schedule = make_schedule(config, steps=self._total, factor=ctx.plan.lr_factor)
        plain = forward is pair and collate is None  # else the labels may change on their way
        targets = data[1] if plain and isinstance(data, tuple) and len(data) == 2 else None
        self._train_step = TrainStep(ctx, config, model, loss, forward, schedule, targets=targets)
        self._train_step.averages = make_averages(
            config, self._train_step.module, steps=self._total, factor=ctx.plan.lr_factor
        )
        self._progress, self._journal = TrainState(ctx, config), MetricLogger(ctx)
        self._every = config.tracking.log_every_n_steps
        self._rank_sync, self._window = RankSync(ctx, config.checkpoint.every_steps), LossWindow()
        if config.tracking.record_samples and ctx.is_main:
            inexact = inexact_layers(self._train_step.module)
            if config.train.loss_reduction == "batch":
                inexact["loss"] = WHOLE_BATCHES
            write_json(ctx.paths.layers, inexact, durable=False)

    # --- its course ---

    def resume(self) -> None:
        """Go on from the newest undamaged checkpoint of the run, if there is one."""
        train_step, progress = self._train_step, self._progress
        entry = self._saver.find()
        self._saver.check_space(*expected_bytes(train_step))
        if entry is None:
            return
        training = entry.read("training")
        _check_same_walk(entry.folder, training["walk"], self._walk())
        train_step.restore({**training, "model": entry.read("model")}, source=str(entry.folder))
        progress.restore(training["progress"])
        if progress.taken:
            _put_back(self._ctx, training["streams"], train_step.step)
        within = f", {progress.taken} steps into the next one" if progress.taken else ""
        self._ctx.print(f"fit: going on after epoch {progress.epoch}{within}")

    @property
    def done(self) -> bool:
        """Whether all epochs or steps are taken, or patience is used up."""
        progress = self._progress
        return not progress.taken and (progress.stopped_early or self._all_taken(progress.epoch))

    def train_epoch(self) -> None:
        """Take the optimizer steps of an epoch, or those left of it."""
        ctx, train_step, progress, window = (
            self._ctx,
            self._train_step,
            self._progress,
            self._window,
        )
        epoch, before = progress.epoch + 1, train_step.step - progress.taken
        if not progress.taken:
            seed_streams(ctx.device, ctx.seed, "epoch", epoch, ctx.rank)
        train_step.module.train()
        rank_sync = self._rank_sync
        rank_sync.begin(train_step.step)
        self._journal.begin()
        left = self._total - train_step.step
        for batch, share in self._feed.walk(epoch, skip=progress.taken, limit=left):
            step = train_step.step + share.last
            logs = share.last and step % self._every == 0
            window.add(train_step.take(batch, share, watch=logs), share)
            if logs:
                window.mark(train_step)
            if share.last and step == rank_sync.next:
                progress.taken = train_step.step - before
                self._act(self._meet())
        if window.shares:
            progress.taken = train_step.step - before
            self._meet()

    def end_epoch(self, validator: Validator) -> None:
        """Validate, keep what is best, save what is due, report; may leave (see fit)."""
        train_step, progress, saver = self._train_step, self._progress, self._saver
        self._end_averages()
        values = {"train_loss": progress.train_loss, **validator.values(train_step)}
        better = progress.end_epoch(values, train_step.step)
        train_step.schedule.observe(values[progress.monitored], better)
        if better and progress.judged:
            about = {"epoch": progress.epoch, "values": values}
            saver.keep_best(self._validated_weights, train_step.step, about)
        if self.done or saver.due_by_epochs(progress.epoch) or saver.due_by_time():
            self._save(None)
        self._report(values)

    def finish(self) -> dict[str, float]:
        """Leave the model with the weights that ``checkpoint.weights`` says."""
        train_step, progress = self._train_step, self._progress
        if train_step.averages is not None and train_step.averages.active:
            train_step.module.load_state_dict(train_step.averages.weights())
        if progress.ends_with_best:
            train_step.put_back(self._saver.best_weights())
        return progress.summary()

    # --- meetings ---

    def _meet(self) -> SyncResult:
        """The ranks' sums since they last met; a loss that is not a number ends the fit here."""
        train_step, window, progress = self._train_step, self._window, self._progress
        losses, shares, marks = window.values(), window.shares, window.marks
        wish, memory = self._wish(), self._journal.memory()
        meeting = self._rank_sync.meet(
            train_step.step, window.sums(losses), wish=wish, memory=memory
        )
        window.clear()
        if not meeting.finite:
            self._refuse_losses(losses, shares)  # returns where fp16 has left out the steps
        for part, mark in zip_longest(meeting.parts, marks):
            if math.isfinite(part.loss):
                progress.add(part)
                self._journal.add(part)
            if mark is not None:
                self._journal.write(mark, meeting.memory)
        return meeting

    def _wish(self) -> ControlSignal:
        """What this rank, if it is the main one, wants the ranks to do."""
        ctx = self._ctx
        if not ctx.is_main:
            return ControlSignal.GO_ON
        late = ctx.deadline is not None and time.time() + self._saver.reserve >= ctx.deadline
        if late or ctx.stop_requested():
            return ControlSignal.ASK
        return ControlSignal.SAVE if self._saver.due_by_time() else ControlSignal.GO_ON

    def _act(self, meeting: SyncResult) -> None:
        """In mid-epoch: save, or leave."""
        if meeting.wish is ControlSignal.ASK:
            streams = gather_streams(self._ctx.device, self._ctx.world_size)
            status = self._ctx.should_stop(reserve=self._saver.reserve)
            if status is not None:
                self._leave(RunStopped(status), streams)
        elif meeting.wish is ControlSignal.SAVE or self._saver.due_by_steps(self._train_step.step):
            self._save(gather_streams(self._ctx.device, self._ctx.world_size))

    def _report(self, values: dict[str, float]) -> None:
        try:
            self._ctx.report(values, step=self._progress.epoch)
        except RunStopped as leave:
            self._leave(leave, None)

    def _leave(self, leave: RunStopped, streams: Streams | None) -> NoReturn:
        """Save, unless nobody will go on with the run, and leave: no collective from here on."""
        if leave.status != "pruned":
            self._save(streams)
        raise leave

    def _refuse_losses(self, losses: list[float], shares: list[MicroBatch]) -> None:
        """All ranks together find the step and the samples behind a loss that is not a number."""
        train_step, epoch = self._train_step, self._progress.epoch + 1
        step = train_step.step - sum(share.last for share in shares)
        index, told = self._progress.taken - (train_step.step - step), []
        for loss, share in zip(losses, shares, strict=True):
            if share.samples:
                told.append(StepLoss(step + 1, epoch, index, loss))
            step, index = step + share.last, index + share.last
        raise_if_not_finite(
            self._ctx,
            told,
            self._feed.sample_ids,
            tolerant=train_step.skips_overflows,
            rate=train_step.rate,
            grad_norm=None if train_step.grad_norm is None else float(train_step.grad_norm),
        )

    # --- checkpoints ---

    def _save(self, streams: Streams | None) -> None:
        """Save what a resumed fit needs; ``streams`` of all ranks in mid-epoch, else None."""
        train_step, progress = self._train_step, self._progress

        def parts() -> dict[str, dict[str, Any]]:
            state = train_step.state()
            model = state.pop("model")
            kept = {"progress": progress.state(), "streams": streams, "walk": self._walk()}
            return {"model": model, "training": {**state, **kept}, **self._averaged()}

        about = {"epoch": progress.epoch, "taken": progress.taken, "values": progress.values}
        self._saver.save(parts, train_step.step, about)

    def _averaged(self) -> dict[str, dict[str, Any]]:
        averages = self._train_step.averages
        return {"averaged": averages.weights()} if averages is not None and averages.active else {}

    def _validated_weights(self) -> dict[str, Any]:
        """The weights that were validated."""
        return self._averaged().get("averaged") or self._train_step.module.state_dict()

    def _walk(self) -> dict[str, Any]:
        """What must be the same for a position in an epoch to mean the same samples."""
        return {
            "global_batch_size": self._ctx.plan.global_batch_size,
            "steps_per_epoch": self._feed.steps,
            "seed": self._ctx.seed,
        }

    def _all_taken(self, epoch: int) -> bool:
        """Whether no step is left after ``epoch`` epochs."""
        return epoch >= self._config.train.epochs or self._train_step.step >= self._total

    def _end_averages(self) -> None:
        """What averaging does at an epoch's end, before it is validated."""
        averages = self._train_step.averages
        if averages is None:
            return
        averages.end_epoch(self._train_step.step)
        if averages.needs_batch_norm:
            passes = self._feed.walk(self._progress.epoch + 1, limit=self._progress.taken)
            averages.finish((batch for batch, share in passes if share.samples), self._forward)


def _total_steps(config: Config, feed: TrainLoader) -> int:
    """Optimizer steps of the whole run."""
    most = config.train.max_steps or sys.maxsize
    return most if feed.steps is None else min(most, feed.steps * config.train.epochs)


def _check_same_walk(folder: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [
        f"{name} {then[name]} then, {now[name]} now" for name in now if then[name] != now[name]
    ]
    if changed:
        raise CheckpointError(
            f"the checkpoint {folder} was made on another walk through the data: "
            + "; ".join(changed),
            allowed="the same data set, seed, and samples in an optimizer step (with "
            "train.batch_size_per_device: the same number of ranks and accumulation steps)",
            do="launch as before, or with resume='never'",
        )


def _put_back(ctx: RunContext, streams: Streams, step: int) -> None:
    """Every rank's random streams where they were; new ones on another number of ranks."""
    if len(streams) == ctx.world_size:
        put_streams(streams[ctx.rank], ctx.device)
    else:
        seed_streams(ctx.device, ctx.seed, "resumed", step, ctx.rank)


def pair(model: torch.nn.Module, batch: Any) -> tuple[Any, Any]:
    """The default step: a batch is a pair (inputs, targets)."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:  # two rows, or keys, would unpack
        raise FitError(
            f"a batch is not a pair (inputs, targets) but a {type(batch).__name__}",
            allowed="data sets of pairs, or a step of your own",
            do="pass step=lambda model, batch: (model(batch['x']), batch['y']) to fit",
        )
    inputs, targets = batch
    return model(inputs), targets
