"""What a run's record holds of what its ranks say, and what it writes at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nbtoolkit.run.events import Event, EventReader
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.record import RunRecord
from nbtoolkit.wire.serialization import pack_error


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    return RunRecord(RunPaths.create(tmp_path, "run"), deadline=None, durable=False)


def written(record: RunRecord, kind: str) -> list[Any]:
    """The events of a type."""
    events: list[Event] = list(EventReader(record.paths.events).read())
    return [event for event in events if event.type == kind]


# Calls of ctx.log and ctx.report and the function's return, in order; the metrics at the end, and
# the values of the reports.
METRICS: dict[str, tuple[list[tuple[str, dict[str, float]]], dict[str, float], list[Any]]] = {
    "logged": ([("log", {"loss": 2.0}), ("log", {"rate": 1.0})], {"loss": 2.0, "rate": 1.0}, []),
    "reported replaces logged": (
        [("log", {"loss": 2.0}), ("report", {"a": 0.5})],
        {"a": 0.5},
        [{"a": 0.5}],
    ),
    "logged after reported": (
        [("report", {"a": 0.5}), ("log", {"loss": 1.0})],
        {"a": 0.5},
        [{"a": 0.5}],
    ),
    "returned again": (
        [("report", {"a": 0.5}), ("return", {"a": 0.5, "b": 1.0})],
        {"a": 0.5, "b": 1.0},
        [{"a": 0.5}, {"b": 1.0}],
    ),
    "all returned again": (
        [("report", {"a": 0.5}), ("return", {"a": 0.5})],
        {"a": 0.5},
        [{"a": 0.5}],
    ),
    "logged and returned": (
        [("log", {"a": 0.5}), ("return", {"a": 0.5})],
        {"a": 0.5},
        [{"a": 0.5}],
    ),
}


@pytest.mark.parametrize(("calls", "metrics", "reports"), METRICS.values(), ids=METRICS)
def test_which_numbers_are_the_metrics_of_a_run(
    record: RunRecord,
    calls: list[tuple[str, dict[str, float]]],
    metrics: dict[str, float],
    reports: list[dict[str, float]],
) -> None:
    take: dict[str, Callable[[dict[str, float]], object]] = {
        "log": lambda values: record.logged(values, 1),
        "report": lambda values: record.reported(values, 1),
        "return": record.returned,
    }
    for call, values in calls:
        take[call](values)
    record.saved("checkpoints/last.pt", 1, "last")
    record.complete("completed", 2)
    assert [event.values for event in written(record, "report")] == reports
    [ended] = written(record, "ended")
    assert (ended.metrics, ended.checkpoint) == (metrics, "checkpoints/last.pt")
    assert (ended.status, ended.processes) == ("completed", 2)
    assert 0.0 <= ended.seconds < 60.0


def test_the_first_reason_to_stop_counts_and_a_report_hears_of_it(record: RunRecord) -> None:
    assert record.reported({"a": 1.0}, 1) is None
    record.request_stop("stopped", "enough", 5.0)
    record.request_stop("deadline", "later")
    assert record.reported({"a": 2.0}, 2) == record.decide() == "stopped"
    assert [(event.reason, event.grace) for event in written(record, "stop")] == [("enough", 5.0)]
    assert [event.decision for event in written(record, "report")] == ["go", "stopped"]


@pytest.mark.parametrize(("left", "reserve", "status"), [(100, 0, None), (100, 200, "deadline")])
def test_a_deadline_counts_with_the_time_to_save(
    tmp_path: Path, left: float, reserve: float, status: str | None
) -> None:
    record = RunRecord(RunPaths.create(tmp_path, "run"), deadline=time.time() + left)
    assert record.decide(reserve) == status


def test_ranks_that_differ_are_told_once(record: RunRecord) -> None:
    for _ in range(2):
        record.compare([[[1.0]], [[2.0]]], [{"a": 1.0}, {"a": 2.0}])
        record.compare([None, None], [{"a": 1.0}, {"a": 3.0}])  # not compared
    assert len(written(record, "note")) == 2  # of the weights, and of the values


def test_an_attempt_that_completes_leaves_no_error_of_the_one_before(record: RunRecord) -> None:
    paths = record.paths
    record.fail(pack_error(ValueError("no")), rank=1, notes=["once"])
    [failed] = written(record, "ended")
    assert (failed.status, failed.error, failed.rank) == ("failed", "ValueError: no", 1)
    assert (failed.notes, paths.error_pickle.exists()) == (["once"], True)
    RunRecord(paths, deadline=None).complete("completed", 1)
    assert not paths.error_pickle.exists()
