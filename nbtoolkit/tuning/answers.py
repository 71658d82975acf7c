"""Keep what was measured; ``nbtoolkit/run/kept_answers.py`` defines the file and reads it."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nbtoolkit.run.kept_answers import answer_key as answer_key
from nbtoolkit.run.kept_answers import answers_file, read_answers
from nbtoolkit.run.kept_answers import kept_answer as kept_answer
from nbtoolkit.run.paths import write_json

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config


def keep_answer(config: Config, name: str, key: str, answer: Mapping[str, object]) -> None:
    """Keep an answer, in place of an earlier one; other processes may do so at the same time."""
    file = answers_file(config)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = read_answers(config)
        kept.setdefault(name, {})[key] = {**answer, "measured": time.time()}
        write_json(file, kept)
