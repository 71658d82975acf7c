"""Detect the GPUs that this process may use, and the reason where one cannot be used."""

from __future__ import annotations

import ast
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from nbtoolkit.environment.nvml import Device as Device
from nbtoolkit.environment.nvml import Unavailable, driver_cuda, read_gpus, session
from nbtoolkit.environment.nvml import sample_devices as sample_devices
from nbtoolkit.host import ROOT, cpu_count, memory_limit
from nbtoolkit.text_table import gib, html_table

# --- torch build ---
# Which GPUs the installed torch has code for; read from its files, nothing imported.
#
# ``torch.cuda.get_arch_list()`` cannot be used: its ``torch._C._cuda_getArchFlags`` registers the
# fork handler after which CUDA refuses to work in every fork of this process (read in the machine
# code of 2.13.0+cu130), and importing torch takes 1.2 s and more. The same list stands as one
# NUL-terminated string in ``libtorch_python.so``; finding it takes 20 ms (30 MB; 2.6.0+cu124 and
# 2.13.0+cu130).


_ARCH_LIST = re.compile(rb"\0(sm_\d+[af]?(?: (?:sm|compute)_\d+[af]?)*)\0")
_ARCH = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """What the installed torch was built for."""

    version: str
    """``torch.__version__``, such as ``2.6.0+cu124``."""
    cuda: str | None
    """The CUDA version it was built with; None for a CPU (or ROCm) build."""
    arch: tuple[str, ...] = ()
    """The architectures it has code for, such as ``sm_75``; empty when they could not be read."""

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether some code in this build runs on a GPU of compute capability ``capability``.

        An unknown list (:attr:`arch` empty) counts as yes, as in torch itself.
        """
        return not self.arch or any(_covers(name, capability) for name in self.arch)


def read_torch_build(folder: Path | None = None) -> TorchBuild | None:
    """Read what the installed torch was built for, without importing it.

    Args:
        folder: the package's folder; default: where ``import torch`` would find it.

    Returns:
        None when torch is not installed.
    """
    folder = folder or _torch_folder()
    if folder is None or not (folder / "version.py").is_file():
        return None
    facts = _assignments((folder / "version.py").read_text())
    return TorchBuild(
        version=str(facts.get("__version__", "of unknown version")),
        cuda=facts.get("cuda"),
        arch=_arch_list(folder / "lib" / "libtorch_python.so"),
    )


def _torch_folder() -> Path | None:
    spec = find_spec("torch")
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def _assignments(source: str) -> dict[str, Any]:
    """The constants a module assigns at its top level: ``cuda: Optional[str] = '12.4'``."""
    found: dict[str, Any] = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name):
                found[target.id] = node.value.value
    return found


def _arch_list(library: Path) -> tuple[str, ...]:
    """The longest list of architectures in the library; empty when there is none (a CPU build)."""
    if not library.is_file() or not library.stat().st_size:
        return ()
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        lists = [match.group(1).decode() for match in _ARCH_LIST.finditer(data)]
    return tuple(max(lists, key=len, default="").split())


def _covers(name: str, capability: tuple[int, int]) -> bool:
    """Whether code for architecture ``name`` runs on ``capability`` (NVIDIA's compatibility rules).

    Binary code (``sm_75``) runs on its major version from its minor version on, PTX
    (``compute_90``) on everything newer; a suffix ``a`` binds to exactly this capability, ``f`` to
    this family.
    """
    match = _ARCH.fullmatch(name)
    if match is None:
        return False
    kind, major, minor, suffix = match.groups()
    built = (int(major), int(minor))
    if suffix == "a":
        return capability == built
    if kind == "compute" and not suffix:
        return capability >= built
    return capability[0] == built[0] and capability[1] >= built[1]


# --- hardware ---


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What this process may compute on."""

    devices: tuple[Device, ...] = ()
    """The GPUs this process may see, in the order of CUDA_VISIBLE_DEVICES."""
    cpu_count: int = 1
    """CPUs this process may keep busy."""
    memory: int = 0
    """Bytes of memory this process may use; 0 when unknown."""
    reason: str = "not looked for"
    """How the GPUs were found, or why there is none."""

    @property
    def usable(self) -> tuple[Device, ...]:
        """The devices the installed torch can train on."""
        return tuple(device for device in self.devices if device.usable)

    def explain(self) -> str:
        """The devices and the reasons as text, one a line."""
        head = f"{len(self.usable)} usable of {len(self.devices)} visible GPUs: {self.reason}"
        return "\n".join([head, *(f"  {name}: {text}" for name, text in self._rows())])

    def _repr_html_(self) -> str:
        return html_table("hardware", [("GPUs", self.reason), *self._rows()])

    def _rows(self) -> list[tuple[str, str]]:
        rows = [(str(device), _usability(device)) for device in self.devices]
        memory = gib(self.memory) if self.memory else "unknown"
        return [*rows, ("CPUs, memory", f"{self.cpu_count}, {memory}")]


def detect_hardware(
    environ: Mapping[str, str] | None = None,
    nvml: Any = None,
    *,
    torch_build: TorchBuild | Literal["installed"] | None = "installed",
    root: Path = ROOT,
    affinity: int | None = None,
) -> Hardware:
    """Find the GPUs, CPUs and memory, without a CUDA context and without importing torch.

    Args:
        environ: the environment variables (CUDA_VISIBLE_DEVICES counts); default: this process's.
        nvml: an object with pynvml's functions; default: ``pynvml`` itself.
        torch_build: the torch that will train; default: the installed one; None: there is none.
        root: where ``/proc`` and ``/sys`` are looked for.
        affinity: CPUs in the affinity mask; default: asked from the system.
    """
    environ = os.environ if environ is None else environ
    devices, reason = _detect_devices(environ, nvml, torch_build)
    return Hardware(
        devices=devices,
        cpu_count=cpu_count(root, affinity),
        memory=memory_limit(root),
        reason=reason,
    )


def _detect_devices(
    environ: Mapping[str, str], nvml: Any, torch_build: TorchBuild | Literal["installed"] | None
) -> tuple[tuple[Device, ...], str]:
    """The visible devices with their verdicts, and how they were found."""
    try:
        with session(nvml) as nvml:
            gpus, driver = read_gpus(nvml), driver_cuda(nvml)
    except Unavailable as why:
        return (), str(why)
    if not gpus:
        return (), "the NVIDIA driver answers, but has no GPU"
    build = read_torch_build() if torch_build == "installed" else torch_build
    seen = _visible(environ.get("CUDA_VISIBLE_DEVICES"), gpus)
    judged = (_judge(replace(gpu, index=i), build, driver) for i, gpu in enumerate(seen))
    return tuple(judged), _how_found(environ, gpus, seen)


def _visible(mask: str | None, gpus: Sequence[Sequence[Device]]) -> list[Device]:
    """The devices that CUDA shows under ``CUDA_VISIBLE_DEVICES=mask``, in its order.

    CUDA's rules: numbers or UUIDs (a unique beginning will do); the first entry that fits nothing
    hides itself and all after it; an entry named twice hides everything.
    """
    if mask is None:
        return [device for gpu in gpus for device in gpu]
    shown: list[Device] = []
    for entry in mask.split(","):
        found = _named(entry.strip(), mask.strip()[:4], gpus)
        if not found:
            break
        if any(device in shown for device in found):
            return []
        shown += found
    return shown


def _named(entry: str, style: str, gpus: Sequence[Sequence[Device]]) -> list[Device]:
    """What one entry of CUDA_VISIBLE_DEVICES names: a device, or all slices of a numbered GPU."""
    if style in ("GPU-", "MIG-"):  # the first entry decides how all of them are read
        every = (device for gpu in gpus for device in gpu)
        fits = [d for d in every if entry.startswith(style) and d.uuid.startswith(entry)]
        return fits if len(fits) == 1 else []
    number = re.match(r"\+?(\d+)", entry)
    if number is None or int(number[1]) >= len(gpus):
        return []
    return list(gpus[int(number[1])])


def _judge(device: Device, build: TorchBuild | None, driver: tuple[int, int] | None) -> Device:
    """The device with the verdict whether the installed torch can train on it."""
    if not device.usable:
        return device
    if build is None:
        return replace(device, usable=False, reason="torch is not installed: pip install torch")
    obstacle = _obstacle(device, build, driver)
    if obstacle:
        return replace(device, usable=False, reason=obstacle)
    known = f"has code for {device.sm}" if build.arch else "does not say what it has code for"
    alone = "; a MIG slice, so one process only" if device.is_slice else ""
    return replace(device, reason=f"torch {build.version} {known}{alone}")


def _obstacle(device: Device, build: TorchBuild, driver: tuple[int, int] | None) -> str:
    """Why this torch cannot train on the device and what to do; empty when it can."""
    if build.cuda is None:
        return f"torch {build.version} was built without CUDA: install a CUDA build of torch"
    # A driver runs every CUDA of its own major version (NVIDIA's minor version compatibility)
    if driver and driver[0] < int(build.cuda.split(".")[0]):
        return (
            f"the driver runs CUDA up to {driver[0]}.{driver[1]}, torch {build.version} needs "
            f"{build.cuda}: update the driver, or install a torch built for CUDA {driver[0]}"
        )
    if not build.runs_on(device.capability):
        return (
            f"torch {build.version} has no code for {device.sm} (it has {' '.join(build.arch)}): "
            f"choose another accelerator, or install a torch build that has {device.sm}"
        )
    return ""


def _how_found(
    environ: Mapping[str, str], gpus: Sequence[Sequence[Device]], seen: Sequence[Device]
) -> str:
    every = [device for gpu in gpus for device in gpu]
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return f"NVML shows {len(every)}"
    said = f"CUDA_VISIBLE_DEVICES={mask!r} shows {len(seen)} of {len(every)}"
    alike = all(every[0].equals(device) for device in every)
    if not alike and mask[:1].isdigit() and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        said += " (counted by bus; CUDA counts by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID)"
    return said


def _usability(device: Device) -> str:
    word = "usable" if device.usable else "NOT usable"
    free = f", {gib(device.memory_free)} free" if device.memory_total else ""
    return f"{word}{free}: {device.reason}"
