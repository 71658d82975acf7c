"""Give the ranks of horovodrun the address that torch.distributed needs.

``horovodrun`` sets no ``MASTER_ADDR``. It runs a small key-value store over HTTP, by which
Horovod's own processes find each other (``horovod/runner/http/http_server.py`` of 0.28). Rank 0
writes an address there, and the others read it.
"""

from __future__ import annotations

import itertools
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping

from nbtoolkit.errors import GroupStartFailed

# A script that leaves its group and launches again must not read the address of before.
_LAUNCHES = itertools.count()
_POLL_SECONDS = 0.05
_REQUEST_SECONDS = 10.0


def horovod_address(
    rank: int, environ: Mapping[str, str], timeout: float = 300.0
) -> tuple[str, str] | None:
    """Return the host name and the port of rank 0, the same on all ranks.

    Args:
        rank: of this process.
        environ: has the address of the store, by ``HOROVOD_GLOO_RENDEZVOUS_ADDR`` and ``_PORT``.
        timeout: in seconds, how long a rank waits for rank 0's address.

    Returns:
        The address, or None where ``horovodrun`` did not start this process.

    Raises:
        GroupStartFailed: ranks come and go (``horovodrun --min-np``), or rank 0 wrote no address.
    """
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in environ:
        return None
    if environ.get("HOROVOD_ELASTIC") == "1":
        raise GroupStartFailed(
            "horovodrun was started with --min-np or --host-discovery-script, and changes the "
            "ranks while they run",
            allowed="horovodrun with a fixed number of processes",
            do="horovodrun -np N, or torchrun --nnodes MIN:MAX for ranks that come and go",
        )
    server = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    url = f"http://{':'.join(server)}/nbtoolkit/address-{next(_LAUNCHES)}"
    if rank == 0:
        address = f"{environ['HOROVOD_HOSTNAME']} {_free_port()}"
        _request(urllib.request.Request(url, data=address.encode(), method="PUT"))
    else:
        address = _wait_for(url, timeout)
    host, port = address.split()
    return host, port


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def _wait_for(url: str, timeout: float) -> str:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            return _request(urllib.request.Request(url))
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
        time.sleep(_POLL_SECONDS)
    raise GroupStartFailed(
        f"rank 0 wrote no address into horovodrun's store ({url}) within {timeout:.0f} s",
        allowed="every process of horovodrun calls nb.launch",
        do="see in the output of rank 0 why it did not",
    )


def _request(request: urllib.request.Request) -> str:
    # No proxy: the store is on a machine of this job.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_REQUEST_SECONDS) as answer:
        return str(answer.read().decode())
