"""No socket of a run on one machine listens beyond loopback."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Any

import psutil
import pytest

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.run.paths import read_pickle
from nbtoolkit.worker.context import RunContext

SPACE = {
    "space": {"model.x": {"type": "float", "low": 0.0, "high": 1.0}},
    "study": {"metric": "loss"},
}


@pytest.fixture
def config(config: Config) -> Config:
    return config.with_overrides({"model.x": 0.5, "distributed.world_size": 2})


def listens(config: Config, ctx: RunContext) -> list[str]:
    """The addresses on which the processes of this run listen, of any of its groups."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
    agent = psutil.Process(os.getppid())
    ours = {agent.pid, *(child.pid for child in agent.children(recursive=True))}
    found = [
        connection.laddr
        for connection in psutil.net_connections("tcp")
        if connection.pid in ours and connection.status == psutil.CONN_LISTEN
    ]
    dist.barrier()
    ctx.report({"loss": config.model.x})
    return [f"{address.ip} {address.port}" for address in found]


def beyond(addresses: list[str]) -> list[str]:
    return [one for one in addresses if not ipaddress.ip_address(one.split()[0]).is_loopback]


def test_a_launch_listens_on_loopback_only(config: Config) -> None:
    found = nb.launch(listens, config, display="off").value
    assert found  # the store, and a pair of each rank
    assert beyond(found) == []


def test_trials_and_folds_on_all_devices_listen_on_loopback_only(config: Config) -> None:
    folds = nb.make_folds([0, 1] * 6, k=2)
    swept: Any = nb.sweep(
        listens,
        config,
        {**SPACE, "placement": "all_devices_per_trial"},
        n_trials=1,
        folds=folds,
        display="off",
    )
    values = list(swept.paths.folder.glob("trials/*/fold-*/values/0.pkl"))
    assert len(values) == 2
    assert [beyond(read_pickle(path)) for path in values] == [[], []]


def reached(config: Config, ctx: RunContext) -> list[str]:
    """The machine's addresses by which another user reaches the ranks' store."""
    listed = [one for addresses in psutil.net_if_addrs().values() for one in addresses]
    ours = [one.address for one in listed if one.family == socket.AF_INET]
    port, (read, write) = int(os.environ["MASTER_PORT"]), os.pipe()
    pid = os.fork()  # an interpreter in root's home is not another user's to start
    if pid == 0:
        if os.getuid() == 0:
            os.setuid(65534)
        found = [one for one in ours if socket.socket().connect_ex((one, port)) == 0]
        os.write(write, " ".join(found).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    with open(read) as answer:
        return answer.read().split()


def test_another_user_reaches_the_store_by_loopback_only(config: Config) -> None:
    found = nb.launch(reached, config, processes=2, display="off").value
    assert found == ["127.0.0.1"]
