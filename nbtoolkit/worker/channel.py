"""Connect a rank to the process that records the run, and send its heartbeat."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from nbtoolkit.run.events import MetricsLogged, MetricsReported
from nbtoolkit.run.record import RunRecord
from nbtoolkit.wire import messages
from nbtoolkit.wire.messages import Weights
from nbtoolkit.wire.signals import SignalFlag, describe_signal
from nbtoolkit.wire.transport import Connection
from nbtoolkit.worker.collectives import new_gloo_group
from nbtoolkit.worker.waiting import waiting_place

# Sent many times a second, and not urgent: the supervisor reads them every 50 ms. To wake it would
# take 0.2 ms, more than a step of a small model.
_TELEMETRY = (MetricsLogged, MetricsReported, messages.CollectivesStarted)

LOOK_SECONDS = 0.2  # between two checks of the run's folder for a stop request; one takes 10 us


class Channel(Protocol):
    """One rank's connection to the run's record.

    Attributes:
        async_reports: whether a report may return without an answer while no stop is pending:
            there is no other rank, and no search that decides by the reports.
    """

    async_reports: bool

    def send(self, message: messages.Statement) -> None:
        """Send a message that has no answer. Any thread may call it."""

    def ask(self, question: messages.Question) -> messages.Reply:
        """Ask what every rank asks, and wait for the common answer."""

    def stop_pending(self) -> bool:
        """Whether rank 0 should call all ranks to a check; returns at once."""


class SupervisorChannel:
    """A rank under a supervisor, which sends all ranks one answer once every rank has asked."""

    def __init__(
        self, connection: Connection, telemetry: Connection, *, async_reports: bool
    ) -> None:
        self._connection = connection
        self._telemetry = telemetry
        self.async_reports = async_reports
        self._asking = threading.Lock()
        self._stop_pending = False

    def send(self, message: messages.Statement) -> None:
        """See :class:`Channel`. A lost supervisor is noticed at the next :meth:`ask`."""
        not_urgent = isinstance(message, _TELEMETRY)
        (self._telemetry if not_urgent else self._connection).send(message)

    def ask(self, question: messages.Question) -> messages.Reply:
        """See :class:`Channel`. The answer of a lost supervisor is to stop."""
        with self._asking:
            self._connection.send(question)
            reply = self.wait()
        return reply if isinstance(reply, messages.Reply) else messages.Answer(leave="stopped")

    def stop_pending(self) -> bool:
        """See :class:`Channel`: 2 us. True for a lost supervisor, too."""
        # If the lock is taken, another thread asks and reads the messages.
        if not self._stop_pending and self._asking.acquire(blocking=False):
            try:
                for message in self._connection.drain():
                    self._is_stop(message)
            finally:
                self._asking.release()
        return self._stop_pending or self._connection.closed

    def wait(self) -> messages.Message | None:
        """Return the supervisor's next message but StopPending, which it only notes.

        None: it is gone.
        """
        while (message := self._connection.receive()) is not None and self._is_stop(message):
            pass
        return message

    def _is_stop(self, message: messages.Message) -> bool:
        """Whether this is StopPending, which may come at any moment; notes it."""
        stop = isinstance(message, messages.StopPending)
        self._stop_pending |= stop
        return stop


class AloneChannel:
    """A rank of several that works by itself: no question waits for the other ranks.

    Args:
        channel: the rank's channel.
        ends: the deadline on the monotonic clock; None: no limit.
    """

    async_reports = False

    def __init__(self, channel: Channel, ends: float | None) -> None:
        self._channel = channel
        self._ends = ends

    def send(self, message: messages.Statement) -> None:
        """See :class:`Channel`."""
        self._channel.send(message)

    def ask(self, question: messages.Question) -> messages.Reply:
        """See :class:`Channel`; answered here."""
        reserve = question.reserve if isinstance(question, messages.StopCheck) else 0.0
        if self._ends is not None and time.monotonic() + reserve >= self._ends:
            return messages.Answer(leave="deadline")
        return messages.Answer(leave="stopped" if self.stop_pending() else None)

    def stop_pending(self) -> bool:
        """See :class:`Channel`."""
        return self._channel.stop_pending()


class RecordChannel:
    """A rank that keeps the record itself: ``start="inline"``, or rank 0 of a torchrun job."""

    async_reports = False

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.signal_flag = SignalFlag()
        self._looked = time.monotonic()

    def send(self, message: messages.Statement) -> None:
        """See :class:`Channel`."""
        self.record.take(message)

    def ask(self, question: messages.Question) -> messages.Reply:
        """See :class:`Channel`."""
        self._read_stop_requests()
        return self.record.answer(question)

    def stop_pending(self) -> bool:
        """See :class:`Channel`; checks the run's folder a few times a second."""
        now = time.monotonic()
        due = self.signal_flag.number or now - self._looked >= LOOK_SECONDS
        if self.record.leaving is None and due:
            self._looked = now
            self._read_stop_requests()
        return self.record.leaving is not None

    def _read_stop_requests(self) -> None:
        """Stop for a caught signal, or for the request of a handle in the run's folder."""
        if self.signal_flag.number:
            self.record.request_stop("deadline", describe_signal(self.signal_flag.number))
        if (request := self.record.stop_requested()) is not None:
            self.record.request_stop("stopped", request.reason, request.grace)


class GroupChannel:
    """Ranks that torchrun or Slurm started: rank 0 keeps the record and broadcasts its answers.

    Args:
        local: rank 0's record; None on the others.
        timeout: seconds that the ranks wait for each other at a report.
    """

    async_reports = False

    def __init__(self, local: RecordChannel | None, timeout: float) -> None:
        self._local = local
        self.record = None if local is None else local.record
        self.signal_flag = local.signal_flag if local is not None else SignalFlag()
        self._group = new_gloo_group(timeout)

    def send(self, message: messages.Statement) -> None:
        """See :class:`Channel`; only rank 0 keeps a record."""
        if self._local is not None:
            self._local.send(message)

    def ask(self, question: messages.Question) -> messages.Reply:
        """See :class:`Channel`; runs blocking collectives."""
        import torch.distributed as dist

        self._share_signals()
        if isinstance(question, messages.ReportRequest) and question.weights is not None:
            self._compare(question.weights, question.values)
        reply = messages.Answer() if self._local is None else self._local.ask(question)
        replies: list[messages.Reply] = [reply]
        dist.broadcast_object_list(replies, src=0, group=self._group)
        return replies[0]

    def _compare(self, weights: Weights, values: dict[str, float]) -> None:
        """Compare all ranks; either all ranks have weights or none."""
        import torch.distributed as dist

        ranks: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(ranks, (weights, values), group=self._group)
        if self.record is not None:
            all_weights, all_values = zip(*ranks, strict=True)
            self.record.compare(all_weights, all_values)

    def stop_pending(self) -> bool:
        """See :class:`Channel`; knows rank 0's signals at once, the others' after :meth:`ask`."""
        return self._local is not None and self._local.stop_pending()

    def _share_signals(self) -> None:
        """Tell rank 0 of the other ranks' signals: a cluster scheduler may signal any rank."""
        import torch
        import torch.distributed as dist

        number = torch.tensor([self.signal_flag.number])
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group)
        # A signal that comes during the collective is not in the result. It must not be overwritten
        # with 0, and is shared the next time.
        if int(number):
            self.signal_flag.number = int(number)


SECONDS = 1.0  # between two checks; one takes 0.1 ms


@contextlib.contextmanager
def heartbeat(channel: Channel, ranks: int) -> Iterator[None]:
    """Send how many collectives the rank has started, and where it waits in one, when it changes.

    The number shows which rank waits for which, even if the place does not: on a GPU a collective
    returns at once, and the rank waits in the next ``.item()``. A thread sends both inside the
    ``with`` block.

    Args:
        channel: where to send it.
        ranks: of the run; a single rank waits for no other, and has no thread.
    """
    if ranks == 1:
        yield
        return
    ended = threading.Event()
    sent = messages.CollectivesStarted(count=0)

    def send() -> None:
        nonlocal sent
        count = started_collectives()
        where = ""
        stack = list[str]()
        # In a collective that began before the last look: most take less than a second.
        if count == sent.count:
            where, stack = waiting_place()
        now = messages.CollectivesStarted(count=count, where=where, stack=stack)
        if now != sent:
            sent = now
            channel.send(now)

    def run() -> None:
        while not ended.wait(SECONDS):
            send()

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        send()


def started_collectives() -> int:
    """Return the number of collectives of the default process group that this process has started.

    Gloo and NCCL count them when they start, not when they end. Collectives of other groups and
    point-to-point messages do not count.
    """
    import torch.distributed as dist

    # The user's code may end the group at any moment.
    with contextlib.suppress(RuntimeError, ValueError):
        if dist.is_initialized():
            group: Any = dist.group.WORLD  # torch's stubs lack the method
            return int(group._get_sequence_number_for_group())
    return 0
