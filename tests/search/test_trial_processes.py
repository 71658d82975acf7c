"""Each trial has processes of its own: no trial sees what another has changed in its process."""

from __future__ import annotations

import builtins
import decimal
import gc
import io
import json
import locale
import logging
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nbtoolkit as nb
from nbtoolkit.launcher.fork_servers import shutdown
from nbtoolkit.run.paths import RunPaths

LR = {"optim.lr": {"type": "float", "low": 1e-4, "high": 1e-1, "log": True}}
ONE_SLOT: dict[str, Any] = {
    "study": {"sampler": "random", "pruner": "none"},
    "space": LR,
    "placement": "all_devices_per_trial",
}

# What a trial may change: an expression that reads it, and a statement that changes it.
STATES = {
    "torch: default dtype": ("torch.get_default_dtype()", "torch.set_default_dtype(torch.float64)"),
    "torch: gradients": ("torch.is_grad_enabled()", "torch.set_grad_enabled(False)"),
    "torch: deterministic algorithms": (
        "torch.are_deterministic_algorithms_enabled()",
        "torch.use_deterministic_algorithms(True)",
    ),
    "torch: matmul precision": (
        "torch.get_float32_matmul_precision()",
        "torch.set_float32_matmul_precision('medium')",
    ),
    "torch: TF32 of cuDNN": (
        "torch.backends.cudnn.allow_tf32",
        "torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32",
    ),
    "torch: benchmark of cuDNN": (
        "torch.backends.cudnn.benchmark",
        "torch.backends.cudnn.benchmark = True",
    ),
    "torch: deterministic cuDNN": (
        "torch.backends.cudnn.deterministic",
        "torch.backends.cudnn.deterministic = True",
    ),
    "torch: flash attention": (
        "torch.backends.cuda.flash_sdp_enabled()",
        "torch.backends.cuda.enable_flash_sdp(False)",
    ),
    "torch: number of threads": (
        "torch.get_num_threads()",
        "torch.set_num_threads(torch.get_num_threads() + 1)",
    ),
    "torch: anomaly detection": (
        "torch.is_anomaly_enabled()",
        "torch.autograd.set_detect_anomaly(True)",
    ),
    "torch: seed": ("torch.initial_seed()", "torch.manual_seed(99)"),
    "torch: print options": (
        "torch._tensor_str.PRINT_OPTS.precision",
        "torch.set_printoptions(precision=9)",
    ),
    "torch: sharing strategy": (
        "torch.multiprocessing.get_sharing_strategy()",
        "torch.multiprocessing.set_sharing_strategy('file_system')",
    ),
    "torch: attribute of a class": ("vars(nn.Linear).get('left')", "nn.Linear.left = 1"),
    "torch: a replaced function": (
        "nn.functional.relu.__name__",
        "nn.functional.relu = nn.functional.gelu",
    ),
    "torch: default device": ("torch.empty(0).device", "torch.set_default_device('meta')"),
    "NumPy: errors": ("np.geterr()", "np.seterr(all='raise')"),
    "NumPy: random numbers": ("np.random.get_state()[1][:3].tolist()", "np.random.seed(99)"),
    "NumPy: print options": (
        "np.get_printoptions()['precision']",
        "np.set_printoptions(precision=3)",
    ),
    "random numbers": ("random.getstate()[1][:3]", "random.seed(99)"),
    "warning filters": (
        "[kept[2].__name__ for kept in warnings.filters]",
        "warnings.filterwarnings('ignore', category=BytesWarning)",
    ),
    "environment variable": ("os.environ.get('LEFT')", "os.environ['LEFT'] = '1'"),
    "working directory": ("os.getcwd()", "os.chdir('/')"),
    "umask": ("umask()", "os.umask(0o077)"),
    "niceness": ("os.nice(0)", "os.nice(1)"),
    "sys.path": ("'/left' in sys.path", "sys.path.append('/left')"),
    "imported module": ("'sndhdr_left' in sys.modules", "sys.modules['sndhdr_left'] = json"),
    "global of a library": ("vars(json).get('left')", "json.left = 1"),
    "global of a module of the user's": ("counter.TRIALS", "counter.TRIALS += 1"),
    "builtin": ("vars(builtins).get('left')", "builtins.left = 1"),
    "signal handler": (
        "str(signal.getsignal(signal.SIGUSR1))",
        "signal.signal(signal.SIGUSR1, signal.SIG_DFL)",
    ),
    "locale": (
        "locale.setlocale(locale.LC_NUMERIC)",
        "locale.setlocale(locale.LC_NUMERIC, 'C.UTF-8')",
    ),
    "log level": ("logging.getLogger().level", "logging.getLogger().setLevel(5)"),
    "log handlers": (
        "len(logging.getLogger().handlers)",
        "logging.getLogger().addHandler(logging.NullHandler())",
    ),
    "decimal places": ("decimal.getcontext().prec", "decimal.getcontext().prec = 7"),
    "garbage collector: thresholds": ("gc.get_threshold()", "gc.set_threshold(1_000_001)"),
    "garbage collector": ("gc.isenabled()", "gc.disable()"),
    "recursion limit": ("sys.getrecursionlimit()", "sys.setrecursionlimit(5000)"),
    "switch interval": ("sys.getswitchinterval()", "sys.setswitchinterval(0.25)"),
    "sys.excepthook": ("sys.excepthook.__name__", "sys.excepthook = print"),
    "sys.displayhook": ("sys.displayhook.__name__", "sys.displayhook = print"),
    "threading.excepthook": ("threading.excepthook.__name__", "threading.excepthook = print"),
    "a thread": (
        "'left' in [thread.name for thread in threading.enumerate()]",
        "threading.Thread(target=threading.Event().wait, name='left', daemon=True).start()",
    ),
    "timeout of sockets": ("socket.getdefaulttimeout()", "socket.setdefaulttimeout(77.0)"),
    "start method": (
        "multiprocessing.get_start_method(allow_none=True)",
        "multiprocessing.set_start_method('spawn', force=True)",
    ),
    "standard output": ("type(sys.stdout).__name__", "sys.stdout = io.StringIO()"),
}
NAMES: dict[str, Any] = {
    "builtins": builtins,
    "decimal": decimal,
    "gc": gc,
    "io": io,
    "json": json,
    "locale": locale,
    "logging": logging,
    "multiprocessing": multiprocessing,
    "nn": nn,
    "np": np,
    "os": os,
    "random": random,
    "signal": signal,
    "socket": socket,
    "sys": sys,
    "threading": threading,
    "torch": torch,
    "warnings": warnings,
}


@pytest.fixture
def config(tmp_path: Path) -> nb.Config:
    overrides = {"runtime.output_dir": str(tmp_path / "out"), "tracking.mlflow": False}
    return nb.load_config(env=None, overrides=overrides)


def umask() -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("Umask"))


def read_states(names: dict[str, Any]) -> dict[str, str]:
    return {name: repr(eval(read, names)) for name, (read, _) in STATES.items()}


def changes_all(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    import counter  # type: ignore[import-not-found]

    names = {**NAMES, "umask": umask, "counter": counter}
    seen = {"before": read_states(names)}
    for _, change in STATES.values():
        exec(change, names)
    seen["after"] = read_states(names)
    (ctx.paths.folder / "seen.json").write_text(json.dumps(seen))
    return {"val_loss": 1.0}


def test_trials_do_not_change_each_other(
    config: nb.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counter.py").write_text("TRIALS = 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = nb.sweep(changes_all, config, ONE_SLOT, n_trials=2, display="off")
    files = [result.paths.folder / f"trials/{number:04d}/seen.json" for number in range(2)]
    first, second = [json.loads(file.read_text()) for file in files]
    unchanged = [name for name in STATES if first["before"][name] == first["after"][name]]
    assert unchanged == [], "the probe itself does not work"
    seen = [name for name in STATES if first["before"][name] != second["before"][name]]
    assert seen == []


def test_each_trial_has_a_process_and_a_log_of_its_own(config: nb.Config) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        print("trial of", os.getpid())
        return {"val_loss": os.getpid()}

    result = nb.sweep(train, config, ONE_SLOT, n_trials=3, display="off")
    logs = [RunPaths(result.paths.folder / f"trials/{n:04d}").log(0) for n in range(3)]
    texts = [log.read_text().strip() for log in logs]
    assert texts == [f"trial of {int(pid)}" for pid in result.trials["value"]]
    assert len(set(texts)) == 3


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


@pytest.mark.long
def test_the_first_trials_of_a_kernel_need_not_import_what_optimizers_need(
    config: nb.Config,
) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        return {"val_loss": float("torch._dynamo" in sys.modules)}

    shutdown()
    result = nb.sweep(train, config, LR, n_trials=2, display="off")
    assert list(result.trials["value"]) == [1.0, 1.0]


def layers_trial(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    data = inputs, (inputs.sum(1) > 0).long()
    layers = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)
    model = nn.Sequential(*layers)
    return nb.fit(ctx, config, model, data, data, loss=nn.functional.cross_entropy)


@pytest.mark.long
def test_a_trial_after_others_trains_as_a_run_of_its_own(config: nb.Config) -> None:
    more = {"distributed.strategy": "fsdp", "distributed.world_size": 2}
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
