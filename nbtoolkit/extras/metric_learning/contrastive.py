"""Make the loss of stage 1 and the order of its samples, over pytorch-metric-learning.

Unlike other modules it imports torch: import it inside functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from nbtoolkit.errors import FitError, some_names
from nbtoolkit.extras.metric_learning.encoders import make_named
from nbtoolkit.training.losses import all_rows

if TYPE_CHECKING:
    from torch import Tensor

    from nbtoolkit.training.losses import RowsLoss


def make_loss(settings: str | Mapping[str, Any]) -> RowsLoss:
    """Return the loss that ``model.loss`` describes, over the rows of all ranks.

    Args:
        settings: the name of a loss of pytorch-metric-learning, the path of another class, or
            ``{name: <either>, <its arguments>}``.

    Raises:
        ConfigError: there is no such loss, or it has no such argument.
        MissingExtra: pytorch-metric-learning is not installed.
    """
    options = {"name": settings} if isinstance(settings, str) else dict(settings)
    name = str(options.get("name"))
    if "." not in name:
        options["name"] = f"pytorch_metric_learning.losses.{name}"
    return all_rows(make_named("model.loss", options))


class ClassBalanced:
    """A sampler for ``fit``: groups of samples of one class, one class after another.

    An epoch has rounds, each with a group of every class in a new order, and about as many samples
    as the data set. A group has different samples, if its class has enough.

    The groups are those of pytorch-metric-learning's ``MPerClassSampler``. That one goes on from
    the order that its last epoch left, so a resumed run would take other samples. Here, each epoch
    has a new one, which draws from NumPy's generator: ``fit`` seeds it by the epoch.

    Args:
        labels: of the training set, int of shape (n,).
        samples_per_class: in a group, 2 or more.
        skip_single: leave out classes of one sample, which are refused otherwise.

    Raises:
        FitError: ``samples_per_class`` is below 2, a class has one sample, or all of them have.
    """

    def __init__(
        self, labels: Tensor, samples_per_class: int, *, skip_single: bool = False
    ) -> None:
        if samples_per_class < 2:
            raise FitError(
                f"samples_per_class is {samples_per_class}",
                allowed="2 or more: a sample needs another one of its class",
                do="set model.samples_per_class: 4",
            )
        classes, counts = labels.unique(return_counts=True)
        single = classes[counts == 1].tolist()
        if single and (not skip_single or len(single) == len(classes)):
            names = some_names([str(label) for label in single])
            raise FitError(
                f"{len(single)} of {len(classes)} classes have one training sample: {names}",
                allowed="classes with two samples or more; with skip_single, at least one of them",
                do="add samples, or leave these classes out: model.skip_single: true",
            )
        self._rows = torch.isin(labels, classes[counts > 1]).nonzero().flatten()
        self._labels = labels[self._rows]
        self._per_class = samples_per_class
        size_of_round = (len(classes) - len(single)) * samples_per_class
        self._size = max(1, round(len(self._rows) / size_of_round)) * size_of_round

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        from pytorch_metric_learning.samplers import MPerClassSampler

        groups = MPerClassSampler(self._labels, self._per_class, length_before_new_iter=self._size)
        return iter(self._rows[list(groups)].tolist())
