"""How the ranks of a fit share the training of one model; the base class is DDP, or one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from nbtoolkit.errors import FitError, some_names
from nbtoolkit.training.model import wrap_model
from nbtoolkit.worker.collectives import broadcast

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel

    from nbtoolkit.config.schema import Config
    from nbtoolkit.run.checkpoints.checkpoint_store import State
    from nbtoolkit.worker.context import RunContext

_COMPILERS = ("torch._dynamo", "torch._inductor")


class HostState(dict[str, Any]):
    """A state in CPU memory that no training step changes: a checkpoint needs no copy of it."""


class Strategy:
    """One process, DDP, or DataParallel; a subclass replaces what differs in it.

    Every rank has all weights here, so rank 0 alone can validate, save and load.

    Args:
        ctx: the run's context.
        config: ``train`` and ``distributed``.

    Attributes:
        gathers: whether a checkpoint's state comes from all ranks; :meth:`gathered` is then called
            by all of them, at the same steps.
    """

    gathers = False

    def __init__(self, ctx: RunContext, config: Config) -> None:
        self._ctx, self._config, self._ranks = ctx, config, ctx.world_size

    def wrap(self, module: nn.Module, *, steps: int) -> nn.Module:
        """Return the model as a training step calls it; called once, before the optimizer is made.

        Args:
            module: what ``prepare_model`` returned; may be changed in place.
            steps: optimizer steps of the whole run.
        """
        return wrap_model(self._ctx, self._config, module, steps=steps)

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer of the wrapped model, before its first step."""

    def no_sync(self, model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Return what makes the contexts of passes whose gradients stay on this rank.

        These are all passes of a step but its last.

        Args:
            model: what :meth:`wrap` returned.
        """
        return nullcontext if self._ranks == 1 else cast("DistributedDataParallel", model).no_sync

    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> Tensor:
        """Scale the gradients down to ``max_norm``; return their norm before."""
        return clip(parameters, max_norm)

    def grad_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Return the norm of the gradients."""
        return grad_norm(parameters)

    def translated(
        self, error: Exception, parameters: Mapping[str, nn.Parameter]
    ) -> FitError | None:
        """Return the error to raise for one of this strategy's in a step; None: it is not.

        Args:
            error: what the forward pass, the loss or the backward pass raised.
            parameters: those that are trained, by name, in the model's order.
        """
        text = str(error)
        if _UNFINISHED in text or _CHANGED in text:
            names = _names_in(text, list(parameters))
            return _unused_parameters(names, static_graph="static_graph" in text)
        return _of_compiler(error) if self._config.train.compile else None

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which a rank can call the module without the others."""
        return nullcontext()

    def gathered(self, state: State) -> State:
        """Return a training state as one process would have it.

        If :attr:`gathers`, it is a :class:`HostState`, empty on other ranks than 0.
        """
        return state

    def agreed(self, value: bool) -> bool:
        """Return rank 0's ``value`` if :attr:`gathers`, else this rank's."""
        return broadcast(value, self._ranks) if self.gathers else value

    def load_on_all_ranks(self, module: nn.Module, weights: Mapping[str, Tensor] | None) -> None:
        """Load rank 0's ``weights`` into the model on every rank; None there: its present ones."""
        import torch
        import torch.distributed as dist

        if weights is not None:
            module.load_state_dict(weights)
        if self._ranks > 1:
            for value in module.state_dict().values():
                if isinstance(value, torch.Tensor):
                    dist.broadcast(value, src=0)

    def close(self) -> None:
        """Leave the whole, plain model on each rank; called by all of them at the end."""


def clip(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients down to ``max_norm``; returns their norm before."""
    import torch

    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def grad_norm(parameters: list[nn.Parameter]) -> Tensor:
    """The norm of the gradients."""
    return total_norm([item.grad for item in parameters if item.grad is not None])


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all numbers of ``gradients`` together."""
    import torch  # torch.nn.utils.get_total_norm is public from torch 2.7 on only

    def norm(values: Tensor) -> Tensor:
        wide = torch.promote_types(values.dtype, torch.float32)  # half precision would overflow
        total: Tensor = torch.linalg.vector_norm(values, dtype=wide)
        return total

    return norm(torch.stack([norm(gradient) for gradient in gradients]))


def scale_gradients(parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
    """Multiply the gradients by ``factor``, a scalar."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad *= factor.to(parameter.grad.device)


def average_gradients(parameters: Sequence[nn.Parameter], ranks: int) -> None:
    """Replace gradients by their mean over the ranks, in one all-reduce.

    A parameter without a gradient counts as zero; without one on any rank it keeps none.
    """
    if ranks == 1:
        return
    import torch
    import torch.distributed as dist

    grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
    unused = [one.grad is None for one in parameters]
    present = torch.tensor([not one for one in unused]).to(grads[0])
    flat = torch.cat([present, *(grad.flatten() for grad in grads)])
    dist.all_reduce(flat)
    sizes = [one.numel() for one in parameters]
    present, *means = flat.split([len(parameters), *sizes])
    torch._foreach_div_(means, ranks)
    used = present.tolist() if any(unused) else None  # waits for the device
    for number, (one, grad, mean) in enumerate(zip(parameters, grads, means, strict=True)):
        if used is None or used[number]:
            one.grad = grad.copy_(mean.view_as(grad))


# --- errors ---


def _of_compiler(error: Exception) -> FitError | None:
    """The error to raise for one of ``torch.compile``; None: it is another."""
    if not any(one.__module__.startswith(_COMPILERS) for one in type(error).__mro__):
        return None
    lines = (line.strip() for line in str(error).splitlines())
    reason = next((line for line in lines if line), "no reason")
    return FitError(
        f"torch.compile cannot compile this model here: {type(error).__name__}: {reason}",
        allowed="models that torch.compile can trace, where there is a C++ compiler (on a GPU: "
        "Triton)",
        do="set train.compile: false; an error in the model itself then shows plainly",
    )


_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_CHANGED = "Your training graph has changed in this iteration"


def refuse_unused(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters without a gradient after a backward pass under DDP.

    DDP reports them one step later, without names; the ranks may wait for each other by then.

    Raises:
        FitError: there are any; names them.
    """
    names = [name for name, parameter in parameters.items() if parameter.grad is None]
    if names:
        raise _unused_parameters(names, static_graph=False)


def _unused_parameters(names: Sequence[str], *, static_graph: bool) -> FitError:
    """The error for parameters not used in a step of several ranks.

    Args:
        names: of the parameters; empty: not known.
        static_graph: whether ``distributed.static_graph`` is set.
    """
    shown = some_names(names) or "(DDP does not say which)"
    promise = "; distributed.static_graph promised the same ones in every step"
    unset = "static_graph: false and " if static_graph else ""
    return FitError(
        f"parameters took no part in the loss of a training step, and the ranks wait for their "
        f"gradients: {shown}{promise if static_graph else ''}",
        allowed="models that use every trainable parameter in every step; other models only if "
        "distributed.find_unused_parameters is true",
        do=f"set distributed.{unset}find_unused_parameters: true (slower), or freeze them with "
        "requires_grad_(False)",
    )


def _names_in(text: str, names: Sequence[str]) -> list[str]:
    """The names behind "Parameter indices which did not receive grad for rank 1: 2 3"."""
    match = re.search(r"Parameter indices which did not receive grad for rank \d+:([ \d]+)", text)
    return [names[int(index)] for index in match[1].split()] if match else []
