"""Read W&B's offline files: LevelDB's log format, with W&B's protobuf records."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK, _FILE_HEADER, _CHUNK_HEADER = 32768, 7, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass
class OfflineRun:
    """What ``wandb sync`` would upload of one run."""

    id: str = ""
    name: str = ""
    project: str = ""
    group: str = ""
    job_type: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None

    def curve(self, name: str) -> list[tuple[int, float]]:
        return [(row["step"], row[name]) for row in self.rows if name in row]


def offline_runs(folder: Path) -> dict[str, OfflineRun]:
    """All offline runs of a run folder, by their names; fails if a W&B run has two files."""
    runs = [read_run(file) for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]
    assert len({run.id for run in runs}) == len(runs)
    return {run.name: run for run in runs}


def read_run(file: Path) -> OfflineRun:
    from wandb.proto.wandb_internal_pb2 import Record

    run = OfflineRun()
    for data in _records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.id, run.name = record.run.run_id, record.run.display_name
            run.project, run.group = record.run.project, record.run.run_group
            run.job_type = record.run.job_type
            run.config.update(_values(record.run.config.update))
        elif kind == "config":
            run.config.update(_values(record.config.update))
        elif kind == "summary":
            run.summary.update(_values(record.summary.update))
        elif kind == "history":
            row = _values(record.history.item)
            run.rows.append({"_step": record.history.step.num, **row})
            run.summary.update(row)
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> Iterator[bytes]:
    assert data[:4] == b":W&B"
    at, parts = _FILE_HEADER, b""
    while at + _CHUNK_HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _CHUNK_HEADER:  # padding
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _CHUNK_HEADER])
        chunk = data[at + _CHUNK_HEADER : at + _CHUNK_HEADER + length]
        at += _CHUNK_HEADER + length
        parts = chunk if kind in (_FULL, _FIRST) else parts + chunk
        if kind in (_FULL, _LAST):
            yield parts
