"""Split a data set into folds, with scikit-learn or as the user defines them."""

from __future__ import annotations

import numbers
import warnings
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from nbtoolkit.environment.installed import install_line
from nbtoolkit.errors import FoldError, FoldWarning, MissingExtra, some_names
from nbtoolkit.search.folds.folds import FoldKind, Folds, as_column, digest_of, frozen, others

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from sklearn.model_selection import BaseCrossValidator

    from nbtoolkit.search.folds.folds import Column, Indices

    Pair: TypeAlias = tuple[Indices, Indices]

_GROUPED = ("group", "stratified_group")
_STRATIFIED = ("stratified", "stratified_group")
_REPEATABLE = ("stratified", "kfold")
# GroupKFold balances the folds' sizes; shuffled it does not, and before scikit-learn 1.6 cannot be.
_UNSHUFFLED = ("group", "time", "predefined")
# scikit-learn's classes; the repeatable ones have a second class, Repeated...
_SPLITTERS = {
    "stratified": "StratifiedKFold",
    "kfold": "KFold",
    "group": "GroupKFold",
    "stratified_group": "StratifiedGroupKFold",
    "time": "TimeSeriesSplit",
}


def make_folds(
    y: Any,
    *,
    k: int = 5,
    kind: FoldKind | None = None,
    groups: Any = None,
    seed: int = 0,
    repeats: int = 1,
    predefined: Any = None,
) -> Folds:
    """Split a data set into folds; the same arguments always give the same folds.

    Args:
        y: the target of each sample, shape (n,), as a list, array, tensor or Series. Kinds that do
            not stratify use only its length and its hash.
        k: the number of folds, 2 or more. ``"predefined"`` ignores it.
        kind: how to split. None: ``"group"`` if you pass ``groups``, ``"predefined"`` if you pass
            ``predefined``, otherwise ``"stratified"``. ``"stratified"``: each fold has its share of
            every class. ``"kfold"``: at random. ``"group"``: a group is never on both sides of a
            fold, and the folds have about equal sizes. ``"stratified_group"``: stratified, and a
            group is never on both sides. ``"time"``: for samples in time order; each fold trains on
            all samples before its validation samples, so no fold validates on the first part of the
            data.
            ``"predefined"``: your own folds. All kinds but the last are scikit-learn's
            `cross-validation iterators
            <https://scikit-learn.org/stable/modules/cross_validation.html>`_.
        groups: the group of each sample, shape (n,), for ``"group"`` and ``"stratified_group"``.
        seed: the seed of the shuffle; ``"group"`` and ``"time"`` do not shuffle.
        repeats: how many times to split the data set, for ``"stratified"`` and ``"kfold"``. There
            are then ``k * repeats`` folds.
        predefined: your own folds, for ``kind="predefined"``. Either an array of shape (n,) with a
            fold number per sample: the fold with this number validates on the sample (-1: all folds
            train on it). Or a list of pairs (train indices, validation indices), one for each fold.

    Returns:
        The folds, read-only.

    Raises:
        FoldError: the data set cannot be split in this way.
        MissingExtra: scikit-learn is not installed.

    Example:
        >>> folds = make_folds([0, 0, 0, 1, 1, 1], k=3)
        >>> [len(fold.valid_indices) for fold in folds]
        [2, 2, 2]
    """
    targets = as_column(y, "y")
    kind = kind or _obvious_kind(groups, predefined)
    _check_arguments(kind, k, seed, repeats)
    _check_companions(kind, groups, predefined, repeats)
    needed = 1 if kind == "predefined" else k + (kind == "time")
    if len(targets) < needed:
        raise FoldError(
            f"{len(targets)} samples cannot be split into k={k} folds of kind {kind!r}",
            allowed=f"{needed} samples or more",
            do="pass all samples' targets, or a smaller k",
        )
    if kind == "predefined":
        pairs = predefined_pairs(predefined, len(targets))
    else:
        group_of = None
        if groups is not None:
            group_of = as_column(groups, "groups", n_samples=len(targets))
            _check_groups(group_of, k)
        if kind in _STRATIFIED:
            _check_classes(targets, k)
        pairs = _split(_splitter(kind, k, seed, repeats), targets, group_of)
    return Folds(
        kind=kind,
        n_samples=len(targets),
        pairs=frozen(pairs),
        repeats=repeats,
        seed=None if kind in _UNSHUFFLED else seed,
        target=digest_of(targets),
    )


def _splitter(kind: FoldKind, k: int, seed: int, repeats: int) -> BaseCrossValidator:
    """Make scikit-learn's splitter; its results are the folds, unchanged.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    try:
        from sklearn import model_selection
    except ImportError as error:
        raise MissingExtra(
            "folds are made by scikit-learn, which is not installed",
            do=install_line("training"),
        ) from error
    name = ("Repeated" if repeats > 1 else "") + _SPLITTERS[kind]
    options: dict[str, object] = {"n_splits": k}
    if repeats > 1:
        options |= {"n_repeats": repeats, "random_state": seed}
    elif kind not in _UNSHUFFLED:
        options |= {"shuffle": True, "random_state": seed}
    return getattr(model_selection, name)(**options)


def _split(splitter: BaseCrossValidator, targets: Column, groups: Column | None) -> list[Pair]:
    import numpy as np

    with warnings.catch_warnings():  # _check_classes has warned of small classes, with their names
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


def _obvious_kind(groups: object, predefined: object) -> FoldKind:
    if predefined is not None:
        return "predefined"
    return "stratified" if groups is None else "group"


def _check_arguments(kind: FoldKind, k: int, seed: int, repeats: int) -> None:
    if kind not in get_args(FoldKind):
        raise FoldError(
            f"kind is {kind!r}",
            allowed=", ".join(get_args(FoldKind)),
            do="for repeated folds pass repeats=3, for your own kind='predefined'",
        )
    for name, value, least in (("k", k, 2), ("repeats", repeats, 1), ("seed", seed, 0)):
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
            raise FoldError(
                f"{name} is {value!r}",
                allowed=f"a whole number from {least} on",
                do=f"pass {name}={5 if name == 'k' else least}",
            )


def _check_companions(kind: FoldKind, groups: object, predefined: object, repeats: int) -> None:
    """Refuse arguments that do not apply to ``kind``, or that it lacks."""
    if (kind in _GROUPED) != (groups is not None):
        raise FoldError(
            f"kind={kind!r} {'needs groups' if groups is None else 'does not use groups'}",
            allowed="groups= with kind='group' or 'stratified_group', and only with these",
            do="pass kind='stratified_group' with groups=, or another kind without",
        )
    if (kind == "predefined") != (predefined is not None):
        lacks = "needs predefined" if predefined is None else "does not use predefined"
        raise FoldError(
            f"kind={kind!r} {lacks}",
            allowed="predefined= with kind='predefined', and only with it",
            do="make_folds(y, kind='predefined', predefined=fold_of_each_sample)",
        )
    if repeats > 1 and kind not in _REPEATABLE:
        raise FoldError(
            f"kind={kind!r} cannot be repeated: scikit-learn has no repeated version of it",
            allowed=f"repeats= with {' or '.join(map(repr, _REPEATABLE))}",
            do="pass repeats=1, or kind='predefined' with your own pairs",
        )


def _check_groups(groups: Column, k: int) -> None:
    """Refuse groups too few to be in every fold."""
    import numpy as np

    if (count := len(np.unique(groups))) < k:
        raise FoldError(
            f"there are {count} groups for k={k} folds",
            allowed="as many groups as folds, or more: a group is never split",
            do=f"pass k={count}" if count > 1 else "pass the samples' own groups",
        )


def _check_classes(targets: Column, k: int) -> None:
    """Refuse targets that are not classes; warn of classes smaller than k, which folds may lack."""
    import numpy as np

    if targets.dtype.kind == "f" and not np.all(targets == np.round(targets)):
        raise FoldError(
            "y holds numbers that are no classes (fractions or NaN), which cannot be stratified",
            allowed="classes: whole numbers, texts or booleans",
            do="pass kind='kfold', or y binned: np.digitize(y, np.quantile(y, [0.25, 0.5, 0.75]))",
        )
    classes, counts = np.unique(targets, return_counts=True)
    small = [f"{name} ({count})" for name, count in zip(classes, counts, strict=True) if count < k]
    listed = some_names(small)
    if len(small) == len(classes):
        raise FoldError(
            f"every class has fewer samples than k={k} folds: {listed}",
            allowed=f"k up to {max(counts)}, the size of the largest class",
            do="pass a smaller k, or kind='kfold' if y is a number to be predicted",
        )
    if small:
        text = f"classes with fewer samples than k={k} are missing in some folds: {listed}"
        warnings.warn(FoldWarning(text), stacklevel=3)  # the line that calls make_folds


def predefined_pairs(predefined: Any, n_samples: int) -> list[Pair]:
    """Return the user's own folds, checked.

    Args:
        predefined: a fold's number for each sample, shape (n,), or a list of pairs of index lists.
        n_samples: samples of the data set.

    Raises:
        FoldError: these are no folds of the data set.
    """
    import numpy as np

    items = list(predefined.tolist() if hasattr(predefined, "tolist") else predefined)
    if items and all(isinstance(item, (tuple, list)) and len(item) == 2 for item in items):
        return [
            _checked_pair(number, train, valid, n_samples)
            for number, (train, valid) in enumerate(items)
        ]
    fold_of = as_column(items, "predefined", n_samples=n_samples)
    if fold_of.dtype.kind not in "iu" or not (fold_of >= 0).any():
        raise FoldError(
            f"predefined holds {fold_of.dtype} values, or no fold at all",
            allowed="whole numbers: the fold that validates on the sample, -1 for none",
            do="make_folds(y, kind='predefined', predefined=[0, 0, 1, 1, -1])",
        )
    held_out = [np.flatnonzero(fold_of == fold) for fold in np.unique(fold_of[fold_of >= 0])]
    return [
        _checked_pair(number, others(valid, n_samples), valid, n_samples)
        for number, valid in enumerate(held_out)
    ]


def _checked_pair(number: int, train: Any, valid: Any, n_samples: int) -> Pair:
    """One fold's indices, sorted."""
    import numpy as np

    train = np.asarray(train)
    valid = np.asarray(valid)
    problem = _problem_with(train, valid, n_samples)
    if problem:
        raise FoldError(
            f"the predefined fold {number} {problem}",
            allowed=f"whole numbers from 0 to {n_samples - 1}, each once, on one side",
            do="pass pairs (train indices, validation indices), as scikit-learn's split() gives",
        )
    return np.sort(train), np.sort(valid)


def _problem_with(train: NDArray[Any], valid: NDArray[Any], n_samples: int) -> str:
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
