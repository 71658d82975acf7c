"""How a rank talks to whoever keeps the run's record: the owner, or itself (inline, torchrun)."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

from nbtoolkit.runtime.gloo import new_gloo_group
from nbtoolkit.runtime.record import RunRecord
from nbtoolkit.runtime.signals import Heard, announcement
from nbtoolkit.runtime.wire import Line, Message

# What comes many times a second and can wait for the owner's next look, 50 ms away at most: to wake
# it takes 0.2 ms, more than a small model's step.
_QUIET = ("metrics", "reported", "collectives")

LOOK_SECONDS = 0.2  # between two looks at the run's folder when asked for news: one takes 10 us


class Channel(Protocol):
    """One rank's way to the run's record.

    Attributes:
        alone: a report need not wait for an answer as long as there are no news: no other rank has
            to hear the same, and nobody judges what is reported.
    """

    alone: bool

    def send(self, type: str, **fields: Any) -> None:
        """Say something; no answer comes. Any thread may."""

    def ask(self, type: str, **fields: Any) -> Message:
        """Say something that every rank says, and wait for the one answer all of them get."""

    def news(self) -> bool:
        """Whether the ranks are to come and ask; on rank 0, at once, without the other ranks."""


class OwnerChannel:
    """A rank under an owner, who answers when every rank has asked: all of them hear the same."""

    def __init__(self, line: Line, quiet: Line, *, alone: bool) -> None:
        self._line, self._quiet, self.alone = line, quiet, alone
        self._asking = threading.Lock()
        self._called = False

    def send(self, type: str, **fields: Any) -> None:
        """See :class:`Channel`. An owner that is gone is noticed at the next ask."""
        line = self._quiet if type in _QUIET else self._line
        line.send({"type": type, **fields})

    def ask(self, type: str, **fields: Any) -> Message:
        """See :class:`Channel`. Owner gone: the answer is to leave with ``stopped``."""
        with self._asking:
            self._line.send({"type": type, **fields})
            return self.wait() or {"leave": "stopped"}

    def news(self) -> bool:
        """See :class:`Channel`: 2 us. An owner that is gone is news too."""
        if not self._called and self._asking.acquire(blocking=False):  # else another thread asks
            try:
                for message in self._line.drain():
                    self._note(message)
            finally:
                self._asking.release()
        return self._called or self._line.closed

    def wait(self) -> Message | None:
        """The owner's next message; None when it is gone. Its call to come is only noted."""
        while (message := self._line.receive()) is not None and self._note(message):
            pass
        return message

    def _note(self, message: Message) -> bool:
        """Note the owner's call to come, which comes at any moment; whether it was that."""
        called: bool = message["type"] == "come"
        self._called |= called
        return called


class RecordChannel:
    """A rank that keeps the record itself: ``start="inline"``, or rank 0 of a torchrun job."""

    alone = False

    def __init__(self, record: RunRecord) -> None:
        self.record, self.heard = record, Heard()
        self._looked = time.monotonic()

    def send(self, type: str, **fields: Any) -> None:
        """See :class:`Channel`."""
        take(self.record, {"type": type, **fields})

    def ask(self, type: str, **fields: Any) -> Message:
        """See :class:`Channel`."""
        self._obey()
        return answer(self.record, {"type": type, **fields})

    def news(self) -> bool:
        """See :class:`Channel`; looks at the run's folder a few times a second."""
        now = time.monotonic()
        due = self.heard.number or now - self._looked >= LOOK_SECONDS
        if self.record.leaving is None and due:
            self._looked = now
            self._obey()
        return self.record.leaving is not None

    def _obey(self) -> None:
        """Heed a signal that came, and the request to stop that a handle left in the folder."""
        if self.heard.number:
            self.record.ask_to_stop("deadline", announcement(self.heard.number))
        if (request := self.record.stop_requested()) is not None:
            reason = request.get("reason", "a handle asked")
            self.record.ask_to_stop("stopped", reason, request.get("grace"))


def take(record: RunRecord, message: Message) -> None:
    """Write down what a rank says without asking; what only an owner heeds is no matter here."""
    if message["type"] == "metrics":
        record.logged(message["values"], message["step"])
    elif message["type"] == "reported":
        record.reported(message["values"], message["step"])
    elif message["type"] == "saved":
        record.saved(message["path"], message["step"], message["kind"])
    elif message["type"] == "note":
        record.note(message["text"], message["level"])
    elif message["type"] == "unread":
        record.note(message["text"], "warning")


def answer(record: RunRecord, message: Message) -> Message:
    """What the record says to a question that every rank has asked (``message`` is rank 0's)."""
    if message["type"] == "report":
        return {"leave": record.reported(message["values"], message["step"])}
    if message["type"] == "check":
        return {"leave": record.decide(message["reserve"])}
    if message["type"] == "checkpoint":
        record.saved(message["path"], message["step"], message["kind"])
    return {"leave": None}


class GroupChannel:
    """Ranks that torchrun or Slurm started: rank 0 keeps the record and broadcasts its answers."""

    alone = False

    def __init__(self, own: RecordChannel | None) -> None:
        self._own = own
        self.heard = own.heard if own is not None else Heard()
        self._group = new_gloo_group()

    def send(self, type: str, **fields: Any) -> None:
        """See :class:`Channel`; only rank 0 keeps a record."""
        if self._own is not None:
            self._own.send(type, **fields)

    def ask(self, type: str, **fields: Any) -> Message:
        """See :class:`Channel`: blocking collectives."""
        import torch.distributed as dist

        self._share_signals()
        if fields.get("weights") is not None:
            self._compare(fields)
        box: list[Any] = [self._own.ask(type, **fields) if self._own is not None else None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        message: Message = box[0]
        return message

    def _compare(self, said: Message) -> None:
        """All ranks are compared where one is: the setting is the run's."""
        import torch.distributed as dist

        ranks: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(ranks, {"weights": said["weights"]}, group=self._group)
        if self._own is not None:
            self._own.record.compare(ranks)

    def news(self) -> bool:
        """See :class:`Channel`; of the signals rank 0 knows its own, and the others' when asked."""
        return self._own is not None and self._own.news()

    def _share_signals(self) -> None:
        """A scheduler may signal any one rank: rank 0 has to know."""
        import torch
        import torch.distributed as dist

        came = torch.tensor([self.heard.number])
        dist.all_reduce(came, op=dist.ReduceOp.MAX, group=self._group)
        # A signal that reaches this rank while it waits in the collective is not in the result: it
        # must not be overwritten by 0, and is shared the next time.
        if int(came):
            self.heard.number = int(came)
