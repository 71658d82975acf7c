"""Detect the GPUs that this process may use, and why others cannot be used.

The NVIDIA driver is queried through NVML, which creates no CUDA context.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from nbtoolkit.cards import properties_html
from nbtoolkit.environment.installed import package_folder
from nbtoolkit.host import ROOT, cpu_count, memory_limit
from nbtoolkit.text_table import gib


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, or one MIG slice of a GPU."""

    index: int
    """Index among the visible devices: ``cuda:0``, ``cuda:1``, ..."""
    uuid: str
    """``GPU-...`` or ``MIG-...``, as CUDA_VISIBLE_DEVICES takes it."""
    name: str
    memory_total: int
    """Bytes; 0 if unknown (memory shared with the CPU)."""
    memory_free: int
    """Bytes, at the time of detection."""
    capability: tuple[int, int]
    """Compute capability: ``(7, 5)`` for a T4."""
    usable: bool = True
    """Whether the installed torch can train on it."""
    reason: str = ""
    """Why it is usable or not."""

    @property
    def sm(self) -> str:
        """The capability in the notation of compilers: ``sm_75``."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def is_slice(self) -> bool:
        """Whether it is a MIG slice; a process sees only one, so slices cannot form a group."""
        return self.uuid.startswith("MIG-")

    def equals(self, other: Device) -> bool:
        """Return whether both have the same name, capability and memory (within 5 %)."""
        larger = max(self.memory_total, other.memory_total)
        same_memory = abs(self.memory_total - other.memory_total) <= 0.05 * larger
        return self.name == other.name and self.capability == other.capability and same_memory

    def __str__(self) -> str:
        memory = gib(self.memory_total) if self.memory_total else "shared memory"
        return f"GPU {self.index} ({self.name}, {memory}, {self.sm})"


class Unavailable(Exception):
    """NVML cannot be used; the message says why."""


class Driver:
    """The NVIDIA driver, while an NVML session is open.

    Args:
        nvml: the module ``pynvml``, or an object with its functions.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def cuda_version(self) -> tuple[int, int] | None:
        """Return the newest CUDA version that the driver runs, ``(12, 4)``; None if unknown."""
        try:
            number = self._nvml.nvmlSystemGetCudaDriverVersion_v2()  # 12040
        except self._nvml.NVMLError:
            return None
        return number // 1000, number % 1000 // 10

    def count(self) -> int:
        """Return the number of GPUs."""
        count: int = self._nvml.nvmlDeviceGetCount()
        return count

    def gpus(self) -> list[list[Device]]:
        """Return the devices of every GPU in NVML's order: itself, or its slices if MIG is on.

        A GPU that does not answer, or has MIG on but no slice, is an unusable device with the
        reason. Whether torch can use the other devices is not checked.
        """
        return [self._gpu(index) for index in range(self.count())]

    def sample(self, index: int, device: str | int) -> dict[str, Any]:
        """Return the current readings of a device; see :func:`sample_devices`."""
        nvml = self._nvml
        if isinstance(device, int):
            handle = nvml.nvmlDeviceGetHandleByIndex(device)
        else:
            handle = nvml.nvmlDeviceGetHandleByUUID(device.encode())
        readers: dict[str, Callable[[], object]] = {
            "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "memory_used": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "memory_total": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
            # NVML counts milliwatts.
            "power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        }
        sample: dict[str, Any] = {"index": index, "uuid": _text(nvml.nvmlDeviceGetUUID(handle))}
        for name, read in readers.items():
            # Not every device has every reading: a MIG slice has no utilization.
            with contextlib.suppress(nvml.NVMLError):
                sample[name] = read()
        return sample

    def _gpu(self, index: int) -> list[Device]:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            gpu = self._device(handle, (major, minor))
            return list(self._slices(handle, gpu)) if self._mig_is_on(handle) else [gpu]
        except nvml.NVMLError as error:  # "GPU is lost": the other GPUs still work
            lost = Device(
                index=0,
                uuid=f"GPU-{index}-does-not-answer",
                name="unknown",
                memory_total=0,
                memory_free=0,
                capability=(0, 0),
                usable=False,
                reason=f"the driver cannot read it ({error}); restart the machine",
            )
            return [lost]

    def _device(self, handle: object, capability: tuple[int, int]) -> Device:
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            total = memory.total
            free = memory.free
        except self._nvml.NVMLError:  # "Not Supported": the chip shares the CPU's memory
            total = 0
            free = 0
        return Device(
            index=0,
            uuid=_text(self._nvml.nvmlDeviceGetUUID(handle)),
            name=_text(self._nvml.nvmlDeviceGetName(handle)),
            memory_total=total,
            memory_free=free,
            capability=capability,
        )

    def _mig_is_on(self, handle: object) -> bool:
        try:
            return bool(self._nvml.nvmlDeviceGetMigMode(handle)[0])
        except self._nvml.NVMLError:  # "Not Supported": a GPU without MIG
            return False

    def _slices(self, handle: object, gpu: Device) -> Iterator[Device]:
        """Yield the MIG slices of a GPU, or the unusable GPU itself if it has none."""
        nvml = self._nvml
        has_slices = False
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            except nvml.NVMLError:  # "Not Found": no slice at this index
                continue
            has_slices = True
            yield self._device(part, gpu.capability)
        if not has_slices:
            reason = "MIG is on but has no slice: create one, or switch MIG off (nvidia-smi -mig 0)"
            yield replace(gpu, usable=False, reason=reason)


@contextlib.contextmanager
def session(nvml: Any = None) -> Iterator[Driver]:
    """Open an NVML session, and close it at the end of the block.

    Args:
        nvml: an object with pynvml's functions; default: ``pynvml`` itself.

    Raises:
        Unavailable: no driver, no ``pynvml``, or the driver fails inside the block.
    """
    try:
        nvml = import_module("pynvml") if nvml is None else nvml
        nvml.nvmlInit()
    except ImportError:
        raise Unavailable("nvidia-ml-py is not installed: pip install nvidia-ml-py") from None
    except nvml.NVMLError as error:
        raise Unavailable(f"no NVIDIA driver answers ({error})") from error
    try:
        yield Driver(nvml)
    except nvml.NVMLError as error:
        raise Unavailable(f"the NVIDIA driver failed ({error})") from error
    finally:
        nvml.nvmlShutdown()


def sample_devices(devices: Sequence[str | int] = (), nvml: Any = None) -> list[dict[str, Any]]:
    """Return the current readings of devices, for a monitor.

    Args:
        devices: UUIDs (as in ``LaunchPlan.devices``) or NVML's indices; default: every device.
        nvml: an object with pynvml's functions; default: ``pynvml`` itself.

    Returns:
        For each device ``index`` (its position in ``devices``), ``uuid`` and, as far as the driver
        reports them, ``utilization`` (percent), ``memory_used`` and ``memory_total`` (bytes),
        ``power`` (watts) and ``temperature`` (degrees Celsius). Empty without an NVIDIA driver.
    """
    try:
        with session(nvml) as driver:
            selected = devices or range(driver.count())
            return [driver.sample(index, device) for index, device in enumerate(selected)]
    except Unavailable:
        return []


def _text(value: str | bytes) -> str:
    # pynvml before 11.5 returns bytes.
    return value.decode() if isinstance(value, bytes) else value


# A line of torch/version.py: cuda: Optional[str] = '12.4'
_CONSTANT = re.compile(r"""^(\w+)(?:\s*:[^=]+)?\s*=\s*["'](.*)["']$""", re.MULTILINE)
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
    constants = dict(_CONSTANT.findall((folder / "version.py").read_text()))
    return TorchBuild(
        version=constants.get("__version__", "of unknown version"),
        cuda=constants.get("cuda"),
        arch=_arch_list(folder / "lib" / "libtorch_python.so"),
    )


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
    """How the GPUs were detected, or why there are none."""

    @property
    def usable(self) -> tuple[Device, ...]:
        """The devices that the installed torch can train on."""
        return tuple(device for device in self.devices if device.usable)

    def explain(self) -> str:
        """Describe each device and why it is usable or not, one per line."""
        head = f"{len(self.usable)} usable of {len(self.devices)} visible GPUs: {self.reason}"
        return "\n".join([head, *(f"  {name}: {text}" for name, text in self._rows())])

    def _repr_html_(self) -> str:
        return properties_html("hardware", [("GPUs", self.reason), *self._rows()])

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
) -> Hardware:
    """Detect GPUs, CPUs and memory, without a CUDA context and without importing torch.

    Args:
        environ: the environment variables, with ``CUDA_VISIBLE_DEVICES``; default: those of this
            process.
        nvml: an object with pynvml's functions; default: ``pynvml`` itself.
        torch_build: the build of torch that will train; default: the installed one; None: torch is
            not installed.
        root: the folder that contains ``proc`` and ``sys``.
    """
    environ = os.environ if environ is None else environ
    devices, reason = _detect_devices(environ, nvml, torch_build)
    return Hardware(
        devices=devices,
        cpu_count=cpu_count(root),
        memory=memory_limit(root),
        reason=reason,
    )


def _detect_devices(
    environ: Mapping[str, str], nvml: Any, torch_build: TorchBuild | Literal["installed"] | None
) -> tuple[tuple[Device, ...], str]:
    """Return the visible devices, checked against torch, and how they were detected."""
    try:
        with session(nvml) as driver:
            gpus = driver.gpus()
            driver_cuda = driver.cuda_version()
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
