"""Find out what a loss averages over, and combine the losses of the parts of a step.

An optimizer step takes its samples in micro-batches, on each rank and each accumulation step. Those
of a mean over samples are weighted by their samples. A mean over weights (class weights,
``ignore_index``, a mask) needs the sum of the weights of each micro-batch; a sum needs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from nbtoolkit.errors import FitError
from nbtoolkit.training.losses import ALLOWED, BatchLoss, not_a_loss, training_pass
from nbtoolkit.worker.batch_slices import NotRows, rows
from nbtoolkit.worker.collectives import gather_on_all

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import Work

    from nbtoolkit.training.loading.data import Batch
    from nbtoolkit.training.loss_weights import ClassLoss
    from nbtoolkit.training.losses import Labels, Loss

# Relative, of a whole and its parts: float32 sums in another order differ by 1e-6, half by 1e-2.
_TOLERANCE, _TOLERANCE_OF_HALVES = 1e-4, 2e-2

_OTHER_TERMS = (
    "it adds a mean over weights (class weights, or targets of which some are ignored) to other "
    "terms"
)


class Reduction(IntEnum):
    """What a loss does with the losses of its samples; of two ranks' findings the larger counts."""

    UNKNOWN = 0
    """Not looked at yet; or a step has one part, whose loss is that of the step."""
    MEAN = 1
    """The mean over the samples."""
    BATCH = 2
    """Not made of samples, as ``train.loss_reduction: batch`` or the loss says: as a mean."""
    SUM = 3
    """The sum over the samples."""
    WEIGHTED = 4
    """The mean over weights."""
    MIXED = 5
    """The mean over the targets that count, and other terms: over samples if all targets count."""
    OTHER = 6
    """Something else: it cannot be computed in parts."""


class Computed(NamedTuple):
    """The results of a forward pass and its loss."""

    outputs: Batch
    targets: Batch
    returned: object
    """By the loss."""
    calls: Sequence[ClassLoss] = ()
    """Of torch's class losses, if they were recorded."""


class Finding(NamedTuple):
    """What one rank found out about the loss; sent to the others."""

    reduction: Reduction
    records: bool = False
    """Whether training passes must record the calls of torch's class losses."""
    in_forward: bool = False
    """Whether the model's forward pass makes such calls."""
    why: str = ""
    """For :attr:`Reduction.OTHER`."""


class ReducedLoss:
    """A user's loss, and how the losses of micro-batches are combined.

    If a step has one part, its loss is what the user's function returns: nothing is recorded or
    refused. Else the first batch decides. It does so by the calls of torch's class losses, where
    there are some: the first batch need not have an ignored target.

    Args:
        loss: ``loss(outputs, targets)``.
        whole_batches: ``train.loss_reduction: batch``.
        divided: whether optimizer steps have several parts.

    Attributes:
        reduction: as found on the first batch; until then :attr:`Reduction.UNKNOWN`.
        records: whether training passes must record the calls of torch's class losses.
        in_forward: whether the model's forward pass makes such calls; None: not known yet.
    """

    def __init__(self, loss: Loss, *, whole_batches: bool, divided: bool) -> None:
        self._loss, self._divided = loss, divided
        self.reduction = Reduction.BATCH if whole_batches else Reduction.UNKNOWN
        self.records = divided and not whole_batches
        self.in_forward: bool | None = False if whole_batches else None

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on in the same way."""
        return {
            "reduction": int(self.reduction),
            "records": self.records,
            "in_forward": self.in_forward,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state`; in that run, steps may have had one part."""
        reduction = Reduction(state["reduction"])
        if reduction is not Reduction.UNKNOWN:
            self.reduction = reduction
            self.records, self.in_forward = state["records"], state["in_forward"]

    def reduce(self, computed: Computed, samples: int) -> BatchLoss:
        """The mean loss of a micro-batch of ``samples`` (at least 1), and its weight.

        Raises:
            FitError: the loss did not return a scalar tensor, one of shape (samples, ...), or a
                pair (total, weight) of scalars.
        """
        return _reduce(self.reduction, computed, samples)

    def detect(self, computed: Computed, samples: int, ranks: int, known: Labels | None) -> None:
        """Set the attributes on the first batch; called by all ranks, each with its own batch.

        Args:
            computed: the batch.
            samples: in the batch; 0: a stand-in.
            ranks: the number of ranks.
            known: all targets of the training set; None: not known.

        Raises:
            FitError: a step has several parts, and the loss cannot be computed in parts.
        """
        if self.reduction is not Reduction.UNKNOWN:
            return
        if training_pass.whole_batch:
            self.reduction, self.records = Reduction.BATCH, False
            return
        if not self._divided:
            if self._compare(Reduction.MEAN, computed, samples).reduction is Reduction.SUM:
                self.reduction = Reduction.SUM  # is reported as a mean over the samples
            return
        findings = gather_on_all(self._judge(computed, samples, known), ranks)
        strongest = max(findings)
        if strongest.reduction is Reduction.OTHER:
            raise _not_in_parts(strongest.why)
        self.reduction = strongest.reduction
        self.records = any(finding.records for finding in findings)
        self.in_forward = any(finding.in_forward for finding in findings)

    def check_all_count(self, weight: float, samples: int) -> None:
        """Refuse ignored targets in a loss that has other terms, too.

        Args:
            weight: the sum of the weights of some micro-batches.
            samples: the number of their samples.

        Raises:
            FitError: there were some.
        """
        if self.reduction is Reduction.MIXED and weight < samples * (1 - 1e-9):
            raise _not_in_parts(_OTHER_TERMS)

    def _judge(self, computed: Computed, samples: int, known: Labels | None) -> Finding:
        likely = _kind_of(computed, known)
        if likely is Reduction.OTHER:
            return Finding(likely, why=_OTHER_TERMS)
        finding = self._compare(likely, computed, samples)
        records = bool(computed.calls) and likely is not Reduction.MEAN
        return finding._replace(records=records, in_forward=bool(self.in_forward))

    def _compare(self, likely: Reduction, computed: Computed, samples: int) -> Finding:
        """Compare the loss of a batch with the losses of its parts: a sum shows, or a fault."""
        if samples == 0:
            return Finding(likely)
        whole, records = _reduce(likely, computed, samples), bool(computed.calls)
        if not math.isfinite(float(whole.mean.detach())):
            return Finding(likely)
        batch = computed.outputs, computed.targets
        try:
            if samples == 1:  # a sum shows in two copies of the sample
                batch, samples = _two_copies(batch), 2
                whole = self._of_rows(likely, batch, 0, 2, 2, records=records)
            for cut in dict.fromkeys((max(1, samples // 3), 1)):
                parts = [
                    self._of_rows(likely, batch, low, high, samples, records=records)
                    for low, high in ((0, cut), (cut, samples))
                ]
                finding = _finding(likely, whole, parts, f"for {cut} and {samples - cut} of them")
                if finding.reduction is not likely:
                    return finding
        except NotRows:
            pass
        except Exception as error:
            why = f"for {samples} samples it returns a value, for a part of them it raises "
            return Finding(Reduction.OTHER, why=f"{why}{type(error).__name__}: {error}")
        return Finding(likely)

    def _of_rows(
        self, likely: Reduction, batch: Batch, low: int, high: int, samples: int, *, records: bool
    ) -> BatchLoss:
        """The loss of the samples [low, high) of a batch."""
        import torch
        from accelerate.utils import find_device

        from nbtoolkit.training.loss_weights import WeightSums

        outputs, targets = rows(batch, low, high, samples)
        device = find_device(outputs)  # the GPU whose random generator the loss may advance
        gpus = [device.index] if device is not None and device.type == "cuda" else []
        weights = WeightSums()
        with torch.no_grad(), torch.random.fork_rng(gpus), weights if records else nullcontext():
            returned = self._loss(outputs, targets)
        return _reduce(likely, Computed(outputs, targets, returned, weights.calls), high - low)


class StepWeights:
    """The weights of the micro-batches of a step whose loss is a mean over weights.

    Args:
        device: of the weights.
        ranks: the number of ranks.
    """

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._device, self._ranks = device, ranks
        self._samples = 0
        self._weights: list[Tensor] = []
        self._sums: Tensor | None = None
        self._work: Work | None = None

    def __bool__(self) -> bool:
        return bool(self._weights)

    def add(self, loss: BatchLoss, samples: int) -> Tensor:
        """Add a micro-batch; returns its weight, a scalar that :meth:`factor` multiplies."""
        import torch

        weight = torch.as_tensor(loss.weight, device=self._device).double()
        self._samples += samples
        self._weights.append(weight)
        return weight

    def begin_sum(self) -> None:
        """Begin to sum the weights over the ranks; all of them call it."""
        import torch
        import torch.distributed as dist

        if self._ranks == 1 and not self._weights:
            return
        self._sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        if self._weights:
            self._sums[0] += torch.stack(self._weights).sum()
            self._sums[1] += self._samples
        if self._ranks > 1:
            self._work = dist.all_reduce(self._sums, async_op=True)

    def factor(self) -> Tensor | None:
        """What makes the gradients of the step those of the mean over its weights.

        The weights of the micro-batches are multiplied by it, so that they sum to the samples: all
        samples count equally in reports, as if one device returned the loss of the step. None: the
        step has one part. Called by all ranks.
        """
        import torch

        if self._work is not None:
            self._work.wait()
        if self._sums is None:
            return None
        weight, samples = self._sums
        factor = torch.where(weight == 0, 0, samples / weight)
        for one in self._weights:
            one *= factor
        self._samples, self._weights, self._sums, self._work = 0, [], None, None
        return factor


def _reduce(reduction: Reduction, computed: Computed, samples: int) -> BatchLoss:
    """See :meth:`ReducedLoss.reduce`."""
    import torch

    returned, calls = computed.returned, computed.calls
    if isinstance(returned, tuple) and len(returned) == 2:
        total, count = returned
        is_scalar = isinstance(count, (int, float)) or getattr(count, "ndim", 1) == 0
        if getattr(total, "ndim", 1) == 0 and is_scalar:
            weight = torch.as_tensor(count, device=total.device).detach().to(total.dtype)
            return BatchLoss(total / torch.where(weight == 0, 1, weight), weight)
    if not isinstance(returned, torch.Tensor):
        raise not_a_loss(f"a {type(returned).__name__}")
    if returned.ndim:
        if returned.shape[0] != samples:
            raise not_a_loss(f"a tensor of shape {tuple(returned.shape)} for {samples} samples")
        return BatchLoss(returned.mean(), float(samples))
    if reduction is Reduction.SUM:
        return BatchLoss(returned / samples, float(samples))
    if not calls:
        return BatchLoss(returned, float(samples))
    if reduction is Reduction.MIXED:
        return BatchLoss(returned, samples * torch.stack([call.share for call in calls]).amin())
    return BatchLoss(returned, calls[0].weight)


def _finding(
    likely: Reduction, whole: BatchLoss, parts: Sequence[BatchLoss], where: str
) -> Finding:
    """Whether the losses of the parts give that of the whole, as a ``likely`` loss or as a sum."""
    import torch

    value, weight = float(whole.mean.detach()), float(whole.weight)
    means, weights = [float(part.mean) for part in parts], [float(part.weight) for part in parts]
    totals = [mean * count for mean, count in zip(means, weights, strict=True)]
    half = whole.mean.dtype in (torch.float16, torch.bfloat16)
    tolerance = _TOLERANCE_OF_HALVES if half else _TOLERANCE
    if _adds_up(value * weight, totals, tolerance):
        return Finding(likely)
    if likely is Reduction.MEAN and _adds_up(value, means, tolerance):
        return Finding(Reduction.SUM)
    average = sum(totals) / (sum(weights) or 1)
    return Finding(
        Reduction.OTHER,
        why=f"for the whole batch it is {value:.6g}, {where} {average:.6g} on average",
    )


def _kind_of(computed: Computed, known: Labels | None) -> Reduction:
    """What a loss is by its form, and by the calls that it is made of; never a sum."""
    import torch

    from nbtoolkit.training.loss_weights import depends_otherwise

    calls, returned = computed.calls, computed.returned
    if isinstance(returned, tuple):
        return Reduction.WEIGHTED
    if not calls or (isinstance(returned, torch.Tensor) and returned.ndim):
        return Reduction.MEAN
    if all(call.counts_all(computed.targets, known) for call in calls):
        return Reduction.MEAN
    divide_equally = all(call.divides_as(calls[0]) for call in calls[1:])
    if divide_equally and not depends_otherwise(cast("Tensor", returned), calls):
        return Reduction.WEIGHTED
    return Reduction.MIXED if all(call.plain for call in calls) else Reduction.OTHER


def _two_copies(batch: Batch) -> Batch:
    """A batch with its only sample twice."""
    from accelerate.utils import concatenate

    sample = rows(batch, 0, 1, 1)
    return concatenate([sample, sample])


def _adds_up(whole: float, parts: list[float], tolerance: float) -> bool:
    return abs(whole - sum(parts)) <= tolerance * max(map(abs, [whole, *parts]))


def _not_in_parts(why: str) -> FitError:
    return FitError(
        "the loss of a batch does not follow from the losses of its parts, so it would depend on "
        f"the number of devices: {why}",
        allowed=f"{ALLOWED}; or a loss of whole batches (Dice, contrastive) with "
        "train.loss_reduction: batch, which depends on the number of ranks",
        do="return one loss for each sample, or, with a mask or weights, "
        "((losses * mask).sum(), mask.sum()); for a loss of whole batches set "
        "train.loss_reduction: batch",
    )
