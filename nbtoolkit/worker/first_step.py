"""Look at the losses of the first training step of an own loop on several ranks.

DDP averages the gradients of the ranks with equal weights. That is the step of the whole batch if
the loss of each rank is a mean over its samples. Other losses make a step that depends on the
number of ranks, and nothing fails. People do that on purpose, too: the user is told, once.

Imports torch; import it inside functions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.autograd.graph import Node
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from nbtoolkit.worker import loss_graph

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from nbtoolkit.worker.context import RunContext

_BACKWARD = (Tensor.backward, torch.autograd.backward)
_PASSES = 16  # backward passes at most: a loop may have no optimizer, or accumulate gradients


class FirstStep(TorchFunctionMode):
    """Sees the backward passes between a first forward pass and the first steps of all optimizers.

    A function mode costs each call of torch some microseconds, hence not longer.

    Args:
        ctx: the run's context.
    """

    def __init__(self, ctx: RunContext) -> None:
        super().__init__()
        self._ctx = ctx
        self._active = self._over = False
        self._samples = 1
        self._passes = 0
        self._outputs: set[Node] = set()
        self._stepped: set[int] = set()
        self._told: set[str] = set()
        self._hooks: list[RemovableHandle] = [register_optimizer_step_post_hook(self._after_step)]

    def watch(self, model: nn.Module) -> None:
        """Begin after a forward pass of ``model``, as the loop calls it."""
        if not self._over:
            self._hooks.append(model.register_forward_hook(self._after_forward, with_kwargs=True))

    def close(self) -> None:
        """Stop looking."""
        self._over = True
        for hook in self._hooks:
            hook.remove()
        self._outputs.clear()
        if self._active:
            self._active = False
            _remove(self)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func in _BACKWARD:
            self._passes += 1
            for loss in loss_graph.roots(args):
                self._look(loss)
        return func(*args, **(kwargs or {}))

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if self._passes >= _PASSES:
            self.close()
            return
        self._outputs.update(loss_graph.roots(outputs))
        sizes = (len(tensor) for tensor in loss_graph.tensors((args, kwargs)) if tensor.ndim)
        self._samples = max(1, next(sizes, 1))
        if not self._active:
            self._active = True
            _insert(self)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        again = id(optimizer) in self._stepped
        self._stepped.add(id(optimizer))
        if self._active and (again or len(self._stepped) >= len(self._ctx.accelerator._optimizers)):
            self.close()

    def _look(self, loss: Node) -> None:
        ranks = self._ctx.world_size
        if weights := loss_graph.mean_over_weights(loss):
            self._tell(_weighted(weights))
        if loss_graph.is_sum(loss, self._outputs, samples=self._samples, ranks=ranks):
            self._tell(_summed(ranks))
        if shapes := loss_graph.compared_pairs(loss, self._outputs):
            self._tell(_compared(*shapes))

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._ctx.message(text, "warning")


def _insert(mode: TorchFunctionMode) -> None:
    """Push a mode below those of the user, whose ``with`` blocks pop the uppermost one."""
    others = _popped_modes()
    for pushed in [mode, *reversed(others)]:
        _push_mode(pushed)


def _remove(mode: TorchFunctionMode) -> None:
    others = _popped_modes()
    for pushed in reversed(others):
        if pushed is not mode:
            _push_mode(pushed)


def _popped_modes() -> list[TorchFunctionMode]:
    """All modes, the uppermost one first."""
    return [_pop_mode() for _ in range(_len_torch_function_stack())]


def _weighted(by: str) -> str:
    return (
        f"a loss with {by} divides by the weights of its rank's part of the batch, not of the "
        "whole batch: the steps depend on the number of ranks\n"
        "  Allowed: such a loss on purpose (train.loss_reduction: batch says so); nb.fit, which "
        "weights the parts\n"
        "  Do now:  compute the loss with reduction='sum' and call ctx.accelerator.backward(loss * "
        "ctx.world_size / ctx.accelerator.reduce(weight)), where weight is the sum of the weights "
        "of this rank's targets (an ignored one weighs 0)"
    )


def _summed(ranks: int) -> str:
    return (
        "a loss is a sum over the samples of its rank's part of the batch, and the ranks' "
        f"gradients are averaged: a step has 1/{ranks} of the gradient of the whole batch\n"
        "  Allowed: means over samples; sums times ctx.world_size; any loss on purpose "
        "(train.loss_reduction: batch says so)\n"
        "  Do now:  ctx.accelerator.backward(loss * ctx.world_size)"
    )


def _compared(before: loss_graph.Shape, after: loss_graph.Shape) -> str:
    return (
        f"a loss compares each output with the targets of all samples: torch makes {after} of "
        f"outputs of shape {before}\n"
        "  Allowed: outputs and targets of the same shape\n"
        "  Do now:  outputs.squeeze(1), or targets[:, None]"
    )
