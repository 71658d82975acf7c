"""Run a Hugging Face ``Trainer`` inside ``train(config, ctx)``, on every rank.

from nbtoolkit.integrations import transformers as nbt

arguments = nbt.training_arguments(ctx, eval_strategy="epoch")
trainer = Trainer(model, arguments, train_dataset=train_data, eval_dataset=valid_data)
trainer.train(resume_from_checkpoint=nbt.resume_from(ctx))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbtoolkit.errors import RunStopped
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
from nbtoolkit.worker.collectives import broadcast
from nbtoolkit.worker.context import RunContext
from nbtoolkit.worker.watch import Watch

with requires("transformers", "4.50"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.integrations import integration_utils


def training_arguments(
    ctx: RunContext, *, name: str = "trainer", **overrides: Any
) -> TrainingArguments:
    """``transformers.TrainingArguments`` with what the plan decides.

    The ``Trainer`` that gets them has :func:`callback` through ``report_to``, as it has those of
    other trackers.

    Args:
        ctx: the run's context.
        name: of this training; for several in one run. It precedes the names of the metrics.
        overrides: replace the values from the plan, or are added. A relative ``output_dir`` is
            below the run's ``checkpoints`` folder; trackers in ``report_to`` are added.

    Raises:
        LaunchError: called outside of ``train``.
        PlanError: the plan has a strategy of ``nb.fit`` alone.
    """
    check_inside_train(ctx, "training_arguments")
    check_strategy(ctx, "transformers' Trainer")
    plan = ctx.plan
    keeps = ctx.config.checkpoint
    reporters = overrides.pop("report_to", "none")
    tools: Any = integration_utils  # partly without annotations
    if reporters in ("all", ["all"]):
        reporters = tools.get_available_reporting_integrations()
    others = [reporters] if isinstance(reporters, str) else list(reporters)
    # A name for the Trainer, as "wandb" is one: it makes its callbacks from this table.
    reporter = "nbtoolkit"
    folder = ctx.paths.checkpoints
    if name != "trainer":
        reporter = f"nbtoolkit-{name}"
        folder = folder / name
    tools.INTEGRATION_TO_CALLBACK[reporter] = callback(ctx, name=name)
    evaluates = str(
        getattr(overrides.get("eval_strategy"), "value", overrides.get("eval_strategy", "no"))
    )
    # As the evaluations, which load_best_model_at_end requires; else after each epoch.
    saves = evaluates if evaluates in ("steps", "epoch") else "epoch"
    arguments: dict[str, Any] = {
        "use_cpu": ctx.device.type == "cpu",
        "fp16": plan.precision == "fp16",
        "bf16": plan.precision == "bf16",
        "per_device_train_batch_size": plan.batch_size_per_device,
        "gradient_accumulation_steps": plan.accumulate,
        "ddp_find_unused_parameters": plan.ddp.get("find_unused_parameters", False),
        "ddp_timeout": int(plan.group_timeout),
        "seed": ctx.seed,
        "save_strategy": saves if keeps.enabled else "no",
        "save_steps": overrides.get("eval_steps") or 500,
        "save_total_limit": max(2, keeps.keep_last),
        "disable_tqdm": True,
    }
    folder /= overrides.pop("output_dir", "")
    reports = [*(other for other in others if other not in ("none", reporter)), reporter]
    return TrainingArguments(output_dir=str(folder), report_to=reports, **arguments | overrides)


def callback(ctx: RunContext, *, name: str = "trainer") -> TransformersCallback:
    """Return the callback that reports and stops, for a ``Trainer`` with arguments of your own.

    A ``Trainer`` with :func:`training_arguments` has one.

    Args:
        ctx: the run's context.
        name: of this training; for several in one run.
    """
    check_inside_train(ctx, "callback")
    return TransformersCallback(ctx, name)


class TransformersCallback(TrainerCallback):
    """Reports evaluations, logs losses, records checkpoints, and stops on request within an epoch.

    The ``Trainer`` writes the checkpoints: by its ``save_strategy``, and where this asks for one.

    Args:
        ctx: the run's context.
        name: of the training.
    """

    def __init__(self, ctx: RunContext, name: str) -> None:
        self._ctx = ctx
        self._watch = Watch(ctx)
        self._name = name
        self._leaving: RunStopped | None = None
        self._training = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start to watch for stop requests.

        Raises:
            FitError: another training of this run has the same name.
        """
        if not self._training:  # the Trainer may try again, with a smaller batch
            claim_name(self._ctx, self._name, state.global_step)
        self._watch.begin(state.global_step)
        self._training = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Ask for a checkpoint if it is time, or if a stop was requested.

        Raises:
            RunStopped: the run must stop here, and cannot be resumed.
        """
        decision = self._watch.decide(state.global_step)
        if decision.status is not None:
            self._leave(RunStopped(decision.status), control)
        elif self._leaving is not None or decision.save:
            control.should_save = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Log a training loss with what the Trainer logs beside it."""
        if logs and "loss" in logs:
            self._ctx.log(as_numbers(logs, self._name), step=state.global_step)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Report an evaluation.

        Raises:
            RunStopped: the run must stop here, and there is nothing to save.
        """
        try:
            # The Trainer has gathered the metrics; each rank has measured its own speed.
            numbers = broadcast(as_numbers(metrics or {}, self._name), self._ctx.world_size)
            self._ctx.report(numbers, step=state.global_step)
        except RunStopped as stopped:
            self._leave(stopped, control)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Record the checkpoint, which is on disk; leave if a stop was requested.

        Raises:
            RunStopped: the run must stop here.
        """
        path = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        record_checkpoint(self._ctx, path, state.global_step, self._name)
        self._watch.times.saved()
        self._leave_now()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Leave if a stop was requested at the last step, and nothing was saved since.

        Raises:
            RunStopped: the run must stop here.
        """
        self._training = False
        self._leave_now()

    def _leave(self, stopped: RunStopped, control: TrainerControl) -> None:
        """Leave at once, or after the checkpoint that the Trainer writes next."""
        self._leaving = stopped
        if stopped.status == "pruned" or not self._watch.times.enabled or not self._training:
            self._leave_now()
        control.should_save = True

    def _leave_now(self) -> None:
        leaving = self._leaving
        self._leaving = None
        if leaving is not None:
            raise leaving
