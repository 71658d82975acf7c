"""Schedule the jobs of one search on its slots, in a process of its own.

It is the search's supervisor as a supervisor is a run's: it never imports user code and never
computes. What is run next, and what an ending means, is the program's business.
"""

from __future__ import annotations

import importlib
import json
import socket
import time
from functools import partial

from nbtoolkit.errors import NbtoolkitError
from nbtoolkit.launcher.event_loop import EventLoop, ForkServerGone, KernelGone, Spawner
from nbtoolkit.launcher.supervisor import TICK, JobListener, supervising
from nbtoolkit.launcher.worker_group import WorkerGroup
from nbtoolkit.run import messages
from nbtoolkit.run.events import CommandReceived, RunRecord
from nbtoolkit.run.payload import unpack
from nbtoolkit.run.serialization import pack_error
from nbtoolkit.run.transport import notify_files_changed
from nbtoolkit.search.algorithm import JobResult, SearchAlgorithm, SearchJob, SearchRequest
from nbtoolkit.search.job_runner import JobRunner, WarmWorkers
from nbtoolkit.search.slots import Slot, SlotAllocator

CALM = 0.1  # seconds after a job's start until the next ones are prepared

DEADLINE_GRACE = 10.0  # seconds jobs get at the deadline; fit has saved before it


def schedule_search(forkserver: socket.socket, message: messages.ForkSupervisor) -> None:
    """Carry one search to its end; the main function of a scheduler's process.

    Args:
        forkserver: packets to the fork server.
        message: with what it was forked.
    """
    request = unpack(message.descriptors.request, SearchRequest)
    with supervising(request.paths, forkserver, message) as (desk, spawner):
        desk.connection.patient = True  # else each of the first trials would import what many will
        SearchScheduler(request, spawner, desk).carry()


class SearchScheduler:
    """One search's life."""

    def __init__(self, request: SearchRequest, spawner: Spawner, desk: EventLoop) -> None:
        self._request, self._spawner, self._desk = request, spawner, desk
        self._record = RunRecord(request.paths, deadline=request.deadline)
        self._room = SlotAllocator(request.slots, self._record)
        self._running: list[JobRunner] = []
        self._leaving: list[JobRunner] = []  # their jobs are done, their processes not yet gone
        self._kept: WorkerGroup | None = None  # ranks on all devices that can take another job
        self._reserve = WarmWorkers(request.paths.folder, spawner)
        self._unread: set[str] = set()  # warnings given
        self._started_at = 0.0  # when the last job did (monotonic)

    # --- its course ---

    def carry(self) -> None:
        """Run, and write how it ended when it could not go on to its end."""
        try:
            self._begin()
            self._settle(self._run())
        except KernelGone:
            self._abandon("the kernel is gone: the search was ended, unfinished")
        except ForkServerGone:
            self._abandon("the fork server is gone: the search was ended, unfinished")
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
        request = self._request
        self._record.write(request.header)
        for level, text in request.notes:
            self._record.note(text, level)
        self._record.note(request.slots.explain())
        self._program = make_algorithm(request, self._record)

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
        endings: list[tuple[SearchJob, JobResult]] = []
        self._leaving = [job_runner for job_runner in self._leaving if not job_runner.turn()]
        for job_runner in list(self._running):
            over = job_runner.turn()
            if not over and not job_runner.leaves_room:
                continue
            self._running.remove(job_runner)
            self._room.give_back(job_runner.slot)
            if over:
                self._kept = job_runner.hand_over() or self._kept
            else:
                self._leaving.append(job_runner)
            ending = job_runner.ending()
            if not self._room.runs_again(job_runner.job, job_runner.slot, ending):
                endings.append((job_runner.job, ending))
        if endings and all(ending.status == "completed" for _, ending in endings):
            self._fill(ready=True)
        for job, ending in endings:
            self._program.ended(job, ending)

    def _fill(self, *, ready: bool = False) -> None:
        """Start jobs on the free slots; ``ready``: those only that the program has prepared."""
        if self._record.leaving is not None:
            return
        jobs: list[SearchJob] = []
        while len(jobs) < self._room.free and (self._program.ready or not ready):
            job = self._program.next(self._left())
            if job is None:
                break
            jobs.append(job)
        for job, slot in self._room.places(jobs):
            self._started_at = time.monotonic()
            try:
                self._running.append(self._job_runner(job, slot))
            except NbtoolkitError as error:  # its parameters make no plan, no configuration
                self._room.give_back(slot)
                said = f"{type(error).__name__}: {error.what}"
                self._program.ended(job, JobResult(status="failed", fault="raised", error=said))

    def _get_ready(self) -> None:
        """While all slots are at work: ranks, and a trial, for those that will be free next.

        Not while others start or end, which would have to wait.
        """
        calm = time.monotonic() - self._started_at > CALM
        if calm and self._record.leaving is None and self._running and not self._room.free:
            self._reserve.fill(job_runner.plan for job_runner in self._running)
            self._program.prepare(len(self._running))

    def _job_runner(self, job: SearchJob, slot: Slot) -> JobRunner:
        listener = JobListener(
            reported=partial(self._program.reported, job),
            announced=partial(self._program.announced, job),
            unread=self._on_unread,
        )
        job_runner = JobRunner(
            job, slot, self._request, self._spawner, listener, self._kept, self._reserve
        )
        self._kept = None  # they took the job, or were ended
        return job_runner

    def _on_unread(self, text: str) -> None:
        """Warn of settings without effect once, not for every trial."""
        if text not in self._unread:
            self._unread.add(text)
            self._record.note(text, level="warning")

    def _left(self) -> float | None:
        deadline = self._request.deadline
        return None if deadline is None else deadline - time.time()

    # --- listening ---

    def _listen(self) -> None:
        try:
            job_runners = [*self._running, *self._leaving]
            requests = self._desk.wait(
                [line for job_runner in job_runners for line in job_runner.lines()], TICK
            )
        except ForkServerGone:
            if not all(job_runner.exiting for job_runner in job_runners) or not job_runners:
                raise
            requests = []
        for request in [*requests, *self._left_in_folder()]:
            self._obey(request)

    def _left_in_folder(self) -> list[messages.KernelRequest]:
        """Commands of handles that have no connection to this process."""
        requests: list[messages.KernelRequest] = []
        if (request := self._record.stop_requested()) is not None:
            requests.append(request)
        folder = self._request.paths.commands
        for file in sorted(folder.iterdir()) if folder.is_dir() else ():
            if not file.name.startswith("."):  # else it is being written
                requests.append(messages.SearchCommand(**json.loads(file.read_text())))
                file.unlink()
        return requests

    def _obey(self, request: messages.KernelRequest) -> None:
        match request:
            case messages.StopRequest():
                self._stop(request.reason, request.grace, request.status)
            case messages.KillRequest():
                self._stop("killed on request", 0.0, "stopped")
            case messages.SearchCommand():
                self._program.obey(request)
                self._record.write(CommandReceived(op=request.op, n=request.n))
                if request.op == "stop_trial" and request.n is not None:
                    self._stop_trial(request.n)

    def _stop(self, reason: str, grace: float | None, status: str) -> None:
        self._record.request_stop(status, reason, grace)
        self._program.obey(messages.SearchCommand(op="stop"))
        for job_runner in self._running:
            job_runner.stop(reason, grace, self._record.leaving or status)

    def _stop_trial(self, number: int) -> None:
        key = f"trials/{number:04d}"
        for job_runner in self._running:
            if f"{job_runner.job.key}/".startswith(f"{key}/"):
                job_runner.stop("a handle asked for this trial's end", None, "stopped")

    def _heed_the_time(self) -> None:
        """At the deadline all jobs leave, and save; who does not come to a report soon is ended."""
        if self._record.leaving is None and self._record.decide() is not None:
            self._stop("the search's time is used up", DEADLINE_GRACE, "deadline")

    # --- the end ---

    def _settle(self, status: str) -> None:
        summary = self._program.close(status)
        self._record.complete(status, 1, summary=summary)
        notify_files_changed(self._desk.kernel)

    def _fail(self, error: BaseException) -> None:
        self._end_all()
        self._record.fail(pack_error(error), rank=None, notes=[])
        notify_files_changed(self._desk.kernel)

    def _abandon(self, why: str) -> None:
        self._end_all()
        self._record.note(why, level="warning")

    def _end_all(self) -> None:
        for job_runner in [*self._running, *self._leaving]:
            job_runner.abandon()
        self._running, self._leaving = [], []
        if self._kept is not None:
            self._desk.connection.dismiss(self._kept)
            self._kept = None
        self._reserve.close()


def make_algorithm(request: SearchRequest, record: RunRecord) -> SearchAlgorithm:
    """The program that a search's request names, as ``"module:function"``."""
    module, _, function = request.program.partition(":")
    make = getattr(importlib.import_module(module), function)
    program: SearchAlgorithm = make(request, record)
    return program
