"""Pass the kernel's environment to the ranks, without variables that would mislead them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nbtoolkit.environment.kernel_settings import ProcessSettings
from nbtoolkit.environment.launch_plan import LaunchPlan

RANK_MARK = "NBTOOLKIT_RANK"
"""Set to the run's folder in every rank and its child processes."""

# Positions in another job: a rank that used them would wait forever for ranks that do not exist.
_STALE = (
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"}
    | {"ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
    | {"TPU_NAME", "PJRT_DEVICE", "COLAB_TPU_ADDR", "XRT_TPU_CONFIG"}
)
_MPI = ("PMI_", "PMIX_", "OMPI_", "MV2_")
_STALE_PREFIXES = ("TORCHELASTIC_", "SLURM_", "FSDP_", "ACCELERATE_", *_MPI)


@dataclass(frozen=True, kw_only=True)
class KernelEnvironment:
    """The kernel's environment and settings, so that a rank finds the same files and modules."""

    environ: Mapping[str, str]
    cwd: str
    sys_path: list[str]
    argv: list[str]
    settings: ProcessSettings


def kernel_environment() -> KernelEnvironment:
    """Return the environment of this process."""
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        cwd = "/"
    return KernelEnvironment(
        environ=dict(os.environ),
        cwd=cwd,
        sys_path=list(sys.path),
        argv=list(sys.argv),
        settings=ProcessSettings.read(),
    )


def without_stale(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the variables of another job's ranks."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _STALE and not name.startswith(_STALE_PREFIXES)
    }


def apply_environment(kernel: KernelEnvironment, plan: LaunchPlan, folder: Path) -> None:
    """Give this process the kernel's environment, set up for a rank of ``plan``."""
    environ = without_stale(kernel.environ)
    environ.update(_rank_variables(environ, plan, folder))
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(kernel.cwd)
    sys.path[:] = kernel.sys_path
    sys.argv[:] = kernel.argv


def plan_variables(plan: LaunchPlan, folder: Path) -> dict[str, str]:
    """Return the variables of every rank, also of one that runs in place."""
    return {
        RANK_MARK: str(folder),
        "ACCELERATE_MIXED_PRECISION": "no" if plan.precision == "fp32" else plan.precision,
        "ACCELERATE_USE_CPU": "true" if plan.device_type == "cpu" else "false",
    }


@contextmanager
def temporary_variables(environ: Mapping[str, str]) -> Iterator[None]:
    """Set this process's variables to ``environ`` inside the block, and restore them at its end.

    Changes that the block makes to other variables are kept.
    """
    before = dict(os.environ)
    names = {name for name in {*before, *environ} if before.get(name) != environ.get(name)}
    _set(names, environ)
    try:
        yield
    finally:
        _set(names, before)


def _set(names: set[str], environ: Mapping[str, str]) -> None:
    for name in names:
        os.environ.pop(name, None)
        if name in environ:
            os.environ[name] = environ[name]


def omp_threads(environ: Mapping[str, str], plan: LaunchPlan) -> str:
    """Return a rank's ``OMP_NUM_THREADS``: the user's if it is a number (or a list: ``4,2``)."""
    value = environ.get("OMP_NUM_THREADS", "")
    first = value.split(",")[0]
    return value if first.isdecimal() and int(first) else str(plan.threads_per_rank)


def _rank_variables(environ: Mapping[str, str], plan: LaunchPlan, folder: Path) -> dict[str, str]:
    variables = {
        **plan_variables(plan, folder),
        # Empty on the CPU, so that torch does not find an unusable GPU.
        "CUDA_VISIBLE_DEVICES": ",".join(plan.devices),
        "OMP_NUM_THREADS": omp_threads(environ, plan),
        # Counting GPUs must not create a CUDA context before the fork.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "TOKENIZERS_PARALLELISM": environ.get("TOKENIZERS_PARALLELISM", "false"),
        # All ranks are on this machine; other machines must not reach their ports.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    if "inline" in environ.get("MPLBACKEND", ""):
        # The notebook's backend needs the notebook's kernel.
        variables["MPLBACKEND"] = "agg"
    return variables
