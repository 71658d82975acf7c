"""Train with TensorFlow inside ``train(config, ctx)``, on one process or on several workers.

config = nb.load_config(overrides={"distributed.backend": "tensorflow"})

from nbtoolkit.integrations import tensorflow as nbtf

strategy = nbtf.strategy(ctx)  # first of all
with strategy.scope():
    model = ...
model.fit(data, epochs=15, callbacks=[nbtf.callback(ctx)])
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import FitError, MissingExtra
from nbtoolkit.integrations.support import as_numbers, claim_name, record_checkpoint
from nbtoolkit.worker.collectives import gather_on_all
from nbtoolkit.worker.context import RunContext
from nbtoolkit.worker.watch import Watch

if TYPE_CHECKING:
    import tensorflow as tf


def strategy(ctx: RunContext) -> tf.distribute.Strategy:
    """Make TensorFlow's strategy for this rank; **all** ranks call it, before other TensorFlow.

    One process has a ``MirroredStrategy`` over the plan's devices. With several, each is a worker
    of a ``MultiWorkerMirroredStrategy`` with its own device; ``TF_CONFIG`` is set for it, with
    addresses on loopback, although TensorFlow's server listens on all interfaces. TensorFlow takes
    a GPU's memory as it needs it, not all at once.

    Args:
        ctx: the run's context.

    Raises:
        MissingExtra: TensorFlow is not installed.
        FitError: there are several ranks without ``distributed.backend: tensorflow``, or TensorFlow
            has opened its devices already.
    """
    tensorflow = _tensorflow()
    if ctx.world_size > 1 and ctx.plan.strategy != "tensorflow":
        raise FitError(
            f"{ctx.world_size} ranks were started for torch ({ctx.plan.strategy})",
            allowed="TensorFlow on several ranks with distributed.backend: tensorflow",
            do='set it: nb.load_config(overrides={"distributed.backend": "tensorflow"})',
        )
    try:
        _set_devices(tensorflow, ctx)
        tensorflow.random.set_seed(ctx.seed)
        if ctx.world_size == 1:
            return tensorflow.distribute.MirroredStrategy()
        return _connected(ctx.rank, ctx.world_size)
    except RuntimeError as error:
        raise FitError(
            f"TensorFlow has opened its devices before nbtf.strategy(ctx): {error}",
            allowed="nbtf.strategy(ctx) before the first tensor, variable or model of TensorFlow",
            do="move it to the first line of train, and make tensors and models after it",
        ) from error


def callback(ctx: RunContext, *, name: str = "trainer") -> Any:
    """A callback for ``model.fit``: reports, stops, saves and resumes, by Keras' own files.

    After each epoch it saves (Keras' ``BackupAndRestore``, in ``checkpoints/<name>``) and reports
    the epoch's numbers to ``ctx.report``, which may end the run. A stop request and the deadline
    also end it between two batches (several workers agree about once a second). A resumed run
    continues after the last saved epoch, and repeats one that was cut off.

    Args:
        ctx: the run's context.
        name: of this training; for several in one run. It precedes the names of the metrics.

    Raises:
        MissingExtra: TensorFlow is not installed.
        FitError: Keras 3 on several workers, whose ``fit`` fails there. Raised by this call, or at
            the begin of ``fit`` for a model of another Keras, or a second training of this name.
    """
    # tf_keras is also imported without TF_USE_LEGACY_KERAS.
    keras = sys.modules.get("tf_keras") or _tensorflow().keras
    saves, base = ctx.config.checkpoint.enabled, keras.callbacks.Callback
    if ctx.world_size > 1 and base.__module__.split(".")[0] != "tf_keras":
        raise FitError(
            f"the fit of Keras 3 does not work on {ctx.world_size} workers "
            "(MultiWorkerMirroredStrategy): it fails on the first batch",
            allowed="tf-keras on several workers; Keras 3 on one process with all devices",
            do="set os.environ['TF_USE_LEGACY_KERAS'] = '1' before the import of TensorFlow (pip "
            "install tf-keras), or remove distributed.world_size, or write the loop with "
            "strategy.run",
        )

    options: dict[str, Any] = {}
    folder = ctx.paths.checkpoints / name
    if saves:
        base = keras.callbacks.BackupAndRestore
        options = {"backup_dir": str(folder), "delete_checkpoint": False}

    class TensorFlowCallback(base):  # type: ignore[misc, valid-type] # of the Keras that is in use
        """Saves, then reports, after each epoch."""

        def __init__(self) -> None:
            super().__init__(**options)
            self._watch, self._batches = Watch(ctx), 0

        def set_model(self, model: Any) -> None:
            if not isinstance(model, keras.Model):
                raise FitError(
                    f"the model is of {type(model).__mro__[-2].__module__.split('.')[0]}, and the "
                    f"callback of {base.__module__.split('.')[0]}",
                    allowed="one Keras in a run",
                    do="import only one of keras and tf_keras before nbtf.callback(ctx)",
                )
            super().set_model(model)

        def _implements_train_batch_hooks(self) -> bool:
            return True

        def on_train_begin(self, logs: Any = None) -> None:
            claim_name(ctx, name)
            self._watch.begin(0)
            super().on_train_begin(logs)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            super().on_train_batch_end(batch, logs)
            self._batches += 1
            self._watch.follow(lambda: None, self._batches)  # Keras saves only whole epochs

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_end(epoch, logs)
            if saves:
                record_checkpoint(ctx, folder, epoch + 1, name)
            ctx.report(as_numbers(logs or {}, name), step=epoch + 1)

    return TensorFlowCallback()


def _tensorflow() -> Any:
    try:
        return importlib.import_module("tensorflow")
    except ImportError as error:
        raise MissingExtra(
            f"TensorFlow cannot be imported: {error}",
            do="pip install tensorflow tf-keras (tensorflow-cpu where there is no GPU)",
        ) from error


def _set_devices(tensorflow: Any, ctx: RunContext) -> None:
    """Set this rank's GPUs, their memory and the CPU threads; the same again changes nothing."""
    config = tensorflow.config
    gpus = config.list_physical_devices("GPU")  # CUDA_VISIBLE_DEVICES has those of the plan
    if ctx.world_size > 1:
        gpus = gpus[ctx.local_rank : ctx.local_rank + 1]
        config.set_visible_devices(gpus, "GPU")
    for gpu in gpus:
        config.experimental.set_memory_growth(gpu, True)
    config.threading.set_intra_op_parallelism_threads(ctx.plan.threads_per_rank)


@cache
def _connected(rank: int, world_size: int) -> Any:
    """Set TF_CONFIG, with a free port for each worker, and connect the workers.

    Once in a process, which may run the trials of a sweep in turn: in a second strategy of workers,
    the first variable waits for ever (TensorFlow 2.21).
    """
    with socket.socket() as free:  # on all interfaces, as TensorFlow's server, which has no choice
        free.bind(("", 0))
        ports = gather_on_all(free.getsockname()[1], world_size)  # each is held until all are
    workers = [f"127.0.0.1:{port}" for port in ports]
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    return _tensorflow().distribute.MultiWorkerMirroredStrategy()
