"""Carry the kernel's environment to the ranks, without what would mislead them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nbtoolkit.environment.launch_plan import LaunchPlan

RANK_MARK = "NBTOOLKIT_RANK"
"""Set in every rank (and what it starts) to the run's folder."""

# Positions in some other job: a rank that believed them would wait for ever for peers that do not
# exist.
_STALE = frozenset(
    [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_NAME",
        "ROLE_WORLD_SIZE",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TPU_NAME",
        "PJRT_DEVICE",
        "COLAB_TPU_ADDR",
        "XRT_TPU_CONFIG",
    ]
)
_STALE_PREFIXES = (
    "TORCHELASTIC_",
    "SLURM_",
    "PMI_",
    "PMIX_",
    "OMPI_",
    "MV2_",
    "FSDP_",
    "ACCELERATE_",
)


@dataclass(frozen=True, kw_only=True)
class KernelEnvironment:
    """What a rank needs to find the same files and modules as the kernel."""

    environ: Mapping[str, str]
    cwd: str
    sys_path: list[str]
    argv: list[str]


def kernel_environment() -> KernelEnvironment:
    """This process's."""
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        cwd = "/"
    return KernelEnvironment(
        environ=dict(os.environ), cwd=cwd, sys_path=list(sys.path), argv=list(sys.argv)
    )


def without_stale(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without the variables that place a process in some other job."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _STALE and not name.startswith(_STALE_PREFIXES)
    }


def enter(kernel: KernelEnvironment, plan: LaunchPlan, folder: Path) -> None:
    """Make this process stand where the kernel stands, set up for ``plan``."""
    environ = without_stale(kernel.environ)
    environ.update(_planned(environ, plan, folder))
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(kernel.cwd)
    sys.path[:] = kernel.sys_path
    sys.argv[:] = kernel.argv


def of_plan(plan: LaunchPlan, folder: Path) -> dict[str, str]:
    """The variables that every rank has, wherever it runs."""
    return {
        RANK_MARK: str(folder),
        "ACCELERATE_MIXED_PRECISION": "no" if plan.precision == "fp32" else plan.precision,
        "ACCELERATE_USE_CPU": "true" if plan.device_type == "cpu" else "false",
    }


@contextmanager
def lend_variables(environ: Mapping[str, str]) -> Iterator[None]:
    """Let this process have exactly these variables for a while; then each is again what it was.

    What the block itself changes in other variables stays.
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
    """``OMP_NUM_THREADS`` of a rank: the user's where it is a number (or a list: ``4,2``)."""
    wish = environ.get("OMP_NUM_THREADS", "")
    first = wish.split(",")[0]
    return wish if first.isdecimal() and int(first) else str(plan.threads_per_rank)


def _planned(environ: Mapping[str, str], plan: LaunchPlan, folder: Path) -> dict[str, str]:
    set_now = {
        **of_plan(plan, folder),
        # empty on the CPU: a GPU that is not usable must not be found either
        "CUDA_VISIBLE_DEVICES": ",".join(plan.devices),
        "OMP_NUM_THREADS": omp_threads(environ, plan),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counting GPUs must not touch CUDA before the fork
        "TOKENIZERS_PARALLELISM": environ.get("TOKENIZERS_PARALLELISM", "false"),
        # All ranks are on this machine: whatever they listen on is nobody else's to reach.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    if "inline" in environ.get("MPLBACKEND", ""):
        set_now["MPLBACKEND"] = "agg"  # the notebook's back end needs the notebook's kernel
    return set_now
