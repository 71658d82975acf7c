"""Define the messages between nbtoolkit's processes: frozen dataclasses, encoded as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        """Stand in for ``typing``'s, which Python 3.11 has: only mypy needs it."""
        return lambda kind: kind


Weights = list[list[float]]
"""For each optimizer, in the order of their first steps, some weights of its parameters."""

_TYPES: dict[str, type[Message]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Message:
    """Base class: each subclass is a frozen keyword-only dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    type: ClassVar[str]
    """The tag in JSON: the class's name, of an event a name of its own."""

    def __init_subclass__(cls, *, type: str = "") -> None:
        cls.type = type or cls.__name__
        _TYPES[cls.type] = dataclass(frozen=True, kw_only=True)(cls)


class Statement(Message):
    """A message that one rank sends by itself; the events of events.py are others."""


class PhaseReached(Statement):
    """The rank has started, has joined its process group, or has the function (ready)."""

    phase: Literal["started", "group", "ready"]
    pid: int | None = None


class MetricsAnnounced(Statement):
    """The metrics that the function will report; ``stems`` are prefixes of names."""

    names: list[str]
    stems: list[str]
    first_step: int


class Accumulates(Statement):
    """The rank enters or leaves a loop in which more accumulation steps need less memory."""

    entered: bool


class ModulesImported(Statement):
    """Installed modules that rank 0 has imported; the supervisor passes it on to the kernel."""

    names: list[str]


class CollectivesStarted(Statement):
    """The number of collectives of the default process group that the rank has started.

    ``where``: the line of the user's call, if the rank has waited in a collective since its last
    heartbeat, else empty; ``stack``: its frames from the training function on.
    """

    count: int
    where: str = ""
    stack: list[str] = field(default_factory=list)


class LongOperation(Statement):
    """The rank enters or leaves ``with ctx.pause_hang_detection(what)``."""

    what: str
    entered: bool


class UsageWarning(Statement):
    """A warning of how the function uses settings, folds, loaders; a search gives it once.

    ``searched``: settings of the search that the function has not read.
    """

    text: str
    searched: list[str] = field(default_factory=list)


class FilesWritten(Statement):
    """The files that a job of a search has written outside its folder."""

    paths: list[str]


class LastWord(Statement):
    """How the function ended; ``phase``: the rank's phase from then on."""

    phase: ClassVar[str]


class FunctionReturned(LastWord):
    """The function returned; its value is in the run's folder, its numbers here."""

    phase: ClassVar[str] = "done"
    numbers: dict[str, float]
    weights: Weights | None


class FunctionLeft(LastWord):
    """The function raised ``nb.RunStopped``."""

    phase: ClassVar[str] = "left"
    status: str


class FunctionRaised(LastWord):
    """The function raised; ``packed``: the error (base64) if it could not be written to disk."""

    phase: ClassVar[str] = "failed"
    packed: str | None = None


class GroupNotJoined(LastWord):
    """The rank could not join its process group."""

    phase: ClassVar[str] = "failed"
    error: str


class Question(Message):
    """A call that all ranks make together; ``where``: the line of the user's call."""

    call: ClassVar[str]
    where: str


class ReportRequest(Question):
    """``ctx.report``."""

    call: ClassVar[str] = "report"
    values: dict[str, float]
    step: int | None
    weights: Weights | None


class StopCheck(Question):
    """``ctx.raise_if_stopped``; ``reserve``: seconds needed for saving."""

    call: ClassVar[str] = "check"
    reserve: float


class SaveRequest(Question):
    """``ctx.save`` before it writes: no rank may still read the old file."""

    call: ClassVar[str] = "saving"


class CheckpointRequest(Question):
    """``ctx.save`` after it has written."""

    call: ClassVar[str] = "checkpoint"
    path: str
    step: int | None
    kind: str


class Go(Message):
    """All ranks have reached the same phase: continue."""


class StopPending(Message):
    """The run must end: rank 0 should call all ranks to a check."""


class Answer(Message):
    """The answer to a question; ``leave``: the status to stop with, None: continue."""

    leave: str | None = None


class CallRefused(Message):
    """The answer if the ranks make different calls: the parts of an error."""

    what: str
    allowed: str
    do: str


Reply = Answer | CallRefused


class RanksExited(Message):
    """From the agent: the launcher has returned; exit codes of the failed ranks, by rank."""

    codes: dict[str, int]


class RanksNotStarted(Message):
    """From the agent: the launcher could not start the ranks; ``busy``: the port is taken."""

    error: str
    busy: bool


AgentResult = RanksExited | RanksNotStarted


class KernelRequest(Message):
    """A request from a handle."""


class StopRequest(KernelRequest):
    """Stop the ranks with ``status``; after ``grace`` seconds (None: never) kill them.

    ``grace=0``: kill them at once.
    """

    reason: str
    grace: float | None = None
    status: str = "stopped"


class SearchCommand(KernelRequest):
    """A command to a search; ``n``: the number of trials to add, or the trial to stop."""

    op: Literal["pause", "resume", "add_trials", "stop_trial"]
    n: int | None = None


class FilesChanged(Message):
    """From the supervisor: the files in the run's folder have changed."""


class SupervisorLost(Message):
    """From a supervisor that fails: an error's type and its parts."""

    error: str
    what: str
    allowed: str
    do: str


class ServerReady(Message):
    """From the fork server: it has imported everything and can fork.

    ``spoiled_by``: instead it ends, since no process may be forked after the import of this
    package; empty: none.
    """

    spoiled_by: str = ""


class Fork(Message):
    """Fork a process that calls ``main`` ("module:function") with a list of descriptors.

    With ``group`` the process leads a process group, which ends with it, with its client and with
    the fork server, and the list has ``descriptors``. Without, the process is a client too, and its
    connection to the fork server is the first of the list.
    """

    main: str
    group: bool
    descriptors: list[int]


class Forked(Message):
    """The answer; the answers come in the order of the requests."""

    pid: int


class ProcessEnded(Message):
    """A process that the client had forked has ended; a negative ``code`` is a signal."""

    pid: int
    code: int


class HandOver(Message):
    """From the kernel: connect all clients with the next fork server.

    The descriptor is the kernel's own end of its connection to the next one; ``environment``: the
    environment_key in which that one has imported its packages.
    """

    environment: str
    descriptors: list[int]


class ClientAdded(Message):
    """To the next fork server: a client's connection."""

    descriptors: list[int]


class ServerChanged(Message):
    """To a client: a connection to the next fork server (see :class:`HandOver`)."""

    environment: str
    descriptors: list[int]


class TrackRun(Message):
    """To the tracking service: follow a run's events; sent again: read them now.

    ``environ``: the kernel's environment variables, such as MLflow's credentials.
    """

    folder: str
    environ: dict[str, str]


_to_json = json.JSONEncoder(default=str).encode


def encode(message: Message, fds: list[int] | None = None) -> bytes:
    """Encode a message as JSON; append its descriptors, which JSON cannot carry, to ``fds``."""
    fields = {"type": message.type, **vars(message)}
    if fds is not None:
        fds += fields.pop("descriptors", [])
    return _to_json(fields).encode()


def decode(data: bytes, fds: Sequence[int] = ()) -> Message:
    """Decode a message of :func:`encode`.

    Raises:
        ValueError: its type is unknown.
    """
    fields = json.loads(data)
    name = fields.pop("type", None)
    if name not in _TYPES:
        raise ValueError(f"a message has the type {name!r}, which is not known")
    kind = _TYPES[name]
    if "descriptors" in kind.__dataclass_fields__:
        fields["descriptors"] = list(fds)
    return kind(**fields)
