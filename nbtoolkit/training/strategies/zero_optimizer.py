"""The optimizer of ``distributed.strategy: deepspeed``, with the state of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nbtoolkit.errors import FitError, PlanError, some_names
from nbtoolkit.run.rank_check import leave_out

if TYPE_CHECKING:
    from nbtoolkit.training.strategies.deepspeed import ZeroModel

# A rank's part has no shapes: these treat each number of a parameter by itself.
_ELEMENTWISE = ("Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose state cannot be divided.

    Raises:
        FitError: it is one.
    """
    kind = type(optimizer)
    if kind.__name__ not in _ELEMENTWISE or not kind.__module__.startswith("torch.optim"):
        raise FitError(
            f"the optimizer is {kind.__name__}, whose state distributed.strategy: deepspeed cannot "
            "divide",
            allowed=f"of torch.optim: {', '.join(_ELEMENTWISE)}",
            do="set optim.name: adamw, or distributed.strategy: ddp",
        )


class ZeroOptimizer(torch.optim.Optimizer):
    """The optimizer of a :class:`ZeroModel`, with a state as one process has it.

    ``state_dict`` and ``load_state_dict`` are collectives.

    Args:
        model: whose engine makes the steps.
        optimizer: over the trained copy's parameters; DeepSpeed gives it a rank's parts.
        ranks: the number of ranks.
        rank: this one.

    Attributes:
        keeps_state: whether this rank's ``state_dict`` has the tensors of the state.
    """

    keeps_state = True

    def __init__(
        self, model: ZeroModel, optimizer: torch.optim.Optimizer, *, ranks: int, rank: int
    ) -> None:
        self._model, self._torch, self._ranks, self._rank = model, optimizer, ranks, rank
        # Groups are shared: a rate that a schedule sets is that of the optimizer that steps.
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._held = [list(group["params"]) for group in optimizer.param_groups]
        self._norm = torch.zeros(())
        leave_out(self)
        leave_out(optimizer)

    @property
    def _zero(self) -> Any:
        return self._model.engine.optimizer

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Make a step of all ranks.

        Raises:
            FitError: a parameter has no gradient, or a gradient is not finite.
        """
        if unused := [name for name in self._model.names if name in self._model.unused]:
            raise FitError(
                "parameters took no part in the loss of a training step, and the ranks wait for "
                f"their gradients: {some_names(unused)}",
                allowed="a step that calls the model that it gets, and a model that uses every "
                "trainable parameter in every step",
                do="freeze them with requires_grad_(False), or set distributed.strategy: ddp and "
                "find_unused_parameters: true",
            )
        self._model.unused, self._model.stale = set(self._model.names), True
        self._model.engine.step()
        self._norm.fill_(float(self._model.engine.get_global_grad_norm()))
        self._norm = torch.zeros(())  # the one that clip returned keeps its value
        self._zero.clip_grad, self._zero.loss_scale = 0.0, 1.0
        if self._zero.overflow:
            raise FitError(
                "a gradient is not finite, and DeepSpeed makes no step with it",
                allowed="gradients that are numbers",
                do="lower optim.lr, set train.max_grad_norm: 1.0, or train in fp32",
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: a step clears the gradients.

        Raises:
            PlanError: there are gradients, of a backward pass without a step.
        """
        if len(self._model.unused) < len(self._model.names):
            raise PlanError(
                "zero_grad() after a backward pass without step(), and distributed.strategy: "
                "deepspeed has reduced its gradients already",
                allowed="step() after each backward pass, or accumulated ones",
                do="leave out the backward pass, or set distributed.strategy: ddp",
            )

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients in the next step (0: do not); returns their norm, known after it."""
        self._zero.clip_grad, self._norm = max_norm, torch.zeros(())
        return self._norm

    def scale(self, factor: float) -> None:
        """Multiply the gradients by ``factor`` in the next step."""
        self._zero.loss_scale = 1 / (factor or 1.0)

    def state_dict(self) -> dict[str, Any]:
        """See the class."""
        from deepspeed.utils import safe_get_full_optimizer_state

        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        number = 0
        self._link()
        for group, held, parts in zip(self.param_groups, self._held, self._parts(), strict=True):
            numbers = range(number, number + len(held))
            number += len(held)
            groups.append({**group, "params": [*numbers]})
            own = self._torch.state.get(parts[0], {})
            for index, one in zip(numbers, held, strict=True):
                if own and one.requires_grad:
                    state[index] = {}
                    for name, value in own.items():
                        divided = isinstance(value, Tensor) and value.ndim > 0
                        whole = safe_get_full_optimizer_state(one, name) if divided else value
                        state[index][name] = _on_cpu(whole) if self.keeps_state else None
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See the class.

        Raises:
            ValueError: it is the state of other groups.
        """
        saved, given = state_dict["param_groups"], state_dict["state"]
        if [len(group["params"]) for group in saved] != [len(held) for held in self._held]:
            raise ValueError("loaded state dict contains other parameter groups than the optimizer")
        moments: list[tuple[nn.Parameter, dict[str, Any]]] = []
        for group, other, held, parts in zip(
            self.param_groups, saved, self._held, self._parts(), strict=True
        ):
            kept = ("params", "fused", "foreach")  # of this device
            group.update({name: value for name, value in other.items() if name not in kept})
            found = [
                (one, given[index])
                for index, one in zip(other["params"], held, strict=True)
                if index in given
            ]
            for part in parts:
                self._torch.state[part] = {
                    name: torch.zeros_like(part.detach()) if _is_divided(value, one) else value
                    for one, values in found[:1]
                    for name, value in _copied(values).items()
                }
            moments += found
        self._link()
        for one, values in moments:
            for name, value in values.items():
                if _is_divided(value, one):
                    self._take(one, value, name)

    def _parts(self) -> list[list[Tensor]]:
        """This rank's flat parts of each group's parameters."""
        zero, groups = self._zero, range(len(self._held))
        if not hasattr(zero, "fp32_partitioned_groups_flat"):
            return [[one] for one in zero.single_partition_of_fp32_groups]
        of_group = zero.sub_group_to_group_id
        parts = list(enumerate(zero.fp32_partitioned_groups_flat))
        return [[one for number, one in parts if of_group[number] == group] for group in groups]

    def _link(self) -> None:
        """Let DeepSpeed find the state of all groups: it looks for it once, after one has stepped.

        Stage 3 always finds it.
        """
        if hasattr(self._zero, "_hp_optimizer_states_linked"):
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _take(self, parameter: nn.Parameter, value: Tensor, name: str) -> None:
        from deepspeed import utils

        value = value.to(parameter.device, torch.float32)
        if not hasattr(parameter, "ds_tensor"):
            utils.safe_set_full_optimizer_state(parameter, value, name)
            return
        # With all of a value DeepSpeed fails if the ranks' parts are not equal (0.19.8).
        size = parameter.ds_tensor.numel()
        padded = nn.functional.pad(value.flatten(), (0, size * self._ranks - value.numel()))
        part = padded[size * self._rank : size * (self._rank + 1)]
        utils.safe_set_local_optimizer_state(parameter, part, name)


def _is_divided(value: object, parameter: nn.Parameter) -> bool:
    """Whether a saved value of an optimizer's state has a number for each of the parameter's."""
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == shape


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one.clone() if isinstance(one, Tensor) else one for name, one in values.items()}


def _on_cpu(value: object) -> object:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
