"""What an older torch cannot do is refused before the first step, with what to do."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from fits import configured, launch, model_of, samples
from torch.nn.functional import cross_entropy

import nbtoolkit as nb
from nbtoolkit.errors import FitError

pytestmark = pytest.mark.skipif(
    not version("torch").startswith("2.6."), reason="NOT TESTED: this torch is not 2.6"
)


def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    return nb.fit(ctx, config, model_of(), samples(12), None, loss=cross_entropy)


def test_fsdp_on_the_cpu_needs_a_newer_torch(tmp_path: Path) -> None:
    settings = {"runtime.output_dir": str(tmp_path), "distributed.strategy": "fsdp"}
    with pytest.raises(FitError, match=r"torch 2\.7 or newer"):
        launch(train, configured(overrides=settings))
