"""Metrics over a whole data set, exact on any number of ranks: sums meet once, at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from nbtoolkit.errors import FitError

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


def named_metrics(metrics: Metrics) -> dict[str, Any]:
    """What the user passed as ``metrics``, by name.

    Args:
        metrics: a dict; or a list whose items name themselves: ``"accuracy"``, functions
            ``(outputs, targets)`` -> mean over the batch, torchmetrics objects.

    Raises:
        FitError: an item is none of these, or two have one name.
    """
    if isinstance(metrics, Mapping):
        return {str(name): _resolve(metric) for name, metric in metrics.items()}
    named: dict[str, Any] = {}
    for metric in [metrics] if isinstance(metrics, str) else metrics or ():
        name = metric if isinstance(metric, str) else _name(metric)
        if name in named:
            raise FitError(
                f"two metrics are called {name!r}",
                allowed="one metric a name",
                do="pass metrics as a dict: {name: metric}",
            )
        named[name] = _resolve(metric)
    return named


class Meter:
    """One pass over a data set, and its means; the loss's goes by the name ``loss``.

    Functions are averaged with each batch's samples as weight; torchmetrics objects gather
    their own state.
    """

    def __init__(
        self, metrics: Mapping[str, Any], device: torch.device, *, ranks: int, samples: int
    ) -> None:
        self._functions = {name: one for name, one in metrics.items() if not _has_state(one)}
        self._states = {name: one.to(device) for name, one in metrics.items() if _has_state(one)}
        self._device, self._ranks = device, ranks
        self._sums: list[Tensor] = []
        for state in self._states.values():
            state.reset()
            if samples < ranks:
                _gather_what_is_there(state)

    def add(self, loss: Tensor, outputs: Any, targets: Any, samples: int) -> None:
        """Take in one batch of ``samples`` samples and its mean loss."""
        import torch

        values = [loss, *(one(outputs, targets) for one in self._functions.values()), 1.0]
        row = [torch.as_tensor(value, dtype=torch.float64, device=self._device) for value in values]
        self._sums.append(torch.stack(row) * samples)
        for state in self._states.values():
            state.update(outputs, targets)

    def result(self) -> dict[str, float]:
        """The means over all samples of all ranks; a collective when there are several."""
        import torch
        import torch.distributed as dist

        nothing = torch.zeros(len(self._functions) + 2, dtype=torch.float64, device=self._device)
        sums = torch.stack([nothing, *self._sums]).sum(dim=0)
        if self._ranks > 1:
            dist.all_reduce(sums)
        *totals, samples = sums.tolist()
        names = ["loss", *self._functions]
        values = {name: total / samples for name, total in zip(names, totals, strict=True)}
        for name, state in self._states.items():
            values.update(_flat(name, state.compute()))
        return values


class LossWindow:
    """The training losses since it was last closed; they stay on the device until then."""

    def __init__(self, device: torch.device, *, ranks: int) -> None:
        self._device, self._ranks = device, ranks
        self._losses: list[Tensor] = []
        self._samples: list[int] = []

    def add(self, loss: Tensor, samples: int) -> None:
        """Take in one pass over ``samples`` samples and its mean loss (detached)."""
        self._losses.append(loss)
        self._samples.append(samples)

    def close(self) -> tuple[float, int]:
        """The losses' sum and number over all ranks, and begin anew; a collective when several."""
        import torch
        import torch.distributed as dist

        losses = torch.stack(self._losses).tolist() if self._losses else []
        # A stand-in's loss does not count, even where it is not a number.
        total = sum(loss * n for loss, n in zip(losses, self._samples, strict=True) if n)
        samples = sum(self._samples)
        self._losses, self._samples = [], []
        if self._ranks > 1:
            sums = torch.tensor([total, samples], dtype=torch.float64, device=self._device)
            dist.all_reduce(sums)
            total, samples = sums.tolist()
        return total, int(samples)


def _resolve(metric: Any) -> Any:
    if isinstance(metric, str) and metric == "accuracy":
        return accuracy
    if callable(metric):
        return metric
    raise FitError(
        f"{metric!r} is not a metric",
        allowed='"accuracy", a function (outputs, targets) -> mean, or a torchmetrics object',
        do="pass a list of these, or a dict of them by name",
    )


def _name(metric: Any) -> str:
    return str(getattr(metric, "__name__", type(metric).__name__)).lower()


def _has_state(metric: Any) -> bool:
    """Whether this is a torchmetrics object (or looks like one)."""
    return all(hasattr(metric, name) for name in ("update", "compute", "reset", "to"))


def _flat(name: str, value: Any) -> dict[str, float]:
    """A computed metric as numbers; a collection's get names of their own."""
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(one) for key, one in value.items()}
    return {name: float(value)}


def _gather_what_is_there(state: Any) -> None:
    """Let a torchmetrics object gather from ranks of which some saw no sample.

    Its own gather wants tensors of equal dimensions and type from everyone, and a rank that saw
    nothing offers an empty vector of floats: that hangs or raises.
    """
    for part in state.modules():
        if hasattr(part, "dist_sync_fn"):
            part.dist_sync_fn = _gather_objects


def _gather_objects(tensor: Tensor, group: Any = None) -> list[Tensor]:
    import torch.distributed as dist

    boxes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(boxes, tensor.cpu(), group=group)
    return [box.to(tensor.device) for box in boxes if box.numel()]
