"""Metrics over a whole data set, exact on any number of ranks: sums meet once, at the end."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from nbtoolkit.errors import FitError
from nbtoolkit.training.gathering import gather_on_first, tell_all
from nbtoolkit.training.late import OverAll, is_late, late_metric
from nbtoolkit.training.losses import Passed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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


def over_all(function: Callable[[Any, Any], Any]) -> OverAll:
    """Mark a metric that must see the whole validation set: F1, AUC, a quantile, R2.

    Plain functions are averaged over batches, which is right for means only. A marked one is called
    once a validation, on rank 0, with the outputs and targets of all samples on all ranks, in the
    data set's order, on the CPU (half precision as float32); all ranks get its value.

        metrics={"f1": nb.over_all(lambda scores, y: f1_score(y, scores.argmax(1)))}

    Args:
        function: ``function(outputs, targets)`` -> a number, or a dict of numbers.

    Returns:
        A metric for :func:`nbtoolkit.fit`. Called itself, it calls ``function``.
    """
    return OverAll(function)


def named_metrics(metrics: Metrics) -> dict[str, Any]:
    """What the user passed as ``metrics``, by name.

    Args:
        metrics: a dict; or a list whose items name themselves: ``"accuracy"``, functions
            ``(outputs, targets)`` -> mean over the batch, those marked with :func:`over_all`,
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
        told: dict[str, float] = tell_all(values, self._ranks)
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
        allowed='"accuracy", a function (outputs, targets) -> mean over the batch, nb.over_all of '
        "another function, or a torchmetrics object",
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
