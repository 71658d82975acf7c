"""Run a Lightning ``Trainer`` inside ``train(config, ctx)``, on every rank.

from nbtoolkit.integrations import lightning as nbl

trainer = lightning.Trainer(**nbl.trainer_arguments(ctx, max_epochs=5))
trainer.fit(module, loader, ckpt_path=nbl.resume_from(ctx))
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nbtoolkit.extras.integrations.support import (
    as_numbers,
    check_inside_train,
    check_strategy,
    claim_name,
    record_checkpoint,
    requires,
)
from nbtoolkit.extras.integrations.support import last_checkpoint as last_checkpoint
from nbtoolkit.extras.integrations.support import resume_from as resume_from
from nbtoolkit.training.checkpoints import gather_random_states, restore_random_state
from nbtoolkit.worker.context import RunContext
from nbtoolkit.worker.watch import Watch

with requires("lightning", "2.5"):
    from lightning.pytorch.callbacks import Callback, Checkpoint
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_PRECISION = {"fp32": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}


def trainer_arguments(
    ctx: RunContext, *, name: str = "trainer", **overrides: Any
) -> dict[str, Any]:
    """Return the arguments for ``lightning.Trainer`` that the plan decides.

    Args:
        ctx: the run's context.
        name: of this training; for several in one run. It precedes the names of the metrics.
        overrides: replace these, or are added; :func:`callback` is appended to ``callbacks``.

    Returns:
        ``accelerator, devices, num_nodes, strategy, precision, accumulate_grad_batches,
        sync_batchnorm, default_root_dir, callbacks, logger, enable_progress_bar``, and
        ``overrides``.

    Raises:
        LaunchError: called outside of ``train``.
        PlanError: the plan has a strategy of ``nb.fit`` alone.
    """
    check_inside_train(ctx, "trainer_arguments")
    check_strategy(ctx, "Lightning's Trainer")
    given = overrides.pop("callbacks", None) or []
    callbacks: list[Callback] = [given] if isinstance(given, Callback) else list(given)
    if not any(isinstance(item, LightningCallback) for item in callbacks):
        callbacks.append(callback(ctx, name=name))
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", ctx.world_size))
    several = ctx.world_size > 1
    gpu = ctx.device.type == "cuda"
    arguments = {
        "accelerator": "cuda" if gpu else "cpu",
        "devices": on_this_machine,
        "num_nodes": ctx.world_size // on_this_machine,
        "strategy": DDPStrategy(**ctx.plan.ddp) if several else "auto",
        "precision": _PRECISION[ctx.plan.precision],
        "accumulate_grad_batches": ctx.plan.accumulate,
        "sync_batchnorm": several and gpu and ctx.config.distributed.sync_batchnorm,
        "default_root_dir": ctx.paths.folder,
        "callbacks": callbacks,
        "logger": False,
        "enable_progress_bar": False,
    }
    return arguments | overrides


def callback(ctx: RunContext, *, name: str = "trainer") -> LightningCallback:
    """Return the callback that reports, saves and stops, for a ``Trainer`` of your own.

    Args:
        ctx: the run's context.
        name: of this training; for several in one run.
    """
    check_inside_train(ctx, "callback")
    return LightningCallback(ctx, name)


class LightningCallback(Checkpoint):
    """Reports after each validation and epoch, saves, and stops on request within an epoch.

    It takes the place of Lightning's default ``ModelCheckpoint``, and runs after all callbacks
    that are no checkpoints. Checkpoints are ``checkpoints/<name>-<step>.ckpt``.

    Args:
        ctx: the run's context.
        name: of the training.
    """

    best_model_path = ""
    """Lightning asks its checkpoint callback for ``ckpt_path="best"``; this keeps the last ones."""

    def __init__(self, ctx: RunContext, name: str) -> None:
        self._ctx = ctx
        self._watch = Watch(ctx)
        self._name = name
        self._step = self._reported = -1
        self._validated = False

    def state_dict(self) -> dict[str, Any]:
        """Every rank's random state, for a checkpoint; a collective."""
        states = gather_random_states(self._ctx.device, self._ctx.world_size)
        return {"random": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the random numbers of the interrupted run, on as many ranks as it had."""
        states = state_dict["random"]
        if len(states) == self._ctx.world_size:
            restore_random_state(states[self._ctx.rank], self._ctx.device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to watch for stop requests.

        Raises:
            FitError: another training of this run has the same name.
        """
        if self._step < 0:  # fit may be called again, and continues
            claim_name(self._ctx, self._name, trainer.global_step)
        self._step = trainer.global_step
        self._watch.begin(self._step)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the validation of the epoch before."""
        self._validated = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the loss, save if it is time, leave if a stop was requested; after optimizer steps.

        Raises:
            RunStopped: the run must stop here.
        """
        step = trainer.global_step
        if step == self._step:  # within an accumulation
            return
        self._step = step
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        # Manual optimization may return no loss.
        due = self._ctx.is_main and every and step % every == 0  # a number waits for the GPU
        if due and isinstance(outputs, Mapping) and "loss" in outputs:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            logged = as_numbers({"loss": outputs["loss"], "lr": rate}, self._name)
            self._ctx.log(logged, step=step)
        self._watch.follow(lambda: self._write(trainer), step)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a validation within an epoch, or outside of ``fit``.

        Raises:
            RunStopped: the run must stop here.
        """
        if trainer.sanity_checking:
            return
        self._validated = True
        # At the end of an epoch the report waits for the epoch's training metrics.
        if trainer.state.fn != TrainerFn.FITTING or not trainer.is_last_batch:
            self._save_and_report(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, and report the epoch's metrics if it was validated or nothing validates.

        Raises:
            RunStopped: the run must stop here.
        """
        if self._validated or not trainer.enable_validation:
            self._save_and_report(trainer)
        else:
            self._save(trainer)

    def _save_and_report(self, trainer: Trainer) -> None:
        step = trainer.global_step
        if trainer.state.fn == TrainerFn.FITTING:
            self._save(trainer)
            if step == self._reported:
                return
            self._reported = step
        self._ctx.report(as_numbers(trainer.callback_metrics, self._name), step=step)

    def _save(self, trainer: Trainer) -> None:
        self._watch.save(lambda: self._write(trainer))

    def _write(self, trainer: Trainer) -> None:
        """Write a checkpoint of Lightning's own; all ranks call it."""
        step = trainer.global_step
        path = self._ctx.paths.checkpoints / f"{self._name}-{step:09d}.ckpt"
        trainer.save_checkpoint(path)
        record_checkpoint(self._ctx, path, step, self._name, suffix=".ckpt")
