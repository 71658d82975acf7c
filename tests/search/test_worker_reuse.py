"""Ranks take one trial after another: what is restored between trials; replacement of ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from kernels import until
from torch import nn

import nbtoolkit as nb
from nbtoolkit.launcher.forkserver_client import fork_server, shutdown
from nbtoolkit.run.paths import RunPaths

LR = {"optim.lr": {"type": "float", "low": 1e-4, "high": 1e-1, "log": True}}
ONE_SLOT: dict[str, Any] = {
    "study": {"sampler": "random", "pruner": "none"},
    "space": LR,
    "placement": "all_devices_per_trial",
}
COUNT = {
    "study": {"sampler": "grid", "pruner": "none"},
    "space": {"model.index": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]},
    "placement": "all_devices_per_trial",
}


@pytest.fixture
def config(tmp_path: Path) -> nb.Config:
    overrides = {"runtime.output_dir": str(tmp_path / "out"), "tracking.mlflow": False}
    return nb.load_config(env=None, overrides=overrides)


def started(train: object, config: nb.Config, trials: int) -> nb.SweepHandle:
    handle: nb.SweepHandle = nb.sweep(
        train, config, ONE_SLOT, n_trials=trials, wait=False, display="off"
    )
    return handle


def phases(folder: Path) -> list[str]:
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event["phase"] for event in events if event["type"] == "rank"]


def test_a_rank_takes_the_next_trial_until_one_fails_on_it(config: nb.Config) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        print("trial of", os.getpid())
        if ctx.paths.folder.name == "0001":
            raise ValueError("this one fails")
        return {"val_loss": os.getpid()}

    result = nb.sweep(train, config, ONE_SLOT, n_trials=4, display="off")
    logs = [RunPaths(result.paths.folder / f"trials/{n:04d}").log(0) for n in range(4)]
    pids = [log.read_text().split("trial of ")[1].split()[0] for log in logs]
    assert pids[0] == pids[1], "it took the second"
    assert pids[1] != pids[2], "it failed"
    assert pids[2] == pids[3]
    assert [log.read_text().count("trial of") for log in logs] == [1] * 4, "each has its own log"
    folders = [result.paths.folder / f"trials/{n:04d}" for n in range(4)]
    assert ["started" in phases(folder) for folder in folders] == [True, False, True, False]


def test_what_a_trial_changes_in_its_process_the_next_one_does_not_see(config: nb.Config) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        import torch

        cudnn = torch.backends.cudnn
        seen = {
            "folder": os.getcwd(),
            "variable": os.environ.get("LEFT_BY_A_TRIAL"),
            "path": "/left/by/a/trial" in sys.path,
            "dtype": str(torch.get_default_dtype()),
            "grad": torch.is_grad_enabled(),
            "threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "benchmark": cudnn.benchmark,
            "device": str(torch.empty(0).device),
            "pid": os.getpid(),
        }
        os.chdir("/")
        os.environ["LEFT_BY_A_TRIAL"] = "1"
        sys.path.append("/left/by/a/trial")
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = not cudnn.benchmark
        torch.set_default_device("meta")
        (ctx.paths.folder / "seen.json").write_text(json.dumps(seen))
        return {"val_loss": 1.0}

    result = nb.sweep(train, config, ONE_SLOT, n_trials=3, display="off")
    seen = [json.loads(file.read_text()) for file in result.paths.folder.glob("trials/*/seen.json")]
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]


def test_a_trial_gets_the_captured_arrays_as_they_were(config: nb.Config) -> None:
    import numpy as np
    import torch

    tensor, array = torch.zeros(10_000), np.zeros(10_000)  # large enough to be mapped, not pickled

    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        seen = float(tensor[0]) + float(array[0])
        tensor[0] += 1
        array[0] += 1
        return {"val_loss": seen, "pid": os.getpid()}

    result = nb.sweep(train, config, ONE_SLOT, n_trials=3, display="off")
    assert result.trials["value"].tolist() == [0.0, 0.0, 0.0]


def test_cycles_are_freed_and_what_the_first_trial_imported_is_scanned_once(
    config: nb.Config,
) -> None:
    class Model:
        pass

    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        import gc
        import sqlite3.dbapi2  # noqa: F401
        import weakref

        before = vars(json).get("left_by_a_trial")
        alive = before is not None and before() is not None
        model = Model()
        model.itself = model  # type: ignore[attr-defined]
        vars(json)["left_by_a_trial"] = weakref.ref(model)
        return {"val_loss": float(alive), "frozen": gc.get_freeze_count()}

    result = nb.sweep(train, config, ONE_SLOT, n_trials=3, display="off")
    assert result.trials["value"].tolist() == [0.0, 0.0, 0.0]
    files = [result.paths.folder / f"trials/{n:04d}/result.json" for n in range(3)]
    first, second, third = [json.loads(one.read_text())["metrics"]["frozen"] for one in files]
    assert first < second, "frozen after the first trial"
    assert third <= second, "and only then"


@pytest.mark.long
def test_a_rank_that_grows_with_each_trial_is_replaced(config: nb.Config) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        vars(json).setdefault("kept_by_a_test", []).append(bytearray(b"x") * 400_000_000)
        return {"val_loss": os.getpid()}

    result = nb.sweep(train, config, ONE_SLOT, n_trials=5, display="off")
    pids = [int(pid) for pid in result.trials["value"]]
    assert len(set(pids)) == 2
    assert pids[0] == pids[1], "growth is measured from the first trial on"


def paused(handle: nb.SweepHandle) -> int:
    """The rank that waits, once a paused sweep runs nothing."""
    log = handle.paths.folder / "trials/0000/result.json"
    until(log.exists, "the first trial")
    handle.pause()
    until(lambda: not running(handle.paths.folder), "the end of those that run")
    done = sorted(handle.paths.folder.glob("trials/*/result.json"))
    return int(json.loads(done[-1].read_text())["metrics"]["val_loss"])


def running(folder: Path) -> list[Path]:
    return [trial for trial in folder.glob("trials/*") if not (trial / "result.json").exists()] or (
        [folder] if '"pause"' not in (folder / "events.jsonl").read_text() else []
    )


def slow(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    time.sleep(0.1)
    return {"val_loss": os.getpid()}


def test_a_rank_that_died_while_it_waited_costs_nothing(config: nb.Config) -> None:
    handle = started(slow, config, 8)
    waiting = paused(handle)
    os.kill(waiting, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(waiting), "its end")
    handle.resume()
    result = handle.result()
    assert list(result.trials["state"]) == ["complete"] * 8
    assert int(result.trials["value"].iloc[-1]) != waiting


def test_a_rank_that_waits_leaves_with_a_stopped_sweep(config: nb.Config) -> None:
    handle = started(slow, config, 1000)
    waiting = paused(handle)
    assert psutil.pid_exists(waiting)
    handle.stop()
    assert handle.result().status == "stopped"
    until(lambda: not psutil.pid_exists(waiting), "its end")


@pytest.mark.long
def test_each_trial_can_compile_its_model(config: nb.Config) -> None:
    """torch compiles a function for eight models at most, and runs it eagerly from then on."""

    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        import torch
        from torch import nn

        compiled: list[object] = []

        def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
            compiled.append(graph)
            return graph.forward

        width = config.model.index + 2
        model = torch.compile(nn.Linear(width, 1), backend=backend)
        model(torch.ones(3, width)).sum().backward()
        return {"val_loss": float(len(compiled))}

    result = nb.sweep(train, config, COUNT, n_trials=10, display="off")
    assert [value >= 1 for value in result.trials["value"]] == [True] * 10


@pytest.mark.long
def test_the_first_trials_of_a_kernel_need_not_import_what_optimizers_need(
    config: nb.Config,
) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        return {"val_loss": float("torch._dynamo" in sys.modules)}

    shutdown()
    result = nb.sweep(train, config, LR, n_trials=2, display="off")
    assert list(result.trials["value"]) == [1.0, 1.0]


def test_schedulers_are_forked_with_the_imports_of_a_sweep(config: nb.Config) -> None:
    """Each scheduler would spend 0.1 s on them, before its first trial."""
    shutdown()
    nb.sweep(lambda config, ctx: {"val_loss": 1.0}, config, ONE_SLOT, n_trials=1, display="off")
    # The imports of a sweep load it, with every version of Optuna; a launch's do not.
    maps = Path(f"/proc/{fork_server().pid}/maps").read_text()
    assert "_statistics" in maps or "_statistics" in sys.builtin_module_names


def layers_trial(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    data = inputs, (inputs.sum(1) > 0).long()
    layers = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)
    model = nn.Sequential(*layers)
    return nb.fit(ctx, config, model, data, data, loss=nn.functional.cross_entropy)


def test_a_trial_that_leaves_its_process_group_does_not_take_it_from_the_next_one(
    config: nb.Config,
) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.barrier()
        dist.destroy_process_group()
        return {"val_loss": os.getpid()}

    config = config.with_overrides({"distributed.world_size": 2})
    result = nb.sweep(train, config, ONE_SLOT, n_trials=4, display="off")
    assert list(result.trials["state"]) == ["complete"] * 4
    assert len(set(result.trials["value"])) == 1, "in the same ranks"


# DeepSpeed takes some seconds to import; make test-cluster installs it.
DEEPSPEED = pytest.param("deepspeed", marks=pytest.mark.cluster)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline", DEEPSPEED])
def test_a_trial_after_others_in_its_ranks_trains_as_a_run_of_its_own(
    config: nb.Config, strategy: str
) -> None:
    if find_spec("deepspeed") is None and strategy == "deepspeed":
        pytest.skip("NOT TESTED: DeepSpeed is not installed (make test-cluster)")
    more = {"distributed.strategy": strategy, "distributed.world_size": 2}
    sizes = {"train.epochs": 3, "train.batch_size": 16, "train.gradient_accumulation_steps": 2}
    config = config.with_overrides({**more, **sizes})
    study = {"pruner": "median", "pruner_options": {"n_startup_trials": 1}}
    rates = [{"optim.lr": rate} for rate in (1e-3, 1e-4, 1e-2)]
    source = {**ONE_SLOT, "study": {**ONE_SLOT["study"], **study}, "first_trials": rates}
    result = nb.sweep(layers_trial, config, source, n_trials=3, display="off")
    assert list(result.trials["state"]) == ["complete", "pruned", "complete"]
    alone = nb.launch(layers_trial, config.with_overrides({"optim.lr": 1e-2}), display="off")
    assert result.best_params == {"optim.lr": 1e-2}
    assert result.best_value == alone.metrics["val_loss"]
