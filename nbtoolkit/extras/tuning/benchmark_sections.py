"""Measure the sections of a benchmark; each is a generator of measurements.

The kernel only launches and reads clocks. Rates and times come from ranks, or from the launch of
a user's function (:func:`nbtoolkit.extras.tuning.probe.probe`).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.config.schema import Config, load_config
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.variables import temporary_variables
from nbtoolkit.errors import NbtoolkitError, TuningError
from nbtoolkit.extras.tuning.answer import Subject
from nbtoolkit.extras.tuning.probe import QUIET, Probe, probe, result_within
from nbtoolkit.host import cpu_count
from nbtoolkit.launcher.launch import launch
from nbtoolkit.launcher.train_function import Train
from nbtoolkit.text_table import counted

if TYPE_CHECKING:
    from nbtoolkit.worker.context import RunContext

_SIZES = [1 << power for power in (10, 13, 16, 19, 22, 24, 26)]  # bytes of an all-reduce


class OutOfTime(Exception):
    """The benchmark's time has passed."""


@dataclass(frozen=True)
class Measurement:
    """A measured value.

    Attributes:
        name: what was measured; those of a curve are ``"<curve>: <position>"``.
        value: None if it could not be measured; :attr:`note` says why.
        unit: of the value.
        relative: the value over that of the row that the note or the section names.
        note: what the value holds for.
        at: the position on the horizontal axis of a plot: ranks, or bytes.
        section: the benchmark's section.
    """

    name: str
    value: float | None = None
    unit: str = ""
    relative: float | None = None
    note: str = ""
    at: float | None = None
    section: str = ""


@dataclass
class Session:
    """What the measurements of one benchmark share.

    Attributes:
        subject: the user's function, with its configuration.
        folder: takes all that is written; it is deleted at the end.
        end: when the time is up, on the monotonic clock.
    """

    subject: Subject
    folder: Path
    end: float
    gpus: int = field(default_factory=lambda: len(detect_hardware().devices))

    @property
    def counts(self) -> list[int]:
        """Numbers of ranks to compare: 1, 2, 4 and 8, up to the GPUs, or to the CPUs."""
        return [count for count in (1, 2, 4, 8) if count <= (self.gpus or cpu_count())]

    @property
    def pair(self) -> int:
        """Ranks of a small group: two, or one on a single GPU."""
        return 1 if self.gpus == 1 else 2

    def is_late(self, *_: object) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.end

    def check_time(self) -> None:
        """Raise :class:`OutOfTime` if the time is up."""
        if self.is_late():
            raise OutOfTime

    def launch(self, function: Train, processes: int, settings: Mapping[str, object]) -> Any:
        """Launch one of our functions; returns what rank 0 returned.

        On a single GPU a group of two is on the CPU.
        """
        self.check_time()
        alone = {"CUDA_VISIBLE_DEVICES": ""} if processes > max(self.gpus, 1) else {}
        place = {"runtime.output_dir": str(self.folder)}
        config = load_config(env=None, overrides={**QUIET, **place, **settings})
        with temporary_variables({**os.environ, **alone}):
            handle = launch(
                function, config, processes=processes, resume="never", wait=False, display="off"
            )
        result = result_within(handle, self.end - time.monotonic())
        if result is None:
            raise OutOfTime
        return result.value

    def probe(self, processes: int, settings: Mapping[str, object]) -> Probe:
        """Measure the user's function for two seconds, within the time that is left."""
        self.check_time()
        threads = {} if self.gpus else {"OMP_NUM_THREADS": "1"}
        fixed = {"tracking.log_every_n_steps": 5, "distributed.world_size": processes}
        with temporary_variables({**os.environ, **threads}):
            return probe(
                self.subject, {**fixed, **settings}, steps=20, seconds=2.0, enough=self.is_late
            )


def scaling(session: Session) -> Iterator[Measurement]:
    """Yield samples per second by ranks, with a fixed batch per device or in all."""
    if len(session.counts) == 1:
        yield Measurement(session.subject.name, note="there is one device: nothing to compare")
        return
    train = session.subject.config.train
    batch = train.batch_size_per_device or train.batch_size
    rates: dict[int, float] = {}
    reasons: dict[int, str] = {}

    def rate(count: int, size: int) -> float:
        settings = {"train.batch_size": size, "train.batch_size_per_device": None}
        result = session.probe(count, settings)
        reasons[count] = result.reason or "no step was measured"
        return result.samples_per_second

    for kind, grows in {"weak scaling": True, "strong scaling": False}.items():
        sizes = {count: batch * count if grows else batch for count in session.counts}
        # The first round imports and warms up.
        for count in [*session.counts, *reversed(session.counts)]:
            rates[count] = rate(count, sizes[count])
        for count in session.counts:
            name = f"{kind}: {counted(count, 'rank')}"
            text = f"batch {sizes[count]}"
            if rates[count] and rates[1]:
                relative = rates[count] / rates[1]
                note = f"{text}, {relative / count:.0%} of {count} times one rank"
                yield Measurement(name, rates[count], "samples/s", relative, note, count)
            else:
                yield Measurement(name, note=f"{text}: {reasons[count]}")


def communication(session: Session) -> Iterator[Measurement]:
    """Seconds of an all-reduce by size and back end."""
    count = session.counts[-1] if session.gpus > 1 else 2
    timings = session.launch(all_reduce, count, {"data.sizes": _SIZES})
    for backend, times in timings.items():
        for size, seconds in zip(_SIZES, times, strict=True):
            text = f"{size >> 10} KB" if size < 1 << 20 else f"{size >> 20} MB"
            speed = 2 * (count - 1) / count * size / seconds / 1e9
            note = f"all-reduce, {count} ranks, {speed:.3g} GB/s (bus)"
            yield Measurement(f"{backend}: {text}", seconds * 1e3, "ms", note=note, at=size)
    if "nccl" not in timings:
        yield Measurement("nccl", note=f"nccl needs two GPUs; this machine has {session.gpus}")


def memory(session: Session) -> Iterator[Measurement]:
    """Memory of a rank of an empty function, and of the user's.

    Raises:
        TuningError: no step of the user's function can be measured.
    """
    # The first launches import what later ones are forked with.
    for _ in range(3):
        usage = session.launch(memory_used, session.pair, {})
    shared = f"rank 0 of {session.pair}; with shared pages {usage['rss'] / 1e6:.0f} MB"
    yield Measurement("empty function, own memory of a rank", usage["uss"] / 1e6, "MB", note=shared)
    steps = session.probe(1, {})
    if not steps.samples_per_second:
        raise TuningError(steps.reason or f"{session.subject.name} has measured no step of nb.fit")
    note = "allocated on the device, at most" if session.gpus else "with shared pages"
    yield Measurement(f"{session.subject.name}, a rank", steps.memory * 1e3, "MB", note=note)


SECTIONS: dict[str, Callable[[Session], Iterator[Measurement]]] = {
    "scaling": scaling,
    "communication": communication,
    "memory": memory,
}
"""All sections, in the order in which they are measured."""


def measure(section: str, session: Session) -> Iterator[Measurement]:
    """Yield the rows of a section; what this machine cannot do becomes a row with the reason.

    Raises:
        OutOfTime: the time is up.
        Exception: the user's function raised it.
    """
    session.check_time()
    try:
        for row in SECTIONS[section](session):
            yield replace(row, section=section)
    except NbtoolkitError as error:
        yield Measurement(section, note=error.what.splitlines()[0], section=section)


def all_reduce(config: Config, ctx: RunContext) -> dict[str, list[float]]:
    """Return the median seconds of an all-reduce of each of ``data.sizes`` (bytes), by back end."""
    import torch
    import torch.distributed as dist

    medians = dict[str, list[float]]()
    for backend in ["gloo", "nccl"] if ctx.device.type == "cuda" else ["gloo"]:
        group = dist.new_group(backend=backend)
        device = ctx.device if backend == "nccl" else torch.device("cpu")
        medians[backend] = []
        for size in config.data.sizes:
            tensor = torch.zeros(size // 4, device=device)
            spent = []
            # From 50 of the smallest to 5 of the largest.
            for _ in range(2 + max(5, min(50, (1 << 26) // size))):
                dist.barrier(group)
                begin = time.perf_counter()
                dist.all_reduce(tensor, group=group)
                if ctx.device.type == "cuda":
                    torch.cuda.synchronize()
                spent.append(time.perf_counter() - begin)
            medians[backend].append(statistics.median(spent[2:]))
    return medians


def memory_used(config: Config, ctx: RunContext) -> dict[str, float]:
    """Return the bytes of this rank: its own, and with those that it shares."""
    import psutil

    used = psutil.Process().memory_full_info()
    return {"uss": used.uss, "rss": used.rss}
