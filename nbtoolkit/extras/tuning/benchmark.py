"""Measure a machine and a training function before a long run: ``nb.benchmark``."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from nbtoolkit.config.schema import ConfigLike, as_config
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.errors import TuningError
from nbtoolkit.extras.tuning.answer import MeasuredTable, Subject
from nbtoolkit.extras.tuning.benchmark_sections import (
    SECTIONS,
    Measurement,
    OutOfTime,
    Session,
    measure,
)
from nbtoolkit.extras.tuning.probe import scratch_folder
from nbtoolkit.host import cpu_count
from nbtoolkit.launcher.train_function import Train, check_function
from nbtoolkit.run.output import to_stdout
from nbtoolkit.run.versions import versions
from nbtoolkit.tasks.find import find_task
from nbtoolkit.text_table import counted, duration, number
from nbtoolkit.views.figure import Chart, curves_chart

_CURVES = {"scaling": "ranks", "communication": "bytes"}
"""Sections with curves -> the name of their horizontal axis."""

_VERSIONS = ("nbtoolkit", "python", "torch", "accelerate")


@dataclass(frozen=True, kw_only=True, repr=False)
class Benchmark(MeasuredTable):
    """The result of a benchmark. A cell shows it as a table, and ``print()`` shows it as text.

    Attributes:
        rows: the measured values, each a
            :class:`~nbtoolkit.extras.tuning.benchmark_sections.Measurement`.
        status: ``"completed"``, ``"time"`` if the time limit ended it, or ``"interrupted"``.
        machine: the GPUs, the CPUs, and the load of the machine before the first measurement.
        versions: the versions of Python and of some packages.
        date: the time at which the benchmark began, in UTC.
        seconds: the duration of the benchmark.
    """

    rows: tuple[Measurement, ...]
    status: Literal["completed", "time", "interrupted"]
    machine: str
    versions: dict[str, str]
    date: str
    seconds: float

    def table(self) -> str:
        """Return the rows as text, with a line about the machine, the versions and the date."""
        return repr(self)

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write the rows to a CSV file, each with machine, versions and date; return its path."""
        file = Path(path).expanduser().absolute()
        about = {"date": self.date, "machine": self.machine, "versions": self._versions()}
        with file.open("w", newline="") as opened:
            names = [field.name for field in fields(Measurement)]
            writer = csv.DictWriter(opened, [*names, *about])
            writer.writeheader()
            writer.writerows({**asdict(row), **about} for row in self.rows)
        return file

    def plot(self) -> Chart:
        """Draw the throughput over the number of ranks, and the all-reduce time over the bytes."""
        curves: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
        for row in self.rows:
            if row.at is not None and row.value is not None:
                axes = curves.setdefault((_CURVES[row.section], row.unit), {})
                axes.setdefault(row.name.partition(":")[0], []).append((row.at, row.value))
        return curves_chart("benchmark", curves)

    @property
    def why(self) -> str:
        """The machine, the versions and the date, as a line of text."""
        ended = {"time": ", out of time", "interrupted": ", interrupted"}.get(self.status, "")
        took = f"{self.date}, took {duration(self.seconds)}{ended}"
        return f"{self.machine}; {self._versions()}; {took}"

    def _versions(self) -> str:
        return ", ".join(f"{name} {text}" for name, text in self.versions.items())

    def columns(self) -> tuple[list[str], list[list[str]]]:
        """Return the names of the columns, and the texts of each row."""
        return ["section", "measured", "value", "unit", "relative", "note"], [
            [row.section, row.name, number(row.value), row.unit, number(row.relative), row.note]
            for row in self.rows
        ]


def benchmark(
    train: Train | None = None,
    config: ConfigLike = None,
    *,
    sections: Iterable[str] | None = None,
    minutes: float = 5.0,
) -> Benchmark:
    """Measure the performance of this machine: scaling, communication and memory.

    New processes do all work, in a temporary folder that is deleted at the end; this process uses
    no device. A value that cannot be measured here is a row with the reason. If you interrupt the
    benchmark, it returns what it has measured so far.

    Args:
        train: a training function that calls :func:`nbtoolkit.fit`; its scaling and memory are
            measured. None: the function that ``config.task`` names, by default the task
            ``digits`` of nbtoolkit.
        config: the configuration of ``train``.
        sections: the sections to measure, in this order. None: ``scaling``, ``communication`` and
            ``memory``.
        minutes: the time limit. After this time no new measurement starts, and the present one is
            ended.

    Raises:
        TuningError: a section is unknown, or ``minutes`` is not above 0.
        Exception: the exception of the training function.
    """
    config = as_config(config)
    chosen = [*SECTIONS] if sections is None else [*sections]
    if unknown := [name for name in chosen if name not in SECTIONS]:
        raise TuningError(
            f"there is no section {unknown[0]!r} of the benchmark",
            allowed=", ".join(SECTIONS),
            do='choose some of them, as in sections=["scaling"]',
        )
    if not minutes > 0:
        raise TuningError(f"minutes is {minutes!r}", allowed="a number above 0", do="minutes=5")
    train = train or find_task(config.task)
    check_function(train)
    rows: list[Measurement] = []
    status: Literal["completed", "time", "interrupted"] = "completed"
    machine = _machine()
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    begin = time.monotonic()
    # In a terminal and in a cell the line grows while it measures.
    to_stdout("benchmark:", flush=True)
    with scratch_folder() as folder:
        session = Session(Subject(train, config), Path(folder), begin + 60 * minutes)
        for section in chosen:
            started = time.monotonic()
            try:
                rows.extend(measure(section, session))
            except OutOfTime:
                status = "time"
                note = f"no time left: minutes={minutes:g}"
                rows.append(Measurement(section, note=note, section=section))
            except KeyboardInterrupt:
                status = "interrupted"
                break
            finally:
                to_stdout(f" {section} {duration(time.monotonic() - started)},", flush=True)
    seconds = time.monotonic() - begin
    ended = "interrupted" if status == "interrupted" else counted(len(rows), "row")
    to_stdout(f" {ended} after {duration(seconds)}\n")
    return Benchmark(
        rows=tuple(rows),
        status=status,
        machine=machine,
        versions={name: text for name, text in versions().items() if name in _VERSIONS},
        date=now,
        seconds=seconds,
    )


def _machine() -> str:
    """Return the devices, the CPUs, and how busy they are."""
    gpus = [device.name for device in detect_hardware().devices]
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    model = cpus[0].partition(":")[2].strip() if cpus else "CPU"
    return ", ".join([*gpus, f"{cpu_count()} x {model}", f"load {os.getloadavg()[0]:.1f}"])
