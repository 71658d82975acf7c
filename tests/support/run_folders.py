"""Run folders written by hand, with names and values of any kind."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nbtoolkit.run.paths import RunPaths
from nbtoolkit.wire.serialization import pack_value

NOON = 1767225600.0  # 2026-01-01 00:00 UTC, the start of every run here

PLAN = {"processes": 2, "device_names": ["Tesla T4", "Tesla T4"], "precision": "fp16"}

SWEEP_CONFIG = """
study: {{name: mine, metric: {metric}, direction: maximize, sampler: random, pruner: none}}
budget: {{n_trials: {count}}}
space: {{optim.lr: {{type: float, low: 0.001, high: 0.1}}}}
"""


def write_run(
    parent: Path,
    name: str,
    *,
    events: Iterable[dict[str, Any]] = (),
    kind: str = "run",
    ended: dict[str, Any] | None = None,
    returned: Any = None,
) -> RunPaths:
    """A run's folder; ``kind``: what its first event says it is; ``ended``: the last event."""
    paths = RunPaths(parent / name)
    paths.folder.mkdir(parents=True)
    first = {"plan": PLAN} if kind == "run" else {"plan": PLAN, "search": kind}
    last = [] if ended is None else [{"type": "ended", **ended}]
    written = [{**first, **event} if event["type"] == "run" else event for event in events]
    lines = (json.dumps({"t": NOON, **event}) + "\n" for event in [*written, *last])
    paths.events.write_text("".join(lines))
    if returned is not None:
        paths.value(0).parent.mkdir()
        paths.value(0).write_bytes(pack_value(returned))
    return paths


def trained(
    metrics: dict[str, list[float]], config: dict[str, Any] | None = None, start: float = NOON
) -> list[dict[str, Any]]:
    """The events of one attempt: one report per second, each with the metrics that nb.fit logs."""
    events: list[dict[str, Any]] = [{"type": "run", "t": start, "config": config or {}}]
    for step in range(max(map(len, metrics.values()))):
        now = {"t": start + step + 1, "step": step + 1}
        values = {name: series[step] for name, series in metrics.items()}
        logged = {"loss": 1.0, "samples_per_second": 100.0 * (step + 1), "memory_gb_rank0": 1.5}
        events.append({"type": "metrics", "values": logged, **now})
        events.append({"type": "report", "values": values, **now})
    return events


def sweep(
    folder: Path,
    events: list[dict[str, Any]],
    *,
    metric: str = "score",
    count: int = 10,
    config: dict[str, Any] | None = None,
) -> RunPaths:
    """A sweep's folder, as its scheduler leaves it; ``config``: that of its first event."""
    events = [{"type": "run", "t": NOON, "config": config or {}}, *events]
    paths = write_run(folder, "sweep-0001", kind="sweep", events=events)
    (paths.folder / "sweep.yaml").write_text(SWEEP_CONFIG.format(metric=metric, count=count))
    return paths


def trial(number: int, state: str = "complete", value: float | None = None, **more: Any) -> Any:
    """The event of a trial."""
    event = {"type": "trial", "number": number, "state": state, "value": value, "seconds": 1.0}
    return {**event, "params": {"optim.lr": 0.1 / (number + 1)}, **more}


@contextmanager
def hold_lock(paths: RunPaths) -> Iterator[None]:
    """Hold a run's lock, as its supervisor does."""
    with paths.lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
