"""What MLflow takes: names, lengths, times and batches of at most so many values."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nbtoolkit.tracking.tracker import Point

if TYPE_CHECKING:
    from mlflow.entities import Metric, Param, RunTag

T = TypeVar("T")

# MLflow's own limits, smallest of the versions we run with: 500 characters for a parameter (6000
# since 2.10), 5000 for a tag; 1000 metrics, 100 parameters and 100 tags a call.
METRICS, VALUES = 1000, 100
_PARAM_LENGTH, _TAG_LENGTH, _NAME_LENGTH = 500, 5000, 250

_LOG_BYTES = 1_000_000
"""Of each rank's log, that much of its end becomes an artifact."""


def as_metrics(points: Iterable[Point]) -> Iterator[Metric]:
    """Points as MLflow's metrics."""
    from mlflow.entities import Metric

    return (Metric(name(p.name), p.value, ms(p.time), p.step) for p in points)


def as_params(values: Mapping[str, Any]) -> list[Param]:
    """Settings as MLflow's parameters."""
    from mlflow.entities import Param

    return [Param(name(key), cut(value, _PARAM_LENGTH)) for key, value in flatten(values)]


def as_tags(values: Mapping[str, Any]) -> list[RunTag]:
    """Texts as MLflow's tags; what is None is left out."""
    from mlflow.entities import RunTag

    kept = ((key, value) for key, value in values.items() if value is not None)
    return [RunTag(name(key), cut(str(value), _TAG_LENGTH)) for key, value in kept]


def tail(file: Path) -> str:
    """The end of a log, from the first whole line, with a mark where something was left out."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= _LOG_BYTES:
            return opened.read().decode(errors="replace")
        opened.seek(size - _LOG_BYTES)
        opened.readline()
        left_out = opened.tell()
        text = opened.read().decode(errors="replace")
    return f"[the first {left_out} bytes are left out; all of it: {file}]\n{text}"


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and texts of a nested dict: ``{"a": {"b": [1]}}`` gives ``("a.b", "[1]")``."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{key}", text


def name(wished: str) -> str:
    """The nearest name that MLflow accepts: its characters, no empty or dotted parts, 250 long."""
    clean = re.sub(r"[^\w\-. :/]", "_", wished, flags=re.ASCII)
    parts = [part if part.strip(".") else "_" * len(part) for part in clean.split("/")]
    clean = "/".join(part for part in parts if part) or "_"
    if len(clean) <= _NAME_LENGTH:
        return clean
    mark = hashlib.sha256(wished.encode()).hexdigest()[:8]  # two long names stay two
    return f"{clean[: _NAME_LENGTH - 9]}.{mark}"


def cut(text: str, length: int) -> str:
    """At most ``length`` characters, with a mark where something was left out."""
    if len(text) <= length:
        return text
    mark = f" ... [{len(text)} characters; all of it in the run's folder]"
    return text[: length - len(mark)] + mark


def ms(seconds: float) -> int:
    """Seconds as the milliseconds that MLflow counts in."""
    return round(seconds * 1000)


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of at most ``size`` items."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
