"""TensorFlow inside ``train``: the plan, one process on all devices, a sweep, what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from frameworks import needs
from kernels import until
from machines import P100, T4, cpu_machine, machine
from records import owner_pid

import nbtoolkit as nb
from nbtoolkit.doctor import held_gpus
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import PlanError
from nbtoolkit.host import Host
from nbtoolkit.search.slots import make_slots

needs_tensorflow = needs("tensorflow", "keras")
SCRIPT = Host(kind="script", reason="a test", working=Path("/tmp"), scratch=Path("/tmp"))
BACKEND = {"distributed.backend": "tensorflow"}
SECONDS = 240


@pytest.fixture(autouse=True)
def keras_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")


# --- the plan ---------------------------------------------------------------------------------


def test_one_process_has_all_equal_devices() -> None:
    plan = make_plan(BACKEND, SCRIPT, machine(T4, T4, P100))
    assert (plan.processes, len(plan.devices), plan.backend) == (1, 2, None)
    assert plan.explain().startswith("plan: 1 process on 2 x Tesla T4 (tensorflow), ")
    assert "  - tensorflow: MirroredStrategy, in one process" in plan.explain()
    assert "strategy" in plan._repr_html_()
    alone = make_plan({**BACKEND, "distributed.world_size": 1}, SCRIPT, machine(T4, T4))
    assert (alone.processes, len(alone.devices)) == (1, 2)


def test_several_ranks_are_refused() -> None:
    two = {**BACKEND, "distributed.world_size": 2}
    for hardware in (machine(T4, T4), cpu_machine()):
        with pytest.raises(PlanError, match=r"world_size is 2, but distributed.backend is tensorf"):
            make_plan(two, SCRIPT, hardware)


def test_a_trial_sees_its_own_device_only() -> None:
    slots = make_slots(nb.load_config(overrides=BACKEND), machine(T4, T4), jobs=8)
    plans = [make_plan(BACKEND, SCRIPT, slot.hardware) for slot in slots.slots]
    assert [len(plan.devices) for plan in plans] == [1, 1]
    assert plans[0].devices != plans[1].devices


# --- what is told -----------------------------------------------------------------------------


def test_a_kernel_in_which_tensorflow_holds_a_gpu_is_named() -> None:
    files = ["/dev/nvidiactl", "/dev/nvidia1", "/dev/nvidia0", "/dev/nvidia0", "/dev/null"]
    (problem,) = held_gpus({"tensorflow", "numpy"}, files)
    assert "has imported TensorFlow and has opened /dev/nvidia0, /dev/nvidia1" in problem
    assert "restart the kernel" in problem
    assert not held_gpus({"numpy"}, files)
    assert not held_gpus({"tensorflow"}, ["/dev/nvidiactl", "/dev/null"])


# --- real processes ---------------------------------------------------------------------------


def fit_function(fails: Path | None = None) -> Callable[..., dict[str, Any]]:
    """A training function for Keras' fit; it fails in the third epoch while ``fails`` exists."""

    def train(config: Any, ctx: Any) -> dict[str, Any]:
        import numpy as np
        import tensorflow as tf

        from nbtoolkit.integrations import keras as nbk

        strategy = nbk.strategy(ctx)

        class Fails(tf.keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                if epoch == 2 and fails is not None and fails.exists():
                    raise OSError("a disk that failed")

        x = np.random.RandomState(0).rand(64, 8).astype("float32")
        data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(16)
        with strategy.scope():
            start = tf.keras.initializers.Zeros()
            model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer=start)])
            model.build((None, 8))
            model.compile(tf.keras.optimizers.Adam(config.optim.lr), "mse")
        done = model.fit(
            data,
            epochs=config.train.epochs,
            verbose=0,
            validation_data=data,
            callbacks=[nbk.callback(ctx), Fails()],
            initial_epoch=nbk.initial_epoch(ctx),
        )
        return {
            "replicas": strategy.num_replicas_in_sync,
            "strategy": type(strategy).__name__,
            "epochs": done.epoch,
            "losses": done.history["loss"],
            "threads": tf.config.threading.get_intra_op_parallelism_threads(),
            "weights": model.get_weights()[0].ravel().tolist(),
        }

    return train


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    own = {"tracking.mlflow": False, "runtime.output_dir": str(folder), "train.epochs": 2}
    return {**BACKEND, **own, "optim.lr": 0.1, **more}


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The run's events of this type."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["type"] == kind]


@needs_tensorflow
@pytest.mark.apart
def test_fit_of_keras_3_on_one_process_reports_resumes_and_stops(tmp_path: Path) -> None:
    fails = tmp_path / "fails"
    train = fit_function(fails)
    whole = nb.launch(train, settings(tmp_path / "whole", **{"train.epochs": 4}))
    assert whole.value["strategy"] == "MirroredStrategy"
    assert whole.value["epochs"] == [0, 1, 2, 3]
    assert whole.value["threads"] == whole.plan.threads_per_rank
    assert whole.metrics["val_loss"] > 0
    fails.touch()
    config = settings(tmp_path / "cut", **{"train.epochs": 4})
    with pytest.raises(OSError, match="a disk that failed"):
        nb.launch(train, config)
    fails.unlink()
    again = nb.launch(train, config)
    assert again.value["epochs"] == [2, 3]
    assert again.value["weights"] == pytest.approx(whole.value["weights"], rel=1e-4)
    # A stop request in an epoch of many batches ends the run between two of them.
    handle = nb.launch(train, settings(tmp_path / "long", **{"train.epochs": 10**6}), wait=False)
    until(lambda: [*(tmp_path / "long").glob("*/checkpoints/last.pt")], "an epoch", SECONDS)
    handle.stop()
    assert handle.result(SECONDS).status == "stopped"


@needs_tensorflow
@pytest.mark.apart
def test_a_sweep_runs_fit_in_each_trial(tmp_path: Path) -> None:
    search = {
        "study": {"metric": "val_loss", "direction": "minimize", "sampler": "grid"},
        "space": {"optim.lr": {"type": "categorical", "choices": [0.1, 1e-6]}},
    }
    study = nb.sweep(fit_function(), settings(tmp_path), search, n_trials=2)
    assert study.status == "completed"
    assert study.best_params == {"optim.lr": 0.1}


PRUNED = {
    "study": {
        "metric": "val_loss",
        "direction": "minimize",
        "pruner": "median",
        "pruner_options": {"n_startup_trials": 1},
    },
    "space": {"optim.lr": {"type": "float", "low": 1e-8, "high": 0.5}},
    "first_trials": [{"optim.lr": rate} for rate in (0.1, 0.1, 1e-8)],
}


@needs_tensorflow
@pytest.mark.apart
def test_a_trial_is_pruned_after_an_epoch(tmp_path: Path) -> None:
    config = settings(tmp_path, **{"train.epochs": 4})
    study = nb.sweep(fit_function(), config, PRUNED, n_trials=3)
    # With two slots the third trial starts when one of the others is done.
    assert list(study.trials["state"]) == ["complete", "complete", "pruned"]
    reported = events(study.paths.folder / study.trials.iloc[2]["folder"], "report")
    assert 1 <= len(reported) < 4


def slow_function(folder: Path) -> Callable[..., Any]:
    """Epochs of 200 batches; all but the first are slow until ``folder / "fast"`` exists."""

    def train(config: Any, ctx: Any) -> Any:
        import time

        import numpy as np
        import tensorflow as tf

        from nbtoolkit.integrations import keras as nbk

        strategy = nbk.strategy(ctx)

        class Slow(tf.keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.slow = epoch > 0 and not (folder / "fast").exists()

            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                if self.slow:
                    (folder / "begun").touch()
                    time.sleep(0.2)

        x = np.random.RandomState(0).rand(64, 8).astype("float32")
        data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True)))
        with strategy.scope():
            model = tf.keras.Sequential([tf.keras.Input((8,)), tf.keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        callbacks = [Slow(), nbk.callback(ctx)]
        batches = data.repeat(50).batch(16)
        first = nbk.initial_epoch(ctx)
        return model.fit(
            batches, epochs=3, verbose=0, callbacks=callbacks, initial_epoch=first
        ).epoch

    return train


@needs_tensorflow
@pytest.mark.apart
def test_a_run_ends_within_an_epoch_and_repeats_it_when_resumed(tmp_path: Path) -> None:
    train, begun = slow_function(tmp_path), tmp_path / "begun"
    config = settings(tmp_path, **{"train.epochs": 3})

    def ended(end: Callable[[nb.RunHandle], object]) -> tuple[nb.RunResult, float]:
        """Start it, end it within the second epoch, and return the seconds that it took to end."""
        begun.unlink(missing_ok=True)
        handle = nb.launch(train, config, wait=False, display="off")
        until(begun.exists, "the second epoch", SECONDS)
        start = time.monotonic()
        end(handle)
        return handle.result(SECONDS), time.monotonic() - start

    def warn_of_the_end(handle: nb.RunHandle) -> None:
        """As a session that is about to end does."""
        os.kill(owner_pid(handle.paths.folder), signal.SIGTERM)

    stopped, took = ended(lambda handle: handle.stop())
    assert (stopped.status, stopped.values) == ("stopped", [])
    assert took < 30  # the rest of the epoch takes 40 s
    late, took = ended(warn_of_the_end)
    assert (late.status, late.paths.folder) == ("deadline", stopped.paths.folder)
    assert took < 30
    # The second epoch is cut off a third time, by a limit.
    limited = {**config, "runtime.time_budget": 20.0}
    budget = nb.launch(train, limited, display="off")
    assert (budget.status, budget.paths.folder) == ("deadline", stopped.paths.folder)
    assert [event["step"] for event in events(budget.paths.folder, "report")] == [200]
    (tmp_path / "fast").touch()
    whole = nb.launch(train, config, display="off")
    assert whole.values == [[1, 2]]
    assert whole.paths.folder == stopped.paths.folder


@needs_tensorflow
@pytest.mark.apart
def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    root = Path(nb.__file__).parents[1]
    page = (root / "docs" / "tensorflow.md").read_text()
    script = tmp_path / "page.py"
    script.write_text("\n".join(re.findall(r"(?ms)^```python\n(.*?)^```$", page)))
    environ = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 process on the CPU (tensorflow)" in done.stdout
