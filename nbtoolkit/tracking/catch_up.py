"""Wait for tracking to catch up with the events of a run that has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nbtoolkit.environment.grace import TRACKING_SECONDS, TRACKING_STALL_SECONDS
from nbtoolkit.environment.resources import Activity, wait_while_active
from nbtoolkit.run.attempts import readable_first_event
from nbtoolkit.run.paths import RunPaths, read_or_empty


def wait_for_tracking(
    paths: RunPaths,
    pid: int,
    say: Callable[[str], object],
    *,
    limit: float = TRACKING_SECONDS,
    stalled: float = TRACKING_STALL_SECONDS,
) -> bool:
    """Wait until tracking has written a run's events; show a message if it has not.

    Args:
        paths: the run.
        pid: the tracking service's process.
        say: shows a message to the user.
        limit: seconds to wait.
        stalled: seconds without progress after which the wait ends.

    Returns:
        True if all events are written.
    """

    def has_ended(seconds: float) -> bool:
        ended = any(_tracking_state(paths))
        if not ended:
            time.sleep(min(seconds, 0.01))
        return ended

    awaited = f"tracking to write the run {paths.run_id}"
    in_time = wait_while_active(
        has_ended, Activity(pid), awaited, limit=limit, stalled=stalled, say=say
    )
    replay = f"nbtoolkit.tracking.replay({str(paths.folder)!r})"
    done, error = _tracking_state(paths)
    if error:
        say(f"warning: tracking did not write the whole run: {error}; {replay} retries")
    elif not in_time:
        say(
            "tracking has not written the whole run yet, and continues in the background: "
            f'{paths.tracking} has "done": true at its end; after a crash, call {replay}'
        )
    return done


def _tracking_state(paths: RunPaths) -> tuple[bool, str]:
    """Return whether tracking has written the whole run, and the error that ended it, or ""."""
    try:
        state: dict[str, Any] = read_or_empty(paths.tracking)
        written = paths.tracking.stat().st_mtime
    except FileNotFoundError:
        return False, ""
    # The file of an earlier attempt has fewer events, or is older than this attempt.
    done = state.get("done") and state.get("written", 0) >= paths.events.stat().st_size
    started = readable_first_event(paths)
    new = started is None or written >= started.t
    return bool(done), state.get("error", "") if new else ""
