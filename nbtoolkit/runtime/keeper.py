"""Keeper: keeps the record of a run that has no owner process, in the process that trains."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import TrackingError
from nbtoolkit.runtime.cell import CellOutput
from nbtoolkit.runtime.channel import RecordChannel
from nbtoolkit.runtime.choose import ChosenRun
from nbtoolkit.runtime.events import Event, EventReader
from nbtoolkit.runtime.paths import boot_id, write_json
from nbtoolkit.runtime.plan import LaunchPlan
from nbtoolkit.runtime.record import RunRecord
from nbtoolkit.runtime.timing import TimeLimit
from nbtoolkit.runtime.wire import Message

if TYPE_CHECKING:
    from nbtoolkit.config import Config
    from nbtoolkit.tracking import TrackingProcess


class Keeper(RecordChannel):
    """What an owner is to other runs: lock, events, trackers, and whoever listens while it goes on.

    Used in a ``with`` block that lasts as long as the run; at its end the lock is given back.

    Args:
        run: the run's folder, locked.
        config: says whether it is tracked.
        plan: what is run.
        limit: when it must end.
        header: the fields of the attempt's ``run`` event.
        cell: shows notes.
        on_event: called with each event of this attempt.
    """

    def __init__(
        self,
        run: ChosenRun,
        config: Config,
        plan: LaunchPlan,
        limit: TimeLimit,
        header: dict[str, Any],
        cell: CellOutput,
        on_event: Callable[[Event], None] | None,
    ) -> None:
        before = run.paths.events.stat().st_size if run.resumed else 0
        self._run, self._cell, self._on_event = run, cell, on_event
        self._thread = threading.get_ident()
        self._reader = EventReader(run.paths.events, before)
        about = {"pid": os.getpid(), "boot_id": boot_id(), "since": time.time()}
        write_json(run.paths.owner, about, durable=False)
        super().__init__(RunRecord(run.paths, deadline=limit.deadline))
        self.record.write("run", **header, plan=plan.to_dict())
        for level, text in limit.notes:
            self.record.note(text, level)
        self._tracking = self._track(config)

    def send(self, type: str, **fields: Any) -> None:
        """See :class:`Channel`."""
        super().send(type, **fields)
        self._tell()

    def ask(self, type: str, **fields: Any) -> Message:
        """See :class:`Channel`."""
        reply = super().ask(type, **fields)
        self._tell()
        return reply

    def __enter__(self) -> Keeper:
        self._tell()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._run.lock.release()
        try:
            self._tell()
        finally:
            self._end_tracking()

    def _tell(self) -> None:
        """Hand on the events that are new; what another thread writes (it saves) has time."""
        if threading.get_ident() != self._thread:
            return
        for event in self._reader.read():
            if self._on_event is not None:
                self._on_event(event)
            self._cell.event(event)

    def _track(self, config: Config) -> TrackingProcess | None:
        from nbtoolkit.tracking import TrackingProcess, choose_tracking

        choice = choose_tracking(config.to_dict()["tracking"])
        for note in choice.notes:
            self.record.note(note, level="warning")
        if not choice.on:
            return None
        service = TrackingProcess()
        service.track(self._run.paths.folder)
        return service

    def _end_tracking(self) -> None:
        """Wait for the trackers; what fails there is no matter of the run."""
        if self._tracking is None:
            return
        try:
            self._tracking.wait(say=self._cell.say)
        except (TrackingError, TimeoutError) as error:
            self._cell.say(f"warning: the run is not wholly tracked: {error}")
        finally:
            self._tracking.close()
