"""One benchmark figure, its limits, and the table of all figures."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nbtoolkit as nb


@dataclass(frozen=True)
class Figure:
    """A measured value and its target; the benchmark fails above ``gate`` (None: reported only)."""

    name: str
    value: float
    unit: str
    target: float | None = None
    gate: float | None = None

    @property
    def passed(self) -> bool:
        return self.gate is None or self.value <= self.gate


def median(values: list[float]) -> float:
    return statistics.median(values)


@contextmanager
def quiet_config(file: str | None = None, **overrides: Any) -> Iterator[nb.Config]:
    """A config whose runs go into a folder that is removed afterwards; tracking off."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        quiet = {
            "runtime.output_dir": folder,
            "runtime.restarts": 0,
            "tracking.mlflow": False,
        }
        yield nb.load_config(file, env=None, overrides={**quiet, **overrides})


def in_fresh_process(module: str, *arguments: str) -> Any:
    """Run ``python -m module arguments`` and return the JSON on its last line."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{module} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def machine() -> str:
    names = ("torch", "accelerate", "mlflow", "numpy")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in cpus if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} x {model}, {system}, {versions}"


def table(figures: list[Figure]) -> str:
    lines = ["| figure | measured | target | |", "|---|---|---|---|"]
    for figure in figures:
        target = "" if figure.target is None else f"{figure.target:g} {figure.unit}"
        missed = figure.target is not None and figure.value > figure.target
        mark = "missed" if missed else ("met" if figure.target is not None else "")
        lines.append(f"| {figure.name} | {figure.value:.3g} {figure.unit} | {target} | {mark} |")
    return "\n".join(lines)


def dump(figures: list[Figure]) -> str:
    return json.dumps([asdict(figure) for figure in figures])
