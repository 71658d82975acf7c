"""Query the NVIDIA driver through NVML, without creating a CUDA context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

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
            total, free = memory.total, memory.free
        except self._nvml.NVMLError:  # "Not Supported": the chip shares the CPU's memory
            total, free = 0, 0
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
        nvml, has_slices = self._nvml, False
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
