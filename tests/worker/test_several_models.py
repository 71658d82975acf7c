"""The GAN of docs/own-loop/several-models.md: killed on one of two ranks, and resumed."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nbtoolkit as nb
from nbtoolkit.errors import WorkerDied

PAGE = Path(__file__).parents[2] / "docs/own-loop/several-models.md"

# Two epochs of six steps, with three backward passes in each step.
PASSES_IN_EPOCH = 18


def page() -> dict[str, Any]:
    """The names that the page's code defines, without its launches."""
    names: dict[str, Any] = {"__name__": "page_on_several_models"}
    for block in re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE.read_text()):
        if "nb.launch(" not in block:
            exec(compile(block, str(PAGE), "exec"), names)
    return names


def killed_once(train: Callable[..., Any], victim: int) -> Callable[..., Any]:
    """The page's function, of which a rank dies in the second epoch of the first attempt."""

    def dying(config: Any, ctx: Any) -> Any:
        marker = ctx.paths.folder / "killed"
        backward, passes = ctx.accelerator.backward, itertools.count(1)

        def counted(loss: Any) -> None:
            last_pass = next(passes) == PASSES_IN_EPOCH + 8
            if ctx.rank == victim and last_pass and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            backward(loss)

        ctx.accelerator.backward = counted
        return train(config, ctx)

    return dying


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_the_pages_gan_is_killed_and_resumed(tmp_path: Path, victim: int) -> None:
    names = page()
    settings = {
        **names["settings"],
        "train.epochs": 2,
        "runtime.output_dir": str(tmp_path),
        "runtime.restarts": 0,
    }
    launched: dict[str, Any] = {"config": settings, "processes": 2, "display": "off"}
    whole = nb.launch(names["dcgan"], **launched, resume="never")
    dying = killed_once(names["dcgan"], victim)
    with pytest.raises(WorkerDied):
        nb.launch(dying, **launched, name="killed")
    resumed = nb.launch(dying, **launched, name="killed")

    events = map(json.loads, resumed.paths.events.read_text().splitlines())
    reported = [event["step"] for event in events if event["type"] == "report"]
    assert reported == [0, 1]  # the first epoch was not trained again
    for name, weights in whole.value.items():
        for key, value in weights.items():
            assert torch.equal(resumed.value[name][key], value), f"{name} {key}"
