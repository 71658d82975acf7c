"""When a run must end: its time budget, counted from now."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbtoolkit.config import Config


def deadline_of(config: Config) -> float | None:
    """Unix time at which ``runtime.time_budget`` (seconds) is used up; None without one."""
    budget = config.runtime.time_budget
    return None if budget is None else time.time() + budget
