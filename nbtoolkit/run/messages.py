"""Define the messages between nbtoolkit's processes: frozen dataclasses, encoded as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from nbtoolkit.run.rank_check import Weights

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        """A placeholder: only mypy needs it, and ``typing`` has it from Python 3.11 on."""
        return lambda kind: kind


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


# --- from a rank to its supervisor, without an answer ---


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
    """Installed modules that the rank imports."""

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


# --- from a rank to its supervisor, which answers once every rank has asked ---


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


# --- from a supervisor to its ranks, and with its agent ---


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


# --- the kernel and the supervisor of its run or search ---


class KernelRequest(Message):
    """A request from a handle."""


class StopRequest(KernelRequest):
    """Stop the ranks with ``status``; after ``grace`` seconds (None: never) kill them."""

    reason: str
    grace: float | None = None
    status: str = "stopped"


class KillRequest(KernelRequest):
    """Kill the ranks at once."""


class SearchCommand(KernelRequest):
    """A command to a search; ``n``: the number of trials to add, or the trial to stop."""

    op: Literal["pause", "resume", "stop", "add_trials", "stop_trial"]
    n: int | None = None


class FilesChanged(Message):
    """From the supervisor: the files in the run's folder have changed."""


class SupervisorLost(Message):
    """From a supervisor that fails: an error's type and its parts."""

    error: str
    what: str
    allowed: str
    do: str


class Descriptors(Message):
    """Open file descriptors by name: an int, a list, another :class:`Descriptors`, or None."""

    def numbers(self) -> list[int]:
        """All of them, in the order in which they are sent."""
        fds: list[int] = []
        _to_indices(self, fds)
        return fds


class GroupDescriptors(Descriptors):
    """One end of every connection of an agent and, by rank, of its ranks."""

    agent: int
    connections: list[int]
    telemetry: list[int]


class AgentDescriptors(Descriptors):
    """The packed function, the packed JobSpec, and the connections' ends."""

    payload: int
    spec: int
    group: GroupDescriptors


class SupervisorDescriptors(Descriptors):
    """Packed function and request, connection to the kernel, and the folder's lock."""

    payload: int
    request: int
    connection: int
    lock: int


class FileDescriptor(Descriptors):
    """A file or a socket."""

    file: int


class Enclosed(Message):
    """A message that is too large for a packet: the file holds it."""

    descriptors: FileDescriptor


# --- packets: the fork server with the kernel, supervisors and its branches ---


class ServerReady(Message):
    """From the fork server or a branch: it has imported everything and can fork."""


class ForkSupervisor(Message):
    """Fork a process that calls ``main`` ("module:function") with this message."""

    main: str
    detached: bool
    descriptors: SupervisorDescriptors


class SupervisorForked(Message):
    """The answer."""


class PreloadModules(Message):
    """Import modules and call functions ("module:function") in the fork server itself."""

    names: list[str]


class ModulesPreloaded(Message):
    """The answer."""


class ImportModules(Message):
    """Import modules for the ranks of the next launch, with the variables ``environ``."""

    names: list[str]
    environ: dict[str, str]


class ListProcesses(Message):
    """List the processes that stay alive between launches."""


class ProcessList(Message):
    """The answer."""

    pids: list[int]


class ForkAgent(Message):
    """Fork an agent from the branch for ``environment`` (an environment_key), if there is one.

    The answer repeats ``ticket``; ``patient``: wait for a first branch that is still importing.
    """

    ticket: int
    port: int
    environment: str
    patient: bool
    descriptors: AgentDescriptors


class AgentForked(Message):
    """The answer."""

    ticket: int
    pid: int


class AgentExited(Message):
    """An agent has ended; a negative ``code`` is a signal."""

    pid: int
    code: int


class BranchStarted(Message):
    """From a branch: its process has started."""

    pid: int


class GrowBranch(Message):
    """To a branch: fork the next branch, which also imports ``names``; the file is its socket."""

    names: list[str]
    descriptors: FileDescriptor


class RetireBranch(Message):
    """To a branch: exit with the last agent."""


class TrackRun(Message):
    """To the tracking service: follow a run's events; sent again: read them now.

    ``environ``: the kernel's environment variables, such as MLflow's credentials; None: the service
    started with them.
    """

    folder: str
    output_dir: str | None = None
    environ: dict[str, str] | None = None


class RunTracked(Message):
    """From the tracking service: the whole run is written."""

    folder: str
    mlflow_run_id: str | None


class TrackingFailed(Message):
    """From the tracking service: the run could not be written."""

    folder: str
    error: str


_to_json = json.JSONEncoder(default=str).encode

# In JSON, a descriptor is an index into the list of descriptors that goes with the message.
_Named: TypeAlias = "Message | list[int] | int | None"
_Indices: TypeAlias = "dict[str, Any] | list[int] | int | None"


def encode(message: Message, fds: list[int] | None = None) -> bytes:
    """Encode a message as JSON; appends its descriptors to ``fds``."""
    fields = {"type": message.type, **vars(message)}
    if fds is not None and "descriptors" in fields:
        fields["descriptors"] = _to_indices(fields["descriptors"], fds)
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
    if "descriptors" in fields:
        fields["descriptors"] = _from_indices(fields["descriptors"], fds)
    return _TYPES[name](**fields)


def _to_indices(named: _Named, fds: list[int]) -> _Indices:
    if isinstance(named, Message):
        fields = {name: _to_indices(value, fds) for name, value in vars(named).items()}
        return {"type": named.type, **fields}
    if named is None:
        return None
    first = len(fds)
    if isinstance(named, list):
        fds += named
        return list(range(first, len(fds)))
    fds.append(named)
    return first


def _from_indices(indices: _Indices, fds: Sequence[int]) -> _Named:
    if isinstance(indices, dict):
        kind = _TYPES[indices.pop("type")]
        return kind(**{name: _from_indices(index, fds) for name, index in indices.items()})
    if isinstance(indices, list):
        return [fds[index] for index in indices]
    return None if indices is None else fds[indices]
