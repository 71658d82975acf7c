"""Read a notebook's parameters from its cell, and check values against their types.

The cell tagged ``parameters`` is the notebook's signature. It is parsed, never run::

    config_path: str = "config/train.yaml"
    folds: int | None = None
    mode: Literal["quick", "full"] = "quick"
    seed: int  # no default: must be given
    processes = 0  # no annotation: the default's type
"""

from __future__ import annotations

import ast
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
from pydantic import TypeAdapter, ValidationError

from nbtoolkit.config.loading import Layer, Mistake, parse_value, read_layer, refuse
from nbtoolkit.errors import ParameterError
from nbtoolkit.text_table import did_you_mean

# The names that an annotation may contain. They are looked up here; nothing is evaluated.
_TYPES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (str, int, float, bool, list, dict, tuple, set)},
    **{name: getattr(typing, name) for name in ("Any", "List", "Dict", "Tuple", "Optional")},
    "object": Any,
    "None": None,
}


def _type_of_annotation(node: ast.expr) -> Any | None:
    """Return the type that an annotation names, for pydantic.

    Args:
        node: the annotation in the source; a quoted one is parsed.

    Returns:
        A type (``int``, ``list[str]``, ``Literal["a", "b"]``, ``str | None``), or None if the
        annotation contains other than plain types (``torch.dtype``).
    """
    try:
        return _type_of(node)
    except (KeyError, TypeError, ValueError, SyntaxError):
        return None


def _type_of(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        if node.value is None:
            return None
        return _type_of(ast.parse(str(node.value), mode="eval").body)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return operator.or_(_type_of(node.left), _type_of(node.right))
    if isinstance(node, ast.Subscript):
        return _subscripted(_name(node.value), node.slice)
    return _TYPES[_name(node)]


def _name(node: ast.expr) -> str:
    """Return ``Literal`` for ``Literal`` and for ``typing.Literal``."""
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("typing", "t"):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError(f"no plain type: {ast.unparse(node)}")


def _subscripted(name: str, inner: ast.expr) -> Any:
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if name == "Literal":
        return Literal[tuple(ast.literal_eval(part) for part in parts)]
    types = tuple(... if ast.unparse(part) == "..." else _type_of(part) for part in parts)
    if name == "Union":
        return functools.reduce(operator.or_, types)
    return _TYPES[name][types if len(types) > 1 else types[0]]


class FromShell(str):
    """A value from a shell: a text whose meaning depends on the parameter's type."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A name that the parameters cell assigns."""

    name: str
    hint: Any
    """The type of its values, for pydantic."""
    shown: str
    """The type in error messages."""
    required: bool
    """Whether it has no default."""


def read_parameters(source: str) -> dict[str, Parameter]:
    """Return the parameters that a cell's assignments declare, by name and in order.

    Args:
        source: the cell. Names that begin with ``_`` and assignments to other targets than one
            name declare no parameter.

    Raises:
        SyntaxError: the cell is not Python.
    """
    parameters = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            annotation = node.annotation
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            annotation = None
        else:
            continue
        if not name.startswith("_"):
            parameters[name] = _parameter(name, annotation, node)
    return parameters


def _parameter(
    name: str, annotation: ast.expr | None, node: ast.AnnAssign | ast.Assign
) -> Parameter:
    hint = None if annotation is None else _type_of_annotation(annotation)
    shown = "" if annotation is None else ast.unparse(annotation)
    if hint is None:  # no annotation, or one with a class that only the notebook knows
        default = _literal(node.value)
        hint = Any if default is None else type(default)
        shown = "any plain value" if hint is Any else f"{hint.__name__}, as its default is"
    return Parameter(name=name, hint=hint, shown=shown, required=node.value is None)


def _literal(node: ast.expr | None) -> object:
    """Return a default's value; None if only the kernel can compute it (``Path("x")``)."""
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def parameters_from_shell(texts: Iterable[str]) -> dict[str, FromShell]:
    """Return the values of ``name=value`` texts; the last value of a name counts.

    Raises:
        ParameterError: a text has no ``=``, or no name before it.
    """
    mistakes = []
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name and equals:
            values[name] = FromShell(value)
        else:
            problem = "has no name, or no '='"
            mistakes.append(
                Mistake(place=f"parameter {text!r}", what=problem, do="write name=value")
            )
    refuse(mistakes, ParameterError)
    return values


def given_layer(
    parameters: Mapping[str, object] | None, file: str | os.PathLike[str] | None
) -> Layer:
    """Return the values for a notebook: those of a file, overridden by those of the call.

    Args:
        parameters: name -> value.
        file: a YAML or JSON file with names and values.

    Raises:
        ConfigError: the file cannot be read.
    """
    from_call = parameters or {}
    from_file = Layer(values={}, places={})
    if file is not None:
        from_file = read_layer(Path(file).expanduser())
    return Layer(
        values={**from_file.values, **from_call},
        places={**from_file.places, **{(name,): f"parameter {name!r}" for name in from_call}},
        mistakes=from_file.mistakes,
    )


def check_parameters(
    given: Layer, declared: Mapping[str, Parameter], notebook: str
) -> dict[str, Any]:
    """Return the given values, converted to their parameters' types.

    A ``FromShell`` text is read as YAML (``3``, ``[1, 2]``, ``null``) if that has the type, else
    taken as it is: ``007`` stays ``"007"`` for a ``str``. Other values must have the type already;
    a float also accepts a whole number, a tuple a list.

    Args:
        given: values and their places.
        declared: the notebook's parameters.
        notebook: its name, for messages.

    Raises:
        ParameterError: a parameter is unknown, missing or of another type; lists all mistakes.
    """
    values, mistakes = typed_parameters(given, declared, notebook)
    refuse(mistakes, ParameterError)
    return values


def typed_parameters(
    given: Layer, declared: Mapping[str, Parameter], notebook: str
) -> tuple[dict[str, Any], list[Mistake]]:
    """Return the valid values as :func:`check_parameters` does, and the mistakes."""
    mistakes = list(given.mistakes)
    values = {}
    for name, value in given.values.items():
        place = given.places.get((name,), f"parameter {name!r}")
        if name not in declared:
            mistakes.append(_unknown(name, place, declared, notebook))
            continue
        try:
            values[name] = _convert(value, declared[name].hint)
        except (ValueError, TypeError) as error:
            mistakes.append(_wrong_type(value, declared[name], place, error))
    mistakes += [
        Mistake(
            place=notebook,
            what=f"the parameter {name!r} has no default and no value was given",
            allowed=parameter.shown,
            do=f"give one: -p {name}=..., or parameters={{{name!r}: ...}}",
        )
        for name, parameter in declared.items()
        if parameter.required and name not in given.values
    ]
    return values, mistakes


def _convert(value: object, hint: Any) -> Any:
    """Return ``value`` as ``hint`` requires.

    Raises:
        ValueError: the value has another type.
        TypeError: the value cannot be written as source (an array, an object).
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


def _validated(value: object, hint: Any) -> Any:
    # Validated as JSON: strict for numbers and texts, but a list is valid for a tuple or a set.
    text = json.dumps(value, default=_plain)
    return TypeAdapter(hint).validate_json(text, strict=True)


def _plain(value: Any) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", 0) == 0:
        return value.item()  # a NumPy number
    raise TypeError(f"a {type(value).__name__} cannot be written into a cell")


def _unknown(name: str, place: str, declared: Mapping[str, Parameter], notebook: str) -> Mistake:
    return Mistake(
        place=place,
        what=f"{notebook} has no parameter {name!r}",
        allowed=", ".join(declared) or "none: none of its cells has the tag 'parameters'",
        do=did_you_mean(name, declared),
    )


def _wrong_type(value: object, parameter: Parameter, place: str, error: Exception) -> Mistake:
    problem = f"{parameter.name} is {value!r}"
    if isinstance(error, TypeError):
        problem += f": {error}"
    elif inner := _inner_error(error):
        problem += f"; {inner}"
    return Mistake(place=place, what=problem, allowed=parameter.shown)


def _inner_error(error: Exception) -> str:
    """Describe the one wrong value inside a list or dict; empty for others."""
    errors = error.errors() if isinstance(error, ValidationError) else []
    if len(errors) != 1 or not errors[0]["loc"]:
        return ""
    where = ".".join(map(str, errors[0]["loc"]))
    message = errors[0]["msg"]
    return f"at {where}: {message[:1].lower()}{message[1:]}"
