"""Seed every sample by (seed, epoch, sample), and save and restore a rank's random state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from nbtoolkit.training.sampler import mix

if TYPE_CHECKING:
    import torch


# --- seeding ---
# A sample's random numbers depend on (seed, epoch, sample), not on who loads it.


def seed_sample(seed: int, epoch: int, sample: int) -> None:
    """Begin Python's, NumPy's and torch's global streams (the CPU's) anew, for one sample."""
    import numpy as np
    import torch

    value = mix(seed, "sample", epoch, sample)
    random.seed(value)
    np.random.seed(value % 2**32)
    # torch.manual_seed would seed the GPU, too, where dropout draws from.
    torch.default_generator.manual_seed(value)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever draws or seeds inside: afterwards this process's streams are as they were (70 us).

    The model's own draws (dropout) then do not depend on where, and how far ahead, samples load.
    """
    import numpy as np
    import torch

    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)


# --- a rank's random state ---


Streams: TypeAlias = list[dict[str, Any]]
"""Every rank's, by rank."""


def seed_streams(device: torch.device, *parts: object) -> None:
    """Begin fresh streams (Python, NumPy, torch's on CPU and ``device``), decided by ``parts``."""
    import numpy as np
    import torch

    seed = mix(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Without a GPU in use torch.manual_seed notes the call, with its stack, for when there is one:
    # 1.4 ms, and kept for ever.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def take_streams(device: torch.device) -> dict[str, Any]:
    """Where this process's streams are: tensors and plain values."""
    import numpy as np
    import torch

    version, words, gauss = random.getstate()
    numbers = np.random.get_state(legacy=False)
    keys, position = numbers["state"]["key"], numbers["state"]["pos"]
    has_gauss, cached = numbers["has_gauss"], numbers["gauss"]
    streams = {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [torch.from_numpy(keys.astype(np.int64)), int(position), has_gauss, float(cached)],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        streams["cuda"] = torch.cuda.get_rng_state(device)
    return streams


def put_streams(streams: dict[str, Any], device: torch.device) -> None:
    """Go on with streams as :func:`take_streams` found them."""
    import numpy as np
    import torch

    version, words, gauss = streams["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    keys, position, has_gauss, cached = streams["numpy"]
    state = ("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached)
    np.random.set_state(state)
    torch.set_rng_state(streams["torch"])
    if device.type == "cuda" and "cuda" in streams:
        torch.cuda.set_rng_state(streams["cuda"], device)


def gather_streams(device: torch.device, ranks: int) -> Streams:
    """The streams of every rank, by rank; a collective when there are several."""
    import torch.distributed as dist

    mine = take_streams(device)
    if ranks == 1:
        return [mine]
    boxes: list[Any] = [None] * ranks
    dist.all_gather_object(boxes, mine)
    return boxes
