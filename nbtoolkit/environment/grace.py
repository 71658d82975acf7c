"""The seconds that a process waits for another one before it kills it, or goes on without it.

The page ``docs/reference/grace-periods.rst`` is made from this file: the first paragraph of each
text says who waits for what, the second why it is this number.
"""

from __future__ import annotations

STOP_GRACE = 5.0
"""An interrupt, or the time limit of a trial: the supervisor waits for the ranks to leave at their
next report, and then kills them. A second interrupt kills them at once.

Most steps of a training are shorter, and a user who has pressed Stop watches the cell.
"""

FAILURE_GRACE = 1.0
"""A rank has failed or died: the supervisor waits for the other ranks to exit, and then kills them.

They wait in a collective that never ends. In a second they can write their last output.
"""

EXIT_GRACE = 10.0
"""The work is over: the supervisor waits for ranks that have returned to exit, the scheduler of a
search for its jobs after the deadline, and tracking writes what is left when the kernel has gone.
What has not ended then is killed, or left to ``nbtoolkit.tracking.replay``.

DataLoader workers and CUDA contexts take some seconds to close.
"""

REPORT_SECONDS = 10.0
"""A wait of this length is reported to the user: for a rank that has not started, for the fork
server, and for tracking. Each further message comes after three times as long.

A start or a wait that takes less needs no explanation.
"""

STALL_SECONDS = 60.0
"""A process that makes no progress for this long counts as hung: the kernel waits no longer for its
fork server or for tracking in a process of its own. Progress is CPU time, page faults and I/O.

A limit in wall time would end healthy processes on a slow machine: importing torch takes 2 s from a
warm disk, and minutes from a cold one on a busy machine.
"""

TRACKING_SECONDS = 60.0
"""After the end of a run, the call waits for tracking to write all events. Tracking then continues
in the background, and the kernel's exit waits for it.

A new folder takes 2 s, on a loaded machine 20 s.
"""

TRACKING_STALL_SECONDS = 20.0
"""The end of a run, and the kernel's exit, wait no longer for tracking that makes no progress for
this long.

It exceeds the time for which tracking itself waits for the last events of runs.
"""
