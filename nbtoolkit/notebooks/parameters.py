"""Read a notebook's parameters from its cell, and check values against them.

A cell tagged ``parameters`` is the notebook's signature. It is read, never run::

    config_path: str = "config/train.yaml"
    folds: int | None = None
    mode: Literal["quick", "full"] = "quick"
    seed: int  # no default: must be given
    processes = 0  # no annotation: the default's type
"""

from __future__ import annotations

import ast
import difflib
import functools
import json
import operator
import os
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from nbtoolkit.config.yaml_source import Layer, Mistake, parse_value, read_layer, refuse
from nbtoolkit.errors import ParameterError

# --- annotations ---
# What a parameter's annotation, or its default, says about the values it takes.


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


# --- parameters ---


class FromShell(str):
    """A value as a shell gives it: a text that is read as its parameter's type says."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One name of the parameters cell."""

    name: str
    hint: Any
    """The type its values have."""
    shown: str
    """The type as people read it."""
    required: bool
    """Whether it has no default."""
    line: int
    """Its line in the cell, from 1."""


def read_parameters(source: str) -> dict[str, Parameter]:
    """The parameters that a cell's assignments declare, by name and in order.

    Args:
        source: the cell. Names that begin with ``_`` and assignments to anything else than one
            name are the cell's own business.

    Raises:
        SyntaxError: the cell is not Python.
    """
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, annotation = node.target.id, node.annotation
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, annotation = node.targets[0].id, None
        else:
            continue
        if not name.startswith("_"):
            found[name] = _parameter(name, annotation, node)
    return found


def _parameter(
    name: str, annotation: ast.expr | None, node: ast.AnnAssign | ast.Assign
) -> Parameter:
    hint = None if annotation is None else from_annotation(annotation)
    shown = "" if annotation is None else ast.unparse(annotation)
    if hint is None:  # no annotation, or one of a class that only the notebook knows
        hint = from_default(_literal(node.value))
        shown = "any plain value" if hint is Any else f"{hint.__name__}, as its default is"
    return Parameter(
        name=name,
        hint=hint,
        shown=shown,
        required=node.value is None,
        line=node.lineno,
    )


def _literal(node: ast.expr | None) -> Any:
    """A default's value; None where the kernel alone can tell it (``Path("x")``)."""
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def parameters_from_shell(sweep_config: Iterable[str]) -> dict[str, FromShell]:
    """The values of ``name=value`` texts; of a name that comes twice the last.

    Raises:
        ParameterError: a text has no ``=``, or nothing before it.
    """
    pairs = [(wish, *wish.partition("=")) for wish in sweep_config]
    wrong = [wish for wish, name, equals, _ in pairs if not name or not equals]
    refuse(
        [
            Mistake(
                place=f"parameter {wish!r}", what="has no name, or no '='", do="write name=value"
            )
            for wish in wrong
        ],
        ParameterError,
    )
    return {name: FromShell(value) for _, name, _, value in pairs}


def given_layer(parameters: Mapping[str, Any] | None, file: str | os.PathLike[str] | None) -> Layer:
    """The values given to a notebook: a file's, and over them those of the call.

    Args:
        parameters: name -> value.
        file: a YAML or JSON file of names and values.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = None if file is None else Path(file).expanduser()
    below = Layer(values={}, places={}) if path is None else read_layer(path)
    above = dict(parameters or {})
    return Layer(
        values={**below.values, **above},
        places={**below.places, **{(name,): f"parameter {name!r}" for name in above}},
        mistakes=below.mistakes,
    )


def check_parameters(
    given: Layer, declared: Mapping[str, Parameter], notebook: str
) -> dict[str, Any]:
    """The given values, each of its parameter's type.

    A ``FromShell`` text is first read as YAML (``3``, ``[1, 2]``, ``null``), and taken as it is
    where that does not fit: ``007`` stays ``"007"`` for a ``str``. Other values must have the type
    already; a whole number does for a float, a list for a tuple.

    Args:
        given: values and their places.
        declared: the notebook's parameters.
        notebook: its name, for messages.

    Raises:
        ParameterError: one is unknown, of another type, or missing; all mistakes at once.
    """
    values, mistakes = typed_parameters(given, declared, notebook)
    refuse(mistakes, ParameterError)
    return values


def typed_parameters(
    given: Layer, declared: Mapping[str, Parameter], notebook: str
) -> tuple[dict[str, Any], list[Mistake]]:
    """What :func:`check_parameters` returns, of the values that are right, and what is wrong."""
    mistakes = list(given.mistakes)
    values = {}
    for name, value in given.values.items():
        place = given.places.get((name,), f"parameter {name!r}")
        if name not in declared:
            mistakes.append(_unknown(name, place, declared, notebook))
            continue
        try:
            values[name] = _typed(value, declared[name].hint)
        except (ValueError, TypeError) as error:
            mistakes.append(_ill_typed(value, declared[name], place, error))
    mistakes += [
        Mistake(
            place=notebook,
            what=f"the parameter {name!r} has no default and was not given",
            allowed=parameter.shown,
            do=f"give it: -p {name}=..., or parameters={{{name!r}: ...}}",
        )
        for name, parameter in declared.items()
        if parameter.required and name not in given.values
    ]
    return values, mistakes


def _typed(value: Any, hint: Any) -> Any:
    """``value`` as ``hint`` wants it.

    Raises:
        ValueError: it is of another type.
        TypeError: it is nothing that can be written down (an array, an object).
    """
    if not isinstance(value, FromShell):
        return _validated(value, hint)
    text = str(value)
    if hint is str:
        return text
    try:
        return _validated(parse_value(text), hint)
    except (ValueError, yaml.YAMLError):
        return _validated(text, hint)


def _validated(value: Any, hint: Any) -> Any:
    from pydantic import TypeAdapter

    # As JSON: strict about numbers and texts, and a list still does for a tuple or a set.
    text = json.dumps(value, default=_plain)
    return TypeAdapter(hint).validate_json(text, strict=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", 0) == 0:
        return value.item()  # a NumPy number
    raise TypeError(f"a {type(value).__name__} cannot be written into a cell")


def _unknown(name: str, place: str, declared: Mapping[str, Parameter], notebook: str) -> Mistake:
    close = difflib.get_close_matches(name, declared, n=1, cutoff=0.5)
    return Mistake(
        place=place,
        what=f"{notebook} has no parameter {name!r}",
        allowed=", ".join(declared) or "none: no cell of it has the tag 'parameters'",
        do=f"did you mean {close[0]!r}?" if close else "",
    )


def _ill_typed(value: Any, parameter: Parameter, place: str, error: Exception) -> Mistake:
    what = f"{parameter.name} is {value!r}"
    if isinstance(error, TypeError):
        what += f": {error}"
    elif detail := _inner(error):
        what += f"; {detail}"
    return Mistake(place=place, what=what, allowed=parameter.shown)


def _inner(error: Exception) -> str:
    """Where inside a list or dict the first wrong value stands; empty for a plain value."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return ""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    inside = isinstance(first["input"], (str, int, float)) and where and len(error.errors()) == 1
    return f"at {where}: {first['msg'][:1].lower()}{first['msg'][1:]}" if inside else ""
