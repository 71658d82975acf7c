"""Compute metrics over a whole data set, exact on any number of ranks."""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from nbtoolkit.config.aliases import similar_name
from nbtoolkit.errors import FitError
from nbtoolkit.training.data import TORCHS_IGNORED, noted
from nbtoolkit.training.losses import BatchLoss, Labels, ignore_index, is_loss
from nbtoolkit.training.sklearn_metrics import (
    PREDICT_TARGETS,
    NamedMetric,
    metric_names,
    named_metric,
)
from nbtoolkit.worker.collectives import Part, Rows, broadcast, gather_on_first, in_order

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nbtoolkit.training.data import Batch

Function: TypeAlias = Callable[[Any, Any], Any]
"""``(outputs, targets)`` -> a value, the user's."""

Metrics: TypeAlias = Mapping[str, object] | Iterable[object] | None
"""What a user may pass as ``metrics``, see :func:`named_metrics`."""

TorchMetric: TypeAlias = Any
"""A ``torchmetrics.Metric`` or ``MetricCollection``; torchmetrics need not be installed."""

MetricState: TypeAlias = dict[str, Any]
"""The state of a ``torchmetrics.Metric``, by name: tensors, or lists of tensors."""


@dataclass(frozen=True)
class EpochMetric:
    """A function ``(outputs, targets)`` of all samples. Made by ``nb.epoch_metric``."""

    function: Function

    def __call__(self, outputs: Batch, targets: Batch) -> object:
        """Call the function."""
        return self.function(outputs, targets)

    @property
    def __name__(self) -> str:
        """The function's name, the metric's name in a list."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))


Metric: TypeAlias = Function | EpochMetric | NamedMetric | TorchMetric


def accuracy(outputs: Tensor, targets: Tensor, loss: object = None) -> Tensor:
    """Share of correct predictions, a scalar.

    Args:
        outputs: scores of shape (n, classes, ...) for classes ``targets`` of shape (n, ...) or (n,
            1); or logits of 0 and 1, in the targets' own shape or as (n, 1, ...).
        targets: the correct classes; those below 0 and the ``ignore_index`` of ``loss`` do not
            count. Or 0 and 1; -100 does not count.
        loss: the loss of the training. With torch's ``cross_entropy``, targets in the outputs'
            shape are probabilities of classes; with ``binary_cross_entropy``, outputs are
            probabilities. With these and torch's losses of regressions (``mse_loss``, ``l1_loss``,
            ``smooth_l1_loss``, ``huber_loss``) an output above 0.5 predicts 1; else one above 0.

    Raises:
        FitError: the shapes do not fit, or the targets are not classes.
    """
    right, counted = count_correct(outputs, targets, loss)
    return right / counted


def count_correct(outputs: Tensor, targets: Tensor, loss: object = None) -> tuple[Tensor, Tensor]:
    """Return the correct predictions, and how many there are; see :func:`accuracy`."""
    import torch

    if outputs.ndim == targets.ndim + 1 and outputs.shape[1] == 1:
        outputs = outputs[:, 0]
    elif outputs.ndim == targets.ndim > 1 and outputs.shape[1] > targets.shape[1] == 1:
        targets = targets[:, 0]
    if outputs.shape == targets.shape:
        if outputs.ndim > 1 and is_loss(loss, "cross_entropy") and targets.is_floating_point():
            right = outputs.argmax(dim=1) == targets.argmax(dim=1)
            return right.sum().double(), torch.ones_like(right, dtype=torch.float64).sum()
        counted = targets != TORCHS_IGNORED
        if bool((counted & (targets != 0) & (targets != 1)).any()):
            raise _no_accuracy("the targets are not classes but other numbers", outputs, targets)
        threshold = 0.5 if any(is_loss(loss, name) for name in PREDICT_TARGETS) else 0.0
        predictions = (outputs > threshold).to(targets.dtype)
    elif outputs.ndim > 1 and (outputs.shape[0], *outputs.shape[2:]) == targets.shape:
        if targets.is_floating_point() and bool((targets != targets.floor()).any()):
            raise _no_accuracy("the targets are not classes but other numbers", outputs, targets)
        ignored = ignore_index(loss)
        counted = targets >= 0 if ignored is None else (targets >= 0) & (targets != ignored)
        predictions = outputs.argmax(dim=1)
    else:
        raise _no_accuracy("the shapes do not fit", outputs, targets)
    return ((predictions == targets) & counted).sum().double(), counted.sum().double()


def check_accuracy(metrics: Mapping[str, Metric], targets: Labels | None) -> None:
    """Refuse metrics of classes for targets that are none, before the training.

    Args:
        metrics: by name, from :func:`named_metrics`.
        targets: all targets of the training set; None: not known.

    Raises:
        FitError: they are numbers with digits after the point.
    """
    import torch

    of_classes = ["accuracy"] if accuracy in metrics.values() else []
    named = [metric for metric in metrics.values() if isinstance(metric, NamedMetric)]
    of_classes += [metric.name for metric in named if metric.takes != "numbers"]
    if targets is None or not of_classes:
        return
    labels = torch.as_tensor(targets)
    shape = tuple(targets.shape)
    in_one_column = len(shape) == 1 or shape[1:] == (1,)  # of more they may be probabilities
    if in_one_column and labels.is_floating_point() and bool((labels != labels.floor()).any()):
        why = f"the targets are not classes but other numbers (of shape {shape})"
        raise _no_accuracy(why, name=of_classes[0])


def _no_accuracy(
    why: str,
    outputs: Tensor | None = None,
    targets: Tensor | None = None,
    name: str = "accuracy",
) -> FitError:
    if outputs is not None and targets is not None:
        why += f" (outputs of shape {tuple(outputs.shape)}, targets {tuple(targets.shape)})"
    return FitError(
        f'the metric "{name}" cannot be computed: {why}',
        allowed="scores (n, classes, ...) with classes (n, ...), or logits with targets 0 and 1 of "
        "the same shape",
        do="for a regression pass metrics=['mae', 'rmse', 'r2'], or a function of your own: "
        "metrics={'mine': lambda outputs, targets: ...}",
    )


def epoch_metric(function: Function) -> EpochMetric:
    """Mark a metric that must see the whole validation set, such as F1, AUC, a quantile or R2.

    ``fit`` averages plain functions over the batches, which is correct for means only. It calls a
    marked function once per validation, on rank 0. The function gets the outputs and targets of the
    whole validation set, in the order of the data set, on the CPU; half precision becomes float32.
    All ranks get its value. For example::

        metrics = {"f1": nb.epoch_metric(lambda scores, y: f1_score(y, scores.argmax(1)))}

    Args:
        function: ``function(outputs, targets)``, which returns a number or a dict of numbers.

    Returns:
        A metric for :func:`nbtoolkit.fit`. You can also call it like ``function``.
    """
    return EpochMetric(function)


def named_metrics(metrics: Metrics) -> dict[str, Metric]:
    """Return what the user passed as ``metrics``, by name.

    Args:
        metrics: a dict; or a list whose items have names: ``"accuracy"`` and the other names of
            :func:`metric_names`, functions ``(outputs, targets)`` -> mean over the batch or a pair
            (total, weight), those marked with :func:`epoch_metric`, torchmetrics objects.

    Raises:
        FitError: an item is none of these, two have one name, or one is called ``loss``.
    """
    if isinstance(metrics, str):
        metrics = [metrics]
    if isinstance(metrics, Mapping):
        items: Iterable[tuple[str, object]] = metrics.items()
    else:
        items = ((_name_of(metric), metric) for metric in metrics or ())
    named: dict[str, Metric] = {}
    for name, metric in items:
        if name in named or name == "loss":
            raise FitError(
                f"two metrics are called {name!r}"
                + (": the loss is always among them" if name == "loss" else ""),
                allowed="one metric per name",
                do="pass metrics as a dict: {name: metric}",
            )
        named[str(name)] = _as_metric(metric)
    return named


def reported_names(
    metrics: Mapping[str, Metric], *, validates: bool
) -> tuple[list[str], list[str]]:
    """Return the names of the metrics that a fit will report.

    Args:
        metrics: by name, from :func:`named_metrics`.
        validates: whether there is a validation set.

    Returns:
        The names, and those whose metric may return several values: ``<name>_<key>``.
    """
    names = ["train_loss", *(f"val_{name}" for name in ("loss", *metrics) if validates)]
    # These may return a dict of values.
    stems = [n for n, m in metrics.items() if isinstance(m, EpochMetric) or _is_torchmetric(m)]
    return names, [f"val_{name}" for name in stems if validates]


class Meter:
    """The loss and metrics of one pass over a data set; the loss is called ``loss``.

    Plain functions are averaged over the batches, weighted by samples, the loss by its own weights.
    The other metrics are computed on rank 0 from the outputs of all ranks, in the data set's order,
    and broadcast: a rank without samples does not matter, and all ranks get the same numbers.

    Args:
        metrics: by name, from :func:`named_metrics`.
        device: the device of outputs and targets.
        ranks: the number of ranks; rank 0 has samples if any rank has.
        loss: of the training, which says how ``"accuracy"`` reads outputs and targets.
    """

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        device: torch.device,
        *,
        ranks: int = 1,
        loss: object = None,
    ) -> None:
        self._deferred: dict[str, _DeferredMetric] = {}
        self._functions: dict[str, Function] = {}
        for name, metric in metrics.items():
            if isinstance(metric, NamedMetric):
                whole = EpochMetric(partial(metric, loss=loss))
                self._deferred[name] = _WholeSetMetric(whole)
            elif isinstance(metric, EpochMetric):
                self._deferred[name] = _WholeSetMetric(metric)
            elif _is_torchmetric(metric):
                self._deferred[name] = _MergedTorchMetric(metric, device)
            elif metric is accuracy:
                # The loss's ignored targets do not count: batches weigh by those that do.
                self._functions[name] = partial(count_correct, loss=loss)
            else:
                self._functions[name] = metric
        self._device = device
        self._ranks = ranks
        self._sums: list[Tensor] = []

    def add(self, loss: BatchLoss, outputs: Batch, targets: Batch, samples: int) -> None:
        """Add one batch of ``samples`` samples (at least one) and its loss."""
        import torch
        from accelerate.utils import convert_to_fp32

        outputs = convert_to_fp32(outputs)  # NumPy has no bf16, and metrics need the digits
        pairs = [self._value(name, outputs, targets) for name in self._functions]
        means = [loss.mean, 1.0, *(value for value, _ in pairs)]
        counts = [loss.weight, loss.weight, *(samples if n is None else 1 for _, n in pairs)]
        means += [samples if n is None else n for _, n in pairs]
        counts += [1] * len(pairs)
        row, times = (
            torch.stack(
                [
                    torch.as_tensor(n, dtype=torch.float64, device=self._device).reshape(())
                    for n in numbers
                ]
            )
            for numbers in (means, counts)
        )
        self._sums.append(row * times)
        for name, metric in self._deferred.items():
            with noted(f"in the metric {name!r}"):
                metric.add(outputs, targets, samples)

    def _value(self, name: str, outputs: Batch, targets: Batch) -> tuple[Any, Any]:
        """Return a function's mean over a batch and None, or a pair (total, weight)."""
        with noted(f"in the metric {name!r}"):
            value = self._functions[name](outputs, targets)
        pair = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        for number in pair if pair[1] is not None else pair[:1]:
            if not hasattr(number, "__float__") or math.prod(getattr(number, "shape", ())) != 1:
                raise _not_a_number(name, value)
        return pair

    def result(self) -> dict[str, float]:
        """Return the values for all samples of all ranks.

        Collectives when there are several ranks.
        """
        return {**self._means(), **self._deferred_values()}

    def _means(self) -> dict[str, float]:
        import torch
        import torch.distributed as dist

        nothing = torch.zeros(
            2 * len(self._functions) + 2, dtype=torch.float64, device=self._device
        )
        sums = torch.stack([nothing, *self._sums]).sum(dim=0)
        if self._ranks > 1:
            dist.all_reduce(sums)
        loss, weight, *numbers = sums.tolist()
        totals = numbers[: len(self._functions)]
        weights = numbers[len(self._functions) :]
        means = {
            name: total / weight if weight else 0.0
            for name, total, weight in zip(self._functions, totals, weights, strict=True)
        }
        return {"loss": loss / weight if weight else 0.0, **means}

    def _deferred_values(self) -> dict[str, float]:
        if not self._deferred:
            return {}
        deferred = self._deferred.items()
        local_parts = {name: metric.part() for name, metric in deferred} if self._sums else None
        gathered = gather_on_first(local_parts, self._ranks)
        values: dict[str, float] = {}
        if gathered is not None:
            parts = [part for part in gathered if part is not None]
            for name, metric in deferred:
                with noted(f"in the metric {name!r}"):
                    value = metric.value([part[name] for part in parts])
                values.update(_as_numbers(name, value))
        combined: dict[str, float] = broadcast(values, self._ranks)
        return combined


def _name_of(metric: object) -> str:
    """Return the name of a metric in a list."""
    if isinstance(metric, str):
        return metric
    return str(getattr(metric, "__name__", type(metric).__name__)).lower()


def _as_metric(metric: object) -> Metric:
    if isinstance(metric, str):
        return _by_name(metric)
    if callable(metric):
        return metric
    raise FitError(
        f"{metric!r} is not a metric",
        allowed='a name such as "accuracy", a function (outputs, targets) -> mean over the batch, '
        "nb.epoch_metric of another function, or a torchmetrics object",
        do="pass a list of these, or a dict of them by name",
    )


def _by_name(name: str) -> Metric:
    metric = accuracy if name == "accuracy" else named_metric(name)
    if metric is None:
        near = similar_name(name, metric_names())
        raise FitError(
            f"there is no metric of the name {name!r}",
            allowed=", ".join(metric_names()),
            do=f"did you mean {near!r}?"
            if near
            else "pass one of these, or nb.epoch_metric of a function (outputs, targets)",
        )
    return metric


def _as_numbers(name: str, value: object) -> dict[str, float]:
    """Return a computed metric as numbers by name.

    A dict (of a collection) gives ``<name>_<key>``.
    """
    if isinstance(value, Mapping):
        return {f"{name}_{key}": _number(f"{name}_{key}", item) for key, item in value.items()}
    return {name: _number(name, value)}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise _not_a_number(name, value) from None


def _not_a_number(name: str, value: object) -> FitError:
    return FitError(
        f"the metric {name!r} is not a number but {reprlib.repr(value)}",
        allowed="a number; of nb.epoch_metric and torchmetrics also a dict of numbers",
        do="return the mean over the batch (x.mean()); of torchmetrics let it average "
        "(average='macro'), or wrap it in ClasswiseWrapper",
    )


class _DeferredMetric(Protocol):
    """A metric computed once the whole set was seen."""

    def add(self, outputs: Batch, targets: Batch, samples: int) -> None:
        """Add one batch."""

    def part(self) -> object:
        """Return what rank 0 needs from this rank."""

    def value(self, parts: list[Any]) -> object:
        """Return the metric of all ranks' parts; called on rank 0."""


class _WholeSetMetric:
    """A function of all samples: keeps their outputs and targets on the CPU."""

    def __init__(self, metric: EpochMetric) -> None:
        self._metric = metric
        self._rows = Rows()

    def add(self, outputs: Batch, targets: Batch, samples: int) -> None:
        self._rows.add((outputs, targets), samples)

    def part(self) -> Part | None:
        return self._rows.part()

    def value(self, parts: list[Part | None]) -> object:
        return self._metric(*in_order(parts))


class _MergedTorchMetric:
    """A torchmetrics object (or collection) whose states of all ranks are merged on rank 0.

    torchmetrics' own synchronisation expects tensors of equal number, dimensions and type from
    every rank: it hangs or raises when a rank saw no batch, or fewer batches than another (states
    that are lists, reduced by None).
    """

    def __init__(self, metric: TorchMetric, device: torch.device) -> None:
        self._metric = metric.to(device)
        metric.reset()

    def add(self, outputs: Batch, targets: Batch, samples: int) -> None:
        self._metric.update(outputs, targets)

    def part(self) -> list[MetricState]:
        """Return copies of the state of each metric: a view would be sent with all of its base."""
        from accelerate.utils import recursively_apply

        states = [dict(metric.metric_state) for metric in self._inner_metrics()]
        copies: list[MetricState] = recursively_apply(lambda t: t.to("cpu", copy=True), states)
        return copies

    def value(self, parts: list[list[MetricState]]) -> object:
        with ExitStack() as stack:
            for metric, states in zip(self._inner_metrics(), zip(*parts, strict=True), strict=True):
                stack.enter_context(_merged_states(metric, states))
            result: object = self._metric.compute()
            return result

    def _inner_metrics(self) -> list[TorchMetric]:
        """Return a collection's metrics, a wrapper and what it wraps; or the metric itself."""
        import torchmetrics

        modules = self._metric.modules()
        return [part for part in modules if isinstance(part, torchmetrics.Metric)]


def _is_torchmetric(metric: object) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")  # not imported: then no object is one
    return torchmetrics is not None and isinstance(
        metric, (torchmetrics.Metric, torchmetrics.MetricCollection)
    )


@contextmanager
def _merged_states(metric: TorchMetric, states: Sequence[MetricState]) -> Iterator[None]:
    """Give ``metric`` the states of all ranks inside a block, without collectives of its own."""
    local_state = dict(metric.metric_state)
    available = metric.distributed_available_fn
    metric.distributed_available_fn = lambda: False
    for name, value in _merge(metric, states).items():
        setattr(metric, name, value)
    try:
        yield
    finally:
        metric.distributed_available_fn = available
        for name, value in local_state.items():
            setattr(metric, name, value)


def _merge(metric: TorchMetric, states: Sequence[MetricState]) -> MetricState:
    """Reduce the states of several ranks to one as the metric defines, on its device."""
    import torch
    from accelerate.utils import send_to_device

    if len(states) == 1:
        return dict(send_to_device(states[0], metric.device))
    merged = {}
    for name, reduce in metric._reductions.items():
        values = [send_to_device(state[name], metric.device) for state in states]
        is_list = isinstance(values[0], list)
        joined = list(chain.from_iterable(values)) if is_list else torch.stack(values)
        empty = is_list and not joined  # torchmetrics' reductions refuse an empty list
        merged[name] = joined if reduce is None or empty else reduce(joined)
    return merged
