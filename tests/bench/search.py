"""Time of a sweep compared with the same trials by other means; overhead of one trial.

The trials are a small network's training, of about 0.6 s and always the same steps. Ideal is what
two bare processes need for them at the same time, without study, folder or reports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbtoolkit as nb
from nbtoolkit.run.events import Event
from tests.bench.figures import Figure, in_fresh_process, median, quiet_config
from tests.support.records import last_of, owner_pid

TRIALS, SECONDS, MANY = 16, 0.6, 1000
SPACE = {"optim.lr": {"type": "float", "low": 1e-3, "high": 0.1, "log": True}}
SWEEP_CONFIG = {
    "study": {"metric": "loss", "direction": "minimize", "pruner": "none"},
    "space": SPACE,
}


def work(steps: int, lr: float) -> float:
    """Train a small network; mostly Python's own time, as with many small models."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs, targets = torch.randn(64, 32), torch.randn(64, 1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return loss.item()


def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    return {"loss": work(config.data.steps, config.optim.lr)}


def nothing(config: nb.Config, ctx: nb.RunContext) -> None:
    ctx.report({"loss": config.optim.lr})


def times(config: nb.Config, ctx: nb.RunContext) -> None:
    began = time.time()
    ctx.report({"loss": config.optim.lr, "began": began, "ended": time.time()})


def as_long(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    began = time.time()
    while time.time() - began < SECONDS:
        work(10, config.optim.lr)
    return {"loss": config.optim.lr, "began": began, "ended": time.time()}


# --- other means; each in a fresh process -----------------------------------------------------


def calibrate() -> int:
    """Steps that take about ``SECONDS``."""
    work(200, 0.01)
    begin = time.perf_counter()
    work(1000, 0.01)
    return round(1000 * SECONDS / (time.perf_counter() - begin))


def alone(steps: int, trials: int) -> float:
    """The bare trials, one after the other."""
    work(10, 0.01)  # imports
    begin = time.perf_counter()
    for _ in range(trials):
        work(steps, 0.01)
    return time.perf_counter() - begin


def optuna_study(file: str) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = f"sqlite:///{file}"
    return optuna.create_study(study_name="bench", storage=storage, load_if_exists=True)


def objective(steps: int) -> Callable[[Any], float]:
    return lambda trial: work(steps, trial.suggest_float("optim.lr", 1e-3, 0.1, log=True))


def in_optuna(steps: int, jobs: int) -> float:
    """Optuna's own loop, in this process: one after the other, or in threads."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        study = optuna_study(f"{folder}/study.db")
        begin = time.perf_counter()
        study.optimize(objective(steps), n_trials=TRIALS, n_jobs=jobs)
        return time.perf_counter() - begin


def optuna_process(steps: int, file: str) -> None:
    optuna_study(file).optimize(objective(steps), n_trials=TRIALS // 2)


def at_once(*calls: tuple[str, ...]) -> list[str]:
    """Run this module's calls side by side; what each printed last."""
    program = [sys.executable, "-m", "tests.bench.search"]
    pipe = subprocess.PIPE
    running = [subprocess.Popen([*program, *call], stdout=pipe, text=True) for call in calls]
    outputs = [process.communicate(timeout=300)[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError(f"one of {calls} failed: {outputs}")
    return [output.strip().splitlines()[-1] for output in outputs]


def ideal(steps: int) -> float:
    half = ("alone", str(steps), str(TRIALS // 2))
    return max(map(float, at_once(half, half)))


def two_processes(steps: int) -> float:
    """Two processes on one study, their starts counted: they are what one has to start."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        optuna_study(f"{folder}/study.db")
        call = ("optuna-process", str(steps), f"{folder}/study.db")
        begin = time.perf_counter()
        at_once(call, call)
        return time.perf_counter() - begin


# --- ours -------------------------------------------------------------------------------------


@contextmanager
def shut_afterwards() -> Iterator[None]:
    from nbtoolkit.launcher.fork_servers import shutdown

    try:
        yield
    finally:
        shutdown()


def seconds_of(function: Any, config: nb.Config, trials: int, **more: Any) -> float:
    sweep_config = {**SWEEP_CONFIG, **more.pop("sweep_config", {})}
    options = {"resume": "never", "display": "off", **more}
    begin = time.perf_counter()
    nb.sweep(function, config, sweep_config, n_trials=trials, **options)
    return time.perf_counter() - begin


def sweep(steps: int) -> dict[str, float]:
    """The first sweep of a kernel, and the median of three later ones."""
    with quiet_config(**{"data.steps": steps}) as config, shut_afterwards():
        cold = seconds_of(train, config, TRIALS)
        warm = median([seconds_of(train, config, TRIALS) for _ in range(3)])
    return {"cold": cold, "warm": warm}


def folds(steps: int) -> dict[str, float]:
    """Eight trials of five folds: a slot for each CPU, and one slot."""
    split = nb.make_folds([0, 1] * 50, k=5)
    with quiet_config(**{"data.steps": steps // 3}) as config, shut_afterwards():
        seconds_of(train, config, 2)  # the fork server is up
        many = seconds_of(train, config, 8, folds=split)
        one = {"placement": "all_devices_per_trial"}
        return {"many": many, "one": seconds_of(train, config, 8, folds=split, sweep_config=one)}


def all_devices() -> float:
    """Median seconds from one trial's end on two ranks to the next one's begin."""
    ranks = {"distributed.enabled": True, "distributed.world_size": 2}
    with quiet_config(**ranks) as config, shut_afterwards():
        result = nb.sweep(
            times,
            config,
            {**SWEEP_CONFIG, "placement": "all_devices_per_trial"},
            n_trials=20,
            resume="never",
            display="off",
        )
        reports = [_reported(result.paths.folder / at) for at in result.trials["folder"]]
    return median([after["began"] - before["ended"] for before, after in pairwise(reports)])


def slot_gaps() -> dict[str, float]:
    """Seconds from a trial's last line to the next one's first in its slot, in five warm sweeps.

    Before ``drawn`` trials, parameters are drawn in advance; later ones wait for the trial that has
    ended. ``ratio``: the sweep against half of its trials' own time, two slots, starts counted.
    """
    drawn, slots, early, late, ratios = 10, 2, [], [], []
    with quiet_config() as config, shut_afterwards():
        seconds_of(as_long, config, 4)
        for _ in range(5):
            begin = time.perf_counter()
            options: dict[str, Any] = {"resume": "never", "display": "off"}
            result = nb.sweep(as_long, config, SWEEP_CONFIG, n_trials=TRIALS, **options)
            seconds = time.perf_counter() - begin
            reports = [_reported(result.paths.folder / at) for at in result.trials["folder"]]
            own = sum(one["ended"] - one["began"] for one in reports)
            ratios.append(seconds / (own / slots))
            begins = sorted(one["began"] for one in reports)
            ends = sorted(one["ended"] for one in reports)
            # The first trials of the slots need no end of another one.
            gaps = [begins[number] - ends[number - slots] for number in range(slots, TRIALS)]
            early += gaps[: drawn - slots]
            late += gaps[drawn - slots :]
    both = sorted(early + late)
    return {
        "median": median(both),
        "p90": both[int(0.9 * len(both))],
        "early": median(early),
        "late": median(late),
        "ratio": median(ratios),
        "worst": max(ratios),
    }


def _reported(folder: Path) -> dict[str, float]:
    metrics: dict[str, float] = last_of(folder).metrics
    return metrics


def overhead(trials: int) -> dict[str, float]:
    """What a trial without training costs: seconds from one's end to the next one's.

    Optuna's ask and tell on the same kind of storage, alone, are taken off. ``first`` and ``last``
    are of the first and last tenth; memory and files are the scheduler's, then and at the end.
    """
    seen: list[float] = []
    state: dict[str, tuple[int, int]] = {}

    def look(event: Event) -> None:
        if event.type == "trial" and event.state == "complete":
            seen.append(event.t)
            if len(seen) in (trials // 10, trials - 10):
                state["last" if state else "first"] = _resources(handle.paths.folder)

    with quiet_config() as config, shut_afterwards():
        handle = nb.sweep(
            nothing,
            config,
            SWEEP_CONFIG,
            n_trials=trials,
            resume="never",
            display="off",
            wait=False,
            on_event=look,
        )
        handle.result()
    spacings = [after - before for before, after in pairwise(seen)]
    alone, tenth = ask_and_tell(trials), trials // 10
    net = [ours - theirs for ours, theirs in zip(spacings, alone[1:], strict=True)]
    (memory, files), (memory_after, files_after) = state["first"], state["last"]
    return {
        "all": median(net),
        "first": median(net[:tenth]),
        "last": median(net[-tenth:]),
        "optuna": median(alone),
        "megabytes": (memory_after - memory) / 1e6,
        "files": float(files_after - files),
    }


def ask_and_tell(trials: int) -> list[float]:
    """Seconds of each trial of Optuna alone: TPE, a journal as ours."""
    import optuna

    from nbtoolkit.search.study.study import FILE, open_journal

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    spent = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        storage = open_journal(Path(folder) / FILE)
        study = optuna.create_study(storage=storage, sampler=optuna.samplers.TPESampler(seed=0))
        for _ in range(trials):
            begin = time.perf_counter()
            trial = study.ask()
            study.tell(trial, trial.suggest_float("optim.lr", 1e-3, 0.1, log=True))
            spent.append(time.perf_counter() - begin)
    return spent


def import_seconds() -> float:
    """Seconds of a fresh interpreter that imports what a sweep needs from others."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, optuna"], check=True)
    return time.perf_counter() - begin


def open_seconds() -> float:
    """Median seconds to make a sweep's study in a new file, with Optuna imported."""
    from nbtoolkit.search.study.study import FILE, open_study
    from nbtoolkit.search.study.sweep_config import load_sweep_config

    sweep_config = load_sweep_config(SWEEP_CONFIG, nb.load_config(env=None), n_trials=1)
    spent = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for number in range(9):
            file = Path(folder) / str(number) / FILE
            file.parent.mkdir()
            begin = time.perf_counter()
            open_study(file, sweep_config, sweep_config.make_space(), {})
            spent.append(time.perf_counter() - begin)
    return median(spent)


def _resources(folder: Path) -> tuple[int, int]:
    """Bytes in memory and open files of the sweep's scheduler."""
    process = Path("/proc") / str(owner_pid(folder))
    pages = int((process / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(list((process / "fd").iterdir()))


def figures() -> list[Figure]:
    module = "tests.bench.search"
    steps = str(in_fresh_process(module, "calibrate"))
    best = in_fresh_process(module, "ideal", steps)
    after = in_fresh_process(module, "optuna", steps, "1")
    threads = in_fresh_process(module, "optuna", steps, "2")
    processes = in_fresh_process(module, "two-processes", steps)
    imports = median([import_seconds() for _ in range(3)])
    ours = in_fresh_process(module, "sweep", steps)
    split = in_fresh_process(module, "folds", steps)
    cost = in_fresh_process(module, "overhead", str(MANY))
    gap = in_fresh_process(module, "all-devices")
    slot = in_fresh_process(module, "slot-gaps")
    return [
        Figure(f"{TRIALS} bare trials in two processes (ideal)", best, "s"),
        Figure("Optuna, one after the other, against ideal", after / best, "x"),
        Figure("Optuna, two threads, against ideal", threads / best, "x"),
        Figure("Optuna, two processes, against ideal", processes / best, "x"),
        Figure("nb.sweep against ideal, fork server up", ours["warm"] / best, "x", 1.1, 1.25),
        Figure("first nb.sweep of a kernel: more than ideal, torch and optuna",
               ours["cold"] - best - imports, "s", 1.5, 3.0),
        Figure("import torch, optuna in a fresh interpreter", imports, "s"),
        Figure("a study opens", 1000 * in_fresh_process(module, "open"), "ms", 50.0, 100.0),
        Figure("a trial: more than ask and tell", 1000 * cost["all"], "ms", 8.0, 16.0),
        Figure("the same, first tenth of 1000", 1000 * cost["first"], "ms"),
        Figure("the same, last tenth of 1000", 1000 * cost["last"], "ms"),
        Figure("Optuna's ask and tell alone", 1000 * cost["optuna"], "ms"),
        Figure("scheduler's memory, growth over 900 trials", cost["megabytes"], "MB"),
        # a trial that happens to run has some five of them; one left by each would be 900
        Figure("scheduler's open files, growth over 900 trials", cost["files"], "", 10.0, 20.0),
        Figure("8 trials of 5 folds: two slots' share of one's time",
               split["many"] / split["one"], "x", 0.556, 0.65),
        Figure("two ranks: from trial to trial", 1000 * gap, "ms", 100.0, 200.0),
        Figure("gap between two trials in a slot, median", 1000 * slot["median"], "ms", 20.0, 60.0),
        Figure("the same, nine of ten are below", 1000 * slot["p90"], "ms"),
        Figure("the same, median where trials are drawn in advance", 1000 * slot["early"], "ms"),
        Figure("the same, median where TPE learns", 1000 * slot["late"], "ms"),
        Figure(f"{TRIALS} trials of {SECONDS} s on two slots, warm, against half of their own time",
               slot["ratio"], "x", 1.15, 1.26),
        Figure("the same, worst of five", slot["worst"], "x", 1.26, 1.5),
    ]  # fmt: skip


if __name__ == "__main__":
    calls: dict[str, Callable[..., object]] = {
        "calibrate": calibrate,
        "alone": lambda steps, trials: alone(int(steps), int(trials)),
        "ideal": lambda steps: ideal(int(steps)),
        "optuna": lambda steps, jobs: in_optuna(int(steps), int(jobs)),
        "optuna-process": lambda steps, file: optuna_process(int(steps), file),
        "two-processes": lambda steps: two_processes(int(steps)),
        "sweep": lambda steps: sweep(int(steps)),
        "folds": lambda steps: folds(int(steps)),
        "overhead": lambda trials: overhead(int(trials)),
        "all-devices": all_devices,
        "slot-gaps": slot_gaps,
        "open": open_seconds,
    }
    print(json.dumps(calls[sys.argv[1]](*sys.argv[2:])))
