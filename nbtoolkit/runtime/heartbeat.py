"""A rank's heartbeat: how many collectives it has started, sent by a thread of its own.

The number shows who waits for whom, also where no stack does: on a GPU a collective returns at
once, and the rank waits in the next ``.item()``.
"""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType
from typing import Any

from nbtoolkit.runtime.channel import Channel

SECONDS = 1.0  # between two looks; one takes 0.1 ms


class Heartbeat:
    """Sends the number while it is open, each time that it has changed.

    Args:
        channel: where to.
        ranks: of the run; one rank waits for nobody, and has no thread.
    """

    def __init__(self, channel: Channel, ranks: int) -> None:
        self._channel, self._sent = channel, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._on = ranks > 1

    def __enter__(self) -> None:
        if self._on:
            self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._on:
            self._ended.set()
            self._thread.join()
            self._send()

    def _run(self) -> None:
        while not self._ended.wait(SECONDS):
            self._send()

    def _send(self) -> None:
        started = started_collectives()
        if started != self._sent:
            self._sent = started
            self._channel.send("collectives", started=started)


def started_collectives() -> int:
    """How many collectives of the default process group this process has started.

    Gloo and NCCL count them when they are started, not when they are through. Collectives of other
    groups and point-to-point messages are not counted.
    """
    import torch.distributed as dist

    # The user's code may end the group at any moment.
    with contextlib.suppress(RuntimeError, ValueError):
        if dist.is_initialized():
            group: Any = dist.group.WORLD  # torch's stubs do not have the method
            return int(group._get_sequence_number_for_group())
    return 0
