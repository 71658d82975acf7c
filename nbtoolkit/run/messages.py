"""Define every message between our processes as a frozen dataclass, encoded to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nbtoolkit.run.rank_check import Weights

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        """Stand in for what only mypy needs; the standard library has it from Python 3.11 on."""
        return lambda kind: kind


_TYPES: dict[str, type[Message]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Message:
    """Each subclass is a frozen dataclass with keyword-only fields; its name is the tag in JSON."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        _TYPES[cls.__name__] = dataclass(frozen=True, kw_only=True)(cls)


# --- a rank to its supervisor, without an answer ---


class Statement(Message):
    """What one rank says by itself."""


class PhaseReached(Statement):
    """The rank's process runs (started), is in its process group, or has the function (ready)."""

    phase: Literal["started", "group", "ready"]
    pid: int | None = None


class MetricsAnnounced(Statement):
    """Which metrics the function will report; ``stems`` are beginnings of names."""

    names: list[str]
    stems: list[str]
    first_step: int


class ModulesImported(Statement):
    """Installed modules that the rank begins to import."""

    names: list[str]


class CollectivesStarted(Statement):
    """How many collectives of the default process group the rank has started so far."""

    count: int


class LongOperation(Statement):
    """The rank enters or leaves ``with ctx.pause_hang_detection(what)``."""

    what: str
    entered: bool


class Recorded(Statement):
    """What is written down in the run's record."""


class MetricsSent(Recorded):
    """Metrics from ``ctx.log``."""

    values: dict[str, float]
    step: int | None


class Reported(Recorded):
    """Metrics from a ``ctx.report`` that need not wait for an answer."""

    values: dict[str, float]
    step: int | None


class CheckpointWritten(Recorded):
    """A checkpoint that was written without the other ranks."""

    path: str
    step: int | None
    kind: str


class NoteSent(Recorded):
    """A sentence for the user."""

    text: str
    level: str


class SettingsUnread(Recorded):
    """A warning of settings that had no effect on the function."""

    text: str


class LastWord(Statement):
    """How the function ended, and the phase that ends the rank in."""

    phase: ClassVar[str]


class FunctionReturned(LastWord):
    """The function returned; its value is in the run's folder."""

    phase: ClassVar[str] = "done"
    numbers: dict[str, float]
    weights: Weights | None


class FunctionLeft(LastWord):
    """The function raised ``nb.RunStopped``."""

    phase: ClassVar[str] = "left"
    status: str


class FunctionRaised(LastWord):
    """The function raised; ``packed`` is the error (base64) where the folder takes no file."""

    phase: ClassVar[str] = "failed"
    packed: str | None = None


class GroupNotJoined(LastWord):
    """The rank could not join its process group."""

    phase: ClassVar[str] = "failed"
    error: str


# --- a rank to its supervisor, who answers when every rank has asked ---


class Question(Message):
    """What every rank asks at the same place; ``where`` is the line of the user's call."""

    call: ClassVar[str]
    where: str


class ReportRequest(Question):
    """``ctx.report``."""

    call: ClassVar[str] = "report"
    values: dict[str, float]
    step: int | None
    weights: Weights | None


class StopCheck(Question):
    """``ctx.raise_if_stopped``; ``reserve``: seconds that saving takes."""

    call: ClassVar[str] = "check"
    reserve: float


class SaveRequest(Question):
    """``ctx.save`` before it writes: no rank may still read what is replaced."""

    call: ClassVar[str] = "saving"


class CheckpointRequest(Question):
    """``ctx.save`` when it has written."""

    call: ClassVar[str] = "checkpoint"
    path: str
    step: int | None
    kind: str


# --- a supervisor to its ranks, and with its agent ---


class Go(Message):
    """All ranks are as far as this one."""


class StopPending(Message):
    """The run is to end: rank 0 is to bring all ranks to a check."""


class JobAssigned(Message):
    """The next job of ranks that are kept: the file of a pickled JobSpec."""

    file: str


class Answer(Message):
    """The answer to a question; ``leave``: the status to leave the function with, None: go on."""

    leave: str | None = None


class CallRefused(Message):
    """The answer where the ranks do not make the same call: the parts of an error."""

    what: str
    allowed: str
    do: str


Reply = Answer | CallRefused


class StartRanks(Message):
    """To an agent that the kernel has forked: where its ranks are to meet."""

    port: int


class RanksExited(Message):
    """From the agent: the launcher is through; exit codes of the ranks that failed, by rank."""

    codes: dict[str, int]


class RanksNotStarted(Message):
    """From the agent: the launcher could not start the ranks; ``busy``: their port is taken."""

    error: str
    busy: bool


AgentResult = RanksExited | RanksNotStarted


# --- the kernel and the supervisor of its run or search ---


class KernelRequest(Message):
    """What a handle asks for."""


class StopRequest(KernelRequest):
    """Let the ranks leave with ``status``; after ``grace`` seconds (None: never) kill them."""

    reason: str
    grace: float | None = None
    status: str = "stopped"


class KillRequest(KernelRequest):
    """End the ranks at once."""


class SearchCommand(KernelRequest):
    """A command to a search; ``n``: how many trials to add, or which trial to stop."""

    op: Literal["pause", "resume", "stop", "add_trials", "stop_trial"]
    n: int | None = None


class FilesChanged(Message):
    """From the supervisor: there is something new in the run's folder."""


class SupervisorLost(Message):
    """From a supervisor that cannot go on: an error's type and its parts."""

    error: str
    what: str
    allowed: str
    do: str


class Descriptors(Message):
    """Open file descriptors by name: one each, a list, more of them, or None."""

    def numbers(self) -> list[int]:
        """All of them, in the order in which they are sent."""
        found: list[int] = []
        _places(self, found)
        return found


class GroupDescriptors(Descriptors):
    """One end of every connection of an agent and, by rank, of its ranks: ours, or theirs."""

    agent: int
    connections: list[int]
    telemetry: list[int]


class AgentDescriptors(Descriptors):
    """The packed function, the packed JobSpec, and the connections' ends."""

    payload: int
    spec: int
    group: GroupDescriptors


class SupervisorDescriptors(Descriptors):
    """Packed function and request, line to the kernel, lock; ranks that the kernel has forked."""

    payload: int
    request: int
    connection: int
    lock: int
    group: GroupDescriptors | None = None


class FileDescriptor(Descriptors):
    """The one of a file or a socket."""

    file: int


class Enclosed(Message):
    """A packet that is too large: it is in the file."""

    descriptors: FileDescriptor


# --- packets: the fork server with the kernel, with supervisors and with its branches ---


class ServerReady(Message):
    """From the fork server, or a branch of it: it has imported everything, and is fork-safe."""


class ForkSupervisor(Message):
    """Fork a process that calls ``main`` ("module:function") with this message."""

    main: str
    detached: bool
    descriptors: SupervisorDescriptors


class SupervisorForked(Message):
    """The answer."""


class PreloadModules(Message):
    """Import modules, and call functions ("module:function"), in the fork server itself."""

    names: list[str]


class ModulesPreloaded(Message):
    """The answer."""


class ImportModules(Message):
    """Import modules, under ``environ``, for the ranks of the next launch."""

    names: list[str]
    environ: dict[str, str]


class ListProcesses(Message):
    """Ask which processes stay between launches."""


class ProcessList(Message):
    """The answer."""

    pids: list[int]


class ForkAgent(Message):
    """Fork an agent, from the branch for ``environment`` (an environment_key) if there is one.

    ``ticket`` comes back in the answer; ``patient``: wait for a first branch that is being made.
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
    """From a branch: its process runs."""

    pid: int


class GrowBranch(Message):
    """To a branch: fork the next one, which imports ``names``, too, and has this socket."""

    names: list[str]
    descriptors: FileDescriptor


class RetireBranch(Message):
    """To a branch: end with the last agent."""


class TrackRun(Message):
    """To the tracking service: follow a run's events; a second time: look now."""

    folder: str
    output_dir: str | None = None


class RunTracked(Message):
    """From the tracking service: the run is written through."""

    folder: str
    mlflow_run_id: str | None


class TrackingFailed(Message):
    """From the tracking service: the run could not be written."""

    folder: str
    error: str


_to_json = json.JSONEncoder(default=str).encode


def encode(message: Message, fds: list[int] | None = None) -> bytes:
    """A message as JSON; the descriptors that go with it are added to ``fds``."""
    fields = {"type": type(message).__name__, **vars(message)}
    if fds is not None and "descriptors" in fields:
        fields["descriptors"] = _places(fields["descriptors"], fds)
    return _to_json(fields).encode()


def decode(data: bytes, fds: Sequence[int] = ()) -> Message:
    """The message that :func:`encode` made this of.

    Raises:
        ValueError: its type is not known.
    """
    fields = json.loads(data)
    name = fields.pop("type", None)
    if name not in _TYPES:
        raise ValueError(f"a message has the type {name!r}, which is not known")
    if "descriptors" in fields:
        fields["descriptors"] = _named(fields["descriptors"], fds)
    return _TYPES[name](**fields)


def _places(named: Any, fds: list[int]) -> Any:
    """Descriptors as JSON: each stands as its place among ``fds``, to which it is added."""
    if isinstance(named, Descriptors):
        fields = {name: _places(item, fds) for name, item in vars(named).items()}
        return {"type": type(named).__name__, **fields}
    if isinstance(named, list):
        return [_places(fd, fds) for fd in named]
    if named is None:
        return None
    fds.append(named)
    return len(fds) - 1


def _named(places: Any, fds: Sequence[int]) -> Any:
    """The descriptors that :func:`_places` made this of."""
    if isinstance(places, dict):
        kind = _TYPES[places.pop("type")]
        return kind(**{name: _named(place, fds) for name, place in places.items()})
    if isinstance(places, list):
        return [fds[place] for place in places]
    return None if places is None else fds[places]
