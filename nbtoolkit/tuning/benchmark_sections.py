"""Measure the sections of a benchmark; each is a generator of measurements.

The kernel only launches and reads clocks. Rates and times come from ranks, from the launch of a
user's function (:func:`nbtoolkit.tuning.probe.probe`), or from programs of their own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nbtoolkit.config.schema import Config, load_config
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.variables import temporary_variables
from nbtoolkit.errors import NbtoolkitError, TuningError, WorkerDied
from nbtoolkit.host import cpu_count
from nbtoolkit.launcher.forkserver_client import pids
from nbtoolkit.launcher.launch import Train, launch
from nbtoolkit.search.sweep import sweep
from nbtoolkit.text_table import counted
from nbtoolkit.tuning import benchmark_ranks as ranks
from nbtoolkit.tuning.probe import LoggedStep, Probe, probe

if TYPE_CHECKING:
    from nbtoolkit.launcher.handle import RunHandle
    from nbtoolkit.search.sweep_result import SweepHandle

_PROBE_SECONDS = 2.0  # of training in a probe of the scaling
_MOST_STEPS = 1_000  # of such a probe
_SIZES = [1 << power for power in (10, 13, 16, 19, 22, 24, 26)]  # bytes of an all-reduce
_MEGABYTES = (1, 16, 128)  # of a checkpoint
_LAUNCHES = 10  # of the memory's growth
_TRIALS, _TRIAL_SECONDS = 16, 0.2
_PROGRAM = "import sys; from nbtoolkit.tuning.benchmark_peers import main; main(*sys.argv[1:])"
_GRACE = 10.0  # seconds in which an interrupted program ends its own processes


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
        train: the function to measure.
        config: its configuration.
        folder: takes all that is written; it is deleted at the end.
        end: when the time is up, on the monotonic clock.
    """

    train: Train
    config: Config
    folder: Path
    end: float
    gpus: int = field(default_factory=lambda: len(detect_hardware().devices))
    _baseline: Probe | TuningError | None = None

    @property
    def name(self) -> str:
        """The name of the user's function."""
        return getattr(self.train, "__name__", "the function")

    @property
    def counts(self) -> list[int]:
        """Numbers of ranks to compare: 1, 2, 4 and 8, up to the GPUs, or to the CPUs."""
        most = self.gpus or cpu_count()
        return [count for count in (1, 2, 4, 8) if count <= most]

    @property
    def pair(self) -> int:
        """Ranks of a small group: two, or one on a single GPU."""
        return 1 if self.gpus == 1 else 2

    def left(self) -> float:
        """Seconds that are left.

        Raises:
            OutOfTime: none.
        """
        if (left := self.end - time.monotonic()) <= 0:
            raise OutOfTime
        return left

    def settings(self, own: Mapping[str, object]) -> Config:
        """A configuration of a loop by hand, which writes into the folder."""
        place = {"runtime.output_dir": str(self.folder)}
        return load_config(env=None, overrides={**ranks.PLAIN, **place, **own})

    def launch(
        self,
        function: Train,
        processes: int,
        own: Mapping[str, object] = MappingProxyType({}),
        resume: str = "never",
    ) -> Any:
        """Launch one of our functions; returns what rank 0 returned."""
        config = self.settings(own)
        handle = launch(
            function, config, processes=processes, resume=resume, wait=False, display="off"
        )
        return self.wait(handle).value

    def wait(self, handle: RunHandle | SweepHandle) -> Any:
        """Return the result; when the time is up, end the run and raise OutOfTime."""
        try:
            return handle.result(timeout=self.left())
        except (TimeoutError, OutOfTime):
            handle.stop("the benchmark's time is up", grace=0.0)
            handle.result()
            raise OutOfTime from None

    def probe(self, steps: int, processes: int, own: Mapping[str, object]) -> Probe:
        """Measure the user's function, within the time that is left."""
        end = time.monotonic() + self.left()

        def late(_: LoggedStep) -> bool:
            return time.monotonic() > end

        threads = {} if self.gpus else {"OMP_NUM_THREADS": "1"}
        with temporary_variables({**os.environ, **threads}):
            return probe(
                self.train, self.config, own, steps=steps, processes=processes, on_step=late
            )

    @property
    def baseline(self) -> Probe:
        """Some steps of the user's function on one device, measured once.

        Raises:
            TuningError: no step can be measured.
        """
        if self._baseline is None:
            try:
                self._baseline = self.probe(20, 1, {})
            except TuningError as error:
                self._baseline = error
        if isinstance(self._baseline, TuningError):
            raise self._baseline
        if not self._baseline.samples_per_second:
            raise TuningError(
                self._baseline.reason or f"{self.name} has measured no step of nb.fit"
            )
        return self._baseline

    def group_variables(self) -> dict[str, str]:
        """The environment of a group of two: on the CPU, unless there are two GPUs."""
        return {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if self.gpus < 2 else {})}

    def program(self, *words: str) -> Any:
        """Run a program of ``benchmark_peers``, and return its answer."""
        folder = self.folder / f"program-{time.monotonic_ns()}"
        folder.mkdir()
        home = str(Path(__file__).parents[2])
        paths = [path for path in sys.path if Path(path).is_absolute()] + [home]
        own = {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(folder)}
        call, *more = words
        with (folder / "log.txt").open("w+") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, call, str(folder), *more],
                cwd=folder,
                env={**self.group_variables(), **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                code = process.wait(self.left())
            except subprocess.TimeoutExpired:
                raise OutOfTime from None
            finally:
                _end(process)
            if code:
                log.seek(0)
                raise TuningError(
                    f"the program of {call} failed: {log.read().strip()[-300:]}",
                    do="run nbtoolkit doctor",
                )
        return json.loads((folder / "answer.json").read_text())


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and its ranks: its launches first get time to end their own."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# --- sections ---


def launches(session: Session) -> Iterator[Measurement]:
    """The start of two ranks with an empty function, ours and others, in a fresh process."""
    found: dict[str, list[float]] = session.program("launches", "5")
    for name, note in (
        ("nb.launch, first in a kernel", "starts the fork server"),
        ("nb.launch, later", ""),
        ("accelerate.notebook_launcher", "torch is imported already"),
        ("torch.multiprocessing.spawn", "imports torch in each rank"),
    ):
        value, theirs = median(found[name]), median(found["accelerate.notebook_launcher"])
        yield Measurement(name, value, "s", value / theirs, note or "relative to notebook_launcher")


def steps(session: Session) -> Iterator[Measurement]:
    """The step of fit over a loop by hand, and the speed of the user's function."""
    own = {"train.batch_size": ranks.BATCH, "train.epochs": 100_000, "train.max_steps": 2_000}
    for name, seconds in (found := session.launch(ranks.compare_steps, 1, own)).items():
        label = f"digits MLP, batch {ranks.BATCH}: {name}"
        note = "relative to the loop by hand, one thread"
        yield Measurement(label, seconds * 1e6, "us", seconds / found["loop by hand"], note)
    baseline = session.baseline
    yield Measurement(session.name, baseline.samples_per_second, "samples/s", note="one device")


def scaling(session: Session) -> Iterator[Measurement]:
    """Samples per second of the user's function by ranks, batch per device or in all fixed."""
    if len(session.counts) == 1:
        yield Measurement(session.name, note="there is one device: nothing to compare")
        return
    train = session.config.train
    batch = train.batch_size_per_device or train.batch_size
    wanted = int(_PROBE_SECONDS * session.baseline.samples_per_second / batch)
    number = min(max(wanted, 10), _MOST_STEPS)
    curves = {
        "weak scaling": {count: (count, batch * count) for count in session.counts},
        "strong scaling": {count: (count, batch) for count in session.counts},
    }
    cases = dict.fromkeys(case for curve in curves.values() for case in curve.values())
    seen: dict[tuple[int, int], list[Probe]] = {case: [] for case in cases}
    # In turn and back, so that a drift of the machine's speed hits all.
    for count, size in [*cases, *reversed(cases)]:
        own: dict[str, object] = {"train.batch_size": size, "train.batch_size_per_device": None}
        own["tracking.log_every_n_steps"] = max(number // 10, 1)
        seen[count, size].append(session.probe(number, count, own))
    for kind, curve in curves.items():
        for count, (_, size) in curve.items():
            name, probes = f"{kind}: {counted(count, 'rank')}", seen[count, size]
            rate, alone = _rate(probes), _rate(seen[1, batch])
            if rate and alone:
                note = f"batch {size}, {rate / alone / count:.0%} of {count} times one rank"
                yield Measurement(name, rate, "samples/s", rate / alone, note, count)
            else:
                why = next((one.reason for one in probes if one.reason), "no step was measured")
                yield Measurement(name, note=f"batch {size}: {why}")


def communication(session: Session) -> Iterator[Measurement]:
    """Seconds of an all-reduce by size and back end."""
    with temporary_variables(session.group_variables()):
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
    """Memory of a rank, and what the kernel and its fork server keep of a launch."""
    import psutil

    def kept() -> float:
        used = [psutil.Process(pid).memory_info().rss for pid in (os.getpid(), *pids())]
        return sum(used) / 1e6

    # The first launches import what later ones are forked with.
    for _ in range(3):
        found = session.launch(ranks.memory_used, session.pair)
    shared = f"rank 0 of {session.pair}; with shared pages {found['rss'] / 1e6:.0f} MB"
    yield Measurement("empty function, own memory of a rank", found["uss"] / 1e6, "MB", note=shared)
    before = kept()
    for _ in range(_LAUNCHES):
        session.launch(ranks.memory_used, session.pair)
    note = f"per launch, mean of {_LAUNCHES}"
    yield Measurement(
        "growth of kernel and fork server", (kept() - before) / _LAUNCHES, "MB", note=note
    )
    note = "allocated on the device, at most" if session.gpus else "with shared pages"
    yield Measurement(f"{session.name}, a rank", session.baseline.memory * 1e3, "MB", note=note)


def checkpoints(session: Session) -> Iterator[Measurement]:
    """Seconds to write and to read a checkpoint by size, over torch's own functions."""
    for size in _MEGABYTES:
        found = session.launch(ranks.checkpoint, 1, {"data.megabytes": size})
        for verb, plain in {"write": "torch.save, not synced", "read": "torch.load"}.items():
            seconds, note = found[verb], f"relative to {plain}"
            ratio = seconds / found[f"torch {verb}"]
            yield Measurement(f"{verb} {size} MB", seconds * 1e3, "ms", ratio, note)


def sweeps(session: Session) -> Iterator[Measurement]:
    """Time of a slot between two trials: from the end of a function to the start of the next."""
    file = session.folder / "trials.txt"
    space = {
        "study": {"metric": "score", "sampler": "random", "pruner": "none"},
        "space": {"optim.lr": {"type": "float", "low": 0.1, "high": 0.9}},
    }
    config = session.settings({"data.file": str(file), "data.seconds": _TRIAL_SECONDS})
    session.wait(
        sweep(ranks.trial, config, space, n_trials=_TRIALS, name="trials", resume="never",
              wait=False, display="off")
    )  # fmt: skip
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
    """The same training by each installed framework, over hand-written DDP."""
    first = next(iter(ranks.PEERS))
    for kind, trained in session.program("peers", "3", "200", "mlp,cnn").items():
        for name, package in ranks.PEERS.items():
            label = f"digits {kind.upper()}: {name}"
            if name not in trained:
                yield Measurement(label, note=f"not installed: pip install {package}")
                continue
            rate, base = median(trained[name]["rates"]), median(trained[first]["rates"])
            note = f"relative to {first}; final loss {trained[name]['loss']:.4f}"
            yield Measurement(label, rate, "samples/s", rate / base, note)


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
    session.left()
    try:
        for row in SECTIONS[section](session):
            yield replace(row, section=section)
    except NbtoolkitError as error:
        yield Measurement(section, note=error.what.splitlines()[0], section=section)


def _rate(probes: list[Probe]) -> float:
    """Median throughput of the probes; 0 if one of them measured none."""
    rates = [one.samples_per_second for one in probes]
    return median(rates) if all(rates) else 0.0
