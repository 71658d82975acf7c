"""How a rank talks to whoever keeps the run's record: the owner, or itself (inline, torchrun)."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from nbtoolkit.runtime.record import RunRecord
from nbtoolkit.runtime.wire import Line, Message


class Channel(Protocol):
    """One rank's way to the run's record."""

    def send(self, type: str, **fields: Any) -> None:
        """Say something; no answer comes."""

    def ask(self, type: str, **fields: Any) -> Message:
        """Say something that every rank says, and wait for the one answer all of them get."""


class OwnerChannel:
    """A rank under an owner, who answers when every rank has asked: all of them hear the same."""

    def __init__(self, line: Line) -> None:
        self._line, self._asking = line, threading.Lock()

    def send(self, type: str, **fields: Any) -> None:
        """See :class:`Channel`. An owner that is gone is noticed at the next ask."""
        self._line.send({"type": type, **fields})

    def ask(self, type: str, **fields: Any) -> Message:
        """See :class:`Channel`. Owner gone: the answer is to leave with ``stopped``."""
        with self._asking:
            self._line.send({"type": type, **fields})
            return self.wait() or {"leave": "stopped"}

    def wait(self) -> Message | None:
        """The owner's next message; None when it is gone."""
        return self._line.receive()


class RecordChannel:
    """A rank that keeps the record itself: ``start="inline"``, or rank 0 of a torchrun job."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record

    def send(self, type: str, **fields: Any) -> None:
        """See :class:`Channel`."""
        if type == "metrics":
            self.record.logged(fields["values"], fields["step"])
        elif type != "long":  # nobody watches for hangs here
            self.record.write(type, **fields)

    def ask(self, type: str, **fields: Any) -> Message:
        """See :class:`Channel`."""
        return answer(self.record, {"type": type, **fields})


def answer(record: RunRecord, message: Message) -> Message:
    """What the record says to a question that every rank has asked (``message`` is rank 0's)."""
    request = record.stop_requested()
    if request is not None:
        record.ask_to_stop("stopped", request.get("reason", "a handle asked"), request.get("grace"))
    if message["type"] == "report":
        return {"leave": record.reported(message["values"], message["step"])}
    if message["type"] == "checkpoint":
        record.saved(message["path"], message["step"], message["kind"])
    return {"leave": None}


class GroupChannel:
    """Ranks that torchrun or Slurm started: rank 0 keeps the record and broadcasts its answers."""

    def __init__(self, rank: int, own: RecordChannel | None) -> None:
        import torch.distributed as dist

        self._rank, self._own = rank, own
        self._group = dist.new_group(backend="gloo")

    def send(self, type: str, **fields: Any) -> None:
        """See :class:`Channel`; only rank 0 keeps a record."""
        if self._own is not None:
            self._own.send(type, **fields)

    def ask(self, type: str, **fields: Any) -> Message:
        """See :class:`Channel`: a blocking collective."""
        import torch.distributed as dist

        box: list[Any] = [self._own.ask(type, **fields) if self._own is not None else None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        message: Message = box[0]
        return message
