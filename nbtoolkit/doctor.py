"""nb.doctor(): what is here, what a launch would do, and what may go wrong."""

from __future__ import annotations

from dataclasses import dataclass

from nbtoolkit.environment.deadline import session_age, span, time_limit
from nbtoolkit.environment.fork_diagnosis import ProbeResult, find_cause, probe_fork
from nbtoolkit.environment.hardware import Hardware, detect_hardware
from nbtoolkit.environment.installed import known_bad
from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.environment.resources import free_space, size_text
from nbtoolkit.errors import NbtoolkitError
from nbtoolkit.host import Host, detect_host
from nbtoolkit.run.resume import versions
from nbtoolkit.text_table import html_table


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """What :func:`doctor` found; shown as a table in a cell, as text by ``print``."""

    host: Host
    hardware: Hardware
    session: str
    """How old the session is, and when a run must end."""
    room: str
    """How much may still be written, and where."""
    plan: LaunchPlan | None
    """What a launch with default settings would do here; None when it would be refused."""
    refusal: str
    """Why, when it would be refused."""
    versions: dict[str, str]
    problems: tuple[str, ...]
    """Known-bad pairs of libraries found here, in words."""
    fork: ProbeResult
    """Whether ``start="fork"`` would work in this process."""
    cause: str
    """Which import or cell made this process not fork-safe; empty when it is."""

    @property
    def ok(self) -> bool:
        """Whether a launch works here and nothing known to be bad was found."""
        return self.plan is not None and not self.problems

    def explain(self) -> str:
        """Everything as text."""
        plan = self.plan.explain() if self.plan is not None else f"refused: {self.refusal}"
        names = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        parts = [
            f"host      {self.host.explain()}",
            f"session   {self.session}",
            f"room      {self.room}",
            f"hardware  {self.hardware.explain()}",
            plan,
            f"versions  {names}",
            *(f"problem   {problem}" for problem in self.problems),
            f"fork-safe {self._fork()}",
        ]
        return "\n".join(parts)

    def _fork(self) -> str:
        verdict = "yes" if self.fork.ok else "no"
        cause = f"; {self.cause}" if self.cause else ""
        harmless = (
            "" if self.fork.ok else ' (nb.launch works all the same; only start="fork" does not)'
        )
        return f"{verdict}: {self.fork.reason}{cause}{harmless}"

    def __str__(self) -> str:
        return self.explain()

    def _repr_html_(self) -> str:
        rows = [
            ("host", f"{self.host.kind}: {self.host.reason}"),
            ("session", self.session),
            ("room", self.room),
            ("hardware", self.hardware.explain()),
            ("plan", self.plan.explain() if self.plan is not None else f"refused: {self.refusal}"),
            ("fork-safe", self._fork()),
            *self.versions.items(),
        ]
        return html_table("nbtoolkit doctor", rows, self.problems)


def doctor() -> DoctorReport:
    """Look at host, hardware, libraries and this process; nothing is changed or touched.

    The probe forks a child that computes in parallel (and allocates on a GPU if there is one);
    where it fails, fresh interpreters import this process's packages one after the other to name
    the one that breaks forks (up to three minutes).

    Returns:
        The report; ``print`` it, or let a cell show it.
    """
    from nbtoolkit.config.schema import load_config

    host, hardware = detect_host(), detect_hardware()
    plan: LaunchPlan | None = None
    refusal = ""
    try:
        plan = make_plan(load_config(), host, hardware)
    except NbtoolkitError as error:
        refusal = str(error)
    device = bool(hardware.usable)
    fork = probe_fork(device=device)
    return DoctorReport(
        host=host,
        hardware=hardware,
        session=_session(),
        room=_room(host),
        plan=plan,
        refusal=refusal,
        versions=versions(),
        problems=tuple(known_bad()),
        fork=fork,
        cause="" if fork.ok else find_cause(device=device),
    )


def _session() -> str:
    from nbtoolkit.config.schema import load_config

    notes = time_limit(load_config()).notes
    age = session_age()
    told = "of unknown age" if age is None else f"{span(age)} old"
    return "; ".join([told, *(text for _, text in notes)] if notes else [told, "no limit is set"])


def _room(host: Host) -> str:
    """Free space where results and passing files go."""
    places = dict.fromkeys([host.working, host.scratch, *([host.kept] if host.kept else [])])
    return ", ".join(f"{place}: {size_text(free_space(place))} free" for place in places)
