"""Suggest the name that a misspelt name most likely stands for, or the new name of an old one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_ALIKE = 0.9  # val_acuracy and val_accuracy: 0.96; val_mae and val_mse: 0.86
_PREFIXES = ("val", "valid", "validation", "train", "test")

RENAMED = {
    "nb.Leave": "nb.RunStopped",
    "nb.over_all": "nb.epoch_metric",
    "ctx.check": "ctx.raise_if_stopped",
    "ctx.leaving": "ctx.should_stop",
    "ctx.long": "ctx.pause_hang_detection",
    "ctx.news": "ctx.stop_requested",
    "ctx.note": "ctx.message",
    "budget.keep_back": "budget.reserve_for_refit",
    "optim.floor": "optim.min_lr_ratio",
    "optim.warmup": "optim.warmup_ratio",
    "repeat_top": "reevaluate_top",
    "runtime.reserve": "runtime.shutdown_margin",
    "study.value": "study.trial_value",
    "tracking.samples": "tracking.record_samples",
    "train.accumulate": "train.gradient_accumulation_steps",
    "train.average": "train.weight_averaging",
    "train.clip_norm": "train.max_grad_norm",
    "train.patience": "train.early_stopping_patience",
    "train.workers": "train.num_workers",
}
"""Public names and settings of version 0.1 that version 0.2 refuses, and their names now."""


def refuse_old_name(name: str) -> None:
    """Raise an AttributeError that gives the new name, where ``name`` is one of version 0.1."""
    if name in RENAMED:
        raise AttributeError(new_name(name))


def new_name(old: str) -> str:
    """The sentence that gives the new name of a name or setting of version 0.1."""
    return f"{old} is called {RENAMED[old]} since version 0.2"


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
