"""Reduce each loss to the mean over a micro-batch and the weight of this mean in its step.

An optimizer step takes its samples in micro-batches, on each rank and each accumulation step. Its
loss is the sum of ``mean * weight`` of the micro-batches over the sum of their weights. A weight is
the number of samples, or for a mean over weights (class weights, ``ignore_index``, a mask) the sum
of the weights, which is on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple, cast

from nbtoolkit.errors import FitError
from nbtoolkit.training.losses import ALLOWED, BatchLoss, not_a_loss, training_pass
from nbtoolkit.worker.batch_slices import NotRows, rows
from nbtoolkit.worker.collectives import gather_on_all

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import Work

    from nbtoolkit.training.data import Batch
    from nbtoolkit.training.loss_weights import ClassLoss
    from nbtoolkit.training.losses import Labels, Loss

# Relative, of a whole and its parts: float32 sums in another order differ by 1e-6, half by 1e-2.
_TOLERANCE, _TOLERANCE_OF_HALVES = 1e-4, 2e-2

_OTHER_TERMS = (
    "it adds a mean over weights (class weights, or targets of which some are ignored) to other "
    "terms"
)


class Computed(NamedTuple):
    """The results of a forward pass and its loss."""

    outputs: Batch
    targets: Batch
    returned: object
    """By the loss."""
    calls: Sequence[ClassLoss] = ()
    """Of torch's class losses, if they were recorded."""


class ReducedLoss:
    """A user's loss, in the form of a mean and its weight.

    If a step has one part, its loss is what the user's function returns: nothing is recorded. Else
    the first batch of this process says what to record. It does so by the calls of torch's class
    losses, not by values: the first batch need not have an ignored target.

    Args:
        loss: ``loss(outputs, targets)``.
        whole_batches: ``train.loss_reduction: batch``.
        divided: whether optimizer steps have several parts.

    Attributes:
        whole_batches: whether the loss need not follow from those of the parts, as
            ``train.loss_reduction: batch`` or the loss says.
        records: whether training passes must record the calls of torch's class losses.
        in_forward: whether the model's forward pass makes such calls; None: not known yet.
        all_must_count: whether the loss has such a call and other terms: a mean over the samples if
            no target is ignored, else nothing that parts could give.
    """

    def __init__(self, loss: Loss, *, whole_batches: bool, divided: bool) -> None:
        self._loss, self._divided = loss, divided
        self.whole_batches, self.all_must_count = whole_batches, False
        self.records = divided and not whole_batches
        self.in_forward: bool | None = False if whole_batches else None

    def reduce(self, computed: Computed, samples: int) -> BatchLoss:
        """Return the mean loss of a micro-batch of ``samples`` (at least 1), and its weight.

        Raises:
            FitError: the loss did not return a scalar tensor, one of shape (samples, ...), or a
                pair (total, weight) of scalars.
        """
        import torch

        returned, calls = computed.returned, computed.calls
        if pair := _pair(returned):
            total, weight = pair
            return BatchLoss(total / torch.where(weight == 0, 1, weight), weight)
        if not isinstance(returned, torch.Tensor):
            raise not_a_loss(f"a {type(returned).__name__}")
        if returned.ndim:
            if returned.shape[0] != samples:
                raise not_a_loss(f"a tensor of shape {tuple(returned.shape)} for {samples} samples")
            return BatchLoss(returned.mean(), float(samples))
        if not calls:
            return BatchLoss(returned, float(samples))
        if self.all_must_count:
            return BatchLoss(returned, samples * torch.stack([call.share for call in calls]).amin())
        return BatchLoss(returned, calls[0].weight)

    def check(self, computed: Computed, samples: int, ranks: int, known: Labels | None) -> None:
        """Set the attributes on the first batch, and refuse a loss that has not this form.

        Called by all ranks, each with its own batch.

        Args:
            computed: the batch.
            samples: in the batch; 0: a stand-in.
            ranks: the number of ranks.
            known: all targets of the training set; None: not known.

        Raises:
            FitError: the loss is a sum over the samples; or a step has several parts, and the loss
                cannot be computed in parts.
        """
        self.whole_batches |= training_pass.whole_batch
        if self.whole_batches:
            self.records = False
            return
        if self._divided:
            self.records = _divides_by_weights(computed, known)
            mixed = self.records and _has_other_terms(computed)
            # Two sets of targets may be equal in the batch of one rank only.
            self.all_must_count = any(gather_on_all(mixed, ranks))
        if samples:
            self._compare(computed, samples)

    def check_all_count(self, weight: float, samples: int) -> None:
        """Refuse ignored targets in a loss that has other terms, too.

        Args:
            weight: the sum of the weights of some micro-batches.
            samples: the number of their samples.

        Raises:
            FitError: there were some.
        """
        if self.all_must_count and weight < samples * (1 - 1e-9):
            raise _not_in_parts(_OTHER_TERMS)

    def _compare(self, computed: Computed, samples: int) -> None:
        """Compare the loss of a batch with the losses of its parts.

        Raises:
            FitError: it does not follow from them.
        """
        if not self.records:
            computed = computed._replace(calls=())
        whole = self.reduce(computed, samples)
        if not math.isfinite(float(whole.mean.detach())):
            return
        batch = computed.outputs, computed.targets
        try:
            if samples == 1:  # a sum shows in two copies of the sample
                batch, samples = _two_copies(batch), 2
                whole = self._of_rows(batch, 0, 2, 2)
            cuts = dict.fromkeys((max(1, samples // 3), 1))
            parts = {cut: self._of_parts(batch, cut, samples) for cut in cuts}
        except NotRows:
            return
        except Exception as error:
            if not self._divided:
                return
            why = f"for {samples} samples it returns a value, for a part of them it raises "
            raise _not_in_parts(f"{why}{type(error).__name__}: {error}") from error
        for cut, losses in parts.items():
            self._check_parts(whole, losses, f"for {cut} and {samples - cut} of them")

    def _of_parts(self, batch: Batch, cut: int, samples: int) -> list[BatchLoss]:
        """The losses of the samples before and after ``cut``."""
        return [self._of_rows(batch, 0, cut, samples), self._of_rows(batch, cut, samples, samples)]

    def _of_rows(self, batch: Batch, low: int, high: int, samples: int) -> BatchLoss:
        """The loss of the samples [low, high) of a batch."""
        import torch
        from accelerate.utils import find_device

        from nbtoolkit.training.loss_weights import WeightSums

        outputs, targets = rows(batch, low, high, samples)
        device = find_device(outputs)  # the GPU whose random generator the loss may advance
        gpus = [device.index] if device is not None and device.type == "cuda" else []
        weights = WeightSums()
        recording = weights if self.records else nullcontext()
        with torch.no_grad(), torch.random.fork_rng(gpus), recording:
            returned = self._loss(outputs, targets)
        return self.reduce(Computed(outputs, targets, returned, weights.calls), high - low)

    def _check_parts(self, whole: BatchLoss, parts: Sequence[BatchLoss], where: str) -> None:
        """Refuse a sum, and in a step of several parts a loss that is not the mean of theirs."""
        import torch

        value, weight = float(whole.mean.detach()), float(whole.weight)
        means, weights = (
            [float(part.mean) for part in parts],
            [float(part.weight) for part in parts],
        )
        totals = [mean * count for mean, count in zip(means, weights, strict=True)]
        half = whole.mean.dtype in (torch.float16, torch.bfloat16)
        tolerance = _TOLERANCE_OF_HALVES if half else _TOLERANCE
        if _adds_up(value * weight, totals, tolerance):
            return
        if _adds_up(value, means, tolerance):
            raise _is_sum(value, where, means)
        if self._divided:
            average = sum(totals) / (sum(weights) or 1)
            raise _not_in_parts(
                f"for the whole batch it is {value:.6g}, {where} {average:.6g} on average"
            )


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


def _pair(returned: object) -> tuple[Tensor, Tensor] | None:
    """The sums of a pair (total, weight) of scalars; None: it is none."""
    import torch

    if not isinstance(returned, tuple) or len(returned) != 2:
        return None
    total, count = returned
    is_scalar = isinstance(count, (int, float)) or getattr(count, "ndim", 1) == 0
    if getattr(total, "ndim", 1) or not is_scalar:
        return None
    return total, torch.as_tensor(count, device=total.device).detach().to(total.dtype)


def _divides_by_weights(computed: Computed, known: Labels | None) -> bool:
    """Whether a loss divides by weights that only the calls of torch's class losses tell.

    Args:
        computed: a batch.
        known: all targets of the training set; None: not known.
    """
    import torch

    calls, returned = computed.calls, computed.returned
    if not calls or not isinstance(returned, torch.Tensor) or returned.ndim:
        return False
    return not all(call.counts_all(computed.targets, known) for call in calls)


def _has_other_terms(computed: Computed) -> bool:
    """Whether a loss is more than calls of torch's class losses that divide by the same weights.

    Raises:
        FitError: it is, and the weights are not those of samples.
    """
    from nbtoolkit.training.loss_weights import depends_otherwise

    calls = computed.calls
    divide_equally = all(call.divides_as(calls[0]) for call in calls[1:])
    if divide_equally and not depends_otherwise(cast("Tensor", computed.returned), calls):
        return False
    if not all(call.plain for call in calls):
        raise _not_in_parts(_OTHER_TERMS)
    return True


def _two_copies(batch: Batch) -> Batch:
    """A batch with its only sample twice."""
    from accelerate.utils import concatenate

    sample = rows(batch, 0, 1, 1)
    return concatenate([sample, sample])


def _adds_up(whole: float, parts: list[float], tolerance: float) -> bool:
    return abs(whole - sum(parts)) <= tolerance * max(map(abs, [whole, *parts]))


def _is_sum(value: float, where: str, means: list[float]) -> FitError:
    parts = " + ".join(f"{mean:.6g}" for mean in means)
    return FitError(
        "the loss is a sum over the samples, so a step would grow with the batch: for the whole "
        f"batch it is {value:.6g}, {where} {parts}",
        allowed=ALLOWED,
        do='return the mean: reduction="mean", or loss / len(targets); a rate that was chosen for '
        "the sum is to be multiplied by the samples of a step",
    )


def _not_in_parts(why: str) -> FitError:
    return FitError(
        "the loss of a batch does not follow from the losses of its parts, so it would depend on "
        f"the number of devices: {why}",
        allowed=f"{ALLOWED}; nb.all_rows(loss) for a loss that compares samples; or a loss of "
        "whole batches with train.loss_reduction: batch, which depends on the number of ranks",
        do="return one loss for each sample, or, with a mask or weights, "
        "((losses * mask).sum(), mask.sum()); for a loss that compares samples (contrastive, Dice) "
        "pass nb.all_rows(loss); for another loss of whole batches set train.loss_reduction: batch",
    )
