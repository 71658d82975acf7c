"""Make the call of a run in a task of a Slurm job.

``python -m nbtoolkit.extras.cluster.job FOLDER``

Exit codes: 0, the call has returned; 1, it has failed. If a signal of Slurm has ended the run
early, with a checkpoint, it makes the file :data:`EARLY_FILE` in the run's folder. Another exit
code would not do: srun kills the other tasks when one ends with an error, and returns the code of a
killed one.
"""

from __future__ import annotations

import signal
import sys
import traceback
from pathlib import Path

from nbtoolkit.launcher.remote import load_call
from nbtoolkit.run.events import EventReader, RunStarted, StopRequested
from nbtoolkit.run.output import error_lines
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.wire.signals import WARNINGS, is_signal_reason, not_yet

EARLY_FILE = "remote/ended-early"


def main(folder: str) -> int:
    """Make the call in the run's folder; return the exit code."""
    paths = RunPaths(Path(folder))
    for number in WARNINGS:
        signal.signal(number, not_yet)
    try:
        result = load_call(paths)()
    except BaseException:
        sys.stderr.write(error_lines(traceback.format_exc()))
        return 1
    if getattr(result, "status", "") == "deadline" and ended_by_signal(paths):
        (paths.folder / EARLY_FILE).touch()
    return 0


def ended_by_signal(paths: RunPaths) -> bool:
    """Whether a signal has ended the last attempt: its own time budget would end the next, too."""
    reason = ""
    for event in EventReader(paths.events).read():
        if isinstance(event, RunStarted):
            reason = ""
        elif isinstance(event, StopRequested):
            reason = reason or event.reason
    return is_signal_reason(reason)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
