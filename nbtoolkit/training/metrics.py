"""Compute metrics over a whole data set, exact on any number of ranks."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from nbtoolkit.errors import FitError
from nbtoolkit.training.losses import Passed
from nbtoolkit.worker.collectives import Part, Rows, broadcast, gather_on_first, in_order

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# --- metrics of whole epochs ---
# Late metrics: those that are no mean over the batches, computed once the whole set was seen.


@dataclass(frozen=True)
class EpochMetric:
    """A function ``(outputs, targets)`` of all samples. Made by ``nb.epoch_metric``."""

    function: Callable[[Any, Any], Any]

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """What the function says to these."""
        return self.function(outputs, targets)

    @property
    def __name__(self) -> str:
        """The function's, so that it names itself in a list of metrics."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))


class DeferredMetric(Protocol):
    """A metric that is no mean of the batches' values."""

    def add(self, outputs: Any, targets: Any, samples: int) -> None:
        """Take in one batch."""

    def part(self) -> Any:
        """What rank 0 needs to know of this rank."""

    def value(self, parts: list[Any]) -> Any:
        """The metric of all ranks' parts; called on rank 0."""


def is_late(metric: Any) -> bool:
    """Whether a metric may turn out to be several, by the names of a dict that it returns."""
    return isinstance(metric, EpochMetric) or _is_torchmetric(metric)


def late_metric(metric: Any, device: torch.device) -> DeferredMetric | None:
    """One pass of ``metric``; None for a function whose values are averaged over the batches."""
    if isinstance(metric, EpochMetric):
        return _Kept(metric)
    return _Pooled(metric, device) if _is_torchmetric(metric) else None


class _Kept:
    """For a function over all samples: their outputs and targets, on the CPU."""

    def __init__(self, metric: EpochMetric) -> None:
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


# --- metrics ---


Metrics: TypeAlias = Mapping[str, Any] | Iterable[Any] | None


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of right answers.

    Args:
        outputs: scores of shape (n, classes, ...) for classes ``targets`` of shape (n, ...); or
            logits in the targets' own shape, for targets 0 and 1.
        targets: the right answers.
    """
    answers = outputs > 0 if outputs.ndim == targets.ndim else outputs.argmax(dim=1)
    return (answers == targets).double().mean()


def epoch_metric(function: Callable[[Any, Any], Any]) -> EpochMetric:
    """Mark a metric that must see the whole validation set: F1, AUC, a quantile, R2.

    Plain functions are averaged over batches, which is right for means only. A marked one is called
    once a validation, on rank 0, with the outputs and targets of all samples on all ranks, in the
    data set's order, on the CPU (half precision as float32); all ranks get its value.

        metrics={"f1": nb.epoch_metric(lambda scores, y: f1_score(y, scores.argmax(1)))}

    Args:
        function: ``function(outputs, targets)`` -> a number, or a dict of numbers.

    Returns:
        A metric for :func:`nbtoolkit.fit`. Called itself, it calls ``function``.
    """
    return EpochMetric(function)


def named_metrics(metrics: Metrics) -> dict[str, Any]:
    """What the user passed as ``metrics``, by name.

    Args:
        metrics: a dict; or a list whose items name themselves: ``"accuracy"``, functions
            ``(outputs, targets)`` -> mean over the batch, those marked with :func:`epoch_metric`,
            torchmetrics objects.

    Raises:
        FitError: an item is none of these, two have one name, or one is called ``loss``.
    """
    if isinstance(metrics, str):
        metrics = [metrics]
    given = metrics.items() if isinstance(metrics, Mapping) else map(_self_named, metrics or ())
    named: dict[str, Any] = {}
    for name, metric in given:
        if name in named or name == "loss":
            raise FitError(
                f"two metrics are called {name!r}"
                + (": the loss is always among them" if name == "loss" else ""),
                allowed="one metric a name",
                do="pass metrics as a dict: {name: metric}",
            )
        named[str(name)] = _resolve(metric)
    return named


def names_to_come(metrics: Mapping[str, Any], *, validates: bool) -> tuple[list[str], list[str]]:
    """The metrics that a fit will report.

    Args:
        metrics: by name, from :func:`named_metrics`.
        validates: whether there is a validation set.

    Returns:
        Names, and those whose metric may turn out to be several: ``<name>_<key>``.
    """
    late = [name for name, one in metrics.items() if is_late(one)]
    names = ["train_loss", *(f"val_{name}" for name in ("loss", *metrics) if validates)]
    return names, [f"val_{name}" for name in late if validates]


class Meter:
    """One pass over a data set, and what it comes to; the loss goes by the name ``loss``.

    Plain functions are means with each batch's samples as weight, the loss is one with its own
    weights. The other metrics are computed on rank 0 from what every rank saw, in the data set's
    order, and told to all: a rank that saw nothing does not matter, and all ranks have the same
    numbers.

    Args:
        metrics: by name, from :func:`named_metrics`.
        device: where outputs and targets are.
        ranks: how many there are; rank 0 sees a sample if any rank does.
    """

    def __init__(self, metrics: Mapping[str, Any], device: torch.device, *, ranks: int = 1) -> None:
        late = {name: late_metric(one, device) for name, one in metrics.items()}
        self._late = {name: one for name, one in late.items() if one is not None}
        self._functions = {name: one for name, one in metrics.items() if late[name] is None}
        self._device, self._ranks = device, ranks
        self._sums: list[Tensor] = []

    def add(self, loss: Passed, outputs: Any, targets: Any, samples: int) -> None:
        """Take in one batch of ``samples`` samples (at least one) and its loss."""
        import torch
        from accelerate.utils import convert_to_fp32

        outputs = convert_to_fp32(outputs)  # NumPy knows no bf16, and metrics count on its digits
        means = [loss.mean, 1.0, *(one(outputs, targets) for one in self._functions.values()), 1.0]
        counts = [loss.weight, loss.weight, *(samples for _ in self._functions), samples]
        row, times = (
            torch.stack(
                [torch.as_tensor(one, dtype=torch.float64, device=self._device) for one in values]
            )
            for values in (means, counts)
        )
        self._sums.append(row * times)
        for metric in self._late.values():
            metric.add(outputs, targets, samples)

    def result(self) -> dict[str, float]:
        """The values for all samples of all ranks; collectives when there are several."""
        return {**self._means(), **self._computed_late()}

    def _means(self) -> dict[str, float]:
        import torch
        import torch.distributed as dist

        nothing = torch.zeros(len(self._functions) + 3, dtype=torch.float64, device=self._device)
        sums = torch.stack([nothing, *self._sums]).sum(dim=0)
        if self._ranks > 1:
            dist.all_reduce(sums)
        loss, weight, *totals, samples = sums.tolist()
        means = {name: total / samples for name, total in zip(self._functions, totals, strict=True)}
        return {"loss": loss / weight if weight else 0.0, **means}

    def _computed_late(self) -> dict[str, float]:
        if not self._late:
            return {}
        mine = {name: metric.part() for name, metric in self._late.items()} if self._sums else None
        gathered = gather_on_first(mine, self._ranks)
        values: dict[str, float] = {}
        if gathered is not None:
            parts = [part for part in gathered if part is not None]
            for name, metric in self._late.items():
                values.update(_flat(name, metric.value([part[name] for part in parts])))
        told: dict[str, float] = broadcast(values, self._ranks)
        return told


def _self_named(metric: Any) -> tuple[str, Any]:
    if isinstance(metric, str):
        return metric, metric
    return str(getattr(metric, "__name__", type(metric).__name__)).lower(), metric


def _resolve(metric: Any) -> Any:
    if isinstance(metric, str) and metric == "accuracy":
        return accuracy
    if callable(metric):
        return metric
    raise FitError(
        f"{metric!r} is not a metric",
        allowed='"accuracy", a function (outputs, targets) -> mean over the batch, '
        "nb.epoch_metric of another function, or a torchmetrics object",
        do="pass a list of these, or a dict of them by name",
    )


def _flat(name: str, value: Any) -> dict[str, float]:
    """A computed metric as numbers; a collection's (a dict's) get names of their own."""
    if isinstance(value, Mapping):
        return {f"{name}_{key}": _number(f"{name}_{key}", one) for key, one in value.items()}
    return {name: _number(name, value)}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise FitError(
            f"the metric {name!r} is not a number but {reprlib.repr(value)}",
            allowed="a number, or a dict of numbers",
            do="let it average (average='macro'), or wrap it in torchmetrics' ClasswiseWrapper",
        ) from None
