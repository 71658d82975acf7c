"""Query the NVIDIA driver through NVML, without creating a CUDA context.

Every function takes the ``pynvml`` module, or an object with its functions, as ``nvml``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from nbtoolkit.text_table import gib

# --- device ---
# One GPU, or one MIG slice of a GPU, and whether the installed torch can train on it.


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, or one MIG slice of a GPU."""

    index: int
    """Its place among the devices this process may see: ``cuda:0``, ``cuda:1``, ..."""
    uuid: str
    """``GPU-...`` or ``MIG-...``: what CUDA_VISIBLE_DEVICES is given."""
    name: str
    memory_total: int
    """Bytes; 0 where the driver does not say (memory shared with the CPU)."""
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
        """The capability as compilers write it: ``sm_75``."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def is_slice(self) -> bool:
        """Whether it is a MIG slice: CUDA shows a process only one, so slices form no group."""
        return self.uuid.startswith("MIG-")

    def equals(self, other: Device) -> bool:
        """Whether both are the same kind of GPU: name, capability and memory (within 5 %)."""
        larger = max(self.memory_total, other.memory_total)
        alike = abs(self.memory_total - other.memory_total) <= 0.05 * larger
        return self.name == other.name and self.capability == other.capability and alike

    def __str__(self) -> str:
        memory = gib(self.memory_total) if self.memory_total else "shared memory"
        return f"GPU {self.index} ({self.name}, {memory}, {self.sm})"


# --- nvml ---


class Unavailable(Exception):
    """NVML cannot be asked; the message says why."""


@contextmanager
def session(nvml: Any = None) -> Iterator[Any]:
    """NVML, started and shut down again.

    Args:
        nvml: an object with pynvml's functions; default: ``pynvml`` itself.

    Raises:
        Unavailable: no driver, no ``pynvml``, or the driver fails inside the ``with`` block.
    """
    try:
        nvml = nvml or _pynvml()
        nvml.nvmlInit()
    except ImportError:
        raise Unavailable("nvidia-ml-py is not installed: pip install nvidia-ml-py") from None
    except nvml.NVMLError as error:
        raise Unavailable(f"no NVIDIA driver answers ({error})") from error
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise Unavailable(f"the NVIDIA driver failed ({error})") from error
    finally:
        nvml.nvmlShutdown()


def _pynvml() -> Any:
    import pynvml

    return pynvml


def read_gpus(nvml: Any) -> list[list[Device]]:
    """Every GPU in NVML's order: itself, or its slices where MIG is on; verdicts not yet passed.

    A GPU that does not answer, or has MIG on but no slice, is there too: unusable, with the reason.
    """
    return [_read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]


def driver_cuda(nvml: Any) -> tuple[int, int] | None:
    """The newest CUDA version the driver can run, ``(12, 4)``; None when it does not say."""
    try:
        number = nvml.nvmlSystemGetCudaDriverVersion_v2()  # 12040
    except nvml.NVMLError:
        return None
    return number // 1000, number % 1000 // 10


def sample_devices(devices: Sequence[str | int] = (), nvml: Any = None) -> list[dict[str, Any]]:
    """How busy the devices are at this moment; for a monitor, every few seconds.

    Args:
        devices: UUIDs (as in ``LaunchPlan.devices``) or NVML's indices; default: every device.
        nvml: an object with pynvml's functions; default: ``pynvml`` itself.

    Returns:
        For each device ``index`` (its place in ``devices``), ``uuid`` and, where the driver tells
        them, ``utilization`` (percent), ``memory_used`` and ``memory_total`` (bytes), ``power``
        (watts) and ``temperature`` (degrees Celsius). Empty where there is no NVIDIA driver.
    """
    try:
        with session(nvml) as nvml:
            wanted = devices or range(nvml.nvmlDeviceGetCount())
            return [_sample(nvml, place, _handle(nvml, key)) for place, key in enumerate(wanted)]
    except Unavailable:
        return []


def _read_gpu(nvml: Any, index: int) -> list[Device]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        gpu = _read_device(nvml, handle, (major, minor))
        return list(_slices(nvml, handle, gpu)) if _mig_is_on(nvml, handle) else [gpu]
    except nvml.NVMLError as error:  # "GPU is lost": the others still work
        return [_silent(index, f"the driver cannot read it ({error}); restart the machine")]


def _read_device(nvml: Any, handle: Any, capability: tuple[int, int]) -> Device:
    total, free = _memory(nvml, handle)
    return Device(
        index=0,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_total=total,
        memory_free=free,
        capability=capability,
    )


def _silent(index: int, reason: str) -> Device:
    return Device(
        index=0,
        uuid=f"GPU-{index}-does-not-answer",
        name="unknown",
        memory_total=0,
        memory_free=0,
        capability=(0, 0),
        usable=False,
        reason=reason,
    )


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """Total and free bytes; zeros on chips that share the CPU's memory ("Not Supported")."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:
        return 0, 0
    return memory.total, memory.free


def _mig_is_on(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:  # "Not Supported": a GPU without MIG
        return False


def _slices(nvml: Any, handle: Any, gpu: Device) -> Iterator[Device]:
    """The MIG slices of a GPU; the GPU itself, unusable, when it has none."""
    empty = True
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError:  # "Not Found": this place holds no slice
            continue
        empty = False
        yield _read_device(nvml, part, gpu.capability)
    if empty:
        why = "MIG is on but has no slice: create one, or switch MIG off (nvidia-smi -mig 0)"
        yield replace(gpu, usable=False, reason=why)


def _handle(nvml: Any, device: str | int) -> Any:
    if isinstance(device, int):
        return nvml.nvmlDeviceGetHandleByIndex(device)
    return nvml.nvmlDeviceGetHandleByUUID(device.encode())


def _sample(nvml: Any, place: int, handle: Any) -> dict[str, Any]:
    sample = {"index": place, "uuid": _text(nvml.nvmlDeviceGetUUID(handle))}
    for read in (_read_use, _read_memory_use, _read_power, _read_temperature):
        try:
            sample.update(read(nvml, handle))
        except nvml.NVMLError:  # not every device tells everything: a MIG slice has no utilization
            continue
    return sample


def _read_use(nvml: Any, handle: Any) -> dict[str, float]:
    return {"utilization": nvml.nvmlDeviceGetUtilizationRates(handle).gpu}


def _read_memory_use(nvml: Any, handle: Any) -> dict[str, float]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_used": memory.used, "memory_total": memory.total}


def _read_power(nvml: Any, handle: Any) -> dict[str, float]:
    return {"power": nvml.nvmlDeviceGetPowerUsage(handle) / 1000}  # NVML counts milliwatts


def _read_temperature(nvml: Any, handle: Any) -> dict[str, float]:
    return {"temperature": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # pynvml before 11.5 gives bytes
