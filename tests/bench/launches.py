"""Time of a launch of two trivial CPU ranks, compared with accelerate's launcher in one process."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Callable

import nbtoolkit as nb
from tests.bench.figures import Figure, in_fresh_process, median, quiet_config

ROUNDS = 9


def trivial(config: nb.Config, ctx: nb.RunContext) -> int:
    return ctx.rank


def accelerate_trivial() -> None:
    from accelerate import PartialState

    PartialState()  # forms the process group, as a training function does first


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        call()
    return time.perf_counter() - start


def warm() -> dict[str, float]:
    """Medians over alternating calls: a slow moment of the machine hits both."""
    from accelerate import notebook_launcher

    from nbtoolkit.wire.transport import free_port

    theirs: list[float] = []
    ours: list[float] = []
    single: list[float] = []
    with quiet_config() as config:
        nb.launch(trivial, config, processes=2, resume="never", display="off")
        for _ in range(ROUNDS):
            theirs.append(
                seconds(
                    lambda: notebook_launcher(
                        accelerate_trivial, num_processes=2, use_port=str(free_port())
                    )
                )
            )
            ours.append(
                seconds(
                    lambda: nb.launch(trivial, config, processes=2, resume="never", display="off")
                )
            )
            single.append(
                seconds(
                    lambda: nb.launch(trivial, config, processes=1, resume="never", display="off")
                )
            )
    return {"theirs": median(theirs), "ours": median(ours), "single": median(single)}


def first(tracking: bool) -> float:
    """The first launch of a process, fork server start included."""
    with quiet_config(**{"tracking.mlflow": tracking}) as config:
        spent = seconds(
            lambda: nb.launch(trivial, config, processes=2, resume="never", display="off")
        )
        from nbtoolkit.launcher.fork_servers import shutdown

        shutdown()
    return spent


def warm_tracked() -> float:
    """A later launch with tracking on."""
    with quiet_config(**{"tracking.mlflow": True}) as config:
        spent = [
            seconds(lambda: nb.launch(trivial, config, processes=2, resume="never", display="off"))
            for _ in range(ROUNDS)
        ]
        from nbtoolkit.launcher.fork_servers import shutdown

        shutdown()
    return median(spent[1:])


def figures() -> list[Figure]:
    module = "tests.bench.launches"
    warmed = in_fresh_process(module, "warm")
    plain = median([in_fresh_process(module, "first") for _ in range(3)])
    tracked = median([in_fresh_process(module, "first-tracked") for _ in range(3)])
    later = in_fresh_process(module, "warm-tracked")
    ratio = warmed["ours"] / warmed["theirs"]
    return [
        Figure("warm launch of 2 ranks against notebook_launcher", ratio, "x", 1.0, 1.5),
        Figure("the same, absolute", warmed["ours"], "s"),
        Figure("notebook_launcher, absolute", warmed["theirs"], "s"),
        Figure("warm launch of 1 rank", warmed["single"], "s"),
        Figure("first launch in a kernel", plain, "s", 4.0, 8.0),
        Figure("first launch with tracking: more than without", tracked - plain, "s", 2.0, 4.0),
        Figure("warm launch with tracking on, all written", later, "s"),
    ]  # fmt: skip


if __name__ == "__main__":
    calls: dict[str, Callable[[], object]] = {
        "warm": warm,
        "first": lambda: first(False),
        "first-tracked": lambda: first(True),
        "warm-tracked": warm_tracked,
    }
    print(json.dumps(calls[sys.argv[1]]()))
