"""Report the host, its hardware, what a launch would do, and known problems: ``nb.doctor()``."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nbtoolkit.cards import properties_html
from nbtoolkit.config.schema import load_config
from nbtoolkit.environment.deadline import session_age, span, time_limit
from nbtoolkit.environment.hardware import Hardware, detect_hardware
from nbtoolkit.environment.installed import installed_version, package_folder
from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.environment.resources import free_space, size_text
from nbtoolkit.errors import NbtoolkitError
from nbtoolkit.host import Host, detect_host
from nbtoolkit.run.versions import versions


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """The findings of :func:`doctor`; a table in a cell, text with ``print``."""

    host: Host
    hardware: Hardware
    session: str
    """Age of the session, and when a run must end."""
    room: str
    """Free disk space of the host's folders."""
    plan: LaunchPlan | None
    """Plan of a launch with default settings; None if the launch would fail."""
    refusal: str
    """Why the launch would fail."""
    versions: dict[str, str]
    problems: tuple[str, ...]
    """Known-bad combinations of installed libraries."""

    @property
    def ok(self) -> bool:
        """Whether a launch works here and no problem was found."""
        return self.plan is not None and not self.problems

    def explain(self) -> str:
        """Return the report as text."""
        names = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        parts = [
            f"host      {self.host.explain()}",
            f"session   {self.session}",
            f"room      {self.room}",
            f"hardware  {self.hardware.explain()}",
            self._plan(),
            f"versions  {names}",
            *(f"problem   {problem}" for problem in self.problems),
        ]
        return "\n".join(parts)

    def _plan(self) -> str:
        return f"refused: {self.refusal}" if self.plan is None else self.plan.explain()

    def __str__(self) -> str:
        return self.explain()

    def _repr_html_(self) -> str:
        rows = [
            ("host", f"{self.host.kind}: {self.host.reason}"),
            ("session", self.session),
            ("room", self.room),
            ("hardware", self.hardware.explain()),
            ("plan", self._plan()),
            *self.versions.items(),
        ]
        return properties_html("nbtoolkit doctor", rows, self.problems)


def doctor() -> DoctorReport:
    """Examine the host, the hardware, the libraries and this process, and change nothing.

    Returns:
        The report. ``print`` it, or let a cell display it.
    """
    host = detect_host()
    hardware = detect_hardware()
    plan: LaunchPlan | None = None
    refusal = ""
    try:
        plan = make_plan(load_config(), host, hardware)
    except NbtoolkitError as error:
        refusal = str(error)
    return DoctorReport(
        host=host,
        hardware=hardware,
        session=_session(),
        room=_room(host),
        plan=plan,
        refusal=refusal,
        versions=versions(),
        problems=(*known_bad(), *held_gpus(sys.modules, _open_files())),
    )


Versions = Callable[[str], str | None]


def known_bad(
    version: Versions = installed_version, folders: Mapping[str, Path] | None = None
) -> list[str]:
    """Return a sentence for each known-bad installation: what it breaks and what to do.

    Args:
        version: returns the installed version of a distribution, or None.
        folders: folders of packages by name; default: looked up.
    """
    folder = package_folder if folders is None else folders.get
    numa = _numa(folder("accelerate"), folder("torch"))
    problems = [numa, _torchao(version), _torch_floor(version), _name_collision(version)]
    return [problem for problem in problems if problem]


def _numa(accelerate: Path | None, torch: Path | None) -> str:
    # huggingface/accelerate#3833, #3925; fixed by PR #4059 (2026-05-29), which removes the NUMA
    # options.
    if accelerate is None or torch is None or not (torch / "numa" / "binding.py").exists():
        return ""
    source = (accelerate / "launchers.py").read_text(errors="replace")
    if "numa_options" in source and "numa_options = None" not in source:
        return (
            "this accelerate asks torch for NUMA binding, which initialises CUDA before the fork "
            "(accelerate#3925): plain notebook_launcher fails on GPUs; nb.launch is not affected; "
            "pip install -U accelerate"
        )
    return ""


def _torchao(version: Versions) -> str:
    # huggingface/accelerate#3524: importing torchao touched CUDA; PR #3530 is in 1.7.
    accelerate = version("accelerate")
    torchao = version("torchao")
    if torchao is not None and accelerate is not None and _release(accelerate) < (1, 7):
        return (
            f"accelerate {accelerate} imports torchao {torchao}, which initialises CUDA "
            "(accelerate#3524): plain notebook_launcher fails on GPUs; pip install -U accelerate"
        )
    return ""


def _torch_floor(version: Versions) -> str:
    torch = version("torch")
    if torch is not None and _release(torch) < (2, 6):
        return (
            f"torch {torch} is older than 2.6, the oldest supported version; pip install -U torch"
        )
    return ""


def _name_collision(version: Versions) -> str:
    # https://pypi.org/project/nbtoolkit writes to the same folder of site-packages.
    other = version("nbtoolkit")
    if other is not None:
        return (
            f"the distribution nbtoolkit {other} is installed, which is another project; this one "
            "is nbtoolkit-torch: pip uninstall nbtoolkit, and install this one again"
        )
    return ""


def _release(version: str) -> tuple[int, ...]:
    from packaging.version import Version

    return Version(version).release


def held_gpus(modules: Iterable[str], files: Iterable[str]) -> list[str]:
    """Return a sentence if TensorFlow holds the memory of GPUs in a process.

    Args:
        modules: names of the modules that the process has imported.
        files: paths of its open files.
    """
    gpus = sorted({file for file in files if re.fullmatch(r"/dev/nvidia\d+", file)})
    if "tensorflow" not in modules or not gpus:
        return []
    return [
        f"this process has imported TensorFlow and has opened {', '.join(gpus)}: it takes all free "
        "memory of each GPU, which the ranks then lack; restart the kernel, and import TensorFlow "
        "only inside the training function"
    ]


def _open_files() -> list[str]:
    files = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this listing is closed already
            files.append(str(link.readlink()))
    return files


def _session() -> str:
    age = session_age()
    age_text = "of unknown age" if age is None else f"{span(age)} old"
    notes = [text for _, text in time_limit(load_config()).notes]
    return "; ".join([age_text, *(notes or ["no limit is set"])])


def _room(host: Host) -> str:
    """Return the free space of the folders for results and temporary files."""
    folders = dict.fromkeys([host.working, host.scratch, *([host.kept] if host.kept else [])])
    return ", ".join(f"{folder}: {size_text(free_space(folder))} free" for folder in folders)
