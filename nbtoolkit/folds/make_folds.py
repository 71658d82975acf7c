"""Split a data set into folds with scikit-learn, or as the user says."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from nbtoolkit.errors import FoldError, FoldWarning, MissingExtra
from nbtoolkit.folds.folds import FoldKind, Folds, frozen, others
from nbtoolkit.folds.leakage import as_column, digest_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


# --- predefined ---
# Folds as the user says: a fold's number for each sample, or pairs of index lists.


def predefined_pairs(given: Any, n_samples: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Folds as the user says: a fold's number for each sample, or pairs of index lists."""
    import numpy as np

    given = list(given.tolist() if hasattr(given, "tolist") else given)
    if given and all(isinstance(one, (tuple, list)) and len(one) == 2 for one in given):
        return [_pair(number, pair, n_samples) for number, pair in enumerate(given)]
    number_of = as_column(given, "predefined", n_samples=n_samples)
    if number_of.dtype.kind not in "iu" or not (number_of >= 0).any():
        raise FoldError(
            f"predefined holds {number_of.dtype} values, or no fold at all",
            allowed="whole numbers: the fold that validates on the sample, -1 for none",
            do="make_folds(y, kind='predefined', predefined=[0, 0, 1, 1, -1])",
        )
    numbers = np.unique(number_of[number_of >= 0])
    held_out = [np.flatnonzero(number_of == number) for number in numbers]
    return [
        _pair(i, (others(valid, n_samples), valid), n_samples) for i, valid in enumerate(held_out)
    ]


def _pair(number: int, pair: Any, n_samples: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """One fold's indices, checked."""
    import numpy as np

    train, valid = (np.asarray(part) for part in pair)
    wrong = _wrong_with(train, valid, n_samples)
    if wrong:
        raise FoldError(
            f"the predefined fold {number} {wrong}",
            allowed=f"whole numbers from 0 to {n_samples - 1}, each once, on one side",
            do="pass pairs (train indices, validation indices), as scikit-learn's split() gives",
        )
    return np.sort(train), np.sort(valid)


def _wrong_with(train: NDArray[Any], valid: NDArray[Any], n_samples: int) -> str:
    import numpy as np

    if train.ndim != 1 or valid.ndim != 1:
        return "is no pair of index lists"
    if not train.size or not valid.size:
        return f"has {train.size} samples to train on and {valid.size} to validate on"
    both = np.concatenate([train, valid])
    if both.dtype.kind not in "iu" or both.min() < 0 or both.max() >= n_samples:
        return f"holds what is no index of {n_samples} samples"
    if len(np.unique(train)) < train.size or len(np.unique(valid)) < valid.size:
        return "holds a sample twice"
    shared = np.intersect1d(train, valid).size
    return f"validates on {shared} samples that it trains on" if shared else ""


# --- make folds ---


_GROUPED = ("group", "stratified_group")
_STRATIFIED = ("stratified", "stratified_group")
_REPEATABLE = ("stratified", "kfold")
_UNSHUFFLED = ("group", "time", "predefined")


def make_folds(
    y: Any,
    *,
    k: int = 5,
    kind: FoldKind = "stratified",
    groups: Any = None,
    seed: int = 0,
    repeats: int = 1,
    predefined: Any = None,
) -> Folds:
    """Split a data set into folds, always the same for the same arguments.

    Args:
        y: a target for each sample, shape (n,): a list, array, tensor or Series. Kinds that do not
            stratify use its length and remember its hash.
        k: folds; 2 or more. ``"predefined"`` counts them itself.
        kind: ``"stratified"`` (each fold has its share of every class), ``"kfold"`` (shuffled),
            ``"group"`` (a group is never on both sides, folds of about equal size),
            ``"stratified_group"`` (both), ``"time"`` (samples in time order; each fold trains on
            all before those it validates on, so the first part of the data is never validated on),
            ``"predefined"``. See scikit-learn's `cross-validation iterators
            <https://scikit-learn.org/stable/modules/cross_validation.html>`_.
        groups: a group for each sample, shape (n,), for the group kinds.
        seed: of the shuffle; ``"group"`` and ``"time"`` do not shuffle.
        repeats: split so many times anew, for ``"stratified"`` and ``"kfold"``: ``k * repeats``
            folds.
        predefined: with that kind: for each sample the number of the fold that validates on it
            (-1: none, it is always trained on), or a pair (train, valid) of index lists a fold.

    Returns:
        The folds, frozen; ``len(folds)`` of them.

    Raises:
        FoldError: the data set cannot be split like that.
        MissingExtra: scikit-learn is not installed.

    Example:
        >>> folds = make_folds([0, 0, 0, 1, 1, 1], k=3)
        >>> [len(fold.valid_indices) for fold in folds]
        [2, 2, 2]
    """
    wish = _FoldRequest(kind=kind, k=k, seed=seed, repeats=repeats)
    targets = as_column(y, "y")
    wish.check(len(targets), groups, predefined)
    if kind == "predefined":
        pairs = predefined_pairs(predefined, len(targets))
    else:
        teams = None if groups is None else as_column(groups, "groups", n_samples=len(targets))
        wish.check_columns(targets, teams)
        pairs = _split(wish, targets, teams)
    return Folds(
        kind=kind,
        n_samples=len(targets),
        pairs=frozen(pairs),
        repeats=repeats,
        seed=None if kind in _UNSHUFFLED else seed,
        target=digest_of(targets),
    )


# --- what is refused ---


@dataclass(frozen=True, kw_only=True)
class _FoldRequest:
    """How to split, checked before anything is."""

    kind: FoldKind
    k: int
    seed: int
    repeats: int

    def check(self, n_samples: int, groups: Any, predefined: Any) -> None:
        """Refuse what does not go together.

        Raises:
            FoldError: as it says.
        """
        if self.kind not in get_args(FoldKind):
            raise FoldError(
                f"kind is {self.kind!r}",
                allowed=", ".join(get_args(FoldKind)),
                do="for repeated folds pass repeats=3, for your own kind='predefined'",
            )
        for name, least in (("k", 2), ("repeats", 1), ("seed", 0)):
            _check_whole(name, getattr(self, name), least)
        self._check_companions(groups, predefined)
        needed = 1 if self.kind == "predefined" else self.k + (self.kind == "time")
        if n_samples < needed:
            raise FoldError(
                f"{n_samples} samples cannot be split into k={self.k} folds of kind {self.kind!r}",
                allowed=f"{needed} samples or more",
                do="pass all samples' targets, or a smaller k",
            )

    def _check_companions(self, groups: Any, predefined: Any) -> None:
        if (self.kind in _GROUPED) != (groups is not None):
            lacks = "needs groups" if groups is None else "makes no use of groups"
            raise FoldError(
                f"kind={self.kind!r} {lacks}",
                allowed="groups= together with kind='group' or 'stratified_group', and only there",
                do="pass kind='stratified_group' with groups=, or another kind without",
            )
        if (self.kind == "predefined") != (predefined is not None):
            raise FoldError(
                f"kind={self.kind!r} with predefined="
                f"{'None' if predefined is None else '...'} cannot be meant",
                allowed="predefined= together with kind='predefined', and only there",
                do="make_folds(y, kind='predefined', predefined=fold_of_each_sample)",
            )
        if self.repeats > 1 and self.kind not in _REPEATABLE:
            raise FoldError(
                f"kind={self.kind!r} cannot be repeated: it splits in one way only, or as it "
                "happens",
                allowed=f"repeats= with {' or '.join(map(repr, _REPEATABLE))}",
                do="pass repeats=1, or kind='predefined' with pairs of your own",
            )

    def check_columns(self, targets: NDArray[Any], groups: NDArray[Any] | None) -> None:
        """Refuse targets or groups too few to be in every fold; warn of small classes.

        Raises:
            FoldError: as it says.
        """
        import numpy as np

        if groups is not None and (count := len(np.unique(groups))) < self.k:
            raise FoldError(
                f"there are {count} groups for k={self.k} folds",
                allowed="as many groups as folds, or more: a group is never split",
                do=f"pass k={count}" if count > 1 else "pass the samples' own groups",
            )
        if self.kind in _STRATIFIED:
            _check_classes(targets, self.k)


def _check_whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise FoldError(
            f"{name} is {value!r}",
            allowed=f"a whole number from {least} on",
            do=f"pass {name}={max(least, 5 if name == 'k' else least)}",
        )


def _check_classes(targets: NDArray[Any], k: int) -> None:
    """Classes must be classes; those smaller than k are told, since some folds lack them."""
    import numpy as np

    if targets.dtype.kind == "f" and not np.all(targets == np.round(targets)):
        raise FoldError(
            "y holds numbers that are no classes (fractions or NaN), which cannot be stratified",
            allowed="classes: whole numbers, texts or booleans",
            do="pass kind='kfold', or y binned: np.digitize(y, np.quantile(y, [0.25, 0.5, 0.75]))",
        )
    classes, counts = np.unique(targets, return_counts=True)
    small = [f"{name} ({count})" for name, count in zip(classes, counts, strict=True) if count < k]
    if len(small) == len(classes):
        raise FoldError(
            f"every class has fewer samples than k={k} folds: {_some(small)}",
            allowed=f"k up to {max(counts)}, the size of the largest class",
            do="pass a smaller k, or kind='kfold' if y is a number to be predicted",
        )
    if small:
        text = f"classes with fewer samples than k={k} are missing in some folds: {_some(small)}"
        warnings.warn(FoldWarning(text), stacklevel=4)  # the line that calls make_folds


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


# --- the split itself ---


def _split(
    wish: _FoldRequest, targets: NDArray[Any], groups: NDArray[Any] | None
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    import numpy as np

    splitter = _splitter(wish)
    with warnings.catch_warnings():  # small classes were told, with their names
        warnings.filterwarnings("ignore", message="The least populated class", category=UserWarning)
        pairs = list(splitter.split(np.zeros(len(targets)), targets, groups))
    for number, (train, valid) in enumerate(pairs):
        if not len(train) or not len(valid):
            raise FoldError(
                f"fold {number} would have {len(train)} samples to train on and {len(valid)} to "
                "validate on: the groups are too few or too unequal",
                allowed="folds that are not empty",
                do="pass a smaller k, or kind='group'",
            )
    return pairs


def _splitter(wish: _FoldRequest) -> Any:
    """scikit-learn's splitter; its results are the folds, unchanged.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    try:
        from sklearn import model_selection as of
    except ImportError as error:
        raise MissingExtra(
            "folds are made by scikit-learn, which is not installed",
            do="pip install 'nbtoolkit-torch[training]'",
        ) from error
    k, seed, repeated = wish.k, wish.seed, wish.repeats > 1
    again = {"n_splits": k, "n_repeats": wish.repeats, "random_state": seed}
    shuffled = {"n_splits": k, "shuffle": True, "random_state": seed}
    makers = {
        "stratified": lambda: (
            of.RepeatedStratifiedKFold(**again) if repeated else of.StratifiedKFold(**shuffled)
        ),
        "kfold": lambda: of.RepeatedKFold(**again) if repeated else of.KFold(**shuffled),
        # not shuffled: it balances the folds' sizes, and scikit-learn before 1.6 cannot
        "group": lambda: of.GroupKFold(k),
        "stratified_group": lambda: of.StratifiedGroupKFold(**shuffled),
        "time": lambda: of.TimeSeriesSplit(k),
    }
    return makers[wish.kind]()
