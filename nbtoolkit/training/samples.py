"""Which samples every optimizer step took, written down (``tracking.samples``) and read again.

``samples/rank-<rank>.jsonl`` of a run has a line for each step of each rank, appended when the
step's last batch is handed out:

    {"fit": 1, "epoch": 1, "step": 0, "ranks": 2, "ids": [7, 2]}

``fit`` counts the calls of fit in the training function, ``step`` begins at 0 in each epoch,
``ids`` are the rank's own part of the global batch: positions in the data set or in the stream.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from nbtoolkit.runtime.paths import RunPaths
from nbtoolkit.training.order import Share

Pass = tuple[Any, Share, list[int]]
"""A batch, what it counts for, and the samples in it (a stand-in is none)."""

_Parts = dict[int, dict[int, list[int]]]  # one step: number of ranks -> rank -> its samples


class SampleLog:
    """The writing end: one rank's file.

    A disk that is full ends the notes, with a sentence in the rank's log, and not the training.
    """

    def __init__(self, path: Path, *, ranks: int, fit: int) -> None:
        self._path, self._about = path, {"fit": fit, "ranks": ranks}
        # The last line of an attempt that was killed may be cut short.
        self._begin = "\n" if path.exists() else ""
        self._ended = False

    def noting(self, epoch: int, step: int, passes: Iterable[Pass]) -> Iterator[tuple[Any, Share]]:
        """Hand on ``passes``, which begin with optimizer step ``step``, and note their samples."""
        ids: list[int] = []
        for batch, share, some in passes:
            ids += some
            if share.last:
                self._write({**self._about, "epoch": epoch, "step": step, "ids": ids})
                ids, step = [], step + 1
            yield batch, share

    def _write(self, line: dict[str, Any]) -> None:
        if self._ended:
            return
        text = f"{self._begin}{json.dumps(line, separators=(',', ':'))}\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(text)
        except OSError as error:
            self._ended = True
            what = f"epoch {line['epoch']}, step {line['step']}"
            print(f"fit: from {what} on no samples are noted: {error}", file=sys.stderr)
        self._begin = ""


def read_samples(paths: RunPaths, *, fit: int = 1) -> dict[tuple[int, int], list[int]]:
    """The samples of each global batch, as the ranks noted them.

    A step that was taken again after a kill has its last line, on however many ranks; one that not
    all ranks had come to is left out.

    Args:
        paths: the run's; its ranks may be alive.
        fit: which call of fit in the training function, from 1.

    Returns:
        (epoch, step in the epoch) -> ids, in order; empty without ``tracking.samples``.
    """
    steps: dict[tuple[int, int], _Parts] = defaultdict(dict)
    for rank, line in _lines(paths):
        if line["fit"] == fit:
            parts = steps[line["epoch"], line["step"]]
            ranks = line["ranks"]
            if rank == 0:  # takes part in every attempt: its last line is of the newest one
                parts[ranks] = parts.pop(ranks, {})
            parts.setdefault(ranks, {})[rank] = line["ids"]
    found = {key: _newest(steps[key]) for key in sorted(steps)}
    return {key: ids for key, ids in found.items() if ids is not None}


def _lines(paths: RunPaths) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every whole line with its rank, rank by rank."""
    for rank in count():
        if not paths.samples(rank).exists():
            return
        with paths.samples(rank).open() as file:
            for text in file:
                try:
                    yield rank, json.loads(text)
                except ValueError:  # cut short by a kill, or blank: an attempt's beginning
                    continue


def _newest(parts: _Parts) -> list[int] | None:
    """One step's samples, from the newest attempt that is whole."""
    for ranks, by_rank in reversed(parts.items()):
        if len(by_rank) == ranks:
            return [one for rank in range(ranks) for one in by_rank[rank]]
    return None
