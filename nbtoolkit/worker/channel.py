"""Connect a rank to the process that records the run, and send its heartbeat."""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType
from typing import Any, Protocol

from nbtoolkit.run import messages
from nbtoolkit.run.events import RunRecord
from nbtoolkit.run.messages import CollectivesStarted
from nbtoolkit.run.rank_check import Weights
from nbtoolkit.run.signals import SignalFlag, describe_signal
from nbtoolkit.run.transport import Connection
from nbtoolkit.worker.collectives import new_gloo_group

# --- channel ---


# What comes many times a second and can wait for the supervisor's next look, 50 ms away at most: to
# wake it takes 0.2 ms, more than a small model's step.
_QUIET = (messages.MetricsSent, messages.Reported, messages.CollectivesStarted)

LOOK_SECONDS = 0.2  # between two looks at the run's folder when asked for news: one takes 10 us


class Channel(Protocol):
    """One rank's way to the run's record.

    Attributes:
        alone: a report need not wait for an answer as long as there are no news: no other rank has
            to hear the same, and nobody judges what is reported.
    """

    alone: bool

    def send(self, message: messages.Statement) -> None:
        """Say something; no answer comes. Any thread may."""

    def ask(self, question: messages.Question) -> messages.Reply:
        """Say something that every rank says, and wait for the one answer all of them get."""

    def news(self) -> bool:
        """Whether the ranks are to come and ask; on rank 0, at once, without the other ranks."""


class OwnerChannel:
    """A rank under a supervisor, which answers all ranks alike once every one has asked."""

    def __init__(self, line: Connection, quiet: Connection, *, alone: bool) -> None:
        self._line, self._quiet, self.alone = line, quiet, alone
        self._asking = threading.Lock()
        self._called = False

    def send(self, message: messages.Statement) -> None:
        """See :class:`Channel`. A supervisor that is gone is noticed at the next ask."""
        line = self._quiet if isinstance(message, _QUIET) else self._line
        line.send(message)

    def ask(self, question: messages.Question) -> messages.Reply:
        """See :class:`Channel`. Supervisor gone: the answer is to leave with ``stopped``."""
        with self._asking:
            self._line.send(question)
            reply = self.wait()
        return reply if isinstance(reply, messages.Reply) else messages.Answer(leave="stopped")

    def news(self) -> bool:
        """See :class:`Channel`: 2 us. A supervisor that is gone is news too."""
        if not self._called and self._asking.acquire(blocking=False):  # else another thread asks
            try:
                for message in self._line.drain():
                    self._note(message)
            finally:
                self._asking.release()
        return self._called or self._line.closed

    def wait(self) -> messages.Message | None:
        """The supervisor's next message; None when it is gone. Its call to come is only noted."""
        while (message := self._line.receive()) is not None and self._note(message):
            pass
        return message

    def _note(self, message: messages.Message) -> bool:
        """Note the supervisor's call to come, which comes at any moment; whether it was that."""
        called = isinstance(message, messages.StopPending)
        self._called |= called
        return called


class RecordChannel:
    """A rank that keeps the record itself: ``start="inline"``, or rank 0 of a torchrun job."""

    alone = False

    def __init__(self, record: RunRecord) -> None:
        self.record, self.heard = record, SignalFlag()
        self._looked = time.monotonic()

    def send(self, message: messages.Statement) -> None:
        """See :class:`Channel`."""
        take(self.record, message)

    def ask(self, question: messages.Question) -> messages.Reply:
        """See :class:`Channel`."""
        self._obey()
        return answer(self.record, question)

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
            self.record.request_stop("deadline", describe_signal(self.heard.number))
        if (request := self.record.stop_requested()) is not None:
            self.record.request_stop("stopped", request.reason, request.grace)


def take(record: RunRecord, message: messages.Statement) -> None:
    """Record what a rank sends without asking; what only a supervisor needs is ignored."""
    match message:
        case messages.MetricsSent():
            record.logged(message.values, message.step)
        case messages.Reported():
            record.reported(message.values, message.step)
        case messages.CheckpointWritten():
            record.saved(message.path, message.step, message.kind)
        case messages.NoteSent():
            record.note(message.text, message.level)
        case messages.SettingsUnread():
            record.note(message.text, "warning")


def answer(record: RunRecord, question: messages.Question) -> messages.Answer:
    """What the record says to a question that every rank has asked (this one is rank 0's)."""
    match question:
        case messages.ReportRequest():
            return messages.Answer(leave=record.reported(question.values, question.step))
        case messages.StopCheck():
            return messages.Answer(leave=record.decide(question.reserve))
        case messages.CheckpointRequest():
            record.saved(question.path, question.step, question.kind)
    return messages.Answer()


class GroupChannel:
    """Ranks that torchrun or Slurm started: rank 0 keeps the record and broadcasts its answers."""

    alone = False

    def __init__(self, own: RecordChannel | None) -> None:
        self._own = own
        self.heard = own.heard if own is not None else SignalFlag()
        self._group = new_gloo_group()

    def send(self, message: messages.Statement) -> None:
        """See :class:`Channel`; only rank 0 keeps a record."""
        if self._own is not None:
            self._own.send(message)

    def ask(self, question: messages.Question) -> messages.Reply:
        """See :class:`Channel`: blocking collectives."""
        import torch.distributed as dist

        self._share_signals()
        if isinstance(question, messages.ReportRequest) and question.weights is not None:
            self._compare(question.weights)
        box: list[Any] = [self._own.ask(question) if self._own is not None else None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        reply: messages.Reply = box[0]
        return reply

    def _compare(self, weights: Weights) -> None:
        """All ranks are compared where one is: the setting is the run's."""
        import torch.distributed as dist

        ranks: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(ranks, weights, group=self._group)
        if self._own is not None:
            self._own.record.compare(ranks)

    def news(self) -> bool:
        """See :class:`Channel`; of the signals rank 0 knows its own, and the others' when asked."""
        return self._own is not None and self._own.news()

    def _share_signals(self) -> None:
        """A cluster scheduler may signal any one rank: rank 0 has to know."""
        import torch
        import torch.distributed as dist

        came = torch.tensor([self.heard.number])
        dist.all_reduce(came, op=dist.ReduceOp.MAX, group=self._group)
        # A signal that reaches this rank while it waits in the collective is not in the result: it
        # must not be overwritten by 0, and is shared the next time.
        if int(came):
            self.heard.number = int(came)


# --- heartbeat ---
# A rank's heartbeat: how many collectives it has started, sent by a thread of its own.
#
# The number shows who waits for whom, also where no stack does: on a GPU a collective returns at
# once, and the rank waits in the next ``.item()``.


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
            self._channel.send(CollectivesStarted(count=started))


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
