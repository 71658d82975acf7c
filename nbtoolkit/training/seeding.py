"""Seeding: a sample's random numbers depend on (seed, epoch, sample), not on who loads it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from nbtoolkit.training.order import mix


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
