"""Losses between the samples of a batch, of all ranks, and a sampler of batches for them.

With the micro-batches of all ranks such a loss is that of the whole batch on one device, and so are
its gradients. :func:`nbtoolkit.fit` needs no setting for it::

    nb.fit(
        ctx,
        config,
        encoder,
        train_data,
        None,
        loss=supervised_contrastive_loss,
        sampler=ClassBalanced(labels, samples_per_class=4),
    )

Unlike other modules of this folder it imports torch: import it inside functions.

With gradient accumulation (``train.gradient_accumulation_steps``, also as set by a launch after
memory ran out), positives and negatives come from the micro-batches of one pass only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from nbtoolkit.errors import FitError, some_names
from nbtoolkit.training.losses import Labels, training_pass

PairLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""``loss(embeddings, labels)`` -> a scalar, of rows of one device."""

NO_POSITIVES = (
    "a batch has no two samples of one class, so its contrastive loss is zero (reported once); "
    "draw several samples of each class with ClassBalanced, or set a larger train.batch_size"
)


def supervised_contrastive_loss(
    embeddings: Tensor, labels: Tensor, *, temperature: float = 0.1
) -> Tensor:
    """The supervised contrastive loss of Khosla et al. 2020 (arXiv:2004.11362), L_out (eq. 2).

    The mean over the anchors that have a positive, another sample of their class in the batch. Zero
    with zero gradients, and one warning, if no anchor has one.

    Args:
        embeddings: of any scale, float of any precision: (n, d), or (n, views, d) for several
            augmentations of each sample. They are normalised to length 1 and compared in float32,
            also under autocast; a row of zeros stays zero.
        labels: int, of shape (n,); any values.
        temperature: above 0; as low as 0.01 does not overflow.

    Returns:
        A float32 scalar, equal on all ranks.

    Raises:
        FitError: embeddings are not finite (names the ranks), or shapes or temperature are wrong.
    """
    if not temperature > 0:
        raise FitError(
            f"the temperature of the contrastive loss is {temperature}",
            allowed="a number above 0, such as 0.1",
            do="pass temperature=0.1",
        )
    return across_ranks(partial(_l_out, temperature=temperature), embeddings, labels)


def _l_out(rows: Tensor, classes: Tensor, temperature: float) -> Tensor:
    norms = rows.norm(dim=1, keepdim=True)
    # Rows of zeros (a dead layer) stay as they are: 1 / 0 has no gradient.
    unit = rows / torch.where(norms > 1e-12, norms, 1.0)
    itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    positive = (classes[:, None] == classes).masked_fill(itself, False)
    counts = positive.sum(1)
    anchors = counts > 0
    if torch.is_grad_enabled() and not bool(anchors.any()):
        warnings.warn(NO_POSITIVES, stacklevel=2)
    # The lowest finite number instead of -inf: the row of a single sample has a finite sum.
    scores = (unit @ unit.T / temperature).masked_fill(itself, torch.finfo(torch.float32).min)
    to_positives = (scores * positive).sum(1) / counts.clamp(min=1)
    losses = torch.where(anchors, scores.logsumexp(1) - to_positives, 0.0)
    return losses.sum() / anchors.sum().clamp(min=1)


def metric_loss(loss: PairLoss) -> PairLoss:
    """A loss of another package or your own, with positives and negatives from all ranks.

    Args:
        loss: an object ``loss(embeddings, labels)``, such as
            ``pytorch_metric_learning.losses.MultiSimilarityLoss()``. ``fit`` trains its parameters
            (``ArcFaceLoss`` has the centres of the classes) with the model's.

    Returns:
        ``loss(embeddings, labels)`` for ``fit``, float32 also under autocast; embeddings and labels
        as for :func:`supervised_contrastive_loss`.
    """
    return partial(across_ranks, loss)


# --- the rows of all ranks ---


def across_ranks(loss: PairLoss, embeddings: Tensor, labels: Tensor) -> Tensor:
    """Compute a loss of the rows of all ranks; a collective of those that train.

    Each rank computes the whole loss, and gets the gradient of its own rows, times the factor that
    makes the mean over the ranks, which DDP takes, that of the whole batch. So the backward pass
    has no collective. Ranks may have different numbers of rows. On a GPU it waits for the device.

    Under ``torch.no_grad``, as in the validation, it takes this rank's rows only: there the ranks
    may have different numbers of batches. Scores of a whole validation set are in
    :mod:`nbtoolkit.extras.metric_learning.retrieval`.

    Args:
        loss: of all rows: float32 (n, d), int64 (n,) -> a scalar. It draws no random numbers.
        embeddings: of this rank; (n, d) or (n, views, d).
        labels: of shape (n,).

    Raises:
        FitError: embeddings are not finite, or the shapes do not fit.
    """
    fits = embeddings.ndim in (2, 3) and labels.shape == embeddings.shape[:1]
    if not fits or labels.is_floating_point():
        raise FitError(
            f"a contrastive loss got embeddings of shape {tuple(embeddings.shape)} and labels of "
            f"shape {tuple(labels.shape)}, {labels.dtype}",
            allowed="embeddings of shape (n, d) or (n, views, d), labels (n,) in whole numbers",
            do="return both from the step: step=lambda model, batch: (model(batch[0]), batch[1])",
        )
    views = embeddings.shape[1] if embeddings.ndim == 3 else 1
    rows, classes = embeddings.reshape(-1, embeddings.shape[-1]), labels.long()
    classes = classes.to(rows.device).repeat_interleave(views)
    samples, gather = training_pass.samples, torch.is_grad_enabled()
    training_pass.whole_batch = gather
    with torch.autocast(rows.device.type, enabled=False):
        rows = rows.float()
        stand_in = rows[:0] if gather and samples == 0 else rows
        ranks = dist.get_world_size() if gather and dist.is_initialized() else 1
        stand_in = stand_in.view_as(stand_in)  # a tensor of our own: its hook scales no other use
        vectors, labels = _gather(stand_in, classes[: len(stand_in)], ranks)
        if ranks == 1:
            return loss(vectors, labels)
        # fit weights a pass by its share of the rows; DDP alone takes the mean over the ranks. The
        # parameters of the loss have their whole gradient on each rank.
        own = len(stand_in)
        factor = ranks if samples is None else len(vectors) / max(own, 1)
        if stand_in.requires_grad:
            stand_in.register_hook(lambda gradient: gradient * factor)
        # Without rows the loss has no gradient here, but the other ranks wait for DDP's.
        return loss(vectors, labels) + (0 if own else rows.sum() * 0)


def _gather(rows: Tensor, classes: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """The rows and classes of all ranks, by rank; this rank's rows keep their graph."""
    vectors, labels = [rows], [classes]
    if ranks > 1:
        counts = [classes.new_empty(1) for _ in range(ranks)]
        dist.all_gather(counts, classes.new_tensor([len(rows)]))
        sizes = torch.cat(counts).tolist()
        vectors = _all_gather(rows.detach(), sizes)
        labels = _all_gather(classes, sizes)
        vectors[dist.get_rank()] = rows
    bad = torch.stack([(~part.isfinite().all(1)).sum() for part in vectors]).tolist()
    named = [f"{bad[n]} of {len(vectors[n])} rows on rank {n}" for n in range(ranks) if bad[n]]
    if named:
        raise FitError(
            f"embeddings are NaN or infinite: {', '.join(named)}",
            allowed="embeddings that are finite numbers",
            do="look for NaN in the inputs; lower optim.lr; set train.max_grad_norm: 1.0; under "
            "fp16 let the last layer compute in float32",
        )
    return torch.cat(vectors), torch.cat(labels)


def _all_gather(part: Tensor, sizes: list[int]) -> list[Tensor]:
    """The parts of all ranks, which have ``sizes`` rows."""
    padded = part.new_zeros(max(sizes), *part.shape[1:])
    padded[: len(part)] = part
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded)
    return [one[:size] for one, size in zip(received, sizes, strict=True)]


# --- batches ---


class ClassBalanced:
    """A sampler for ``fit``: ``samples_per_class`` samples of one class after another.

    An epoch has rounds. Each visits all classes once, in a new order, and takes samples that the
    class has not given before in the epoch, until fewer than ``samples_per_class`` of them are
    left; then the class starts again in a new order. An epoch has about as many samples as the
    data set. With a ``train.batch_size`` that is a multiple of ``samples_per_class``, each batch
    has whole groups; ``fit`` gives the same batches on any number of ranks, and after a resume.

    A class with fewer samples, but two or more, repeats them within its groups. ``fit`` draws the
    same augmentation for a sample that is repeated in an epoch.

    Args:
        labels: of the training set, int of shape (n,); any values.
        samples_per_class: 2 or more.
        skip_single: leave out classes of one sample, which are refused otherwise.

    The order comes from torch's global generator, which ``fit`` seeds by the run's seed and the
    epoch.

    Raises:
        FitError: ``samples_per_class`` is below 2, a class has one sample, or all of them have.
    """

    def __init__(
        self, labels: Labels, samples_per_class: int, *, skip_single: bool = False
    ) -> None:
        if samples_per_class < 2:
            raise FitError(
                f"samples_per_class is {samples_per_class}",
                allowed="2 or more: a sample needs another one of its class",
                do="set samples_per_class to 4, or train without ClassBalanced",
            )
        given = torch.as_tensor(labels).cpu()
        classes, places, counts = given.unique(return_inverse=True, return_counts=True)
        alone = classes[counts == 1].tolist()
        if alone and (not skip_single or len(alone) == len(classes)):
            named = some_names([*map(str, alone)])
            raise FitError(
                f"{len(alone)} of {len(classes)} classes have one training sample: {named}",
                allowed="classes with two samples or more; with skip_single, at least one of them",
                do="add samples, or leave these classes out: skip_single=True (model.skip_single)",
            )
        members = places.argsort(stable=True).split(counts.tolist())
        self._members = [one for one in members if len(one) > 1]
        self._per_class = samples_per_class
        kept = sum(map(len, self._members))
        self._rounds = max(1, round(kept / (len(self._members) * samples_per_class)))

    def __len__(self) -> int:
        return self._rounds * len(self._members) * self._per_class

    def __iter__(self) -> Iterator[int]:
        groups = torch.stack([self._groups(members) for members in self._members])
        for number in range(self._rounds):
            yield from groups[torch.randperm(len(groups)), number].flatten().tolist()

    def _groups(self, members: Tensor) -> Tensor:
        """A class's samples for each round, of shape (rounds, samples_per_class)."""
        size = self._per_class
        number = max(1, len(members) // size)  # groups in one pass over the class
        passes = [
            members[torch.randperm(len(members))]
            .repeat(-(-size // len(members)))
            .narrow(0, 0, number * size)
            for _ in range(-(-self._rounds // number))
        ]
        return torch.cat(passes).view(-1, size)[: self._rounds]
