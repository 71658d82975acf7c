"""Check the metrics and the step that a training function passes to its context."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any


def numbers_and_step(
    metrics: Mapping[str, Any] | None, step: Any, named: Mapping[str, Any]
) -> tuple[dict[str, float], int | None]:
    """Return the metrics and the step of a call of ``ctx.report`` or ``ctx.log``.

    Args:
        metrics: numbers by name; None if they are keywords.
        step: the step; None: the keyword ``epoch``, if there is one.
        named: the further keywords of the call.

    Raises:
        TypeError: a value or the step is not a number, or there are a dict and keywords.
    """
    named = dict(named)
    if step is None:
        step = named.pop("epoch", None)
    if metrics is None and named:
        metrics = named
        named = {}
    if named:
        raise TypeError(
            f"metrics are given as a dict and as keywords ({', '.join(named)})\n"
            "  Allowed: a dict, or keywords; besides it step=<number> or epoch=<number>\n"
            "  Do now:  put all metrics into the dict"
        )
    return _as_numbers(metrics), as_step(step)


def _as_numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics are {reprlib.repr(metrics)} (a {type(metrics).__name__}), not a dict\n"
            "  Allowed: a dict of names and numbers\n"
            '  Do now:  write {"loss": value}'
        )
    values = {}
    for name, value in metrics.items():
        try:
            values[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"the metric {name!r} is {value!r} (a {type(value).__name__}), not a number\n"
                "  Allowed: int, float, bool, and tensors or arrays of one element\n"
                "  Do now:  report a number, for example value.mean()"
            ) from None
    return values


def as_step(step: Any) -> int | None:
    """Return the step as an int; also for a number of NumPy or torch.

    Raises:
        TypeError: it is not a number.
    """
    try:
        if isinstance(step, str):
            raise TypeError
        return None if step is None else int(step)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise TypeError(
            f"step is {step!r} (a {type(step).__name__}), not a number\n"
            "  Allowed: a whole number, such as the optimizer step or the epoch; None\n"
            "  Do now:  pass step=<number>; put names into the metric's name"
        ) from None
