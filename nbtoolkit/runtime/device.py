"""Device: one GPU, or one MIG slice of a GPU, and whether the installed torch can train on it."""

from __future__ import annotations

from dataclasses import dataclass

from nbtoolkit.runtime.table import gib


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
