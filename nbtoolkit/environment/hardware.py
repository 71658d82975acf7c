"""Detect the GPUs that this process may use, and why others cannot be used."""

from __future__ import annotations

import ast
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nbtoolkit.environment.installed import package_folder
from nbtoolkit.environment.nvml import Device as Device
from nbtoolkit.environment.nvml import Unavailable, session
from nbtoolkit.environment.nvml import sample_devices as sample_devices
from nbtoolkit.host import ROOT, cpu_count, memory_limit
from nbtoolkit.text_table import gib, html_table

# --- torch build ---


_ARCH_LIST = re.compile(rb"\0(sm_\d+[af]?(?: (?:sm|compute)_\d+[af]?)*)\0")
_ARCH = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """CUDA version and GPU architectures of a torch build."""

    version: str
    """``torch.__version__``, such as ``2.6.0+cu124``."""
    cuda: str | None
    """CUDA version of the build; None for a CPU (or ROCm) build."""
    arch: tuple[str, ...] = ()
    """Architectures of its code, such as ``sm_75``; empty if unknown."""

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Return whether the build has code for a GPU of this compute capability.

        True if :attr:`arch` is unknown, as in torch itself.
        """
        return not self.arch or any(_covers(name, capability) for name in self.arch)


def read_torch_build(folder: Path | None = None) -> TorchBuild | None:
    """Read the installed torch's build from its files, without importing it.

    ``torch.cuda.get_arch_list()`` cannot be used: its ``torch._C._cuda_getArchFlags`` registers a
    fork handler after which CUDA fails in every fork of this process (seen in the machine code of
    2.13.0+cu130), and importing torch takes at least 1.2 s. ``libtorch_python.so`` contains the
    same list as a NUL-terminated string; finding it in 30 MB takes 20 ms (2.6.0+cu124 and
    2.13.0+cu130).

    Args:
        folder: the package's folder; default: the one that ``import torch`` would use.

    Returns:
        The build; None if torch is not installed.
    """
    folder = folder or package_folder("torch")
    if folder is None or not (folder / "version.py").is_file():
        return None
    constants = _assignments((folder / "version.py").read_text())
    return TorchBuild(
        version=str(constants.get("__version__", "of unknown version")),
        cuda=constants.get("cuda"),
        arch=_arch_list(folder / "lib" / "libtorch_python.so"),
    )


def _assignments(source: str) -> dict[str, Any]:
    """Return the constants that a module assigns: ``cuda: Optional[str] = '12.4'``."""
    constants: dict[str, Any] = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name):
                constants[target.id] = node.value.value
    return constants


def _arch_list(library: Path) -> tuple[str, ...]:
    """Return the longest list of architectures in a library; empty in a CPU build."""
    if not library.is_file() or not library.stat().st_size:
        return ()
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        lists = [match.group(1).decode() for match in _ARCH_LIST.finditer(data)]
    return tuple(max(lists, key=len, default="").split())


def _covers(name: str, capability: tuple[int, int]) -> bool:
    """Return whether code for architecture ``name`` runs on ``capability``.

    NVIDIA's compatibility rules: binary code (``sm_75``) runs on its major version from its minor
    version on, PTX (``compute_90``) on everything newer. The suffix ``a`` restricts code to exactly
    this capability, ``f`` to this family.
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
    """GPUs, CPUs and memory that this process may use."""

    devices: tuple[Device, ...] = ()
    """The visible GPUs, in the order of CUDA_VISIBLE_DEVICES."""
    cpu_count: int = 1
    """CPUs that this process may use."""
    memory: int = 0
    """Bytes of memory that this process may use; 0 if unknown."""
    reason: str = "not detected"
    """How the GPUs were detected, or why there is none."""

    @property
    def usable(self) -> tuple[Device, ...]:
        """The devices that the installed torch can train on."""
        return tuple(device for device in self.devices if device.usable)

    def explain(self) -> str:
        """Describe the devices and the reasons, one per line."""
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
    """Detect GPUs, CPUs and memory, without a CUDA context and without importing torch.

    Args:
        environ: the environment variables (CUDA_VISIBLE_DEVICES is read); default: this process's.
        nvml: an object with pynvml's functions; default: ``pynvml`` itself.
        torch_build: the torch that will train; default: the installed one; None: no torch.
        root: parent of ``/proc`` and ``/sys``.
        affinity: number of CPUs in the affinity mask; default: this process's.
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
    """Return the visible devices, checked against torch, and how they were detected."""
    try:
        with session(nvml) as driver:
            gpus, driver_cuda = driver.gpus(), driver.cuda_version()
    except Unavailable as error:
        return (), str(error)
    if not gpus:
        return (), "the NVIDIA driver answers, but has no GPU"
    build = read_torch_build() if torch_build == "installed" else torch_build
    visible = _visible(environ.get("CUDA_VISIBLE_DEVICES"), gpus)
    devices = tuple(
        _check_usable(replace(gpu, index=index), build, driver_cuda)
        for index, gpu in enumerate(visible)
    )
    return devices, _how_detected(environ, gpus, visible)


def _visible(mask: str | None, gpus: Sequence[Sequence[Device]]) -> list[Device]:
    """Return the devices that CUDA shows with ``CUDA_VISIBLE_DEVICES=mask``, in its order.

    CUDA's rules: entries are numbers or UUIDs (a unique prefix is enough); an entry without a match
    hides itself and all later ones; a duplicate entry hides everything.
    """
    if mask is None:
        return [device for gpu in gpus for device in gpu]
    shown: list[Device] = []
    for entry in mask.split(","):
        selected = _select(entry.strip(), mask.strip()[:4], gpus)
        if not selected:
            break
        if any(device in shown for device in selected):
            return []
        shown += selected
    return shown


def _select(entry: str, style: str, gpus: Sequence[Sequence[Device]]) -> list[Device]:
    """Return the devices of one entry: one device, or all slices of a numbered GPU."""
    # The first entry decides whether all entries are UUIDs or numbers.
    if style in ("GPU-", "MIG-"):
        every = (device for gpu in gpus for device in gpu)
        matches = [d for d in every if entry.startswith(style) and d.uuid.startswith(entry)]
        return matches if len(matches) == 1 else []
    number = re.match(r"\+?(\d+)", entry)
    if number is None or int(number[1]) >= len(gpus):
        return []
    return list(gpus[int(number[1])])


def _check_usable(
    device: Device, build: TorchBuild | None, driver_cuda: tuple[int, int] | None
) -> Device:
    """Set whether torch can train on the device, and the reason."""
    if not device.usable:
        return device
    obstacle = _obstacle(device, build, driver_cuda)
    if build is None or obstacle:
        return replace(device, usable=False, reason=obstacle)
    code = f"has code for {device.sm}" if build.arch else "has code for unknown architectures"
    alone = "; a MIG slice, so one process only" if device.is_slice else ""
    return replace(device, reason=f"torch {build.version} {code}{alone}")


def _obstacle(device: Device, build: TorchBuild | None, driver_cuda: tuple[int, int] | None) -> str:
    """Return why torch cannot train on the device and what to do; empty if it can."""
    if build is None:
        return "torch is not installed: pip install torch"
    if build.cuda is None:
        return f"torch {build.version} was built without CUDA: install a CUDA build of torch"
    # A driver runs every CUDA of its major version (NVIDIA's minor version compatibility).
    if driver_cuda and driver_cuda[0] < int(build.cuda.split(".")[0]):
        major, minor = driver_cuda
        return (
            f"the driver runs CUDA up to {major}.{minor}, torch {build.version} needs "
            f"{build.cuda}: update the driver, or install a torch built for CUDA {major}"
        )
    if not build.runs_on(device.capability):
        return (
            f"torch {build.version} has no code for {device.sm} (it has {' '.join(build.arch)}): "
            f"choose another accelerator, or install a torch build that has {device.sm}"
        )
    return ""


def _how_detected(
    environ: Mapping[str, str], gpus: Sequence[Sequence[Device]], visible: Sequence[Device]
) -> str:
    every = [device for gpu in gpus for device in gpu]
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return f"NVML shows {len(every)}"
    text = f"CUDA_VISIBLE_DEVICES={mask!r} shows {len(visible)} of {len(every)}"
    equal = all(every[0].equals(device) for device in every)
    if not equal and mask[:1].isdigit() and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        text += " (numbered by bus; CUDA numbers by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID)"
    return text


def _usability(device: Device) -> str:
    word = "usable" if device.usable else "NOT usable"
    free = f", {gib(device.memory_free)} free" if device.memory_total else ""
    return f"{word}{free}: {device.reason}"
