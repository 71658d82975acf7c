"""The conductor: one process a search; it runs the program's jobs on the slots.

It is the search's owner as an owner is a run's: it never imports user code and never computes. What
is run next, and what an ending means, is the program's business.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from nbtoolkit.errors import NbtoolkitError
from nbtoolkit.runtime.carrier import TICK
from nbtoolkit.runtime.crossing import pack_error
from nbtoolkit.runtime.desk import Desk, KernelGone, LaunchpadGone
from nbtoolkit.runtime.flight import Flight
from nbtoolkit.runtime.owner import launchpad_lost, lost_to, sign, tell_lost
from nbtoolkit.runtime.paths import RunPaths
from nbtoolkit.runtime.payload import unpack_all
from nbtoolkit.runtime.record import RunRecord
from nbtoolkit.runtime.wire import Line, Message, wake
from nbtoolkit.search.errand import Errand
from nbtoolkit.search.program import Ending, Job, Program
from nbtoolkit.search.reserve import Reserve
from nbtoolkit.search.room import Room
from nbtoolkit.search.slots import Slot

COMMANDS = "commands"
"""The folder in a search's folder where handles without a line to it leave their wishes."""

CALM = 0.1  # seconds after a job's start until the next ones are prepared

DEADLINE_GRACE = 10.0  # seconds jobs get at the deadline; fit has saved before it


def conduct(
    payload_fd: int, kernel: socket.socket, launchpad: socket.socket, lock_fd: int, own_fd: int
) -> None:
    """Carry one search to its end; the main function of a conductor's process.

    Args:
        payload_fd: the packed function and what all its runs have in common.
        kernel: the line to whoever started the search.
        launchpad: packets to the launchpad.
        lock_fd: holds the search's lock.
        own_fd: what is the conductor's own (see start.py).
    """
    content = unpack_all([payload_fd, own_fd])
    paths, line = RunPaths(Path(content["folder"])), Line(kernel)
    try:
        sign(paths, detached=content["detach"])
        desk = Desk(line, launchpad, detached=content["detach"])
        desk.tower.patient = True  # else each of the first trials would import what many will
        Conductor(content, payload_fd, desk).carry()
    except LaunchpadGone:
        tell_lost(line, launchpad_lost())
    except OSError as error:
        tell_lost(line, lost_to(error, paths.folder))
    finally:
        os.close(lock_fd)
        line.close()


class Conductor:
    """One search's life."""

    def __init__(self, content: dict[str, Any], payload_fd: int, desk: Desk) -> None:
        self._content, self._payload_fd, self._desk = content, payload_fd, desk
        self._paths = RunPaths(Path(content["folder"]))
        self._record = RunRecord(self._paths, deadline=content["deadline"])
        self._room = Room(content["slots"], self._record)
        self._running: list[Errand] = []
        self._leaving: list[Errand] = []  # their jobs are done, their processes not yet gone
        self._kept: Flight | None = None  # ranks on all devices that can take another job
        self._reserve = Reserve(content, payload_fd, desk.tower)
        self._unread: set[str] = set()  # warnings given
        self._started_at = 0.0  # when the last job did (monotonic)

    # --- the story ---

    def carry(self) -> None:
        """Run, and write how it ended when it could not go on to its end."""
        try:
            self._begin()
            self._settle(self._run())
        except KernelGone:
            self._abandon("the kernel is gone: the search was ended, unfinished")
        except LaunchpadGone:
            self._abandon("the launchpad is gone: the search was ended, unfinished")
            raise
        except NbtoolkitError as error:  # the program gives up
            self._fail(error)
        except OSError:
            raise
        except Exception as error:
            self._fail(error)
        finally:
            self._end_all()

    def _begin(self) -> None:
        self._record.write("run", **self._content["header"], plan=self._content["plan"].to_dict())
        for level, text in self._content["notes"]:
            self._record.note(text, level)
        self._record.note(self._content["slots"].explain())
        self._program = make_program(self._content, self._record)

    def _run(self) -> str:
        """Until nothing runs and nothing will; the status it ends with."""
        program = self._program
        while True:
            self._look()
            self._heed_the_time()
            self._fill()
            self._get_ready()
            over = self._record.leaving is not None or program.done
            if over and not self._running and not self._leaving:
                early = "deadline" if program.cut_short else "completed"
                return self._record.leaving or early
            self._listen()

    def _look(self) -> None:
        """Look at every job once; tell the program of those that have ended.

        Where the next job depends on none of them it starts first: to tell takes some 10 ms.
        """
        endings: list[tuple[Job, Ending]] = []
        self._leaving = [errand for errand in self._leaving if not errand.turn()]
        for errand in list(self._running):
            over = errand.turn()
            if not over and not errand.leaves_room:
                continue
            self._running.remove(errand)
            self._room.give_back(errand.slot)
            if over:
                self._kept = errand.hand_over() or self._kept
            else:
                self._leaving.append(errand)
            ending = errand.ending()
            if not self._room.runs_again(errand.job, errand.slot, ending):
                endings.append((errand.job, ending))
        if endings and all(ending.status == "completed" for _, ending in endings):
            self._fill(ready=True)
        for job, ending in endings:
            self._program.ended(job, ending)

    def _fill(self, *, ready: bool = False) -> None:
        """Start jobs on the free slots; ``ready``: those only that the program has prepared."""
        if self._record.leaving is not None:
            return
        jobs: list[Job] = []
        while len(jobs) < self._room.free and (self._program.ready or not ready):
            job = self._program.next(self._left())
            if job is None:
                break
            jobs.append(job)
        for job, slot in self._room.places(jobs):
            self._started_at = time.monotonic()
            try:
                self._running.append(self._errand(job, slot))
            except NbtoolkitError as error:  # its parameters make no plan, no configuration
                self._room.give_back(slot)
                said = f"{type(error).__name__}: {error.what}"
                self._program.ended(job, Ending(status="failed", fault="raised", error=said))

    def _get_ready(self) -> None:
        """While all slots are at work: ranks, and a trial, for those that will be free next.

        Not while others start or end, which would have to wait.
        """
        calm = time.monotonic() - self._started_at > CALM
        if calm and self._record.leaving is None and self._running and not self._room.free:
            self._reserve.fill(errand.plan for errand in self._running)
            self._program.prepare(len(self._running))

    def _errand(self, job: Job, slot: Slot) -> Errand:
        errand = Errand(
            job,
            slot,
            self._content,
            self._payload_fd,
            self._desk.tower,
            self._program,
            self._kept,
            self._reserve,
            self._on_unread,
        )
        self._kept = None  # they took the job, or were ended
        return errand

    def _on_unread(self, text: str) -> None:
        """Warn of settings without effect once, not for every trial."""
        if text not in self._unread:
            self._unread.add(text)
            self._record.note(text, level="warning")

    def _left(self) -> float | None:
        deadline = self._content["deadline"]
        return None if deadline is None else float(deadline - time.time())

    # --- listening ---

    def _listen(self) -> None:
        try:
            errands = [*self._running, *self._leaving]
            requests = self._desk.wait(
                [line for errand in errands for line in errand.lines()], TICK
            )
        except LaunchpadGone:
            if not all(errand.landing for errand in errands) or not errands:
                raise
            requests = []
        for request in [*requests, *self._left_in_folder()]:
            self._obey(request)

    def _left_in_folder(self) -> list[Message]:
        """The wishes of handles that have no line to this process."""
        requests: list[Message] = []
        if (request := self._record.stop_requested()) is not None:
            requests.append({"type": "stop", "reason": "a handle asked", **request})
        folder = self._paths.folder / COMMANDS
        for file in sorted(folder.iterdir()) if folder.is_dir() else ():
            if not file.name.startswith("."):  # else it is being written
                requests.append({"type": "command", **json.loads(file.read_text())})
                file.unlink()
        return requests

    def _obey(self, request: Message) -> None:
        if request["type"] == "stop":
            status = request.get("status", "stopped")
            self._stop(request["reason"], request.get("grace"), status)
        elif request["type"] == "kill":
            self._stop("killed on request", 0.0, "stopped")
        elif request["type"] == "command":
            command = {name: value for name, value in request.items() if name != "type"}
            self._program.obey(command)
            self._record.write("command", **command)
            if command["op"] == "stop_trial":
                self._stop_trial(int(command["n"]))

    def _stop(self, reason: str, grace: float | None, status: str) -> None:
        self._record.ask_to_stop(status, reason, grace)
        self._program.obey({"op": "stop"})
        for errand in self._running:
            errand.stop(reason, grace, self._record.leaving or status)

    def _stop_trial(self, number: int) -> None:
        key = f"trials/{number:04d}"
        for errand in self._running:
            if f"{errand.job.key}/".startswith(f"{key}/"):
                errand.stop("a handle asked for this trial's end", None, "stopped")

    def _heed_the_time(self) -> None:
        """At the deadline all jobs leave, and save; who does not come to a report soon is ended."""
        if self._record.leaving is None and self._record.decide() is not None:
            self._stop("the search's time is used up", DEADLINE_GRACE, "deadline")

    # --- the end ---

    def _settle(self, status: str) -> None:
        summary = self._program.close(status)
        self._record.complete(status, 1, summary=summary)
        wake(self._desk.kernel)

    def _fail(self, error: BaseException) -> None:
        self._end_all()
        self._record.fail(pack_error(error), rank=None, notes=[])
        wake(self._desk.kernel)

    def _abandon(self, why: str) -> None:
        self._end_all()
        self._record.note(why, level="warning")

    def _end_all(self) -> None:
        for errand in [*self._running, *self._leaving]:
            errand.abandon()
        self._running, self._leaving = [], []
        if self._kept is not None:
            self._desk.tower.dismiss(self._kept)
            self._kept = None
        self._reserve.close()


def make_program(content: dict[str, Any], record: RunRecord) -> Program:
    """The program that a search's content names, as ``"module:function"``."""
    module, _, function = content["program"].partition(":")
    make = getattr(importlib.import_module(module), function)
    program: Program = make(content["about"], record, Path(content["folder"]))
    return program
