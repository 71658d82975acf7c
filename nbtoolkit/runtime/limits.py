"""Limits: how many CPUs and how much memory this process may use, containers counted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def cpu_count(root: Path = ROOT, affinity: int | None = None) -> int:
    """The CPUs this process may keep busy: its affinity mask, cut by a container's CPU quota.

    Args:
        root: where ``/proc`` and ``/sys`` are looked for.
        affinity: CPUs in the affinity mask; default: asked from the system.

    Returns:
        At least 1. A quota of 1.5 CPUs counts as 1: a thread above the quota is throttled, not run.
    """
    cpus = affinity or _affinity()
    return max(1, int(min([cpus, *_cpu_quotas(root)])))


def memory_limit(root: Path = ROOT) -> int:
    """Bytes of memory this process may use: the machine's, cut by containers; 0 when unknown."""
    known = [*_machine_memory(root), *_memory_limits(root)]
    return min(known, default=0)


def _affinity() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def _machine_memory(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            yield int(line.split()[1]) * 1024  # "MemTotal:   24684092 kB"


def _memory_limits(root: Path) -> Iterator[int]:
    for folder in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # version 2, version 1
            value = _text(folder / name).strip()
            if value.isdigit():  # no limit: "max" in version 2, a huge number in version 1
                yield int(value)


def _cpu_quotas(root: Path) -> Iterator[float]:
    for folder in _groups(root, "cpu"):
        words = _text(folder / "cpu.max").split()  # version 2: "150000 100000" or "max 100000"
        words = words or [
            _text(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        ]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            yield int(words[0]) / int(words[1])


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The control group folders that bind this process: its own and all above, version 2 and 1.

    A limit may stand at any level; inside a container the path names folders of the host that are
    not there, and the container's own limit stands at the top.
    """
    top = root / "sys/fs/cgroup"
    own = {"": "/", controller: "/"}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    for folder, path in ((top, own[""]), (top / controller, own[controller])):
        below = PurePosixPath(path.lstrip("/"))
        yield from (folder / part for part in dict.fromkeys((below, *below.parents)))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not there, or not ours to read
        return ""
