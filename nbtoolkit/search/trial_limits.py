"""Keep a sweep within its time and memory."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.run.events import EventReader, MetricsLogged
from nbtoolkit.search.algorithm import EventWriter

if TYPE_CHECKING:
    from nbtoolkit.search.study_recorder import StudyRecorder


_MORE = 1.5
"""A trial is left out if it needs so many times the memory of one that ran out."""

_RESIDUAL = 0.1  # in logarithms of observed peaks: predictions are then off by 10% at most


class TimeBudget:
    """Decides whether a trial can still end in time.

    It reserves time for the refit of the best trial. Once it refuses, it refuses for good.

    Args:
        recorder: knows the durations of finished trials.
        events: receives a note when the time is up.
    """

    def __init__(self, recorder: StudyRecorder, events: EventWriter) -> None:
        self._recorder, self._events = recorder, events
        self._slots = 1
        self.up = False
        """True if no more trials start."""

    def note_running(self, jobs: int) -> None:
        """Note how many jobs run at once: there are at least as many slots."""
        self._slots = max(self._slots, jobs)

    def suffices(self, params: Mapping[str, Any], left: float | None) -> bool:
        """Return True if a job with these parameters can end within ``left`` seconds."""
        return self._enough(self._recorder.costs.predict(params), left)

    def suffices_for_new(self, left: float | None) -> bool:
        """Return True if a trial of typical duration, with all its folds, can end in time."""
        job = self._recorder.costs.usual()
        rounds = math.ceil((self._recorder.folds or 1) / self._slots)
        return self._enough(None if job is None else job * rounds, left)

    def _enough(self, seconds: float | None, left: float | None) -> bool:
        if left is None:
            return not self.up
        reserved = self._refit()
        self.up = self.up or left - reserved <= 0 or (seconds or 0.0) > left - reserved
        if self.up:
            estimate = "" if seconds is None else f"; a trial takes about {seconds:.3g} s"
            also = f", {reserved:.3g} s of them reserved for the refit" if reserved else ""
            self._events.note(f"no more trials start: {left:.3g} s are left{also}{estimate}")
        return not self.up

    def _refit(self) -> float:
        """Return the seconds to train the best trial on all data (``reserve_for_refit``)."""
        reserve = self._recorder.sweep_config.budget.reserve_for_refit
        if reserve != "auto":
            return reserve
        job, folds = self._recorder.costs.usual() or 0.0, self._recorder.folds or 1
        return job * folds / (folds - 1) if folds > 1 else job


# --- memory ---

_SIZE = re.compile(
    r"size|width|height|depth|hidden|layers?|channels|filters|dims?|units|neurons|features|blocks"
    r"|length|resolution|embed(ding)?|d_model|multiplier"
)
# Larger values of these need no more memory, or less.
_NO_SIZE = re.compile(r"patch|stride|kernel|pool|groups?|chunk|bucket|accumulat|dropout|decay|rate")
_NO_MEMORY = re.compile(r"optim\.(?!name$)|seed$|train\.(epochs|max_steps)$")


class MemoryLimits:
    """The parameters of trials that ran out of memory, and which others would, too.

    A trial is expected to run out of memory if its parameters are no smaller than those of one
    that did:

    - sizes (numbers whose name has a word such as ``batch_size``, ``hidden``, ``layers`` or
      ``width``) are as large or larger: memory is assumed to grow with each of them;
    - other whole numbers, texts and lists are equal, and so is the set of parameters;
    - other floats, ``optim.*`` but ``optim.name``, ``seed``, ``train.epochs`` and
      ``train.max_steps`` do not count: memory is assumed not to depend on them.

    Where some sizes are larger and others smaller, the peaks of memory that completed trials have
    logged tell: if ``peak = c * size_1 ** e_1 * size_2 ** e_2 ...`` describes them to 10%, and
    predicts 1.5 times the memory of a trial that ran out.

    Only what has run in this session counts: the next one may have other devices.

    Args:
        folder: that of the sweep; only read, and only after a trial has run out of memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._failed: dict[int, dict[str, object]] = {}
        self._completed: dict[str, dict[str, object]] = {}
        self._peaks: dict[str, float] = {}

    def add(self, number: int, params: Mapping[str, object]) -> None:
        """Note that a trial has run out of memory; one without a size says nothing on others."""
        if any(map(_is_size, params)):
            self._failed[number] = dict(params)

    def completed(self, key: str, params: Mapping[str, object]) -> None:
        """Note that a trial has completed; ``key`` is its folder, relative to the sweep's."""
        self._completed[key] = dict(params)

    def why_not(self, params: Mapping[str, object]) -> str | None:
        """Return why a trial with these parameters would not fit; None if it may."""
        for number, failed in self._failed.items():
            if failed.keys() != params.keys():
                continue
            if all(_no_smaller(name, params[name], value) for name, value in failed.items()):
                sizes = [f"{name} {value}" for name, value in failed.items() if _is_size(name)]
                least = f"with equal or smaller sizes ({', '.join(sizes)})"
                return f"not started: trial {number}, {least}, ran out of memory"
            times, trials = self._predicted(params, failed)
            if times >= _MORE:
                return (
                    f"not started: by the memory of {trials} trials it needs {times:.1f} times "
                    f"that of trial {number}, which ran out of memory"
                )
        return None

    def _predicted(
        self, params: Mapping[str, object], failed: Mapping[str, object]
    ) -> tuple[float, int]:
        """The memory of a trial over that of one that failed, by so many trials; 0: not known."""
        import numpy as np

        sizes = [name for name in failed if _is_size(name)]
        wanted, limit = _logarithms(sizes, params), _logarithms(sizes, failed)
        if wanted is None or limit is None or not _alike(params, failed):
            return 0.0, 0
        rows, peaks = list[list[float]](), list[float]()
        for key, own in self._completed.items():
            row = _logarithms(sizes, own) if own.keys() == failed.keys() else None
            if row is not None and _alike(own, failed) and (peak := self._peak(key)):
                rows.append([*row, 1.0])
                peaks.append(math.log(peak))
        if len(rows) < len(sizes) + 2:
            return 0.0, 0
        fitted, _, rank, _ = np.linalg.lstsq(np.array(rows), np.array(peaks), rcond=None)
        residual = np.abs(np.array(rows) @ fitted - peaks).max()
        if rank < len(sizes) + 1 or residual > _RESIDUAL:
            return 0.0, 0
        exponents = np.maximum(fitted[:-1], 0.0)
        return float(np.exp(exponents @ (np.array(wanted) - limit))), len(rows)

    def _peak(self, key: str) -> float:
        """The largest memory in GB that a rank of a trial has logged; 0 without any."""
        if key not in self._peaks:
            self._peaks[key] = max(
                (
                    value
                    for file in (self._folder / key).rglob("events.jsonl")
                    for event in EventReader(file).read()
                    if isinstance(event, MetricsLogged)
                    for name, value in event.values.items()
                    if name.startswith("memory_gb_rank")
                ),
                default=0.0,
            )
        return self._peaks[key]


def _alike(params: Mapping[str, object], failed: Mapping[str, object]) -> bool:
    """Whether what is no size is the same, as far as memory depends on it."""
    return all(
        _is_size(name) or _no_smaller(name, params[name], value) for name, value in failed.items()
    )


def _logarithms(sizes: list[str], params: Mapping[str, object]) -> list[float] | None:
    """The logarithms of the sizes; None if one is no positive number."""
    values = [params[name] for name in sizes]
    numbers = [value for value in values if isinstance(value, (int, float)) and value > 0]
    return [math.log(value) for value in numbers] if len(numbers) == len(sizes) else None


def _is_size(name: str) -> bool:
    last = name.rpartition(".")[2]
    return bool(_SIZE.search(last)) and not _NO_SIZE.search(last)


def _no_smaller(name: str, value: object, failed: object) -> bool:
    if _NO_MEMORY.match(name):
        return True
    if isinstance(value, bool) or not _is_size(name):
        return value == failed or (isinstance(value, float) and isinstance(failed, float))
    if isinstance(value, (int, float)) and isinstance(failed, (int, float)):
        return value >= failed
    return value == failed
