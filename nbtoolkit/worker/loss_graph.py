"""Read in the autograd graph of a loss what it does with the samples of its batch.

The graph shows the shapes and the arguments of torch's losses wherever they are called: in the
user's code, in a library, or in a model that returns its own loss. What torch.compile has compiled
is one node without any of this.

Imports torch; import it inside functions only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

Shape: TypeAlias = tuple[int, ...]

# torch.nn._reduction.get_enum
_MEAN = 1
_SUM = 2

_CLASS_LOSSES = ("NllLossBackward0", "NllLoss2DBackward0")
_SUMS = ("SumBackward0", "SumBackward1")
# Scalars of which a loss is made without being averaged.
_LINEAR = (
    *("AddBackward0", "SubBackward0", "NegBackward0", "StackBackward0", "CatBackward0"),
    *("ViewBackward0", "SqueezeBackward0", "UnsqueezeBackward0", "ToCopyBackward0"),
    *("CloneBackward0", "AliasBackward0"),
)
_PRODUCTS = ("MulBackward0", "MulBackward1")
_QUOTIENTS = ("DivBackward0", "DivBackward1")
# Two tensors of these become one of the shape to which both are broadcast.
_ELEMENTWISE = ("ExpandBackward0", "SubBackward0", "AddBackward0", "RsubBackward1", *_PRODUCTS)


def tensors(value: object) -> Iterator[Tensor]:
    """All tensors in a batch or in a model's outputs."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors(vars(value))


def roots(value: object) -> list[Node]:
    """Return the nodes that have made the tensors in ``value``."""
    return [tensor.grad_fn for tensor in tensors(value) if tensor.grad_fn is not None]


def mean_over_weights(loss: Node) -> str | None:
    """By what a class loss divides instead of the number of samples; None: there is no such loss.

    Waits for the device.
    """
    for node in _nodes([loss]):
        # A sum is for the user to divide.
        if node.name() not in _CLASS_LOSSES or _saved(node, "reduction") != _MEAN:
            continue
        if _saved(node, "weight") is not None:
            return "class weights"
        ignored = _signed(_saved(node, "ignore_index"))
        if bool((_saved(node, "target") == ignored).any()):
            return f"targets that are ignored (ignore_index={ignored})"
    return None


def is_sum(loss: Node, outputs: Collection[Node], *, samples: int, ranks: int) -> bool:
    """Whether a part of the loss is a sum over the samples.

    A sum that is divided by as many or by a computed number is none, nor is one that is multiplied
    by the number of ranks: its gradient is that of the whole batch after averaging. A computed
    factor of 1 or more is the loss scale of fp16.

    Args:
        loss: of one rank's part of a batch.
        outputs: of the model. A sum of something else is no loss: the square of the weights.
        samples: in the part.
        ranks: of the run.
    """
    pending = [(loss, 1.0, loss in outputs)]
    while pending:
        node, factor, in_model = pending.pop()
        name = node.name()
        if name in _PRODUCTS:
            number = _number(node)
            if number == ranks or (number is None and _is_below_1(node)):
                continue
            factor *= 1.0 if number is None else number
        elif name in _QUOTIENTS:
            number = _number(node)
            if not number:
                continue
            factor /= number
        elif _sums_samples(node, samples):
            of_outputs = in_model or any(inner in outputs for inner in _nodes([node]))
            if of_outputs and abs(factor) * samples > 1.0 + 1e-6:
                return True
            continue
        elif name not in _LINEAR and name not in _SUMS:
            continue
        pending += [(inner, factor, in_model or inner in outputs) for inner in _inputs(node)]
    return False


def compared_pairs(loss: Node, outputs: Collection[Node]) -> tuple[Shape, Shape] | None:
    """Return the shapes of an output before and after it was broadcast against targets by mistake.

    (n, 1) and (n,) become (n, n): each output is compared with the targets of all samples. None if
    that has not happened. Losses of pairs broadcast on purpose; both sides then have gradients.
    """
    for node in _nodes([loss], stop=outputs):
        edges = [(inner, number) for inner, number in node.next_functions if inner is not None]
        after = _shape(node, 0)
        if node.name() not in _ELEMENTWISE or len(edges) != 1 or len(after) != 2:
            continue
        before = _shape(*edges[0])
        rows = after[0]
        if rows > 1 and after == (rows, rows) and before in ((rows,), (rows, 1)):
            return before, after
    return None


def _nodes(first: list[Node], stop: Collection[Node] = ()) -> Iterator[Node]:
    """All nodes below ``first``, and these; not those below ``stop``."""
    pending = [*first]
    seen = set(first)
    while pending:
        node = pending.pop()
        yield node
        if node not in stop:
            new = [inner for inner in _inputs(node) if inner not in seen]
            seen.update(new)
            pending += new


def _inputs(node: Node) -> list[Node]:
    return [inner for inner, _ in node.next_functions if inner is not None]


def _shape(node: Node, number: int) -> Shape:
    """Return the shape of a node's output; () where it is not known."""
    metadata: Any = getattr(node, "_input_metadata", ())
    return tuple(metadata[number].shape) if number < len(metadata) else ()


def _sums_samples(node: Node, samples: int) -> bool:
    """Whether a node makes one number of values that have one row, or several, per sample."""
    if _shape(node, 0):
        return False
    if node.name() in _SUMS:
        summed: Shape = tuple(_saved(node, "self_sym_sizes"))
    elif _saved(node, "reduction") == _SUM:
        summed = tuple(_saved(node, "self").shape)
    else:
        return False
    return bool(summed) and summed[0] % samples == 0


def _number(node: Node) -> float | None:
    """Return the Python number by which a node multiplies or divides; None: a tensor."""
    other = _saved(node, "other")
    if not isinstance(other, Tensor):
        return None if other is None else float(other)
    # A Python number does not take part in type promotion, a tensor without dimensions does.
    smaller = torch.tensor(0, dtype=torch.half if other.is_floating_point() else torch.int8)
    is_python = other.ndim == 0 and torch.result_type(smaller, other) != other.dtype
    return float(other) if is_python else None


def _is_below_1(node: Node) -> bool:
    """Whether a node multiplies by a tensor that makes smaller, as a mean does; waits for it."""
    factors = (_saved(node, "other"), _saved(node, "self"))
    return any(
        isinstance(factor, Tensor) and factor.numel() == 1 and abs(factor) < 1 for factor in factors
    )


def _saved(node: Node, name: str) -> Any:
    return getattr(node, f"_saved_{name}", None)


def _signed(index: int) -> int:
    """Return a node shows negative numbers as those of 64 bits without a sign."""
    return index - 2**64 if index >= 2**63 else index
