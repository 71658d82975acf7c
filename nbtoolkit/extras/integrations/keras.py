"""Run Keras' ``model.fit`` inside ``train(config, ctx)``, on one rank.

os.environ["KERAS_BACKEND"] = "torch"  # in a cell, before the first import of keras

from nbtoolkit.integrations import keras as nbk

model.fit(x, y, epochs=15, callbacks=[nbk.callback(ctx)], initial_epoch=nbk.initial_epoch(ctx))

With TensorFlow as the back end, a ``MirroredStrategy`` trains on all devices of the plan:

with nbk.strategy(ctx).scope():  # first of all
    model = ...
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nbtoolkit.errors import FitError, MissingExtra
from nbtoolkit.extras.integrations.support import (
    as_numbers,
    check_inside_train,
    check_name_unused,
    claim_name,
    record_checkpoint,
    recorded_trainings,
    refuse_ranks,
    requires,
)
from nbtoolkit.extras.integrations.support import last_checkpoint as last_checkpoint
from nbtoolkit.training.checkpoints import gather_random_states, restore_random_state
from nbtoolkit.worker.context import RunContext
from nbtoolkit.worker.watch import Watch


def chosen_backend() -> str:
    """Return the back end of ``import keras``: ``KERAS_BACKEND``, or that of Keras' own file."""
    file = Path(os.environ.get("KERAS_HOME", Path.home() / ".keras")) / "keras.json"
    stored = json.loads(file.read_text()).get("backend") if file.exists() else None
    return os.environ.get("KERAS_BACKEND") or stored or "tensorflow"


def check_backend() -> None:
    """Check, before Keras is imported, that its back end is installed.

    Raises:
        MissingExtra: it is not; Keras would raise a ModuleNotFoundError, and keep its choice.
    """
    name = chosen_backend()
    if "keras" not in sys.modules and find_spec("keras") and find_spec(name) is None:
        raise MissingExtra(
            f"Keras would use its back end {name!r} (KERAS_BACKEND), which is not installed",
            allowed="'torch', which nbtoolkit needs anyway, or another installed back end",
            do="set os.environ['KERAS_BACKEND'] = 'torch' before the first import of keras",
        )


with requires("keras", "3.3"):
    check_backend()
    import keras


def strategy(ctx: RunContext) -> Any:
    """Make TensorFlow's ``MirroredStrategy`` over the plan's devices, before other TensorFlow.

    TensorFlow then takes a GPU's memory as it needs it, not all at once, and as many CPU threads
    as the plan says.

    Args:
        ctx: the run's context.

    Raises:
        FitError: TensorFlow has opened its devices already.
        LaunchError: called outside of ``train``.
        MissingExtra: TensorFlow is not installed.
        PlanError: there are several ranks.
    """
    check_inside_train(ctx, "strategy")
    refuse_ranks(ctx, "TensorFlow")
    with requires("tensorflow", "2.16"):
        import tensorflow
    try:
        for gpu in tensorflow.config.list_physical_devices("GPU"):
            tensorflow.config.experimental.set_memory_growth(gpu, True)
        threads = ctx.plan.threads_per_rank
        tensorflow.config.threading.set_intra_op_parallelism_threads(threads)
        tensorflow.random.set_seed(ctx.seed)
        return tensorflow.distribute.MirroredStrategy()
    except RuntimeError as error:
        raise FitError(
            f"TensorFlow has opened its devices before nbk.strategy(ctx): {error}",
            allowed="nbk.strategy(ctx) before the first tensor, variable or model of TensorFlow",
            do="move it to the first line of train, and make tensors and models after it",
        ) from error


def initial_epoch(ctx: RunContext, *, name: str = "trainer") -> int:
    """Return the epoch at which ``model.fit`` begins: 0, or that of a resumed run.

    Args:
        ctx: the run's context.
        name: of this training; for several in one run.

    Raises:
        FitError: another training of this run has the same name.
        LaunchError: called outside of ``train``.
    """
    check_inside_train(ctx, "initial_epoch")
    check_name_unused(ctx, name)
    return int(recorded_trainings(ctx).get(name, {"epoch": 0})["epoch"])


def callback(ctx: RunContext, *, name: str = "trainer") -> KerasCallback:
    """Return the callback of ``model.fit`` that reports, saves, stops and loads.

    Args:
        ctx: the run's context.
        name: of this training; for several in one run. It precedes the names of the metrics.

    Raises:
        FitError: another training of this run has the same name.
        LaunchError: called outside of ``train``.
        PlanError: there are several ranks, which Keras 3 cannot train together.
    """
    check_inside_train(ctx, "callback")
    refuse_ranks(ctx, "Keras 3")
    return KerasCallback(ctx, name)


class KerasCallback(keras.callbacks.Callback):
    """Reports each epoch's logs, saves, and stops on request within an epoch.

    Checkpoints are ``checkpoints/<name>-<step>.weights.h5``, the weights of model and optimizer.

    Args:
        ctx: the run's context.
        name: of the training.
    """

    def __init__(self, ctx: RunContext, name: str) -> None:
        super().__init__()
        self._ctx = ctx
        self._watch = Watch(ctx)
        self._name = name
        self._step = 0
        self._epoch = initial_epoch(ctx, name=name)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Load the last checkpoint, and say which back end trains.

        Raises:
            FitError: the model has no weights yet to load a checkpoint into, or another training
                of this run has the same name.
        """
        claim_name(self._ctx, self._name)
        model = self.model
        state = recorded_trainings(self._ctx).get(self._name)
        backend = keras.config.backend()
        policy = keras.config.dtype_policy().name
        self._ctx.message(f"Keras {keras.__version__} trains on its back end {backend} in {policy}")
        if state is not None:
            if not model.built:
                raise FitError(
                    "the run resumes, and the model is not built: it has no weights yet",
                    allowed="a model with an Input layer, or after model.build(shape)",
                    do="call the model on one batch before model.fit",
                )
            strategy = getattr(model, "distribute_strategy", None)  # of TensorFlow
            with contextlib.nullcontext() if strategy is None else strategy.scope():
                if not model.optimizer.built:
                    model.optimizer.build(model.trainable_variables)
                model.load_weights(last_checkpoint(self._ctx, name=self._name))
            restore_random_state(state["random"][0], self._ctx.device)
        self._step = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
        self._watch.begin(self._step)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Check that a resumed run does not repeat epochs.

        Raises:
            FitError: ``model.fit`` has no ``initial_epoch``.
        """
        if epoch < self._epoch:
            raise FitError(
                f"the run resumes with epoch {self._epoch}, and model.fit begins with {epoch}",
                allowed=f"initial_epoch={self._epoch}",
                do="call model.fit(..., initial_epoch=nbk.initial_epoch(ctx))",
            )
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save if it is time, and leave if a stop was requested.

        Raises:
            RunStopped: the run must stop here; a resumed run repeats this epoch.
        """
        self._step += 1
        self._watch.follow(lambda: self._save(self._epoch), self._step)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save, and report the epoch's logs.

        Raises:
            RunStopped: the run must stop here.
        """
        self._epoch = epoch + 1
        self._watch.save(lambda: self._save(self._epoch))
        self._ctx.report(as_numbers(logs or {}, self._name), step=self._step)

    def _save(self, epoch: int) -> None:
        """Save the weights; a resumed run begins with ``epoch``."""
        path = self._ctx.paths.checkpoints / f"{self._name}-{self._step:09d}.weights.h5"
        partial = path.with_name(f".{path.name}")  # the name must end in .weights.h5
        path.parent.mkdir(parents=True, exist_ok=True)
        self.model.save_weights(partial, overwrite=True)
        partial.replace(path)
        more = {"epoch": epoch, "random": gather_random_states(self._ctx.device, 1)}
        record_checkpoint(self._ctx, path, self._step, self._name, suffix=".weights.h5", **more)
