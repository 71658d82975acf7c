"""Training functions for tests of launches. Imports little, since every rank imports it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

HANG = 240.0
"""Seconds that only a hang reaches, and less than a test may take in all."""

# --- that end well ---


def ranks(config: Any, ctx: Any) -> dict[str, Any]:
    return {"rank": ctx.rank, "world_size": ctx.world_size, "pid": os.getpid()}


def reports(config: Any, ctx: Any) -> dict[str, float]:
    """What a small training does: log, report, save, return."""
    for step in range(3):
        ctx.log({"loss": 1.0 / (step + 1)}, step=step)
        ctx.report({"accuracy": 0.25 * (step + 1)}, step=step)
    ctx.save({"weight": 3.0}, step=2)
    return {"accuracy": 0.75, "seed": float(config.seed)}


def logs_much(config: Any, ctx: Any) -> int:
    for step in range(config.model.steps):
        ctx.log({"loss": 1.0}, step=step)
    return int(config.model.steps)


def precision_and_sum(config: Any, ctx: Any) -> dict[str, Any]:
    """What the plan decided, as accelerate sees it, and a sum over the ranks."""
    import torch

    ours = torch.tensor([float(ctx.rank + 1)])
    total = ctx.accelerator.reduce(ours).item()
    return {
        "precision": ctx.accelerator.mixed_precision,
        "processes": ctx.accelerator.num_processes,
        "sum": total,
        "threads": torch.get_num_threads(),
        "device": ctx.accelerator.device.type,
    }


def draws(config: Any, ctx: Any) -> list[float]:
    import random

    import numpy as np
    import torch

    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


def surroundings(config: Any, ctx: Any) -> dict[str, Any]:
    return {"cwd": os.getcwd(), "path": list(sys.path), "environ": dict(os.environ)}


def prints(config: Any, ctx: Any) -> None:
    for n in range(200):
        print("line", n, "of rank", ctx.rank, "end")
    os.write(2, b"straight to the descriptor\n")


def floods(config: Any, ctx: Any) -> None:
    for n in range(100_000):
        print(f"{n:06d}", "x" * 93)
    print("the last line")


def draws_bars_and_displays(config: Any, ctx: Any) -> None:
    from IPython.display import HTML
    from IPython.display import display as show
    from tqdm import notebook
    from tqdm.auto import tqdm, trange

    for _ in tqdm(range(3), desc="auto bar"):
        pass
    for _ in notebook.tqdm(range(3), desc="notebook bar"):
        pass
    for _ in trange(3, desc="range bar"):
        pass
    show({"shown": "by import"})
    display({"shown": "as in a cell"})  # noqa: F821  (a builtin in notebooks)
    show(HTML("<b>bold</b>"))


def caches(config: Any, ctx: Any) -> tuple[float, bool]:
    import torch

    marks = Path(config.model.marks)

    def build() -> Any:
        (marks / f"built-{ctx.rank}-{time.time_ns()}").touch()
        return {"x": torch.arange(1000.0)}

    x = ctx.cached("numbers", build)["x"]
    x += ctx.rank  # stays private
    return float(x[0]), len(list(marks.iterdir())) == 1


def prepares(config: Any, ctx: Any) -> dict[str, Any]:
    """An own loop: global batches of 8 over all ranks."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(16.0).reshape(16, 1))
    batch = config.model.get("batch", 8)
    model, loader = ctx.prepare(torch.nn.Linear(1, 1), DataLoader(data, batch_size=batch))
    sizes = []
    for (x,) in loader:
        loss = model(x).square().mean()
        ctx.accelerator.backward(loss)
        sizes.append(len(x))
    gradient = next(model.parameters()).grad
    return {"sizes": sizes, "gradient": float(gradient)}


# --- that run until they are stopped ---


def says_it_is_up(ctx: Any) -> None:
    """Leave a file with this rank's pid in the run's folder."""
    path = Path(ctx.paths.folder) / f"up-{ctx.rank}"
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


def saves_then_waits(config: Any, ctx: Any) -> dict[str, Any]:
    """Save a checkpoint in the first attempt and wait to be ended; in the second, go on from it."""
    state = ctx.load()
    if state is None:
        ctx.save({"epoch": 3})
        says_it_is_up(ctx)
        _until_gone()
    return {"epoch": state["epoch"]}


def saves_then_waits_for_file(config: Any, ctx: Any) -> str:
    ctx.save({"epoch": 3})
    says_it_is_up(ctx)
    return waits_for_file(config, ctx)


def waits_for_file(config: Any, ctx: Any) -> str:
    says_it_is_up(ctx)
    go = Path(config.model.go)
    limit = time.monotonic() + HANG
    while time.monotonic() < limit:
        # a file that is being written is there before its text is
        if go.exists() and (text := go.read_text()):
            return text
        time.sleep(0.02)
    raise TimeoutError(f"nothing was written to {go}")


def loads_late(config: Any, ctx: Any) -> bool:
    """Rank 1 comes to its load when rank 0 has come to its save; whether it found a state."""
    saves = Path(ctx.paths.folder) / "rank-0-saves"
    limit = time.monotonic() + HANG
    while ctx.rank == 1 and not saves.exists():
        assert time.monotonic() < limit, "rank 0 never came to its save"
        time.sleep(0.01)
    # for rank 0 to get from its file into the save: too short a time only proves less
    time.sleep(0.2 * ctx.rank)
    found = ctx.load() is not None
    saves.touch()
    ctx.save({"epoch": 1})
    return found


def saves_then_leaves(config: Any, ctx: Any) -> str:
    """Save, then report until asked to leave; return at once where a checkpoint is found."""
    if ctx.load() is not None:
        return "went on"
    ctx.save({"epoch": 1})
    while True:
        ctx.report({"epoch": 1})
        time.sleep(0.05)


def reports_until_stopped(config: Any, ctx: Any) -> None:
    says_it_is_up(ctx)
    limit = time.monotonic() + HANG
    while time.monotonic() < limit:
        time.sleep(0.05)
        ctx.report({"time": time.monotonic()})


def sleeps(config: Any, ctx: Any) -> None:
    says_it_is_up(ctx)
    _until_gone()


def sleeps_with_helpers(config: Any, ctx: Any) -> None:
    """Each rank with two busy DataLoader workers, whose pids it leaves in the run's folder."""
    from torch.utils.data import DataLoader

    loader = DataLoader(_Slow(), num_workers=2, batch_size=None)
    batches = iter(loader)
    helpers = Path(ctx.paths.folder) / f"helpers-{ctx.rank}"
    helpers.write_text(" ".join(str(int(next(batches))) for _ in range(2)))
    says_it_is_up(ctx)
    _until_gone()


class _Slow:
    """A data set whose items are the pids of the workers that load them."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        if index > 1:
            time.sleep(HANG)
        return os.getpid()


def _until_gone() -> None:
    time.sleep(HANG)
    raise TimeoutError(f"nobody ended this rank within {HANG:g} s")


# --- that fail ---


def fails_in_all_reduce(config: Any, ctx: Any) -> None:
    import torch
    import torch.distributed as dist

    if ctx.rank == 1:
        raise ValueError("wrong on rank 1")
    dist.all_reduce(torch.ones(1))


def fails_in_store_wait(config: Any, ctx: Any) -> None:
    from torch.distributed.distributed_c10d import _get_default_store

    if ctx.rank == 1:
        raise ValueError("wrong on rank 1")
    _get_default_store().wait(["never set"])


def fails_in_barrier(config: Any, ctx: Any) -> None:
    import torch.distributed as dist

    if ctx.rank == 1:
        raise ValueError("wrong on rank 1")
    dist.barrier()


class OwnInit(Exception):
    """An exception that cannot be made again from its ``args``."""

    def __init__(self, code: int, *, extra: list[int]) -> None:
        super().__init__(f"code {code}")
        self.code, self.extra = code, extra


def fails_with_own_init(config: Any, ctx: Any) -> None:
    try:
        {}["missing"]
    except KeyError as error:
        raise OwnInit(3, extra=[1, 2]) from error


def fails_with_file(config: Any, ctx: Any) -> None:
    open("/no/such/file").close()


def fails_with_decode(config: Any, ctx: Any) -> None:
    b"\xff".decode("utf-8")


def fails_with_lock_inside(config: Any, ctx: Any) -> None:
    import threading

    error = OwnInit(4, extra=[1])
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def fails_beyond_rebuilding(config: Any, ctx: Any) -> None:
    class Stubborn(Exception):
        """Its class can neither be pickled nor made."""

        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError("never pickled")

        lock = __import__("threading").Lock()

    raise Stubborn("the text survives")


def returns_a_generator(config: Any, ctx: Any) -> dict[str, Any]:
    return {"fine": 1, "lazy": (n for n in range(3))}


def exits_hard(config: Any, ctx: Any) -> None:
    _end_rank_1(ctx, lambda: os._exit(7))


def exits(config: Any, ctx: Any) -> None:
    _end_rank_1(ctx, lambda: sys.exit(3))


def is_killed(config: Any, ctx: Any) -> None:
    _end_rank_1(ctx, lambda: os.kill(os.getpid(), signal.SIGKILL))


def crashes(config: Any, ctx: Any) -> None:
    _end_rank_1(ctx, lambda: ctypes.string_at(0))


def _end_rank_1(ctx: Any, end: Any) -> None:
    import torch.distributed as dist

    if ctx.rank == ctx.world_size - 1:
        end()
    dist.barrier()


def is_killed_with_helpers(config: Any, ctx: Any) -> None:
    """Rank 1, with DataLoader workers of its own, is killed once both ranks have theirs."""
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    batches = iter(DataLoader(_Slow(), num_workers=2, batch_size=None))
    helpers = Path(ctx.paths.folder) / f"helpers-{ctx.rank}"
    helpers.write_text(" ".join(str(int(next(batches))) for _ in range(2)))
    dist.barrier()
    _end_rank_1(ctx, lambda: os.kill(os.getpid(), signal.SIGKILL))


def sleeps_while_other_waits(config: Any, ctx: Any) -> None:
    import torch.distributed as dist

    if ctx.rank == 1:
        time.sleep(HANG)
    dist.barrier()


def sleeps_when_other_has_returned(config: Any, ctx: Any) -> None:
    if ctx.is_main:
        time.sleep(HANG)


def sleeps_long_while_other_waits(config: Any, ctx: Any) -> str:
    import torch.distributed as dist

    if ctx.rank == 1:
        with ctx.pause_hang_detection("a download"):
            time.sleep(config.model.seconds)
    dist.barrier()
    return "waited"


def computes_while_other_waits(config: Any, ctx: Any) -> str:
    import torch.distributed as dist

    if ctx.rank == 1:
        limit = time.monotonic() + config.model.seconds
        while time.monotonic() < limit:
            sum(range(1000))
    dist.barrier()
    return "computed"


def all_sleep(config: Any, ctx: Any) -> str:
    time.sleep(config.model.seconds)
    return "slept"


def report_and_return(config: Any, ctx: Any) -> None:
    if ctx.is_main:
        ctx.report({"a": 1})


def report_and_barrier(config: Any, ctx: Any) -> None:
    import torch.distributed as dist

    if ctx.is_main:
        ctx.report({"a": 1})
    dist.barrier()


def report_and_save(config: Any, ctx: Any) -> None:
    if ctx.is_main:
        ctx.report({"a": 1})
    else:
        ctx.save({"a": 1})


def save_and_return(config: Any, ctx: Any) -> None:
    if ctx.is_main:
        ctx.save({"a": 1})


def launches_inside(config: Any, ctx: Any) -> None:
    import nbtoolkit as nb

    nb.launch(ranks, config)


def fills_the_disk(config: Any, ctx: Any) -> None:
    """Write log lines until the disk is full, then go on as if nothing had happened."""
    try:
        while True:
            os.write(1, b"x" * 100_000)
    except OSError:
        ctx.log({"loss": 1.0})
        time.sleep(0.3)
        ctx.report({"loss": 1.0})


def cannot_write_its_error(config: Any, ctx: Any) -> None:
    """Rank 1 raises, and its error's file cannot be written: a folder has its name."""
    if ctx.rank == 1:
        (ctx.paths.rank_error(1) / "full").mkdir(parents=True)
        raise ValueError("raised on rank 1")


def returns_too_much(config: Any, ctx: Any) -> bytes:
    return bytes(3_000_000)


# --- trials of a sweep ---


def takes_its_time(config: Any, ctx: Any) -> dict[str, float]:
    """A trial of some tenths of a second, in steps, that goes on where it was cut off."""
    step = (ctx.load() or {"step": 0})["step"]
    with (ctx.paths.folder / "begun.txt").open("a") as file:
        file.write(f"{ctx.params['optim.lr'].hex()} {step} {os.getpid()}\n")
    while step < 6:
        step += 1
        time.sleep(0.03)
        ctx.save({"step": step})
        ctx.report({"val_loss": config.optim.lr}, step=step)
    return {"val_loss": config.optim.lr}


def is_slow_or_ill(config: Any, ctx: Any) -> dict[str, float]:
    """A trial whose parameter says what becomes of it."""
    what = ctx.params["data.what"]
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hung":
        time.sleep(600)
    if what == "out of memory":
        raise MemoryError("cannot allocate 80 GiB")
    if what == "nan":
        raise nb_errors().LossNotFinite("the loss of optimizer step 3 is nan")
    return {"val_loss": 1.0}


def nb_errors() -> Any:
    """The errors, imported where they are needed."""
    from nbtoolkit import errors

    return errors
