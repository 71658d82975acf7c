"""Calls that all ranks make together, where only the main rank comes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nbtoolkit.lint.hazard import Hazard, hazard
from nbtoolkit.lint.program import Program

# By their last part: of nbtoolkit, of ctx, of an Accelerator, of torch.distributed.
_OURS = {"fit", "predict"}
_OF_CTX = {"report", "check", "leaving", "save", "prepare"}
_OF_ACCELERATOR = {"gather", "gather_for_metrics", "reduce", "wait_for_everyone", "prepare"}
_OF_TORCH = {"all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "reduce"}

_WRAPS = ("ctx.prepare", "accelerator.prepare", "DistributedDataParallel")


def lone_collectives(program: Program) -> Iterator[Hazard]:
    """Calls under ``if ctx.is_main:`` in which the main rank waits for the others."""
    sites = list(program.in_ranks())
    wrapped = {name for site in sites for name in _wrapped(site.node)}
    for site in sites:
        call = site.node
        if not site.guarded or not isinstance(call, ast.Call):
            continue
        if name := _together(program.names.full(call.func), ast.unparse(call.func)):
            what = f"{name} is called by the main rank only, and waits for the others"
            yield hazard("lone-collective", what, cell=site.cell.number, line=call.lineno)
        elif isinstance(call.func, ast.Name) and call.func.id in wrapped:
            what = f"{call.func.id}(...) is called by the main rank only: DDP waits for the others"
            do = f"take it out of the `if`, or call ctx.unwrap({call.func.id})(...)"
            yield hazard("lone-collective", what, cell=site.cell.number, line=call.lineno, do=do)


def _together(full: str, written: str) -> str:
    """The name of what all ranks call together; empty for other calls."""
    owner, _, name = full.rpartition(".")
    holder = written.rpartition(".")[0]
    if owner.partition(".")[0] == "nbtoolkit" and name in _OURS:
        return f"nb.{name}"
    if holder == "ctx" and name in _OF_CTX:
        return f"ctx.{name}"
    if holder.endswith("accelerator") and name in _OF_ACCELERATOR:
        return written
    return written if owner == "torch.distributed" and name in _OF_TORCH else ""


def _wrapped(node: ast.AST) -> list[str]:
    """Names that are given what ``ctx.prepare`` or DDP return."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
        return []
    if not ast.unparse(node.value.func).endswith(_WRAPS):
        return []
    targets = [
        inner
        for target in node.targets
        for inner in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])
    ]
    return [target.id for target in targets if isinstance(target, ast.Name)]
