"""Gather the embeddings of a data set on the main rank, and score them by their neighbours."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from nbtoolkit.config.schema import measured
from nbtoolkit.errors import FitError
from nbtoolkit.training.evaluation import evaluation_mode, forward_inputs, make_evaluation_loader
from nbtoolkit.worker.collectives import Rows, broadcast, gather_on_first, in_order

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nbtoolkit.training.loading.data import Batch
    from nbtoolkit.training.step import Forward
    from nbtoolkit.worker.context import RunContext

# Rows of a rank in one forward pass, and in one block: 256 x 512 floats are 0.5 MB, and receiving
# them takes some 50 times as much.
_BATCH, _BLOCK = 256, 256
_PAIRS = 2**22  # similarities that are sorted at a time: some 100 MB with copies


def gather_embeddings(
    ctx: RunContext, model: torch.nn.Module, data: object, *, step: Forward | None = None
) -> tuple[Tensor, Tensor] | None:
    """Embed a data set with the work shared by all ranks, which all call it.

    In evaluation mode, without gradients, in the plan's precision, in batches of four times the
    plan's, at most 256. Rows go to the main rank in blocks of about 256: beside the result, all
    ranks need memory for some blocks.

    Args:
        ctx: the run's context.
        model: equal on all ranks; a ``DistributedDataParallel`` is unwrapped.
        data: as :func:`nbtoolkit.fit` takes it, with labels, without augmentation; the same on all
            ranks. A data set or tensors, no stream.
        step: ``step(model, batch)`` -> (embeddings of shape (n, d), labels of shape (n,)). Default:
            the model's outputs, and the labels of a batch (inputs, labels). Several heads are
            embedded in one pass as columns side by side (``torch.cat``).

    Returns:
        On the main rank embeddings and labels of all samples, on the CPU, in the order of the data;
        None on the others.

    Raises:
        FitError: the data cannot be used or are empty, or the outputs are not tensors with one row
            per sample.
    """
    workers = measured(ctx.config.train.num_workers, "train.num_workers")
    size = min(4 * ctx.plan.batch_size_per_device, _BATCH)
    loader = make_evaluation_loader(ctx, data, batch_size=size, workers=workers, name="prediction")
    if loader.samples is None:
        raise FitError(
            "gather_embeddings got a stream, whose length is unknown",
            allowed="a data set with a length, or tensors",
            do="pass list(stream), or a data set that is read by index",
        )
    batches, done, forward = iter(loader), 0, step or _embed
    result: list[Tensor] = []
    with evaluation_mode(ctx, model) as module:
        while True:
            rows, some = Rows(), False
            for batch, samples in islice(batches, max(1, _BLOCK // size)):
                rows.add(forward(module, batch), samples)
                some = True
            if not broadcast(some, ctx.world_size):  # rank 0 has a batch if any rank has
                return (result[0], result[1]) if ctx.is_main else None
            parts = gather_on_first(rows.part(), ctx.world_size)
            if parts is None:
                continue
            columns = in_order(parts)
            if not result:
                # Pages of the result are allocated as they are written.
                result = [one.new_empty(loader.samples, *one.shape[1:]) for one in columns]
            for whole, block in zip(result, columns, strict=True):
                whole[done : done + len(block)] = block
            done += len(columns[0])


def _embed(model: torch.nn.Module, batch: Batch) -> tuple[Batch, Batch]:
    """The default step of :func:`gather_embeddings`."""
    return forward_inputs(model, batch)[0], batch[1]


def retrieval_scores(embeddings: Tensor, labels: Tensor, *, k: int = 5) -> dict[str, float]:
    """Look for each embedding among all others, by cosine similarity, and score what is found.

    Memory is bounded: blocks of embeddings are compared with all. For speed on a GPU pass tensors
    there.

    Args:
        embeddings: float of shape (n, d).
        labels: their classes, int of shape (n,); any values.
        k: neighbours that vote for a class in ``knn``, each with one vote. Of classes with equal
            votes that of the nearest neighbour wins.

    Returns:
        Means over the embeddings whose class has another one: ``precision_at_1`` (the nearest one
        has the same class), ``knn`` (the vote is right) and ``map`` (mean average precision of all
        others in order of similarity, as scikit-learn's ``average_precision_score``). Of equally
        near ones any may count as the nearest.

    Raises:
        FitError: embeddings are not finite, ``k`` is too large, or no class has two embeddings.
    """
    import torch

    bad = int((~embeddings[:, None].isfinite().flatten(1).all(1)).sum())
    repeated = len(labels.unique()) < len(labels)
    faults = {
        f"{bad} of {len(embeddings)} embeddings are NaN or infinite": bad,
        f"the embeddings have the shape {tuple(embeddings.shape)}": embeddings.ndim != 2,
        f"k is {k}, and there are {len(embeddings)} embeddings": not 1 <= k < len(embeddings),
        f"each of {len(labels)} embeddings is the only one of its class": not repeated,
    }
    for fault in filter(faults.get, faults):
        raise FitError(
            f"retrieval_scores: {fault}",
            allowed="finite numbers of shape (n, d), two or more of a class, and k from 1 to n - 1",
            do="look for NaN in the inputs; flatten outputs (outputs.flatten(1)); add samples",
        )
    unit = torch.nn.functional.normalize(embeddings.float(), dim=1)
    places = torch.arange(k, device=unit.device)
    sums, counted = torch.zeros(3, dtype=torch.float64), 0
    block = max(1, _PAIRS // len(unit))
    for start in range(0, len(unit), block):
        scores = unit[start : start + block] @ unit.T
        same = labels == labels[start : start + block, None]
        scores.diagonal(start).fill_(-torch.inf)
        same.diagonal(start).fill_(False)
        nearest = scores.topk(k, dim=1).indices
        near = labels[nearest]
        votes = (near[:, :, None] == near[:, None, :]).sum(2)
        winner = (votes * k - places).argmax(1, keepdim=True)  # no two are equal
        hits = same.gather(1, nearest)
        right = torch.stack([hits[:, 0], hits.gather(1, winner)[:, 0]])[:, same.any(1)]
        precisions = _average_precisions(scores, same)
        sums += sums.new_tensor([*right.sum(1).tolist(), sum(precisions)])
        counted += len(precisions)
    names = ("precision_at_1", "knn", "map")
    return dict(zip(names, (sums / counted).tolist(), strict=True))


def _average_precisions(scores: Tensor, same: Tensor) -> list[float]:
    """Of each row with a relevant score; ``same`` marks these. As scikit-learn's, also for ties."""
    import numpy as np

    counts = same.sum(1).tolist()
    relevant = scores[same].cpu().split(counts)
    ordered = np.sort(scores.cpu().numpy(), axis=1)  # 24 times as fast as torch's on a CPU
    found = []
    for row, own in zip(ordered, relevant, strict=True):
        if len(own):
            best = np.sort(own.numpy())
            of_class = len(best) - np.searchsorted(best, best)  # scores at least as high
            of_all = len(row) - np.searchsorted(row, best)
            found.append(float((of_class / of_all).mean()))
    return found
