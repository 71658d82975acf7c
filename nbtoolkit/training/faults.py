"""Faults: what goes wrong inside a training step, told in words that say what to set."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nbtoolkit.errors import FitError

if TYPE_CHECKING:
    from torch import nn

    Parameters = Mapping[str, nn.Parameter]

_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_CHANGED = "Your training graph has changed in this iteration"
_COMPILERS = ("torch._dynamo", "torch._inductor")


def explain(
    error: Exception, parameters: Parameters, *, step: int, compiled: bool
) -> FitError | None:
    """What a training step's error means, where it is DDP's or the compiler's.

    Args:
        error: what the forward pass, the loss or the backward pass raised. Another one than these
            gets a note of the step (from Python 3.11 on), and stays what it is.
        parameters: those that DDP knows, by name, in its order.
        step: optimizer steps done.
        compiled: whether ``torch.compile`` had its hand in.

    Returns:
        The error to raise from ``error``; None: ``error`` itself.
    """
    text = str(error)
    if _UNFINISHED in text or _CHANGED in text:
        return unused(_told(text, list(parameters)), static="static_graph" in text)
    if compiled and any(kind.__module__.startswith(_COMPILERS) for kind in type(error).__mro__):
        return _not_compiled(error)
    if sys.version_info >= (3, 11):
        error.add_note(f"in optimizer step {step + 1} of nb.fit")
    return None


def refuse_unused(parameters: Parameters) -> None:
    """Refuse parameters without a gradient after a backward pass under DDP.

    DDP says so one step later only, without names, and by then the ranks may wait for each other.

    Raises:
        FitError: there are any; names them.
    """
    names = [name for name, one in parameters.items() if one.grad is None]
    if names:
        raise unused(names, static=False)


def unused(names: Sequence[str], *, static: bool) -> FitError:
    """The error for parameters that took no part in a step of several ranks.

    Args:
        names: theirs; empty when nobody knows.
        static: whether ``distributed.static_graph`` had promised DDP that this does not change.
    """
    shown = ", ".join(names[:5]) or "(DDP does not say which)"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    promise = "; distributed.static_graph promised the same ones in every step" if static else ""
    before = "static_graph: false and " if static else ""
    return FitError(
        f"parameters took no part in the loss of a training step, and the ranks wait for their "
        f"gradients: {shown}{more}{promise}",
        allowed="models that use every trainable parameter in every step, unless DDP looks for "
        "the others",
        do=f"set distributed.{before}find_unused_parameters: true (slower), or freeze them with "
        "requires_grad_(False)",
    )


def _told(text: str, names: Sequence[str]) -> list[str]:
    """The names behind "Parameter indices which did not receive grad for rank 1: 2 3"."""
    told = re.search(r"Parameter indices which did not receive grad for rank \d+:([ \d]+)", text)
    return [names[int(index)] for index in told[1].split()] if told else []


def _not_compiled(error: Exception) -> FitError:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason")
    return FitError(
        f"torch.compile cannot compile this model here: {type(error).__name__}: {reason}",
        allowed="models that torch.compile can trace, where there is a C++ compiler (on a GPU: "
        "Triton)",
        do="set train.compile: false; should the model itself be wrong, it then says so plainly",
    )
