"""Measure the sections of a benchmark; each is a generator of measurements.

The kernel only launches and reads clocks. Rates and times come from ranks, or from the launch of
a user's function (:func:`nbtoolkit.tuning.probe.probe`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nbtoolkit.config.schema import Config, load_config
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.variables import temporary_variables
from nbtoolkit.errors import NbtoolkitError, TuningError, WorkerDied
from nbtoolkit.host import cpu_count
from nbtoolkit.launcher.launch import launch
from nbtoolkit.launcher.train_function import Train
from nbtoolkit.search.sweep import sweep
from nbtoolkit.text_table import counted
from nbtoolkit.tuning import benchmark_ranks as ranks
from nbtoolkit.tuning.answer import Subject
from nbtoolkit.tuning.probe import QUIET, Probe, probe, result_within

PEERS = {
    "accelerate": "accelerate",
    "Lightning": "lightning",
    "Hugging Face Trainer": "transformers",
}
"""Ways to train -> the package that each needs."""

PLAIN: dict[str, object] = {
    **QUIET,
    "optim.name": "sgd",
    "optim.lr": ranks.RATE,
    "optim.momentum": 0.0,
    "optim.weight_decay": 0.0,
    "optim.schedule": "constant",
    "optim.warmup_ratio": 0.0,
    "train.precision": "fp32",
}
"""Settings of all runs of a benchmark: the optimizer of a loop by hand, and nothing is written."""

_SIZES = [1 << power for power in (10, 13, 16, 19, 22, 24, 26)]  # bytes of an all-reduce
_MEGABYTES = (1, 16, 128)  # of a checkpoint
_TRIALS, _TRIAL_SECONDS = 16, 0.2


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

    def settings(self, own: Mapping[str, object]) -> Config:
        """A configuration of a loop by hand, which writes into the folder."""
        place = {"runtime.output_dir": str(self.folder)}
        return load_config(env=None, overrides={**PLAIN, **place, **own})

    def launch(
        self,
        function: Train,
        processes: int,
        own: Mapping[str, object],
        resume: str = "never",
    ) -> Any:
        """Launch one of our functions; returns what rank 0 returned.

        On a single GPU a group of two is on the CPU.
        """
        self.check_time()
        alone = {"CUDA_VISIBLE_DEVICES": ""} if processes > max(self.gpus, 1) else {}
        config = self.settings(own)
        with temporary_variables({**os.environ, **alone}):
            handle = launch(
                function, config, processes=processes, resume=resume, wait=False, display="off"
            )
        result = result_within(handle, self.end - time.monotonic())
        if result is None:
            raise OutOfTime
        return result.value

    def probe(self, processes: int, own: Mapping[str, object]) -> Probe:
        """Measure the user's function for two seconds, within the time that is left."""
        self.check_time()
        threads = {} if self.gpus else {"OMP_NUM_THREADS": "1"}
        fixed = {"tracking.log_every_n_steps": 5, "distributed.world_size": processes}
        with temporary_variables({**os.environ, **threads}):
            return probe(self.subject, {**fixed, **own}, steps=20, seconds=2.0, enough=self.is_late)

    @cached_property
    def baseline(self) -> Probe:
        """Some steps of the user's function on one device.

        Raises:
            TuningError: no step can be measured.
        """
        found = self.probe(1, {})
        if not found.samples_per_second:
            raise TuningError(found.reason or f"{self.subject.name} has measured no step of nb.fit")
        return found


# --- sections ---


def launches(session: Session) -> Iterator[Measurement]:
    """The start of two ranks with an empty function, ours and others, in a fresh process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if session.gpus > 1 else ""
    found = session.launch(ranks.launches, 1, {"data.visible": visible})
    notes = {
        ranks.FIRST: "starts the fork server",
        ranks.NOTEBOOK_LAUNCHER: "torch is imported already",
    }
    for name, value in found.items():
        note = notes.get(name, "relative to notebook_launcher")
        yield Measurement(name, value, "s", value / found[ranks.NOTEBOOK_LAUNCHER], note)


def steps(session: Session) -> Iterator[Measurement]:
    """The step of fit over a loop by hand, and the speed of the user's function."""
    names = {ranks.INDEXED: "loop by hand", ranks.FIT: "nb.fit"}
    own = {"data.rounds": 5, "train.max_steps": 2_000, "model.kind": "mlp"}
    found = _compare(session, 1, {"data.peers": [*names], **own})
    for peer, name in names.items():
        label, rate = f"digits MLP, batch {ranks.BATCH}: {name}", found[peer]["rate"]
        relative = found[ranks.INDEXED]["rate"] / rate
        note = "relative to the loop by hand, one thread, within an epoch"
        yield Measurement(label, 1e6 * ranks.BATCH / rate, "us", relative, note)
    rate = session.baseline.samples_per_second
    yield Measurement(session.subject.name, rate, "samples/s", note="one device")


def _compare(
    session: Session, count: int, own: Mapping[str, object]
) -> dict[str, dict[str, float]]:
    fixed = {"train.batch_size": ranks.BATCH * count, "train.epochs": 1}
    found: dict[str, dict[str, float]] = session.launch(ranks.compare, count, {**fixed, **own})
    return found


def scaling(session: Session) -> Iterator[Measurement]:
    """Samples per second of the user's function by ranks, batch per device or in all fixed."""
    if len(session.counts) == 1:
        yield Measurement(session.subject.name, note="there is one device: nothing to compare")
        return
    train = session.subject.config.train
    batch = train.batch_size_per_device or train.batch_size
    reasons: dict[int, str] = {}

    def rate(count: int, size: int) -> float:
        own = {"train.batch_size": size, "train.batch_size_per_device": None}
        found = session.probe(count, own)
        reasons[count] = found.reason or "no step was measured"
        return found.samples_per_second

    for kind, grows in {"weak scaling": True, "strong scaling": False}.items():
        sizes = {count: batch * count if grows else batch for count in session.counts}
        calls = {count: partial(rate, count, size) for count, size in sizes.items()}
        found = ranks.take_turns(calls, rounds=1)
        for count, value in found.items():
            name, text = f"{kind}: {counted(count, 'rank')}", f"batch {sizes[count]}"
            if value and found[1]:
                note = f"{text}, {value / found[1] / count:.0%} of {count} times one rank"
                yield Measurement(name, value, "samples/s", value / found[1], note, count)
            else:
                yield Measurement(name, note=f"{text}: {reasons[count]}")


def communication(session: Session) -> Iterator[Measurement]:
    """Seconds of an all-reduce by size and back end."""
    count = session.counts[-1] if session.gpus > 1 else 2
    found = session.launch(ranks.all_reduce, count, {"data.sizes": _SIZES})
    for backend, times in found.items():
        for size, seconds in zip(_SIZES, times, strict=True):
            text = f"{size >> 10} KB" if size < 1 << 20 else f"{size >> 20} MB"
            speed = 2 * (count - 1) / count * size / seconds / 1e9
            note = f"all-reduce, {count} ranks, {speed:.3g} GB/s (bus)"
            yield Measurement(f"{backend}: {text}", seconds * 1e3, "ms", note=note, at=size)
    if "nccl" not in found:
        yield Measurement("nccl", note=f"nccl needs two GPUs; this machine has {session.gpus}")


def memory(session: Session) -> Iterator[Measurement]:
    """Memory of a rank of an empty function, and of the user's."""
    # The first launches import what later ones are forked with.
    for _ in range(3):
        found = session.launch(ranks.memory_used, session.pair, {})
    shared = f"rank 0 of {session.pair}; with shared pages {found['rss'] / 1e6:.0f} MB"
    yield Measurement("empty function, own memory of a rank", found["uss"] / 1e6, "MB", note=shared)
    note = "allocated on the device, at most" if session.gpus else "with shared pages"
    own = session.baseline.memory * 1e3
    yield Measurement(f"{session.subject.name}, a rank", own, "MB", note=note)


def checkpoints(session: Session) -> Iterator[Measurement]:
    """Seconds to write and to read a checkpoint by size, over torch's own functions."""
    for size in _MEGABYTES:
        found = session.launch(ranks.checkpoint, 1, {"data.megabytes": size})
        for verb, plain in {"write": "torch.save, not synced", "read": "torch.load"}.items():
            ratio, note = found[verb] / found[plain], f"relative to {plain}"
            yield Measurement(f"{verb} {size} MB", found[verb] * 1e3, "ms", ratio, note)


def sweeps(session: Session) -> Iterator[Measurement]:
    """Time of a slot between two trials: from the end of a function to the start of the next."""
    file = session.folder / "trials.txt"
    space = {
        "study": {"metric": "score", "sampler": "random", "pruner": "none"},
        "space": {"optim.lr": {"type": "float", "low": 0.1, "high": 0.9}},
    }
    config = session.settings({"data.file": str(file), "data.seconds": _TRIAL_SECONDS})
    sweep(ranks.trial, config, space, n_trials=_TRIALS, name="trials", display="off")
    spans = [tuple(map(float, line.split())) for line in file.read_text().splitlines()]
    slots = min(session.gpus or cpu_count(), _TRIALS)
    whole = slots * (max(end for _, end in spans) - min(begin for begin, _ in spans))
    between = (whole - sum(end - begin for begin, end in spans)) / (len(spans) - slots or 1)
    note = f"{len(spans)} trials of {_TRIAL_SECONDS} s on {counted(slots, 'slot')}"
    yield Measurement("between two trials of a slot", between * 1e3, "ms", note=note)


def recovery(session: Session) -> Iterator[Measurement]:
    """From the SIGKILL of a rank to the exception in the kernel, and to the first resumed step."""
    file = session.folder / "killed.txt"
    saved = {"checkpoint.enabled": True, "checkpoint.every_steps": 20, "train.epochs": 4}
    own = {"data.file": str(file), "train.batch_size": 64, **saved}
    with suppress(WorkerDied):
        session.launch(ranks.killed, session.pair, own, "auto")
    raised, killed = time.time(), float(file.read_text())
    first = session.launch(ranks.killed, session.pair, own, "auto")
    note = counted(session.pair, "rank")
    yield Measurement("SIGKILL to the exception in the kernel", raised - killed, "s", note=note)
    yield Measurement(
        "SIGKILL to the first resumed step", first - killed, "s", note=f"{note}, new launch"
    )


def peers(session: Session) -> Iterator[Measurement]:
    """The same training by each installed library, over hand-written DDP."""
    absent = {name: package for name, package in PEERS.items() if not find_spec(package)}
    installed = [name for name in ranks.TRAIN if name not in absent]
    for kind in ("mlp", "cnn"):
        label = f"digits {kind.upper()}"
        own = {"data.rounds": 3, "train.max_steps": 200, "model.kind": kind}
        found = _compare(session, 2, {"data.peers": installed, **own})
        for name, one in found.items():
            relative = one["rate"] / found[ranks.DDP]["rate"]
            note = f"relative to {ranks.DDP}; final loss {one['loss']:.4f}"
            yield Measurement(f"{label}: {name}", one["rate"], "samples/s", relative, note)
        for name, package in absent.items():
            yield Measurement(f"{label}: {name}", note=f"not installed: pip install {package}")


SECTIONS: dict[str, Callable[[Session], Iterator[Measurement]]] = {
    "launch": launches,
    "step": steps,
    "scaling": scaling,
    "communication": communication,
    "memory": memory,
    "checkpoint": checkpoints,
    "sweep": sweeps,
    "recovery": recovery,
    "peers": peers,
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
