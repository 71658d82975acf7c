"""Splits: of a data set at random, other ones at every run."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nbtoolkit.lint.hazard import Hazard, hazard
from nbtoolkit.lint.program import Program

# Shuffled when asked to, and always: https://scikit-learn.org/stable/api/sklearn.model_selection
_ON_REQUEST = {"KFold", "StratifiedKFold", "StratifiedGroupKFold"}
_ALWAYS = {
    "train_test_split",
    "ShuffleSplit",
    "StratifiedShuffleSplit",
    "GroupShuffleSplit",
    "RepeatedKFold",
    "RepeatedStratifiedKFold",
}

# What makes a split repeat itself though it has no seed of its own.
_SEEDS = {"random_state=": "numpy.random.seed", "generator=": "torch.manual_seed"}
_SEED_ALL = ("seed_everything", "set_seed", "enable_full_determinism")


def unseeded_splits(program: Program) -> Iterator[Hazard]:
    """Random splits without a seed, in the kernel and in the ranks."""
    told: set[ast.AST] = set()
    for sites in (program.in_kernel(), program.in_ranks()):
        called: set[str] = set()
        for site in sites:
            if not isinstance(site.node, ast.Call) or site.node in told:
                continue
            full = program.names.full(site.node.func)
            called.add(full)
            missing = _unseeded(site.node, name := full.rpartition(".")[2])
            if missing and _SEEDS[missing] not in called and not any(map(_seeds_all, called)):
                told.add(site.node)
                what = f"{name}(...) without {missing} splits anew at every run"
                yield hazard("unseeded-split", what, cell=site.cell.number, line=site.node.lineno)


def _seeds_all(full: str) -> bool:
    return full.rpartition(".")[2] in _SEED_ALL


def _unseeded(call: ast.Call, name: str) -> str:
    """What a call lacks to split the same way every time; empty where it lacks nothing."""
    words = {word.arg: word.value for word in call.keywords}
    if None in words:  # **options: who knows
        return ""
    if name == "random_split":
        return "" if "generator" in words or len(call.args) > 2 else "generator="
    if name == "sample":  # of pandas; others have no frac
        at_random = "frac" in words
    else:
        always = name in _ALWAYS and not _is(words.get("shuffle"), False)
        at_random = always or (name in _ON_REQUEST and _is(words.get("shuffle"), True))
    given = "random_state" in words and not _is(words["random_state"], None)
    return "random_state=" if at_random and not given else ""


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
