"""Train a model with ``fit`` in the same steps on any number of ranks, configured in YAML."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable
from itertools import zip_longest
from typing import TYPE_CHECKING

from nbtoolkit.config import reads
from nbtoolkit.config.schema import ConfigLike, as_config
from nbtoolkit.errors import RunStopped
from nbtoolkit.training.callbacks import Callbacks, FitState, StepProfiler
from nbtoolkit.training.checkpoints import CheckpointManager, Resumable
from nbtoolkit.training.data import Collate, take_apart
from nbtoolkit.training.evaluation import (
    ModelPredictor,
    Validator,
    check_context,
    forward_pair,
    save_predictor,
)
from nbtoolkit.training.loader import TrainLoader, make_train_loader
from nbtoolkit.training.losses import Loss, check_loss
from nbtoolkit.training.metrics import Metrics, check_accuracy, named_metrics, reported_names
from nbtoolkit.training.model import WHOLE_BATCHES, inexact_layers, refuse_single_samples
from nbtoolkit.training.optim import GivenOptimizer, GivenSchedule, refuse_several
from nbtoolkit.training.progress import TrainState, check_monitor
from nbtoolkit.training.samples import MicroBatch, SampleWeights
from nbtoolkit.training.step import Forward, Recipe, TrainStep
from nbtoolkit.training.sync import (
    LossWindow,
    MetricLogger,
    StepClock,
    StepLoss,
    SyncResult,
    raise_if_not_finite,
    sync_ranks,
)
from nbtoolkit.worker.random_numbers import record_inexact, seed_rank
from nbtoolkit.worker.watch import Watch

if TYPE_CHECKING:
    import torch

    from nbtoolkit.config.schema import Config
    from nbtoolkit.worker.context import RunContext
    from nbtoolkit.worker.watch import Signal


def fit(
    ctx: RunContext,
    config: ConfigLike,
    model: torch.nn.Module,
    train_data: object,
    valid_data: object,
    *,
    loss: Loss,
    metrics: Metrics = None,
    step: Forward | None = None,
    collate: Collate | None = None,
    optimizer: GivenOptimizer | None = None,
    schedule: GivenSchedule | None = None,
    sampler: Iterable[int] | None = None,
    sample_weights: SampleWeights | None = None,
    callbacks: Iterable[object] = (),
) -> dict[str, float]:
    """Train ``model`` as ``config`` says; all ranks call this function.

    An optimizer step uses the same samples on any number of ranks, because ``train.batch_size`` is
    the size over all ranks. The gradient is the mean over exactly these samples, even if the last
    step of an epoch has fewer of them. Every validation sample counts once.

    The process may be killed at any time. A run whose folder has a checkpoint resumes with the next
    sample, and ``fit`` restores the random generators of every rank, so the final weights are those
    of an uninterrupted run. The settings ``checkpoint.every_minutes``, ``every_steps`` and
    ``every_epochs`` say how often ``fit`` saves a checkpoint. It also saves one at the end, and
    when the run has to stop (stop request, time budget, session limit, SIGTERM). The run stops
    within about a second, even in the middle of an epoch.

    For every ``tracking.log_every_n_steps``-th optimizer step, ``fit`` logs ``loss``, ``lr``,
    ``grad_norm``, ``samples_per_second`` and ``memory_gb_rank<rank>``. About once a second, it also
    logs how the time of the steps is divided: ``data_share``, ``compute_share`` and
    ``communication_share``. After each epoch it reports ``train_loss``, ``val_loss`` and
    ``val_<metric>``. The step of a report is the number of finished epochs, so that trials with
    different batch sizes can be compared.

    Args:
        ctx: the run's context.
        config: the configuration, of which ``fit`` uses the sections ``optim``, ``train``,
            ``distributed``, ``checkpoint`` and ``tracking``.
        model: the model, trained in place on ``ctx.device``. At the end, it has the weights of the
            best epoch. If ``checkpoint.weights`` is ``last``, it has those of the last epoch. With
            ``train.weight_averaging``, these are averaged weights. Without a validation set and
            without ``checkpoint.monitor``, no epoch is best, and the model has the last weights.
        train_data: the training set, the same on all ranks: tensors, arrays, pandas tables of
            numbers, a tuple or dict of them, a ``TensorDataset``, any other map-style data set, or
            an iterable one. Floats in arrays, tensors and tables become those of the model's
            weights, usually float32. A DataFrame becomes floats, and a Series of whole numbers
            int64. From a ``DataLoader``, ``fit`` takes the data set, ``collate_fn``,
            ``num_workers``, the sampler and ``drop_last``.
        valid_data: the validation set, in any of these forms; None: no validation.
        loss: a function ``loss(outputs, targets)``. It returns the mean over the samples of the
            batch, a weighted mean (torch's ``cross_entropy`` or ``nll_loss`` with ``weight``
            or ``ignore_index``), a tensor of shape (n, ...) with one loss per sample, or a pair
            ``(total, weight)``: the sum of the weighted losses, and the sum of the weights. On one
            rank without gradient accumulation, the loss is what it returns. Else ``fit`` checks
            with the first batch that it is one of these. The gradients and reported losses are then
            the same as if one device computed the loss of the whole batch. For a loss that compares
            the samples of a batch, :func:`nbtoolkit.all_rows` gives it the samples of all ranks. If
            ``train.loss_reduction`` is ``batch``, any other loss is allowed.
        metrics: a list of metrics, or a dict whose keys are their names. A metric is
            a name (``"accuracy"``, ``"rmse"``, ``"f1_macro"``, ``"roc_auc"``, ... ; an unknown one
            lists them), a function ``(outputs, targets)`` that returns a mean over the batch, a
            torchmetrics object, or a result of :func:`nbtoolkit.epoch_metric` (for a function that
            needs all samples at once).
        step: a function ``step(model, batch)`` that returns (outputs, targets). Default: the batch
            is a pair (inputs, targets), and the model gets the inputs.
        collate: a function that makes a batch from a list of samples; default: torch's.
        optimizer: an optimizer over the parameters of ``model``, or a function that makes one from
            ``model``; it keeps its own learning rates. Or an optimizer class, which gets the
            settings of ``optim``. Default: the optimizer that ``optim.name`` names. A training with
            several optimizers is a loop of your own, see docs/own-loop/several-models.md.
        schedule: an ``LRScheduler`` of this optimizer; a function ``f(optimizer)`` or
            ``f(optimizer, steps)`` that makes one; or a function ``f(step)`` that returns the
            factor of the learning rates. It advances after each optimizer step, but a
            ``ReduceLROnPlateau`` after each epoch, by the monitored metric. Default:
            ``optim.schedule``; an optimizer that you made yourself keeps its rates.
        sampler: a torch ``Sampler``, or any iterable with ``__len__``, that gives the indices of
            one epoch's samples. ``fit`` reads it once per epoch for all ranks, after it has seeded
            the random generators by (seed, epoch). Default: a permutation of all samples.
        sample_weights: one weight per sample. An epoch then draws as many samples as the training
            set has, with replacement. ``"balanced"``: all classes are drawn equally often. Default:
            ``train.sample_weights``.
        callbacks: objects with methods of :class:`nbtoolkit.Callback`, which ``fit`` calls.

    Returns:
        A dict with ``train_loss``, ``val_loss`` and ``val_<metric>`` of the epoch whose weights the
        model has, and with ``epoch`` (the number of finished epochs), ``best_epoch`` and
        ``best_<monitored metric>``.

    Raises:
        FitError: the data, the model, a metric or a setting cannot be used; the loss of a batch
            cannot be computed from the losses of its parts; or a loss is not finite (the message
            names the step and its samples).
        CheckpointError: all checkpoints of the run are damaged, they belong to other data or
            another model, or the disk has too little space for new ones.
        RunStopped: the run has to stop. It is a BaseException; do not catch it. A checkpoint is
            saved before, except in a pruned trial.
    """
    check_context(ctx, "fit")
    config = as_config(config)
    reads.note(reads.ALL)
    by_name = named_metrics(metrics)
    names, stems = reported_names(by_name, validates=valid_data is not None)
    profilers = [StepProfiler(ctx)] if config.train.profile else []
    moments = Callbacks([*callbacks, *profilers], ctx.rank, ctx.world_size)
    check_loss(loss)
    refuse_several(optimizer)
    adds = moments.have("on_validation_end")  # metrics of any name
    if not adds:
        check_monitor(config, names, stems)
    monitor = config.checkpoint.monitor or ("val_loss" if "val_loss" in names else "train_loss")
    announced = [] if adds else [*names, f"best_{monitor}", "epoch", "best_epoch"]
    ctx.announce(announced, stems, first_step=1)
    with CheckpointManager(ctx, config) as checkpoints, contextlib.ExitStack() as closing:
        feed = take_apart(train_data, collate=collate, model=model)
        loader = make_train_loader(
            ctx,
            config,
            feed,
            sampler=sampler,
            sample_weights=sample_weights,
            model=model,
        )
        limit = config.train.max_steps or sys.maxsize
        total = limit if loader.steps is None else min(limit, loader.steps * config.train.epochs)
        for profiler in profilers:
            profiler.expect(loader.steps, total)
            closing.enter_context(profiler)
        targets = feed.targets if step is None else None  # a step may change them
        check_accuracy(by_name, targets)
        recipe = Recipe(
            loss=loss,
            forward=forward_pair if step is None else step,
            optimizer=optimizer,
            schedule=schedule,
            targets=targets,
        )
        train_step = TrainStep(ctx, config, model, recipe, steps=total)
        refuse_single_samples(train_step.module, loader.single)
        training = _Training(ctx, config, loader, train_step, checkpoints, moments)
        validator = Validator(ctx, config, valid_data, by_name, collate, model)
        training.resume()
        if config.train.loss_reduction == "auto":  # a loss over whole batches cannot be cut
            ctx.accumulates(entered=True)
        while not training.done:
            training.train_epoch()
            training.end_epoch(validator)
        ctx.accumulates(entered=False)
        values = training.finish()
        if ctx.is_main and ctx.has_fold and not ctx.params:  # a sweep's folds keep none
            predictor = ModelPredictor(train_step.module, step, feed.collate)
            save_predictor(ctx.paths, predictor)
        return values


class _Training:
    """One rank's training loop."""

    def __init__(
        self,
        ctx: RunContext,
        config: Config,
        loader: TrainLoader,
        train_step: TrainStep,
        checkpoints: CheckpointManager,
        callbacks: Callbacks,
    ) -> None:
        self._ctx = ctx
        self._config = config
        self._loader = loader
        self._callbacks = callbacks
        self._epoch = 0
        self._train_step = train_step
        self._checkpoints = checkpoints
        self._state = TrainState(ctx, config)
        self._logger = MetricLogger(ctx)
        self._resumable = Resumable(
            train_step=train_step,
            progress=self._state,
            callbacks=callbacks,
            sampling={
                "global_batch_size": ctx.plan.global_batch_size,
                "steps_per_epoch": loader.steps,
                "seed": ctx.seed,
                "order": loader.order,
            },
        )
        self._watch = Watch(ctx, checkpoints)
        self._window = LossWindow()
        self._clock = StepClock(ctx, train_step.model)
        if ctx.records_inexact and ctx.is_main:
            inexact = inexact_layers(train_step.module)
            if config.train.loss_reduction == "batch":
                inexact["loss"] = WHOLE_BATCHES
            record_inexact(ctx.paths.inexact, inexact)

    def resume(self) -> None:
        """Resume from the newest undamaged checkpoint of the run, if there is one."""
        self._checkpoints.resume(self._resumable)
        self._epoch = self._state.epoch
        self._moment("on_fit_start")

    @property
    def done(self) -> bool:
        """Whether all epochs or steps are done, or patience is used up."""
        state = self._state
        all_done = (
            state.epoch >= self._config.train.epochs
            or self._train_step.steps_done >= self._train_step.steps
        )
        return not state.taken and (state.stopped_early or all_done or bool(state.stopped))

    def train_epoch(self) -> None:
        """Do the remaining optimizer steps of an epoch."""
        ctx = self._ctx
        train_step = self._train_step
        state = self._state
        window = self._window
        epoch = state.epoch + 1
        before = train_step.steps_done - state.taken
        if not state.taken:
            seed_rank(ctx.device, ctx.seed, "epoch", epoch, ctx.rank)
        train_step.module.train()
        watch = self._watch
        log_every = self._config.tracking.log_every_n_steps
        self._epoch = epoch
        self._moment("on_train_epoch_start")
        each_step = self._callbacks.have("on_train_batch_end")
        watch.begin(train_step.steps_done)
        self._logger.begin()
        self._clock.begin()
        left = train_step.steps - train_step.steps_done
        batches = self._loader.batches(epoch, skip=state.taken, limit=left)
        for batch, micro_batch in self._clock.timed(batches):
            step = train_step.steps_done + micro_batch.last
            logs = micro_batch.last and step % log_every == 0
            window.add(train_step.step(batch, micro_batch, measure_norm=logs), micro_batch)
            if logs:
                window.add_log_point(train_step)
            if each_step and micro_batch.last:
                self._moment("on_train_batch_end")
            if micro_batch.last and watch.due(step):
                state.taken = train_step.steps_done - before
                result = self._sync()
                self._handle(result.signal)
                self._clock.begin()
                if result.stop:
                    break
        if window.losses:
            state.taken = train_step.steps_done - before
            self._sync()
        self._logger.end()

    def end_epoch(self, validator: Validator) -> None:
        """Validate, keep the best weights, save a due checkpoint, report; may raise RunStopped."""
        train_step = self._train_step
        state = self._state
        checkpoints = self._checkpoints
        strategy = train_step.strategy
        self._update_averages()
        state.values = {"train_loss": state.train_loss}
        self._moment("on_train_epoch_end")
        values = state.values = {**state.values, **validator.values(train_step)}
        if self._callbacks:
            state.stopped, added = self._callbacks.agree(self._moment("on_validation_end"))
            values = {**values, **added}
            if state.stopped:
                self._ctx.print(f"fit: stops after epoch {self._epoch}: {state.stopped}")
        better = state.end_epoch(values, train_step.steps_done)
        train_step.schedule.end_epoch(values[state.monitored])
        if better and state.has_best:
            about = {"epoch": state.epoch, "values": values}
            best = strategy.gathered(train_step.weights())
            checkpoints.keep_best(best, train_step.steps_done, about)
        due = self.done or checkpoints.due_by_epochs(state.epoch)
        if due or strategy.agreed(checkpoints.due_by_time()):
            self._save(within_epoch=False)
        try:
            self._ctx.report(values, step=state.epoch)
        except RunStopped as stop:
            if stop.status != "pruned":
                self._save(within_epoch=False)
            raise

    def finish(self) -> dict[str, float]:
        """Load the weights that ``checkpoint.weights`` says; returns the values of ``fit``."""
        train_step = self._train_step
        state = self._state
        if train_step.evaluated_module is not train_step.module:
            train_step.module.load_state_dict(train_step.evaluated_module.state_dict())
        if state.ends_with_best:
            train_step.load_on_all_ranks(self._checkpoints.best_weights())
        train_step.strategy.close()
        self._moment("on_fit_end")
        return state.summary()

    def _save(self, *, within_epoch: bool) -> None:
        self._checkpoints.save(
            self._resumable,
            lambda: self._moment("on_save_checkpoint"),
            within_epoch=within_epoch,
        )

    def _moment(self, moment: str) -> dict[str, float]:
        """Call the callbacks that have this method; returns the metrics that they add."""
        if not self._callbacks.have(moment):
            return {}
        step = self._train_step
        callbacks = self._callbacks
        state = FitState(
            self._epoch,
            step.steps_done,
            self._state.values,
            step.module,
            step.optimizer,
            self._ctx,
            callbacks.request_stop,
        )
        return callbacks.call(moment, state)

    def _sync(self) -> SyncResult:
        """Sum the losses since the last call over the ranks, and log them.

        Raises:
            LossNotFinite: a loss is not finite.
        """
        train_step = self._train_step
        window = self._window
        logger = self._logger
        losses = window.values()  # waits for the device
        steps = sum(micro_batch.last for micro_batch in window.micro_batches)
        result = sync_ranks(
            self._ctx,
            self._watch,
            train_step.steps_done,
            window.sums(losses),
            unsummed=[*self._clock.take(steps), logger.memory()],
            stop=self._callbacks.stop_requested,
        )
        self._clock.add([numbers[:-1] for numbers in result.unsummed])
        memory = [numbers[-1] for numbers in result.unsummed]
        micro_batches = window.micro_batches
        log_points = window.log_points
        window.clear()
        if not result.finite:
            self._refuse_losses(losses, micro_batches)  # returns if fp16 has skipped the steps
        for part, point in zip_longest(result.sums, log_points):
            train_step.reduced_loss.check_all_count(part.weight, part.samples)
            if math.isfinite(part.loss):
                self._state.add(part)
                logger.add(part)
            if point is not None:
                shares = self._clock.shares() if point is log_points[-1] else {}
                logger.write(point, memory, shares)
        return result

    def _handle(self, signal: Signal) -> None:
        """Within an epoch: save a due checkpoint, or stop."""
        decision = self._watch.decision(signal, self._train_step.steps_done)
        if decision.save:
            self._save(within_epoch=True)
        if decision.status is not None:
            raise RunStopped(decision.status)

    def _refuse_losses(self, losses: list[float], micro_batches: list[MicroBatch]) -> None:
        """Find the step and the samples of a loss that is not finite; a collective."""
        train_step = self._train_step
        state = self._state
        step = train_step.steps_done - sum(micro_batch.last for micro_batch in micro_batches)
        index = state.taken - (train_step.steps_done - step)
        step_losses = []
        for loss, micro_batch in zip(losses, micro_batches, strict=True):
            if micro_batch.samples:
                step_losses.append(StepLoss(step + 1, state.epoch + 1, index, loss))
            step = step + micro_batch.last
            index = index + micro_batch.last
        raise_if_not_finite(
            self._ctx,
            step_losses,
            self._loader.sample_ids,
            tolerant=train_step.keeps_weights,
            rate=train_step.rate,
            grad_norm=None if train_step.grad_norm is None else float(train_step.grad_norm),
        )

    def _update_averages(self) -> None:
        """Complete the averages at an epoch's end, before validation."""
        averages = self._train_step.averages
        if averages is None:
            return
        averages.end_epoch(self._train_step.steps_done)
        if averages.needs_batch_norm:
            state = self._state
            epoch = self._loader.batches(state.epoch + 1, limit=state.taken)
            batches = (batch for batch, micro_batch in epoch if micro_batch.samples)
            averages.update_batch_norm(batches, self._train_step.forward)
