"""Score the embeddings of a data set by their neighbours.

Unlike other modules it imports torch: import it inside functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from nbtoolkit.errors import FitError
from nbtoolkit.training.callbacks import Callback, FitState
from nbtoolkit.training.evaluation import predict

if TYPE_CHECKING:
    from nbtoolkit.extras.metric_learning.images import Images
    from nbtoolkit.training.step import Forward
    from nbtoolkit.worker.context import RunContext

# Rows of all ranks that are gathered at a time: of 512 floats 1 MB; ranks need 20 times that.
_BLOCK = 512
# Similarities that are sorted at a time: some 100 MB with copies.
_PAIRS = 2**22
_VOTERS = 5


class RetrievalScores(Callback):
    """Add retrieval scores to each epoch of stage 1, of the embeddings and of the projections.

    Both are scores of the same images, embedded once per epoch without augmentation. Their classes
    may be new to the encoder: each image is looked for among the other validation images.

    Args:
        valid: the validation images.
    """

    def __init__(self, valid: Images) -> None:
        self._valid = valid

    def on_validation_end(self, state: FitState) -> dict[str, float]:
        """Embed on all ranks, score on the main one, whose values count."""
        width = int(state.ctx.config.model.get("embedding_size", 128))

        def step(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
            encoder, head = model
            embeddings = encoder(batch[0])
            return torch.cat([embeddings, head(embeddings)], dim=1), batch[1]

        gathered = gather_embeddings(state.ctx, state.model, self._valid, step=step)
        if gathered is None:
            return {}
        vectors, labels = gathered
        parts = {"val": vectors[:, :width], "val_projected": vectors[:, width:]}
        return {
            f"{part}_{name}": value
            for part, columns in parts.items()
            for name, value in retrieval_scores(columns, labels).items()
        }


def gather_embeddings(
    ctx: RunContext, model: torch.nn.Module, data: Any, *, step: Forward
) -> tuple[Tensor, Tensor] | None:
    """Embed a data set with the work shared by all ranks, which all call it.

    It is done block by block: beside the result, all ranks need memory for some blocks of 512 rows.

    Args:
        ctx: the run's context.
        model: equal on all ranks.
        data: a data set with a length, read by index, without augmentation; equal on all ranks.
        step: ``step(model, batch)`` -> (embeddings of shape (n, d), labels of shape (n,)). Several
            heads are embedded in one pass as columns side by side (``torch.cat``).

    Returns:
        On the main rank embeddings and labels of all samples, on the CPU, in the order of the data;
        None on the others.

    Raises:
        FitError: the data cannot be used or are empty, or the outputs are not tensors with one row
            per sample.
    """

    def both(model: torch.nn.Module, batch: Any) -> tuple[Any, None]:
        return step(model, batch), None

    size = len(data)
    result = list[Tensor]()
    for start in range(0, max(1, size), _BLOCK):
        block = Subset(data, range(start, min(start + _BLOCK, size)))
        columns = predict(ctx, model, block, step=both)
        if ctx.is_main:
            # Pages of the result are allocated as they are written.
            result = result or [part.new_empty(size, *part.shape[1:]) for part in columns]
            for whole, part in zip(result, columns, strict=True):
                whole[start : start + len(part)] = part
    return (result[0], result[1]) if ctx.is_main else None


def retrieval_scores(embeddings: Tensor, labels: Tensor) -> dict[str, float]:
    """Look for each embedding among all others, by cosine similarity, and score the results.

    Memory is bounded: blocks of embeddings are compared with all. The calculator of
    pytorch-metric-learning takes eight times as long for 10,000 embeddings, and has no vote.

    Args:
        embeddings: float of shape (n, d).
        labels: their classes, int of shape (n,); any values.

    Returns:
        Means over the embeddings whose class has another one: ``precision_at_1`` (the nearest one
        has the same class), ``knn`` (the vote of the five nearest is right; of classes with equal
        votes that of the nearest one wins) and ``map`` (mean average precision of all others in
        order of similarity, as scikit-learn's ``average_precision_score``). Of equally near ones
        any may count as the nearest.

    Raises:
        FitError: embeddings are not finite, or no class has two.
    """
    bad = int((~embeddings.isfinite().all(1)).sum())
    if bad or len(labels.unique()) == len(labels):
        fault = f"{bad} of {len(labels)} embeddings are NaN or infinite"
        raise FitError(
            fault if bad else f"each of {len(labels)} embeddings is the only one of its class",
            allowed="embeddings that are finite numbers, two or more of a class",
            do="look for NaN in the inputs; lower optim.lr; add validation images",
        )
    unit = torch.nn.functional.normalize(embeddings.float(), dim=1)
    voters = min(_VOTERS, len(unit) - 1)
    sums = torch.zeros(3, dtype=torch.float64)
    counted = 0
    block = max(1, _PAIRS // len(unit))
    for start in range(0, len(unit), block):
        scores = unit[start : start + block] @ unit.T
        same = labels == labels[start : start + block, None]
        scores.diagonal(start).fill_(-torch.inf)
        same.diagonal(start).fill_(False)
        nearest = scores.topk(voters, dim=1).indices
        near = labels[nearest]
        votes = (near[:, :, None] == near[:, None, :]).sum(2)
        # Of equal values, argmax returns the first one.
        winner = votes.argmax(1, keepdim=True)
        hits = same.gather(1, nearest)
        right = torch.stack([hits[:, 0], hits.gather(1, winner)[:, 0]])[:, same.any(1)]
        precisions = _average_precisions(scores, same)
        sums += sums.new_tensor([*right.sum(1).tolist(), sum(precisions)])
        counted += len(precisions)
    names = ("precision_at_1", "knn", "map")
    return dict(zip(names, (sums / counted).tolist(), strict=True))


def _average_precisions(scores: Tensor, same: Tensor) -> list[float]:
    """Return that of each row with a relevant score, which ``same`` marks."""
    relevant = scores[same].cpu().split(same.sum(1).tolist())
    # NumPy's sort is 24 times as fast as torch's on a CPU.
    ordered = np.sort(scores.cpu().numpy(), axis=1)
    precisions = []
    for row, of_row in zip(ordered, relevant, strict=True):
        if len(of_row):
            best = np.sort(of_row.numpy())
            of_class = len(best) - np.searchsorted(best, best)  # scores at least as high
            of_all = len(row) - np.searchsorted(row, best)
            precisions.append(float((of_class / of_all).mean()))
    return precisions
