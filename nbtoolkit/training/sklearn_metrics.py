"""Compute the metrics that have a name, by scikit-learn from all samples."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

from nbtoolkit.environment.installed import install_line
from nbtoolkit.errors import FitError, MissingExtra
from nbtoolkit.training.losses import ignore_index, is_loss

if TYPE_CHECKING:
    from torch import Tensor

Score: TypeAlias = "Callable[[Tensor, Tensor], float]"
"""(scores or predictions, targets) of all samples -> the metric."""

# Losses of torch with which an output approaches its target, 0 or 1. The others take logits.
PREDICT_TARGETS = ("binary_cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


@dataclass(frozen=True)
class NamedMetric:
    """A metric of all samples, by its name.

    Attributes:
        name: one of :func:`metric_names`.
        score: computes it.
        takes: what ``score`` takes: ``numbers`` (outputs as they are), ``classes`` (the predicted
            classes) or ``scores`` (a probability or score of each class).
    """

    name: str
    score: Score
    takes: str

    def __call__(self, outputs: Tensor, targets: Tensor, loss: object = None) -> float:
        """Return the metric; ``loss`` is the training's, which says how outputs are to be read.

        Raises:
            FitError: outputs and targets do not fit the metric.
        """
        if self.takes == "numbers":
            return self.score(*_numbers(self.name, outputs, targets))
        scores, labels, threshold = _scores(self.name, outputs, targets, loss)
        if self.takes == "scores":
            return self.score(scores, labels)
        single = scores.shape == labels.shape
        if single and bool((labels > 1).any()):  # grades: the model predicts their number
            low = labels.min()
            high = labels.max()
            return self.score(scores.round().clamp(low, high).long(), labels)
        return self.score((scores > threshold).long() if single else scores.argmax(1), labels)


def metric_names() -> list[str]:
    """Return the names, for people: ``map@k`` stands for every k."""
    return ["accuracy", *_NUMBERS, *_CLASSES, *_SCORES, "map@k"]


def named_metric(name: str) -> NamedMetric | None:
    """Return the metric of a name; None: there is none of this name.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    match = re.fullmatch(r"map@([1-9]\d*)", name)
    if match:
        return NamedMetric(name, partial(_map_at, int(match[1])), "scores")
    for takes, scores in (("numbers", _NUMBERS), ("classes", _CLASSES), ("scores", _SCORES)):
        if name in scores:
            if find_spec("sklearn") is None:
                raise MissingExtra(
                    f"the metric {name!r} is computed by scikit-learn, which is not installed",
                    do=install_line("training"),
                )
            return NamedMetric(name, scores[name], takes)
    return None


def _numbers(name: str, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if outputs.ndim == targets.ndim + 1 and outputs.shape[-1] == 1:
        outputs = outputs[..., 0]
    elif targets.ndim == outputs.ndim + 1 and targets.shape[-1] == 1:
        targets = targets[..., 0]
    if outputs.shape != targets.shape:
        raise _unfit(name, "outputs and targets of the same shape", outputs, targets)
    return outputs.reshape(len(outputs), -1), targets.reshape(len(targets), -1)


def _scores(
    name: str, outputs: Tensor, targets: Tensor, loss: object
) -> tuple[Tensor, Tensor, float]:
    """Scores, labels, and the score above which a single one means class 1.

    Returns:
        Scores (n, classes) with labels (n,); or scores and labels 0 and 1 of one shape, (n,) or
        (n, labels).
    """
    if outputs.ndim == targets.ndim + 1 and outputs.shape[1] == 1:
        outputs = outputs[:, 0]
    elif outputs.ndim == targets.ndim > 1 and outputs.shape[1] >= targets.shape[1] == 1:
        outputs = outputs.squeeze(1)
        targets = targets[:, 0]
    if outputs.shape == targets.shape:
        if outputs.ndim == 2 and is_loss(loss, "cross_entropy") and targets.is_floating_point():
            return outputs, targets.argmax(1), 0.0
        threshold = 0.5 if any(is_loss(loss, loss_name) for loss_name in PREDICT_TARGETS) else 0.0
        if outputs.ndim > 2 or (outputs.ndim == 2 and bool((targets < 0).any())):
            outputs = outputs.flatten()
            targets = targets.flatten()
        counted = targets >= 0 if targets.ndim == 1 else slice(None)
        return outputs[counted], targets[counted].long(), threshold
    if outputs.ndim < 2 or (outputs.shape[0], *outputs.shape[2:]) != targets.shape:
        raise _unfit(name, "scores (n, classes, ...) with classes (n, ...)", outputs, targets)
    scores = outputs.movedim(1, -1).reshape(-1, outputs.shape[1])
    labels = targets.reshape(-1)
    ignored = ignore_index(loss)
    counted = (labels >= 0) if ignored is None else (labels >= 0) & (labels != ignored)
    return scores[counted], labels[counted].long(), 0.0


def _probabilities(scores: Tensor) -> Tensor:
    """Probabilities of classes, of logits or of probabilities: their order over the samples."""
    import torch

    is_distribution = bool((scores >= 0).all()) and torch.allclose(
        scores.sum(1), torch.ones(len(scores)), atol=1e-3
    )
    return scores if is_distribution else scores.softmax(1)


def _unfit(name: str, allowed: str, outputs: Tensor, targets: Tensor) -> FitError:
    return FitError(
        f"the metric {name!r} cannot be computed of outputs of shape {tuple(outputs.shape)} and "
        f"targets of shape {tuple(targets.shape)}",
        allowed=allowed,
        do="let the model or the step return them so, or pass a function of your own: "
        "metrics={'mine': nb.epoch_metric(lambda outputs, targets: ...)}",
    )


def _sklearn(function: str, predictions: Tensor, targets: Tensor, **options: Any) -> float:
    from sklearn import metrics

    return float(getattr(metrics, function)(targets.numpy(), predictions.numpy(), **options))


def _of_each_class(function: str, scores: Tensor, labels: Tensor) -> float:
    """Return the mean over the classes that occur, each against the others; NaN of a single one."""
    import torch

    if scores.shape == labels.shape:
        pairs = (
            [(scores, labels)] if scores.ndim == 1 else list(zip(scores.T, labels.T, strict=True))
        )
    else:
        probabilities = _probabilities(scores)
        classes = [1] if scores.shape[1] == 2 else range(scores.shape[1])
        pairs = [
            (probabilities[:, class_index], (labels == class_index).long())
            for class_index in classes
        ]
    values = [
        _sklearn(function, score, label) for score, label in pairs if len(torch.unique(label)) == 2
    ]
    return sum(values) / len(values) if values else math.nan


def _map_at(k: int, scores: Tensor, labels: Tensor) -> float:
    """Return the mean average precision of the ``k`` classes with the highest scores."""
    import torch

    if scores.shape == labels.shape:
        relevant = labels.reshape(len(labels), -1).bool()
        scores = scores.reshape(len(scores), -1)
    else:
        relevant = torch.nn.functional.one_hot(labels, scores.shape[1]).bool()
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    hits = relevant.gather(1, order).double()
    precisions = hits.cumsum(1) / torch.arange(1, hits.shape[1] + 1)
    possible = relevant.sum(1).clamp(max=k)
    known = possible > 0
    return float(((precisions * hits).sum(1)[known] / possible[known]).mean())


def _f1(average: str) -> Score:
    return partial(_sklearn, "f1_score", average=average, zero_division=0.0)


_NUMBERS: dict[str, Score] = {
    "rmse": partial(_sklearn, "root_mean_squared_error"),
    "mse": partial(_sklearn, "mean_squared_error"),
    "mae": partial(_sklearn, "mean_absolute_error"),
    "r2": partial(_sklearn, "r2_score"),
    "rmsle": partial(_sklearn, "root_mean_squared_log_error"),
}
_CLASSES: dict[str, Score] = {
    "f1": _f1("binary"),
    "f1_macro": _f1("macro"),
    "f1_micro": _f1("micro"),
    "f1_weighted": _f1("weighted"),
    "balanced_accuracy": partial(_sklearn, "balanced_accuracy_score"),
    "mcc": partial(_sklearn, "matthews_corrcoef"),
    "qwk": partial(_sklearn, "cohen_kappa_score", weights="quadratic"),
}
_SCORES: dict[str, Score] = {
    "roc_auc": partial(_of_each_class, "roc_auc_score"),
    "average_precision": partial(_of_each_class, "average_precision_score"),
}
