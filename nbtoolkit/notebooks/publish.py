"""Publish values from a notebook to the caller of the run (``nb.publish``)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from nbtoolkit.errors import PublishError
from nbtoolkit.host import in_kernel
from nbtoolkit.run.paths import read_json, write_json

TARGET = "NBTOOLKIT_PUBLISH"
"""Environment variable with the path of the file that receives a kernel's published values."""


def publish(values: Mapping[str, object]) -> None:
    """Set values of this notebook that :func:`run_notebook` returns as ``result.values``.

    A second call adds its values; it replaces a value of the same name. If you run the notebook
    yourself, the call only checks the values.

    Args:
        values: a dict of plain values by name: numbers, strings, None, lists and dicts of them,
            paths, NumPy numbers and arrays, or a ``Config``.

    Raises:
        PublishError: a name is not a string, or a value cannot be written as JSON.
    """
    plain = {_checked_name(name): _plain(name, value) for name, value in values.items()}
    target = os.environ.get(TARGET)
    # All processes that the notebook starts inherit the variable; ranks publish nothing.
    if target and in_kernel(sys.modules):
        write_json(Path(target), {**(read_json(Path(target)) or {}), **plain}, durable=False)


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise PublishError(
            f"nb.publish was given the name {name!r}",
            allowed='texts: nb.publish({"val_accuracy": 0.98})',
        )
    return name


def _plain(name: str, value: object) -> object:
    """Return a value as JSON reads it back."""
    try:
        return json.loads(json.dumps(value, default=_simplify))
    except (TypeError, ValueError, RecursionError) as error:
        raise PublishError(
            f"nb.publish cannot publish {name!r}: {error}",
            allowed="numbers, texts, None, lists and dicts of them, paths, a Config",
            do=f"save it to a file and publish the path: nb.publish({{{name!r}: path}})",
        ) from error


def _simplify(value: object) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    for method in ("to_dict", "model_dump", "tolist"):  # ours, pydantic's, NumPy's and torch's
        if callable(getattr(value, method, None)) and not isinstance(value, type):
            return getattr(value, method)()
    raise TypeError(f"a {type(value).__name__} is no plain value")
