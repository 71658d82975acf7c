"""Late metrics: those that are no mean over the batches, computed once the whole set was seen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from nbtoolkit.training.gathering import Part, Rows, in_order

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OverAll:
    """A function ``(outputs, targets)`` of all samples. Made by ``nb.over_all``."""

    function: Callable[[Any, Any], Any]

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """What the function says to these."""
        return self.function(outputs, targets)

    @property
    def __name__(self) -> str:
        """The function's, so that it names itself in a list of metrics."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))


class LateMetric(Protocol):
    """A metric that is no mean of the batches' values."""

    def add(self, outputs: Any, targets: Any, samples: int) -> None:
        """Take in one batch."""

    def part(self) -> Any:
        """What rank 0 needs to know of this rank."""

    def value(self, parts: list[Any]) -> Any:
        """The metric of all ranks' parts; called on rank 0."""


def is_late(metric: Any) -> bool:
    """Whether a metric may turn out to be several, by the names of a dict that it returns."""
    return isinstance(metric, OverAll) or _is_torchmetric(metric)


def late_metric(metric: Any, device: torch.device) -> LateMetric | None:
    """One pass of ``metric``; None for a function whose values are averaged over the batches."""
    if isinstance(metric, OverAll):
        return _Kept(metric)
    return _Pooled(metric, device) if _is_torchmetric(metric) else None


class _Kept:
    """For a function over all samples: their outputs and targets, on the CPU."""

    def __init__(self, metric: OverAll) -> None:
        self._metric, self._rows = metric, Rows()

    def add(self, outputs: Any, targets: Any, samples: int) -> None:
        self._rows.add((outputs, targets), samples)

    def part(self) -> Part | None:
        return self._rows.part()

    def value(self, parts: list[Part | None]) -> Any:
        return self._metric(*in_order(parts))


class _Pooled:
    """A torchmetrics object (or collection), whose states are put together by our own hands.

    Its own way asks every rank for tensors of equal number, dimensions and type: it hangs or raises
    when a rank saw nothing, or fewer batches than another (states that are lists, reduced by None).
    """

    def __init__(self, metric: Any, device: torch.device) -> None:
        self._metric = metric.to(device)
        metric.reset()

    def add(self, outputs: Any, targets: Any, samples: int) -> None:
        self._metric.update(outputs, targets)

    def part(self) -> list[dict[str, Any]]:
        """The state of each metric inside, copied: a view would take along all it is a view of."""
        from accelerate.utils import recursively_apply

        states = [dict(metric.metric_state) for metric in self._inside()]
        copied: list[dict[str, Any]] = recursively_apply(lambda t: t.to("cpu", copy=True), states)
        return copied

    def value(self, parts: list[list[dict[str, Any]]]) -> Any:
        with ExitStack() as stack:
            for metric, states in zip(self._inside(), zip(*parts, strict=True), strict=True):
                stack.enter_context(_pooled(metric, states))
            return self._metric.compute()

    def _inside(self) -> list[Any]:
        """A collection's metrics, a wrapper and what it wraps; or the metric itself."""
        from torchmetrics import Metric

        return [part for part in self._metric.modules() if isinstance(part, Metric)]


def _is_torchmetric(metric: Any) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")  # not imported: then it is none
    return torchmetrics is not None and isinstance(
        metric, (torchmetrics.Metric, torchmetrics.MetricCollection)
    )


@contextmanager
def _pooled(metric: Any, states: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """For a while, ``metric`` has the states of all ranks, and asks none of them."""
    own, available = dict(metric.metric_state), metric.distributed_available_fn
    metric.distributed_available_fn = lambda: False
    for name, value in _reduced(metric, states).items():
        setattr(metric, name, value)
    try:
        yield
    finally:
        metric.distributed_available_fn = available
        for name, value in own.items():
            setattr(metric, name, value)


def _reduced(metric: Any, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several ranks' states as one, put together as the metric says, on its device."""
    import torch
    from accelerate.utils import send_to_device

    if len(states) == 1:
        return dict(send_to_device(states[0], metric.device))
    reduced = {}
    for name, reduce in metric._reductions.items():
        values = [send_to_device(state[name], metric.device) for state in states]
        listed = isinstance(values[0], list)
        pooled: Any = list(chain.from_iterable(values)) if listed else torch.stack(values)
        empty = listed and not pooled  # torchmetrics' reductions do not take that
        reduced[name] = pooled if reduce is None or empty else reduce(pooled)
    return reduced
