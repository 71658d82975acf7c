"""Read the study of a sweep while other processes write it."""

from __future__ import annotations

from pathlib import Path

from kernels import until

from nbtoolkit.errors import SweepError
from nbtoolkit.search.study.study import FILE, read_study


def finished(folder: Path) -> dict[int, float]:
    """Number and value of the trials that the study holds as complete."""
    if not (folder / FILE).exists():
        return {}
    try:
        study = read_study(folder / FILE)
    except SweepError:
        return {}  # it is being made
    return {one.number: one.values[0] for one in study.trials if one.state.name == "COMPLETE"}


def sweep_folder(home: Path) -> Path:
    """The folder of the only sweep, once it exists."""
    (folder,) = until(lambda: list(home.glob("out/*-sweep-*")), "the sweep's folder")
    return Path(folder)


def begun(folder: Path) -> int:
    """How many trials have started."""
    return sum(file.read_text().count("\n") for file in folder.glob("trials/*/begun.txt"))
