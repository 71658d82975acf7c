"""Two network namespaces joined by a veth pair: two nodes on one machine, as root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ADDRESSES = ("10.211.7.1", "10.211.7.2")
_INTERFACE = "veth0"


def missing() -> str:
    """What this machine lacks for it; empty: nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    made = subprocess.run(["ip", "netns", "add", "nbtoolkit-try"], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    ip("netns", "del", "nbtoolkit-try")
    return ""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class TwoNodes:
    """Two nodes with a link."""

    def __init__(self) -> None:
        self.names = [f"nbtoolkit-{os.getpid()}-{number}" for number in (1, 2)]
        self._started: list[subprocess.Popen[str]] = []

    def torchrun(
        self, folder: Path, *options: str, conf: tuple[str, ...] = (), nodes: int = 2
    ) -> list[subprocess.Popen[str]]:
        """Start torchrun with one rank on each of the first nodes, of two that it waits for.

        The script is ``job.py`` in the folder.
        """
        endpoint = f"--rdzv-endpoint={ADDRESSES[0]}:29400"
        # Both nodes have this machine's name, by which torchrun would find the first one.
        fixed = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", endpoint]
        started = []
        for name, address in list(zip(self.names, ADDRESSES, strict=True))[:nodes]:
            settings = f"--rdzv-conf={','.join([f'is_host={address == ADDRESSES[0]}', *conf])}"
            words = ["-m", "torch.distributed.run", *fixed, settings, *options]
            started.append(self._start(name, folder, *words, f"--local-addr={address}", "job.py"))
        return started

    def first_rank(self, folder: Path) -> subprocess.Popen[str]:
        """Start ``job.py`` as rank 0 of two without torchrun, as ssh and srun do."""
        variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        address = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
        return self._start(self.names[0], folder, "job.py", **variables, **address)

    def processes(self, node: int) -> list[psutil.Process]:
        """The processes that run on a node: torchrun's agent, and its rank."""
        listed = ["ip", "netns", "pids", self.names[node]]
        done = subprocess.run(listed, capture_output=True, text=True, check=False)
        return [
            psutil.Process(pid) for pid in map(int, done.stdout.split()) if psutil.pid_exists(pid)
        ]

    def slow_down(self, rate: str) -> None:
        """Limit what each node sends: ``1mbit``. The limit delays packets, too."""
        for name in self.names:
            limits = ("rate", rate, "burst", "16kbit", "latency", "1s")
            words = ("tc", "-n", name, "qdisc", "add", "dev", _INTERFACE, "root", "tbf", *limits)
            subprocess.run(words, check=True, capture_output=True)

    def cut(self, whole: bool = True) -> None:
        """Cut the link, or join it again."""
        state = "down" if whole else "up"
        ip("-n", self.names[1], "link", "set", _INTERFACE, state)

    def _start(
        self, node: str, folder: Path, *words: str, **variables: str
    ) -> subprocess.Popen[str]:
        """Start Python on a node."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", node, sys.executable, *words],
            cwd=folder,
            env={
                **os.environ,
                "GLOO_SOCKET_IFNAME": _INTERFACE,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "TMPDIR": str(folder),
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    @contextmanager
    def running(self) -> Iterator[TwoNodes]:
        """Make them, and remove them with all of their processes."""
        try:
            for name in self.names:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            there = ("peer", "name", _INTERFACE, "netns", self.names[1])
            ip("-n", self.names[0], "link", "add", "name", _INTERFACE, "type", "veth", *there)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", _INTERFACE)
                ip("-n", name, "link", "set", _INTERFACE, "up")
            yield self
        finally:
            for node, name in enumerate(self.names):
                for process in self.processes(node):
                    process.kill()
                subprocess.run(["ip", "netns", "del", name], check=False)
            for started in self._started:
                if started.stdout and not started.stdout.closed:
                    started.communicate()
