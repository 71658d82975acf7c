"""Names that were meant: whether one is another, misspelt."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_ALIKE = 0.9  # val_acuracy and val_accuracy: 0.96; val_mae and val_mse: 0.86
_PREFIXES = ("val", "valid", "validation", "train", "test")


def meant(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` is likely meant to be; None: it is one of them, or like none.

    A slip (``val_acuracy``), a name cut short (``val_acc``), another or no prefix (``accuracy`` for
    ``val_accuracy``), other signs between the words. Names that differ in numbers are different.

    Args:
        name: what somebody wrote.
        known: what there is.
    """
    there = list(known)
    if name in there:
        return None
    wanted = _plain(name)
    for one in there:
        other = _plain(one)
        if len(wanted) >= 3 and (other.startswith(wanted) or _bare(wanted) == _bare(other)):
            return one
    close = [one for one in there if _slip(wanted, _plain(one))]
    return close[0] if close else None


def _slip(wanted: str, other: str) -> bool:
    if re.sub(r"[0-9]", "", wanted) == re.sub(r"[0-9]", "", other):
        return False
    swapped = sorted(wanted) == sorted(other) and wanted[:1] == other[:1] and len(wanted) > 3
    return swapped or difflib.SequenceMatcher(None, wanted, other).ratio() >= _ALIKE


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _bare(name: str) -> str:
    first, _, rest = name.partition("_")
    return rest if first in _PREFIXES and rest else name
