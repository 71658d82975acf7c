"""Notice loaders that nothing divides among the ranks: every rank then trains on all samples.

Imports torch; import it inside functions only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

# Attributes of samplers that divide samples: of torch, accelerate and Hugging Face.
_POSITIONS = ("rank", "num_replicas", "process_index", "num_processes")
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


class UndividedLoaders:
    """Watches the loaders that this rank iterates over with gradients, until it is closed.

    Args:
        warn: called once, at the first such loader of Lightning's: its Trainer divides samples only
            if it knows of the ranks.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._seen = self._divided = self._lightning = False
        self._iterate: Callable[[DataLoader[Any]], Iterator[Any]] = DataLoader.__iter__
        iterate = self._iterate
        note = self._note

        def noted(loader: DataLoader[Any]) -> Iterator[Any]:
            note(loader)
            return iterate(loader)

        setattr(DataLoader, "__iter__", noted)  # noqa: B010

    def close(self) -> None:
        """Stop watching."""
        setattr(DataLoader, "__iter__", self._iterate)  # noqa: B010

    def divide(self) -> None:
        """Note that something divides the samples: a sampler, ``ctx.prepare``, the user's code."""
        self._divided = True

    def warning(self, ranks: int) -> str | None:
        """Return a warning if all ranks have trained on all samples.

        None: they may have divided them.
        """
        if not self._seen or self._divided or self._lightning:
            return None
        return (
            f"each of the {ranks} ranks has trained on all samples: no loader was given to "
            "ctx.prepare, and no sampler divides the samples\n"
            "  Allowed: ranks that train on the same samples on purpose (runtime.compare_ranks: "
            "false says so)\n"
            "  Do now:  add `loader = ctx.prepare(loader)` before the loop, with the model and the "
            "optimizer; or use DistributedSampler(data)"
        )

    def _note(self, loader: DataLoader[Any]) -> None:
        if _divides(loader):
            self._divided = True
        elif torch.is_grad_enabled():
            self._seen = True
            if not self._lightning and (name := _lightning_class()):
                self._lightning = True
                self._warn(_lightning_warning(name))


def _divides(loader: DataLoader[Any]) -> bool:
    """Whether a loader divides its samples among the ranks, or may do so."""
    if isinstance(loader.dataset, IterableDataset):
        return True
    batches: Any = loader.batch_sampler
    samplers = [loader.sampler, batches, getattr(batches, "sampler", None)]
    if any(hasattr(sampler, name) for sampler in samplers for name in _POSITIONS):
        return True
    # Others may do anything.
    known = batches is None or type(batches) is BatchSampler
    return not known or not type(loader.sampler).__module__.startswith("torch.")


def _lightning_class() -> str:
    """Return the class of Lightning, on one rank, that iterates over a loader.

    "": there is none.
    """
    name = ""
    frame = sys._getframe(2).f_back
    while frame is not None:
        package, _, module = str(frame.f_globals.get("__name__", "")).partition(".")
        if package in _LIGHTNING:
            name = name or ("Fabric" if "fabric" in package + module else "Trainer")
            if getattr(frame.f_locals.get("self"), "world_size", 1) > 1:
                return ""
        frame = frame.f_back
    return name


def _lightning_warning(name: str) -> str:
    if name == "Fabric":
        do = 'Fabric(devices=ctx.world_size, strategy="ddp", ...), then fabric.launch()'
    else:
        do = (
            "lightning.Trainer(**nbl.trainer_arguments(ctx, ...)), with "
            "`from nbtoolkit.integrations import lightning as nbl`"
        )
    return (
        f"Lightning's {name} does not know of the other ranks: each rank trains a model of its own "
        f"on all samples\n  Do now:  {do}"
    )
