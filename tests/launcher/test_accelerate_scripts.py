"""accelerate's own test scripts pass under nb.launch, on two ranks."""

from __future__ import annotations

import importlib

import pytest
from launches import quiet

import nbtoolkit as nb

# What each script says on rank 0 only where it had two ranks, and what its last part says.
SAID = {
    "test_ops": ["Num processes: 2", "testing sending tensors across devices"],
    "test_sync": [
        "**Test Distributed `no_sync` context manager**",
        "**Test Distributed `no_sync` context manager with multiple forwards**",
    ],
    "test_script": [
        "Num processes: 2",
        "All rng are properly synched.",
        "**Test reinstantiated state**",
    ],
}


@pytest.mark.parametrize(
    "script",
    [
        "test_ops",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("test_sync", "test_script")),
    ],
)
def test_script_is_green_on_two_ranks(script: str, config: nb.Config) -> None:
    main = importlib.import_module(f"accelerate.test_utils.scripts.{script}").main
    result = quiet(lambda config, ctx: main(), config)

    logs = [result.paths.log(rank).read_text().splitlines() for rank in (0, 1)]
    assert result.values == [None, None]
    assert [line for line in SAID[script] if line not in logs[0]] == []
    said = {line for log in logs for line in log}
    assert "Num processes: 1" not in said  # a rank that took itself for all there are


def test_a_bare_partial_state_knows_of_both_ranks(config: nb.Config) -> None:
    def train(config, ctx):
        from accelerate import PartialState

        state = PartialState()
        return state.num_processes, state.process_index

    result = quiet(train, config)
    assert result.values == [(2, 0), (2, 1)]
