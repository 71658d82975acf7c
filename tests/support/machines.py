"""Hardware to inject: machines with given GPUs, builds of torch and ages; and their plans."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nbtoolkit.config.schema import Config, load_config
from nbtoolkit.environment.hardware import Hardware, TorchBuild, detect_hardware
from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.plan import Evidence, make_plan
from nbtoolkit.host import Host

# The lists of the wheels on PyPI: what `torch.cuda.get_arch_list()` says there.
CU124 = TorchBuild(
    version="2.6.0+cu124",
    cuda="12.4",
    arch=("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"),
)
CU130 = TorchBuild(
    version="2.13.0+cu130",
    cuda="13.0",
    arch=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
)
CPU_BUILD = TorchBuild(version="2.13.0+cpu", cuda=None)

SCRIPT = Host(kind="script", reason="a test", working=Path("/here"), scratch=Path("/here"))

DAY = 86_400.0


@dataclass(frozen=True)
class Card:
    """What NVML says about one GPU."""

    name: str
    capability: tuple[int, int]
    total: int
    free: int | None = None
    slices: tuple[str, ...] | None = None
    """UUIDs of its MIG slices; None: no MIG."""
    lost: bool = False
    says_memory: bool = True


T4 = Card("Tesla T4", (7, 5), 16_106_127_360)  # a real Kaggle machine's number
P100 = Card("Tesla P100-PCIE-16GB", (6, 0), 17_059_545_088)
V100 = Card("Tesla V100-SXM2-16GB", (7, 0), 16_945_512_448)
A100 = Card("NVIDIA A100-SXM4-40GB", (8, 0), 42_949_672_960)
H100 = Card("NVIDIA H100 80GB HBM3", (9, 0), 85_520_809_984)
RTX_PRO = Card("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 102_641_958_912)


class Nvml:
    """An object with the functions of ``pynvml`` that we call; handles are places in ``cards``."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        """As pynvml's."""

    def __init__(self, *cards: Card, driver: int | None = 13_000, broken: str = "") -> None:
        self.cards, self.driver, self.broken = cards, driver, broken
        self.sessions = 0

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError(self.broken)
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self.sessions -= 1

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        if self.driver is None:
            raise self.NVMLError("Function Not Found")
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index >= len(self.cards) or self.cards[index].lost:
            raise self.NVMLError("GPU is lost")
        return uuid_of(index)

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        self._card(uuid.decode())
        return uuid.decode()

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return self._card(handle).name.encode()

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:
        return self._card(handle).capability

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        card = self._card(handle)
        if not card.says_memory:
            raise self.NVMLError("Not Supported")
        free = card.total if card.free is None else card.free
        return SimpleNamespace(total=card.total, free=free, used=card.total - free)

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        if self._card(handle).slices is None:
            raise self.NVMLError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        slices = self._card(handle).slices or ()
        if index >= len(slices):
            raise self.NVMLError("Not Found")
        return slices[index]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if handle.startswith("MIG-"):
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 63_500

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 71

    def _card(self, handle: str) -> Card:
        for index, card in enumerate(self.cards):
            if handle == uuid_of(index) or handle in (card.slices or ()):
                return card
        raise self.NVMLError("Not Found")


def uuid_of(index: int) -> str:
    """The UUID of the GPU in place ``index``: they differ at the 5th letter."""
    return f"GPU-{'abcdefgh'[index]}0000000-0000-0000-0000-000000000000"


def machine(
    *cards: Card, build: TorchBuild | None = CU130, mask: str | None = None, cpus: int = 4
) -> Hardware:
    """What ``detect_hardware`` finds on a machine with these cards."""
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    return replace(detect_hardware(environ, Nvml(*cards), torch_build=build), cpu_count=cpus)


def cpu_machine(cpus: int = 4) -> Hardware:
    """A machine without NVIDIA's driver."""
    nvml = Nvml(broken="NVML Shared Library Not Found")
    return replace(detect_hardware({}, nvml, torch_build=CPU_BUILD), cpu_count=cpus)


def plan_settings(settings: dict[str, Any]) -> Config:
    """A configuration; ``distributed__enabled`` stands for ``distributed.enabled``."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return load_config(env=None, overrides=named)


def plan_on(
    hardware: Hardware,
    *evidence: Evidence,
    host: Host = SCRIPT,
    start: Any = "forkserver",
    **settings: Any,
) -> LaunchPlan:
    """The plan of a machine with these settings, named as ``plan_settings`` says."""
    return make_plan(plan_settings(settings), host, hardware, evidence, start=start)


def says(plan: LaunchPlan, text: str) -> bool:
    """Whether a reason of the plan has this text."""
    return any(text in reason for reason in plan.reasons)


def machine_of_age(root: Path, age: float, *, uptime: float = 40 * DAY) -> Path:
    """A /proc whose first process started ``age`` seconds ago, on a machine up for ``uptime``."""
    (root / "proc/1").mkdir(parents=True, exist_ok=True)
    ticks = int((uptime - age) * os.sysconf("SC_CLK_TCK"))
    # the command may hold anything: man 5 proc, field 2
    stat = f"1 (sh) -c ) S 0 1 1 0 -1 {'0 ' * 13}{ticks} 4608 200"
    (root / "proc/1/stat").write_text(stat)
    (root / "proc/uptime").write_text(f"{uptime} {uptime / 2}\n")
    return root
