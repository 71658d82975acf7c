"""Conditions that only the main rank meets: ``if ctx.is_main:``, ``if rank != 0: return``."""

from __future__ import annotations

import ast

_MAIN = {
    "is_main",
    "is_main_process",
    "is_local_main_process",
    "is_global_zero",
    "is_rank_zero",
    "is_world_process_zero",
    # decorators, of accelerate and Lightning
    "on_main_process",
    "on_local_main_process",
    "rank_zero_only",
}
_RANKS = {"rank", "local_rank", "process_index", "local_process_index", "global_rank", "get_rank"}


def only_main(test: ast.expr) -> bool | None:
    """What the condition of an ``if``, or a function's decorator, says about ranks.

    Returns:
        True: only the main rank meets it; False: only the main rank does not; None: neither.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = only_main(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        # One part of an `and` is enough to keep the others out, one of an `or` to let them in.
        decisive = isinstance(test.op, ast.And)
        return decisive if decisive in map(only_main, test.values) else None
    if isinstance(test, ast.Compare) and _last(test.left) in _RANKS and _zero(test.comparators):
        return isinstance(test.ops[0], ast.Eq)
    name = _last(test)
    return True if name in _MAIN else False if name in _RANKS else None


def mentions_rank(node: ast.AST) -> bool:
    """Whether a rank's number is in it: a file whose name has one is nobody else's."""
    return any(_last(inner) in _RANKS for inner in ast.walk(node))


def leaves(body: list[ast.stmt]) -> bool:
    """Whether a block never comes to the statement after it."""
    return bool(body) and isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))


def _zero(values: list[ast.expr]) -> bool:
    return all(isinstance(value, ast.Constant) and value.value == 0 for value in values)


def _last(node: ast.AST) -> str:
    """``is_main`` of ``ctx.is_main`` and of ``is_main()``."""
    if isinstance(node, ast.Call):
        return _last(node.func)
    name = getattr(node, "attr", "") or getattr(node, "id", "")
    return name.lower() if isinstance(name, str) else ""
