"""Every field of the schemas, and which test proves its effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_origin

from pydantic import BaseModel

Test = TypeVar("Test", bound=Callable[..., Any])

PROVEN: list[str] = []
"""The fields whose effect a test shows: ``train.epochs``, ``sweep: study.metric``."""


def leaves(model: type[BaseModel], prefix: str = "") -> list[str]:
    """The dotted names of all settings of a model of sections."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        # Python 3.10 calls list[int] a type
        if get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel):
            found += leaves(kind, f"{prefix}{name}.")
        else:
            found.append(f"{prefix}{name}")
    return found


def proves(*names: str) -> Callable[[Test], Test]:
    """Say which fields a test shows an effect of."""
    PROVEN.extend(names)
    return lambda test: test
