"""The states of the global generators, read from memory to see whether a batch has drawn."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from nbtoolkit.worker.random_numbers import GeneratorStates, preserve_random_state

DRAWS: list[Callable[[], float]] = [
    random.random,
    lambda: float(np.random.rand()),
    lambda: float(torch.rand(())),
]


@pytest.mark.parametrize("draw", DRAWS, ids=["python", "numpy", "torch"])
@pytest.mark.parametrize("before", [0, 1, 311, 624])
def test_one_draw_is_noticed_and_taken_back(draw: Callable[[], float], before: int) -> None:
    with preserve_random_state():
        for _ in range(before):
            draw()
        states = GeneratorStates.now()
        assert states == GeneratorStates.now()
        first = draw()
        assert states != GeneratorStates.now()
        states.restore()
        assert states == GeneratorStates.now()
        assert draw() == first


@pytest.mark.parametrize("draw", DRAWS, ids=["python", "numpy", "torch"])
def test_a_whole_turn_of_the_generator_is_noticed(draw: Callable[[], float]) -> None:
    """After 624 words its position is the same again."""
    with preserve_random_state():
        draw()
        states = GeneratorStates.now()
        for _ in range(624):
            draw()
        assert states != GeneratorStates.now()
