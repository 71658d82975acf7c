"""Bring the user's loss into one form: the mean of a micro-batch, and the weight of this mean.

An optimizer step takes its samples in micro-batches, on each rank and each accumulation step. Its
loss is the sum of ``mean * weight`` of the micro-batches over the sum of their weights. A weight is
the number of samples, or for a mean over weights (class weights, ``ignore_index``, a mask) the sum
of the weights, which is on the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from nbtoolkit.errors import FitError, some_names
from nbtoolkit.training.data import TORCHS_IGNORED
from nbtoolkit.worker.batch_slices import NotRows, rows
from nbtoolkit.worker.collectives import gather_on_all

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from nbtoolkit.training.data import Batch
    from nbtoolkit.training.loss_weights import ClassLoss
    from nbtoolkit.worker.context import RunContext

Loss: TypeAlias = "Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]]"
"""``loss(outputs, targets)`` of the user, see :func:`nbtoolkit.fit`."""

Labels: TypeAlias = "Tensor | NDArray[np.generic]"
"""Targets of a data set, one row per sample."""


ALLOWED = (
    "a mean over the batch's samples, F.cross_entropy with weight and ignore_index, a "
    "tensor with one loss for each sample, or a pair (total, weight) of two sums"
)


class TrainingPass:
    """What ``fit`` and a loss tell each other during a training pass; each rank has one.

    Attributes:
        samples: of this rank in the micro-batch; 0: the rank passes a stand-in, whose row must not
            count. None outside a training pass of ``fit``: in an own loop, and in the validation.
        whole_batch: set by a loss that was computed from the micro-batches of all ranks: it need
            not follow from its parts, and does not depend on the number of ranks.
    """

    samples: int | None = None
    whole_batch: bool = False


training_pass = TrainingPass()


class BatchLoss(NamedTuple):
    """The loss of one micro-batch."""

    mean: Tensor
    """Over the samples, or over the weights; a scalar."""
    weight: Tensor | float
    """The weight of the mean beside those of other micro-batches: samples, or sum of weights."""


def check_loss(loss: object) -> None:
    """Refuse what is no function of outputs and targets.

    Raises:
        FitError: says what to pass.
    """
    if isinstance(loss, type) or not callable(loss):
        raise FitError(
            f"loss={loss!r} is not a function of outputs and targets",
            allowed="a function (outputs, targets), or an object such as nn.CrossEntropyLoss()",
            do="call the class" if isinstance(loss, type) else "pass the function itself",
        )


def on_device(loss: Loss, device: torch.device) -> Loss:
    """Return a loss with its tensors (``weight``, ``pos_weight``) on the model's device.

    Args:
        loss: a module is moved in place; a ``partial`` is replaced by a new one, whose arguments
            are moved. ``nb.all_rows`` returns such a partial.
        device: this rank's.
    """
    import torch

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, (torch.Tensor, torch.nn.Module)) else value

    if isinstance(loss, functools.partial):
        named = {name: moved(value) for name, value in loss.keywords.items()}
        return functools.partial(moved(loss.func), *map(moved, loss.args), **named)
    return cast("Loss", moved(loss))


# Relative, of a whole and its parts: float32 sums in another order differ by 1e-6, half by 1e-2.
_TOLERANCE = 1e-4
_TOLERANCE_OF_HALVES = 2e-2

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
        self._loss = loss
        self._divided = divided
        self.whole_batches = whole_batches
        self.all_must_count = False
        self.records = divided and not whole_batches
        self.in_forward: bool | None = False if whole_batches else None
        self._unequal: Tensor | None = None

    def reduce(self, computed: Computed, samples: int) -> BatchLoss:
        """Return the mean loss of a micro-batch of ``samples`` (at least 1), and its weight.

        Raises:
            FitError: the loss did not return a scalar tensor, one of shape (samples, ...), or a
                pair (total, weight) of scalars.
        """
        import torch

        returned = computed.returned
        calls = computed.calls
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
        if len(calls) > 1:
            self._note_unequal(calls)
        return BatchLoss(returned, calls[0].weight)

    def _note_unequal(self, calls: Sequence[ClassLoss]) -> None:
        """Note on the device whether the calls divide by different weights.

        Their targets were equal in the first batch. In a later one, only one of them may have
        ignored targets: the loss of the batch then does not follow from those of its parts.
        """
        import torch

        weights = torch.stack([call.weight for call in calls])
        unequal = (weights != weights[0]).any()
        self._unequal = unequal if self._unequal is None else self._unequal | unequal

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
        """Refuse ignored targets in a loss that has other terms, or other targets, too.

        Args:
            weight: the sum of the weights of some micro-batches.
            samples: the number of their samples.

        Raises:
            FitError: there were some.
        """
        ignored = self.all_must_count and weight < samples * (1 - 1e-9)
        if ignored or (self._unequal is not None and bool(self._unequal)):
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
                batch = _two_copies(batch)
                samples = 2
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
        """Return the losses of the samples before and after ``cut``."""
        return [self._of_rows(batch, 0, cut, samples), self._of_rows(batch, cut, samples, samples)]

    def _of_rows(self, batch: Batch, low: int, high: int, samples: int) -> BatchLoss:
        """Return the loss of the samples [low, high) of a batch."""
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

        value = float(whole.mean.detach())
        weight = float(whole.weight)
        means = [float(part.mean) for part in parts]
        weights = [float(part.weight) for part in parts]
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


def _pair(returned: object) -> tuple[Tensor, Tensor] | None:
    """Return the sums of a pair (total, weight) of scalars; None: it is none."""
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

    calls = computed.calls
    returned = computed.returned
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
    """Return a batch with its only sample twice."""
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


def not_a_loss(returned: str) -> FitError:
    """Return the error for what a loss ``returned``."""
    return FitError(
        f"the loss returned {returned}",
        allowed=ALLOWED,
        do='return a scalar tensor; torch\'s losses do with reduction="mean"',
    )


def check_labels(outputs: object, targets: object, loss: object) -> None:
    """Refuse class labels for which a model has no score.

    On a GPU one such label ends the whole process, some calls later ("device-side assert"). Waits
    for the device: for the first batch, or for all targets at once.

    Args:
        outputs: the model's scores, of shape (n, classes, ...) or (classes,).
        targets: labels of shape (n, ...) or () in whole numbers; any number of samples, a tensor
            or an array.
        loss: ``cross_entropy`` or ``nll_loss`` of torch, as a function, a module or a ``partial``;
            other losses are not checked, nor targets that are probabilities.

    Raises:
        FitError: a label is not in ``range(classes)`` and not the loss's ``ignore_index``.
    """
    import numpy as np
    import torch

    ignored = ignore_index(loss)
    if ignored is None or not isinstance(outputs, torch.Tensor) or outputs.ndim == 0:
        return
    if not isinstance(targets, (torch.Tensor, np.ndarray)):
        return
    labels = torch.tensor(targets) if isinstance(targets, np.ndarray) else targets
    if labels.is_floating_point():
        return
    labels = labels[labels != ignored]
    if not labels.numel():
        return
    classes = outputs.shape[min(1, outputs.ndim - 1)]
    low, high = (int(label) for label in torch.aminmax(labels))
    if low < 0 or high >= classes:
        raise _out_of_range(low, high, classes, ignored)


def ignore_index(loss: object) -> int | None:
    """Return the label that does not count; None: the loss is not one of torch's class losses."""
    from torch import nn
    from torch.nn import functional

    if isinstance(loss, functools.partial):
        default = ignore_index(loss.func)
        return default if default is None else loss.keywords.get("ignore_index", default)
    if loss is functional.cross_entropy or loss is functional.nll_loss:
        return TORCHS_IGNORED
    return loss.ignore_index if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) else None


def is_loss(loss: object, name: str) -> bool:
    """Whether a loss is torch's function ``name``, its module, or a partial of it."""
    from torch import nn
    from torch.nn import functional

    modules: dict[str, type[nn.Module]] = {
        "cross_entropy": nn.CrossEntropyLoss,
        "binary_cross_entropy": nn.BCELoss,
        "mse_loss": nn.MSELoss,
        "l1_loss": nn.L1Loss,
        "smooth_l1_loss": nn.SmoothL1Loss,
        "huber_loss": nn.HuberLoss,
    }
    if isinstance(loss, functools.partial):
        return is_loss(loss.func, name)
    return loss is getattr(functional, name) or isinstance(loss, modules[name])


def _out_of_range(low: int, high: int, classes: int, ignored: int) -> FitError:
    if low > 0 and high - low < classes:
        do = f"subtract {low} from the labels: classes are numbered from 0"
    elif low >= 0:
        do = f"give the model's last layer {high + 1} outputs, or renumber the labels"
    else:
        do = f"number the labels from 0; those that are not to count get {ignored}"
    return FitError(
        f"labels go from {low} to {high}, but the model scores {classes} classes",
        allowed=f"labels from 0 to {classes - 1}, and {ignored} (ignore_index) for labels that do "
        "not count",
        do=do,
    )


def check_shapes(outputs: object, targets: object, returned: object) -> None:
    """Refuse outputs (n, 1) and targets (n,), or the reverse, that a loss broadcasts to (n, n).

    The shapes alone do not tell it: a loss may call ``outputs.squeeze(1)`` itself. The autograd
    graph of what it returned does, whatever the values are.

    Args:
        outputs: of the model, with gradients.
        targets: of the same samples.
        returned: by the loss for them.

    Raises:
        FitError: the loss has made (n, n) of them.
    """
    import torch

    from nbtoolkit.worker.loss_graph import compared_pairs, roots

    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return
    if {outputs.shape[1:], targets.shape[1:]} != {(1,), ()}:
        return
    for loss in roots(returned):
        if pairs := compared_pairs(loss, roots(outputs)):
            raise FitError(
                f"the loss compares each output with the targets of all samples: torch makes "
                f"{pairs[1]} of outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}",
                allowed="outputs and targets of the same shape; a loss of pairs of samples with "
                "train.loss_reduction: batch",
                do="let the model return outputs.squeeze(1), or give targets[:, None]",
            )


def trained_loss(ctx: RunContext, model: nn.Module, loss: object) -> nn.Module | None:
    """Return the module in ``loss`` whose parameters are to be trained.

    Args:
        ctx: the run's context.
        model: as it is trained. The loss may hold it, or a part of it.
        loss: on the rank's device: a module, a ``partial`` with modules in its arguments, or a
            function.

    Returns:
        None: the loss has no such parameters.

    Raises:
        FitError: the plan's strategy cannot train them.
    """
    from torch import nn

    modules = [candidate for candidate in _modules(loss) if loss_parameters(model, candidate)]
    if not modules:
        return None
    module = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    named = loss_parameters(model, module)
    shown = some_names([f"{name} {tuple(parameter.shape)}" for name, parameter in named.items()])
    if ctx.plan.strategy == "fsdp":
        raise FitError(
            f"the loss has parameters of its own, {shown}, which distributed.strategy: fsdp cannot "
            "train",
            allowed="single, ddp or dp; with fsdp a loss without parameters",
            do="set distributed.strategy: ddp, or make the loss a layer of the model",
        )
    ctx.print(f"fit: the parameters of the loss are trained, too: {shown}")
    return module


def _modules(loss: object) -> Iterator[nn.Module]:
    from torch import nn

    if isinstance(loss, nn.Module):
        yield loss
    elif isinstance(loss, functools.partial):
        for part in (loss.func, *loss.args, *loss.keywords.values()):
            yield from _modules(part)


def loss_parameters(model: nn.Module, loss: nn.Module | None) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a loss beside the model's, as ``loss.<name>``."""
    of_model = set(model.parameters())
    return {
        f"loss.{name}": parameter
        for name, parameter in ([] if loss is None else loss.named_parameters())
        if parameter.requires_grad and parameter not in of_model
    }


RowsLoss: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
"""``loss(outputs, targets)`` -> a scalar, of tensors with one row for each sample."""


def all_rows(loss: RowsLoss) -> RowsLoss:
    """Return a loss that is computed over the rows of all ranks.

    For a loss that compares the samples of a batch, such as a contrastive loss. Its value and its
    gradients are then those of the whole batch on one device, in :func:`nbtoolkit.fit` and in an
    own loop under ``DistributedDataParallel``::

        loss = nb.all_rows(pytorch_metric_learning.losses.SupConLoss())
        nb.fit(ctx, config, encoder, train_data, None, loss=loss)

    With gradient accumulation, these are the rows of one pass of all ranks. Under
    ``torch.no_grad``, as in the validation, they are the rows of this rank only: there, the ranks
    may have different numbers of batches.

    Args:
        loss: ``loss(outputs, targets)`` -> a scalar tensor. It gets the outputs in float32, also
            under autocast, and draws no random numbers. ``fit`` trains its parameters (the class
            centres of ``ArcFaceLoss``), if it is a module.

    Returns:
        ``loss(outputs, targets)`` of this rank's tensors, both of shape (n, ...). Ranks may have
        different n. Each call during training is a collective of all ranks. It waits for the
        device. It raises a FitError for other shapes, and for outputs that are not finite: all
        ranks name the ranks that have them.
    """
    return functools.partial(_of_all_ranks, loss)


def _of_all_ranks(loss: RowsLoss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of the rows of all ranks, which each rank computes as a whole.

    The backward pass has no collective. A rank gets the gradient of its own rows only, times the
    factor that makes the mean over the ranks, which DDP takes, that of the whole batch.
    """
    import torch
    import torch.distributed as dist

    _check_rows(outputs, targets)
    gathers = torch.is_grad_enabled()
    training_pass.whole_batch = gathers
    samples = training_pass.samples
    # The row of a stand-in, which a rank without samples passes, must not count.
    counted = 0 if gathers and samples == 0 else len(outputs)
    ranks = dist.get_world_size() if gathers and dist.is_initialized() else 1
    with torch.autocast(outputs.device.type, enabled=False):
        # A slice is a tensor of its own: the hook below scales no other use of the outputs.
        rows = outputs[:counted].float()
        labels = targets[:counted].to(rows.device)
        sizes = _sizes(rows, ranks)
        if ranks == 1:
            return loss(rows, labels)
        parts = _gather(rows.detach(), sizes)
        parts[dist.get_rank()] = rows
        value = loss(torch.cat(parts), torch.cat(_gather(labels, sizes)))
        # fit weights a pass by its share of the samples; DDP alone takes the mean over the ranks.
        # The parameters of the loss have their whole gradient on each rank.
        factor = ranks if samples is None else sum(sizes) / max(counted, 1)
        if rows.requires_grad:
            rows.register_hook(lambda gradient: gradient * factor)
        if counted == 0:
            # The other ranks wait for the gradients of this rank's model.
            value = value + outputs.float().sum() * 0
        return value


def _check_rows(outputs: Tensor, targets: Tensor) -> None:
    shapes = [tuple(getattr(part, "shape", ())) for part in (outputs, targets)]
    if shapes[0] and shapes[1] and shapes[0][0] == shapes[1][0]:
        return
    raise FitError(
        f"a loss of nb.all_rows got outputs of shape {shapes[0]} and targets of shape {shapes[1]}",
        allowed="two tensors with one row for each sample, of shape (n, ...)",
        do="return both from the step: step=lambda model, batch: (model(batch[0]), batch[1])",
    )


def _sizes(rows: Tensor, ranks: int) -> list[int]:
    """Return the number of rows of each rank.

    Raises:
        FitError: some are not finite; the same on all ranks.
    """
    import torch
    import torch.distributed as dist

    bad = (~rows.detach()[:, None].flatten(1).isfinite().all(1)).sum()
    counts = torch.stack([torch.full_like(bad, len(rows)), bad])
    received = [counts]
    if ranks > 1:
        received = [torch.empty_like(counts) for _ in range(ranks)]
        dist.all_gather(received, counts)
    sizes, faults = torch.stack(received, dim=1).tolist()
    if any(faults):
        named = [f"{faults[n]} of {sizes[n]} rows on rank {n}" for n in range(ranks) if faults[n]]
        raise FitError(
            f"the outputs for a loss of nb.all_rows are NaN or infinite: {', '.join(named)}",
            allowed="outputs that are finite numbers",
            do="look for NaN in the inputs; lower optim.lr; set train.max_grad_norm: 1.0; under "
            "fp16 let the last layer compute in float32",
        )
    return list(sizes)


def _gather(part: Tensor, sizes: list[int]) -> list[Tensor]:
    """Return the parts of all ranks, which have ``sizes`` rows."""
    import torch
    import torch.distributed as dist

    padded = part.new_zeros(max(sizes), *part.shape[1:])
    padded[: len(part)] = part
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded)
    return [rows[:size] for rows, size in zip(received, sizes, strict=True)]
