"""What a parameter's annotation, or its default, says about the values it takes."""

from __future__ import annotations

import ast
import functools
import operator
import typing
from typing import Any, Literal

# What may stand in an annotation. Nothing is evaluated: these names are looked up.
_NAMES: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "list": list,
    "dict": dict,
    "tuple": tuple,
    "set": set,
    "object": Any,
    "None": None,
    **{name: getattr(typing, name) for name in ("Any", "List", "Dict", "Tuple", "Optional")},
}


def from_annotation(node: ast.expr) -> Any | None:
    """The type that an annotation names.

    Args:
        node: the annotation in the source; a quoted one is read as well.

    Returns:
        A type for pydantic (``int``, ``list[str]``, ``Literal["a", "b"]``, ``str | None``), or None
        where something else than the plain types stands in it (``torch.dtype``).
    """
    try:
        return _read(node)
    except (KeyError, TypeError, ValueError, SyntaxError):
        return None


def from_default(value: Any) -> Any:
    """The type of a parameter that has a default and no annotation.

    Args:
        value: the default. None tells nothing, so that anything is taken.
    """
    return Any if value is None else type(value)


def _read(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return None if node.value is None else _read(_quoted(str(node.value)))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return operator.or_(_read(node.left), _read(node.right))
    if isinstance(node, ast.Subscript):
        return _subscripted(_name(node.value), node.slice)
    return _NAMES[_name(node)]


def _quoted(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _name(node: ast.expr) -> str:
    """``Literal`` of ``Literal`` and of ``typing.Literal``."""
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("typing", "t"):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError(f"no plain type: {ast.unparse(node)}")


def _subscripted(name: str, inner: ast.expr) -> Any:
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if name == "Literal":
        return Literal[tuple(ast.literal_eval(part) for part in parts)]
    types = tuple(... if ast.unparse(part) == "..." else _read(part) for part in parts)
    if name == "Union":
        return functools.reduce(operator.or_, types)
    return _NAMES[name][types if len(types) > 1 else types[0]]
