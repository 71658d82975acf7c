"""Gather the embeddings of a data set on the main rank, and score them by their neighbours.

Unlike other modules of this folder it imports torch: import it inside functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from nbtoolkit.errors import FitError
from nbtoolkit.training.evaluation import predict

if TYPE_CHECKING:
    from nbtoolkit.training.step import Forward
    from nbtoolkit.worker.context import RunContext

# Rows of all ranks that are gathered at a time: of 512 floats 1 MB; ranks need 20 times that.
_BLOCK = 512
_PAIRS = 2**22  # similarities that are sorted at a time: some 100 MB with copies


def gather_embeddings(
    ctx: RunContext, model: torch.nn.Module, data: Any, *, step: Forward | None = None
) -> tuple[Tensor, Tensor] | None:
    """Embed a data set with the work shared by all ranks, which all call it.

    As :func:`nbtoolkit.predict`, block by block: beside the result, all ranks need memory for some
    blocks of 512 rows.

    Args:
        ctx: the run's context.
        model: equal on all ranks; a ``DistributedDataParallel`` is unwrapped.
        data: a data set with a length that is read by index; without augmentation; the same on
            all ranks.
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

    def both(model: torch.nn.Module, batch: Any) -> tuple[Any, None]:
        return (step(model, batch) if step else (model(batch[0]), batch[1])), None

    size, result = len(data), list[Tensor]()
    for start in range(0, max(1, size), _BLOCK):
        block = Subset(data, range(start, min(start + _BLOCK, size)))
        columns = predict(ctx, model, block, step=both)
        if ctx.is_main:
            # Pages of the result are allocated as they are written.
            result = result or [one.new_empty(size, *one.shape[1:]) for one in columns]
            for whole, part in zip(result, columns, strict=True):
                whole[start : start + len(part)] = part
    return (result[0], result[1]) if ctx.is_main else None


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
